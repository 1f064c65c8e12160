"""A small Wan 2.1 image-to-video pipeline with random weights; with a `boundary_ratio` Wan 2.2's,
which has two transformers and no encoder of pictures."""

from diffusers import WanImageToVideoPipeline
from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModel

from untrained.small import wan
from untrained.small.parts import seeded

SIDE, WIDTH = 28, 16  # of what the encoder sees


def build(
    *, latent_channels: int = 16, boundary_ratio: float | None = None, seed: int = 0, **settings
) -> WanImageToVideoPipeline:
    """Frames are a multiple of 16 pixels, and one more than a multiple of 4 in number."""
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
    if parts:  # as real ones are saved
        pipeline.register_to_config(image_processor=("transformers", "CLIPImageProcessor"))
    return pipeline
