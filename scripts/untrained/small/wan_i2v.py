"""A small Wan 2.1 image-to-video pipeline with random weights.

With a `boundary_ratio` it is Wan 2.2's, which has two transformers and no image encoder.
"""

from diffusers import WanImageToVideoPipeline
from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModel

from untrained.small import wan
from untrained.small.components import seeded

SIDE, WIDTH = 28, 16  # input size and width of the image encoder


def build(
    *, latent_channels: int = 16, boundary_ratio: float | None = None, seed: int = 0, **settings
) -> WanImageToVideoPipeline:
    """Build the pipeline; sides are multiples of 16, the number of frames is 4 n + 1."""
    transformer, parts = {"in_channels": 2 * latent_channels + 4}, {}
    if boundary_ratio is None:
        inner = settings.get("heads", 2) * settings.get("head_width", 16)
        transformer |= {"image_dim": WIDTH, "added_kv_proj_dim": inner}
        parts["image_processor"] = CLIPImageProcessorPil(
            size={"shortest_edge": SIDE}, crop_size=SIDE
        )
        vision = CLIPVisionConfig(
            hidden_size=WIDTH,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=SIDE,
            patch_size=SIDE // 2,
        )
        with seeded(seed + 1):
            parts["image_encoder"] = CLIPVisionModel(vision)
    pipeline = wan.build(
        kind=WanImageToVideoPipeline,
        transformer=transformer,
        latent_channels=latent_channels,
        boundary_ratio=boundary_ratio,
        seed=seed,
        **parts,
        **settings,
    )
    if parts:  # as in published checkpoints
        pipeline.register_to_config(image_processor=("transformers", "CLIPImageProcessor"))
    return pipeline
