"""Small randomly initialized vision-language models of all families."""

import io
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    BaseImageProcessor,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessorPil,
    Glm4vConfig,
    Glm4vForConditionalGeneration,
    Glm4vImageProcessorPil,
    GotOcr2ImageProcessorPil,
    InternVLConfig,
    InternVLForConditionalGeneration,
    MiniCPMV4_6Config,
    MiniCPMV4_6ForConditionalGeneration,
    MiniCPMV4_6ImageProcessorPil,
    MiniCPMV4_7Config,
    MiniCPMV4_7ForConditionalGeneration,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)
from untrained.small.components import seeded

from flow_grpo.data.questions import Question
from flow_grpo.vlm.expert_layout import published_layout
from flow_grpo.vlm.prompts import PromptEncoder

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
    "<|vision_start|><|image_pad|><|vision_end|>{% elif c['type'] == 'video' %}"
    "<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ c['text'] }}{% endif %}{% endfor %}"
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
WIDE_TEXT = {"hidden_size": 128, "head_dim": 32}
WIDE_VISION = {"hidden_size": 64, "out_hidden_size": 128}
TOKEN_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "tie_word_embeddings": True,
}


FAMILIES = {
    "qwen3_vl": (Qwen3VLConfig, Qwen3VLForConditionalGeneration),
    "qwen2_5_vl": (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration),
    "qwen2_vl": (Qwen2VLConfig, Qwen2VLForConditionalGeneration),
    "qwen3_vl_moe": (Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration),
    "qwen3_5": (Qwen3_5Config, Qwen3_5ForConditionalGeneration),
    "internvl": (InternVLConfig, InternVLForConditionalGeneration),
    "glm4v": (Glm4vConfig, Glm4vForConditionalGeneration),
    "gemma3": (Gemma3Config, Gemma3ForConditionalGeneration),
    "minicpmv4_6": (MiniCPMV4_6Config, MiniCPMV4_6ForConditionalGeneration),
    "minicpmv4_7": (MiniCPMV4_7Config, MiniCPMV4_7ForConditionalGeneration),
}
OLD_LAYOUT = ("qwen2_vl", "qwen2_5_vl")  # published in another layout than transformers saves


LINEAR_ATTENTION = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
INTERNVL = {
    "text_config": {**TEXT, "model_type": "qwen3"},  # as InternVL 3.5; earlier versions have qwen2
    "vision_config": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 16,  # size of a tile, which has 2 x 2 tokens
        "patch_size": 4,
    },
    "image_token_id": IMAGE,
    "image_seq_length": 4,
    "tie_word_embeddings": True,
}

# alternating layers, a window shorter than an image, and a softmax scale that differs from the head
# size
GEMMA3_TEXT = {
    **TEXT,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 3,
    "query_pre_attn_scalar": 16,
    "tie_word_embeddings": True,
}
GEMMA3 = {
    "text_config": GEMMA3_TEXT,
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
        "vision_use_head": False,
    },
    "mm_tokens_per_image": 4,
    "image_token_index": IMAGE,
    "boi_token_index": START,
    "eoi_token_index": END,
    "tie_word_embeddings": True,
}
# a token merges 4 x 4 patches; slices have up to 32 x 32 pixels and about 2 x 2 tokens
MINICPMV_MARKERS = ["<slice>", "</slice>", "<image_id>", "</image_id>"]
SLICE_START, SLICE_END = range(VOCABULARY, VOCABULARY + 2)  # after the characters
MINICPMV = {
    "vision_config": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 48,
        "patch_size": 4,
    },
    "insert_layer_id": 0,
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "tie_word_embeddings": True,
}
MINICPMV_47 = {  # as published, the markers are in the config of 4.7 only
    "image_start_id": START,
    "image_end_id": END,
    "slice_start_id": SLICE_START,
    "slice_end_id": SLICE_END,
    "newline_id": VOCABULARY - 1,
}
# image tokens of families whose tokens differ from Qwen's; the last one is repeated
IMAGE_TOKENS = {
    "internvl": ["<img>", "</img>", "<IMG_CONTEXT>"],
    "gemma3": ["<start_of_image>", "<end_of_image>", "<image_soft_token>"],
    "minicpmv4_6": ["<image>", "</image>", "<|image_pad|>"],
    "minicpmv4_7": ["<image>", "</image>", "<|image_pad|>"],
}
PLACEHOLDERS = {  # of the template
    "internvl": "<IMG_CONTEXT>",
    "gemma3": "<start_of_image>",
    "minicpmv4_6": "<|image_pad|>",
    "minicpmv4_7": "<|image_pad|>",
}


def build(family: str = "qwen3_vl", seed: int = 0, wide: bool = False) -> nn.Module:
    """Build a model; `wide` heads have the smallest size that vLLM supports."""
    config, kind = FAMILIES[family]
    with seeded(seed):
        model = kind(config(**config_fields(family, wide))).eval()
        for parameter in model.parameters():  # larger weights, so that images affect the output
            parameter.data += 0.1 * torch.randn_like(parameter)
    generation = model.generation_config
    generation.eos_token_id, generation.pad_token_id, generation.bos_token_id = EOS, PAD, BOS
    return model


def config_fields(family: str, wide: bool = False) -> dict[str, Any]:
    """Return the config fields of a family.

    Families differ in their rotary positions, their vision tower, and whether the LM head is tied
    to the embedding.
    """
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    rope["mrope_section"] = [8, 4, 4] if wide else [2, 1, 1]
    text = {**TEXT, **WIDE_TEXT} if wide else TEXT
    vision_base = {**VISION, **WIDE_VISION} if wide else VISION
    text, token_ids = {**text, "rope_parameters": rope}, TOKEN_IDS
    if family == "internvl":
        return INTERNVL
    if family == "gemma3":
        return GEMMA3
    if family.startswith("minicpmv"):
        rope |= {"mrope_interleaved": True, "partial_rotary_factor": 0.5}
        text |= {**LINEAR_ATTENTION, "model_type": "qwen3_5_text"}
        text["vocab_size"] += len(MINICPMV_MARKERS)
        return {"text_config": text, **MINICPMV, **(MINICPMV_47 if family[-1] == "7" else {})}
    if family == "glm4v":
        rope["partial_rotary_factor"] = 1.0
        starts = {f"{kind}_start_token_id": START for kind in ("image", "video")}
        ends = {f"{kind}_end_token_id": END for kind in ("image", "video")}
        vision = {**vision_base, "image_size": 32, "intermediate_size": 48}
        token_ids = {"image_token_id": IMAGE, "video_token_id": VIDEO, **starts, **ends}
        return {"text_config": text, "vision_config": vision, **token_ids}
    if family.startswith("qwen3"):
        rope["mrope_interleaved"] = True
        vision = {**vision_base, "num_position_embeddings": 16}
        if family == "qwen3_5":
            text |= LINEAR_ATTENTION
            rope["partial_rotary_factor"] = 0.5
        else:
            vision["deepstack_visual_indexes"] = [0]
        if family == "qwen3_vl_moe":
            text |= {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
            # the experts' matrices are not square, so that a wrong layout changes their shapes
            text["moe_intermediate_size"] = 32 if wide else 48
    elif family == "qwen2_5_vl":
        # windows of 2 x 2 merged patches, and one layer with full attention
        vision = {**vision_base, "window_size": 32, "fullatt_block_indexes": [1]}
    else:
        sizes = {"embed_dim": 16, "hidden_size": TEXT["hidden_size"], "mlp_ratio": 2}
        shared = ("depth", "num_heads", "patch_size", "spatial_merge_size", "temporal_patch_size")
        vision = {**{name: VISION[name] for name in shared}, **sizes}
        # as in the larger models of all families
        token_ids = {**TOKEN_IDS, "tie_word_embeddings": False}
    return {"text_config": text, "vision_config": vision, **token_ids}


def chat_template(family: str) -> str:
    """Return the chat template; some do not mark the start and end of an image."""
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    return TEMPLATE.replace(image, PLACEHOLDERS.get(family, image))


def build_tokenizer(family: str = "qwen3_vl") -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per character."""
    special = list(SPECIAL)
    special[START : IMAGE + 1] = IMAGE_TOKENS.get(family, special[START : IMAGE + 1])
    markers = MINICPMV_MARKERS if family.startswith("minicpmv") else []
    names = {name: i for i, name in enumerate([*special, *CHARACTERS, *markers])}
    tokenizer = Tokenizer(models.WordLevel(names, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[PAD],
        bos_token=SPECIAL[BOS],
        eos_token=SPECIAL[EOS],
        additional_special_tokens=[*special[START:], *markers],
    )
    fast.chat_template = chat_template(family)
    return fast


def build_image_processor(
    family: str = "qwen3_vl",
) -> BaseImageProcessor:
    half = [0.5, 0.5, 0.5]
    if family == "internvl":
        return GotOcr2ImageProcessorPil(size={"height": 16, "width": 16}, max_patches=6)
    if family == "gemma3":
        return Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    if family.startswith("minicpmv"):
        return MiniCPMV4_6ImageProcessorPil(scale_resolution=32, patch_size=4)
    if family == "glm4v":  # its limits count two frames
        limits = {"shortest_edge": 2 * 16 * 16, "longest_edge": 2 * 64 * 64}
        return Glm4vImageProcessorPil(
            patch_size=8, merge_size=2, size=limits, image_mean=half, image_std=half
        )
    return Qwen2VLImageProcessorPil(
        patch_size=8,
        merge_size=2,
        temporal_patch_size=2,
        min_pixels=16 * 16,
        max_pixels=64 * 64,
        image_mean=half,
        image_std=half,
    )


def save(folder: Path, family: str = "qwen3_vl", wide: bool = False) -> Path:
    model = build(family, wide=wide)
    with published_layout(model, model.state_dict()):
        model.save_pretrained(folder)
    for part in (build_tokenizer(family), build_image_processor(family)):
        part.save_pretrained(folder)
    return folder


def save_as_published(folder: Path, family: str) -> Path:
    """Save a model in the layout of Qwen2-VL and Qwen2.5-VL on the hub.

    Weights and config have an older layout, and the chat template is a separate file.
    """
    model, tokenizer = build(family), build_tokenizer()
    config = config_fields(family)
    rope = config["text_config"].pop("rope_parameters")
    scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    config = {
        **{"model_type": family, "architectures": [type(model).__name__]},
        **{"rope_scaling": scaling, "rope_theta": rope["rope_theta"]},
        **config.pop("text_config"),
        **config,
    }
    template = {"chat_template": tokenizer.chat_template}
    tokenizer.chat_template = None
    for part in (tokenizer, model.generation_config):
        part.save_pretrained(folder)
    processor = build_image_processor()
    shared = ("patch_size", "merge_size", "temporal_patch_size", "image_mean", "image_std")
    files = {
        "config.json": config,
        "chat_template.json": template,
        "preprocessor_config.json": {
            **{name: getattr(processor, name) for name in shared},
            **{"min_pixels": 16 * 16, "max_pixels": 64 * 64},
            "image_processor_type": "Qwen2VLImageProcessor",
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    weights = {}
    for name, weight in model.state_dict().items():
        if name != "lm_head.weight" or not config["tie_word_embeddings"]:
            older = re.sub(r"^model\.language_model", "model", name)
            weights[re.sub(r"^model\.visual", "visual", older)] = weight.contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def encoder(model: nn.Module, **settings) -> PromptEncoder:
    """Build the prompt encoder of a small model."""
    family = model.config.model_type
    readers = (build_tokenizer(family), build_image_processor(family))
    return PromptEncoder(*readers, model, **settings)


def random_image(seed: int, height: int = 32, width: int = 48) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(256, size=(height, width, 3), dtype="u1")
    return Image.fromarray(pixels)


def encode_image(image: Image.Image, kind: str = "PNG", **settings: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **settings)
    return file.getvalue()


def process_info(index: int = 0, count: int = 1) -> SimpleNamespace:
    """Return the attributes of an `Accelerator` that describe this process."""
    return SimpleNamespace(process_index=index, num_processes=count, is_main_process=index == 0)


def questions(folder: Path) -> list[Question]:
    """Return questions without an image, with one image, and with two of different sizes."""
    folder.mkdir(exist_ok=True)
    paths = []
    for seed, size in enumerate([(32, 48), (16, 32), (48, 48)]):
        paths.append(folder / f"{seed}.png")
        random_image(seed, *size).save(paths[-1])

    def question(text: str, *images: Path) -> Question:
        return Question(text, tuple(images), "1", {"answer": "1"}, f"row of {text!r}")

    return [
        question("What is 1+2?"),
        question("How many?", paths[0]),
        question("Compare <image> with <image>!", paths[1], paths[2]),
    ]


def resized_image_question(folder: Path) -> Question:
    """Return a question whose image the processor resizes."""
    random_image(3, 37, 61).save(folder / "odd.png")
    return replace(questions(folder)[1], images=(folder / "odd.png",))


def write_data(folder: Path, train: int = 8, test: int = 4) -> Path:
    """Write a dataset that repeats the three questions."""
    examples = questions(folder)
    for split, count in {"train": train, "test": test}.items():
        rows = [
            {
                "question": examples[i % 3].text,
                "images": [path.name for path in examples[i % 3].images],
                "answer": str(i),
            }
            for i in range(count)
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    return folder


def write_pairs(folder: Path, train: int = 8, test: int = 4) -> Path:
    """Write preference pairs about the three questions; a preferred response has no "s"."""
    examples = questions(folder)
    for split, count in {"train": train, "test": test}.items():
        rows = [
            {
                "prompt": examples[i % 3].text,
                "images": [path.name for path in examples[i % 3].images],
                "chosen": f"It is {i}" if i % 2 else f"{i}",
                "rejected": f"It is {'s' * i} {i}s.",
                "margin": i / 8,
            }
            for i in range(count)
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    return folder


def write_given_data(folder: Path, train: int = 8) -> Path:
    """Write preference pairs of unlike lengths on the three questions, and test questions."""
    write_data(folder, test=2)
    examples, pairs = questions(folder), [("1", "three"), ("Two of them", "2"), ("ab", "abcdefgh")]
    rows = [
        {
            "question": examples[i % 3].text,
            "images": [path.name for path in examples[i % 3].images],
            "chosen": f"{pairs[i % 3][0]}{i}",
            "rejected": pairs[i % 3][1],
        }
        for i in range(train)
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "train.jsonl").write_text(lines, encoding="utf-8")
    return folder


def write_text_data(folder: Path) -> Path:
    """Write a dataset of questions without images."""
    folder.mkdir()
    for split in ("train", "test"):
        rows = [{"question": f"{i} + {i}?", "answer": str(2 * i)} for i in range(8)]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    return folder


def early_letters(responses: list[str], questions: list[str], metadata: list[dict]) -> list[float]:
    """Reward that any model can learn: the fraction of characters before "P" in ASCII."""
    return [sum(c < "P" for c in response) / max(1, len(response)) for response in responses]


def constant_reward(
    responses: list[str], questions: list[str], metadata: list[dict]
) -> list[float]:
    return [1.0] * len(responses)


def constant_for_some(
    responses: list[str], questions: list[str], metadata: list[dict]
) -> list[float]:
    """Return a constant for the responses to every other question."""
    scores = early_letters(responses, questions, metadata)
    constant = [int(row["answer"]) % 2 for row in metadata]
    return [0.5 if same else score for score, same in zip(scores, constant, strict=True)]


def failing_reward(responses: list[str], questions: list[str], metadata: list[dict]) -> list[float]:
    if len(responses) > 1:  # the check before training scores one response
        raise OSError("no such weights")
    return [0.0]


def broken_on_rank_1(
    responses: list[str], questions: list[str], metadata: list[dict]
) -> list[float]:
    """Raise an error on rank 1, but not in the check before training."""
    if os.environ["RANK"] == "1" and "No idea." not in responses:
        raise TypeError("no such letter")
    return early_letters(responses, questions, metadata)


def early_letters_or_nan(responses: list[str], questions: list[str], metadata: list[dict]) -> list:
    """Return NaN for the responses to one question."""
    scores = early_letters(responses, questions, metadata)
    return [
        float("nan") if row["answer"] == "5" else score
        for score, row in zip(scores, metadata, strict=True)
    ]
