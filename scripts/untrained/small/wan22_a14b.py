"""A small Wan 2.2 A14B text-to-video pipeline with random weights: two transformers."""

from functools import partial

from untrained.small import wan

build = partial(wan.build, boundary_ratio=0.875)
