"""A small FLUX.1-Kontext pipeline with random weights."""

from functools import partial

from diffusers import FluxKontextPipeline

from untrained.small import flux

build = partial(flux.build, kind=FluxKontextPipeline)
