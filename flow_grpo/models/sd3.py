"""Stable Diffusion 3 and 3.5."""

import copy
import math
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from diffusers import StableDiffusion3Pipeline
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import (
    calculate_shift,
    retrieve_timesteps,
)
from peft import get_peft_model_state_dict
from torch import Tensor, nn
from torch._functorch import config as functorch_config

from flow_grpo.errors import UserError
from flow_grpo.models.base import Conditioning, GuidanceGradient, Schedule
from flow_grpo.models.embeddings import Embedding, PromptCache, identity
from flow_grpo.models.lora_files import attach_lora, replace_weights
from flow_grpo.speed.faster import channels_last_norms, fuse_gelu, join_siblings
from flow_grpo.speed.replay import Replayed
from flow_grpo.speed.transfer import send

ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
TOKENIZERS = ("tokenizer", "tokenizer_2", "tokenizer_3")
OF_IMAGE = ("to_q", "to_k", "to_v")  # projections with one input
OF_TEXT = ("add_q_proj", "add_k_proj", "add_v_proj")
# Numbers in the VAE's largest tensor: 4 pictures of 512 px. More at once are no faster, and past
# 2**31 many kernels miscount.
MAX_NUMBERS = 2**28
# Share of a compiled block's activations that stay for its backward pass. Below 1 torch computes
# norms and the like again, at .75 also attention, which costs time.
ACTIVATIONS_KEPT = 0.95


class SD3Adapter:
    pipeline_class = StableDiffusion3Pipeline
    compiled = replayed = False
    lora_targets = [  # noqa: RUF012
        *(f"attn.{name}" for name in (*OF_IMAGE, "to_out.0")),
        *(f"attn.{name}" for name in (*OF_TEXT, "to_add_out")),
    ]

    def __init__(
        self,
        pipeline: StableDiffusion3Pipeline,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        max_sequence_length: int = 256,
        prompt_cache: Path | None = None,
        offload_idle: bool = False,
    ) -> None:
        self.pipeline = pipeline
        self.device = torch.device(device)
        self.idle_device = torch.device("cpu") if offload_idle else self.device
        self.max_sequence_length = max_sequence_length
        for module in self._modules():
            place = self.device if module is pipeline.transformer else self.idle_device
            module.requires_grad_(False).eval()
            nn.Module.to(module, place, dtype)  # diffusers' own warns of what does not apply
        vae_dtype = _vae_dtype(dtype, self.device)
        nn.Module.to(pipeline.vae, vae_dtype, memory_format=torch.channels_last)
        self.transformer = pipeline.transformer
        self.prompt_cache = prompt_cache
        self._cache = self._open_cache()
        self._stream: torch.cuda.Stream | None = None

    def _modules(self) -> list[nn.Module]:
        return [m for m in self.pipeline.components.values() if isinstance(m, nn.Module)]

    @torch.no_grad()
    def encode(self, prompts: list[str], negative_prompts: list[str] | None) -> Conditioning:
        every = [*prompts, *(negative_prompts or [])]
        position = {text: i for i, text in enumerate(dict.fromkeys(every))}
        texts = list(position)
        embeds, pooled = self._embed(texts)
        index = send(torch.tensor([position[text] for text in every]), self.device)
        count = len(prompts)
        negative = None if negative_prompts is None else index[count:]
        return Conditioning(embeds, pooled, positive=index[:count], negative=negative)

    def encode_ahead(self, texts: list[str]) -> None:
        self._known(list(dict.fromkeys(texts)))

    def _embed(self, texts: list[str]) -> tuple[Tensor, Tensor]:
        known = self._known(texts)
        embeds, pooled = zip(*(known[text] for text in texts), strict=True)
        return send(torch.stack(embeds), self.device), send(torch.stack(pooled), self.device)

    def _known(self, texts: list[str]) -> dict[str, Embedding]:
        known = self._cache.find(texts)
        missing = [text for text in texts if text not in known]
        if missing:
            with self._beside(), self._on_device(*self._parts(ENCODERS).values()):
                # One at a time: the last bits of an embedding depend on the size of its batch,
                # and must not on where a prompt was met first.
                for text in missing:
                    known[text] = self._cache.add(text, *self._call_encoders([text]))
        return known

    def _call_encoders(self, texts: list[str]) -> tuple[Tensor, Tensor]:
        embeds, _, pooled, _ = self.pipeline.encode_prompt(
            prompt=texts,
            prompt_2=texts,
            prompt_3=texts,
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
        )
        return embeds, pooled

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
            self._parts(ENCODERS),
            self._parts(TOKENIZERS),
            device=self.device,
            max_sequence_length=self.max_sequence_length,
            # the width of the zeros that stand in for a T5 that was left out
            width=self.transformer.config.joint_attention_dim,
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

    def schedule(self, num_steps: int, height: int, width: int) -> Schedule:
        scheduler = copy.deepcopy(self.pipeline.scheduler)
        kwargs = {}
        if scheduler.config.get("use_dynamic_shifting"):
            _, rows, columns = self.latent_shape(height, width)
            patch = self.transformer.config.patch_size
            kwargs["mu"] = calculate_shift(
                (rows // patch) * (columns // patch),
                scheduler.config.get("base_image_seq_len", 256),
                scheduler.config.get("max_image_seq_len", 4096),
                scheduler.config.get("base_shift", 0.5),
                scheduler.config.get("max_shift", 1.16),
            )
        timesteps, _ = retrieve_timesteps(scheduler, num_steps, "cpu", **kwargs)
        return Schedule(tuple(scheduler.sigmas.tolist()), tuple(timesteps.tolist()))

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        unit = self.pipeline.vae_scale_factor * self.transformer.config.patch_size
        most = self.transformer.config.pos_embed_max_size * unit
        for name, size in (("height", height), ("width", width)):
            if size < unit or size % unit or size > most:
                raise UserError(f"{name}={size} must be a multiple of {unit} and at most {most}")
        scale = self.pipeline.vae_scale_factor
        return self.transformer.config.in_channels, height // scale, width // scale

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
        texts = conditioning.positive
        if guidance_scale <= 1:
            return self._forward(transformer, latents, timestep, conditioning, texts)
        if gradient == "both":
            texts = torch.cat([conditioning.negative, texts])
            if isinstance(timestep, Tensor):
                timestep = timestep.repeat(2)
            twice = torch.cat([latents, latents])
            both = self._forward(transformer, twice, timestep, conditioning, texts)
            unconditional, conditional = both.chunk(2)
        else:
            # Two passes, in sampling as in training: the same arithmetic in both is what makes the
            # on-policy ratio exactly 1.
            with torch.no_grad():
                unconditional = self._forward(
                    transformer, latents, timestep, conditioning, conditioning.negative
                )
            conditional = self._forward(transformer, latents, timestep, conditioning, texts)
        return unconditional + guidance_scale * (conditional - unconditional)

    def _forward(
        self,
        transformer: nn.Module,
        latents: Tensor,
        timestep: float | Tensor,
        conditioning: Conditioning,
        texts: Tensor,
    ) -> Tensor:
        if not isinstance(timestep, Tensor):
            timestep = torch.full((len(texts),), timestep, device=latents.device)
        out = transformer(
            hidden_states=latents.to(conditioning.embeds.dtype),
            timestep=timestep,
            encoder_hidden_states=conditioning.embeds[texts],
            pooled_projections=conditioning.pooled[texts],
            return_dict=False,
        )[0]
        return out.to(latents.dtype)

    def compile(self) -> None:
        """Block by block: they are alike, so that few of them take time to compile."""
        # three kinds of blocks; with and without gradients, LoRA and evaluation's batch size
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        # it would cut each block in two, to send gradients of half a block sooner
        torch._dynamo.config.optimize_ddp = False
        functorch_config.activation_memory_budget = ACTIVATIONS_KEPT
        for harmless in ("Dynamo detected a call to a `functools.lru_cache`", "TensorFloat32"):
            warnings.filterwarnings("ignore", message=harmless, category=UserWarning)
        self.compiled = True
        fuse_gelu(self.transformer)
        for block in self.transformer.transformer_blocks:
            join_siblings(block.attn, OF_IMAGE)
            join_siblings(block.attn, OF_TEXT)
            block.compile(fullgraph=True, dynamic=False)
        channels_last_norms(self.pipeline.vae.decoder)
        self.pipeline.vae.decoder.compile(dynamic=False)

    def replay(self) -> None:
        self.replayed = True
        self.transformer.forward = Replayed(self.transformer)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        vae = self.pipeline.vae
        latents = (latents / vae.config.scaling_factor + vae.config.shift_factor).to(vae.dtype)
        pixels = latents.shape[-2:].numel() * self.pipeline.vae_scale_factor**2
        widest = pixels * max(vae.config.block_out_channels[:2])  # of each picture, at full size
        most = max(1, MAX_NUMBERS // widest)
        parts = latents.chunk(math.ceil(len(latents) / most))
        with self._on_device(vae):
            images = [vae.decode(part, return_dict=False)[0] for part in parts]
        return (torch.cat(images).float() / 2 + 0.5).clamp(0, 1)

    def save_lora(self, folder: Path, transformer: nn.Module, weights: dict[str, Tensor]) -> None:
        self.pipeline_class.save_lora_weights(
            folder,
            transformer_lora_layers=get_peft_model_state_dict(transformer, state_dict=weights),
            # without it diffusers assumes alpha == rank
            transformer_lora_adapter_metadata=transformer.peft_config["default"].to_dict(),
        )

    def load_lora(self, folder: str | Path) -> None:
        attach_lora(self.transformer, folder, self.pipeline)
        self._cache, self._stream = self._open_cache(), None  # it may be on the text encoders too

    def load_weights(self, folder: Path) -> None:
        if (folder / "config.json").is_file():
            replace_weights(self.transformer, folder)
        else:
            self.load_lora(folder)


def _vae_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """bfloat16 where it is fast; SD3's VAE overflows in float16."""
    half = dtype in (torch.float16, torch.bfloat16)
    if half and device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16
    return torch.promote_types(dtype, torch.float32)
