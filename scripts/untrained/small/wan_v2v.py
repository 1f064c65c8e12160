"""A small Wan 2.1 video-to-video pipeline with random weights."""

from diffusers import WanVideoToVideoPipeline

from untrained.small import wan


def build(**settings) -> WanVideoToVideoPipeline:
    """Build the pipeline; sides are multiples of 16, the number of frames is 4 n + 1."""
    parts = wan.build(**settings).components
    names = ("tokenizer", "text_encoder", "transformer", "vae", "scheduler")
    return WanVideoToVideoPipeline(**{name: parts[name] for name in names})
