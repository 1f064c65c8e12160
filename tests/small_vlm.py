"""Random vision-language models of both families, small enough for any test."""

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from flow_grpo.models.small.parts import seeded
from flow_grpo.vlm.prompts import PromptEncoder
from flow_grpo.vlm.questions import Question

SPECIAL = [
    *("<|pad|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|image_pad|>", "<|video_pad|>"),
]
PAD, BOS, EOS, START, END, IMAGE, VIDEO = range(7)
CHARACTERS = [chr(i) for i in range(32, 127)] + ["\n"]
VOCABULARY = len(SPECIAL) + len(CHARACTERS)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for c in m['content'] %}{% if c['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c['text'] }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
VISION = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_heads": 2,
    "patch_size": 8,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
}
MARKS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "tie_word_embeddings": True,
}


def build(family: str = "qwen3_vl", seed: int = 0) -> nn.Module:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    if family == "qwen3_vl":
        text = {**TEXT, "rope_parameters": {**rope, "mrope_interleaved": True}}
        vision = {**VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
        config, kind = Qwen3VLConfig, Qwen3VLForConditionalGeneration
    else:
        text = {**TEXT, "rope_parameters": rope}
        # windows of 2 x 2 merged patches, and one layer that sees all of a picture
        vision = {**VISION, "window_size": 32, "fullatt_block_indexes": [1]}
        config, kind = Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    with seeded(seed):
        model = kind(config(text_config=text, vision_config=vision, **MARKS)).eval()
        for parameter in model.parameters():  # larger than at the start: pictures have to matter
            parameter.data += 0.1 * torch.randn_like(parameter)
    own = model.generation_config
    own.eos_token_id, own.pad_token_id, own.bos_token_id = EOS, PAD, BOS
    return model


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A token per character."""
    names = {name: i for i, name in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(names, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[PAD],
        bos_token=SPECIAL[BOS],
        eos_token=SPECIAL[EOS],
        additional_special_tokens=SPECIAL[START:],
    )
    fast.chat_template = TEMPLATE
    return fast


def build_image_processor() -> Qwen2VLImageProcessorPil:
    half = [0.5, 0.5, 0.5]
    return Qwen2VLImageProcessorPil(
        patch_size=8,
        merge_size=2,
        temporal_patch_size=2,
        min_pixels=16 * 16,
        max_pixels=64 * 64,
        image_mean=half,
        image_std=half,
    )


def save(folder: Path, family: str = "qwen3_vl") -> Path:
    for part in (build(family), build_tokenizer(), build_image_processor()):
        part.save_pretrained(folder)
    return folder


def encoder(model: nn.Module, **settings) -> PromptEncoder:
    return PromptEncoder(build_tokenizer(), build_image_processor(), model, **settings)


def picture(seed: int, height: int = 32, width: int = 48) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(256, size=(height, width, 3), dtype="u1")
    return Image.fromarray(pixels)


def questions(folder: Path) -> list[Question]:
    """Without pictures, with one, with two of unlike sizes."""
    folder.mkdir(exist_ok=True)
    paths = []
    for seed, size in enumerate([(32, 48), (16, 32), (48, 48)]):
        paths.append(folder / f"{seed}.png")
        picture(seed, *size).save(paths[-1])

    def question(text: str, *images: Path) -> Question:
        return Question(text, tuple(images), "1", {"answer": "1"}, f"row of {text!r}")

    return [
        question("What is 1+2?"),
        question("How many?", paths[0]),
        question("Compare <image> with <image>!", paths[1], paths[2]),
    ]


def small_data(folder: Path, train: int = 8, test: int = 4) -> Path:
    """Questions of all three kinds, many times over."""
    asked = questions(folder)
    for split, count in {"train": train, "test": test}.items():
        rows = [
            {
                "question": asked[i % 3].text,
                "images": [path.name for path in asked[i % 3].images],
                "answer": str(i),
            }
            for i in range(count)
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    return folder


def early_letters(answers: list[str], questions: list[str], metadata: list[dict]) -> list[float]:
    """A reward that any model can learn: the share of characters of the first half of the table."""
    return [sum(c < "P" for c in answer) / max(1, len(answer)) for answer in answers]


def same_for_all(answers: list[str], questions: list[str], metadata: list[dict]) -> list[float]:
    return [1.0] * len(answers)


def flat_for_some(answers: list[str], questions: list[str], metadata: list[dict]) -> list[float]:
    """The same for all answers to every other question."""
    letters = early_letters(answers, questions, metadata)
    flat = [int(own["answer"]) % 2 for own in metadata]
    return [0.5 if same else own for own, same in zip(letters, flat, strict=True)]


def letters_or_nothing(answers: list[str], questions: list[str], metadata: list[dict]) -> list:
    """One question cannot be scored."""
    letters = early_letters(answers, questions, metadata)
    return [
        float("nan") if own["answer"] == "5" else letter
        for letter, own in zip(letters, metadata, strict=True)
    ]
