"""Convert weights of mixture-of-experts models to the layout of published checkpoints.

transformers 5 stores the experts of a layer in two fused tensors (E experts, I intermediate and H
hidden features):

    mlp.experts.gate_up_proj  (E, 2I, H)
    mlp.experts.down_proj     (E, H, I)

Published checkpoints have one matrix per expert and projection (Qwen3-MoE, Mixtral), or fused
tensors whose last two dimensions are swapped: (E, H, 2I) and (E, I, H) (Qwen3-VL-MoE). vLLM loads
the published layouts. For Qwen3-VL-MoE it swaps the dimensions of every fused tensor regardless of
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

FUSED_EXPERTS = re.compile(r"\.experts\.[a-z]\w*$")  # names of parameters of all experts of a layer
CONVERSIONS_ATTRIBUTE = "_weight_conversions"  # of a model; `save_pretrained` reverts them


def has_fused_experts(model: nn.Module) -> bool:
    return any(FUSED_EXPERTS.search(name) for name, _ in model.named_parameters())


def check_experts_convertible(model: nn.Module, source: str) -> None:
    """Reject a model whose weights cannot be sent to vLLM one at a time.

    Args:
        model: The model, possibly on the meta device.
        source: Value of `pretrained.model`.
    """
    if not has_fused_experts(model):
        return
    reason = "this version of transformers has no table of weight conversions"
    if get_model_conversion_mapping is not None:
        joined = [
            converter.target_patterns
            for converter in _published_conversions(model)
            if isinstance(converter, WeightConverter) and len(converter.target_patterns) > 1
        ]
        if not joined:
            return
        reason = f"published checkpoints join {' and '.join(joined[0])} in one tensor"
    raise UserError(
        f"is incompatible with the experts of pretrained.model={source!r}: {reason}",
        field="sample.engine",
        value="vllm",
        hint="use sample.engine='transformers'",
    )


def check_expert_files(model: nn.Module, source: str) -> None:
    """Reject a local directory whose fused experts have transformers' layout.

    vLLM reads the same files and needs the published layout. `model` may be on the meta device.
    """
    if not _has_transpose(_published_conversions(model)):
        return
    shapes = {
        name: list(p.shape) for name, p in model.named_parameters() if FUSED_EXPERTS.search(name)
    }
    for path in sorted(Path(source).glob("*.safetensors")):
        with suppress(OSError, SafetensorError), safe_open(path, "pt") as file:
            for name in shapes.keys() & set(file.keys()):
                rows, columns = shapes[name][-2:]
                if rows != columns and file.get_slice(name).get_shape() == shapes[name]:
                    raise UserError(
                        f"has experts in transformers' layout ({name} is {shapes[name]}), which "
                        "vLLM cannot load",
                        field="pretrained.model",
                        value=source,
                        hint="rewrite it with flow-grpo export, or use "
                        "sample.engine='transformers'",
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
    conversions = _published_conversions(model)
    for name, weight in weights:
        with _use_conversions(model, conversions):
            converted = revert_weight_conversion(model, {name: weight})
        yield from converted.items()


@contextmanager
def published_layout(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Make `model.save_pretrained` write the published layout in this context."""
    fused = [weight for name, weight in weights.items() if FUSED_EXPERTS.search(name)]
    if get_model_conversion_mapping is None:
        if fused:
            logger.warning("saving experts in transformers' own layout, which vLLM cannot load")
        yield
        return
    conversions = getattr(model, CONVERSIONS_ATTRIBUTE, None)
    conversions = (
        _published_conversions(model) if conversions is None else _without_shape_check(conversions)
    )
    if not (fused and _has_transpose(conversions)):
        yield
    elif any(weight.shape[-1] == weight.shape[-2] for weight in fused):
        # when loading the files, transformers could not distinguish the two layouts
        logger.warning(
            "saving experts with square matrices in transformers' own layout, which vLLM cannot "
            "load"
        )
        yield
    else:
        with _use_conversions(model, conversions):
            yield


def _published_conversions(model: nn.Module) -> list[Any]:
    """Return transformers' weight conversions from the published layout of the model's class."""
    # only some files have the prefix, so `save_pretrained` ignores these changes as well
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    return _without_shape_check(c for c in conversions if not isinstance(c, PrefixChange))


def _without_shape_check(conversions: Iterable[Any]) -> list[Any]:
    """Return copies whose transpositions are always reverted, whatever the shape of the weight."""
    copies = copy.deepcopy(list(conversions))
    for conversion in copies:
        for operation in _operations(conversion):
            if isinstance(operation, Transpose):
                operation.check_dims = False
    return copies


def _has_transpose(conversions: list[Any]) -> bool:
    return any(isinstance(op, Transpose) for each in conversions for op in _operations(each))


def _operations(conversion: Any) -> list[Any]:
    return conversion.operations if isinstance(conversion, WeightConverter) else []


@contextmanager
def _use_conversions(model: nn.Module, conversions: list[Any]) -> Iterator[None]:
    with preserve_conversions(model):
        setattr(model, CONVERSIONS_ATTRIBUTE, conversions)
        yield


@contextmanager
def preserve_conversions(model: nn.Module) -> Iterator[None]:
    """Context manager that restores the model's checkpoint conversions on exit.

    `save_pretrained` reverts these; transformers' `load_adapter` replaces them with those of the
    adapter's names.
    """
    missing = object()
    before = getattr(model, CONVERSIONS_ATTRIBUTE, missing)
    try:
        yield
    finally:
        if before is not missing:
            setattr(model, CONVERSIONS_ATTRIBUTE, before)
        elif hasattr(model, CONVERSIONS_ATTRIBUTE):
            delattr(model, CONVERSIONS_ATTRIBUTE)
