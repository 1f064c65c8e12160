"""Time a plain offline DPO loop of stock diffusers and peft modules, for `benchmark_offline.py`.

    python scripts/plain_dpo.py RESULT.json < CONFIG.json

The loop is that of training scripts of diffusers: frozen weights in half precision, LoRA in float32
by peft, autocast, AdamW, the reference by disabled adapters. Latents and embeddings are random,
stay on the GPU and are not part of the time.
"""

import json
import sys
from pathlib import Path
from typing import Any

import benchmark_utils as bench
import diffusers
import torch
import transformers
from accelerate import Accelerator
from diffusers.training_utils import cast_training_params, compute_density_for_timestep_sampling
from ml_collections import ConfigDict
from peft import LoraConfig
from torch import Tensor
from torch.nn import functional as F
from untrained.full import build

from flow_grpo.diffusion.models.sd3 import SD3Adapter
from flow_grpo.training.metrics import peak_memory_gb

HALF = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class PlainDpo:
    """Offline DPO of SD3 with shared noise and levels within a pair."""

    def __init__(self, config: ConfigDict) -> None:
        self.config, train = config, config.train
        on_gpu = torch.cuda.is_available() and config.device != "cpu"
        self.steps = train.gradient_accumulation_steps * config.dpo.times
        self.accelerator = Accelerator(
            cpu=not on_gpu,
            mixed_precision=config.mixed_precision,
            gradient_accumulation_steps=self.steps,
        )
        device, dtype = self.accelerator.device, HALF[config.mixed_precision]
        pipeline = load_pipeline(config, device, dtype)
        self.schedule = pipeline.scheduler
        self.schedule.set_timesteps(1000, device=device)
        transformer = pipeline.transformer
        transformer.requires_grad_(False)
        if train.gradient_checkpointing:
            transformer.enable_gradient_checkpointing()
        lora = LoraConfig(
            r=train.lora_rank,
            lora_alpha=train.lora_alpha,
            init_lora_weights="gaussian",
            target_modules=SD3Adapter.lora_targets,
        )
        transformer.add_adapter(lora)
        cast_training_params(transformer, torch.float32)
        self.trained = [p for p in transformer.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(self.trained, lr=train.learning_rate)
        self.transformer, self.optimizer = self.accelerator.prepare(transformer, optimizer)
        scale = 2 ** (len(pipeline.vae.config.block_out_channels) - 1)
        height, width = config.height or config.resolution, config.width or config.resolution
        self.shape = transformer.config.in_channels, height // scale, width // scale
        with torch.no_grad():
            embeds, _, pooled, _ = pipeline.encode_prompt(
                *["a picture"] * 3,
                device=device,
                do_classifier_free_guidance=False,
                max_sequence_length=config.max_sequence_length,
            )
        self.texts = [each.repeat_interleave(train.batch_size, 0) for each in (embeds, pooled)]
        count = config.pairs // (train.batch_size // 2)
        sizes = (count, train.batch_size, *self.shape)
        self.latents = torch.randn(sizes, device=device)  # chosen images, then rejected ones

    def predict(self, noisy: Tensor, timesteps: Tensor) -> Tensor:
        """Return the velocity, (B, C, H, W)."""
        embeds, pooled = self.texts
        with self.accelerator.autocast():
            return self.transformer(
                hidden_states=noisy,
                timestep=timesteps,
                encoder_hidden_states=embeds,
                pooled_projections=pooled,
                return_dict=False,
            )[0].float()

    def train_batch(self, latents: Tensor) -> None:
        """Train chosen and rejected images, (2 P, C, H, W), at each of `dpo.times` levels."""
        config, pairs = self.config, len(latents) // 2
        for _ in range(config.dpo.times):
            with self.accelerator.accumulate(self.transformer):
                noise = torch.randn_like(latents[:pairs]).repeat(2, 1, 1, 1)
                u = compute_density_for_timestep_sampling("logit_normal", pairs, 0.0, 1.0)
                index = (u * 1000).long().repeat(2).to(latents.device)
                sigmas = self.schedule.sigmas.to(latents.device)[index][:, None, None, None]
                timesteps = self.schedule.timesteps[index]
                noisy = (1 - sigmas) * latents + sigmas * noise
                target = noise - latents
                error = ((self.predict(noisy, timesteps) - target) ** 2).mean((1, 2, 3))
                unwrapped = self.accelerator.unwrap_model(self.transformer)
                unwrapped.disable_adapters()
                with torch.no_grad():
                    reference = ((self.predict(noisy, timesteps) - target) ** 2).mean((1, 2, 3))
                unwrapped.enable_adapters()
                better, worse = (error - reference).chunk(2)
                loss = -F.logsigmoid(-config.dpo.beta / 2 * (better - worse)).mean()
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.trained, config.train.max_grad_norm)
                self.optimizer.step()
                self.optimizer.zero_grad()


def load_pipeline(
    config: ConfigDict, device: torch.device, dtype: torch.dtype
) -> diffusers.StableDiffusion3Pipeline:
    """Load or build the pipeline in the given dtype."""
    if config.random_model:
        pipeline = build(config.pretrained.model, device, dtype)
    else:
        model = config.pretrained.model
        pipeline = diffusers.StableDiffusion3Pipeline.from_pretrained(model, torch_dtype=dtype)
    return pipeline.to(device)


def measure(loop: PlainDpo) -> dict[str, Any]:
    """Run the warm-up and timed epochs and return the result."""
    device, epochs = loop.accelerator.device, loop.config.timed_epochs
    pairs, rates = len(loop.latents) * loop.config.train.batch_size // 2, []
    for epoch in range(1 + epochs):
        start = bench.synchronized_time(device)
        for latents in loop.latents:
            loop.train_batch(latents)
        seconds = bench.synchronized_time(device) - start
        title = f"epoch {epoch} of {epochs}" if epoch else "warm-up"
        print(f"plain loop, {title}: {seconds:.1f} s", file=sys.stderr)
        rates.append(pairs / seconds)
    return {"pairs_per_s": bench.spread(rates[1:]), "peak_gib": round(peak_memory_gb(device), 1)}


if __name__ == "__main__":
    for library in (diffusers, transformers):
        library.utils.logging.disable_progress_bar()
    loop = PlainDpo(ConfigDict(json.load(sys.stdin)))
    Path(sys.argv[1]).write_text(json.dumps(measure(loop)), encoding="utf-8")
