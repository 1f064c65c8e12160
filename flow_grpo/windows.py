"""Which denoising steps add noise and are trained. All other steps are ode."""

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
    """The consecutive steps of a `num_steps` trajectory that add noise and are trained.

    With a window: `window_size` steps out of `window_range` [first, last), the start drawn from
    `rng`. Without: the first `timestep_fraction` of all steps. The last step is never among
    them, because noise added there would stay in the picture.
    """
    if num_steps < 2:
        raise ValueError(f"num_steps={num_steps} must be at least 2: the last step adds no noise")
    if not window_size:
        if not 0 < timestep_fraction <= 1:
            raise ValueError(f"timestep_fraction={timestep_fraction} must be above 0, at most 1")
        # 1e-9: 0.29 * 100 is 28.999999999999996
        count = min(math.floor(num_steps * timestep_fraction + 1e-9), num_steps - 1)
        if count < 1:
            raise ValueError(
                f"timestep_fraction={timestep_fraction} of {num_steps} steps leaves none to train"
            )
        return range(count)

    first, last = window_range or (0, num_steps - 1)
    if not 0 <= first < last <= num_steps - 1:
        raise ValueError(
            f"sde_window_range=({first}, {last}) must lie within (0, {num_steps - 1}): "
            f"num_steps={num_steps} and the last step adds no noise"
        )
    if not 1 <= window_size <= last - first:
        raise ValueError(
            f"sde_window_size={window_size} does not fit into sde_window_range=({first}, {last})"
        )
    if rng is None:
        raise ValueError("a window needs an rng to draw its start")
    start = int(rng.integers(first, last - window_size + 1))
    return range(start, start + window_size)


def moving_window(num_steps: int, *, size: int, shift: int, every: int, epoch: int) -> range:
    """MixGRPO's: `size` steps from the first on, moved by `shift` every `every` epochs. Past the
    last step that may add noise it begins again."""
    places = num_steps - size  # the last step adds no noise
    if places < 1:
        raise ValueError(
            f"mix.window_size={size} must be below sample.num_steps={num_steps}: the last step "
            "adds no noise"
        )
    start = epoch // every * shift % places
    return range(start, start + size)
