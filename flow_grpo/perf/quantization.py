"""Linear layers with frozen FP8 or NF4 weights, for training LoRA on top of them.

A layer stores `low`, the quantized weight, and `scale`, and nothing in full precision. Sampling and
training run the same layers, so the on-policy ratio is not affected.

**FP8** (e4m3): one scale per output row. The input is quantized per row on the fly, and the product
runs on FP8 tensor cores: half the memory, and faster. The input gradient is an FP8 product too.

**NF4** (QLoRA, arXiv 2305.14314): 4 bits per weight and one scale per block of 64. The weight is
dequantized for each product: a quarter of the memory, but slower.

The products are custom operators with their own gradient. Only the input has one, as the weights
are frozen.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from flow_grpo.config.fields import UNQUANTIZED
from flow_grpo.errors import UserError
from flow_grpo.perf.compile_utils import missing_compile_dependency
from flow_grpo.perf.inductor import DECOMPOSITIONS

FP8, NF4 = "fp8", "nf4"
FP8_MAX = 448.0  # largest value of float8_e4m3fn
FP8_ALIGNMENT = 16  # FP8 products need dimensions that are a multiple of this
NF4_BLOCK_SIZE = 64  # weights per scale


def check_precision(setting: str, precision: str, device: torch.device) -> None:
    """Raise a UserError if the GPU does not support the precision that `setting` selects."""
    if precision == FP8 and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 9):
            raise UserError(
                "needs a GPU of compute capability 8.9 or more (RTX 40, L4, H100), but this one "
                f"has {capability[0]}.{capability[1]}",
                field=setting,
                value=precision,
                hint="use 'nf4'",
            )


def quantize_linears(
    modules: Iterable[nn.Module], precision: str, device: torch.device, *, keep_full: bool = False
) -> None:
    """Quantize the linear layers of frozen modules in place.

    Layers are moved to the device one by one, so that it never holds all of them in full precision.

    Args:
        modules: Modules whose linear layers are quantized.
        precision: "fp8" or "nf4"; `UNQUANTIZED` does nothing.
        device: Device of the quantized weights.
        keep_full: Whether to keep the original weights on the CPU, for `at_full_precision`.
    """
    if precision == UNQUANTIZED:
        return
    kind = {FP8: Fp8Linear, NF4: Nf4Linear}[precision]
    for layer in [x for module in modules for x in module.modules() if type(x) is nn.Linear]:
        if kind.supports_shape(*layer.weight.shape):
            weight = layer.weight.detach()
            layer.full_weight = None
            if keep_full:
                layer.full_weight = weight.pin_memory() if torch.cuda.is_available() else weight
            # parameters, because DDP broadcasts buffers in every forward pass
            for name, tensor in kind.quantize_weight(weight.to(device)).items():
                setattr(layer, name, nn.Parameter(tensor, requires_grad=False))
            # empty: libraries read the dtype of the computation here
            layer.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)
            layer.__class__ = kind


class QuantizedLinear(nn.Linear):
    """Base of linear layers with a quantized weight; `weight` itself is empty."""

    low: Tensor  # quantized weight
    scale: Tensor
    full_weight: Tensor | None  # the original weight, on the CPU
    uses_full_weight = False

    @staticmethod
    def supports_shape(rows: int, columns: int) -> bool:
        """Return whether a weight of this shape can be quantized."""
        raise NotImplementedError

    @staticmethod
    def quantize_weight(weight: Tensor) -> dict[str, Tensor]:
        """Return the tensors that replace the weight, by attribute name."""
        raise NotImplementedError

    def quantized_matmul(self, x: Tensor) -> Tensor:
        """Return the layer's output for the input `x`, (..., in_features)."""
        raise NotImplementedError

    def dequantize(self) -> Tensor:
        """Return the weight, (out_features, in_features), in the dtype of the computation."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output for `x`, (..., in_features), cast as by autocast.

        Within `at_full_precision` it is computed with the original weight.
        """
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if self.uses_full_weight:
            weight = self.full_weight.to(x.device, x.dtype, non_blocking=True)
            return F.linear(x, weight, self.bias)
        return self.quantized_matmul(x)


@contextmanager
def preserve_quantized_weights(module: nn.Module) -> Iterator[None]:
    """Restore the quantized weights of a module on exit, if a library casts it in the context."""
    stored = [
        (parameter, parameter.data)
        for layer in module.modules()
        if isinstance(layer, QuantizedLinear)
        for name, parameter in layer.named_parameters(recurse=False)
        if name not in ("weight", "bias")
    ]
    try:
        yield
    finally:
        for parameter, data in stored:
            parameter.data = data


@contextmanager
def at_full_precision(module: nn.Module) -> Iterator[None]:
    """Compute with the original weights of `keep_full`, copied from the CPU layer by layer."""
    layers = [
        x for x in module.modules() if isinstance(x, QuantizedLinear) and x.full_weight is not None
    ]
    if not layers:
        yield
        return
    forward = module.forward
    module.forward = getattr(forward, "eager", forward)  # not `CudaGraphForward`
    for layer in layers:
        layer.uses_full_weight = True
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        module.forward = forward
        for layer in layers:
            layer.uses_full_weight = False


class Fp8Linear(QuantizedLinear):
    """Linear layer with a frozen e4m3 weight and one scale per output row.

    `low` is (out_features, in_features), float8_e4m3fn; `scale` is (1, out_features), float32.
    """

    @staticmethod
    def supports_shape(rows: int, columns: int) -> bool:
        return not (rows % FP8_ALIGNMENT or columns % FP8_ALIGNMENT)

    @staticmethod
    def quantize_weight(weight: Tensor) -> dict[str, Tensor]:
        rows, scale = quantize_rowwise_fp8(weight)
        return {"low": rows, "scale": scale.t().contiguous()}

    def quantized_matmul(self, x: Tensor) -> Tensor:
        """Return the output for `x` (..., in_features), which is quantized per row."""
        flat = x.flatten(0, -2)
        x_low, x_scale = quantize_rowwise_fp8(flat.detach())
        out = fp8_linear(flat, x_low, x_scale, self.low, self.scale, self.bias)
        return out.unflatten(0, x.shape[:-1])

    def dequantize(self) -> Tensor:
        return (self.low.float() * self.scale.t()).to(self.weight.dtype)


def quantize_rowwise_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each row of a matrix to FP8.

    Args:
        x: (N, K).

    Returns:
        The quantized matrix, (N, K), float8_e4m3fn, and the scale of each row, (N, 1), float32.
    """
    scale = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / FP8_MAX
    # one division per row: one per element would take longer than reading and writing it
    return (x.float() * (1 / scale)).to(torch.float8_e4m3fn), scale


def _fp8_linear(
    x: Tensor, x_low: Tensor, x_scale: Tensor, low: Tensor, scale: Tensor, bias: Tensor | None
) -> Tensor:
    """Return the output of an `Fp8Linear`, (M, N); only `x` has a gradient.

    Args:
        x: Input, (M, K). Only its dtype is used, and its gradient is defined.
        x_low: Quantized input, (M, K).
        x_scale: Its scales, (M, 1).
        low: Quantized weight, (N, K).
        scale: Its scales, (1, N).
        bias: (N,).
    """
    return _scaled_matmul(x_low, x_scale, low.t(), scale, bias, x.dtype)


# A custom operator, because torch 2.11 compiles an equivalent `autograd.Function` to one whose
# gradient is 0. The input is quantized outside of it, to be fused with the preceding operations.
fp8_linear = torch.library.custom_op("flow_grpo::fp8_linear", _fp8_linear, mutates_args=())


@fp8_linear.register_fake
def _(
    x: Tensor, x_low: Tensor, x_scale: Tensor, low: Tensor, scale: Tensor, bias: Tensor | None
) -> Tensor:
    return x.new_empty(x.shape[0], low.shape[0])


def _save_fp8_weights(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[3], inputs[4])


def _fp8_linear_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradient of the input, (M, K), from that of the output, (M, N).

    The scales of the weight belong to the dimension that is summed over, so they are multiplied
    into the gradient before it is quantized: both passes use the same quantized weight.
    """
    low, scale = ctx.saved_tensors
    # `_scaled_mm` needs its second factor in column-major order
    columns, ones = low.t().contiguous().t(), scale.new_ones(1, low.shape[1])
    g_low, g_scale = quantize_rowwise_fp8(gradient.float() * scale)
    out = _scaled_matmul(g_low, g_scale, columns, ones, None, gradient.dtype)
    return out, None, None, None, None, None


fp8_linear.register_autograd(_fp8_linear_backward, setup_context=_save_fp8_weights)
# The compiler has to see that the value of `x` is not used; otherwise it writes it to memory.
DECOMPOSITIONS[torch.ops.flow_grpo.fp8_linear.default] = _fp8_linear


def _scaled_matmul(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return (a a_scale) (b b_scale) + bias: (M, K), (M, 1), (K, N), (1, N) and (N,) to (M, N)."""
    if not a.is_cuda:
        wide = torch.promote_types(dtype, torch.float32)
        out = (a.to(wide) @ b.to(wide)) * a_scale * b_scale
        return (out if bias is None else out + bias).to(dtype)
    half = torch.bfloat16
    bias = None if bias is None else bias.to(half)
    out = torch._scaled_mm(a, b, a_scale, b_scale, bias=bias, out_dtype=half, use_fast_accum=True)
    return out.to(dtype)


class Nf4Linear(QuantizedLinear):
    """Linear layer with a frozen NF4 weight, dequantized for each product.

    `low` is (weights / 2,), uint8, two 4-bit indices into `levels` per byte; `scale` is
    (blocks, 1), bfloat16.
    """

    levels: Tensor  # the 16 values of NF4

    @staticmethod
    def supports_shape(rows: int, columns: int) -> bool:
        return not rows * columns % NF4_BLOCK_SIZE

    @staticmethod
    def quantize_weight(weight: Tensor) -> dict[str, Tensor]:
        """Quantize a weight in blocks of `NF4_BLOCK_SIZE`; return the layer's buffers by name."""
        blocks = weight.float().view(-1, NF4_BLOCK_SIZE)
        scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-12).bfloat16()
        levels = nf4_levels().to(weight.device)
        midpoints = (levels[1:] + levels[:-1]) / 2
        index = torch.bucketize(blocks / scale.float(), midpoints).to(torch.uint8).view(-1, 2)
        low = (index[:, 0] << 4) | index[:, 1]
        return {"low": low, "scale": scale, "levels": levels}

    def quantized_matmul(self, x: Tensor) -> Tensor:
        return nf4_linear(x, self.low, self.scale, self.levels, self.bias, self.out_features)

    def dequantize(self) -> Tensor:
        shape = (self.out_features, self.in_features)
        return _dequantize_nf4(self.low, self.scale, self.levels, shape, self.weight.dtype)


def nf4_levels() -> Tensor:
    """Return the 16 values of NF4, quantiles of a normal distribution scaled to [-1, 1].

    They are 0, eight positive and seven negative ones.
    """
    largest = 0.9677083  # probability of the largest
    positive, negative = (
        torch.special.ndtri(torch.linspace(largest, 0.5, n, dtype=torch.float64))[:-1]
        for n in (9, 8)
    )
    levels = torch.cat([-negative, torch.zeros(1, dtype=torch.float64), positive]).sort().values
    return (levels / levels.max()).float()


def _dequantize_nf4(
    low: Tensor, scale: Tensor, levels: Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """Return the dense weight of an `Nf4Linear`; arguments as in `nf4_kernel.dequantize_nf4`."""
    if low.is_cuda and _has_triton_kernel():
        from flow_grpo.perf.nf4_kernel import dequantize_nf4  # imports Triton

        return dequantize_nf4(low, scale, levels, shape, dtype)
    index = torch.stack([low >> 4, low & 15], -1).view(-1, NF4_BLOCK_SIZE).int()
    return (levels[index] * scale).view(shape).to(dtype)


@cache
def _has_triton_kernel() -> bool:
    return not missing_compile_dependency()


# Custom operators, because the compiler would save a dequantized weight for the backward pass.
@torch.library.custom_op("flow_grpo::nf4_linear", mutates_args=())
def nf4_linear(
    x: Tensor, low: Tensor, scale: Tensor, levels: Tensor, bias: Tensor | None, rows: int
) -> Tensor:
    """Return the output of an `Nf4Linear`, (..., rows), for `x`, (..., K).

    Only `x` has a gradient.
    """
    weight = _dequantize_nf4(low, scale, levels, (rows, x.shape[-1]), x.dtype)
    # autocast does not apply inside of a compiled operator
    return F.linear(x, weight, None if bias is None else bias.to(x.dtype))


@nf4_linear.register_fake
def _(
    x: Tensor, low: Tensor, scale: Tensor, levels: Tensor, bias: Tensor | None, rows: int
) -> Tensor:
    return x.new_empty(*x.shape[:-1], rows)


@torch.library.custom_op("flow_grpo::nf4_linear_backward", mutates_args=())
def nf4_linear_backward(
    gradient: Tensor, low: Tensor, scale: Tensor, levels: Tensor, columns: int
) -> Tensor:
    """Return the gradient of the input, (..., columns), from that of the output."""
    shape = (gradient.shape[-1], columns)
    return gradient @ _dequantize_nf4(low, scale, levels, shape, gradient.dtype)


@nf4_linear_backward.register_fake
def _(gradient: Tensor, low: Tensor, scale: Tensor, levels: Tensor, columns: int) -> Tensor:
    return gradient.new_empty(*gradient.shape[:-1], columns)


def _save_nf4_weights(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, low, scale, levels, *_ = inputs
    ctx.save_for_backward(low, scale, levels)
    ctx.columns = x.shape[-1]


def _nf4_linear_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    out = nf4_linear_backward(gradient, *ctx.saved_tensors, ctx.columns)
    return out, None, None, None, None, None


nf4_linear.register_autograd(_nf4_linear_backward, setup_context=_save_nf4_weights)


@register_flop_formula(torch.ops.flow_grpo.nf4_linear)
def _nf4_linear_flops(
    x: tuple[int, ...], *others: Any, out_shape: tuple[int, ...], **_: Any
) -> int:
    """Return the operations of a product, so that the compiler does not recompute it as free."""
    return 2 * math.prod(out_shape) * x[-1]
