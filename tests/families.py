"""The model families and how the stock pipeline of each is called: a new family is one line of
FAMILIES, and joins every test that is written for all."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline, UniPCMultistepScheduler
from torch import Tensor
from untrained import small

from flow_grpo.draw.models import ModelAdapter, Size
from flow_grpo.draw.models.inputs import pack
from flow_grpo.draw.rollout import Denoiser, Dynamics

TOKENS = 48  # of a text, where the family counts them
STEPS = 4
PROMPTS = ["a red cat", "a longer text: blue dogs run"]  # Qwen pads one to 32, one to 64 tokens
NEGATIVE = ["ugly", "a blurry bad photograph"]


def first_order(pipeline: DiffusionPipeline) -> None:
    """Of a scheduler of second order with corrections, that which an Euler step equals."""
    pipeline.scheduler = UniPCMultistepScheduler.from_config(
        pipeline.scheduler.config, solver_order=1, disable_corrector=list(range(100))
    )


@dataclass(frozen=True)
class Family:
    name: str
    guided: float  # a scale
    plain: float = 1.0  # the scale that does not guide
    scale: str = "guidance_scale"  # its name in a call of the stock pipeline
    negative: bool = True  # whether guidance takes negative prompts
    frames: int = 1
    latents: Callable[[Tensor], Tensor] = field(default=lambda latents: latents)  # as it takes them
    settle: Callable[[DiffusionPipeline], None] = field(default=lambda pipeline: None)
    # LoRA layers whose gradient is always zero: what the last block makes of texts goes nowhere.
    idle: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name

    def stock(self, folder: Path) -> DiffusionPipeline:
        pipeline = DiffusionPipeline.from_pretrained(folder)
        pipeline.set_progress_bar_config(disable=True)
        self.settle(pipeline)
        return pipeline

    def draw(
        self,
        pipeline: DiffusionPipeline,
        noise: Tensor,
        prompts: list[str],
        negative: list[str],
        size: Size,
        scale: float,
    ) -> Tensor:
        """By the stock pipeline: (B, 3, H, W), or (B, F, 3, H, W) of a video."""
        call: dict[str, Any] = {self.scale: scale}
        if self.negative and scale > self.plain:
            call["negative_prompt"] = list(negative)  # some change their lists
        if self.frames > 1:
            call["num_frames"] = size.frames
        drawn = pipeline(
            prompt=list(prompts),
            latents=self.latents(noise),
            height=size.height,
            width=size.width,
            num_inference_steps=STEPS,
            max_sequence_length=TOKENS,
            output_type="pt",
            **call,
        )[0]
        return drawn[:, 0] if drawn.ndim == 5 and size.frames == 1 else drawn


QUERIES = ("transformer_blocks.1.attn.add_q_proj",)  # of texts, in the last block
FAMILIES = [
    Family("sd3", 4.5, idle=QUERIES),
    Family("flux", 3.5, negative=False, latents=pack),
    Family("qwen_image", 4.0, scale="true_cfg_scale", latents=pack, idle=QUERIES),
    Family("z_image", 3.0, plain=0.0),
    Family("wan", 5.0, frames=5, settle=first_order),
]


def save_small(family: Family, folder: Path, **settings) -> Path:
    small.build(family.name, **settings).save_pretrained(folder)
    return folder


def save_prompts(folder: Path) -> Path:
    """Of different lengths, each with a negative prompt."""
    folder.mkdir()
    for split in ("train", "test"):
        prompts = [*PROMPTS, *(f"{split} {'and ' * i}end" for i in range(6))]
        rows = [
            {"prompt": p, "negative_prompt": n} for p, n in zip(prompts, NEGATIVE * 4, strict=True)
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}_metadata.jsonl").write_text(lines)
    return folder


def run_fields(family: Family, model: Path, dataset: Path) -> dict[str, Any]:
    """Of a short guided run."""
    return {
        "pretrained.model": str(model),
        "dataset": str(dataset),
        "height": 32,
        "width": 48,
        "frames": family.frames,
        "max_sequence_length": TOKENS,
        "num_epochs": 1,
        "sample.eval_num_steps": STEPS,
        "sample.guidance_scale": family.guided,
        "train.learning_rate": 0.03,
        "train.lora_rank": 4,
        "train.lora_alpha": 8,
    }


def noise_for(adapter: ModelAdapter, size: Size, count: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, *adapter.latent_shape(*size), generator=generator)


def draw_ode(
    adapter: ModelAdapter,
    noise: Tensor,
    prompts: list[str],
    negative: list[str],
    size: Size,
    scale: float,
) -> Tensor:
    """By our own sampler."""
    conditioning = adapter.encode(prompts, negative if adapter.is_guided(scale) else None)
    dynamics = Dynamics(adapter.schedule(STEPS, *size), guidance_scale=scale)
    sampled = Denoiser(adapter, adapter.transformer, dynamics).sample(noise, conditioning)
    return adapter.decode(sampled.final)
