"""Convert LoRAs to and from the tensor names of ComfyUI and kohya.

These formats have no config. The scale of each layer is a tensor `<layer>.alpha` in the file:

    W' = W + (alpha / rank) up @ down      # up (out, rank) = lora_B, down (rank, in) = lora_A

Without it ComfyUI uses the scale 1, whatever the metadata say. `to_kohya` writes the tensors
unchanged as `.lora_A.weight` and `.lora_B.weight`, so `from_kohya` returns them bit for bit.

Limits:
- DoRA is read but not written: ComfyUI divides by the norm of the base weight, PEFT and LyCORIS by
  that of the modified weight (ComfyUI comfy/weight_adapter/base.py:67).
- LoRAs of text encoders and tensors of other methods (LoHa, LoKr, `.diff`) are rejected.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft.utils.other import get_pattern_key
from torch import Tensor

from flow_grpo.diffusion.models.kohya_keys import FAMILY_KEYS, LoraKeys
from flow_grpo.errors import UserError
from flow_grpo.training.lora_files import IncompatibleWeights

DOWN, UP, ALPHA, MAGNITUDE = "lora_A.weight", "lora_B.weight", "alpha", "lora_magnitude_vector"
ENDINGS = {  # of tensor names in LoRA files
    ".lora_down.weight": DOWN,
    ".lora_up.weight": UP,
    ".lora_A.weight": DOWN,
    ".lora_B.weight": UP,
    ".lora_A.default.weight": DOWN,
    ".lora_B.default.weight": UP,
    ".lora.down.weight": DOWN,
    ".lora.up.weight": UP,
    ".alpha": ALPHA,
    ".dora_scale": MAGNITUDE,
}
# Prefixes of other programs; `lora_unet__` is that of Wan Fun (ComfyUI comfy/lora_convert.py:15).
KOHYA_PREFIXES = ("lora_unet__", "lora_unet_", "diffusion_model.", "lora_transformer_", "lycoris_")
PREFIXES = (*KOHYA_PREFIXES, "transformer.", "base_model.model.")
TEXT_ENCODER_PREFIXES = ("lora_te", "text_encoder")


def is_kohya(keys: Iterable[str]) -> bool:
    """Return whether a LoRA file with these tensors is not in the format of diffusers or PEFT."""
    return any(
        key.startswith((*KOHYA_PREFIXES, "lora_te"))
        or key.endswith((".alpha", ".dora_scale", ".lora_down.weight", ".lora_up.weight"))
        or key.endswith((".lora_A.default.weight", ".lora_B.default.weight"))
        for key in keys
    )


def to_kohya(
    state_dict: Mapping[str, Tensor],
    lora_config: Mapping[str, Any] | None,
    family: str,
    where: str | Path = "LoRA",
) -> dict[str, Tensor]:
    """Return the tensors of a LoRA under names that ComfyUI applies at full strength.

    ComfyUI loads each of the two transformers of Wan 2.2 A14B with its own LoRA file: convert
    the LoRA of each transformer on its own.

    Args:
        state_dict: LoRA of one transformer, by names such as
            "transformer_blocks.0.attn.to_q.lora_A.weight".
        lora_config: Fields of its LoraConfig; None for a LoRA without config, whose scale is 1.
        family: Name of the pipeline class.
        where: Path of the LoRA, for messages.

    Raises:
        UserError: If ComfyUI cannot represent the LoRA.
    """
    keys, settings = _family_keys(family, where), dict(lora_config or {})
    if settings.get("use_dora") or any(MAGNITUDE in name for name in state_dict):
        raise UserError(
            "uses DoRA, which ComfyUI computes differently",
            field=where,
            hint="use merged weights instead",
        )
    matrices: dict[str, list[_Layer | None]] = {}
    for name, layer in _layers(state_dict, where).items():
        if (found := keys.key(name)) is None:
            raise UserError(f"has a LoRA on {name}, which has no name in ComfyUI", field=where)
        key, index, count = found
        layer.alpha = _kohya_alpha(name, len(layer.down), settings)
        matrices.setdefault(key, [None] * count)[index] = layer
    converted = {}
    for key, parts in matrices.items():
        layer = _fuse(key, parts, where)
        converted[f"{key}.{DOWN}"] = layer.down
        converted[f"{key}.{UP}"] = layer.up
        converted[f"{key}.{ALPHA}"] = torch.tensor(layer.alpha, dtype=torch.float32)
    return converted


def from_kohya(
    tensors: Mapping[str, Tensor], family: str, where: str | Path = "LoRA"
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the LoRA in a file of ComfyUI, kohya or another trainer, in the format of PEFT.

    Args:
        tensors: Content of the file, with names of diffusers or of the original checkpoint.
        family: Name of the pipeline class.
        where: Path of the file, for messages.

    Returns:
        The tensors, by names such as "transformer_blocks.0.attn.to_q.lora_A.weight", and the
        fields of a LoraConfig.

    Raises:
        UserError: If any tensor is not a part of a LoRA of this family.
    """
    keys = _family_keys(family, where)
    found: dict[str, _Layer] = {}
    for name, layer in _layers(tensors, where).items():
        for part, rows in _split(keys, family, name, layer, where).items():
            if part in found:
                raise UserError(f"has two LoRAs on {part}", field=where)
            if rows is not None:
                found[part] = rows
    magnitudes = {f"{n}.{MAGNITUDE}": x.magnitude for n, x in found.items()}
    magnitudes = {n: tensor for n, tensor in magnitudes.items() if tensor is not None}
    if len(magnitudes) not in (0, len(found)):
        raise UserError("has a .dora_scale for some layers only", field=where)
    state_dict = {f"{name}.{DOWN}": layer.down for name, layer in found.items()}
    state_dict |= {f"{name}.{UP}": layer.up for name, layer in found.items()}
    return state_dict | magnitudes, _lora_config(found)


@dataclass
class _Layer:
    """The LoRA tensors of one layer."""

    down: Tensor  # (rank, in)
    up: Tensor  # (out, rank)
    alpha: float
    magnitude: Tensor | None = None  # (out,), of DoRA

    def rows(self, index: Tensor) -> "_Layer":
        """Return the LoRA of some rows of the weight."""
        magnitude = None if self.magnitude is None else self.magnitude[index]
        return _Layer(self.down.clone(), self.up[index], self.alpha, magnitude)


def _family_keys(family: str, where: str | Path) -> LoraKeys:
    """Return the layer names of a family; raise a UserError if it is not supported."""
    if family not in FAMILY_KEYS:
        raise UserError(
            f"cannot be converted between the formats of diffusers and ComfyUI for {family}",
            field=where,
            hint=f"supported are {', '.join(FAMILY_KEYS)}",
        )
    return FAMILY_KEYS[family]


def _layers(tensors: Mapping[str, Tensor], where: str | Path) -> dict[str, _Layer]:
    """Return the LoRA of each layer, by its full name in the file."""
    grouped: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith(TEXT_ENCODER_PREFIXES):
            raise UserError(
                f"has {name}, but LoRAs of text encoders are not supported",
                field=where,
                hint="use a LoRA of the transformer only",
            )
        ending = next((each for each in ENDINGS if name.endswith(each)), None)
        if ending is None:
            raise UserError(f"has {name}, which is not a tensor of a LoRA", field=where)
        layer = grouped.setdefault(name.removesuffix(ending), {})
        if ENDINGS[ending] in layer:
            raise UserError(f"has {name} under two names", field=where)
        layer[ENDINGS[ending]] = tensor
    if not grouped:
        raise UserError("has no tensors", field=where)
    return {name: _check_layer(name, found, where) for name, found in grouped.items()}


def _check_layer(name: str, found: dict[str, Tensor], where: str | Path) -> _Layer:
    """Check the tensors of one layer; `found` has them by their names in PEFT."""
    down, up, alpha, magnitude = (found.get(each) for each in (DOWN, UP, ALPHA, MAGNITUDE))
    if down is None or up is None:
        raise UserError(f"has only a part of the LoRA on {name}", field=where)
    if not down.ndim == up.ndim == 2 or up.shape[1] != len(down):
        shapes = f"{tuple(down.shape)} and {tuple(up.shape)}"
        raise UserError(f"has {name} with shapes {shapes}, which do not multiply", field=where)
    scale = float(len(down))
    if alpha is not None:
        if alpha.numel() != 1 or not math.isfinite(alpha.item()):
            raise UserError(f"has {name}.alpha, which must be one finite number", field=where)
        scale = float(alpha.item())
    if magnitude is not None and magnitude.shape not in ((len(up),), (len(up), 1)):
        raise UserError(
            f"has {name}.dora_scale with shape {tuple(magnitude.shape)}, but only magnitudes of "
            f"the {len(up)} outputs are supported",
            field=where,
        )
    return _Layer(down, up, scale, None if magnitude is None else magnitude.flatten())


def _split(
    keys: LoraKeys, family: str, name: str, layer: _Layer, where: str | Path
) -> dict[str, _Layer | None]:
    """Return the LoRA of each layer of diffusers that `name` in a file refers to."""
    prefix = next((each for each in PREFIXES if name.startswith(each)), "")
    if (match := keys.find(name.removeprefix(prefix))) is None:
        raise IncompatibleWeights(f"has {name}, which is no layer of {family}", field=where)
    parts, swap = match
    if len(parts) > 1:
        return dict(zip(parts, _split_rows(name, layer, len(parts), where), strict=True))
    if swap and len(layer.up) == 2 * layer.down.shape[1]:
        layer = layer.rows(torch.arange(len(layer.up)).roll(layer.down.shape[1]))
    return {parts[0]: layer}


def _fuse(key: str, parts: list[_Layer | None], where: str | Path) -> _Layer:
    """Return one LoRA for a matrix whose rows are several layers.

    Each layer has its own columns of `up`, so that the product is that of the layers. A layer
    without LoRA has zeros.
    """
    given = [part for part in parts if part is not None]
    if len(parts) == 1:
        return given[0]
    first = given[0]
    if any(p.up.shape != first.up.shape or p.alpha != first.alpha for p in given):
        raise UserError(f"has LoRAs of different rank or alpha on the layers of {key}", field=where)
    none = _Layer(torch.zeros_like(first.down), torch.zeros_like(first.up), first.alpha)
    filled = [none if part is None else part for part in parts]
    up = torch.block_diag(*(part.up for part in filled))
    return _Layer(torch.cat([part.down for part in filled]), up, first.alpha * len(parts))


def _split_rows(name: str, layer: _Layer, count: int, where: str | Path) -> list[_Layer | None]:
    """Split the LoRA of a matrix into those of its `count` layers; None: no LoRA.

    The result of `_fuse` is split exactly. Otherwise each layer gets all of `down`.
    """
    rows, rank = len(layer.up), len(layer.down)
    sizes = [rows // count] * count
    if count == 4:  # FLUX.1: q, k and v have the width of the input, the rest is the MLP
        width = layer.down.shape[1]
        sizes = [width] * 3 + [rows - 3 * width]
    if sum(sizes) != rows or min(sizes) <= 0:
        raise IncompatibleWeights(f"has {name} with {rows} rows, which do not split", field=where)
    parts = [layer.rows(index) for index in torch.arange(rows).split(sizes)]
    if rank % count:
        return list(parts)
    blocks = torch.arange(rank).chunk(count)
    outside = [torch.cat([b for b in blocks if b is not block]) for block in blocks]
    if any(part.up[:, others].any() for part, others in zip(parts, outside, strict=True)):
        return list(parts)
    exact = [
        _Layer(
            part.down[block], part.up[:, block].contiguous(), layer.alpha / count, part.magnitude
        )
        for part, block in zip(parts, blocks, strict=True)
    ]
    return [part if part.down.any() or part.up.any() else None for part in exact]


def _kohya_alpha(layer: str, rank: int, settings: Mapping[str, Any]) -> float:
    """Return the alpha that has, divided by the rank, the scale of this layer in PEFT."""
    if not settings:
        return rank
    pattern = settings.get("alpha_pattern") or {}
    alpha = pattern.get(get_pattern_key(pattern, layer), settings["lora_alpha"])
    return alpha * math.sqrt(rank) if settings.get("use_rslora") else alpha


def _lora_config(layers: Mapping[str, _Layer]) -> dict[str, Any]:
    """Return the fields of a LoraConfig; layers are matched by their full names."""
    ranks = {name: len(layer.down) for name, layer in layers.items()}
    alphas = {
        name: int(layer.alpha) if layer.alpha.is_integer() else layer.alpha
        for name, layer in layers.items()
    }
    config: dict[str, Any] = {"target_modules": "|".join(map(re.escape, layers))}
    for field, values in (("r", ranks), ("lora_alpha", alphas)):
        config[field] = common = Counter(values.values()).most_common(1)[0][0]
        others = {f"^{re.escape(n)}": value for n, value in values.items() if value != common}
        if others:
            config["rank_pattern" if field == "r" else "alpha_pattern"] = others
    if any(layer.magnitude is not None for layer in layers.values()):
        config["use_dora"] = True
    return config
