"""Z-Image, text-to-image."""

import torch
from diffusers import ZImagePipeline
from torch import Tensor, nn

from flow_grpo.diffusion.models.base import Config, ModelAdapter
from flow_grpo.diffusion.models.inputs import Inputs, LatentGrid
from flow_grpo.diffusion.models.prompt_cache import Embedding


class ZImageAdapter(ModelAdapter):
    """Adapter of Z-Image."""

    pipeline_class = ZImagePipeline
    masks_prompt_padding = True
    guidance_threshold = 0.0  # its scale is that of other models minus 1
    supports_cuda_graphs = False  # it takes lists of prompts of any length
    lora_targets = [  # noqa: RUF012
        *(f"attention.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
        *(f"feed_forward.{name}" for name in ("w1", "w2", "w3")),
    ]
    shared_inputs = {"attention": (("to_q", "to_k", "to_v"),)}  # noqa: RUF012

    @classmethod
    def grid(cls, transformer: Config, vae: Config) -> LatentGrid:
        scale = 2 ** (len(vae["block_out_channels"]) - 1)
        return LatentGrid(transformer["in_channels"], scale)

    def encode_single(self, text: str) -> Embedding:
        """Encode a prompt with Qwen3 ("embeds")."""
        [embeds], _ = self.pipeline.encode_prompt(
            prompt=[text],
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
        )
        return {"embeds": embeds[None]}

    def forward(
        self,
        transformer: nn.Module,
        latents: Tensor,
        timestep: Tensor,
        inputs: Inputs,
        guidance_scale: float,
    ) -> Tensor:
        """Run the transformer on lists of samples and unpadded prompts; negate its output."""
        lengths = inputs["lengths"].tolist()
        out = transformer(
            x=list(latents[:, :, None].unbind()),
            t=(1000 - timestep) / 1000,  # 0 is noise and 1 is the image
            cap_feats=[text[:n] for text, n in zip(inputs["embeds"], lengths, strict=True)],
            return_dict=False,
        )[0]
        return -torch.stack(list(out))[:, :, 0]  # its velocity points from noise to image

    def guide(self, unconditional: Tensor, conditional: Tensor, scale: float) -> Tensor:
        return conditional + scale * (conditional - unconditional)
