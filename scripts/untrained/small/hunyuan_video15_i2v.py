"""A small HunyuanVideo 1.5 image-to-video pipeline with random weights."""

from diffusers import HunyuanVideo15ImageToVideoPipeline
from transformers import SiglipImageProcessorPil, SiglipVisionConfig, SiglipVisionModel

from untrained.small import hunyuan_video15
from untrained.small.components import seeded

SIDE = 28  # input size of the image encoder


def build(*, seed: int = 0, **settings) -> HunyuanVideo15ImageToVideoPipeline:
    """Build the pipeline; sides are multiples of 16, the number of frames is 4 n + 1."""
    transformer = {"task_type": "i2v", **settings.pop("transformer", {})}
    text_to_video = hunyuan_video15.build(seed=seed, transformer=transformer, **settings)
    vision = SiglipVisionConfig(
        hidden_size=hunyuan_video15.IMAGE_WIDTH,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=SIDE,
        patch_size=SIDE // 2,
    )
    with seeded(seed + 1):
        encoder = SiglipVisionModel(vision).eval()
    pipeline = HunyuanVideo15ImageToVideoPipeline(
        **text_to_video.components,
        image_encoder=encoder,
        feature_extractor=SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE}),
    )
    # as in published checkpoints
    pipeline.register_to_config(feature_extractor=("transformers", "SiglipImageProcessor"))
    return pipeline
