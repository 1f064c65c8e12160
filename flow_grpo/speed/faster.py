"""What makes a model that draws faster, and the order in which it is applied: `speed_up`."""

import hashlib
import sys
import warnings
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from peft.tuners import lora
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.nn import functional as F

from flow_grpo.speed.compiler import OPEN
from flow_grpo.speed.gelu import replace_gelu
from flow_grpo.speed.lora import fold_lora, is_plain
from flow_grpo.speed.replay import Replayed
from flow_grpo.speed.siblings import Siblings

# Share of a compiled block's activations that stay for its backward pass. Below 1 torch computes
# norms and the like again, at .75 also attention, which costs time.
ACTIVATIONS_KEPT = 0.88
HARMLESS = (
    "Dynamo detected a call to a `functools.lru_cache`",
    "TensorFloat32",
    "Torchinductor does not support code generation for complex operators",
)
Groups = dict[str, tuple[tuple[str, ...], ...]]  # of siblings: {a parent's name: its layers'}


def speed_up(
    transformer: nn.Module,
    blocks: Iterable[nn.Module],
    siblings: Groups,
    decoder: nn.Module | None,
    *,
    cudnn_attention: bool,
    fold: bool,
    compiled: bool,
    graphs: bool,
) -> None:
    """Apply all that was asked for, from the next call on. Call it once, when the model has its
    LoRA and its precision: every line below counts on those above it.

    `blocks` do most of the transformer's work, `siblings` are layers of a block that take the same
    input, `decoder` is that of a VAE which is worth compiling.
    """
    # for all of this process, and before the compiler looks at it
    if not give_dense_gradients(transformer) and not cudnn_attention:
        torch.backends.cuda.enable_cudnn_sdp(False)
    if fold:  # first: a folded layer has no products left that siblings could share
        fold_lora(transformer)
    if compiled:
        settle_compiler()
        # layers become what they stay before a block with them is compiled
        replace_gelu(transformer)
        for block in blocks:  # one by one: they are alike, so that few of them take time to compile
            for parent, groups in siblings.items():
                for names in groups:
                    join_siblings(getattr(block, parent), names)
            block.compile(fullgraph=True, dynamic=False)
        if decoder is not None:
            channels_last_norms(decoder)
            decoder.compile(dynamic=False)
    if graphs:  # last: they record whatever the transformer is by now, its precision included
        transformer.forward = Replayed(transformer)


class _DenseGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


DISPATCH = "dispatch_attention_fn"  # of diffusers, in the file of each model


def give_dense_gradients(transformer: nn.Module) -> bool:
    """Make the gradients that reach attention contiguous: of a slice of a wider tensor cuDNN makes
    wrong ones without a word (torch 2.11). Whether all of the model's attention has them so."""
    processors = [m.processor for m in transformer.modules() if hasattr(m, "processor")]
    files = {sys.modules[type(processor).__module__] for processor in processors}
    for file in files:
        if hasattr(file, DISPATCH) and not hasattr(getattr(file, DISPATCH), "is_dense"):
            setattr(file, DISPATCH, _dense(getattr(file, DISPATCH)))
    return bool(files) and all(hasattr(file, DISPATCH) for file in files)


def _dense(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(plain)
    def attend(*args: Any, **settings: Any) -> Tensor:
        return _DenseGradient.apply(plain(*args, **settings))

    attend.is_dense = True
    return attend


class SiblingLinear(lora.Linear):
    """LoRA on one of several layers that take the same input: its first product is done for all."""

    siblings: Siblings

    def forward(self, x: Tensor) -> Tensor:
        out = self.base_layer(x)
        if self.disable_adapters:
            return out
        (name,) = self.active_adapters

        def down(x: Tensor) -> tuple[Tensor, ...]:
            layers = self.siblings.layers
            weight = torch.cat([sibling.lora_A[name].weight for sibling in layers])
            return F.linear(x.to(weight.dtype), weight).split([s.r[name] for s in layers], -1)

        up = self.lora_B[name](self.siblings.part(self, x, down))
        return (out + up * self.scaling[name]).to(out.dtype)


def join_siblings(parent: nn.Module, names: tuple[str, ...]) -> None:
    """These children of `parent` take the same input."""
    layers = [getattr(parent, name, None) for name in names]
    if all(type(x) is lora.Linear and is_plain(x) and len(x.active_adapters) == 1 for x in layers):
        siblings = Siblings(layers)
        for layer in layers:
            layer.__class__ = SiblingLinear
            layer.siblings = siblings


class ChannelsLastNorm(nn.GroupNorm):
    """Sums over the places of each channel first, as they lie in memory, and then over its group:
    what torch makes of the plain layer reads with gaps."""

    def forward(self, x: Tensor) -> Tensor:
        size = self.num_channels // self.num_groups
        flat = x.flatten(2).float()
        # counted from some value of the group: far from zero, squares would cancel each other
        zero = flat[:, ::size, 0]
        away = flat - zero.repeat_interleave(size, 1)[:, :, None]
        mean, square = (
            moment.unflatten(1, (self.num_groups, size)).mean(2, keepdim=True)
            for moment in (away.mean(2), away.square().mean(2))
        )
        weight, bias = (p.float().view(self.num_groups, size) for p in (self.weight, self.bias))
        scale = weight * torch.rsqrt((square - mean**2).clamp(min=0) + self.eps)
        shift = bias - (mean + zero[:, :, None]) * scale
        shape = (*x.shape[:2], *(1,) * (x.ndim - 2))
        return (x.float() * scale.view(shape) + shift.view(shape)).to(x.dtype)


def channels_last_norms(model: nn.Module) -> None:
    for module in model.modules():
        if type(module) is nn.GroupNorm and module.affine:
            module.__class__ = ChannelsLastNorm


def settle_compiler() -> None:
    # several kinds of blocks; with and without gradients, LoRA and evaluation's batch size
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    # it would cut each block in two, to send gradients of half a block sooner
    torch._dynamo.config.optimize_ddp = False
    functorch_config.activation_memory_budget = ACTIVATIONS_KEPT
    # here: they take two seconds
    from torch._inductor.decomposition import decompositions, fast_random_decomps
    from torch._inductor.lowering import needs_realized_inputs

    from flow_grpo.speed.rows import hold_whole_rows

    hold_whole_rows()
    # else what goes into several products in 8 bits is written for each of them
    needs_realized_inputs.add(torch.ops.aten._scaled_mm.default)
    decompositions.update(OPEN)
    fast_random_decomps.cache_clear()  # a copy, from the first time that anything was compiled
    torch.compiler.config.cache_key_tag = _what_decides()
    for harmless in HARMLESS:
        warnings.filterwarnings("ignore", message=harmless, category=UserWarning)


def _what_decides() -> str:
    """What torch's cache on disk does not see of the code that it keeps: these files, with our
    operators and choices, and whether attention may be cuDNN's."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    return f"{digest[:16]}, cuDNN's attention: {torch.backends.cuda.cudnn_sdp_enabled()}"
