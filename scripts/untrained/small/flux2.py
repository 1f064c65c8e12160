"""A small FLUX.2-dev pipeline with random weights."""

from diffusers import Flux2Pipeline
from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE
from transformers import Mistral3Config, Mistral3ForConditionalGeneration

from untrained.small.flux2_klein import drawing_parts
from untrained.small.parts import in_eval_mode, qwen_sizes, qwen_tokenizer, seeded

CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content[0].text }}{% endfor %}"


def build(*, text_width: int = 32, text_layers: int = 30, seed: int = 0, **sizes) -> Flux2Pipeline:
    """Images are a multiple of 16 pixels; of texts the 10th, 20th and 30th layer is read."""
    # what it puts before each prompt is one token
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
            **drawing_parts(text_width, guidance_embeds=True, **sizes),
            text_encoder=Mistral3ForConditionalGeneration(
                Mistral3Config(text_config=text, vision_config=vision)
            ),
            tokenizer=tokenizer,
        )
    # the published one has a processor, whose tokenizer this stands for
    pipeline.register_to_config(tokenizer=("transformers", "PixtralProcessor"))
    return in_eval_mode(pipeline)
