"""Each text is encoded once: embeddings in memory, and on disk for other runs and processes."""

import hashlib
import json
import logging
import os
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from flow_grpo.data.images import digest
from flow_grpo.errors import UserError
from flow_grpo.pictures import Picture

logger = logging.getLogger(__name__)

Embedding = dict[str, Tensor]  # of one text, and of its pictures
IN_MEMORY = 2048  # prompts; for SD3.5 in half precision at most 3.5 GB, at 205 tokens
SAMPLES = 64  # values of each weight that are hashed in their order
# Increase it whenever `encode_one` of a family, or what it calls here, changes its result: files of
# earlier versions are then not used. 2: 3-D positions of images; rotary frequencies in float32.
ENCODING_VERSION = 2


class PromptCache:
    """The embeddings used last, in memory; with a `folder` all of them, one file per text.

    Safe to share: a file appears whole, under a name that says what it holds and by which model,
    which `identity` names.
    """

    def __init__(
        self, folder: Path | None = None, identity: str = "", in_memory: int = IN_MEMORY
    ) -> None:
        self._folder = folder
        self._identity = identity
        self._in_memory = in_memory
        self._recent: OrderedDict[str, Embedding] = OrderedDict()
        self._digests: dict[Picture, str] = {}
        self._can_write = folder is not None

    def name(self, text: str, pictures: tuple[Picture, ...]) -> str:
        """What stands for a text with pictures in the place of a text: these go by what is in them,
        which is looked at once."""
        for each in pictures:
            if each not in self._digests:
                self._digests[each] = digest(each)
        return "\0".join([*(self._digests[each] for each in pictures), text])

    def key(self, text: str) -> str:
        return hashlib.sha256(f"{self._identity} {text}".encode()).hexdigest()

    def path(self, text: str) -> Path:
        key = self.key(text)
        return self._folder / key[:2] / key[2:4] / f"{key}.safetensors"

    def find(self, texts: list[str]) -> dict[str, Embedding]:
        """Embeddings of the `texts` that are known."""
        found = {}
        for text in texts:
            embedding = self._recent.get(text)
            if embedding is None and self._folder is not None:
                embedding = _read(self.path(text))
            if embedding is not None:
                found[text] = embedding
                self._remember(text, embedding)
        return found

    def add(self, text: str, encoded: Embedding) -> Embedding:
        """Takes what the encoders gave for this one text, (1, ...) each; it is kept on the CPU,
        without the first dimension."""
        embedding = {name: tensor[0].cpu().contiguous() for name, tensor in encoded.items()}
        self._remember(text, embedding)
        if self._can_write:
            try:
                _write(self.path(text), embedding)
            except OSError as error:
                self._can_write = False  # one warning, not one per prompt
                logger.warning("prompt_cache: cannot write, going on without: %s", error)
        return embedding

    def _remember(self, text: str, embedding: Embedding) -> None:
        self._recent[text] = embedding
        self._recent.move_to_end(text)
        if len(self._recent) > self._in_memory:
            self._recent.popitem(last=False)


def cache_folder(name: str) -> Path:
    """Make it, so that a name that cannot work is refused before weights load."""
    try:
        Path(name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"prompt_cache={name!r} cannot be made a folder: {error}") from error
    return Path(name)


def identity(
    encoders: dict[str, nn.Module],
    tokenizers: dict[str, PreTrainedTokenizerBase | ProcessorMixin],
    *,
    device: torch.device,
    **settings: Any,
) -> str:
    """A hash of all that decides the bits of an embedding, besides the text. Not of paths."""
    facts = {
        "version": ENCODING_VERSION,
        "encoders": {name: _encoder_facts(module) for name, module in encoders.items()},
        "tokenizers": {name: _tokenizer_facts(part) for name, part in tokenizers.items()},
        "settings": settings,
        "arithmetic": _arithmetic(device),
    }
    return _hash(facts)


def _encoder_facts(module: nn.Module) -> dict[str, Any]:
    config = module.config  # diffusers' are dicts
    config = dict(config if isinstance(config, Mapping) else config.to_dict())
    config.pop("_name_or_path", None)
    return {
        "class": type(module).__name__,
        "config": config,
        "attention": getattr(module.config, "_attn_implementation", None),
        "weights": fingerprint(module),
    }


def _tokenizer_facts(part: PreTrainedTokenizerBase | ProcessorMixin) -> dict[str, Any]:
    tokenizer = part.tokenizer if isinstance(part, ProcessorMixin) else part
    backend = {}
    if tokenizer.is_fast:
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        for changes_with_use in ("truncation", "padding"):
            backend.pop(changes_with_use, None)
    return {
        "class": type(tokenizer).__name__,
        "vocabulary": tokenizer.get_vocab(),
        "special": tokenizer.special_tokens_map,
        "max_length": tokenizer.model_max_length,
        "padding_side": tokenizer.padding_side,
        "backend": backend,
        "template": part.chat_template,
    }


def _arithmetic(device: torch.device) -> list[Any]:
    """The same model gives other last bits on another device or with other libraries."""
    libraries = [torch.__version__, diffusers.__version__, transformers.__version__]
    versions = [*libraries, torch.get_float32_matmul_precision()]
    if device.type == "cuda":
        return [*versions, torch.cuda.get_device_name(device)]
    return [*versions, torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()]


@torch.no_grad()
def fingerprint(module: nn.Module) -> str:
    """Tells apart weights that differ in any value: sums of their bits, and some in order.

    Sums of integers are exact on any device and run at the speed of memory.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        values = tensor.detach().reshape(-1)
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {_sum(values)} ".encode())
        digest.update(_bytes(values[:: max(1, len(values) // SAMPLES)]))
    return digest.hexdigest()


def _sum(values: Tensor) -> int:
    """The bits summed as 64-bit integers that wrap around; odd bytes at the end one by one."""
    if values.storage_offset():
        values = values.clone()  # a view as integers has to be aligned
    data = values.view(torch.uint8)
    whole = len(data) // 8 * 8
    return data[:whole].view(torch.int64).sum().item() + data[whole:].sum().item()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _hash(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def _checksum(embedding: Embedding) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(embedding.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _read(path: Path) -> Embedding | None:
    try:
        with safe_open(path, "pt") as file:
            embedding = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            checksum = (file.metadata() or {}).get("sha256")
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError) as error:
        logger.warning("%s is damaged (%s); encoding its prompt again", path, error)
        return None
    # a file can have its full size and still not its data, after a crash
    if checksum != _checksum(embedding):
        logger.warning("%s is damaged (wrong checksum); encoding its prompt again", path)
        return None
    return embedding


def _write(path: Path, embedding: Embedding) -> None:
    data = save(embedding, {"sha256": _checksum(embedding)})
    path.parent.mkdir(parents=True, exist_ok=True)
    # of its own for every writer, and not by tempfile, whose files no other user can read
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        partial.write_bytes(data)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
