"""Optimizer, learning-rate schedule and training loop of the small models."""

import math
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from tqdm import tqdm

LOG_EVERY = 50


class Learner:
    """AdamW with an EMA of the weights, usable inside a CUDA graph.

    Learning rate and EMA weight are tensors, so that a captured step reads their current value.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], ema_decay: float = 0.999) -> None:
        self.parameters = list(parameters)
        device = self.parameters[0].device
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=torch.zeros((), device=device),
            betas=(0.9, 0.99),
            weight_decay=0.01,
            fused=True,
            capturable=device.type == "cuda",
        )
        self.lr = self.optimizer.param_groups[0]["lr"]
        self.ema_decay = ema_decay
        self.ema = [parameter.detach().clone() for parameter in self.parameters]
        self.ema_weight = torch.ones((), device=device)

    def set_rates(self, step: int, lr: float) -> None:
        self.lr.fill_(lr)
        # Short runs average over fewer steps, which discards the random initialization.
        self.ema_weight.fill_(max(1 - self.ema_decay, 9 / (10 + step)))

    def begin(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def update(self, loss: Tensor) -> None:
        """Take an optimizer step with clipped gradients, and update the EMA."""
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        with torch.no_grad():
            change = torch._foreach_sub(self.parameters, self.ema)
            torch._foreach_mul_(change, self.ema_weight)
            torch._foreach_add_(self.ema, change)

    @torch.no_grad()
    def use_average(self) -> None:
        for parameter, average in zip(self.parameters, self.ema, strict=True):
            parameter.copy_(average)


def learning_rate(progress: float, peak: float, warmup: float = 0.03) -> float:
    """Return the rate of a linear warm-up and cosine decay to 0; progress in [0, 1]."""
    if progress < warmup:
        return peak * progress / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))


def fit(
    learner: Learner,
    step_at: Callable[[int], Callable[[], Tensor]],
    *,
    steps: int,
    seconds: float,
    peak_lr: float,
    name: str,
) -> list[dict]:
    """Train for `steps` or `seconds`, whichever ends first, and return the logged losses.

    The learning-rate schedule is stretched to the same limit.

    Args:
        learner: The model and its optimizers.
        step_at: Returns the function that runs step i and returns its loss.
        steps: Maximum number of steps.
        seconds: Time limit.
        peak_lr: Largest learning rate.
        name: Name for the progress bar and errors.

    Raises:
        RuntimeError: If a logged loss is not finite.
    """
    start = time.monotonic()
    log: list[dict] = []
    bar = tqdm(range(steps), desc=name, mininterval=2)
    for i in bar:
        progress = max(i / steps, (time.monotonic() - start) / seconds)
        learner.set_rates(i, learning_rate(min(progress, 1.0), peak_lr))
        loss = step_at(i)()
        is_last = i == steps - 1 or progress >= 1
        if i % LOG_EVERY == 0 or is_last:
            # Reading the loss synchronizes, so that the time limit counts finished steps.
            value = loss.item()
            if not math.isfinite(value):
                raise RuntimeError(f"{name}: the loss is {value} at step {i}; lower --lr")
            log.append({"step": i, "loss": value, "seconds": time.monotonic() - start})
            bar.set_postfix(loss=f"{value:.4f}")
        if progress >= 1:
            break
    return log
