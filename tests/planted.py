"""Files that run code when they are unpickled, as an attacker would leave them."""

import hashlib
import json
import os
import pickle
from pathlib import Path

import torch


class Code:
    """Makes a folder when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


def plant(path: Path, trace: Path, *, zipped: bool) -> None:
    """As torch.save writes it, or as a plain pickle."""
    if zipped:
        torch.save({"state": Code(trace)}, path)
    else:
        path.write_bytes(pickle.dumps(Code(trace)))


def renew_manifest(checkpoint: Path) -> None:
    path = checkpoint / "state/files.json"
    manifest = {
        name: [len(content), hashlib.sha256(content).hexdigest()]
        for name in json.loads(path.read_text())
        for content in [(checkpoint / name).read_bytes()]
    }
    path.write_text(json.dumps(manifest))
