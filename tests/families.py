"""The model families and how the stock pipeline of each is called: a new family is one line of
FAMILIES, and joins every test that is written for all."""

import copy
import io
import json
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline, UniPCMultistepScheduler, WanImageToVideoPipeline
from diffusers.pipelines.wan import pipeline_wan, pipeline_wan_i2v
from PIL import Image
from torch import Tensor
from untrained import small

from flow_grpo.draw.models import ModelAdapter, Size
from flow_grpo.draw.models.experts import Experts
from flow_grpo.draw.models.inputs import pack
from flow_grpo.draw.models.processors import load_pipeline
from flow_grpo.draw.rollout import Denoiser, Dynamics
from flow_grpo.pictures import fit_picture

TOKENS = 48  # of a text, where the family counts them
STEPS = 4
PROMPTS = ["a red cat", "a longer text: blue dogs run"]  # Qwen pads one to 32, one to 64 tokens
NEGATIVE = ["ugly", "a blurry bad photograph"]
SOURCE = Size(32, 48)  # what pictures of prompts are brought to, but for clips that begin with one
LATE = 3.0  # the guidance of a second transformer


def pictures_of(text: str, count: int) -> tuple[bytes, ...]:
    """PNG files that go with a text, of another size and shape than what is drawn."""
    rng = np.random.default_rng(zlib.crc32(text.encode()))
    files = [io.BytesIO() for _ in range(count)]
    for file in files:
        coarse = Image.fromarray(rng.integers(256, size=(5, 7, 3), dtype="u1"))
        coarse.resize((70, 50), Image.Resampling.BICUBIC).save(file, format="PNG")
    return tuple(file.getvalue() for file in files)


def first_order(pipeline: DiffusionPipeline) -> None:
    """Of a scheduler of second order with corrections, that which an Euler step equals."""
    # which alone asks whether ftfy is there
    pipeline_wan_i2v.prompt_clean = pipeline_wan.prompt_clean
    pipeline.scheduler = UniPCMultistepScheduler.from_config(
        pipeline.scheduler.config, solver_order=1, disable_corrector=list(range(100))
    )


def sources_of_any_size(pipeline: DiffusionPipeline) -> None:
    """It refuses pictures of fewer than 64 pixels."""
    pipeline.image_processor.check_image_input = lambda image: image


def with_3d_positions(pipeline: DiffusionPipeline) -> None:
    """Pass 3-D positions to the text encoder: diffusers 0.42.1 leaves out what transformers 5
    computes them from (diffusers issue 14194)."""
    encoder, processor = pipeline.text_encoder, pipeline.processor
    forward = encoder.forward

    def with_positions(*, input_ids: Tensor, image_grid_thw: Tensor, **given: Any) -> Any:
        positions, _ = encoder.model.get_rope_index(
            input_ids,
            mm_token_type_ids=(input_ids == processor.image_token_id).int(),
            image_grid_thw=image_grid_thw,
            attention_mask=given["attention_mask"],
        )
        given |= {"input_ids": input_ids, "image_grid_thw": image_grid_thw}
        return forward(position_ids=positions, **given)

    encoder.forward = with_positions


def settle_edit(pipeline: DiffusionPipeline) -> None:
    at_source_size(pipeline)
    with_3d_positions(pipeline)


def at_source_size(pipeline: DiffusionPipeline) -> None:
    """Where it would bring pictures to a megapixel, it brings them to the size of these tests."""
    module = sys.modules[type(pipeline).__module__]
    own, megapixel = module.calculate_dimensions, 1024 * 1024

    def dimensions(area: int, ratio: float) -> tuple:
        found = own(area, ratio)
        return (SOURCE.width, SOURCE.height, *found[2:]) if area == megapixel else found

    module.calculate_dimensions = dimensions


@dataclass(frozen=True)
class Family:
    name: str
    guided: float  # a scale
    plain: float = 1.0  # the scale that does not guide
    scale: str = "guidance_scale"  # its name in a call of the stock pipeline
    negative: str = "negative_prompt"  # likewise; "": guidance takes no negative prompts
    frames: int = 1
    wide: int = 48  # pixels, of pictures that are not square
    alone: bool = False  # the stock pipeline takes one prompt at a time, or mixes them
    sources: int = 0  # pictures of each prompt, two at most
    experts: bool = False  # it has two transformers
    with_pictures: type[DiffusionPipeline] | None = None  # the stock pipeline for these, if another
    options: dict[str, Any] = field(default_factory=dict)  # of a call of the stock pipeline
    latents: Callable[[Tensor], Tensor] = field(default=lambda latents: latents)  # as it takes them
    settle: Callable[[DiffusionPipeline], None] = field(default=lambda pipeline: None)
    # LoRA layers whose gradient is always zero: what the last block makes of texts goes nowhere.
    idle: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name

    def images(self, prompts: Sequence[str]) -> list[tuple[bytes, ...]]:
        """The pictures of each prompt."""
        return [pictures_of(prompt, self.sources) for prompt in prompts]

    def stock(self, folder: Path) -> DiffusionPipeline:
        pipeline = load_pipeline(DiffusionPipeline, str(folder))
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
        images: Sequence[tuple[bytes, ...]] | None = None,
    ) -> Tensor:
        """By the stock pipeline: (B, 3, H, W), or (B, F, 3, H, W) of a video. `images` are of each
        prompt; by default those that go with it."""
        images = self.images(prompts) if images is None else images
        if self.alone and len(prompts) > 1:
            rows = [slice(i, i + 1) for i in range(len(prompts))]
            given = noise, prompts, negative
            drawn = [
                self.draw(pipeline, *(g[i] for g in given), size, scale, images[i]) for i in rows
            ]
            return torch.cat(drawn)
        call: dict[str, Any] = {self.scale: scale, **self.options}
        if self.experts:
            call["guidance_scale_2"] = LATE
        if any(images):
            side = (size if self.frames > 1 else SOURCE)[1::-1]
            call["image"] = [fit_picture(each, *side) for row in images for each in row]
            if self.frames > 1:
                [call["image"]] = call["image"]
            if self.with_pictures is not None:
                pipeline = self.with_pictures.from_pipe(pipeline)
        if "_auto_resize" in call:
            call["max_area"] = size.height * size.width  # else it draws larger pictures
        if self.negative and scale > self.plain:
            call[self.negative] = list(negative)  # some change their lists
        if self.negative == "negative_prompt_embeds" in call:
            encoded = pipeline.encode_prompt(list(negative), max_sequence_length=TOKENS)
            call[self.negative] = encoded[0]
        if "max_sequence_length" in signature(pipeline.__call__).parameters:
            call.setdefault("max_sequence_length", TOKENS)
        if self.frames > 1:
            call["num_frames"] = size.frames
        drawn = pipeline(
            prompt=list(prompts),
            latents=self.latents(noise),
            height=size.height,
            width=size.width,
            num_inference_steps=STEPS,
            output_type="pt",
            **call,
        )[0]
        if drawn.shape[1] == 4:  # transparent: it is shown on white
            drawn = drawn[:, :3] * drawn[:, 3:] + 1 - drawn[:, 3:]
        return drawn[:, 0] if drawn.ndim == 5 and size.frames == 1 else drawn


QUERIES = ("transformer_blocks.1.attn.add_q_proj",)  # of texts, in the last block
FAMILIES = [
    Family("sd3", 4.5, idle=QUERIES),
    Family("flux", 3.5, negative="", latents=pack),
    Family(
        "flux_kontext",
        2.5,
        negative="",
        sources=1,
        options={"_auto_resize": False},
        latents=pack,
    ),
    Family("flux2", 4.0, negative="", alone=True, sources=2, settle=sources_of_any_size),
    Family(
        "flux2_klein",
        4.0,
        negative="negative_prompt_embeds",
        alone=True,
        sources=2,
        settle=sources_of_any_size,
    ),
    Family("qwen_image", 4.0, scale="true_cfg_scale", latents=pack, idle=QUERIES),
    Family(
        "qwen_image_21",
        4.0,
        scale="true_cfg_scale",
        wide=64,
        alone=True,
        latents=lambda latents: latents.flatten(2).transpose(1, 2),
    ),
    Family(
        "qwen_image_edit",
        4.0,
        scale="true_cfg_scale",
        sources=1,
        latents=pack,
        settle=settle_edit,
        idle=QUERIES,
    ),
    Family(
        "qwen_image_edit_plus",
        4.0,
        scale="true_cfg_scale",
        sources=2,
        alone=True,
        latents=pack,
        settle=settle_edit,
        idle=QUERIES,
    ),
    Family("z_image", 3.0, plain=0.0),
    Family("wan", 5.0, frames=5, settle=first_order),
    Family("wan22_a14b", 4.0, frames=5, experts=True, settle=first_order),
    Family(
        "wan22",
        5.0,
        frames=5,
        wide=64,
        alone=True,
        sources=1,
        with_pictures=WanImageToVideoPipeline,
        settle=first_order,
    ),
    Family(
        "wan_i2v",
        5.0,
        frames=5,
        alone=True,
        sources=1,
        options={"max_sequence_length": 512},
        settle=first_order,
    ),
]


def save_small(family: Family, folder: Path, **settings) -> Path:
    small.build(family.name, **settings).save_pretrained(folder)
    return folder


def save_prompts(folder: Path, sources: int = 0) -> Path:
    """Of different lengths, each with a negative prompt, and so many pictures."""
    folder.mkdir()
    for split in ("train", "test"):
        prompts = [*PROMPTS, *(f"{split} {'and ' * i}end" for i in range(6))]
        rows = [
            {"prompt": p, "negative_prompt": n, "images": save_pictures(folder, p, sources)}
            for p, n in zip(prompts, NEGATIVE * 4, strict=True)
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}_metadata.jsonl").write_text(lines)
    return folder


def save_pictures(folder: Path, text: str, count: int) -> list[str]:
    names = [f"{zlib.crc32(text.encode())}-{i}.png" for i in range(count)]
    for name, content in zip(names, pictures_of(text, count), strict=True):
        (folder / name).write_bytes(content)
    return names


def run_fields(family: Family, model: Path, dataset: Path) -> dict[str, Any]:
    """Of a short guided run."""
    return {
        "pretrained.model": str(model),
        "dataset": str(dataset),
        "height": 32,
        "width": family.wide,
        "frames": family.frames,
        "max_sequence_length": TOKENS,
        "num_epochs": 1,
        "sample.eval_num_steps": STEPS,
        "sample.guidance_scale": family.guided,
        "sample.guidance_scale_2": LATE if family.experts else None,
        "train.learning_rate": 0.03,
        "train.lora_rank": 4,
        "train.lora_alpha": 8,
    }


def noise_for(adapter: ModelAdapter, size: Size, count: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, *adapter.latent_shape(*size), generator=generator)


def at_size(adapter: ModelAdapter, size: Size) -> ModelAdapter:
    """What draws this size: clips begin with pictures that are as large."""
    adapter = copy.copy(adapter)
    if len(noise_for(adapter, size, 1).shape) == 5 and adapter.sources[-1]:
        adapter.source_size, adapter._cache = size, adapter._open_cache()
    if isinstance(adapter.transformer, Experts):
        adapter.guidance_scale_2 = LATE
    return adapter


def draw_ode(
    adapter: ModelAdapter,
    noise: Tensor,
    prompts: list[str],
    negative: list[str],
    size: Size,
    scale: float,
    images: Sequence[tuple[bytes, ...]] | None = None,
) -> Tensor:
    """By our own sampler."""
    adapter = at_size(adapter, size)
    if images is None:
        images = [pictures_of(p, min(2, adapter.sources[-1])) for p in prompts]
    conditioning = adapter.encode(prompts, negative if adapter.is_guided(scale) else None, images)
    dynamics = Dynamics(adapter.schedule(STEPS, *size), guidance_scale=scale)
    sampled = Denoiser(adapter, adapter.transformer, dynamics).sample(noise, conditioning)
    return adapter.decode(sampled.final)
