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


@pytest.mark.slow
def test_it_times_the_small_model_on_the_cpu(benchmark, tmp_path):
    out = tmp_path / "new" / "benchmark.jsonl"
    arguments = ("--model=assets/tiny-sd3", "--epochs=2", f"--out={out}")
    done = benchmark(*arguments, device="cpu", **SHORT)
    assert done.returncode == 0, done.stderr
    assert "[transformers]" not in done.stderr
    assert "warm-up: " in done.stderr
    assert "epoch 2 of 2: " in done.stderr
    line = done.stdout.splitlines()[-1]
    assert out.read_text() == line + "\n"
    found = json.loads(line)
    assert "--epochs=2" in found["command"]
    assert str(out) not in found["command"]  # that is nobody else's
    assert found["settings"]["model"] == "assets/tiny-sd3"
    assert found["settings"]["trained_steps"] == 2
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
        (("--memory_gib=24",), "--memory_gib=24.0 needs a GPU; leave it out"),
        (("--model=assets/nothere",), "no model at pretrained.model='assets/nothere': there is no"),
        (("--model=docs",), "docs is not a diffusers pipeline folder: it has no model_index.json"),
        (("--model=assets/tiny-sd3", "--out=setup.py/b.jsonl"), "--out=setup.py/b.jsonl cannot be"),
    ],
    ids=["gpu", "memory", "no-model", "no-pipeline", "no-folder"],
)
def test_what_cannot_be_measured_is_told_at_once(benchmark, arguments, told):
    done = benchmark(*arguments, device="cpu")
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith(f"error: {told}")
