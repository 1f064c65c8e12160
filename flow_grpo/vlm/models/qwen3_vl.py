"""Qwen3-VL, whose prompts contain the time of each temporal patch of a video as text."""

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from flow_grpo.data.videos import FrameSelection
from flow_grpo.vlm.models.base import VisionInputs
from flow_grpo.vlm.models.qwen_vl import GRID, SECONDS_PER_GRID, QwenVL

START, VIDEO, END = "<|vision_start|>", "<|video_pad|>", "<|vision_end|>"


class Qwen3VL(QwenVL):
    """Qwen3-VL, dense and mixture of experts; video timestamps are text."""

    names = {  # noqa: RUF012
        "qwen3_vl": "Qwen3-VL",
        "qwen3_vl_moe": "Qwen3-VL",  # its experts are not linear layers and get no LoRA
    }
    vllm_scratch_buffers = "deepstack_input_embeds"

    def complete_chat(self, chat: str, clips: Sequence[FrameSelection]) -> str:
        """Replace each video placeholder by one with a timestamp per temporal patch."""
        patch_size = self.model.config.vision_config.temporal_patch_size
        remaining = iter(clips)

        def add_timestamps(match: re.Match[str]) -> str:
            """Return the next video's placeholders: one per temporal patch, after its time."""
            clip = next(remaining, None)
            if clip is None:  # more placeholders than videos; reported later
                return match[0]
            seconds = [*clip.seconds, *clip.seconds[-1:] * (-len(clip.seconds) % patch_size)]
            pairs = zip(seconds[::patch_size], seconds[patch_size - 1 :: patch_size], strict=True)
            times = ((first + last) / 2 for first, last in pairs)
            return "".join(f"<{time:.1f} seconds>{START}{VIDEO}{END}" for time in times)

        return re.sub(re.escape(VIDEO), add_timestamps, chat)

    def tokens_per_placeholder(self, temporal_patches: int, tokens: int) -> list[int]:
        return [tokens] * temporal_patches

    def compute_positions(self, ids: Tensor, images: Sequence[VisionInputs]) -> Tensor:
        """Return the position ids, (axes, P).

        Each temporal patch counts as a separate image, because Qwen3-VL encodes timestamps as text
        tokens.
        """
        patches = []
        for image in images:
            count, *size = image[GRID][0].tolist()
            patch = {GRID: torch.tensor([[1, *size]]), SECONDS_PER_GRID: torch.zeros(1)}
            patches += [patch] * count
        return super().compute_positions(ids, patches)
