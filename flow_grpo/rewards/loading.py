"""Rewards with a network in them: their options, batches and place on a device; and networks,
tokenizers and weight files from disk or the hub, or an error that says what to do."""

import math
import pickle
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import StrictDataclassError
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from flow_grpo.access import check_access, refusal
from flow_grpo.errors import UserError, first_line
from flow_grpo.rewards.failure import Failed
from flow_grpo.rewards.protocol import Returned, Rows, Scorer
from flow_grpo.weights import (
    check_finite,
    check_implementations,
    check_loading_report,
    check_regular_files,
    quiet_transformers,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SCORE = "score"

Values = dict[str, torch.Tensor]  # by the names under which they are logged
Weights = dict[str, torch.Tensor]


@dataclass(kw_only=True, eq=False)
class FrozenModel(ABC):
    """A network for images in batches. The fields are the reward's options."""

    model: str  # hub id, or a local folder or file
    dtype: str = "float32"
    device: str = "cpu"
    batch_size: int = 16
    offload: bool = False  # between epochs the network waits in the memory of the CPU

    def __post_init__(self) -> None:
        self._check_options()
        self.network = self.load().eval().requires_grad_(False)
        if not self.offload:
            self.network.to(self.device)

    @abstractmethod
    def load(self) -> nn.Module:
        """The network, on the CPU, in the precision asked for."""

    def rest(self) -> None:
        """Called when the scores of an epoch are in: the trainer needs the memory now."""
        if self.offload:
            self.network.to("cpu")

    def parts(self, count: int) -> Iterator[slice]:
        """The batches that `count` images make."""
        return (slice(i, i + self.batch_size) for i in range(0, count, self.batch_size))

    def pixels(self, images: list[Image.Image]) -> torch.Tensor:
        pixels = self.image_processor(images=images, return_tensors="pt")["pixel_values"]
        return pixels.to(self.device, self.torch_dtype)  # (N, 3, H, W)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def _check_options(self) -> None:
        if self.dtype not in DTYPES:
            raise UserError(f"dtype={self.dtype!r} must be one of {', '.join(DTYPES)}")
        if not isinstance(self.batch_size, int) or self.batch_size < 1:
            raise UserError(f"batch_size={self.batch_size!r} must be a whole number, 1 or more")
        try:
            kind = torch.device(self.device).type
        except (RuntimeError, TypeError) as error:
            raise UserError(f"device={self.device!r} must read like cpu, cuda or cuda:0") from error
        if kind == "cuda" and not torch.cuda.is_available():
            raise UserError(f"device={self.device!r}, but torch sees no GPU here; use device=cpu")


@dataclass(kw_only=True, eq=False)
class ModelScorer(FrozenModel, Scorer):
    """Scores images by their prompts alone."""

    @abstractmethod
    def score_batch(self, images: list[Image.Image], prompts: list[str]) -> Values:
        """Values (N,) by name for RGB images: the reward under `SCORE`, others to be logged."""

    def processed(self, pixels: torch.Tensor) -> torch.Tensor:
        """What `pixels` gives, of (N, 3, H, W) in [0, 1] and with a gradient: the shorter side
        resized, the middle cut out."""
        processor, (height, width) = self.image_processor, pixels.shape[-2:]
        scale = processor.size["shortest_edge"] / min(height, width)
        size = int(height * scale), int(width * scale)
        resized = F.interpolate(pixels, size, mode="bicubic", antialias=True).clamp(0, 1)
        crop = processor.crop_size["height"], processor.crop_size["width"]
        top, left = ((own - kept) // 2 for own, kept in zip(size, crop, strict=True))
        middle = resized[..., top : top + crop[0], left : left + crop[1]]
        mean, std = (
            middle.new_tensor(values)[:, None, None]
            for values in (processor.image_mean, processor.image_std)
        )
        return ((middle - mean) / std).to(self.device, self.torch_dtype)

    def tokens(self, texts: list[str]) -> dict[str, torch.Tensor]:
        """As the text encoder takes them: the token ids and their mask, (N, max_length)."""
        options = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
        found = self.tokenizer(texts, max_length=self.max_length, **options).to(self.device)
        return {name: found[name] for name in ("input_ids", "attention_mask")}

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: Rows) -> Returned:
        if not images:
            return []
        self.network.to(self.device)
        with torch.inference_mode():
            batches = [
                self.score_batch([image.convert("RGB") for image in images[part]], prompts[part])
                for part in self.parts(len(images))
            ]
        values = {
            name: torch.cat([batch[name].float().cpu() for batch in batches]).tolist()
            for name in batches[0]
        }
        scores = [s if math.isfinite(s) else _failed(s, self.dtype) for s in values.pop(SCORE)]
        return (scores, values) if values else scores


def _failed(score: float, dtype: str) -> Failed:
    hint = "" if dtype == "float32" else f"; {dtype} may be too narrow for it, try float32"
    return Failed(f"the network gave {score}{hint}")


# What transformers, torch, safetensors and the hub raise over a source that is not what it
# should be.
LOAD_ERRORS = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ImportError,
    RuntimeError,
    ArithmeticError,
    SafetensorError,
    StrictDataclassError,
    pickle.UnpicklingError,
)


@contextmanager
def explained(option: str, source: str, kind: str, known: Iterable[str] = ()) -> Iterator[None]:
    """Turn what goes wrong while `source`, the value of `option`, is loaded into a UserError."""
    check_access(option, source, known=known)
    check_regular_files(option, source)
    try:
        yield
    except LOAD_ERRORS as error:
        cause = error.__cause__ if isinstance(error, StrictDataclassError) else error
        reason = first_line(cause or error)
        if isinstance(error, KeyError):
            reason = f"it has no {reason}"
        if "trust_remote_code" in str(error):
            raise UserError(
                f"{option}={source!r} brings Python code of its own, which is not run; name {kind} "
                "that transformers can load without it"
            ) from error
        if Path(source).exists():
            raise UserError(
                f"{option}={source!r} cannot be loaded as {kind} ({reason}); "
                "it must be what the model's authors published, or a copy by save_pretrained"
            ) from error
        raise UserError(
            refusal(error, option, source, known=known)
            or f"{option}={source!r} is no local path, and {kind} cannot be had from the hub under "
            f"that name ({reason}); without a network, give the path of a copy as {option}"
        ) from error


def load_network(
    network_class: type,
    source: str,
    *,
    dtype: torch.dtype,
    kind: str,
    weights: Weights | None = None,
    **options: Any,
) -> nn.Module:
    """`network_class` with the weights of `source`, or with `weights` if they come from a file of
    another format; then `options` must have the `config`."""
    if weights is None:
        options["config"] = _config(network_class, source, kind)
    else:
        options["state_dict"] = weights
    with explained("model", source, kind), quiet_transformers():
        network, report = network_class.from_pretrained(
            source if weights is None else None,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # the report has them
            trust_remote_code=False,
            **options,
        )
    # published files have tensors of parts that a reward does without
    check_loading_report("model", source, report, kind, allow_unexpected=True)
    check_finite(f"model={source!r}", network.state_dict().items())
    return network


def _config(network_class: type, source: str, kind: str) -> Any:
    from transformers import AutoConfig

    with explained("model", source, kind):
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        raw, _ = config.get_config_dict(source)
    if not isinstance(config, network_class.config_class):
        raise UserError(f"model={source!r} is a {config.model_type} model, and must be {kind}")
    check_implementations("model", source, raw)
    return config


def load_tokenizer(source: str, *, option: str, tokens: int, extra: tuple[str, ...] = ()) -> Any:
    """The tokenizer of `source` with `extra` tokens added, which must make up `tokens` in all."""
    from transformers import AutoTokenizer

    with explained(option, source, "a tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    tokenizer.add_tokens(list(extra), special_tokens=True)
    if len(tokenizer) != tokens:  # transformers 5 makes an empty one of a folder without files
        raise UserError(
            f"{option}={source!r} has a tokenizer of {len(tokenizer)} tokens, and the model knows "
            f"{tokens}; {option} must name the model that the tokenizer was made for"
        )
    return tokenizer


def image_processor_class() -> type:
    """CLIP's image processor that works with PIL, so that scores do not depend on whether
    torchvision, which resizes differently, is installed."""
    import transformers

    pil = getattr(transformers, "CLIPImageProcessorPil", None)  # transformers 5
    return pil or transformers.CLIPImageProcessor


def load_image_processor(source: str, *, option: str) -> Any:
    with explained(option, source, "an image processor"):
        return image_processor_class().from_pretrained(source)


def find_file(source: str, names: tuple[str, ...], *, option: str, kind: str) -> Path:
    """`source` is a file, or a folder or hub repository with a file of one of these names."""
    path = Path(source)
    if path.is_file():
        return path
    if path.is_dir():
        for name in names:
            if (path / name).is_file():
                return path / name
        raise UserError(f"{option}={source!r} has no {' or '.join(names)}; give the file's path")
    with explained(option, source, kind):
        return Path(hf_hub_download(source, names[0]))


def read_weights(path: Path) -> Weights:
    """A state dict from .safetensors or from torch.save; pickled code is not run."""
    if path.suffix == ".safetensors":
        return load_file(path)
    content = torch.load(path, map_location="cpu", weights_only=True)
    return content.get("state_dict", content)


def linear_head(weights: Weights, width: int) -> nn.Sequential:
    """One linear layer after the other, from `width` to one value, in float32.

    The heads of the aesthetic predictor and of ImageReward have dropout between the layers, which
    only training uses, and no activations.
    """
    head = nn.Sequential()
    for name in sorted((key for key in weights if key.endswith("weight")), key=_layer_number):
        outputs, inputs = weights[name].shape
        if inputs != width:
            raise ValueError(f"{name} takes {inputs} values and gets {width}")
        layer = nn.Linear(inputs, outputs)
        bias = weights[name.removesuffix("weight") + "bias"]
        layer.load_state_dict({"weight": weights[name], "bias": bias})
        head.append(layer)
        width = outputs
    if not head or width != 1:
        raise ValueError("its layers do not end in one value")
    return head


def _layer_number(name: str) -> list[int]:
    return [int(part) for part in name.split(".") if part.isdigit()]
