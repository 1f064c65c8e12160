"""Time Flow-GRPO's own sampling and training functions for `benchmark.py --against CLONE`.

benchmark.py runs this in a separate process, so that neither holds GPU memory of the other:

    python scripts/reference_loops.py CLONE RESULT.json < CONFIG.json

The sampler and `compute_log_prob` are imported from the clone. The code between them follows its
training loop: fp16 autocast over float32 weights, LoRA by peft, AdamW, a float32 VAE. Prompts are
encoded once, before timing starts.
"""

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import benchmark_utils as bench
import diffusers
import torch
import transformers
from accelerate import Accelerator
from diffusers import StableDiffusion3Pipeline
from ml_collections import ConfigDict
from peft import LoraConfig, get_peft_model
from torch import Tensor
from untrained.full import build

from flow_grpo.diffusion.models.sd3 import SD3Adapter
from flow_grpo.training.metrics import peak_memory_gb


class Loops:
    """Flow-GRPO's sampling and training loops for SD3."""

    def __init__(self, clone: Path, config: ConfigDict) -> None:
        self.config = config
        self.sample_batch, self.log_prob = bench.load_reference_functions(clone)
        on_gpu = torch.cuda.is_available() and config.device != "cpu"
        steps = config.trained_steps
        self.accelerator = Accelerator(
            cpu=not on_gpu,
            mixed_precision="fp16" if on_gpu else "no",
            gradient_accumulation_steps=config.train.gradient_accumulation_steps * steps,
        )
        self.pipeline = pipeline = load_pipeline(config, self.accelerator.device)
        pipeline.set_progress_bar_config(disable=True)
        half = torch.float16 if on_gpu else torch.float32
        for encoder in (pipeline.text_encoder, pipeline.text_encoder_2, pipeline.text_encoder_3):
            encoder.to(self.accelerator.device, half)
        lora = LoraConfig(
            r=config.train.lora_rank,
            lora_alpha=config.train.lora_alpha,
            init_lora_weights="gaussian",
            target_modules=SD3Adapter.lora_targets,
        )
        pipeline.transformer = get_peft_model(pipeline.transformer, lora)
        self.trained = [p for p in pipeline.transformer.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(self.trained, lr=config.train.learning_rate)
        self.transformer, self.optimizer = self.accelerator.prepare(pipeline.transformer, optimizer)
        self.positive = self.encode("a sign")
        self.negative = self.encode("")

    def encode(self, text: str) -> tuple[Tensor, Tensor]:
        """Return embeddings and pooled embeddings of a prompt, repeated to a batch."""
        with torch.no_grad():
            embeds, _, pooled, _ = self.pipeline.encode_prompt(
                *[text] * 3,
                device=self.accelerator.device,
                do_classifier_free_guidance=False,
                max_sequence_length=self.config.max_sequence_length,
            )
        return tuple(x.repeat_interleave(self.config.train.batch_size, 0) for x in (embeds, pooled))

    def sample(self) -> dict[str, Tensor]:
        """Sample a batch; return its trajectory and random advantages, as for `train`."""
        sample = self.config.sample
        height = self.config.height or self.config.resolution
        width = self.config.width or self.config.resolution
        wanted = {
            "prompt_embeds": self.positive[0],
            "pooled_prompt_embeds": self.positive[1],
            "negative_prompt_embeds": self.negative[0],
            "negative_pooled_prompt_embeds": self.negative[1],
            "num_inference_steps": sample.num_steps,
            "guidance_scale": sample.guidance_scale,
            "output_type": "pt",
            "height": height,
            "width": width,
            "noise_level": sample.noise_level,
        }
        known = inspect.signature(self.sample_batch).parameters  # differs between versions
        options = {name: value for name, value in wanted.items() if name in known}
        with torch.no_grad():
            _, latents, log_probs, *_ = self.sample_batch(self.pipeline, **options)
        latents = torch.stack(latents, 1)
        count = len(latents)
        return {
            "latents": latents[:, :-1],
            "next_latents": latents[:, 1:],
            "log_probs": torch.stack(log_probs, 1),
            "timesteps": self.pipeline.scheduler.timesteps.repeat(count, 1),
            "advantages": torch.randn(count, device=latents.device),
        }

    def train(self, samples: dict[str, Tensor]) -> None:
        """Train on each step of a batch, with Flow-GRPO's loss."""
        train = self.config.train
        embeds, pooled = self.positive
        if train.cfg and self.config.sample.guidance_scale > 1:
            embeds = torch.cat([self.negative[0], embeds])
            pooled = torch.cat([self.negative[1], pooled])
        for j in range(self.config.trained_steps):
            with self.accelerator.accumulate(self.transformer):
                arguments = (self.transformer, self.pipeline, samples, j, embeds, pooled)
                _, log_prob, mean, rate = self.log_prob(*arguments, self.config)
                ratio = torch.exp(log_prob - samples["log_probs"][:, j])
                advantages = samples["advantages"].clamp(-train.adv_clip_max, train.adv_clip_max)
                clipped = ratio.clamp(1 - train.clip_range, 1 + train.clip_range)
                loss = torch.maximum(-advantages * ratio, -advantages * clipped).mean()
                if train.beta > 0:
                    unwrapped = self.accelerator.unwrap_model(self.transformer)
                    with torch.no_grad(), unwrapped.disable_adapter():
                        _, _, reference, _ = self.log_prob(*arguments, self.config)
                    square = ((mean - reference) ** 2).mean(dim=(1, 2, 3), keepdim=True)
                    loss = loss + train.beta * (square / (2 * rate**2)).mean()
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.trained, train.max_grad_norm)
                self.optimizer.step()
                self.optimizer.zero_grad()


def load_pipeline(config: ConfigDict, device: torch.device) -> StableDiffusion3Pipeline:
    """Load or build the pipeline; transformer and VAE are frozen and in float32."""
    if config.random_model:
        pipeline = build("sd3.5-medium", device, torch.float32)
    else:
        pipeline = StableDiffusion3Pipeline.from_pretrained(config.pretrained.model)
    for module in (pipeline.transformer, pipeline.vae):
        module.requires_grad_(False).to(device, torch.float32)
    return pipeline


def measure(loops: Loops) -> dict[str, Any]:
    """Run the warm-up and timed epochs and return the fields of the JSON line."""
    config, device = loops.config, loops.accelerator.device
    count = config.train.batch_size * config.sample.num_batches_per_epoch
    epochs = []
    for epoch in range(1 + config.timed_epochs):  # the first is warm-up
        start = bench.synchronized_time(device)
        batches = [loops.sample() for _ in range(config.sample.num_batches_per_epoch)]
        sampled = bench.synchronized_time(device)
        for batch in batches:
            loops.train(batch)
        done = bench.synchronized_time(device)
        title = f"epoch {epoch} of {config.timed_epochs}" if epoch else "warm-up"
        print(f"Flow-GRPO, {title}: {done - start:.1f} s", file=sys.stderr)
        epochs.append(((sampled - start) / count, (done - sampled) / count / config.trained_steps))
    full = [sample + step * config.trained_steps for sample, step in epochs[1:]]
    return {
        "sampling_s_per_image": bench.spread([sample for sample, _ in epochs[1:]]),
        "trained_step_s_per_sample": bench.spread([step for _, step in epochs[1:]]),
        "full_s_per_sample": bench.spread(full),
        "peak_gib": round(peak_memory_gb(device), 1),
    }


if __name__ == "__main__":
    for library in (diffusers, transformers):
        library.utils.logging.disable_progress_bar()
    loops = Loops(Path(sys.argv[1]), ConfigDict(json.load(sys.stdin)))
    Path(sys.argv[2]).write_text(json.dumps(measure(loops)), encoding="utf-8")
