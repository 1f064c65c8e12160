"""One denoising step from sigma to sigma_next, and the log-probability of where it landed.

flow   Flow-GRPO: the SDE with the marginals of the flow, noise a * sqrt(sigma / (1 - sigma))
dance  DanceGRPO: the same idea with a constant noise level
cps    coefficients-preserving sampling: signal and noise keep the scheduler's proportions
ode    Euler, no noise and no log-probability

A log-probability is the mean over all non-batch dimensions, not the sum: the sum's ratios
explode at image size. For cps it is the published one, -mean((x' - mean)^2), variance dropped.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

Kind = Literal["flow", "dance", "cps", "ode"]
KINDS: tuple[Kind, ...] = ("flow", "dance", "cps", "ode")
Solver = Literal["euler", "dpm2"]
SOLVERS: tuple[Solver, ...] = ("euler", "dpm2")
NEARLY_ONE = 0.999  # where schedules begin that do not begin at 1


@dataclass(frozen=True)
class Step:
    next_sample: Tensor  # like sample, float32 or better
    log_prob: Tensor | None  # (B,); None for ode, which is deterministic
    mean: Tensor  # like sample
    std: Tensor  # scale of the added noise, sqrt(-dt) included; broadcasts to sample
    rate: Tensor  # std without sqrt(-dt), which Flow-GRPO's KL divides by; cps has no such factor


def sde_step(
    velocity: Tensor,
    sample: Tensor,
    sigma: float | Tensor,
    sigma_next: float | Tensor,
    *,
    kind: Kind = "flow",
    noise_level: float = 0.7,
    sigma_max: float | None = None,
    next_sample: Tensor | None = None,
    noise: Tensor | None = None,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
) -> Step:
    """Step from `sample` (B, ...) at `sigma`, or score the given `next_sample`.

    `sigma` and `sigma_next` are floats or (B,) tensors. `sigma_max` stands in for sigma at
    the start, where the flow noise is infinite; use the schedule's second sigma. The step adds
    `noise` (standard normal, like `sample`), or draws it from `generator`, also one per sample.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}; choose one of {', '.join(KINDS)}")
    if kind != "ode" and noise_level <= 0:
        raise ValueError(f"noise_level={noise_level} must be above 0; kind='ode' adds no noise")
    if kind == "cps" and noise_level > 1:
        raise ValueError(f"noise_level={noise_level} must be at most 1 for kind='cps'")

    dtype = torch.promote_types(sample.dtype, torch.float32)
    x, v = sample.to(dtype), velocity.to(dtype)
    sigma, sigma_next = _per_sample(sigma, x), _per_sample(sigma_next, x)
    dt = sigma_next - sigma  # negative

    if kind == "flow":
        rate = noise_level * torch.sqrt(sigma / (1 - _finite_sigma(sigma, sigma_max)))
        drift = rate**2 / (2 * sigma)
        mean = x * (1 + drift * dt) + v * (1 + drift * (1 - sigma)) * dt
        std = rate * torch.sqrt(-dt)
    elif kind == "dance":
        rate = torch.full_like(sigma, noise_level)
        x0 = x - sigma * v
        score = (x - x0 * (1 - sigma)) / sigma**2
        mean = x + (v + rate**2 / 2 * score) * dt
        std = rate * torch.sqrt(-dt)
    elif kind == "cps":
        std = rate = sigma_next * math.sin(noise_level * math.pi / 2)
        x0, x1 = x - sigma * v, x + (1 - sigma) * v
        mean = x0 * (1 - sigma_next) + x1 * torch.sqrt(sigma_next**2 - std**2)
    else:
        std = rate = torch.zeros_like(sigma)
        mean = x + v * dt
        return Step(mean, None, mean, std, rate)

    if next_sample is not None:
        x_next = next_sample.to(dtype)
    else:
        if noise is None:
            generators = list(generator) if isinstance(generator, Sequence) else generator
            noise = randn_tensor(tuple(x.shape), generator=generators, device=x.device, dtype=dtype)
        x_next = (mean + std * noise).detach()

    square = (x_next - mean) ** 2
    if kind == "cps":
        log_prob = -square
    else:
        log_prob = -square / (2 * std**2) - torch.log(std) - 0.5 * math.log(2 * math.pi)
    return Step(x_next, log_prob.flatten(1).mean(1), mean, std, rate)


def dpm2_step(
    velocity: Tensor,
    sample: Tensor,
    sigma: float,
    sigma_next: float,
    before: tuple[Tensor, float] | None = None,
) -> tuple[Tensor, tuple[Tensor, float]]:
    """A step without noise, of second order from what the step `before` returned beside it:
    DPM-Solver++(2M), the noise schedule's own x = (1 - sigma) x0 + sigma e.

    Euler's where there is none, and at sigma 1 and 0, where log((1 - sigma)/sigma) has no value.
    """
    dtype = torch.promote_types(sample.dtype, torch.float32)
    x, v = sample.to(dtype), velocity.to(dtype)
    x0 = x - sigma * v
    guess = x0
    if before is not None and before[1] < 1 and sigma_next > 0:
        x0_before, sigma_before = before
        last, here, there = (math.log((1 - s) / s) for s in (sigma_before, sigma, sigma_next))
        guess = x0 + (there - here) / (2 * (here - last)) * (x0 - x0_before)
    scale = sigma_next / sigma
    return scale * x + (1 - scale) * guess, (x0, sigma)


def _per_sample(sigma: float | Tensor, like: Tensor) -> Tensor:
    """Shape (1, 1, ...) for a float, (B, 1, ...) for a tensor, without a device sync."""
    ones = (1,) * (like.ndim - 1)
    if isinstance(sigma, Tensor):
        return sigma.to(like.device, like.dtype).reshape(-1, *ones)
    return torch.full((1, *ones), float(sigma), dtype=like.dtype, device=like.device)


def _finite_sigma(sigma: Tensor, sigma_max: float | None) -> Tensor:
    if sigma_max is not None:
        return torch.where(sigma > NEARLY_ONE, sigma.clamp(max=sigma_max), sigma)
    if (sigma == 1).any():
        raise ValueError("kind='flow' needs sigma_max (the schedule's second sigma) at sigma=1")
    return sigma
