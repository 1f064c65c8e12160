"""Adapt Wan 2.1, video-to-video: sampling starts from a noisy version of a source video.

The source is encoded as latents s, and the first of the sampled steps, at noise level sigma, starts
from (1 - sigma) s + sigma noise. A fraction 1 - STRENGTH of the pipeline's steps is skipped, so
`sample.num_steps` counts the steps that are taken.
"""

import itertools

import torch
from diffusers import WanVideoToVideoPipeline
from PIL import Image
from torch import Tensor

from flow_grpo.diffusion.models.base import rescale_latents
from flow_grpo.diffusion.models.inputs import Conditioning, Schedule
from flow_grpo.diffusion.models.prompt_cache import Embedding
from flow_grpo.diffusion.models.wan import WanAdapter
from flow_grpo.perf.transfer import to_device

STRENGTH = 0.8  # the pipeline's default
MAX_FRAMES = 1025


class WanVideoToVideoAdapter(WanAdapter):
    """Adapt Wan video-to-video; the frames of the source video are the source images."""

    pipeline_class = WanVideoToVideoPipeline
    encoders = ("text_encoder", "vae")
    num_source_images = range(1, MAX_FRAMES + 1)
    source_is_video = True

    def encode_single(self, text: str, *images: Image.Image) -> Embedding:
        """Encode a prompt, and its source video as the latents of a sample ("source")."""
        pixels = self.pipeline.video_processor.preprocess_video(list(images))
        latents = self.vae.encode(pixels.to(self.device, self.vae.dtype)).latent_dist.mode()
        latents = latents.to(torch.promote_types(latents.dtype, torch.float32))
        source = rescale_latents(latents, self.vae.config, back=True)
        return {**super().encode_single(text), "source": source.flatten(2).transpose(1, 2)}

    def schedule(self, num_steps: int, height: int, width: int, frames: int = 1) -> Schedule:
        """Return the last `num_steps` noise levels of the pipeline's schedule."""
        counts = itertools.count(num_steps)
        total = next(count for count in counts if int(count * STRENGTH) == num_steps)
        whole = super().schedule(total, height, width, frames)
        skipped = total - num_steps
        return Schedule(whole.sigmas[skipped:], whole.timesteps[skipped:])

    def start_latents(self, noise: Tensor, conditioning: Conditioning, sigma: float) -> Tensor:
        """Return the source videos with noise of level `sigma`."""
        source = conditioning.inputs["source"]
        source = source[to_device(conditioning.positive, source.device)]
        source = source.transpose(1, 2).unflatten(2, noise.shape[2:]).to(noise)
        return (1 - sigma) * source + sigma * noise
