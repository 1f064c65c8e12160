"""Throughput and memory of HPSv3, VideoAlign, EditReward and GenEval 2 at full size on one GPU.

    PYTHONPATH=.:scripts python tests/gpu/benchmark_rewards.py

The networks have random weights and the prompts random tokens of realistic lengths. Prints a line
of JSON per reward and batch size: samples per second with the preprocessing on the CPU, those of
the network alone, and the peak of the GPU memory.
"""

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLImageProcessorPil,
    Qwen2VLModel,
)
from untrained.vlm import TOKEN_IDS, build

from flow_grpo.rewards.frames import Video
from flow_grpo.rewards.loading import build_linear_head
from flow_grpo.rewards.qwen_vl_regression import RegressionNetwork
from flow_grpo.rewards.qwen_vl_visuals import Patcher
from flow_grpo.rewards.scorers.editreward import EditReward
from flow_grpo.rewards.scorers.geneval2 import GenEval2
from flow_grpo.rewards.scorers.hpsv3 import HpsV3
from flow_grpo.rewards.scorers.videoalign import VideoAlign

CUDA = torch.device("cuda")
VOCABULARY, CHARACTERS_PER_TOKEN = 151_660, 4.6
PROMPT = "a photo of a red fox that jumps over a fallen tree in a snowy forest"
TEXT_7B = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}
TEXT_2B = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
}
ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
VISION = {"depth": 32, "embed_dim": 1280, "num_heads": 16, "mlp_ratio": 4}
QUESTIONS = [
    ["How many cows are in the image?", "three"],
    ["Are the cows plastic?", "Yes"],
    ["Are there any cows in the image?", "Yes"],
    ["Is it big?", "Yes"],
]
SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"]
SPECIAL += ["<|image_pad|>", "<|video_pad|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{% for c in m['content'] %}{% if c['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c['text'] }}{% endif %}{% endfor %}"
    "<|im_end|>{% endfor %}<|im_start|>"
)


def build_qwen2_vl(text: dict[str, int]) -> nn.Module:
    config = Qwen2VLConfig(
        text_config={**text, "vocab_size": VOCABULARY, "rope_parameters": ROPE},
        vision_config={**VISION, "hidden_size": text["hidden_size"]},
    )
    torch.set_default_dtype(torch.bfloat16)
    try:
        with CUDA:
            return Qwen2VLModel(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def build_head(width: int) -> nn.Module:
    sides = (1024, width), (16, 1024), (2, 16)
    weights = {}
    for i, (rows, columns) in zip((0, 3, 5), sides, strict=True):
        weights[f"{i}.weight"] = 0.02 * torch.randn(rows, columns)
        weights[f"{i}.bias"] = torch.zeros(rows)
    return build_linear_head(weights, width, 2, nn.ReLU)


class RandomTokenizer:
    pad_token_id = 0

    def get_added_vocab(self) -> dict[str, int]:
        return {}

    def convert_tokens_to_ids(self, token: str) -> int:
        return TOKEN_IDS["image_token_id"]


class RandomWeights:
    """Replaces the loading of weights and the tokenization of a regression reward."""

    def load(self) -> RegressionNetwork:
        self.tokenizer, self.patcher = RandomTokenizer(), Patcher()
        self.reward_ids = [VOCABULARY - 1 - i for i in range(len(self.reward_tokens))]
        return RegressionNetwork(*self.build_parts())

    def _tokenize(self, text: str, visuals: list) -> Tensor:
        length = round(len(text) / CHARACTERS_PER_TOKEN)
        parts = [torch.full((20,), 100)]
        parts += [
            torch.full((self.patcher.tokens(each),), TOKEN_IDS["image_token_id"])
            for each in visuals
        ]
        for each in self.reward_ids:
            parts += [torch.full((length // len(self.reward_ids),), 100), torch.tensor([each])]
        return torch.cat([*parts, torch.full((10,), 100)])


class RandomHpsV3(RandomWeights, HpsV3):
    def build_parts(self) -> tuple[nn.Module, nn.Module]:
        return build_qwen2_vl(TEXT_7B), build_head(3584)


class RandomVideoAlign(RandomWeights, VideoAlign):
    def build_parts(self) -> tuple[nn.Module, nn.Module]:
        return build_qwen2_vl(TEXT_2B), nn.Linear(1536, 3, bias=False)


class RandomEditReward(RandomWeights, EditReward):
    def build_parts(self) -> tuple[nn.Module, nn.Module]:
        heads = nn.ModuleList([build_head(3584), build_head(3584)])
        return build("qwen2.5-vl-7b", CUDA, torch.bfloat16).model.eval(), heads


class RandomGenEval2(GenEval2):
    """GenEval 2 with random weights and a tokenizer of single characters."""

    def load(self) -> nn.Module:
        characters = [chr(i) for i in range(32, 127)] + ["\n"]
        ids = {token: i for i, token in enumerate([*SPECIAL, *characters])}
        ids |= {"<|image_pad|>": TOKEN_IDS["image_token_id"]}
        tokenizer = Tokenizer(models.WordLevel(ids, unk_token=" "))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
        self.tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token=SPECIAL[0], additional_special_tokens=SPECIAL[1:]
        )
        self.tokenizer.chat_template = TEMPLATE
        self.image_processor = Qwen2VLImageProcessorPil(patch_size=16, merge_size=2)
        return build("qwen3-vl-8b", CUDA, torch.bfloat16).eval()


def make_image(seed: int, width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(256, size=(height, width, 3), dtype="u1")
    return Image.fromarray(pixels)


def seconds_of(call: Callable[[], Any], repeats: int = 2) -> float:
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def measure(scorer: Any, title: str, samples: list, rows: list[dict]) -> None:
    for size in (1, 16):
        scorer.batch_size = size
        torch.cuda.reset_peak_memory_stats()
        batch = samples[:size], [PROMPT] * size, rows[:size]
        line = {"reward": title, "batch_size": size}
        line["per_s"] = round(size / seconds_of(lambda batch=batch: scorer(*batch)), 2)
        if isinstance(scorer, RandomWeights):
            visuals = [scorer.prepare_sample(*each) for each in zip(batch[0], rows, strict=False)]
            with torch.inference_mode():
                network = seconds_of(lambda v=visuals, p=batch[1]: scorer.score_batch(v, p))
            line["network_per_s"] = round(size / network, 2)
        scores = scorer(*batch)[0]
        assert all(np.isfinite(scores)), scores
        line["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        print(json.dumps(line), flush=True)


def main() -> None:
    print(torch.cuda.get_device_name(), torch.__version__)
    images = [make_image(i, 512, 512) for i in range(16)]
    clip = [make_image(i, 832, 480) for i in range(81)]
    videos = [Video(clip, fps=16.0)] * 16
    sources = [{"source": image} for image in images]
    vqa = [{"vqa_list": QUESTIONS}] * 16
    paths = {"device": "cuda", "model": "none", "processor": "none"}
    judge = {"device": "cuda", "model": "none", "dtype": "bfloat16"}
    for kind, settings, title, samples, rows in (
        (RandomHpsV3, paths, "hpsv3, 512 x 512", images, [{}] * 16),
        (RandomVideoAlign, paths, "videoalign, 81 frames of 832 x 480", videos, [{}] * 16),
        (RandomEditReward, paths, "editreward, 512 x 512", images, sources),
        (RandomGenEval2, judge, "geneval2, 4 questions, 512 x 512", images, vqa),
        (RandomGenEval2, judge | {"quantize": "fp8"}, "geneval2 in FP8", images, vqa),
    ):
        scorer = kind(**settings)
        measure(scorer, title, samples, rows)
        del scorer
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
