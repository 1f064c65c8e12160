"""Z-Image."""

import torch
from diffusers import ZImagePipeline
from torch import Tensor, nn

from flow_grpo.draw.models.base import Config, ModelAdapter
from flow_grpo.draw.models.embeddings import Embedding
from flow_grpo.draw.models.inputs import Grid, Inputs


class ZImageAdapter(ModelAdapter):
    pipeline_class = ZImagePipeline
    masks_texts = True
    unguided = 0.0  # its scale counts from there: 1 is what other models call 2
    can_replay = False  # it takes lists, of texts of any length
    lora_targets = [  # noqa: RUF012
        *(f"attention.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
        *(f"feed_forward.{name}" for name in ("w1", "w2", "w3")),
    ]
    siblings = {"attention": (("to_q", "to_k", "to_v"),)}  # noqa: RUF012

    @classmethod
    def grid(cls, transformer: Config, vae: Config) -> Grid:
        scale = 2 ** (len(vae["block_out_channels"]) - 1)
        return Grid(transformer["in_channels"], scale)

    def encode_one(self, text: str) -> Embedding:
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
        lengths = inputs["lengths"].tolist()
        out = transformer(
            x=list(latents[:, :, None].unbind()),
            t=(1000 - timestep) / 1000,  # it counts from noise to picture,
            cap_feats=[text[:n] for text, n in zip(inputs["embeds"], lengths, strict=True)],
            return_dict=False,
        )[0]
        return -torch.stack(list(out))[:, :, 0]  # and so does its velocity

    def guide(self, unconditional: Tensor, conditional: Tensor, scale: float) -> Tensor:
        return conditional + scale * (conditional - unconditional)
