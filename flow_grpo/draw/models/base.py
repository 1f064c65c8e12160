"""What all diffusers models share: placement, prompts, guidance, compiled code, LoRA files.

A family is a subclass in a file of its own; see docs/models.md, "How to add a model".
"""

import copy
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from diffusers import AutoencoderKL, DiffusionPipeline, ModelMixin
from peft import get_peft_model_state_dict
from PIL import Image
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.image_processing_base import ImageProcessingMixin

from flow_grpo.draw.models.embeddings import Embedding, PromptCache, identity
from flow_grpo.draw.models.experts import check_places, parts_of
from flow_grpo.draw.models.inputs import (
    Conditioning,
    Grid,
    Inputs,
    Schedule,
    Size,
    cat_padded,
    latent_shape,
    shift_of,
    shifted_schedule,
)
from flow_grpo.draw.models.lora_files import attach_lora, replace_weights
from flow_grpo.pictures import Picture, fit_picture
from flow_grpo.speed.faster import Groups, speed_up
from flow_grpo.speed.low_bits import FULL, at_full_precision, to_low_bits
from flow_grpo.speed.transfer import send

OF_IMAGE = ("to_q", "to_k", "to_v")  # they have one input
OF_TEXT = ("add_q_proj", "add_k_proj", "add_v_proj")
TARGETS = [f"attn.{name}" for name in (*OF_IMAGE, "to_out.0", *OF_TEXT, "to_add_out")]
SIBLINGS = {"attn": (OF_IMAGE, OF_TEXT)}
GuidanceGradient = Literal["both", "conditional"]
Config = Mapping[str, Any]  # of a part of a pipeline
Given = tuple[str, tuple[Picture, ...]]  # a text and its pictures
# Numbers in the VAE's largest tensor: 4 pictures of 512 px. More at once are no faster, and past
# 2**31 many kernels miscount.
MAX_NUMBERS = 2**28
# Texts of a model that masks them are padded to a multiple of this: few shapes to compile for.
TOKENS = 32


def freeze(module: nn.Module, dtype: torch.dtype) -> None:
    """Disable gradients and cast to `dtype`, with the same exceptions as the library's loader.

    Layers that the library keeps in float32 stay in float32. Non-persistent buffers are never cast
    to a narrower dtype: these are rotary frequencies, whose rounding error grows with position.
    """
    module.requires_grad_(False).eval()
    saved, is_kept = module.state_dict().keys(), float32_rule(module, dtype)
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if tensor.is_floating_point():
            wanted = dtype
            if is_kept(name):
                wanted = torch.promote_types(dtype, torch.float32)
            elif name not in saved:
                wanted = torch.promote_types(dtype, tensor.dtype)
            tensor.data = tensor.data.to(wanted)


def float32_rule(module: nn.Module, dtype: torch.dtype) -> Callable[[str], bool]:
    """Return which tensors, by name, stay in float32 when `module` is loaded in `dtype`.

    diffusers matches parts of the name in any dtype. transformers matches patterns: those of
    `_keep_in_fp32_modules` in float16 (such as `wo` of T5, which overflows there), those of
    `_keep_in_fp32_modules_strict` in bfloat16 too.
    """
    kept = set(getattr(module, "_keep_in_fp32_modules", None) or ())
    if isinstance(module, ModelMixin):
        return lambda name: not kept.isdisjoint(name.split("."))
    if not isinstance(module, PreTrainedModel) or dtype not in (torch.float16, torch.bfloat16):
        return lambda name: False
    strict = set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    names = strict | kept if dtype == torch.float16 else strict
    patterns = [re.compile(name.replace("*", ".*")) for name in names]
    return lambda name: any(pattern.search(name) for pattern in patterns)


def vae_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """bfloat16 where it is fast; SD3's VAE overflows in float16."""
    half = dtype in (torch.float16, torch.bfloat16)
    if half and device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16
    return torch.promote_types(dtype, torch.float32)


def mlp_targets(*names: str) -> list[str]:
    return [f"{name}.{layer}" for name in names for layer in ("net.0.proj", "net.2")]


class ModelAdapter(ABC):
    """One model family. `velocity` is what sampling and training share."""

    pipeline_class: ClassVar[type[DiffusionPipeline]]
    encoders: ClassVar[tuple[str, ...]] = ("text_encoder",)
    tokenizers: ClassVar[tuple[str, ...]] = ("tokenizer",)
    lora_targets: ClassVar[list[str]]
    siblings: ClassVar[Groups] = {}  # layers of a block that take the same input
    # Used with guidance for prompts that have no negative prompt of their own.
    negative_prompt: ClassVar[str] = ""
    unguided: ClassVar[float] = 1.0  # guidance above this takes a second pass, without the prompt
    # Pattern of what no picture depends on: it gets no gradient, and DDP would wait for one.
    unused: str | None = None
    masks_texts: ClassVar[bool] = False  # texts of several lengths go together
    sources: ClassVar[range] = range(1)  # how many pictures a prompt may have
    encodes_pictures: ClassVar[bool] = True  # as latents that it would draw
    masks_sources: ClassVar[bool] = False  # prompts with more and fewer of them go together
    # Parts of the pipeline that flow_grpo/draw/models/processors.py loads, by their class's name.
    processors: ClassVar[Mapping[str, str]] = MappingProxyType({})
    can_replay: ClassVar[bool] = True  # as CUDA graphs
    # Faster; on where `give_dense_gradients` can see to it that its gradients are right, or where
    # they were held against plain attention's.
    cudnn_attention: ClassVar[bool] = False
    compiled = replayed = False
    guidance_scale_2: float | None = None  # for little noise, where another transformer is for that

    def __init__(
        self,
        pipeline: DiffusionPipeline,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        max_sequence_length: int = 256,
        prompt_cache: Path | None = None,
        offload_idle: bool = False,
        source_size: Size | None = None,
        base_precision: str = FULL,
        keep_full: bool = False,
        encoder_precision: str = FULL,
    ) -> None:
        """`source_size` is what pictures of prompts are brought to; `base_precision` is that of the
        transformer's blocks, of which `at_full_precision` needs `keep_full`; `encoder_precision`
        that of what reads prompts, the VAE aside."""
        self.pipeline = pipeline
        self.device, self.dtype = torch.device(device), dtype
        self.idle_device = torch.device("cpu") if offload_idle else self.device
        self.max_sequence_length = max_sequence_length
        self.source_size = source_size
        self.transformer: nn.Module = self.network(pipeline)
        trained = set(self.transformer.modules())
        self.vae: nn.Module = pipeline.vae
        modules = [m for m in pipeline.components.values() if isinstance(m, nn.Module)]
        for module in modules:
            freeze(module, dtype)
        to_low_bits(self.blocks(), base_precision, self.device, keep_full=keep_full)
        encoders = set(self._parts(self.encoders).values()) - {self.vae}
        for module in modules:
            if module in encoders:
                to_low_bits([module], encoder_precision, self.device)
            # diffusers' own `to` warns of what does not apply
            nn.Module.to(module, self.device if module in trained else self.idle_device)
        self.plain_vae = isinstance(self.vae, AutoencoderKL)
        layout = {"memory_format": torch.channels_last} if self.plain_vae else {}
        nn.Module.to(self.vae, vae_dtype(dtype, self.device), **layout)
        self.prompt_cache = prompt_cache
        self._cache = self._open_cache()
        self._stream: torch.cuda.Stream | None = None

    # --- what a family says ------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def grid(cls, transformer: Config, vae: Config) -> Grid:
        """The latents of a model with these configs."""

    @classmethod
    def check(cls, pipeline: Config, transformer: Config, guidance: Mapping[str, float]) -> None:
        """Raise a UserError for what this model cannot do; `guidance` has scales by field."""
        return None

    def network(self, pipeline: DiffusionPipeline) -> nn.Module:
        """What is trained."""
        return pipeline.transformer

    @abstractmethod
    def encode_one(self, text: str, *pictures: Image.Image) -> Embedding:
        """What the encoders give for it, (1, ...) each: "embeds" of its tokens; of a family that
        takes pictures, which come in their final size, "source" of theirs, with or without any."""

    def schedule(self, num_steps: int, height: int, width: int, frames: int = 1) -> Schedule:
        """The noise levels and time steps that the family's own pipeline would use."""
        scheduler, own = self.own_scheduler(), self.pipeline.config.get("sample_sigmas") or ()
        mu = shift_of(scheduler, self.tokens(height, width))
        # the noise levels that a model was distilled for, where it is asked for as many steps
        return shifted_schedule(scheduler, num_steps, mu, own if len(own) == num_steps else None)

    @abstractmethod
    def forward(
        self,
        transformer: nn.Module,
        latents: Tensor,
        timestep: Tensor,
        inputs: Inputs,
        guidance_scale: float,
    ) -> Tensor:
        """The velocity at `latents` (B, ...), which have the model's dtype; `timestep` is (B,)."""

    def prepared(self, transformer: nn.Module, conditioning: Conditioning) -> Conditioning:
        """With what `forward` would work out at every step anew, for as long as weights stay."""
        return conditioning

    def guide(self, unconditional: Tensor, conditional: Tensor, scale: float | Tensor) -> Tensor:
        return unconditional + scale * (conditional - unconditional)

    def scale_at(self, timestep: Tensor, scale: float) -> float | Tensor:
        """The guidance at each of these time steps (B,)."""
        return scale

    def finish(self, latents: Tensor, conditioning: Conditioning) -> Tensor:
        """What is drawn of the latents that the last step led to."""
        return latents

    def decode_latents(self, latents: Tensor) -> Tensor:
        """Pictures (B, 3, H, W) or clips (B, F, 3, H, W) in [-1, 1], of a VAE's scaled latents."""
        return self.vae.decode(latents, return_dict=False)[0]

    def scaled(self, latents: Tensor) -> Tensor:
        """Latents of the transformer as the VAE takes them."""
        config = self.vae.config
        return latents / config.scaling_factor + config.shift_factor

    def unscaled(self, latents: Tensor) -> Tensor:
        """Latents of the VAE as the transformer takes them."""
        config = self.vae.config
        return (latents - config.shift_factor) * config.scaling_factor

    # --- texts and pictures ------------------------------------------------------------------

    @torch.no_grad()
    def encode(
        self,
        prompts: list[str],
        negative_prompts: list[str] | None,
        images: Sequence[tuple[Picture, ...]] | None = None,
    ) -> Conditioning:
        """Embed a batch; `negative_prompts` is None when sampling without guidance, `images` are
        those of each prompt."""
        every = self._named(prompts, negative_prompts, images)
        position = {name: i for i, name in enumerate(dict.fromkeys(name for name, _ in every))}
        index = torch.tensor([position[name] for name, _ in every])
        count = len(prompts)
        negative = None if negative_prompts is None else index[count:]
        return Conditioning(self._embed(dict(every)), index[:count], negative)

    @torch.no_grad()
    def encode_ahead(
        self,
        prompts: list[str],
        negative_prompts: list[str] | None = None,
        images: Sequence[tuple[Picture, ...]] | None = None,
    ) -> None:
        """Embed all at once what `encode` will be asked for: idle encoders then move once."""
        self._known(dict(self._named(prompts, negative_prompts, images)))

    def _named(
        self,
        prompts: list[str],
        negative_prompts: list[str] | None,
        images: Sequence[tuple[Picture, ...]] | None,
    ) -> list[tuple[str, Given]]:
        """All that is to be embedded, by its name in the cache; negative prompts have the pictures
        of the prompts."""
        images = list(images or [()] * len(prompts))
        texts = [*prompts, *(negative_prompts or [])]
        given = zip(texts, images if negative_prompts is None else images * 2, strict=True)
        return [(self._cache.name(*each), each) for each in given]

    def _embed(self, wanted: dict[str, Given]) -> Inputs:
        known = self._known(wanted)
        found = [known[name] for name in wanted]
        multiples = {"embeds": TOKENS} if self.masks_texts else {}
        embedded = {
            name: cat_padded([f[name][None] for f in found], multiples.get(name, 1))
            for name in found[0]
        }
        embedded = {name: send(each, self.device) for name, each in embedded.items()}
        if self.masks_texts:
            embedded["lengths"] = torch.tensor([len(f["embeds"]) for f in found])
        if "source" in embedded:
            embedded["source_lengths"] = torch.tensor([len(f["source"]) for f in found])
        return embedded

    def _known(self, wanted: dict[str, Given]) -> dict[str, Embedding]:
        known = self._cache.find(list(wanted))
        missing = {name: given for name, given in wanted.items() if name not in known}
        if missing:
            with self._beside(), self._on_device(*self._parts(self.encoders).values()):
                # One at a time: the last bits of an embedding depend on the size of its batch,
                # and must not on where a prompt was met first.
                for name, (text, pictures) in missing.items():
                    encoded = self.encode_one(text, *map(self.source, pictures))
                    known[name] = self._cache.add(name, encoded)
        return known

    def source(self, picture: Picture) -> Image.Image:
        """A picture of a prompt as the model sees it."""
        if self.source_size is None:
            raise ValueError("pictures have no size yet: load_adapter(..., source_size=Size(H, W))")
        return fit_picture(picture, self.source_size.width, self.source_size.height)

    def source_latents(self, picture: Image.Image) -> Tensor:
        """(1, C, H, W), as the transformer takes them."""
        pixels = self.pipeline.image_processor.preprocess(picture)
        latents = self.vae.encode(pixels.to(self.device, self.vae.dtype)).latent_dist.mode()
        return self.unscaled(latents).to(self.dtype)

    @torch.no_grad()
    def encode_picture(self, picture: Picture) -> Tensor:
        """(1, C, H, W), as samples are that would be drawn as this picture."""
        with self._on_device(self.vae):
            return self.source_latents(self.source(picture))

    def _beside(self) -> AbstractContextManager:
        """On a GPU, texts do not wait for the pictures that it is at, nor these for them."""
        if self.device.type != "cuda" or self.idle_device != self.device:
            return nullcontext()  # what moves with `offload_idle` would keep its memory from others
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
            self._stream.wait_stream(torch.cuda.current_stream(self.device))  # for the weights
        return torch.cuda.stream(self._stream)

    def _open_cache(self) -> PromptCache:
        if self.prompt_cache is None:
            return PromptCache()
        model = identity(
            self._parts(self.encoders),
            self._parts(self.tokenizers),
            device=self.device,
            pipeline=self.pipeline_class.__name__,
            max_sequence_length=self.max_sequence_length,
            # the width of the zeros that may stand in for an encoder that was left out
            width=self.transformer.config.get("joint_attention_dim"),
            **self._picture_settings(),
        )
        return PromptCache(self.prompt_cache, model)

    def _picture_settings(self) -> dict[str, Any]:
        """What decides the bits of a source besides weights; nothing where there are none."""
        if not self.sources[-1]:
            return {}
        parts = (getattr(self.pipeline, part) for part in self.processors)
        seen = [getattr(p, "image_processor", p) for p in parts]
        seen = [p.to_dict() for p in seen if isinstance(p, ImageProcessingMixin)]
        return {"source_size": self.source_size, "seen": seen}

    def _parts(self, names: tuple[str, ...]) -> dict:
        parts = {name: getattr(self.pipeline, name, None) for name in names}
        return {name: part for name, part in parts.items() if part is not None}

    @contextmanager
    def _on_device(self, *modules: nn.Module) -> Iterator[None]:
        """With `offload_idle`, modules are on the device in here only."""
        if self.idle_device == self.device:
            yield
            return
        try:
            for module in modules:
                module.to(self.device)
            yield
        finally:
            for module in modules:
                module.to(self.idle_device)

    # --- sizes and noise levels --------------------------------------------------------------

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """The shape of one sample's latents, without the batch dimension."""
        grid = self.grid(self.transformer.config, self.vae.config)
        return latent_shape(grid, Size(height, width, frames))

    def tokens(self, height: int, width: int) -> int:
        """How many tokens a picture of this size has."""
        side = self.pixels_per_token()
        return (height // side) * (width // side)

    def pixels_per_token(self) -> int:
        """In height and width."""
        grid = self.grid(self.transformer.config, self.vae.config)
        return grid.scale * grid.patch

    def own_scheduler(self) -> Any:
        """A copy, to be set to a number of steps."""
        return copy.deepcopy(self.pipeline.scheduler)

    # --- the model ---------------------------------------------------------------------------

    @classmethod
    def is_guided(cls, scale: float) -> bool:
        """Whether the velocity takes two passes, with and without the prompt."""
        return scale > cls.unguided

    def velocity(
        self,
        transformer: nn.Module,
        latents: Tensor,
        timestep: float | Tensor,
        conditioning: Conditioning,
        guidance_scale: float,
        *,
        gradient: GuidanceGradient = "both",
    ) -> Tensor:
        """The guided velocity; `timestep` is one for all, or (B,).

        `gradient`: through both halves of guidance, which go through the transformer as one batch,
        or through the conditional half alone, each half in a pass of its own.
        """
        if not isinstance(timestep, Tensor):
            timestep = torch.full((len(latents),), timestep, device=latents.device)

        def run(x: Tensor, t: Tensor, index: Tensor) -> Tensor:
            inputs = conditioning.of(index)
            out = self.forward(transformer, x.to(self.dtype), t, inputs, guidance_scale)
            return out.to(latents.dtype)

        positive, negative = conditioning.positive, conditioning.negative
        if not self.is_guided(guidance_scale):
            return run(latents, timestep, positive)
        scale = self.scale_at(timestep, guidance_scale)
        if gradient == "both":
            twice = latents.repeat(2, *[1] * (latents.ndim - 1)), timestep.repeat(2)
            both = run(*twice, torch.cat([negative, positive]))
            return self.guide(*both.chunk(2), scale)
        # Two passes, in sampling as in training: the same arithmetic in both is what makes the
        # on-policy ratio exactly 1.
        with torch.no_grad():
            unconditional = run(latents, timestep, negative)
        return self.guide(unconditional, run(latents, timestep, positive), scale)

    def speed_up(self, *, fold: bool, compiled: bool, graphs: bool) -> None:
        """Fold LoRA, compile, replay as CUDA graphs: what of it `flow_grpo.speed` has here."""
        self.compiled, self.replayed = compiled, graphs and self.can_replay
        speed_up(
            self.transformer,
            self.blocks() if compiled else [],
            self.siblings,
            self.vae.decoder if self.plain_vae else None,
            cudnn_attention=self.cudnn_attention,
            fold=fold,
            compiled=compiled,
            graphs=self.replayed,
        )

    def at_full_precision(self) -> AbstractContextManager:
        """What `base_precision` took from the blocks is back, from the host, if it was kept."""
        return at_full_precision(self.transformer)

    def blocks(self) -> list[nn.Module]:
        """The transformer's blocks, which do most of its work."""
        names = self.transformer._repeated_blocks or self.transformer._no_split_modules
        return [m for m in self.transformer.modules() if type(m).__name__ in names]

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Pictures (B, 3, H, W) or clips (B, F, 3, H, W) in [0, 1], float32."""
        return self.decode_with_gradient(latents)

    def decode_with_gradient(self, latents: Tensor) -> Tensor:
        latents = self.scaled(latents).to(self.vae.dtype)
        grid = self.grid(self.transformer.config, self.vae.config)
        places = latents[0, 0].numel() * grid.scale**2 * max(1, grid.frame_scale)
        most = max(1, MAX_NUMBERS // (places * self.vae_width()))
        parts = latents.chunk(math.ceil(len(latents) / most))
        with self._on_device(self.vae):
            images = [self.decode_latents(part) for part in parts]
        return (torch.cat(images).float() / 2 + 0.5).clamp(0, 1)

    def vae_width(self) -> int:
        """Channels of its widest tensor at full size."""
        config = self.vae.config
        if "base_dim" in config:
            return config.get("decoder_base_dim") or config.base_dim
        return max(config.block_out_channels[:2])

    # --- LoRA files --------------------------------------------------------------------------

    def save_lora(self, folder: Path, transformer: nn.Module, weights: dict[str, Tensor]) -> None:
        """Write the adapter's weights so that `pipe.load_lora_weights(folder)` takes them."""
        for place, part, own in parts_of(transformer, weights):
            self.pipeline_class.save_lora_weights(
                folder / place,
                transformer_lora_layers=get_peft_model_state_dict(part, state_dict=own),
                # without it diffusers assumes alpha == rank
                transformer_lora_adapter_metadata=part.peft_config["default"].to_dict(),
            )

    def load_lora(self, folder: str | Path) -> None:
        """Put the LoRA in `folder` on the transformer, as the adapter "default"."""
        check_places(folder, [place for place, *_ in parts_of(self.transformer)])
        for place, part, _ in parts_of(self.transformer):
            attach_lora(part, Path(folder, place), self.pipeline)
        self._cache, self._stream = self._open_cache(), None  # it may be on the text encoders too

    def load_weights(self, folder: Path) -> None:
        """Load what a run saved: a LoRA folder or a whole transformer."""
        if (folder / "config.json").is_file():
            check_places(folder, [place for place, *_ in parts_of(self.transformer)])
            for place, part, _ in parts_of(self.transformer):
                replace_weights(part, folder / place)
        else:
            self.load_lora(folder)


def latent_dtype(transformer: nn.Module) -> torch.dtype:
    """The precision of latents, at least float32: rounding them under a half-precision model breaks
    the ratio."""
    parameter = next(transformer.parameters())
    return torch.promote_types(parameter.dtype, torch.float32)


def standardised(latents: Tensor, vae: Config, back: bool = False) -> Tensor:
    """(B, C, F, H, W) as such a VAE takes them: with the mean and deviation of its own; or `back`,
    as the transformer does."""
    mean, std = (
        torch.tensor(vae[name], dtype=latents.dtype).to(latents.device)[:, None, None, None]
        for name in ("latents_mean", "latents_std")
    )
    return (latents - mean) / std if back else latents * std + mean
