"""Train the text encoders and the transformer of the small model jointly by flow matching."""

import torch
import torch.nn.functional as F
from diffusers import StableDiffusion3Pipeline
from torch import Tensor
from transformers import PreTrainedModel

from tiny.graphs import capture_cuda_graph
from tiny.loop import Learner, fit
from tiny.pool import PromptPool

SCENE_SHARE = 0.3
# The pipeline appends 256 T5 tokens to the prompt by default. Training uses few tokens, as fast
# callers do, and every eighth step 256 of them in smaller batches.
SHORT_T5, LONG_T5 = 8, 256
LONG_EVERY, LONG_BATCH_DIVISOR = 8, 4
EMBEDDING_STD = 0.5


def encode(
    pipeline: StableDiffusion3Pipeline, clip_ids: Tensor, t5_ids: Tensor
) -> tuple[Tensor, Tensor]:
    """Return prompt and pooled embeddings as the pipeline's `encode_prompt`, with gradients."""
    first = pipeline.text_encoder(clip_ids, output_hidden_states=True)
    second = pipeline.text_encoder_2(clip_ids, output_hidden_states=True)
    t5 = pipeline.text_encoder_3(t5_ids)[0]
    clip = torch.cat([first.hidden_states[-2], second.hidden_states[-2]], dim=-1)
    clip = F.pad(clip, (0, t5.shape[-1] - clip.shape[-1]))
    embeddings = torch.cat([clip, t5.to(clip.dtype)], dim=-2)
    return embeddings, torch.cat([first.text_embeds, second.text_embeds], dim=-1)


def train_flow(
    pipeline: StableDiffusion3Pipeline,
    pool: PromptPool,
    *,
    batch_size: int,
    steps: int,
    seconds: float,
    peak_lr: float,
    generator: torch.Generator,
) -> list[dict]:
    """Train in place with a frozen VAE and return the logged losses."""
    enlarge_embeddings(pipeline.text_encoder, pipeline.text_encoder_2)
    trained = (
        pipeline.transformer,
        pipeline.text_encoder,
        pipeline.text_encoder_2,
        pipeline.text_encoder_3,
    )
    learner = Learner(parameter for module in trained for parameter in module.parameters())
    vae, scheduler = pipeline.vae.requires_grad_(False), pipeline.scheduler.config
    is_cuda = pool.device.type == "cuda"

    def step(generator: torch.Generator, size: int, t5_length: int) -> Tensor:
        learner.begin()
        batch = pool.batch(size, SCENE_SHARE, t5_length, generator)
        with torch.autocast(pool.device.type, torch.bfloat16, enabled=is_cuda):
            with torch.no_grad():
                latents = vae.encode(2 * batch.images - 1).latent_dist.mean.float()
            latents = (latents - vae.config.shift_factor) * vae.config.scaling_factor
            noise = torch.randn(latents.shape, generator=generator, device=pool.device)
            # Shifted like the sampler's sigmas, so that training covers what sampling visits.
            sigma = torch.rand(size, generator=generator, device=pool.device)
            sigma = scheduler.shift * sigma / (1 + (scheduler.shift - 1) * sigma)
            noisy = torch.lerp(latents, noise, sigma[:, None, None, None])
            embeddings, pooled = encode(pipeline, batch.clip_ids, batch.t5_ids)
            velocity = pipeline.transformer(
                hidden_states=noisy,
                timestep=sigma * scheduler.num_train_timesteps,
                encoder_hidden_states=embeddings,
                pooled_projections=pooled,
                return_dict=False,
            )[0]
        loss = F.mse_loss(velocity.float(), noise - latents)
        learner.update(loss)
        return loss.detach()

    long_size = max(1, batch_size // LONG_BATCH_DIVISOR)
    short = capture_cuda_graph(lambda generator: step(generator, batch_size, SHORT_T5), generator)
    long = capture_cuda_graph(lambda generator: step(generator, long_size, LONG_T5), generator)
    log = fit(
        learner,
        lambda i: long if i % LONG_EVERY == LONG_EVERY - 1 else short,
        steps=steps,
        seconds=seconds,
        peak_lr=peak_lr,
        name="flow",
    )
    learner.use_average()
    return log


@torch.no_grad()
def enlarge_embeddings(*encoders: PreTrainedModel) -> None:
    """Enlarge random embeddings: CLIP's 0.02 is negligible next to the projection's bias."""
    for table in (part for encoder in encoders for part in encoder.modules()):
        if isinstance(table, torch.nn.Embedding):
            table.weight.mul_(EMBEDDING_STD / table.weight.std())
