"""A small FLUX.2-dev pipeline with random weights."""

from diffusers import Flux2Pipeline
from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE
from transformers import Mistral3Config, Mistral3ForConditionalGeneration

from untrained.small.components import in_eval_mode, qwen_sizes, qwen_tokenizer, seeded
from untrained.small.flux2_klein import image_components

CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content[0].text }}{% endfor %}"


def build(*, text_width: int = 32, text_layers: int = 30, seed: int = 0, **sizes) -> Flux2Pipeline:
    """Build the pipeline, which reads text layers 10, 20 and 30; sides are multiples of 16."""
    # the system message is a single token
    tokenizer = qwen_tokenizer(["system", "user"], CHAT, [SYSTEM_MESSAGE])
    sizes_of_text = qwen_sizes(tokenizer, text_width, text_layers)
    text = dict(model_type="mistral", initializer_range=0.1, **sizes_of_text)
    vision = dict(
        model_type="pixtral",
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        head_dim=16,
    )
    with seeded(seed):
        pipeline = Flux2Pipeline(
            **image_components(text_width, guidance_embeds=True, **sizes),
            text_encoder=Mistral3ForConditionalGeneration(
                Mistral3Config(text_config=text, vision_config=vision)
            ),
            tokenizer=tokenizer,
        )
    # the published pipeline has a processor with this tokenizer
    pipeline.register_to_config(tokenizer=("transformers", "PixtralProcessor"))
    return in_eval_mode(pipeline)
