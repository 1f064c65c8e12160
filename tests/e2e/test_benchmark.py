"""scripts/benchmark.py with the small model."""

import json

import pytest

PRESET = "config/grpo.py:benchmark_sd3"
SHORT = {
    "height": 32,
    "width": 96,
    "max_sequence_length": 8,
    "sample__num_steps": 3,
    "sample__num_image_per_prompt": 2,
    "sample__train_batch_size": 2,
    "train__batch_size": 2,
}


@pytest.fixture
def benchmark(run):
    del run.fields["logdir"], run.fields["run_name"]
    return lambda *extra, **fields: run(
        *extra, script="scripts/benchmark.py", config=PRESET, **fields
    )


# Minimal versions of the functions that the benchmark calls in a clone of Flow-GRPO.
CLONE_FILES = {
    "flow_grpo/diffusers_patch/sd3_sde_with_logprob.py": """
import torch


def sde_step_with_logprob(scheduler, velocity, timestep, x, noise_level=0.7, prev_sample=None):
    rate = torch.full((len(x), 1, 1, 1), noise_level)
    mean = x - 0.1 * velocity
    if prev_sample is None:
        prev_sample = mean + rate * torch.randn_like(mean)
    log_prob = -((prev_sample - mean) ** 2).mean(dim=(1, 2, 3)) / (2 * noise_level**2)
    return prev_sample, log_prob, mean, rate
""",
    "flow_grpo/diffusers_patch/sd3_pipeline_with_logprob.py": """
import torch

from .sd3_sde_with_logprob import sde_step_with_logprob


def pipeline_with_logprob(
    pipeline, prompt_embeds, pooled_prompt_embeds, num_inference_steps, height, width
):
    pipeline.scheduler.set_timesteps(num_inference_steps)
    scale, channels = pipeline.vae_scale_factor, pipeline.transformer.config.in_channels
    shape = (len(prompt_embeds), channels, height // scale, width // scale)
    latents, log_probs = [torch.randn(shape)], []
    for t in pipeline.scheduler.timesteps:
        velocity = pipeline.transformer(
            hidden_states=latents[-1],
            timestep=t.expand(len(prompt_embeds)),
            encoder_hidden_states=prompt_embeds,
            pooled_projections=pooled_prompt_embeds,
            return_dict=False,
        )[0]
        after, log_prob, _, _ = sde_step_with_logprob(pipeline.scheduler, velocity, t, latents[-1])
        latents.append(after)
        log_probs.append(log_prob)
    return None, latents, log_probs
""",
    "scripts/train_sd3.py": """
import no_such_package


def compute_log_prob(transformer, pipeline, sample, j, embeds, pooled_embeds, config):
    x = torch.cat([sample["latents"][:, j]] * 2)
    velocity = transformer(
        hidden_states=x,
        timestep=torch.cat([sample["timesteps"][:, j]] * 2),
        encoder_hidden_states=embeds,
        pooled_projections=pooled_embeds,
        return_dict=False,
    )[0]
    u, c = velocity.chunk(2)
    velocity = u + config.sample.guidance_scale * (c - u)
    return sde_step_with_logprob(
        pipeline.scheduler, velocity, None, x.chunk(2)[0], prev_sample=sample["next_latents"][:, j]
    )
""",
}


@pytest.fixture
def clone(tmp_path):
    for name, text in CLONE_FILES.items():
        path = tmp_path / "clone" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "clone"


@pytest.mark.slow
def test_the_small_model_is_benchmarked_on_a_cpu(benchmark, tmp_path, clone):
    out = tmp_path / "new" / "benchmark.jsonl"
    arguments = ("--model=assets/tiny-sd3", "--epochs=2", f"--out={out}", f"--against={clone}")
    arguments += ("--reward_s=0.1",)
    done = benchmark(*arguments, device="cpu", sample__async_depth=1, **SHORT)
    assert done.returncode == 0, done.stderr
    assert "[transformers]" not in done.stderr
    assert "warm-up: " in done.stderr
    assert "epoch 2 of 2: " in done.stderr
    assert "| sampling and training, s per sample |" in done.stderr
    assert "| speedup |" in done.stderr
    line = done.stdout.splitlines()[-1]
    assert out.read_text() == line + "\n"
    found = json.loads(line)
    assert "--epochs=2" in found["command"]
    assert str(tmp_path) not in found["command"]  # machine paths are omitted
    reference = found["flow_grpo"]
    ratio = reference["full_s_per_sample"]["median"] / found["full_s_per_sample"]["median"]
    assert found["times_as_fast"] == pytest.approx(ratio, abs=0.01)
    assert reference["peak_gib"] > 0
    assert found["settings"]["model"] == "assets/tiny-sd3"
    assert found["settings"]["trained_steps"] == 2
    assert found["settings"]["reward_s"] == 0.1
    assert found["settings"]["async_depth"] == 1
    assert found["ratio_dev_max"] <= 1e-5
    assert found["persistent_kernels"] == 0  # on a CPU
    assert found["matmul_tflops"] > 0
    sampling, step = found["sampling_s_per_image"], found["trained_step_s_per_sample"]
    for seconds in (sampling, step, found["full_s_per_sample"]):
        assert 0 < seconds["min"] <= seconds["median"] <= seconds["max"]
    per_sample = sampling["min"] + 2 * step["min"]
    assert per_sample <= found["full_s_per_sample"]["min"] * 1.01
    # 48 + 24 tokens, 4 blocks of width 128, 3 steps with guidance: about 0.1 GFLOP per forward pass
    assert 1e-4 < found["sampling_tflops"] * sampling["min"] < 1e-3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--model='sd3.5-medium' needs a GPU"),
        (("--model=assets/tiny-sd3", "--memory_gib=24"), "--memory_gib=24.0 needs a GPU"),
        (("--model=assets/tiny-sd3", "--whole_encoders"), "--whole_encoders "),
        (("--model=assets/nothere",), "pretrained.model='assets/nothere' "),
        (("--model=docs",), "pretrained.model='docs' "),
        (("--model=assets/tiny-sd3", "--out=setup.py/b.jsonl"), "--out='setup.py/b.jsonl' "),
        (("--model=assets/tiny-sd3", "--against=docs"), "--against='docs' is not a clone"),
        (("--model=assets/tiny-sd3", "--against=../no"), "--against='../no' is not a directory"),
        (("--model=flux.1-dev", "--against=docs"), "--against='docs' supports SD3 only"),
    ],
    ids=[
        *("gpu", "memory", "encoders", "no-model", "no-pipeline"),
        *("no-file", "no-clone", "no-folder", "not-sd3"),
    ],
)
def test_an_invalid_benchmark_is_rejected_at_once(benchmark, arguments, message):
    done = benchmark(*arguments, device="cpu")
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith(f"error: {message}")
