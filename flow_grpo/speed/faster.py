"""What makes a model that draws faster, and the order in which it is applied: `speed_up`."""

import warnings
from collections.abc import Iterable

import torch
from diffusers.models.activations import GELU
from peft.tuners import lora
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.nn import functional as F

from flow_grpo.speed.lora import fold_lora, is_plain
from flow_grpo.speed.replay import Replayed

# Share of a compiled block's activations that stay for its backward pass. Below 1 torch computes
# norms and the like again, at .75 also attention, which costs time.
ACTIVATIONS_KEPT = 0.95
HARMLESS = (
    "Dynamo detected a call to a `functools.lru_cache`",
    "TensorFloat32",
    "Torchinductor does not support code generation for complex operators",
)
Siblings = dict[str, tuple[tuple[str, ...], ...]]  # {name of a parent: names of its layers}


def speed_up(
    transformer: nn.Module,
    blocks: Iterable[nn.Module],
    siblings: Siblings,
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
    if not cudnn_attention:  # for all of this process, and before the compiler looks at it
        torch.backends.cuda.enable_cudnn_sdp(False)
    if fold:  # first: a folded layer has no products left that siblings could share
        fold_lora(transformer)
    if compiled:
        settle_compiler()
        fuse_gelu(transformer)  # layers become what they stay before a block with them is compiled
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


class FusedGELU(GELU):
    """A product and its GELU in one kernel, where nothing is kept for a backward pass."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return super().forward(hidden_states)
        weight, bias = self.proj.weight, self.proj.bias
        flat = hidden_states.to(weight.dtype).flatten(0, -2)
        out = torch._addmm_activation(bias, flat, weight.t(), use_gelu=True)
        return out.unflatten(0, hidden_states.shape[:-1])


def fuse_gelu(model: nn.Module) -> None:
    """For GPUs in half precision: elsewhere torch's fused GELU is another one, or slower."""
    for module in model.modules():
        if type(module) is GELU and type(module.proj) is nn.Linear and _is_fusible(module):
            module.__class__ = FusedGELU


def _is_fusible(module: GELU) -> bool:
    weight, bias = module.proj.weight, module.proj.bias
    half = weight.is_cuda and weight.dtype in (torch.float16, torch.bfloat16)
    return half and bias is not None and module.approximate == "tanh"


class SiblingLinear(lora.Linear):
    """LoRA on one of several layers that take the same input: its first product is done for all."""

    siblings: "_Siblings"

    def forward(self, x: Tensor) -> Tensor:
        out = self.base_layer(x)
        if self.disable_adapters:
            return out
        (name,) = self.active_adapters
        up = self.lora_B[name](self.siblings.down(self, x, name))
        return (out + up * self.scaling[name]).to(out.dtype)


class _Siblings:
    def __init__(self, layers: list[lora.Linear]) -> None:
        self.layers = layers
        self.input: Tensor | None = None
        self.waiting: dict[lora.Linear, Tensor] = {}

    def down(self, layer: lora.Linear, x: Tensor, name: str) -> Tensor:
        """`x` times the A of `layer`."""
        if x is not self.input or layer not in self.waiting:
            weight = torch.cat([sibling.lora_A[name].weight for sibling in self.layers])
            ranks = [sibling.r[name] for sibling in self.layers]
            parts = F.linear(x.to(weight.dtype), weight).split(ranks, -1)
            self.input, self.waiting = x, dict(zip(self.layers, parts, strict=True))
        part = self.waiting.pop(layer)
        if not self.waiting:
            self.input = None
        return part


def join_siblings(parent: nn.Module, names: tuple[str, ...]) -> None:
    """These children of `parent` take the same input."""
    layers = [getattr(parent, name, None) for name in names]
    if all(type(x) is lora.Linear and is_plain(x) and len(x.active_adapters) == 1 for x in layers):
        siblings = _Siblings(layers)
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
    # torch's cache on disk would give back code for another choice
    if not torch.backends.cuda.cudnn_sdp_enabled():
        torch.compiler.config.cache_key_tag = "without cuDNN's attention"
    for harmless in HARMLESS:
        warnings.filterwarnings("ignore", message=harmless, category=UserWarning)
