"""VAE latents of given images, cached in memory and, with `prompt_cache`, on disk."""

import torch
from torch import Tensor

from flow_grpo.diffusion.models.base import latent_dtype
from flow_grpo.diffusion.models.prompt_cache import PromptCache, encoder_identity
from flow_grpo.diffusion.policy import Policy
from flow_grpo.images import ImageSource
from flow_grpo.perf.transfer import to_device


class ImageLatents:
    """Encode images as VAE latents and cache them."""

    def __init__(self, policy: Policy) -> None:
        adapter = policy.adapter
        encoder = {"vae": adapter.vae} if adapter.prompt_cache else {}
        identity = encoder_identity(encoder, {}, device=adapter.device, size=adapter.source_size)
        self._policy, self._cache = policy, PromptCache(adapter.prompt_cache, identity)

    def encode(self, images: list[ImageSource]) -> Tensor:
        """Return the latents of images, (B, C, H, W), on the device of the model.

        Images are encoded one at a time, because the last bits depend on the batch size.
        """
        adapter = self._policy.adapter
        latents = []
        for image in images:
            name = self._cache.name("", (image,))
            found = self._cache.find([name]).get(name)
            if found is None:
                encoded = adapter.encode_image_latents(image)
                found = self._cache.add(name, {"latents": encoded})
            latents.append(found["latents"])
        stacked = torch.stack(latents).to(latent_dtype(self._policy.transformer))
        return to_device(stacked, adapter.device)
