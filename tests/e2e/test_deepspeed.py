"""Runs with DeepSpeed on two CPU processes match runs with DDP."""

import pytest
import torch
from brightness_reward import BRIGHTNESS_REWARD
from diffusers import StableDiffusion3Pipeline
from runner import Runner, accelerate, torchrun
from safetensors.torch import load_file
from test_distributed import relative_distance

SETTINGS = {
    **BRIGHTNESS_REWARD,
    "num_epochs": 2,
    "eval_freq": 2,
    "eval_prompts": 5,  # three prompts on rank 0 and two on rank 1
    "sample__test_batch_size": 2,
    "train__gradient_accumulation_steps": 2,
    "train__learning_rate": 1e-2,
    # larger than the gradients: Adam would amplify rounding errors of small ones
    "train__adam_epsilon": 1e-3,
    "train__ema_update_interval": 1,
}
LORA = "checkpoints/latest/{}/pytorch_lora_weights.safetensors"


def zero_launch_options(stage: int, processes: int) -> dict:
    """Return the launcher and script for a stage of ZeRO."""
    file = f"scripts/accelerate_configs/deepspeed_zero{stage}.yaml"
    options = (f"--num_processes={processes}", "--main_process_port=0", f"--config_file={file}")
    return {"launcher": accelerate(*options), "script": "tests/support/deepspeed_train.py"}


@pytest.fixture(scope="module")
def data_parallel(short_runs, tmp_path_factory) -> Runner:
    runner = Runner(tmp_path_factory.mktemp("ddp"), **{**short_runs, **SETTINGS})
    done = runner(launcher=torchrun(), device="cpu")
    assert done.returncode == 0, done.stderr
    return runner


@pytest.fixture
def deepspeed(monkeypatch, short_runs, tmp_path):
    """Function that trains with a stage of ZeRO."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    runner = Runner(tmp_path / "logs", **{**short_runs, **SETTINGS})

    def run(stage: int, **overrides) -> Runner:
        done = runner(**zero_launch_options(stage, processes=2), **overrides)
        assert done.returncode == 0, done.stderr
        return runner

    return run


def assert_same_run(one: Runner, other: Runner, rel: float) -> None:
    for a, b in zip(one.metrics(), other.metrics(), strict=True):
        for name in a:
            if name.startswith(("reward/", "eval/", "epoch", "step")):
                assert a[name] == pytest.approx(b[name], abs=1e-2), name
        if "train/grad_norm" in a:  # the same accumulation and clipping
            assert a["train/grad_norm"] == pytest.approx(b["train/grad_norm"], rel=rel)
            assert b["train/first_update_ratio_dev"] <= 1e-5
    for weights in ("lora", "ema_lora"):
        first, second = (load_file(r.logdir / "run" / LORA.format(weights)) for r in (one, other))
        assert relative_distance(first, second) < rel


@pytest.mark.slow
def test_a_resumed_run_with_zero_matches_data_parallelism(deepspeed, data_parallel, tiny_sd3):
    """test_vlm_sharded.py covers ZeRO-2, and test_resume.py covers ZeRO-1."""
    deepspeed(3, num_epochs=1)
    runner = deepspeed(3, resume="auto")
    assert_same_run(data_parallel, runner, rel=1e-2)
    pipeline = StableDiffusion3Pipeline.from_pretrained(tiny_sd3)
    pipeline.load_lora_weights(runner.logdir / "run/checkpoints/latest/ema_lora")
    assert pipeline.get_active_adapters()


FULL = {
    **{"use_lora": False, "mixed_precision": "bf16"},
    **{"num_epochs": 1, "eval_prompts": 2, "sample__num_steps": 2, "sample__eval_num_steps": 2},
}


@pytest.mark.slow
def test_full_finetuning_with_zero(deepspeed):
    """In bf16 with sharded weights, as in docs/scaling.md."""
    assert_all_weights_trained(deepspeed(3, **FULL))


@pytest.mark.slow
def test_full_finetuning_with_data_parallelism(short_runs, tmp_path):
    runner = Runner(tmp_path, **{**short_runs, **SETTINGS, **FULL})
    done = runner(launcher=torchrun(), device="cpu")
    assert done.returncode == 0, done.stderr
    assert_all_weights_trained(runner)


def assert_all_weights_trained(runner: Runner) -> None:
    folder = runner.logdir / "run/checkpoints/latest"
    name = "diffusion_pytorch_model.safetensors"
    trained, average = (load_file(folder / f / name) for f in ("transformer", "ema_transformer"))
    assert trained.keys() == average.keys()
    assert all(v.numel() > 0 for v in trained.values())
    del trained["pos_embed.pos_embed"]  # a buffer
    assert {v.dtype for v in trained.values()} == {torch.float32}
    assert runner.metrics()[-1]["train/grad_norm"] > 0
