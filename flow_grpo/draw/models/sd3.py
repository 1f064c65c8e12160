"""Stable Diffusion 3 and 3.5."""

from diffusers import StableDiffusion3Pipeline
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import (
    calculate_shift,
    retrieve_timesteps,
)
from torch import Tensor, nn

from flow_grpo.draw.models.base import SIBLINGS, TARGETS, Config, ModelAdapter
from flow_grpo.draw.models.embeddings import Embedding
from flow_grpo.draw.models.inputs import Grid, Inputs, Schedule
from flow_grpo.speed.joint import join_before_norms


class SD3Adapter(ModelAdapter):
    pipeline_class = StableDiffusion3Pipeline
    cudnn_attention = True
    encoders = ("text_encoder", "text_encoder_2", "text_encoder_3")
    tokenizers = ("tokenizer", "tokenizer_2", "tokenizer_3")
    lora_targets = TARGETS
    siblings = SIBLINGS

    @classmethod
    def grid(cls, transformer: Config, vae: Config) -> Grid:
        scale = 2 ** (len(vae["block_out_channels"]) - 1)
        patch = transformer["patch_size"]
        most = transformer["pos_embed_max_size"] * patch * scale
        return Grid(transformer["in_channels"], scale, patch, most)

    def speed_up(self, *, compiled: bool, **settings: bool) -> None:
        if compiled:
            join_before_norms(self.transformer)
        super().speed_up(compiled=compiled, **settings)

    def encode_one(self, text: str) -> Embedding:
        embeds, _, pooled, _ = self.pipeline.encode_prompt(
            prompt=[text],
            prompt_2=[text],
            prompt_3=[text],
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
        )
        return {"embeds": embeds, "pooled": pooled}

    def schedule(self, num_steps: int, height: int, width: int, frames: int = 1) -> Schedule:
        scheduler = self.own_scheduler()
        kwargs = {}
        if scheduler.config.get("use_dynamic_shifting"):
            kwargs["mu"] = calculate_shift(
                self.tokens(height, width),
                scheduler.config.get("base_image_seq_len", 256),
                scheduler.config.get("max_image_seq_len", 4096),
                scheduler.config.get("base_shift", 0.5),
                scheduler.config.get("max_shift", 1.16),
            )
        timesteps, _ = retrieve_timesteps(scheduler, num_steps, "cpu", **kwargs)
        return Schedule(tuple(scheduler.sigmas.tolist()), tuple(timesteps.tolist()))

    def forward(
        self,
        transformer: nn.Module,
        latents: Tensor,
        timestep: Tensor,
        inputs: Inputs,
        guidance_scale: float,
    ) -> Tensor:
        return transformer(
            hidden_states=latents,
            timestep=timestep,
            encoder_hidden_states=inputs["embeds"],
            pooled_projections=inputs["pooled"],
            return_dict=False,
        )[0]
