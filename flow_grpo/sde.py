"""Denoising steps with noise and their log-probabilities, the policy of flow-matching RL.

Policy-gradient methods need log p(x' | x) of every step, but the samplers of flow-matching models
integrate an ODE, which is deterministic. Each rule below replaces the Euler step by a Gaussian one,
x' = mean + std * noise. With sigma > sigma', dt = sigma' - sigma < 0, velocity v, noise level a and
x0 = x - sigma v:

flow   Flow-GRPO (arXiv 2505.05470), the SDE with the marginals of the ODE:
         s = a sqrt(sigma / (1 - sigma)), std = s sqrt(-dt)
         mean = x (1 + s^2 / (2 sigma) dt) + v (1 + s^2 (1 - sigma) / (2 sigma)) dt
dance  DanceGRPO (arXiv 2505.07818), the same idea with a constant noise level: std = a sqrt(-dt)
         mean = x + [v + a^2 / 2 (x - x0 (1 - sigma)) / sigma^2] dt
cps    coefficients-preserving sampling (arXiv 2509.05952): signal and noise keep the proportions
         of the schedule, std = sigma' sin(a pi / 2)
         mean = x0 (1 - sigma') + (x + v (1 - sigma)) sqrt(sigma'^2 - std^2)
ode    Euler, mean = x + v dt: no noise and no log-probability

More noise explores more but leaves residual noise in few-step samples, which cps is built to avoid.

Layout: samples and velocities are (B, ...), log-probabilities (B,). A log-probability is the mean
over all non-batch dimensions, not the sum, whose ratios explode at image size. flow and dance use
the full Gaussian density; cps uses the published -mean((x' - mean)^2), which drops the variance.
Everything is computed in float32 or better, whatever the model's dtype.
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
NEARLY_ONE = 0.999  # some schedules start slightly below 1


@dataclass(frozen=True)
class Step:
    """A denoising step and the Gaussian it was drawn from."""

    next_sample: Tensor  # (B, ...), float32 or better
    log_prob: Tensor | None  # (B,); None for ode
    mean: Tensor  # (B, ...)
    std: Tensor  # scale of the noise, including sqrt(-dt); broadcasts to the sample
    rate: Tensor  # std without sqrt(-dt), for Flow-GRPO's KL; equal to std for cps


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
    """Take one denoising step, or compute the log-probability of a given one.

    Args:
        velocity: Model output at `sample`, (B, ...).
        sample: Current latents, (B, ...).
        sigma: Noise level of `sample`, a float or (B,).
        sigma_next: Noise level after the step, a float or (B,).
        kind: Step rule; see the module docstring.
        noise_level: a in the formulas, above 0; at most 1 for cps. Ignored by ode.
        sigma_max: Replaces sigma at sigma = 1, where the flow noise is infinite. Use the second
            sigma of the schedule.
        next_sample: Result of an earlier step, (B, ...), whose log-probability is wanted. If None,
            a new one is drawn.
        noise: Standard normal noise to add, (B, ...). If None, it is drawn from `generator`.
        generator: One generator for the batch, or one per sample.

    Raises:
        ValueError: An argument is out of range.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}; choose one of {', '.join(KINDS)}")
    if kind != "ode" and noise_level <= 0:
        raise ValueError(f"noise_level={noise_level} must be above 0; use kind='ode' for no noise")
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
    previous: tuple[Tensor, float] | None = None,
) -> tuple[Tensor, tuple[Tensor, float]]:
    """Take one deterministic second-order step: DPM-Solver++(2M) (arXiv 2211.01095).

    The solver extrapolates x0 in the half log-SNR, lambda = log((1 - sigma) / sigma). The first
    step and steps from sigma 1 or to sigma 0, where lambda is infinite, are Euler steps.

    Args:
        velocity: Model output at `sample`, (B, ...).
        sample: Current latents, (B, ...).
        sigma: Noise level of `sample`.
        sigma_next: Noise level after the step.
        previous: Second return value of the preceding step; None for the first step.

    Returns:
        The next latents, (B, ...), and the state (x0, sigma) for the following step.
    """
    dtype = torch.promote_types(sample.dtype, torch.float32)
    x, v = sample.to(dtype), velocity.to(dtype)
    x0 = x - sigma * v
    extrapolated = x0
    if previous is not None and previous[1] < 1 and sigma_next > 0:
        previous_x0, previous_sigma = previous
        here = _half_log_snr(sigma)
        h_previous, h = here - _half_log_snr(previous_sigma), _half_log_snr(sigma_next) - here
        extrapolated = x0 + h / (2 * h_previous) * (x0 - previous_x0)
    scale = sigma_next / sigma
    return scale * x + (1 - scale) * extrapolated, (x0, sigma)


def _half_log_snr(sigma: float) -> float:
    return math.log((1 - sigma) / sigma)


def _per_sample(sigma: float | Tensor, like: Tensor) -> Tensor:
    """Reshape to (1, 1, ...) for a float or (B, 1, ...) for a tensor, without a device sync."""
    ones = (1,) * (like.ndim - 1)
    if isinstance(sigma, Tensor):
        return sigma.to(like.device, like.dtype).reshape(-1, *ones)
    return torch.full((1, *ones), float(sigma), dtype=like.dtype, device=like.device)


def _finite_sigma(sigma: Tensor, sigma_max: float | None) -> Tensor:
    """Replace sigma where it is about 1, at which the flow noise is infinite, by `sigma_max`.

    Raises:
        ValueError: If sigma is 1 and there is no `sigma_max`.
    """
    if sigma_max is not None:
        return torch.where(sigma > NEARLY_ONE, sigma.clamp(max=sigma_max), sigma)
    if (sigma == 1).any():
        raise ValueError("kind='flow' at sigma=1 needs sigma_max: pass the schedule's second sigma")
    return sigma
