"""Files as an attacker would leave them."""

import hashlib
import json
import os
import pickle
import struct
import zlib
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


def png_header(width: int, height: int) -> bytes:
    """A PNG that says it is large, and has no pixels to show."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    start = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk
    return start + struct.pack(">I", zlib.crc32(chunk)) + b"\0\0\0\0IDAT\0\0\0\0"
