"""Adapt LTX-2 and LTX-2.3: they generate video with sound from text and an optional first frame.

Video and audio latents are denoised together by one transformer with two streams and one noise
schedule. Both have the same number of channels C, so a sample is one packed tensor (T_v + T_a, C):
first the video tokens, F' x H' x W' of them, then one token per audio latent. The SDE step adds
independent noise to all elements, and the log-probability is their mean, that is, the mean of each
modality weighted by its number of elements:

    log p = (T_v log p_v + T_a log p_a) / (T_v + T_a)

which keeps the ratio that of the joint Gaussian, up to a constant in the exponent. LoRA layers of
both streams are trained, including the cross-attention between them.

Guidance is computed as in the pipeline, on predictions of the clean latents, x0 = x - sigma v. In
exact arithmetic this equals guidance of the velocities; it is done for samples that equal those of
the pipeline. Its other terms (spatio-temporal, modality and rescaled guidance) are not applied.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from diffusers import DiffusionPipeline, LTX2Pipeline
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from PIL import Image
from torch import Tensor, nn

from flow_grpo.audio import Audio
from flow_grpo.diffusion.models.base import Config, ModelAdapter, mlp_targets
from flow_grpo.diffusion.models.inputs import (
    Conditioning,
    Inputs,
    LatentGrid,
    Schedule,
    Size,
    compute_shift,
    shifted_schedule,
)
from flow_grpo.diffusion.models.prompt_cache import Embedding
from flow_grpo.diffusion.video_memory import count_audio_tokens
from flow_grpo.errors import UserError
from flow_grpo.perf.transfer import to_device

ATTENTIONS = (
    *("attn1", "attn2", "audio_attn1", "audio_attn2"),
    *("audio_to_video_attn", "video_to_audio_attn"),
)
QKV = ("to_q", "to_k", "to_v")
AUDIO_COMPRESSION = 4  # mel frames per audio latent
TIMESTEP_UNIT = 1000  # timesteps per unit of sigma
ROPES = ("rope", "audio_rope", "cross_attn_rope", "cross_attn_audio_rope")
SPLIT_TOKENS = ContextParallelInput(split_dim=1, expected_dims=3)
# (B, T, D), or (B, H, T, D / 2) for split rotations
SPLIT_ROTATION = ContextParallelInput(split_dim=-2, split_output=True)
GATHER_TOKENS = ContextParallelOutput(gather_dim=1, expected_dims=3)


class LTX2Adapter(ModelAdapter):
    """Adapt LTX-2 text-to-video and image-to-video with audio.

    Unlike that of other families, the shape of the latents does not determine the size of the
    video, so the size is that of `source_size`.
    """

    pipeline_class = LTX2Pipeline
    encoders = ("text_encoder", "connectors", "vae")
    encodes_images = False  # its VAE encodes videos
    num_source_images = range(2)
    masks_source_images = True
    generates_audio = True
    supports_cuda_graphs = False  # its forward pass returns two tensors, graphs support one
    fps = 24.0  # the pipeline's default
    context_parallel = context_parallel_sources = True
    # The plan of diffusers 0.42.1 splits neither the sound nor rotations (B, H, T, D / 2).
    context_plan = MappingProxyType(
        {
            "": {
                "hidden_states": SPLIT_TOKENS,
                "audio_hidden_states": SPLIT_TOKENS,
                "timestep": ContextParallelInput(split_dim=1, expected_dims=2),  # one per token
            },
            **{rope: {0: SPLIT_ROTATION, 1: SPLIT_ROTATION} for rope in ROPES},
            "proj_out": GATHER_TOKENS,
            "audio_proj_out": GATHER_TOKENS,
        }
    )
    whole_keys = ("attn2", "audio_attn2")  # attend to the prompt
    lora_targets = [  # noqa: RUF012
        *(f"{attention}.{name}" for attention in ATTENTIONS for name in (*QKV, "to_out.0")),
        *mlp_targets("ff", "audio_ff"),
    ]
    shared_inputs = {  # noqa: RUF012
        "attn1": (QKV,),
        "audio_attn1": (QKV,),
        **{name: (QKV[1:],) for name in ATTENTIONS if not name.endswith("attn1")},
    }

    def __init__(self, pipeline: DiffusionPipeline, **options: Any) -> None:
        """Freeze and place the components; the vocoder computes in float32.

        Raises:
            UserError: For a VAE that decodes with noise, components for different audio rates,
                connectors that keep the padding of prompts, or a prompt length that the learned
                tokens in its place do not divide.
        """
        check_audio_rates(pipeline)
        if pipeline.vae.config.timestep_conditioning:
            raise UserError(
                "has a VAE with timestep_conditioning, which is not supported",
                field="pretrained.model",
                value=pipeline.name_or_path,
            )
        connectors = pipeline.connectors.config
        registers = connectors.video_connector_num_learnable_registers
        if not (registers and connectors.audio_connector_num_learnable_registers):
            raise UserError(
                "has connectors without learned tokens, which is not supported: the transformer "
                "would attend to padding",
                field="pretrained.model",
                value=pipeline.name_or_path,
            )
        length = options.get("max_sequence_length", registers)
        if length % registers:
            raise UserError(
                f"must be a multiple of {registers} for this model",
                field="max_sequence_length",
                value=length,
                hint="use 1024, as in its pipeline",
            )
        super().__init__(pipeline, **options)
        vocoder_dtype = torch.promote_types(self.dtype, torch.float32)
        nn.Module.to(pipeline.vocoder, dtype=vocoder_dtype)

    @classmethod
    def grid(cls, transformer: Config, vae: Config) -> LatentGrid:
        """Return the geometry of the video latents, which are compressed in time as well."""
        return LatentGrid(
            transformer["in_channels"],
            vae.get("spatial_compression_ratio") or 32,
            transformer.get("patch_size", 1),
            frame_scale=vae.get("temporal_compression_ratio") or 8,
        )

    @classmethod
    def check(cls, pipeline: Config, transformer: Config, guidance: Mapping[str, float]) -> None:
        """Reject transformers whose video and audio latents cannot be packed in one tensor."""
        channels = transformer["in_channels"], transformer.get("audio_in_channels", 128)
        if channels[0] != channels[1] or transformer.get("patch_size", 1) != 1:
            raise UserError(
                "must be equal to in_channels, with patch_size=1",
                field="audio_in_channels",
                value=channels[1],
            )

    @classmethod
    def prompt_tokens(cls, max_sequence_length: int) -> int:
        return 0

    @classmethod
    def audio_tokens(cls, transformer: Config, frames: int) -> int:
        """Return the number of audio latents, as `num_audio_tokens`, from the transformer config.

        `check_audio_rates` compares it with the audio VAE.
        """
        rate = transformer.get("audio_sampling_rate", 16000)
        hop = transformer.get("audio_hop_length", 160)
        return count_audio_tokens(frames, cls.fps, rate / hop / AUDIO_COMPRESSION)

    # --- prompts ------------------------------------------------------------------------------

    def encode_single(self, text: str, *images: Image.Image) -> Embedding:
        """Encode a prompt with Gemma 3 and the connectors of both streams.

        Returns:
            "embeds" and "audio_embeds", (1, L, D) each, without padding: the connectors replace it
            by learned tokens. "source" has the tokens of the first frame.
        """
        states, mask, _, _ = self.pipeline.encode_prompt(
            [text],
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
            device=self.device,
        )
        connectors = self.pipeline.connectors
        side = self.pipeline.tokenizer.padding_side
        embeds, audio_embeds, _ = connectors(states, mask, padding_side=side)
        channels = self.transformer.config.in_channels
        frames = [self.first_frame_tokens(image) for image in images]
        source = torch.cat([embeds.new_zeros(1, 0, channels), *frames], 1)
        return {"embeds": embeds, "audio_embeds": audio_embeds, "source": source}

    def first_frame_tokens(self, image: Image.Image) -> Tensor:
        """Encode an image as the latents of one frame, (1, H' W', C).

        The pipeline first compresses it with H.264 (`image_crf`), which is omitted here: its result
        depends on the version of the codec.
        """
        pixels = self.pipeline.video_processor.preprocess(image)[:, :, None]
        latents = self.vae.encode(pixels.to(self.device, self.vae.dtype)).latent_dist.mode()
        latents = latents.to(torch.promote_types(latents.dtype, torch.float32))
        mean, std = (s.to(latents).view(1, -1, 1, 1, 1) for s in self._video_statistics())
        return ((latents - mean) / std).to(self.dtype).flatten(2).transpose(1, 2)

    # --- sizes and noise levels ---------------------------------------------------------------

    def video_shape(self, size: Size) -> tuple[int, int, int]:
        """Return the number of latent frames, rows and columns of a video."""
        return super().latent_shape(*size)[1:]

    def num_audio_tokens(self, frames: int) -> int:
        """Return the number of audio latents of a video with this many frames."""
        config = self.pipeline.audio_vae.config
        per_second = config.sample_rate / config.mel_hop_length / float(AUDIO_COMPRESSION)
        return count_audio_tokens(frames, self.fps, per_second)

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """Return the shape of one sample's packed latents, (T_v + T_a, C)."""
        channels, *shape = super().latent_shape(height, width, frames)
        return math.prod(shape) + self.num_audio_tokens(frames), channels

    def schedule(self, num_steps: int, height: int, width: int, frames: int = 1) -> Schedule:
        """Return the noise levels of both modalities; their shift depends on the video tokens."""
        scheduler = self.copy_scheduler()
        tokens = math.prod(self.video_shape(Size(height, width, frames)))
        mu = compute_shift(scheduler, tokens)
        return shifted_schedule(scheduler, num_steps, mu)

    def unpack(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Split packed latents (B, T, C) into video (B, T_v, C) and audio (B, T_a, C).

        Raises:
            ValueError: If they are not of the size of `source_size`.
        """
        sound = self.num_audio_tokens(self.source_size.frames)
        video = math.prod(self.video_shape(self.source_size))
        if latents.shape[1] != video + sound:
            raise ValueError(f"latents of {latents.shape[1]} tokens are not of {self.source_size}")
        return latents.split([video, sound], 1)

    # --- the model ----------------------------------------------------------------------------

    def forward(
        self,
        transformer: nn.Module,
        latents: Tensor,
        timestep: Tensor,
        inputs: Inputs,
        guidance_scale: float,
    ) -> Tensor:
        """Run both streams; tokens of a given first frame have the timestep 0."""
        lengths, first = inputs["source_lengths"], inputs["source"]
        has_first = bool(first.shape[1])
        if has_first:
            latents = replace_first_frame(latents, lengths, first)
        video, sound = self.unpack(latents)
        frames, height, width = self.video_shape(self.source_size)
        video_timestep = timestep
        if has_first:
            video_timestep = timestep[:, None].repeat(1, video.shape[1])
            video_timestep[:, : height * width] *= to_device(lengths == 0, latents.device)[:, None]
        velocities = transformer(
            hidden_states=video,
            audio_hidden_states=sound,
            encoder_hidden_states=inputs["embeds"],
            audio_encoder_hidden_states=inputs["audio_embeds"],
            timestep=video_timestep,
            audio_timestep=timestep,
            sigma=timestep,
            num_frames=frames,
            height=height,
            width=width,
            fps=self.fps,
            audio_num_frames=sound.shape[1],
            use_cross_timestep=True,
            return_dict=False,
        )
        return torch.cat(velocities, 1)

    def combine(
        self,
        latents: Tensor,
        timestep: Tensor,
        conditional: Tensor,
        unconditional: Tensor | None,
        scale: float | Tensor,
        conditioning: Conditioning,
    ) -> Tensor:
        """Apply guidance to x0; the velocity of a given first frame leads to the source image.

        That velocity does not depend on the weights, so it does not affect the ratio.
        """
        sigma = (timestep.double() / TIMESTEP_UNIT).to(latents.dtype)[:, None, None]
        x0 = latents - conditional * sigma
        if unconditional is not None:
            x0 = x0 + (scale - 1) * (x0 - (latents - unconditional * sigma))
        return (latents - with_given_first_frames(x0, conditioning)) / sigma

    def finalize_latents(self, latents: Tensor, conditioning: Conditioning) -> Tensor:
        """Set given first frames, which noise moved away from the source image."""
        return with_given_first_frames(latents, conditioning)

    # --- decoding -----------------------------------------------------------------------------

    def decode_with_gradient(self, latents: Tensor) -> Tensor:
        """Decode the video of packed latents, see the base class."""
        video, _ = self.unpack(latents)
        video = video.transpose(1, 2).unflatten(2, self.video_shape(self.source_size))
        return super().decode_with_gradient(video)

    def to_vae_latents(self, latents: Tensor) -> Tensor:
        latents = latents.to(self.dtype)  # before rescaling, as in the pipeline
        mean, std = (s.to(latents).view(1, -1, 1, 1, 1) for s in self._video_statistics())
        return latents * std / self.vae.config.scaling_factor + mean

    def decode_latents(self, latents: Tensor) -> Tensor:
        videos = super().decode_latents(latents).transpose(1, 2)
        return videos[:, 0] if videos.shape[1] == 1 else videos

    @torch.no_grad()
    def decode_audio(self, latents: Tensor) -> list[Audio] | None:
        """Decode the sound of packed latents; None for images.

        One sample at a time, as the vocoder's memory grows with the number of samples.
        """
        if self.source_size.frames == 1:
            return None
        _, sound = self.unpack(latents)
        vae, vocoder = self.pipeline.audio_vae, self.pipeline.vocoder
        mean, std = vae.latents_mean.to(sound), vae.latents_std.to(sound)
        shape = vae.config.latent_channels, -1  # channels and mel bins of a token
        mel_latents = (sound * std + mean).unflatten(2, shape).transpose(1, 2)
        waves = []
        with self._on_device(vae, vocoder):
            for latent in mel_latents.to(vae.dtype).split(1):
                mel = vae.decode(latent, return_dict=False)[0]
                waves.append(vocoder(mel.to(vocoder.dtype)).float().cpu())
        rate = vocoder.config.output_sampling_rate
        return [Audio(wave.numpy(), rate) for wave in torch.cat(waves)]

    def _video_statistics(self) -> tuple[Tensor, Tensor]:
        """Return the mean and the standard deviation of the video VAE's latents, (C,) each."""
        return self.vae.latents_mean, self.vae.latents_std


def check_audio_rates(pipeline: DiffusionPipeline) -> None:
    """Raise a UserError if the components of a pipeline disagree on the audio rate or hop length.

    The positions of the audio tokens would not be those of the video, or the pitch would be wrong.
    """
    vae, transformer = pipeline.audio_vae.config, pipeline.transformer.config
    vocoder_rate = pipeline.vocoder.config.get("input_sampling_rate", vae.sample_rate)
    for field, found, expected in (
        ("audio_sampling_rate", transformer.audio_sampling_rate, vae.sample_rate),
        ("audio_hop_length", transformer.audio_hop_length, vae.mel_hop_length),
        ("input_sampling_rate", vocoder_rate, vae.sample_rate),
    ):
        if found != expected:
            raise UserError(
                f"does not match the audio VAE, which has {expected}", field=field, value=found
            )


def with_given_first_frames(latents: Tensor, conditioning: Conditioning) -> Tensor:
    """Replace the first frame of latents (B, T, C) by the source image, where there is one."""
    first = conditioning.inputs["source"]
    if not first.shape[1]:
        return latents
    lengths = conditioning.inputs["source_lengths"][conditioning.positive]
    first = first[to_device(conditioning.positive, first.device)]
    return replace_first_frame(latents, lengths, first.to(latents.dtype))


def replace_first_frame(latents: Tensor, lengths: Tensor, first: Tensor) -> Tensor:
    """Replace the tokens of the first frame in the samples that have a source image.

    Args:
        latents: (B, T, C).
        lengths: (B,), number of source tokens, 0 without an image; on the CPU.
        first: (B, H' W', C).
    """
    count, has_image = first.shape[1], to_device(lengths > 0, latents.device)
    first = torch.where(has_image[:, None, None], first, latents[:, :count])
    return torch.cat([first, latents[:, count:]], 1)
