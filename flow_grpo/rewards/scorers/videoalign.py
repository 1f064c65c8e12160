"""VideoAlign's VideoReward (arXiv 2501.13918): visual quality, motion quality, text alignment.

The model is Qwen2-VL-2B with a linear head, without bias, at one special token for each of the
three (KwaiVGI/VideoAlign: trainer.py, inference.py, prompt_template.py, vision_process.py). The
prompt is in the last block, that of text alignment, so that it cannot affect the other two.
"""

from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor, nn

from flow_grpo.errors import UserError
from flow_grpo.rewards.failure import TooFewFrames
from flow_grpo.rewards.frames import DEFAULT_FPS, WHOLE_VIDEO
from flow_grpo.rewards.frozen_model import SCORE, Values
from flow_grpo.rewards.loading import Weights
from flow_grpo.rewards.option_checks import check_choice
from flow_grpo.rewards.qwen_vl_regression import PROMPT, QwenVlRegression, read_template
from flow_grpo.rewards.qwen_vl_visuals import Visual

FPS = 2.0  # of the frames that are scored
MIN_FRAMES, MAX_FRAMES = 4, 768
MIN_TOKENS, MAX_TOKENS = 128, 256  # of a frame
LORA_ALPHA = 128
# Mean and standard deviation that normalize each dimension, from the published model_config.json
# (`inference_config`).
DIMENSIONS = {"vq": (3.6757, 2.2476), "mq": (1.1646, 1.3811), "ta": (2.8105, 2.5121)}
OVERALL = "overall"


@dataclass(kw_only=True, eq=False)
class VideoAlign(QwenVlRegression):
    """VideoReward: z-scores of visual quality, motion quality and text alignment, which are logged.

    `score` is "overall", their sum, or one of "vq", "mq" and "ta".
    """

    model: str = "KwaiVGI/VideoReward"
    processor: str = "Qwen/Qwen2-VL-2B-Instruct"
    batch_size: int = 4
    score: str = OVERALL
    fps: float | None = None  # of the videos; None: as generated, and 16 on a reward server

    checkpoint = "a VideoReward checkpoint"
    files = ("model.safetensors", "model.pth", "checkpoint-11352/model.pth")
    visual_kind = "video"
    frames = WHOLE_VIDEO
    reward_tokens = ("<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>")
    template = read_template("videoalign")

    def _check_options(self) -> None:
        super()._check_options()
        check_choice("score", self.score, (OVERALL, *DIMENSIONS))
        if self.fps is not None and not (isinstance(self.fps, int | float) and 0 < self.fps < 1e6):
            raise UserError("must be a positive number", field="fps", value=self.fps)

    def convert_weights(self, weights: Weights) -> Weights:
        prefix = "base_model.model."  # of PEFT
        plain = {name.removeprefix(prefix): value for name, value in weights.items()}
        return super().convert_weights(merge_lora(plain, LORA_ALPHA))

    def build_head(self, weights: Weights, width: int) -> nn.Module:
        """Build the linear head: one output for all tokens, or one output per token."""
        matrix = weights["rm_head.weight"].float()
        if matrix.shape not in {(1, width), (len(DIMENSIONS), width)}:
            raise ValueError(f"rm_head.weight has the shape {tuple(matrix.shape)}")
        head = nn.Linear(width, len(matrix), bias=False)
        head.load_state_dict({"weight": matrix})
        return head

    @property
    def min_frames(self) -> int:
        return self.patcher.temporal

    def prepare_sample(self, sample: list[Image.Image], row: dict) -> list[Visual] | TooFewFrames:
        if len(sample) < self.min_frames:
            return TooFewFrames(len(sample), self.min_frames)
        fps = self.fps or getattr(sample, "fps", DEFAULT_FPS)
        chosen = [sample[i] for i in sampled_frames(len(sample), fps)]
        return [self.patcher.video(chosen, MIN_TOKENS, MAX_TOKENS)]

    def score_batch(self, visuals: list[list[Visual]], prompts: list[str]) -> Values:
        texts = [self.template.replace(PROMPT, prompt) for prompt in prompts]
        states = self.reward_states(texts, visuals, self.encode_visuals(visuals))
        raw = select_outputs(self.network.head(states))  # (N, 3)
        values = {
            name: (column - mean) / std
            for (name, (mean, std)), column in zip(DIMENSIONS.items(), raw.unbind(1), strict=True)
        }
        overall = sum(values.values())
        return {SCORE: overall if self.score == OVERALL else values[self.score], **values}


def select_outputs(outputs: Tensor) -> Tensor:
    """Return the output of each token's own dimension, (N, 3), from (N, 3, 1 or 3)."""
    return outputs.squeeze(2) if outputs.shape[2] == 1 else outputs.diagonal(dim1=1, dim2=2)


def sampled_frames(count: int, fps: float) -> list[int]:
    """Return the indices of an even number of evenly spaced frames, about `FPS` per second.

    Args:
        count: Frames of the video, at least 2.
        fps: Its frame rate.
    """
    most = min(MAX_FRAMES, count) // 2 * 2
    number = round(min(max(count / fps * FPS, MIN_FRAMES), most) / 2) * 2
    return torch.linspace(0, count - 1, number).round().long().tolist()


def merge_lora(weights: Weights, alpha: float) -> Weights:
    """Merge the LoRA of a state dict of PEFT into its base weights, in float32.

    Args:
        weights: State dict in which an adapted layer has `base_layer`, `lora_A.default` and
            `lora_B.default`; one without a LoRA is returned unchanged.
        alpha: The LoRA is scaled by `alpha` / rank.
    """
    if not any(".lora_A." in name for name in weights):
        return weights
    merged = {}
    for name, value in weights.items():
        module = name.removesuffix(".base_layer.weight")
        if ".lora_" in name:
            continue
        if module != name:
            down, up = (weights[f"{module}.lora_{part}.default.weight"].float() for part in "AB")
            value = value.float() + alpha / len(down) * (up @ down)
        merged[name.replace(".base_layer.", ".")] = value
    return merged
