"""Train assets/tiny-zoom, a small VLM that can zoom into its image.

    python scripts/pretrain_tiny_zoom.py --out new/tiny-zoom

The images and questions are those of `make_tool_questions.py`, drawn for each batch. The model can
zoom into the corner that a question is about and read its digit, but it rarely does: `BEHAVIOURS`
sets how often it zooms into this corner, into another one, or guesses, which leaves room for
improvement by reinforcement learning. The first three quarters of the training contain only correct
calls, so that the model learns to read.
"""

import json
import random
from collections.abc import Mapping

import torch
from make_tool_questions import BOXES, draw_digits
from PIL import Image
from tiny_vlm.imitation import (
    EMBEDDING_STD,
    encode_turns,
    initialize_copying,
    load_tokenizer,
    pad_rows,
    parse_args,
    save,
    train,
)
from tiny_vlm.model import build_model, build_processor
from tiny_vlm.texts import IMAGE, SPECIAL, VISION_END, VISION_START
from torch import Tensor
from transformers import AddedToken, Qwen3VLForConditionalGeneration
from transformers.models.paddleocr_vl import PaddleOCRVLProcessor

from flow_grpo.vlm.environments.tool_calls import (
    CLOSING,
    OPENING,
    RESPONSE_CLOSING,
    RESPONSE_OPENING,
)

BEHAVIOURS = {"guess": 0.6, "other corner": 0.15, "zoom": 0.25}
PARTS = (
    *("<tool_call>", "</tool_call>", "<tool_response>\n", "\n</tool_response>"),
    *("<answer>", "</answer>", '{"name": "', '", "arguments": {"', '": [', "]}}"),
    *("zoom", "box", "Which digit is ", *BOXES),
)
SIDE, TOKENS_PER_IMAGE = 32, 4  # of an image as the model sees it
IMAGE_TEXT = "".join(SPECIAL[i] for i in (VISION_START, *[IMAGE] * TOKENS_PER_IMAGE, VISION_END))
BATCH_SIZE = 32
SHOWN, GAP = 256, 16  # pixels of an image in the sample, and between images


def build(seed: int) -> tuple[Qwen3VLForConditionalGeneration, PaddleOCRVLProcessor]:
    """Build the model with random weights, 0.5 M parameters, and its processor."""
    tokenizer = load_tokenizer()
    tokenizer.add_tokens([AddedToken(part, normalized=False) for part in PARTS])
    torch.manual_seed(seed)
    model = build_model(
        text_layers=2,
        vision_layers=2,
        heads=3,
        key_value_heads=3,
        vision_heads=2,
        vocabulary=len(tokenizer),
    )
    model.get_input_embeddings().weight.data.normal_(std=EMBEDDING_STD)
    initialize_copying(model.model.language_model.layers)
    return model, build_processor(tokenizer, SIDE**2)


def demonstrate(rng: random.Random, behaviour: str) -> tuple[list[str], list[Image.Image]]:
    """Return the alternating turns of the user and the assistant, and the images in them."""
    digits = dict(zip(BOXES, rng.choices(range(10), k=len(BOXES)), strict=True))
    image, corner = draw_digits(rng, list(digits.values())), rng.choice(list(BOXES))
    question = f"{IMAGE_TEXT}Which digit is {corner}?"
    if behaviour == "guess":
        return [question, f"<answer>{rng.randrange(10)}</answer>"], [image]
    if behaviour == "other corner":
        corner = rng.choice([other for other in BOXES if other != corner])
    call = json.dumps({"name": "zoom", "arguments": {"box": BOXES[corner]}})
    turns = [
        *(question, f"{OPENING}{call}{CLOSING}"),
        f"{RESPONSE_OPENING}{IMAGE_TEXT}{RESPONSE_CLOSING}",
        f"<answer>{digits[corner]}</answer>",
    ]
    return turns, [image, image.crop(BOXES[corner])]


def make_batch(
    rng: random.Random, processor: PaddleOCRVLProcessor, behaviours: Mapping[str, float]
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the inputs of the model and the labels, (B, L); only its responses have labels."""
    rows, images = [], []
    for behaviour in rng.choices(list(behaviours), list(behaviours.values()), k=BATCH_SIZE):
        turns, own_images = demonstrate(rng, behaviour)
        rows.append(encode_turns(processor.tokenizer, turns))
        images += own_images
    tokens, labels = pad_rows(rows)
    pixels = processor.image_processor(images, return_tensors="pt")
    return {"input_ids": tokens, "mm_token_type_ids": (tokens == IMAGE).long(), **pixels}, labels


def pretrain(
    model: Qwen3VLForConditionalGeneration, processor: PaddleOCRVLProcessor, steps: int, seed: int
) -> list[float]:
    """Train the model by next-token prediction; return the loss of every step."""
    rng = random.Random(seed)

    def draw_batch(step: int) -> tuple[dict[str, Tensor], Tensor]:
        behaviours = BEHAVIOURS if step >= 3 * steps // 4 else {"zoom": 1.0}
        return make_batch(rng, processor, behaviours)

    return train(model, draw_batch, steps)


def draw_sample(processor: PaddleOCRVLProcessor) -> Image.Image:
    """Draw an image, and this image and one of its crops as the model sees them, side by side."""
    image = draw_digits(random.Random(0), [2, 5, 7, 8])
    seen = [
        each.resize((SIDE, SIDE), processor.image_processor.resample)
        for each in (image, image.crop(BOXES["top left"]))
    ]
    sample = Image.new("RGB", (3 * SHOWN + 2 * GAP, SHOWN), "white")
    for number, each in enumerate((image, *seen)):
        sample.paste(
            each.resize((SHOWN, SHOWN), Image.Resampling.NEAREST), (number * (SHOWN + GAP), 0)
        )
    return sample


def main() -> None:
    """Train the model and write it to the output directory."""
    args = parse_args(__doc__, steps=440)
    model, processor = build(args.seed)
    losses = pretrain(model, processor, args.steps, args.seed)
    save(model, processor, args.out, losses)
    draw_sample(processor).save(args.out / "samples.png", optimize=True)


if __name__ == "__main__":
    main()
