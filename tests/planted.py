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


def plant_code(folder: Path, trace: Path, file: str, kind: str) -> Path:
    """A model's folder with Python code, which `file` says is needed for its `kind`: AutoConfig or
    another of transformers' classes."""
    path = folder / file
    config = json.loads(path.read_text())
    unknown = {"model_type": "planted", "tokenizer_class": "Planted", "image_processor_type": "P"}
    config |= {name: value for name, value in unknown.items() if name in config}
    names = {kind: "planted.Planted", "AutoConfig": "planted.PlantedConfig"}
    names |= {"AutoTokenizer": ["planted.Planted", None]}
    path.write_text(json.dumps({**config, "auto_map": names}))
    path.with_name("planted.py").write_text(f"import os\n\nos.mkdir({str(trace)!r})\n")
    return folder


def plant_part(folder: Path, trace: Path, part: str, *kind: str) -> Path:
    """A pipeline's folder that says that a part is of a class of this library and name."""
    path = folder / "model_index.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), part: kind}))
    place = folder if part == "_class_name" else folder / part
    (place / "planted.py").write_text(f"import os\n\nos.mkdir({str(trace)!r})\n")
    return folder
