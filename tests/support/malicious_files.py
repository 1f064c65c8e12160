"""Malicious files: pickles with code, decompression bombs, and models with remote code."""

import hashlib
import json
import os
import pickle
import struct
import zlib
from pathlib import Path

import torch


class MaliciousObject:
    """Object that creates a directory when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


def write_malicious_pickle(path: Path, trace: Path, *, zipped: bool) -> None:
    """Write a pickle that executes code, in the zip format of `torch.save` or as a plain pickle."""
    if zipped:
        torch.save({"state": MaliciousObject(trace)}, path)
    else:
        path.write_bytes(pickle.dumps(MaliciousObject(trace)))


def rewrite_manifest(checkpoint: Path) -> None:
    """Update the sizes and checksums of a checkpoint's files in its manifest."""
    path = checkpoint / "state/files.json"
    manifest = {
        name: [len(content), hashlib.sha256(content).hexdigest()]
        for name in json.loads(path.read_text())
        for content in [(checkpoint / name).read_bytes()]
    }
    path.write_text(json.dumps(manifest))


def png_header(width: int, height: int) -> bytes:
    """Return a PNG with a header of this size and no pixel data."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    start = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk
    return start + struct.pack(">I", zlib.crc32(chunk)) + b"\0\0\0\0IDAT\0\0\0\0"


def write_model_with_code(folder: Path, trace: Path, file: str, kind: str) -> Path:
    """Add a Python file to a model directory, and an `auto_map` in `file` that refers to it.

    Args:
        kind: The auto class of transformers that would execute the code, such as AutoConfig.
    """
    path = folder / file
    config = json.loads(path.read_text())
    unknown = {"model_type": "planted", "tokenizer_class": "Planted", "image_processor_type": "P"}
    config |= {name: value for name, value in unknown.items() if name in config}
    names = {kind: "planted.Planted", "AutoConfig": "planted.PlantedConfig"}
    names |= {"AutoTokenizer": ["planted.Planted", None]}
    path.write_text(json.dumps({**config, "auto_map": names}))
    path.with_name("planted.py").write_text(f"import os\n\nos.mkdir({str(trace)!r})\n")
    return folder


def write_pipeline_with_code(folder: Path, trace: Path, part: str, *kind: str) -> Path:
    """Set the library and class of a pipeline component, and add a Python file to its directory."""
    path = folder / "model_index.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), part: kind}))
    directory = folder if part == "_class_name" else folder / part
    (directory / "planted.py").write_text(f"import os\n\nos.mkdir({str(trace)!r})\n")
    return folder
