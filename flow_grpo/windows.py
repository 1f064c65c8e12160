"""Select the denoising steps that add noise and are trained; all other steps are ODE steps."""

import math

import numpy as np


def stochastic_steps(
    num_steps: int,
    *,
    window_size: int = 0,
    window_range: tuple[int, int] | None = None,
    timestep_fraction: float = 1.0,
    rng: np.random.Generator | None = None,
) -> range:
    """Return the consecutive steps of a trajectory that add noise and are trained.

    The last step is never among them: its noise would remain in the image.

    Args:
        num_steps: Steps of the trajectory.
        window_size: Length of a window with a random start; 0 for no window.
        window_range: Steps [first, last) that contain the window; all but the last by default.
        timestep_fraction: Without a window, the fraction of all steps, from the first on.
        rng: Source of the window's start.

    Raises:
        ValueError: No such steps exist.
    """
    if num_steps < 2:
        raise ValueError(f"num_steps={num_steps} must be at least 2; the last step adds no noise")
    if not window_size:
        if not 0 < timestep_fraction <= 1:
            raise ValueError(f"timestep_fraction={timestep_fraction} must be above 0 and at most 1")
        # 1e-9: 0.29 * 100 is 28.999999999999996
        count = min(math.floor(num_steps * timestep_fraction + 1e-9), num_steps - 1)
        if count < 1:
            raise ValueError(
                f"timestep_fraction={timestep_fraction} selects no step of {num_steps}; increase it"
            )
        return range(count)

    first, last = window_range or (0, num_steps - 1)
    if not 0 <= first < last <= num_steps - 1:
        raise ValueError(
            f"sde_window_range=({first}, {last}) must lie within (0, {num_steps - 1}); "
            f"the last of num_steps={num_steps} adds no noise"
        )
    if not 1 <= window_size <= last - first:
        raise ValueError(
            f"sde_window_size={window_size} must be at least 1 and fit into "
            f"sde_window_range=({first}, {last})"
        )
    if rng is None:
        raise ValueError("rng=None is invalid: the start of a window is random; pass a generator")
    start = int(rng.integers(first, last - window_size + 1))
    return range(start, start + window_size)


def moving_window(num_steps: int, *, size: int, shift: int, every: int, epoch: int) -> range:
    """Return MixGRPO's window: `size` steps, moved by `shift` every `every` epochs.

    The window wraps around before the last step, which adds no noise.
    """
    num_starts = num_steps - size
    if num_starts < 1:
        raise ValueError(
            f"mix.window_size={size} must be below sample.num_steps={num_steps}; the last step "
            "adds no noise"
        )
    start = epoch // every * shift % num_starts
    return range(start, start + size)
