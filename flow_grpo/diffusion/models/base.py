"""Base of the model adapters: device placement, prompts, guidance, optimizations, weight files.

Each model family is a subclass in its own file; see docs/adding_models.md.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from diffusers import AutoencoderKL, DiffusionPipeline
from peft import get_peft_model_state_dict
from PIL import Image
from torch import Tensor, nn
from transformers.image_processing_base import ImageProcessingMixin

from flow_grpo.audio import Audio
from flow_grpo.data.videos import is_video_source, read_source_video
from flow_grpo.diffusion.models.dtypes import freeze, vae_dtype
from flow_grpo.diffusion.models.experts import Experts, check_expert_folders, iter_experts
from flow_grpo.diffusion.models.inputs import (
    Conditioning,
    Inputs,
    LatentGrid,
    Schedule,
    Size,
    cat_padded,
    compute_shift,
    latent_shape,
    shifted_schedule,
)
from flow_grpo.diffusion.models.lora_files import attach_lora, load_full_weights, lora_mixin
from flow_grpo.diffusion.models.prompt_cache import Embedding, PromptCache, encoder_identity
from flow_grpo.images import ImageSource, fit_image, resize_and_crop
from flow_grpo.perf.optimize import SharedInputGroups, apply_optimizations
from flow_grpo.perf.quantization import UNQUANTIZED, at_full_precision, quantize_linears
from flow_grpo.perf.transfer import to_device
from flow_grpo.rewards.frames import DEFAULT_FPS
from flow_grpo.training.distributed import Ranks, unsharded_class_name
from flow_grpo.training.lora_files import resolve_lora_path

IMAGE_QKV = ("to_q", "to_k", "to_v")  # layers with the same input
TEXT_QKV = ("add_q_proj", "add_k_proj", "add_v_proj")
ATTENTION_TARGETS = [f"attn.{name}" for name in (*IMAGE_QKV, "to_out.0", *TEXT_QKV, "to_add_out")]
ATTENTION_SHARED_INPUTS = {"attn": (IMAGE_QKV, TEXT_QKV)}
GuidanceGradient = Literal["both", "conditional"]
Config = Mapping[str, Any]  # config of one component of a pipeline
PromptInput = tuple[str, tuple[ImageSource, ...]]  # a prompt and its source images
# Elements of the VAE's largest tensor: 4 images of 512 px. Larger batches are no faster, and beyond
# 2**31 elements the indices of many kernels overflow.
MAX_VAE_ELEMENTS = 2**28
# Prompts of models that mask padding are padded to a multiple of this: fewer shapes to compile.
TOKEN_MULTIPLE = 32


def mlp_targets(*names: str) -> list[str]:
    """Return the LoRA targets in these feed-forward modules of diffusers."""
    return [f"{name}.{layer}" for name in names for layer in ("net.0.proj", "net.2")]


class ModelAdapter(ABC):
    """Adapter of one model family; sampling and training share its `velocity`."""

    pipeline_class: ClassVar[type[DiffusionPipeline]]
    encoders: ClassVar[tuple[str, ...]] = ("text_encoder",)  # components that encode prompts
    tokenizers: ClassVar[tuple[str, ...]] = ("tokenizer",)
    lora_targets: ClassVar[list[str]]
    shared_inputs: ClassVar[SharedInputGroups] = {}  # layers of a block that take the same input
    negative_prompt: ClassVar[str] = ""  # used for guidance where a prompt has none
    guidance_threshold: ClassVar[float] = 1.0  # scales above this need a second, negative pass
    # Pattern of modules that the output does not depend on: they get no gradient, and DDP would
    # wait for one.
    unused_modules: str | None = None
    masks_prompt_padding: ClassVar[bool] = False  # prompts of different lengths can be batched
    num_source_images: ClassVar[range] = range(1)  # allowed numbers of source images per prompt
    encodes_images: ClassVar[bool] = True  # the VAE encodes images as latents of samples
    generates_audio: ClassVar[bool] = False  # `decode_audio` returns the sound of videos
    fps: ClassVar[float] = DEFAULT_FPS  # frames per second of videos
    source_is_video: ClassVar[bool] = False  # source images are the frames of a source video
    masks_source_images: ClassVar[bool] = False  # prompts with and without them can be batched
    # Component: class that flow_grpo/diffusion/models/processors.py loads it with.
    processors: ClassVar[Mapping[str, str]] = MappingProxyType({})
    supports_cuda_graphs: ClassVar[bool] = True
    context_parallel: ClassVar[bool] = False  # `sample.context_parallel` can split its tokens,
    context_parallel_sources: ClassVar[bool] = False  # also with source images
    # Plan by which diffusers splits the tokens; None for the plan of the transformer. Attention
    # modules in `whole_keys` have the keys of all tokens on each process.
    context_plan: ClassVar[Mapping[str, Any] | None] = None
    whole_keys: ClassVar[tuple[str, ...]] = ()
    ranks: Ranks | None = None  # with context parallelism
    # Faster. Set where `make_attention_gradients_contiguous` ensures correct gradients, or where
    # they were checked against plain attention.
    cudnn_attention: ClassVar[bool] = False
    compiled = False
    uses_cuda_graphs = False
    guidance_scale_2: float | None = None  # for the low-noise transformer of models with two

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
        base_precision: str = UNQUANTIZED,
        keep_full: bool = False,
        encoder_precision: str = UNQUANTIZED,
    ) -> None:
        """Freeze and place the components of a pipeline.

        Args:
            pipeline: A loaded diffusers pipeline.
            device: Device of the transformer.
            dtype: Dtype of the frozen weights.
            max_sequence_length: Maximum number of prompt tokens.
            prompt_cache: Directory of cached embeddings.
            offload_idle: Keep encoders and VAE on the CPU while they are not used.
            source_size: Size of the samples, which source images are resized to.
            base_precision: Precision of the transformer's blocks.
            keep_full: Also keep the blocks in full precision, for `at_full_precision`.
            encoder_precision: Precision of the encoders, except the VAE.
        """
        self.pipeline = pipeline
        self.device, self.dtype = torch.device(device), dtype
        self.idle_device = torch.device("cpu") if offload_idle else self.device
        self.max_sequence_length = max_sequence_length
        self.source_size = source_size
        self.transformer: nn.Module = self.select_transformer(pipeline)
        trained = set(self.transformer.modules())
        self.vae: nn.Module = pipeline.vae
        modules = [m for m in pipeline.components.values() if isinstance(m, nn.Module)]
        for module in modules:
            freeze(module, dtype)
        quantize_linears(self.blocks(), base_precision, self.device, keep_full=keep_full)
        encoders = set(self._components(self.encoders).values()) - {self.vae}
        if isinstance(self.transformer, Experts) and offload_idle:
            self.transformer.offload_unused(self.device)
        for module in modules:
            if module in encoders:
                quantize_linears([module], encoder_precision, self.device)
            # not `ModelMixin.to`, whose warnings do not apply here
            nn.Module.to(module, self.device if module in trained else self.idle_device)
        self.is_autoencoder_kl = isinstance(self.vae, AutoencoderKL)
        layout = {"memory_format": torch.channels_last} if self.is_autoencoder_kl else {}
        nn.Module.to(self.vae, vae_dtype(dtype, self.device), **layout)
        self.prompt_cache = prompt_cache
        self._cache = self._open_cache()
        self._caches: dict[Size, PromptCache] = {}  # of `source_images_at`
        self._stream: torch.cuda.Stream | None = None

    # --- defined by the families --------------------------------------------------------------

    @classmethod
    @abstractmethod
    def grid(cls, transformer: Config, vae: Config) -> LatentGrid:
        """Return the geometry of the latents, given the configs of transformer and VAE."""

    @classmethod
    def check(cls, pipeline: Config, transformer: Config, guidance: Mapping[str, float]) -> None:
        """Raise a UserError for unsupported settings.

        Args:
            pipeline: Content of model_index.json.
            transformer: Config of the transformer.
            guidance: Guidance scales by config field.
        """
        return None

    def select_transformer(self, pipeline: DiffusionPipeline) -> nn.Module:
        """Return the module to train."""
        return pipeline.transformer

    @abstractmethod
    def encode_single(self, text: str, *images: Image.Image) -> Embedding:
        """Encode one prompt; every returned tensor is (1, ...).

        Args:
            text: The prompt.
            *images: Its source images, in their final size.

        Returns:
            "embeds", the token embeddings (1, L, D), and further inputs of the family. A family
            that takes source images always returns "source", their tokens, (1, 0, D) without any.
        """

    def schedule(self, num_steps: int, height: int, width: int, frames: int = 1) -> Schedule:
        """Return the noise levels and timesteps that the family's pipeline uses."""
        scheduler = self.copy_scheduler()
        mu = compute_shift(scheduler, self.num_image_tokens(height, width))
        # Noise levels that the model was distilled for, used for that number of steps.
        distilled = self.pipeline.config.get("sample_sigmas") or ()
        sigmas = distilled if len(distilled) == num_steps else None
        return shifted_schedule(scheduler, num_steps, mu, sigmas)

    @abstractmethod
    def forward(
        self,
        transformer: nn.Module,
        latents: Tensor,
        timestep: Tensor,
        inputs: Inputs,
        guidance_scale: float,
    ) -> Tensor:
        """Run the transformer once, without guidance in two passes.

        Args:
            transformer: `self.transformer`, possibly wrapped by DDP or DeepSpeed.
            latents: (B, C, H, W), or (B, C, F, H, W) for video, in the model's dtype.
            timestep: (B,), in the scheduler's units.
            inputs: What `encode_single` returned for each sample, stacked.
            guidance_scale: For models that take it as an input.

        Returns:
            The velocity, in the shape of `latents`.
        """

    def precompute(self, transformer: nn.Module, conditioning: Conditioning) -> Conditioning:
        """Add what `forward` would recompute in every step; valid while the weights are fixed."""
        return conditioning

    def guide(self, unconditional: Tensor, conditional: Tensor, scale: float | Tensor) -> Tensor:
        """Combine both velocities, (B, ...) each, by classifier-free guidance."""
        return unconditional + scale * (conditional - unconditional)

    def combine(
        self,
        latents: Tensor,
        timestep: Tensor,
        conditional: Tensor,
        unconditional: Tensor | None,
        scale: float | Tensor,
        conditioning: Conditioning,
    ) -> Tensor:
        """Return the velocity from the outputs of the transformer, (B, ...) each.

        Args:
            latents: (B, ...), in the dtype of the sampler.
            timestep: (B,), in the scheduler's units.
            conditional: Output for the prompts.
            unconditional: Output for the negative prompts; None without guidance.
            scale: Guidance scale.
            conditioning: Encoded prompts of the samples.
        """
        return (
            conditional if unconditional is None else self.guide(unconditional, conditional, scale)
        )

    def guidance_at(self, timestep: Tensor, scale: float) -> float | Tensor:
        """Return the guidance scale at `timestep`, (B,): by default `scale`.

        A tensor must broadcast to the latents.
        """
        return scale

    def start_latents(self, noise: Tensor, conditioning: Conditioning, sigma: float) -> Tensor:
        """Return the latents of the first step from noise, (B, ...), at its noise level `sigma`."""
        return noise

    def finalize_latents(self, latents: Tensor, conditioning: Conditioning) -> Tensor:
        """Postprocess the latents of the last step before they are decoded or trained on."""
        return latents

    def decode_latents(self, latents: Tensor) -> Tensor:
        """Decode VAE latents to images (B, 3, H, W) or videos (B, F, 3, H, W) in [-1, 1]."""
        return self.vae.decode(latents, return_dict=False)[0]

    def to_vae_latents(self, latents: Tensor) -> Tensor:
        """Convert latents from the scale of the transformer to that of the VAE."""
        config = self.vae.config
        return latents / config.scaling_factor + config.shift_factor

    def from_vae_latents(self, latents: Tensor) -> Tensor:
        """Convert latents from the scale of the VAE to that of the transformer."""
        config = self.vae.config
        return (latents - config.shift_factor) * config.scaling_factor

    # --- prompts and source images --------------------------------------------------------------

    @torch.no_grad()
    def encode(
        self,
        prompts: list[str],
        negative_prompts: list[str] | None,
        images: Sequence[tuple[ImageSource, ...]] | None = None,
    ) -> Conditioning:
        """Encode a batch of prompts; each distinct one is encoded and stored once.

        Args:
            prompts: B prompts.
            negative_prompts: B negative prompts; None without guidance.
            images: Source images of each prompt.
        """
        entries = self._cache_entries(prompts, negative_prompts, images)
        position = {key: i for i, key in enumerate(dict.fromkeys(key for key, _ in entries))}
        index = torch.tensor([position[key] for key, _ in entries])
        count = len(prompts)
        negative = None if negative_prompts is None else index[count:]
        return Conditioning(self._embed(dict(entries)), index[:count], negative)

    @torch.no_grad()
    def precompute_embeddings(
        self,
        prompts: list[str],
        negative_prompts: list[str] | None = None,
        images: Sequence[tuple[ImageSource, ...]] | None = None,
    ) -> None:
        """Cache what `encode` will need, so that offloaded encoders move only once."""
        self._lookup_or_encode(dict(self._cache_entries(prompts, negative_prompts, images)))

    def _cache_entries(
        self,
        prompts: list[str],
        negative_prompts: list[str] | None,
        images: Sequence[tuple[ImageSource, ...]] | None,
    ) -> list[tuple[str, PromptInput]]:
        """Return (cache key, (text, images)) of each prompt, then of each negative prompt.

        Negative prompts have the images of the prompts.
        """
        images = list(images or [()] * len(prompts))
        texts = [*prompts, *(negative_prompts or [])]
        inputs = zip(texts, images if negative_prompts is None else images * 2, strict=True)
        return [(self._cache.name(*each), each) for each in inputs]

    def _embed(self, wanted: dict[str, PromptInput]) -> Inputs:
        """Return the embeddings of inputs by cache key, padded and stacked on the device.

        Lengths, which padding hides, are added as CPU tensors.
        """
        known = self._lookup_or_encode(wanted)
        found = [known[name] for name in wanted]
        multiples = {"embeds": TOKEN_MULTIPLE} if self.masks_prompt_padding else {}
        embedded = {
            name: cat_padded([f[name][None] for f in found], multiples.get(name, 1))
            for name in found[0]
        }
        embedded = {name: to_device(each, self.device) for name, each in embedded.items()}
        if self.masks_prompt_padding:
            embedded["lengths"] = torch.tensor([len(f["embeds"]) for f in found])
        if "source" in embedded:
            embedded["source_lengths"] = torch.tensor([len(f["source"]) for f in found])
        return embedded

    def _lookup_or_encode(self, wanted: dict[str, PromptInput]) -> dict[str, Embedding]:
        """Return the embedding of each input by cache key; encode and cache missing ones."""
        known = self._cache.find(list(wanted))
        missing = {name: given for name, given in wanted.items() if name not in known}
        if missing:
            with self._side_stream(), self._on_device(*self._components(self.encoders).values()):
                # One at a time: the last bits of an embedding depend on the batch size, and must
                # not depend on which batch contained the prompt first.
                for name, (text, images) in missing.items():
                    loaded = [frame for each in images for frame in self.load_source_frames(each)]
                    encoded = self.encode_single(text, *loaded)
                    known[name] = self._cache.add(name, encoded)
        return known

    def load_source_image(self, image: ImageSource) -> Image.Image:
        """Load a source image in the size that the model takes."""
        if self.source_size is None:
            raise ValueError("source_size=None: pass load_adapter(..., source_size=Size(H, W))")
        return resize_and_crop(image, self.source_size.width, self.source_size.height)

    def load_source_frames(self, source: ImageSource) -> list[Image.Image]:
        """Load a source image, or all frames of a source video, at the size the model expects."""
        if not is_video_source(source):
            return [self.load_source_image(source)]
        height, width, frames = self.source_size
        return [fit_image(frame, width, height) for frame in read_source_video(source, frames)]

    @contextmanager
    def source_images_at(self, size: Size) -> Iterator[None]:
        """Sample, and resize source images, at `size` for the duration of the context."""
        if size == self.source_size or not self.num_source_images[-1]:
            yield
            return
        before = self.source_size, self._cache  # embeddings depend on the size
        self.source_size = size
        if size not in self._caches:
            self._caches[size] = self._open_cache()
        self._cache = self._caches[size]
        try:
            yield
        finally:
            self.source_size, self._cache = before

    def source_latents(self, image: Image.Image) -> Tensor:
        """Encode a source image with the VAE, (1, C, H, W) in the scale of the transformer."""
        pixels = self.pipeline.image_processor.preprocess(image)
        latents = self.vae.encode(pixels.to(self.device, self.vae.dtype)).latent_dist.mode()
        return self.from_vae_latents(latents).to(self.dtype)

    @torch.no_grad()
    def encode_image_latents(self, image: ImageSource) -> Tensor:
        """Load and encode an image as the latents of a sample, (1, C, H, W)."""
        with self._on_device(self.vae):
            return self.source_latents(self.load_source_image(image))

    def _side_stream(self) -> AbstractContextManager:
        """Return a context with a second CUDA stream, so that encoding overlaps with sampling."""
        if self.device.type != "cuda" or self.idle_device != self.device:
            return nullcontext()  # a second stream would hold on to memory of offloaded modules
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
            self._stream.wait_stream(torch.cuda.current_stream(self.device))  # for the weights
        return torch.cuda.stream(self._stream)

    def _open_cache(self) -> PromptCache:
        """Create the prompt cache, on disk if `prompt_cache` is set."""
        if self.prompt_cache is None:
            return PromptCache()
        model = encoder_identity(
            self._components(self.encoders),
            self._components(self.tokenizers),
            device=self.device,
            pipeline=self.pipeline_class.__name__,
            max_sequence_length=self.max_sequence_length,
            # width of the zeros that replace the output of a missing encoder
            width=self.transformer.config.get("joint_attention_dim"),
            **self._image_settings(),
        )
        return PromptCache(self.prompt_cache, model)

    def _image_settings(self) -> dict[str, Any]:
        """Return the settings that determine encoded source images; {} without such images."""
        if not self.num_source_images[-1]:
            return {}
        components = (getattr(self.pipeline, name) for name in self.processors)
        seen = [getattr(c, "image_processor", c) for c in components]
        seen = [c.to_dict() for c in seen if isinstance(c, ImageProcessingMixin)]
        return {"source_size": self.source_size, "seen": seen}

    def _components(self, names: tuple[str, ...]) -> dict:
        parts = {name: getattr(self.pipeline, name, None) for name in names}
        return {name: part for name, part in parts.items() if part is not None}

    @contextmanager
    def _on_device(self, *modules: nn.Module) -> Iterator[None]:
        """Move modules to the device for the duration of the context if `offload_idle` is set."""
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
        """Return the shape of one sample's latents, without the batch dimension."""
        grid = self.grid(self.transformer.config, self.vae.config)
        return latent_shape(grid, Size(height, width, frames))

    def num_image_tokens(self, height: int, width: int) -> int:
        """Return the number of transformer tokens of an image."""
        side = self.pixels_per_token()
        return (height // side) * (width // side)

    def pixels_per_token(self) -> int:
        """Return the side of the square of pixels that one token covers."""
        grid = self.grid(self.transformer.config, self.vae.config)
        return grid.scale * grid.patch

    @classmethod
    def prompt_tokens(cls, max_sequence_length: int) -> int:
        """Return a number that divides the tokens of each prompt; 0 if prompts are not split.

        That is, if context parallelism does not split them.
        """
        return max_sequence_length

    @classmethod
    def audio_tokens(cls, transformer: Config, frames: int) -> int:
        """Return the number of transformer tokens of a video's sound; 0 for models without."""
        return 0

    def copy_scheduler(self) -> Any:
        """Return a copy of the pipeline's scheduler, since `set_timesteps` changes it."""
        return copy.deepcopy(self.pipeline.scheduler)

    # --- the model ---------------------------------------------------------------------------

    @classmethod
    def is_guided(cls, scale: float) -> bool:
        """Return whether this scale needs two passes, with the prompt and the negative prompt."""
        return scale > cls.guidance_threshold

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
        """Return the guided velocity, (B, ...) in the dtype of `latents`.

        Args:
            transformer: `self.transformer`, possibly wrapped by DDP or DeepSpeed.
            latents: (B, C, H, W), or (B, C, F, H, W) for video.
            timestep: One for all samples, or (B,).
            conditioning: Encoded prompts of the samples.
            guidance_scale: Scale of classifier-free guidance.
            gradient: "both": through both halves of guidance, which run as one batch.
                "conditional": through the conditional half only, in two passes; biased.
        """
        if not isinstance(timestep, Tensor):
            timestep = torch.full((len(latents),), timestep, device=latents.device)

        def run(x: Tensor, t: Tensor, index: Tensor) -> Tensor:
            inputs = conditioning.select(index)
            x = x.to(self.dtype)
            if self.ranks is not None and x.requires_grad:
                x = _SumGradient.apply(x, self.ranks)
            out = self.forward(transformer, x, t, inputs, guidance_scale)
            return out.to(latents.dtype)

        positive, negative = conditioning.positive, conditioning.negative
        combine = partial(self.combine, latents, timestep, conditioning=conditioning)
        if not self.is_guided(guidance_scale):
            return combine(run(latents, timestep, positive), None, guidance_scale)
        scale = self.guidance_at(timestep, guidance_scale)
        if gradient == "both":
            repeated = latents.repeat(2, *[1] * (latents.ndim - 1))
            both = run(repeated, timestep.repeat(2), torch.cat([negative, positive]))
            return combine(*reversed(both.chunk(2)), scale)
        # Two passes in sampling as in training: the on-policy ratio is exactly 1 only if both use
        # the same arithmetic.
        with torch.no_grad():
            unconditional = run(latents, timestep, negative)
        return combine(run(latents, timestep, positive), unconditional, scale)

    def apply_optimizations(self, *, fold: bool, compiled: bool, graphs: bool) -> None:
        """Fold LoRA, compile blocks and use CUDA graphs, as far as the family supports it."""
        self.compiled, self.uses_cuda_graphs = compiled, graphs and self.supports_cuda_graphs
        apply_optimizations(
            self.transformer,
            self.blocks() if compiled else [],
            self.shared_inputs,
            self.vae.decoder if self.is_autoencoder_kl else None,
            cudnn_attention=self.cudnn_attention,
            fold=fold,
            compiled=compiled,
            graphs=self.uses_cuda_graphs,
        )

    def at_full_precision(self) -> AbstractContextManager:
        """Return a context in which the blocks have their unquantized weights, if `keep_full`."""
        return at_full_precision(self.transformer)

    def blocks(self) -> list[nn.Module]:
        """Return the transformer's repeated blocks, which are quantized and compiled."""
        names = self.transformer._repeated_blocks or self.transformer._no_split_modules
        return [m for m in self.transformer.modules() if unsharded_class_name(m) in names]

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents to images (B, 3, H, W) or videos (B, F, 3, H, W) in [0, 1], float32."""
        return self.decode_with_gradient(latents)

    def decode_with_gradient(self, latents: Tensor) -> Tensor:
        """Decode like `decode`, but keep the gradient."""
        latents = self.to_vae_latents(latents).to(self.vae.dtype)
        grid = self.grid(self.transformer.config, self.vae.config)
        pixels = latents[0, 0].numel() * grid.scale**2 * max(1, grid.frame_scale)
        batch_size = max(1, MAX_VAE_ELEMENTS // (pixels * self.vae_width()))
        parts = latents.chunk(math.ceil(len(latents) / batch_size))
        with self._on_device(self.vae):
            images = [self.decode_latents(part) for part in parts]
        return (torch.cat(images).float() / 2 + 0.5).clamp(0, 1)

    def vae_width(self) -> int:
        """Return the channels of the VAE's widest tensor at full resolution."""
        config = self.vae.config
        if "base_dim" in config:
            return config.get("decoder_base_dim") or config.base_dim
        return max(config.block_out_channels[:2])

    def decode_audio(self, latents: Tensor) -> list[Audio] | None:
        """Decode the sound of each sample; None for models and samples without sound."""
        return None

    # --- LoRA files --------------------------------------------------------------------------

    def save_lora(self, folder: Path, transformer: nn.Module, weights: dict[str, Tensor]) -> None:
        """Save LoRA weights in the format of `pipe.load_lora_weights(folder)`.

        For a pipeline without this method, `pipe.transformer.load_lora_adapter` reads it.

        Args:
            folder: Directory to write to.
            transformer: Model with the adapter "default".
            weights: Values to save, by the names of its state dict.
        """
        for subfolder, part, own in iter_experts(transformer, weights):
            lora_mixin(self.pipeline_class).save_lora_weights(
                folder / subfolder,
                transformer_lora_layers=get_peft_model_state_dict(part, state_dict=own),
                # Without metadata diffusers assumes alpha == rank.
                transformer_lora_adapter_metadata=part.peft_config["default"].to_dict(),
            )

    def load_lora(self, folder: str | Path) -> None:
        """Attach the LoRA at `folder`, see `read_lora`, as the adapter "default"."""
        path = resolve_lora_path(folder)
        self._check_expert_folders(path)
        for subfolder, part, _ in iter_experts(self.transformer):
            attach_lora(part, path / subfolder, self.pipeline)
        # It may include text encoders, which invalidates cached embeddings.
        self._cache, self._caches, self._stream = self._open_cache(), {}, None

    def unload_lora(self) -> None:
        """Remove all LoRA layers."""
        if lora_mixin(self.pipeline_class) is self.pipeline_class:
            self.pipeline.unload_lora_weights()  # also those of text encoders
        else:
            self.transformer.unload_lora()

    def load_weights(self, folder: Path) -> None:
        """Load the weights that a run saved: a LoRA or a full transformer."""
        if not (folder / "config.json").is_file():
            self.load_lora(folder)
            return
        self._check_expert_folders(folder)
        if isinstance(self.transformer, Experts):
            self.transformer.restore_offloaded()
        for subfolder, part, _ in iter_experts(self.transformer):
            load_full_weights(part, folder / subfolder)

    def _check_expert_folders(self, folder: str | Path) -> None:
        check_expert_folders(folder, [name for name, *_ in iter_experts(self.transformer)])


class _SumGradient(torch.autograd.Function):
    """Identity whose backward pass sums the gradients of the context group.

    Each process has the gradient with respect to the input through its own tokens only.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.sum_over_context(gradient), None


def latent_dtype(transformer: nn.Module) -> torch.dtype:
    """Return the dtype of latents: at least float32, since rounding them would break the ratio."""
    parameter = next(transformer.parameters())
    return torch.promote_types(parameter.dtype, torch.float32)


def rescale_latents(latents: Tensor, vae: Config, back: bool = False) -> Tensor:
    """Denormalize latents (B, C, F, H, W) of a transformer for the VAE, by its mean and std.

    With `back`, normalize latents of the VAE for the transformer.
    """

    def statistic(name: str) -> Tensor:
        values = torch.tensor(vae[name], dtype=latents.dtype).to(latents.device)
        return values[:, None, None, None]

    mean, std = statistic("latents_mean"), statistic("latents_std")
    return (latents - mean) / std if back else latents * std + mean
