"""Qwen3-VL: in a video, the time of each moment is written before it."""

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from flow_grpo.answer.models.base import Seen
from flow_grpo.answer.models.qwen_vl import GRID, MOMENT, QwenVL
from flow_grpo.data.videos import Clip

START, VIDEO, END = "<|vision_start|>", "<|video_pad|>", "<|vision_end|>"


class Qwen3VL(QwenVL):
    names = {  # noqa: RUF012
        "qwen3_vl": "Qwen3-VL",
        "qwen3_vl_moe": "Qwen3-VL",  # whose experts are no layers of LoRA's, and stay as they are
    }
    vllm_scratch = "deepstack_input_embeds"  # sums for the first layers

    def written(self, chat: str, clips: Sequence[Clip]) -> str:
        merged, left = self.model.config.vision_config.temporal_patch_size, iter(clips)

        def moments(found: re.Match[str]) -> str:
            if (clip := next(left, None)) is None:  # more places than videos, which is told later
                return found[0]
            seconds = [*clip.seconds, *clip.seconds[-1:] * (-len(clip.seconds) % merged)]
            pairs = zip(seconds[::merged], seconds[merged - 1 :: merged], strict=True)
            times = ((first + last) / 2 for first, last in pairs)
            return "".join(f"<{time:.1f} seconds>{START}{VIDEO}{END}" for time in times)

        return re.sub(re.escape(VIDEO), moments, chat)

    def placeholders(self, moments: int, tokens: int) -> list[int]:
        return [tokens] * moments

    def positions(self, ids: Tensor, pictures: Sequence[Seen]) -> Tensor:
        """Each moment has those of a picture: its time is in the words before it."""
        moments = []
        for own in pictures:
            count, *size = own[GRID][0].tolist()
            moments += [{GRID: torch.tensor([[1, *size]]), MOMENT: torch.zeros(1)}] * count
        return super().positions(ids, moments)
