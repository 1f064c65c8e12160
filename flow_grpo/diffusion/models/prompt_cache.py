"""Cache of prompt embeddings, in memory and on disk, shared between runs and processes."""

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

from flow_grpo.data.images import image_digest
from flow_grpo.errors import UserError
from flow_grpo.images import ImageSource

logger = logging.getLogger(__name__)

Embedding = dict[str, Tensor]  # of one prompt with its source images
MAX_IN_MEMORY = 2048  # prompts; at most 3.5 GB for SD3.5 in half precision with 205 tokens
MAX_BYTES_IN_MEMORY = 8 * 2**30  # per process; 680 prompts of LTX-2, with 1024 tokens each
FINGERPRINT_SAMPLES = 64  # values per tensor that are hashed in order
# Increase whenever the result of any `encode_single` changes, to invalidate existing files.
# 2: 3-D positions of images; rotary frequencies in float32.
ENCODING_VERSION = 2


class PromptCache:
    """LRU cache of embeddings in memory, backed by one file per prompt if a `folder` is given.

    Several processes may share the directory: files are written atomically, and their names are
    hashes of the prompt and of `identity`, which identifies the encoders.
    """

    def __init__(
        self,
        folder: Path | None = None,
        identity: str = "",
        in_memory: int = MAX_IN_MEMORY,
        max_bytes: int = MAX_BYTES_IN_MEMORY,
    ) -> None:
        self._folder = folder
        self._identity = identity
        self._in_memory, self._max_bytes, self._bytes = in_memory, max_bytes, 0
        self._recent: OrderedDict[str, Embedding] = OrderedDict()
        self._digests: dict[ImageSource, str] = {}
        self._can_write = folder is not None

    def name(self, text: str, images: tuple[ImageSource, ...]) -> str:
        """Return the cache key of a prompt with the content digests of its images."""
        for image in images:
            if image not in self._digests:
                self._digests[image] = image_digest(image)
        return "\0".join([*(self._digests[image] for image in images), text])

    def key(self, text: str) -> str:
        """Return the hash that names a text's file, for these encoder weights."""
        return hashlib.sha256(f"{self._identity} {text}".encode()).hexdigest()

    def path(self, text: str) -> Path:
        key = self.key(text)
        return self._folder / key[:2] / key[2:4] / f"{key}.safetensors"

    def find(self, texts: list[str]) -> dict[str, Embedding]:
        """Return the cached embeddings among these keys."""
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
        """Store the embedding of one prompt.

        Args:
            text: Its key.
            encoded: Output of `encode_single`, (1, ...) each.

        Returns:
            The embedding on the CPU, without the batch dimension.
        """
        embedding = {name: tensor[0].cpu().contiguous() for name, tensor in encoded.items()}
        self._remember(text, embedding)
        if self._can_write:
            try:
                _write(self.path(text), embedding)
            except OSError as error:
                self._can_write = False  # warn once, not for every prompt
                logger.warning("prompt_cache: cannot write, caching in memory only: %s", error)
        return embedding

    def _remember(self, text: str, embedding: Embedding) -> None:
        """Add an embedding to those in memory, in place of the least recently used ones."""
        self._bytes += _num_bytes(embedding) - _num_bytes(self._recent.pop(text, {}))
        self._recent[text] = embedding
        while len(self._recent) > self._in_memory or self._bytes > self._max_bytes:
            _, oldest = self._recent.popitem(last=False)
            self._bytes -= _num_bytes(oldest)


def _num_bytes(embedding: Embedding) -> int:
    return sum(tensor.nbytes for tensor in embedding.values())


def make_cache_folder(name: str) -> Path:
    """Create the cache directory, so that an invalid path is rejected before weights are loaded."""
    try:
        Path(name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot be created as a directory: {error}", field="prompt_cache", value=name
        ) from error
    return Path(name)


def encoder_identity(
    encoders: dict[str, nn.Module],
    tokenizers: dict[str, PreTrainedTokenizerBase | ProcessorMixin],
    *,
    device: torch.device,
    **settings: Any,
) -> str:
    """Return a hash of everything except the prompt that determines the bits of an embedding.

    Args:
        encoders: Modules by component name.
        tokenizers: Tokenizers or processors by component name.
        device: Device that the encoders run on.
        **settings: Further JSON values to hash. Paths do not belong here.
    """
    facts = {
        "version": ENCODING_VERSION,
        "encoders": {name: _describe_encoder(module) for name, module in encoders.items()},
        "tokenizers": {name: _describe_tokenizer(part) for name, part in tokenizers.items()},
        "settings": settings,
        "arithmetic": _numeric_environment(device),
    }
    return _hash(facts)


def _describe_encoder(module: nn.Module) -> dict[str, Any]:
    """Return what identifies an encoder: class, config, attention and a hash of its weights."""
    config = module.config  # a dict for models of diffusers
    config = dict(config if isinstance(config, Mapping) else config.to_dict())
    config.pop("_name_or_path", None)
    return {
        "class": type(module).__name__,
        "config": config,
        "attention": getattr(module.config, "_attn_implementation", None),
        "weights": fingerprint(module),
    }


def _describe_tokenizer(part: PreTrainedTokenizerBase | ProcessorMixin) -> dict[str, Any]:
    """Return what determines a tokenizer's output, without state that changes with use."""
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


def _numeric_environment(device: torch.device) -> list[Any]:
    """Return what changes the last bits of a model's output: library versions and device."""
    libraries = [torch.__version__, diffusers.__version__, transformers.__version__]
    versions = [*libraries, torch.get_float32_matmul_precision()]
    if device.type == "cuda":
        return [*versions, torch.cuda.get_device_name(device)]
    return [*versions, torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()]


@torch.no_grad()
def fingerprint(module: nn.Module) -> str:
    """Return a hash that distinguishes weights which differ in any value.

    It covers the sum of each tensor's bits and a sample of its values in order. Integer sums are
    exact on any device and run at memory bandwidth.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        values = tensor.detach().reshape(-1)
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {_bit_sum(values)} ".encode())
        digest.update(_bytes(values[:: max(1, len(values) // FINGERPRINT_SAMPLES)]))
    return digest.hexdigest()


def _bit_sum(values: Tensor) -> int:
    """Return the sum of the data as wrapping 64-bit integers, plus the remaining bytes."""
    if values.storage_offset():
        values = values.clone()  # the integer view has to be aligned
    data = values.view(torch.uint8)
    aligned = len(data) // 8 * 8
    return data[:aligned].view(torch.int64).sum().item() + data[aligned:].sum().item()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _hash(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def _checksum(embedding: Embedding) -> str:
    """Return the SHA-256 of names, shapes, dtypes and bytes of an embedding's tensors."""
    digest = hashlib.sha256()
    for name, tensor in sorted(embedding.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _read(path: Path) -> Embedding | None:
    """Return a stored embedding; None if the file is missing or, with a warning, damaged."""
    try:
        with safe_open(path, "pt") as file:
            embedding = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            checksum = (file.metadata() or {}).get("sha256")
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError) as error:
        logger.warning("%s is damaged (%s); re-encoding its prompt", path, error)
        return None
    # After a crash, a file can have its full size but not its data.
    if checksum != _checksum(embedding):
        logger.warning("%s is damaged (wrong checksum); re-encoding its prompt", path)
        return None
    return embedding


def _write(path: Path, embedding: Embedding) -> None:
    """Write an embedding with its checksum, atomically."""
    data = save(embedding, {"sha256": _checksum(embedding)})
    path.parent.mkdir(parents=True, exist_ok=True)
    # Unique per writer; files of the tempfile module would not be readable by other users.
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        partial.write_bytes(data)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
