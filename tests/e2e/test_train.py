"""scripts/train.py with a randomly initialized SD3."""

import json
import os

import numpy as np
import pytest
from diffusers import StableDiffusion3Pipeline
from PIL import Image

from flow_grpo.advantages import compute_advantages
from flow_grpo.diffusion.rollout import eval_generators, initial_noise


def load_images(folder) -> list[np.ndarray]:
    return [np.asarray(Image.open(p)).astype(int) for p in sorted(folder.glob("*.png"))]


def test_a_run_writes_its_metrics_checkpoints_and_samples(train):
    done = train(
        num_epochs=2,
        log_with="tensorboard",
        num_checkpoint_limit=1,
        save_freq=1,
        eval_freq=1,
        sample__guidance_scale=4.5,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    assert "8 = 4 per batch x 2 batches x 1 processes" in done.stdout
    lines = train.metrics()
    assert [line["step"] for line in lines] == [0, 2, 4]
    assert [line["epoch"] for line in lines] == [0, 1, 2]
    assert lines[0]["eval/jpeg_compressibility"] < 0

    # the first update of an epoch is on-policy: the ratio is 1
    for line in lines[1:]:
        assert line["train/first_update_ratio_dev"] <= 1e-5
        assert line["train/ratio_max"] > 1  # later updates are off-policy
    expected = {
        *("reward/avg", "reward/jpeg_compressibility", "reward/std_within_group"),
        *("reward/zero_std_ratio", "reward/failed", "eval/avg", "eval/failed", "data/held_out"),
        *(f"reward/jpeg_compressibility/{n}" for n in ("std", "failed")),
        *(f"eval/jpeg_compressibility{n}" for n in ("", "/std", "/failed")),
        *(f"train/{n}" for n in ("loss", "policy_loss", "kl", "grad_norm", "lr", "approx_kl")),
        *(f"train/{n}" for n in ("clip_low", "clip_high", "ratio_mean", "ratio_min", "ratio_max")),
        *(f"time/{n}" for n in ("sample", "reward_wait", "train", "eval", "save")),
        *("perf/images_per_s", "perf/peak_mem_gb", "perf/passes", "reward/diversity"),
        "perf/save_seconds",
        *("train/first_update_ratio_dev", "train/clip_range", "train/noisy_from"),
        "train/skipped_updates",
        *("reward/samples", "train/velocity_norm", "train/norm_ratio", "train/max_grad_norm"),
    }
    assert expected | {"epoch", "step"} == set(lines[-1])

    run = train.logdir / "run"
    assert json.loads((run / "config.json").read_text())["sample"]["guidance_scale"] == 4.5
    checkpoints = run / "checkpoints"
    assert (checkpoints / "latest").resolve().name == "checkpoint-4"
    best = max(lines, key=lambda line: line["eval/avg"])["step"]
    assert (checkpoints / "best").resolve().name == f"checkpoint-{best}"
    kept = {"latest", "best", "checkpoint-4", f"checkpoint-{best}"}
    assert {p.name for p in checkpoints.iterdir()} == kept
    samples = [json.loads(x) for x in (run / "samples/train-00002/samples.jsonl").open()]
    names = {"file", "prompt", "jpeg_compressibility", "avg", "advantage", "group"}
    assert set(samples[0]) == names
    assert samples[0]["prompt"].startswith("train prompt")
    assert len(samples) == len(load_images(run / "samples/train-00002")) == 4
    assert list(run.rglob("events.out.tfevents*"))


def test_a_checkpoint_loaded_by_diffusers_generates_the_evaluation_images(train, tiny_sd3):
    """The run has no moving average; test_families.py loads averaged weights."""
    done = train(
        num_epochs=2,
        resolution=0,
        height=32,
        width=64,
        seed=5,
        train__ema=False,
        train__learning_rate=0.05,
        train__lora_rank=4,
        train__lora_alpha=12,
        train__beta=0.0,
    )
    assert done.returncode == 0, done.stderr
    run = train.logdir / "run"
    pipeline = StableDiffusion3Pipeline.from_pretrained(tiny_sd3)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.load_lora_weights(run / "checkpoints/checkpoint-4/lora")
    noise = initial_noise(eval_generators(5, list(range(8))), (4, 8, 16), "cpu")
    generated = pipeline(
        [f"test prompt number {i}" for i in range(8)],
        latents=noise,
        num_inference_steps=3,
        guidance_scale=4.5,
        height=32,
        width=64,
        max_sequence_length=8,
    ).images
    after = load_images(run / "samples/eval-00002")
    before = load_images(run / "samples/eval-00000")
    differences = [
        np.abs(np.asarray(d).astype(int) - a).max() for d, a in zip(generated, after, strict=True)
    ]
    assert max(differences) <= 1  # a rounding difference of 8-bit images
    assert max(np.abs(a - b).max() for a, b in zip(after, before, strict=True)) > 10


@pytest.mark.parametrize(
    "overrides",
    [
        {"sample__sde_window_size": 1, "sample__sde_window_range": "(0,2)", "train__beta": 0.0},
        {"sample__sde_type": "cps", "sample__guidance_scale": 1.0, "train__cfg": False},
        {"use_lora": False, "sample__same_latent": True, "train__advantage": "gdpo"},
        {
            "train__batch_size": 2,
            "train__num_inner_epochs": 2,
            "train__kl_type": "gaussian",
            "mixed_precision": "bf16",  # slow on a CPU
            "sample__num_batches_per_epoch": 1,
        },
    ],
    ids=["window", "cps-unguided", "full-finetuning", "half-precision"],
)
def test_other_settings_train(train, overrides):
    # two epochs, because a new LoRA has no effect on the first samples
    done = train(num_epochs=2, save_freq=0, eval_prompts=1, log_images=0, **overrides)
    assert done.returncode == 0, done.stderr
    last = train.metrics()[-1]
    assert last["train/grad_norm"] > 0
    names = {p.name for p in (train.logdir / "run/checkpoints/latest").iterdir()}
    if overrides.get("use_lora") is False:
        assert names == {"transformer", "ema_transformer", "state"}
    else:
        assert names == {"lora", "ema_lora", "state"}
    assert last["train/first_update_ratio_dev"] <= 1e-5
    half = "mixed_precision" in overrides
    assert ("mixed_precision=bf16 is slow on a CPU" in done.stdout) == half


def test_failed_rewards_are_counted_and_excluded(train, tmp_path, monkeypatch):
    """Half of the images fail; the advantages of the others do not depend on them."""
    (tmp_path / "half_fails.py").write_text(
        "from flow_grpo.rewards.scorers.jpeg import jpeg_incompressibility\n"
        "def score(images, prompts, metadata):\n"
        "    sizes = jpeg_incompressibility(images, prompts, metadata)\n"
        "    return [None if i % 2 else s for i, s in enumerate(sizes)], {'size': sizes}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    done = train(
        reward_fn="{'half': 1.0}",
        custom_rewards="{'half': 'half_fails:score'}",
        eval_reward_fn="{'jpeg_compressibility': 1.0}",
        max_failed_fraction=0.6,
        sample__train_batch_size=8,
        sample__num_batches_per_epoch=1,
        train__batch_size=8,
    )
    assert done.returncode == 0, done.stderr
    last = train.metrics()[-1]
    assert last["reward/failed"] == last["reward/half/failed"] == 4
    assert "eval/jpeg_compressibility" in last
    assert "eval/half" not in last
    samples = [
        json.loads(x) for x in (train.logdir / "run/samples/train-00001/samples.jsonl").open()
    ]
    assert [s["half"] is None for s in samples] == [False, True] * 4
    assert [s["advantage"] for s in samples[1::2]] == [0] * 4
    assert np.mean([s["half/size"] for s in samples]) == pytest.approx(last["reward/half/size"])
    scored = samples[::2]
    alone = compute_advantages(
        np.array([s["half"] for s in scored]),
        np.unique([s["prompt"] for s in scored], return_inverse=True)[1],
    )
    assert np.abs(alone).max() > 0.5
    np.testing.assert_allclose([s["advantage"] for s in scored], alone, rtol=1e-12)
