"""Random number generators that are keyed by purpose, never by process.

Every generator is derived from (run seed, stream, key...) with `np.random.SeedSequence`, so 1
process x 8 samples and 2 x 4 get the same prompts and noise, and resuming needs no generator state.
"""

import random
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


class Stream(IntEnum):
    """Purposes of random numbers. Each has a stream that is independent of the others.

    The values are part of every seed and must not change.
    """

    PROMPTS = 0  # key: epoch
    WINDOW = 1  # key: epoch
    SAMPLE = 2  # key: epoch, sample index
    GROUP = 3  # key: epoch, group id; the shared initial noise of `same_latent`
    SHUFFLE = 4  # key: epoch, inner epoch
    EVAL = 5  # key: dataset row
    # 6 was used by a removed setting
    NOISE = 7  # key: epoch, inner epoch, sample index or group id; noise added in training
    TIMES = 8  # key: as NOISE; noise levels
    HOLD_OUT = 9  # no key; the held-out split
    DATA = 10  # key: epoch, inner epoch, update, position; images of `anchors.data`
    QUESTIONS = 11  # key: index of the data set, index of the pass
    PREFERENCES = 12  # key: index of the pass; order of given images
    GLOBAL = 13  # key: epoch, process; the global generators


def _seed_sequence(seed: int, stream: Stream, key: tuple[int, ...]) -> np.random.SeedSequence:
    return np.random.SeedSequence([seed, int(stream), *key])


def numpy_rng(seed: int, stream: Stream, *key: int) -> np.random.Generator:
    """Return the NumPy generator of a stream and key."""
    return np.random.default_rng(_seed_sequence(seed, stream, key))


def torch_generator(seed: int, stream: Stream, *key: int) -> "torch.Generator":
    """Return a CPU generator whose state depends only on seed, stream and key.

    Its numbers are the same whichever device they are used on.
    """
    import torch  # slow import; configs are validated without it

    state = _seed_sequence(seed, stream, key).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0] >> np.uint64(1)))


def seed_global_generators(seed: int, epoch: int, process: int) -> None:
    """Seed the global generators of Python, NumPy and torch, which only custom code uses.

    Their states then depend on nothing that a checkpoint would have to contain.
    """
    import torch

    words = _seed_sequence(seed, Stream.GLOBAL, (epoch, process)).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(words[1])
    torch.manual_seed(int(words[2]))


def sample_generators(seed: int, epoch: int, index: list[int]) -> "list[torch.Generator]":
    """Return one generator per sample, so that noise does not depend on batch or process."""
    return [torch_generator(seed, Stream.SAMPLE, epoch, i) for i in index]
