"""Random numbers that depend on what they are for, never on which process draws them.

Every draw is keyed by (run seed, stream, ...), so 1 process x 8 samples and 2 x 4 see the same
prompts and noise, and a resumed run needs no generator state.
"""

from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


class Stream(IntEnum):
    PROMPTS = 0  # key: epoch
    WINDOW = 1  # key: epoch
    SAMPLE = 2  # key: epoch, sample index
    GROUP = 3  # key: epoch, group id; the shared first noise of `same_latent`
    SHUFFLE = 4  # key: epoch, inner epoch
    EVAL = 5  # key: dataset row
    MERGE = 6  # key: epoch; how `merge_lora` rounds
    NOISE = 7  # key: epoch, inner epoch, sample index or group id; noise that is added in training
    TIMES = 8  # as NOISE: how much of it
    HOLD_OUT = 9  # no key: which prompts are for testing
    DATA = 10  # key: epoch, inner epoch, update, place: pictures that are trained beside samples
    QUESTIONS = 11  # key: number of the data set, number of the pass over it


def _entropy(seed: int, stream: Stream, key: tuple[int, ...]) -> np.random.SeedSequence:
    return np.random.SeedSequence([seed, int(stream), *key])


def numpy_rng(seed: int, stream: Stream, *key: int) -> np.random.Generator:
    return np.random.default_rng(_entropy(seed, stream, key))


def torch_generator(seed: int, stream: Stream, *key: int) -> "torch.Generator":
    """On the CPU: the same key gives the same noise on every kind of device."""
    import torch  # here: what a config alone can tell is told before it is imported

    state = _entropy(seed, stream, key).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0] >> np.uint64(1)))


def sample_generators(seed: int, epoch: int, index: list[int]) -> "list[torch.Generator]":
    """One per sample, so that its noise does not depend on the batch or process it lands in."""
    return [torch_generator(seed, Stream.SAMPLE, epoch, i) for i in index]
