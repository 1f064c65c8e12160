"""Frozen weights in 8 or 4 bits, one copy of them: sampling and training run the same layers, and
so are one policy."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from flow_grpo.config.fields import FULL
from flow_grpo.errors import UserError
from flow_grpo.speed.compiler import OPEN, missing_tool

FP8, NF4 = "fp8", "nf4"
LARGEST = 448.0  # of a float8_e4m3fn
BLOCK = 64  # weights that share a scale in 4 bits
SIDES = 16  # a product in 8 bits takes sides that are a multiple of this


def check_precision(setting: str, precision: str, device: torch.device) -> None:
    """Refuse what the GPU cannot compute; `setting` is named in the error."""
    if precision == FP8 and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 9):
            raise UserError(
                f"{setting}='fp8' needs a GPU of compute capability 8.9 or more "
                f"(RTX 40, L4, H100), and this one has {capability[0]}.{capability[1]}; use 'nf4'"
            )


def to_low_bits(
    modules: Iterable[nn.Module], precision: str, device: torch.device, *, keep_full: bool = False
) -> None:
    """Take the linear layers of frozen `modules` to `device` one by one, so that it never holds all
    of them at full precision. With `keep_full` the CPU keeps what they were."""
    if precision == FULL:
        return
    kind = {FP8: Fp8Linear, NF4: Nf4Linear}[precision]
    for layer in [x for module in modules for x in module.modules() if type(x) is nn.Linear]:
        if kind.fits(*layer.weight.shape):
            weight = layer.weight.detach()
            layer.full = _on_host(weight) if keep_full else None
            # parameters, not buffers, which DDP would send to all processes in every pass
            for name, tensor in kind.stored(weight.to(device)).items():
                setattr(layer, name, nn.Parameter(tensor, requires_grad=False))
            # empty, and of the precision to compute in, which libraries look up here
            layer.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)
            layer.__class__ = kind


def _on_host(weight: Tensor) -> Tensor:
    return weight.pin_memory() if torch.cuda.is_available() else weight


class LowBitLinear(nn.Linear):
    """A frozen layer whose `low` and `scale` stand for its weight."""

    low: Tensor
    scale: Tensor
    full: Tensor | None  # on the host
    is_full = False  # whether `full` is computed with

    @staticmethod
    def fits(rows: int, columns: int) -> bool:
        """Whether a weight of this shape can be stored."""
        raise NotImplementedError

    @staticmethod
    def stored(weight: Tensor) -> dict[str, Tensor]:
        """What stands for it, by name."""
        raise NotImplementedError

    def product(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def widened(self) -> Tensor:
        """The weight (N, K) that it stands for, in the precision to compute in."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if self.is_full:
            weight = self.full.to(x.device, x.dtype, non_blocking=True)
            return F.linear(x, weight, self.bias)
        return self.product(x)


@contextmanager
def stored_as_before(module: nn.Module) -> Iterator[None]:
    """Context in which libraries may cast all of a module; what stands for weights stays."""
    held = [
        (stored, stored.data)
        for layer in module.modules()
        if isinstance(layer, LowBitLinear)
        for name, stored in layer.named_parameters(recurse=False)
        if name not in ("weight", "bias")
    ]
    try:
        yield
    finally:
        for stored, data in held:
            stored.data = data


@contextmanager
def at_full_precision(module: nn.Module) -> Iterator[None]:
    """Compute with the weights that the host has kept, which are sent layer by layer."""
    layers = [x for x in module.modules() if isinstance(x, LowBitLinear) and x.full is not None]
    if not layers:
        yield
        return
    usual = module.forward
    module.forward = getattr(usual, "plain", usual)  # of a recording
    for layer in layers:
        layer.is_full = True
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        module.forward = usual
        for layer in layers:
            layer.is_full = False


class Fp8Linear(LowBitLinear):
    """e4m3, with a scale for each output; inputs and gradients have one for each row."""

    @staticmethod
    def fits(rows: int, columns: int) -> bool:
        return not (rows % SIDES or columns % SIDES)

    @staticmethod
    def stored(weight: Tensor) -> dict[str, Tensor]:
        rows, scale = rows_in_8_bits(weight)
        return {"low": rows, "scale": scale.t().contiguous()}

    def product(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        rows, own = rows_in_8_bits(flat.detach())
        out = product_in_8_bits(flat, rows, own, self.low, self.scale, self.bias)
        return out.unflatten(0, x.shape[:-1])

    def widened(self) -> Tensor:
        return (self.low.float() * self.scale.t()).to(self.weight.dtype)


def rows_in_8_bits(x: Tensor) -> tuple[Tensor, Tensor]:
    """(N, K), and the scale (N, 1) of each row."""
    scale = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / LARGEST
    # one division for a row: for each number it would take longer than to read and write it
    return (x.float() * (1 / scale)).to(torch.float8_e4m3fn), scale


# An operator: torch 2.11 compiles an `autograd.Function` of the same lines to one whose gradient is
# 0. What goes into 8 bits is outside of it, to be fused.
@torch.library.custom_op("flow_grpo::product_in_8_bits", mutates_args=())
def product_in_8_bits(
    x: Tensor, rows: Tensor, own: Tensor, low: Tensor, scale: Tensor, bias: Tensor | None
) -> Tensor:
    """`x` (M, K), here as `rows` with their `own` scales, times `low` (N, K). Only `x` has a
    gradient."""
    return _of_rows(x, rows, own, low, scale, bias)


def _of_rows(
    x: Tensor, rows: Tensor, own: Tensor, low: Tensor, scale: Tensor, bias: Tensor | None
) -> Tensor:
    return _multiplied(rows, own, low.t(), scale, bias, x.dtype)


@product_in_8_bits.register_fake
def _(
    x: Tensor, rows: Tensor, own: Tensor, low: Tensor, scale: Tensor, bias: Tensor | None
) -> Tensor:
    return x.new_empty(x.shape[0], low.shape[0])


def _keep_weights(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[3], inputs[4])


def _gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """The scale of an output goes into the gradient before that is put in 8 bits: so one copy of
    the weights serves both passes."""
    low, scale = ctx.saved_tensors
    # a GPU wants the second factor column by column
    columns, ones = low.t().contiguous().t(), scale.new_ones(1, low.shape[1])
    rows, own = rows_in_8_bits(gradient.float() * scale)
    out = _multiplied(rows, own, columns, ones, None, gradient.dtype)
    return out, None, None, None, None, None


product_in_8_bits.register_autograd(_gradient, setup_context=_keep_weights)
# to see that only the gradient needs `x`, which else is written for nothing
OPEN[torch.ops.flow_grpo.product_in_8_bits.default] = _of_rows


def _multiplied(
    rows: Tensor,
    own: Tensor,
    columns: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    if not rows.is_cuda:
        wide = torch.promote_types(dtype, torch.float32)
        out = (rows.to(wide) @ columns.to(wide)) * own * scale
        return (out if bias is None else out + bias).to(dtype)
    half = torch.bfloat16
    bias = None if bias is None else bias.to(half)
    out = torch._scaled_mm(
        rows, columns, own, scale, bias=bias, out_dtype=half, use_fast_accum=True
    )
    return out.to(dtype)


class Nf4Linear(LowBitLinear):
    """4 bits, a scale for each block of weights, widened layer by layer to compute with: the memory
    of QLoRA, and not its speed."""

    levels: Tensor  # that the 4 bits count

    @staticmethod
    def fits(rows: int, columns: int) -> bool:
        return not rows * columns % BLOCK

    @staticmethod
    def stored(weight: Tensor) -> dict[str, Tensor]:
        blocks = weight.float().view(-1, BLOCK)
        scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-12).bfloat16()
        levels = normal_levels().to(weight.device)
        between = (levels[1:] + levels[:-1]) / 2
        places = torch.bucketize(blocks / scale.float(), between).to(torch.uint8).view(-1, 2)
        low = (places[:, 0] << 4) | places[:, 1]
        return {"low": low, "scale": scale, "levels": levels}

    def product(self, x: Tensor) -> Tensor:
        stored = self.low, self.scale, self.levels
        return product_in_4_bits(x, *stored, self.bias, self.out_features)

    def widened(self) -> Tensor:
        shape = (self.out_features, self.in_features)
        return _widened(self.low, self.scale, self.levels, shape, self.weight.dtype)


def normal_levels() -> Tensor:
    """The 16 numbers of NF4 (arXiv 2305.14314): quantiles of a normal distribution, of which the
    largest is 1 and one is 0; one more of them is positive than negative."""
    most = 0.9677083
    positive, negative = (
        torch.special.ndtri(torch.linspace(most, 0.5, n, dtype=torch.float64))[:-1] for n in (9, 8)
    )
    levels = torch.cat([-negative, torch.zeros(1, dtype=torch.float64), positive]).sort().values
    return (levels / levels.max()).float()


def _widened(
    low: Tensor, scale: Tensor, levels: Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    if low.is_cuda and _has_kernel():
        from flow_grpo.speed.four_bits import widened  # here: it needs Triton

        return widened(low, scale, levels, shape, dtype)
    places = torch.stack([low >> 4, low & 15], -1).view(-1, BLOCK).int()
    return (levels[places] * scale).view(shape).to(dtype)


@cache
def _has_kernel() -> bool:
    return not missing_tool()


# Operators: what the compiler sees of a widened weight it may keep for the backward pass.
@torch.library.custom_op("flow_grpo::product_in_4_bits", mutates_args=())
def product_in_4_bits(
    x: Tensor, low: Tensor, scale: Tensor, levels: Tensor, bias: Tensor | None, rows: int
) -> Tensor:
    """`x` (..., K) times the weight (`rows`, K). Only `x` has a gradient."""
    weight = _widened(low, scale, levels, (rows, x.shape[-1]), x.dtype)
    # compiled, it is beyond autocast's reach
    return F.linear(x, weight, None if bias is None else bias.to(x.dtype))


@product_in_4_bits.register_fake
def _(
    x: Tensor, low: Tensor, scale: Tensor, levels: Tensor, bias: Tensor | None, rows: int
) -> Tensor:
    return x.new_empty(*x.shape[:-1], rows)


@torch.library.custom_op("flow_grpo::gradient_in_4_bits", mutates_args=())
def gradient_in_4_bits(
    gradient: Tensor, low: Tensor, scale: Tensor, levels: Tensor, columns: int
) -> Tensor:
    shape = (gradient.shape[-1], columns)
    return gradient @ _widened(low, scale, levels, shape, gradient.dtype)


@gradient_in_4_bits.register_fake
def _(gradient: Tensor, low: Tensor, scale: Tensor, levels: Tensor, columns: int) -> Tensor:
    return gradient.new_empty(*gradient.shape[:-1], columns)


def _keep_bits(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, low, scale, levels, *_ = inputs
    ctx.save_for_backward(low, scale, levels)
    ctx.columns = x.shape[-1]


def _gradient_of_bits(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    out = gradient_in_4_bits(gradient, *ctx.saved_tensors, ctx.columns)
    return out, None, None, None, None, None


product_in_4_bits.register_autograd(_gradient_of_bits, setup_context=_keep_bits)


@register_flop_formula(torch.ops.flow_grpo.product_in_4_bits)
def _operations(x: tuple[int, ...], *others: Any, out_shape: tuple[int, ...], **_: Any) -> int:
    """What the product costs to compute again, which the compiler would think is nothing."""
    return 2 * math.prod(out_shape) * x[-1]
