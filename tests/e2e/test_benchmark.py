"""scripts/benchmark.py on the small model, as a user runs it."""

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


# The functions that a clone of Flow-GRPO has, as short as they can be.
STAND_IN = {
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
    for name, text in STAND_IN.items():
        path = tmp_path / "clone" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "clone"


@pytest.mark.slow
def test_it_times_the_small_model_on_the_cpu(benchmark, tmp_path, clone):
    out = tmp_path / "new" / "benchmark.jsonl"
    arguments = ("--model=assets/tiny-sd3", "--epochs=2", f"--out={out}", f"--against={clone}")
    arguments += ("--reward_s=0.1",)
    done = benchmark(*arguments, device="cpu", sample__async_depth=1, **SHORT)
    assert done.returncode == 0, done.stderr
    assert "[transformers]" not in done.stderr
    assert "warm-up: " in done.stderr
    assert "epoch 2 of 2: " in done.stderr
    assert "| sampling and training, s per sample |" in done.stderr
    assert "| times as fast |" in done.stderr
    line = done.stdout.splitlines()[-1]
    assert out.read_text() == line + "\n"
    found = json.loads(line)
    assert "--epochs=2" in found["command"]
    assert str(tmp_path) not in found["command"]  # that is nobody else's
    other = found["flow_grpo"]
    ratio = other["full_s_per_sample"]["median"] / found["full_s_per_sample"]["median"]
    assert found["times_as_fast"] == pytest.approx(ratio, abs=0.01)
    assert other["peak_gib"] > 0
    assert found["settings"]["model"] == "assets/tiny-sd3"
    assert found["settings"]["trained_steps"] == 2
    assert found["settings"]["reward_s"] == 0.1
    assert found["settings"]["async_depth"] == 1
    assert found["ratio_dev_max"] <= 1e-5
    assert found["matmul_tflops"] > 0
    sampling, step = found["sampling_s_per_image"], found["trained_step_s_per_sample"]
    for seconds in (sampling, step, found["full_s_per_sample"]):
        assert 0 < seconds["min"] <= seconds["median"] <= seconds["max"]
    whole = sampling["min"] + 2 * step["min"]
    assert whole <= found["full_s_per_sample"]["min"] * 1.01
    # 48 + 24 tokens, 4 blocks 128 wide, 3 steps with guidance: some 0.1 GFLOP per forward
    assert 1e-4 < found["sampling_tflops"] * sampling["min"] < 1e-3


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "sd3.5-medium needs a GPU; name a small model: --model assets/tiny-sd3"),
        (("--model=assets/tiny-sd3", "--memory_gib=24"), "--memory_gib=24.0 needs a GPU; leave it"),
        (("--model=assets/tiny-sd3", "--whole_encoders"), "--whole_encoders is for sd3.5-medium, "),
        (("--model=assets/nothere",), "no model at pretrained.model='assets/nothere': there is no"),
        (("--model=docs",), "docs is not a diffusers pipeline folder: it has no model_index.json"),
        (("--model=assets/tiny-sd3", "--out=setup.py/b.jsonl"), "--out=setup.py/b.jsonl cannot be"),
        (("--model=assets/tiny-sd3", "--against=docs"), "--against=docs is no clone of Flow-GRPO"),
        (("--model=assets/tiny-sd3", "--against=../no"), "--against=../no is no folder; git clone"),
        (("--model=flux.1-dev", "--against=docs"), "--against times Flow-GRPO's SD3, not flux.1"),
    ],
    ids=[
        *("gpu", "memory", "encoders", "no-model", "no-pipeline"),
        *("no-file", "no-clone", "no-folder", "not-sd3"),
    ],
)
def test_what_cannot_be_measured_is_told_at_once(benchmark, arguments, told):
    done = benchmark(*arguments, device="cpu")
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith(f"error: {told}")
