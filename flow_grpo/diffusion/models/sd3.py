"""Stable Diffusion 3 and 3.5, text-to-image."""

from diffusers import StableDiffusion3Pipeline
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import retrieve_timesteps
from torch import Tensor, nn

from flow_grpo.diffusion.models.base import (
    ATTENTION_SHARED_INPUTS,
    ATTENTION_TARGETS,
    Config,
    ModelAdapter,
)
from flow_grpo.diffusion.models.inputs import Inputs, LatentGrid, Schedule, compute_shift
from flow_grpo.diffusion.models.prompt_cache import Embedding
from flow_grpo.perf.joint_attention import fuse_joint_attention_norms


class SD3Adapter(ModelAdapter):
    """Adapter of Stable Diffusion 3 and 3.5."""

    pipeline_class = StableDiffusion3Pipeline
    cudnn_attention = True
    encoders = ("text_encoder", "text_encoder_2", "text_encoder_3")
    tokenizers = ("tokenizer", "tokenizer_2", "tokenizer_3")
    lora_targets = ATTENTION_TARGETS
    shared_inputs = ATTENTION_SHARED_INPUTS

    @classmethod
    def grid(cls, transformer: Config, vae: Config) -> LatentGrid:
        """Return the geometry of the latents, limited by the table of position embeddings."""
        scale = 2 ** (len(vae["block_out_channels"]) - 1)
        patch = transformer["patch_size"]
        max_pixels = transformer["pos_embed_max_size"] * patch * scale
        return LatentGrid(transformer["in_channels"], scale, patch, max_pixels)

    def apply_optimizations(self, *, compiled: bool, **settings: bool) -> None:
        if compiled:
            fuse_joint_attention_norms(self.transformer)
        super().apply_optimizations(compiled=compiled, **settings)

    def encode_single(self, text: str) -> Embedding:
        """Encode a prompt with the CLIPs and T5 ("embeds", "pooled")."""
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
        """Return the scheduler's noise levels, shifted by image size in SD 3.5 if configured."""
        scheduler = self.copy_scheduler()
        kwargs = {}
        if scheduler.config.get("use_dynamic_shifting"):
            tokens = self.num_image_tokens(height, width)
            kwargs["mu"] = compute_shift(scheduler, tokens, default_max_shift=1.16)
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
        """Run the transformer; guidance is in two passes, so `guidance_scale` is ignored."""
        return transformer(
            hidden_states=latents,
            timestep=timestep,
            encoder_hidden_states=inputs["embeds"],
            pooled_projections=inputs["pooled"],
            return_dict=False,
        )[0]
