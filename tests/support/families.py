"""The diffusion model families and how the stock pipeline of each is called.

A new family is one entry of `FAMILIES`, and is then part of every test of all families.
"""

import copy
import io
import json
import math
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import (
    ClassifierFreeGuidance,
    DiffusionPipeline,
    LTX2ImageToVideoPipeline,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
)
from diffusers.pipelines.wan import pipeline_wan, pipeline_wan_i2v, pipeline_wan_video2video
from PIL import Image
from torch import Tensor
from untrained import small

from flow_grpo.diffusion.models import ModelAdapter, Size, load_adapter
from flow_grpo.diffusion.models.experts import Experts
from flow_grpo.diffusion.models.inputs import pack_latents
from flow_grpo.diffusion.models.processors import load_pipeline
from flow_grpo.diffusion.rollout import Denoiser, Dynamics
from flow_grpo.images import resize_and_crop

TOKENS = 48  # maximum sequence length, where a family has one
STEPS = 4
PROMPTS = ["a red cat", 'a longer text: blue "dogs" run']  # Qwen pads one to 32, one to 64 tokens
NEGATIVE = ["ugly", "a blurry bad photograph"]
SOURCE = Size(32, 48)  # size of source images, except those that videos start from
GUIDANCE_SCALE_2 = 3.0  # of the second transformer


def make_images(text: str, count: int) -> tuple[bytes, ...]:
    """Return random PNG files that depend on the text, larger than the generated images."""
    rng = np.random.default_rng(zlib.crc32(text.encode()))
    files = [io.BytesIO() for _ in range(count)]
    for file in files:
        coarse = Image.fromarray(rng.integers(256, size=(5, 7, 3), dtype="u1"))
        coarse.resize((70, 50), Image.Resampling.BICUBIC).save(file, format="PNG")
    return tuple(file.getvalue() for file in files)


def first_order(pipeline: DiffusionPipeline) -> None:
    """Make the UniPC scheduler first-order without corrector, which equals an Euler step."""
    # the function of pipeline_wan works without ftfy
    for module in (pipeline_wan_i2v, pipeline_wan_video2video):
        module.prompt_clean = pipeline_wan.prompt_clean
    pipeline.scheduler = UniPCMultistepScheduler.from_config(
        pipeline.scheduler.config, solver_order=1, disable_corrector=list(range(100))
    )


def allow_small_sources(pipeline: DiffusionPipeline) -> None:
    """Disable the check that source images have at least 64 pixels."""
    pipeline.image_processor.check_image_input = lambda image: image


def with_3d_positions(pipeline: DiffusionPipeline) -> None:
    """Pass 3-D positions to the text encoder.

    diffusers 0.42.1 omits what transformers 5 computes them from (diffusers issue 14194).
    """
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


def prepare_edit_pipeline(pipeline: DiffusionPipeline) -> None:
    resize_to_source_size(pipeline)
    with_3d_positions(pipeline)


def resize_to_source_size(pipeline: DiffusionPipeline) -> None:
    """Resize source images to `SOURCE` where the pipeline resizes them to a megapixel."""
    module = sys.modules[type(pipeline).__module__]
    original, megapixel = module.calculate_dimensions, 1024 * 1024

    def dimensions(area: int, ratio: float) -> tuple:
        found = original(area, ratio)
        return (SOURCE.width, SOURCE.height, *found[2:]) if area == megapixel else found

    module.calculate_dimensions = dimensions


def split_modalities(pipeline: DiffusionPipeline, call: dict[str, Any]) -> None:
    """Pass the noise of LTX-2 as latents of its VAEs, with those of a given first frame."""
    call.setdefault("num_frames", 1)
    shape = (call["num_frames"] - 1) // 8 + 1, call["height"] // 32, call["width"] // 32
    count, noise = math.prod(shape), call["latents"]
    video = noise[:, :count].transpose(1, 2).unflatten(2, shape)
    vae, audio_vae = pipeline.vae, pipeline.audio_vae
    video = pipeline._denormalize_latents(video, vae.latents_mean, vae.latents_std)
    if "image" in call:
        pixels = pipeline.video_processor.preprocess(call["image"])[:, :, None]
        with torch.no_grad():
            video[:, :, :1] = vae.encode(pixels).latent_dist.mode()
    audio = noise[:, count:] * audio_vae.latents_std + audio_vae.latents_mean
    channels = audio_vae.config.latent_channels
    audio = audio.unflatten(2, (channels, -1)).transpose(1, 2)
    call |= {"latents": video, "audio_latents": audio}


def shorten_padding(pipeline: DiffusionPipeline) -> None:
    """Pad less than 1985 tokens, for speed; let the VAE decode a batch, for which it fails."""
    pipeline.tokenizer_max_length, pipeline.tokenizer_2_max_length = TOKENS, 16
    pipeline.vision_num_semantic_tokens = 0
    pipeline.vae.use_slicing = True


def set_guider(pipeline: DiffusionPipeline, call: dict[str, Any]) -> None:
    """Pass the guidance scale in the component that has it."""
    pipeline.guider = ClassifierFreeGuidance(guidance_scale=call.pop("guidance_scale"))


def keep_image_size(pipeline: DiffusionPipeline, call: dict[str, Any]) -> None:
    """Generate at the size of the source image; the pipeline has no arguments for the size."""
    size = call.pop("height"), call.pop("width")
    pipeline.video_processor.calculate_default_height_width = lambda **_: size
    set_guider(pipeline, call)


def draw_given_noise(pipeline: DiffusionPipeline, call: dict[str, Any]) -> None:
    """Add the noise to the source video; `latents` would replace both; skip a fifth."""
    noise = call.pop("latents")
    sys.modules[type(pipeline).__module__].randn_tensor = lambda *_, **__: noise
    call["num_inference_steps"] = STEPS * 5 // 4
    assert int(0.8 * call["num_inference_steps"]) == STEPS
    del call["num_frames"]


@dataclass(frozen=True)
class Family:
    name: str
    guidance_scale: float
    unguided_scale: float = 1.0  # the scale that disables guidance
    scale_argument: str = "guidance_scale"  # name of the stock pipeline's argument
    negative_argument: str = "negative_prompt"  # likewise; "" if there are no negative prompts
    frames: int = 1
    wide: int = 48  # width of images that are not square, in pixels
    one_prompt: bool = False  # the stock pipeline takes one prompt at a time, or mixes several
    num_sources: int = 0  # source images per prompt: at most two, or the frames of a video
    experts: bool = False  # the pipeline has two transformers
    image_pipeline: type[DiffusionPipeline] | None = None  # stock pipeline for source images
    options: dict[str, Any] = field(default_factory=dict)  # further arguments of the stock pipeline
    pack: Callable[[Tensor], Tensor] = field(default=lambda latents: latents)  # layout of latents
    patch: Callable[[DiffusionPipeline], None] = field(default=lambda pipeline: None)
    # changes the arguments of a call of the stock pipeline
    adjust: Callable[[DiffusionPipeline, dict], None] = field(default=lambda pipeline, call: None)
    # LoRA layers whose gradient is always zero: the last block's text output is not used
    unused_layers: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name

    def images(self, prompts: Sequence[str]) -> list[tuple[bytes, ...]]:
        """Return the source images of each prompt."""
        return [make_images(prompt, self.num_sources) for prompt in prompts]

    def stock(self, folder: Path) -> DiffusionPipeline:
        """Load the stock pipeline."""
        pipeline = load_pipeline(DiffusionPipeline, str(folder))
        pipeline.set_progress_bar_config(disable=True)
        self.patch(pipeline)
        return pipeline

    def load_lora(self, pipeline: DiffusionPipeline, folder: Path) -> None:
        """Load a LoRA into the stock pipeline."""
        if not hasattr(pipeline, "load_lora_weights"):
            pipeline.transformer.load_lora_adapter(folder, use_safetensors=True)
            return
        pipeline.load_lora_weights(folder)
        if self.experts:
            pipeline.load_lora_weights(folder / "transformer_2", load_into_transformer_2=True)

    def generate(
        self,
        pipeline: DiffusionPipeline,
        noise: Tensor,
        prompts: list[str],
        negative: list[str],
        size: Size,
        scale: float,
        images: Sequence[tuple[bytes, ...]] | None = None,
    ) -> Tensor:
        """Generate with the stock pipeline: images (B, 3, H, W) or videos (B, F, 3, H, W).

        Args:
            images: The source images of each prompt, by default those of `self.images`.
        """
        images = self.images(prompts) if images is None else images
        if self.one_prompt and len(prompts) > 1:
            rows = [slice(i, i + 1) for i in range(len(prompts))]
            batch = noise, prompts, negative
            generated = [
                self.generate(pipeline, *(b[i] for b in batch), size, scale, images[i])
                for i in rows
            ]
            return torch.cat(generated)
        call: dict[str, Any] = {self.scale_argument: scale, **self.options}
        if self.experts:
            call["guidance_scale_2"] = GUIDANCE_SCALE_2
        if any(images):
            side = (size if self.frames > 1 else SOURCE)[1::-1]
            call["image"] = [resize_and_crop(each, *side) for row in images for each in row]
            if self.num_sources > 2:
                call["video"] = call.pop("image")
            elif self.frames > 1:
                [call["image"]] = call["image"]
            if self.image_pipeline is not None:
                pipeline = self.image_pipeline.from_pipe(pipeline)
        if "_auto_resize" in call:
            call["max_area"] = size.height * size.width  # otherwise it generates larger images
        if self.negative_argument and scale > self.unguided_scale:
            call[self.negative_argument] = list(negative)  # some pipelines modify the list
        if self.negative_argument == "negative_prompt_embeds" in call:
            encoded = pipeline.encode_prompt(list(negative), max_sequence_length=TOKENS)
            call[self.negative_argument] = encoded[0]
        if "max_sequence_length" in signature(pipeline.__call__).parameters:
            call.setdefault("max_sequence_length", TOKENS)
        if self.frames > 1:
            call["num_frames"] = size.frames
        call |= {"latents": self.pack(noise), "height": size.height, "width": size.width}
        self.adjust(pipeline, call)
        call.setdefault("num_inference_steps", STEPS)
        generated = pipeline(prompt=list(prompts), output_type="pt", **call)[0]
        if generated.shape[1] == 4:  # composite RGBA onto white
            generated = generated[:, :3] * generated[:, 3:] + 1 - generated[:, 3:]
        return generated[:, 0] if generated.ndim == 5 and size.frames == 1 else generated


TEXT_QUERIES = ("transformer_blocks.1.attn.add_q_proj",)  # in the last block
FAMILIES = [
    Family("sd3", 4.5, unused_layers=TEXT_QUERIES),
    Family("flux", 3.5, negative_argument="", pack=pack_latents),
    Family(
        "flux_kontext",
        2.5,
        negative_argument="",
        num_sources=1,
        options={"_auto_resize": False},
        pack=pack_latents,
    ),
    Family(
        "flux2",
        4.0,
        negative_argument="",
        one_prompt=True,
        num_sources=2,
        patch=allow_small_sources,
    ),
    Family(
        "flux2_klein",
        4.0,
        negative_argument="negative_prompt_embeds",
        one_prompt=True,
        num_sources=2,
        patch=allow_small_sources,
    ),
    Family(
        "qwen_image",
        4.0,
        scale_argument="true_cfg_scale",
        pack=pack_latents,
        unused_layers=TEXT_QUERIES,
    ),
    Family(
        "qwen_image_21",
        4.0,
        scale_argument="true_cfg_scale",
        wide=64,
        one_prompt=True,
        pack=lambda latents: latents.flatten(2).transpose(1, 2),
    ),
    Family(
        "qwen_image_edit",
        4.0,
        scale_argument="true_cfg_scale",
        num_sources=1,
        pack=pack_latents,
        patch=prepare_edit_pipeline,
        unused_layers=TEXT_QUERIES,
    ),
    Family(
        "qwen_image_edit_plus",
        4.0,
        scale_argument="true_cfg_scale",
        num_sources=2,
        one_prompt=True,
        pack=pack_latents,
        patch=prepare_edit_pipeline,
        unused_layers=TEXT_QUERIES,
    ),
    Family("z_image", 3.0, unguided_scale=0.0),
    Family("wan", 5.0, frames=5, patch=first_order),
    Family("wan22_a14b", 4.0, frames=5, experts=True, patch=first_order),
    Family(
        "wan22",
        5.0,
        frames=5,
        wide=64,
        one_prompt=True,
        num_sources=1,
        image_pipeline=WanImageToVideoPipeline,
        patch=first_order,
    ),
    Family(
        "wan_i2v",
        5.0,
        frames=5,
        one_prompt=True,
        num_sources=1,
        options={"max_sequence_length": 512},
        patch=first_order,
    ),
    Family(
        "wan_v2v",
        5.0,
        frames=5,
        one_prompt=True,
        num_sources=5,
        patch=first_order,
        adjust=draw_given_noise,
    ),
    Family(
        "hunyuan_video15",
        6.0,
        frames=5,
        patch=shorten_padding,
        adjust=set_guider,
        unused_layers=TEXT_QUERIES,
    ),
    Family(
        "hunyuan_video15_i2v",
        6.0,
        frames=5,
        one_prompt=True,
        num_sources=1,
        patch=shorten_padding,
        adjust=keep_image_size,
        unused_layers=TEXT_QUERIES,
    ),
    Family(
        "ltx2",
        4.0,
        frames=9,
        wide=64,
        one_prompt=True,
        num_sources=1,
        image_pipeline=LTX2ImageToVideoPipeline,
        options={
            **{"stg_scale": 0.0, "audio_stg_scale": None, "modality_scale": 1.0},
            **{"audio_modality_scale": None, "guidance_rescale": 0.0},
            **{"audio_guidance_rescale": None, "audio_guidance_scale": None},
        },
        adjust=split_modalities,
    ),
]


def save_small_pipeline(family: Family, folder: Path, **settings) -> Path:
    small.build(family.name, **settings).save_pretrained(folder)
    return folder


def save_prompts(folder: Path, sources: int = 0) -> Path:
    """Write prompts of different lengths with negative prompts and source images."""
    folder.mkdir()
    for split in ("train", "test"):
        prompts = [*PROMPTS, *(f"{split} {'and ' * i}end" for i in range(6))]
        rows = [
            {"prompt": p, "negative_prompt": n, "images": save_images(folder, p, sources)}
            for p, n in zip(prompts, NEGATIVE * 4, strict=True)
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}_metadata.jsonl").write_text(lines)
    return folder


def save_images(folder: Path, text: str, count: int) -> list[str]:
    names = [f"{zlib.crc32(text.encode())}-{i}.png" for i in range(count)]
    for name, content in zip(names, make_images(text, count), strict=True):
        (folder / name).write_bytes(content)
    return names


def run_fields(family: Family, model: Path, dataset: Path) -> dict[str, Any]:
    """Return the config fields of a short run with guidance."""
    return {
        "pretrained.model": str(model),
        "dataset": str(dataset),
        "height": 32,
        "width": family.wide,
        "frames": family.frames,
        "max_sequence_length": TOKENS,
        "num_epochs": 1,
        "sample.eval_num_steps": STEPS,
        "sample.guidance_scale": family.guidance_scale,
        "sample.guidance_scale_2": GUIDANCE_SCALE_2 if family.experts else None,
        "train.learning_rate": 0.03,
        "train.lora_rank": 4,
        "train.lora_alpha": 8,
    }


def noise_for(adapter: ModelAdapter, size: Size, count: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, *adapter.latent_shape(*size), generator=generator)


def at_size(adapter: ModelAdapter, size: Size) -> ModelAdapter:
    """Return an adapter for this size: videos start from source images of the same size."""
    adapter = copy.copy(adapter)
    is_video = adapter.grid(adapter.transformer.config, adapter.vae.config).frame_scale
    if is_video and adapter.num_source_images[-1]:
        adapter.source_size, adapter._cache = size, adapter._open_cache()
    if isinstance(adapter.transformer, Experts):
        adapter.guidance_scale_2 = GUIDANCE_SCALE_2
    return adapter


def generate_ode(
    adapter: ModelAdapter,
    noise: Tensor,
    prompts: list[str],
    negative: list[str],
    size: Size,
    scale: float,
    images: Sequence[tuple[bytes, ...]] | None = None,
) -> Tensor:
    """Generate with our ODE sampler."""
    adapter = at_size(adapter, size)
    if images is None:
        count = size.frames if adapter.source_is_video else min(2, adapter.num_source_images[-1])
        images = [make_images(p, count) for p in prompts]
    conditioning = adapter.encode(prompts, negative if adapter.is_guided(scale) else None, images)
    dynamics = Dynamics(adapter.schedule(STEPS, *size), guidance_scale=scale)
    sampled = Denoiser(adapter, adapter.transformer, dynamics).sample(noise, conditioning)
    return adapter.decode(sampled.final)


def load(folder: Path, **settings) -> ModelAdapter:
    return load_adapter(str(folder), max_sequence_length=TOKENS, source_size=SOURCE, **settings)
