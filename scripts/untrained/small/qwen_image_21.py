"""A small Qwen-Image-2.1 pipeline with random weights."""

from diffusers import (
    AutoencoderKLQwenImage21,
    FlowMatchEulerDiscreteScheduler,
    QwenImage21Pipeline,
    QwenImage21Transformer2DModel,
)
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from flow_grpo.diffusion.models.processors import TextProcessor
from untrained.small.components import (
    CHAT,
    in_eval_mode,
    qwen_sizes,
    qwen_tokenizer,
    rope_axes,
    seeded,
    video_vae,
)

# The pipeline's system message.
SYSTEM = "Comprehend and analyze the provided prompt."


def build(
    *,
    heads: int = 2,
    head_width: int = 16,
    layers: int = 2,
    text_width: int = 32,
    text_layers: int = 2,
    vae_width: int = 8,
    sample_sigmas: list[float] | None = None,
    seed: int = 0,
) -> QwenImage21Pipeline:
    """Build the pipeline; image sides are multiples of 32."""
    pads = [f"<|{name}|>" for name in ("image_pad", "video_pad", "vision_start", "vision_end")]
    chat = CHAT.replace("message.content", "message.content[0].text")
    tokenizer = qwen_tokenizer(["system", "user", "assistant"], chat, [SYSTEM, *pads])
    text = dict(
        **qwen_sizes(tokenizer, text_width, text_layers),
        rope_parameters={"rope_type": "default", "mrope_section": [4, 2, 2]},
    )
    vision = dict(
        depth=1,
        hidden_size=16,
        intermediate_size=16,
        num_heads=1,
        out_hidden_size=text_width,
        deepstack_visual_indexes=[0],
        num_position_embeddings=16,
    )
    with seeded(seed):
        pipeline = QwenImage21Pipeline(
            transformer=QwenImage21Transformer2DModel(
                num_layers=layers,
                attention_head_dim=head_width,
                num_attention_heads=heads,
                context_in_dim=text_width,
                axes_dims_rope=rope_axes(head_width, 8),
            ),
            scheduler=FlowMatchEulerDiscreteScheduler(
                use_dynamic_shifting=True,
                base_shift=0.5,
                max_shift=0.9,
                base_image_seq_len=256,
                max_image_seq_len=8192,
                shift_terminal=0.02,
            ),
            vae=video_vae(
                AutoencoderKLQwenImage21,
                vae_width,
                decoder_base_dim=vae_width,
                dim_mult=[1, 1, 1, 1, 1],
            ),
            text_encoder=Qwen3VLForConditionalGeneration(
                Qwen3VLConfig(text_config=text, vision_config=vision)
            ),
            processor=TextProcessor(tokenizer),
            sample_sigmas=sample_sigmas,
        )
    pipeline.register_to_config(processor=("transformers", "Qwen3VLProcessor"))
    return in_eval_mode(pipeline)
