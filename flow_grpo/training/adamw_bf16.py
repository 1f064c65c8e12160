"""AdamW for weights, gradients and moments in bfloat16, with stochastic rounding.

A bfloat16 number has 8 significant bits, so rounding to nearest drops every change below about
0.2 %. For a weight of 0.1, this threshold is more than a hundred times an Adam update at a learning
rate of 1e-6, so the weight would never change. The second moment, of which a step replaces
1 - beta2 = 0.1 %, would never decay either.

Here each value is computed in float32 and rounded once per step to one of its two neighbours a < x
< b, to b with probability (x - a) / (b - a). The mean of the rounded value is x, so small changes
accumulate (Zamirai et al., Revisiting BFloat16 Training, https://arxiv.org/abs/2010.06192).

    bytes per parameter   AdamW in float32   here
    weight                       4             2
    gradient                     4             2
    two moments                  8             4
    sum                         16             8

The random bits depend only on the step and the index of a parameter: a resumed run equals an
uninterrupted one bit for bit, and DDP replicas stay identical. torchao's AdamW rounds weights in
the same way (pytorch/ao at 0372e5f, torchao/optim/adam.py, `single_param_adam`), but it rounds
moments to nearest, draws its bits from the global generator and needs a compiler.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flow_grpo.perf.lora import cast_stochastic
from flow_grpo.training.distributed import local_shards

CHUNK = 2**24  # elements processed at once, with about 24 bytes of temporary memory each


class AdamWBf16(Optimizer):
    """AdamW whose moments have the dtype of their weights; bfloat16 is rounded stochastically.

    Args:
        parameters: Trained weights or parameter groups.
        lr: Learning rate.
        betas: Decay rates of the moments.
        eps: Term added to the denominator.
        weight_decay: Decoupled weight decay.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(parameters, settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Update all weights that have a gradient."""
        parameters = [(p, group) for group in self.param_groups for p in group["params"]]
        for number, (parameter, group) in enumerate(parameters):
            if parameter.grad is not None:
                self._update(parameter, group, number)

    def _update(self, parameter: nn.Parameter, group: dict[str, Any], number: int) -> None:
        """Update the `number`-th parameter."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        step = int(state["step"])
        tensors = [parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]]
        generator = torch.Generator(parameter.device)
        generator.manual_seed(zlib.crc32(f"{step} {number}".encode()))
        for chunk in _chunks(local_shards(tensors)):
            _update_chunk(*chunk, group=group, step=step, generator=generator)


def _chunks(tensors: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """Yield views of equal parts of tensors of the same shape."""
    if all(each.is_contiguous() for each in tensors):
        yield from zip(*(each.view(-1).split(CHUNK) for each in tensors), strict=True)
    else:
        yield tensors


def _update_chunk(
    weight: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    group: dict[str, Any],
    step: int,
    generator: torch.Generator,
) -> None:
    """Update a part of a weight and of its moments in place, as `torch.optim.AdamW` does."""
    dtype, precise = weight.dtype, torch.promote_types(weight.dtype, torch.float32)
    beta1, beta2 = group["betas"]
    gradient = gradient.to(precise)
    first = exp_avg.to(precise).lerp(gradient, 1 - beta1)
    second = (exp_avg_sq.to(precise) * beta2).addcmul_(gradient, gradient, value=1 - beta2)
    divisor = (second / (1 - beta2**step)).sqrt_().add_(group["eps"])
    decayed = weight.to(precise) * (1 - group["lr"] * group["weight_decay"])
    updated = decayed.addcdiv_(first, divisor, value=-group["lr"] / (1 - beta1**step))
    for target, value in ((weight, updated), (exp_avg, first), (exp_avg_sq, second)):
        target.copy_(cast_stochastic(value, dtype, generator))
