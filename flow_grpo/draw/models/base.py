"""What all diffusers models share: placement, prompts, guidance, compiled code, LoRA files.

A family is a subclass in a file of its own; see docs/models.md, "How to add a model".
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from diffusers import AutoencoderKL, DiffusionPipeline, ModelMixin
from peft import get_peft_model_state_dict
from torch import Tensor, nn

from flow_grpo.draw.models.embeddings import Embedding, PromptCache, identity
from flow_grpo.draw.models.inputs import (
    Conditioning,
    Grid,
    Inputs,
    Schedule,
    Size,
    cat_padded,
    latent_shape,
    shifted_schedule,
)
from flow_grpo.draw.models.lora_files import attach_lora, replace_weights
from flow_grpo.speed.faster import channels_last_norms, fuse_gelu, join_siblings, settle_compiler
from flow_grpo.speed.replay import Replayed
from flow_grpo.speed.transfer import send

OF_IMAGE = ("to_q", "to_k", "to_v")  # they have one input
OF_TEXT = ("add_q_proj", "add_k_proj", "add_v_proj")
TARGETS = [f"attn.{name}" for name in (*OF_IMAGE, "to_out.0", *OF_TEXT, "to_add_out")]
SIBLINGS = {"attn": (OF_IMAGE, OF_TEXT)}
GuidanceGradient = Literal["both", "conditional"]
Config = Mapping[str, Any]  # of a part of a pipeline
# Numbers in the VAE's largest tensor: 4 pictures of 512 px. More at once are no faster, and past
# 2**31 many kernels miscount.
MAX_NUMBERS = 2**28
# Texts of a model that masks them are padded to a multiple of this: few shapes to compile for.
TOKENS = 32


def place(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Frozen, and in float32 still where its family keeps a layer so in half precision."""
    module.requires_grad_(False).eval()
    nn.Module.to(module, device)  # diffusers' own warns of what does not apply
    kept = (module._keep_in_fp32_modules or []) if isinstance(module, ModelMixin) else []
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if tensor.is_floating_point():
            wanted = dtype
            if any(part in name.split(".") for part in kept):
                wanted = torch.promote_types(dtype, torch.float32)
            tensor.data = tensor.data.to(wanted)


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
    # Layers of a block that take the same input: {name of their parent: their names}.
    siblings: ClassVar[dict[str, tuple[tuple[str, ...], ...]]] = {}
    unguided: ClassVar[float] = 1.0  # guidance above this takes a second pass, without the prompt
    # Pattern of what no picture depends on: it gets no gradient, and DDP would wait for one.
    unused: str | None = None
    masks_texts: ClassVar[bool] = False  # texts of several lengths go together
    can_replay: ClassVar[bool] = True  # as CUDA graphs
    # Faster, but its gradients are wrong wherever they arrive in another layout than attention's
    # output has (torch 2.11): for families whose gradients were held against plain attention's.
    cudnn_attention: ClassVar[bool] = False
    compiled = replayed = False

    def __init__(
        self,
        pipeline: DiffusionPipeline,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        max_sequence_length: int = 256,
        prompt_cache: Path | None = None,
        offload_idle: bool = False,
    ) -> None:
        self.pipeline = pipeline
        self.device, self.dtype = torch.device(device), dtype
        self.idle_device = torch.device("cpu") if offload_idle else self.device
        self.max_sequence_length = max_sequence_length
        self.transformer: nn.Module = pipeline.transformer
        self.vae: nn.Module = pipeline.vae
        for module in [m for m in pipeline.components.values() if isinstance(m, nn.Module)]:
            place(module, self.device if module is self.transformer else self.idle_device, dtype)
        self.plain_vae = isinstance(self.vae, AutoencoderKL)
        layout = {"memory_format": torch.channels_last} if self.plain_vae else {}
        nn.Module.to(self.vae, vae_dtype(dtype, self.device), **layout)
        if not self.cudnn_attention:  # for all of this process, whatever comes after
            torch.backends.cuda.enable_cudnn_sdp(False)
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

    @abstractmethod
    def encode_one(self, text: str) -> Embedding:
        """What the text encoders give for it, (1, ...) each; "embeds" is that of its tokens."""

    def schedule(self, num_steps: int, height: int, width: int, frames: int = 1) -> Schedule:
        """The noise levels and time steps that the family's own pipeline would use."""
        return shifted_schedule(self.own_scheduler(), num_steps, self.tokens(height, width))

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

    def guide(self, unconditional: Tensor, conditional: Tensor, scale: float) -> Tensor:
        return unconditional + scale * (conditional - unconditional)

    def decode_latents(self, latents: Tensor) -> Tensor:
        """Pictures (B, 3, H, W) or clips (B, F, 3, H, W) in [-1, 1], of a VAE's scaled latents."""
        return self.vae.decode(latents, return_dict=False)[0]

    def scaled(self, latents: Tensor) -> Tensor:
        """As the VAE takes them."""
        config = self.vae.config
        return latents / config.scaling_factor + config.shift_factor

    # --- texts -------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, prompts: list[str], negative_prompts: list[str] | None) -> Conditioning:
        """Embed a batch; `negative_prompts` is None when sampling without guidance."""
        every = [*prompts, *(negative_prompts or [])]
        position = {text: i for i, text in enumerate(dict.fromkeys(every))}
        index = torch.tensor([position[text] for text in every])
        count = len(prompts)
        negative = None if negative_prompts is None else index[count:]
        return Conditioning(self._embed(list(position)), index[:count], negative)

    def encode_ahead(self, texts: list[str]) -> None:
        """Embed all at once what `encode` will be asked for: idle encoders then move once."""
        self._known(list(dict.fromkeys(texts)))

    def _embed(self, texts: list[str]) -> Inputs:
        known = self._known(texts)
        found = [known[text] for text in texts]
        multiple = TOKENS if self.masks_texts else 1
        embedded = {
            name: send(cat_padded([f[name][None] for f in found], multiple), self.device)
            for name in found[0]
        }
        if self.masks_texts:
            embedded["lengths"] = torch.tensor([len(f["embeds"]) for f in found])
        return embedded

    def _known(self, texts: list[str]) -> dict[str, Embedding]:
        known = self._cache.find(texts)
        missing = [text for text in texts if text not in known]
        if missing:
            with self._beside(), self._on_device(*self._parts(self.encoders).values()):
                # One at a time: the last bits of an embedding depend on the size of its batch,
                # and must not on where a prompt was met first.
                for text in missing:
                    known[text] = self._cache.add(text, self.encode_one(text))
        return known

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
        )
        return PromptCache(self.prompt_cache, model)

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
        grid = self.grid(self.transformer.config, self.vae.config)
        side = grid.scale * grid.patch
        return (height // side) * (width // side)

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
        if gradient == "both":
            twice = latents.repeat(2, *[1] * (latents.ndim - 1)), timestep.repeat(2)
            both = run(*twice, torch.cat([negative, positive]))
            return self.guide(*both.chunk(2), guidance_scale)
        # Two passes, in sampling as in training: the same arithmetic in both is what makes the
        # on-policy ratio exactly 1.
        with torch.no_grad():
            unconditional = run(latents, timestep, negative)
        return self.guide(unconditional, run(latents, timestep, positive), guidance_scale)

    def compile(self) -> None:
        """Have torch.compile make what runs often faster, from its next call on. Block by block:
        they are alike, so that few of them take time to compile."""
        settle_compiler()
        self.compiled = True
        fuse_gelu(self.transformer)
        for block in self.blocks():
            for parent, groups in self.siblings.items():
                for names in groups:
                    join_siblings(getattr(block, parent), names)
            block.compile(fullgraph=True, dynamic=False)
        if self.plain_vae:
            channels_last_norms(self.vae.decoder)
            self.vae.decoder.compile(dynamic=False)

    def blocks(self) -> list[nn.Module]:
        """The transformer's blocks, which do most of its work."""
        names = self.transformer._repeated_blocks or self.transformer._no_split_modules
        return [m for m in self.transformer.modules() if type(m).__name__ in names]

    def replay(self) -> None:
        """Run the transformer as CUDA graphs from now on, recorded for each new batch size."""
        self.replayed = True
        self.transformer.forward = Replayed(self.transformer)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Pictures (B, 3, H, W) or clips (B, F, 3, H, W) in [0, 1], float32."""
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
        return max(self.vae.config.block_out_channels[:2])

    # --- LoRA files --------------------------------------------------------------------------

    def save_lora(self, folder: Path, transformer: nn.Module, weights: dict[str, Tensor]) -> None:
        """Write the adapter's weights so that `pipe.load_lora_weights(folder)` takes them."""
        self.pipeline_class.save_lora_weights(
            folder,
            transformer_lora_layers=get_peft_model_state_dict(transformer, state_dict=weights),
            # without it diffusers assumes alpha == rank
            transformer_lora_adapter_metadata=transformer.peft_config["default"].to_dict(),
        )

    def load_lora(self, folder: str | Path) -> None:
        """Put the LoRA in `folder` on the transformer, as the adapter "default"."""
        attach_lora(self.transformer, folder, self.pipeline)
        self._cache, self._stream = self._open_cache(), None  # it may be on the text encoders too

    def load_weights(self, folder: Path) -> None:
        """Load what a run saved: a LoRA folder or a whole transformer."""
        if (folder / "config.json").is_file():
            replace_weights(self.transformer, folder)
        else:
            self.load_lora(folder)


def latent_dtype(transformer: nn.Module) -> torch.dtype:
    """Latents stay in float32 under a half-precision model: rounding them breaks the ratio."""
    parameter = next(transformer.parameters())
    return torch.promote_types(parameter.dtype, torch.float32)


def standardised(latents: Tensor, vae: Config) -> Tensor:
    """(B, C, F, H, W) as such a VAE takes them: with the mean and deviation of its own."""
    mean, std = (
        torch.tensor(vae[name], dtype=latents.dtype).to(latents.device)[:, None, None, None]
        for name in ("latents_mean", "latents_std")
    )
    return latents * std + mean
