"""Weights of mixture-of-experts models in the layout of published checkpoints.

transformers 5 holds the experts of a layer in two fused tensors (E experts, I intermediate and H
hidden features):

    mlp.experts.gate_up_proj  (E, 2I, H)
    mlp.experts.down_proj     (E, H, I)

Published checkpoints have one matrix per expert and projection (Qwen3-MoE, Mixtral), or fused
tensors whose last two dimensions are swapped: (E, H, 2I) and (E, I, H) (Qwen3-VL-MoE). vLLM loads
the published layouts. For Qwen3-VL-MoE it swaps the dimensions of every fused tensor, whatever its
shape, before it splits gate from up (vLLM 0.32.0: vllm/model_executor/models/qwen3_vl_moe.py,
line 76, and vllm/model_executor/layers/fused_moe/routed_experts.py, lines 479 to 486 and 1041 to
1048).

transformers has a table of these conversions, and `save_pretrained` applies it in reverse, with one
exception: the reverse of `Transpose(check_dims=True)` compares a tensor with the parameter it came
from, finds the same shape, and does nothing. The functions here use copies of the conversions
without that comparison.

This is the one file that imports from transformers' loading code, which is not a public API.
"""

import copy
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from flow_grpo.errors import UserError

try:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        PrefixChange,
        Transpose,
        WeightConverter,
        revert_weight_conversion,
    )
except ImportError:  # another version of transformers
    get_model_conversion_mapping = None

logger = logging.getLogger("flow_grpo")

FUSED = re.compile(r"\.experts\.[a-z]\w*$")  # names of parameters of all experts of a layer
CONVERSIONS = "_weight_conversions"  # attribute of a model, which `save_pretrained` reverts


def has_fused_experts(model: nn.Module) -> bool:
    return any(FUSED.search(name) for name, _ in model.named_parameters())


def check_convertible(model: nn.Module, source: str) -> None:
    """Reject a model whose weights cannot be sent to vLLM one at a time; `model` may be on the
    meta device."""
    if not has_fused_experts(model):
        return
    reason = "this version of transformers has no table of weight conversions"
    if get_model_conversion_mapping is not None:
        joined = [
            converter.target_patterns
            for converter in _published(model)
            if isinstance(converter, WeightConverter) and len(converter.target_patterns) > 1
        ]
        if not joined:
            return
        reason = f"published checkpoints join {' and '.join(joined[0])} in one tensor"
    raise UserError(
        f"sample.engine='vllm' is incompatible with the experts of pretrained.model={source!r}: "
        f"{reason}; use sample.engine='transformers'"
    )


def check_files(model: nn.Module, source: str) -> None:
    """Reject a local folder whose fused experts have transformers' layout: vLLM reads the same
    files and needs the published one. `model` may be on the meta device."""
    if not _transposes(_published(model)):
        return
    own = {name: list(p.shape) for name, p in model.named_parameters() if FUSED.search(name)}
    for path in sorted(Path(source).glob("*.safetensors")):
        with suppress(OSError, SafetensorError), safe_open(path, "pt") as file:
            for name in own.keys() & set(file.keys()):
                rows, columns = own[name][-2:]
                if rows != columns and file.get_slice(name).get_shape() == own[name]:
                    raise UserError(
                        f"pretrained.model={source!r} has experts in transformers' layout ({name} "
                        f"is {own[name]}), which vLLM cannot load; rewrite the model with "
                        "flow-grpo export, or use sample.engine='transformers'"
                    )


def published_weights(
    model: nn.Module, weights: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Convert the weights of a model with fused experts to the published names and shapes.

    Weights of other models are passed through. One weight is converted at a time.
    """
    if not has_fused_experts(model):
        yield from weights
        return
    conversions = _published(model)
    for name, weight in weights:
        with _conversions(model, conversions):
            converted = revert_weight_conversion(model, {name: weight})
        yield from converted.items()


@contextmanager
def published_layout(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Context manager in which `model.save_pretrained` writes the published layout."""
    fused = [weight for name, weight in weights.items() if FUSED.search(name)]
    if get_model_conversion_mapping is None:
        if fused:
            logger.warning("experts are saved in transformers' own layout, which vLLM cannot load")
        yield
        return
    conversions = getattr(model, CONVERSIONS, None)
    conversions = _published(model) if conversions is None else _unchecked(conversions)
    if not (fused and _transposes(conversions)):
        yield
    elif any(weight.shape[-1] == weight.shape[-2] for weight in fused):
        # when loading the files, transformers could not tell the published layout from its own
        logger.warning(
            "experts of square matrices are saved in transformers' own layout, which vLLM cannot "
            "load"
        )
        yield
    else:
        with _conversions(model, conversions):
            yield


def _published(model: nn.Module) -> list[Any]:
    """The conversions from the published layout, however the model itself was loaded."""
    # A prefix is removed from some files and was never there in others, as in `save_pretrained`.
    every = get_model_conversion_mapping(model, add_legacy=False)
    return _unchecked(c for c in every if not isinstance(c, PrefixChange))


def _unchecked(conversions: Iterable[Any]) -> list[Any]:
    """Copies whose transpositions are reverted unconditionally."""
    copies = copy.deepcopy(list(conversions))
    for conversion in copies:
        for operation in _operations(conversion):
            if isinstance(operation, Transpose):
                operation.check_dims = False
    return copies


def _transposes(conversions: list[Any]) -> bool:
    return any(isinstance(op, Transpose) for each in conversions for op in _operations(each))


def _operations(conversion: Any) -> list[Any]:
    return conversion.operations if isinstance(conversion, WeightConverter) else []


@contextmanager
def _conversions(model: nn.Module, conversions: list[Any]) -> Iterator[None]:
    with kept_conversions(model):
        setattr(model, CONVERSIONS, conversions)
        yield


@contextmanager
def kept_conversions(model: nn.Module) -> Iterator[None]:
    """Context manager that restores the conversions which `save_pretrained` reverts. transformers'
    `load_adapter` replaces them with those of the adapter's names."""
    missing = object()
    before = getattr(model, CONVERSIONS, missing)
    try:
        yield
    finally:
        if before is not missing:
            setattr(model, CONVERSIONS, before)
        elif hasattr(model, CONVERSIONS):
            delattr(model, CONVERSIONS)
