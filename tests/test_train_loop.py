"""The loop of scripts/train.py, called in this process."""

import sys
from pathlib import Path

import numpy as np
import pytest
from ml_collections import ConfigDict

from config import grpo
from config.build import build_session
from flow_grpo.lora import MergedLora

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
from train import sample_epoch, train_epoch


@pytest.fixture
def session(tmp_path):
    config = grpo.get_config("tiny_ocr_1gpu")
    config.device, config.logdir, config.log_with = "cpu", str(tmp_path), ""
    config.reward_fn = ConfigDict({"jpeg_compressibility": 1.0})
    config.sample.guidance_scale = 2.0
    config.sample.num_steps, config.sample.sde_window_size = 3, 0
    grpo.per_gpu_batches(config, gpus=1, groups=2, group_size=2, max_batch=2, updates=2)
    session = build_session(config)
    yield session
    session.close()


def test_guidance_is_computed_again_only_after_an_update(session):
    samples = sample_epoch(session, 0)
    steps, unconditional = [], session.adapter.unconditional

    def counted(*args):
        steps.append(session.progress.step)
        return unconditional(*args)

    session.adapter.unconditional = counted
    advantages = [np.array([1.0, -1.0]) for _ in samples]
    metrics = train_epoch(session, 0, [s.trajectory for s in samples], advantages)
    assert session.progress.step == 2
    assert steps == [1, 1]  # the two trained steps of the second micro-batch
    assert metrics["train/first_update_ratio_dev"] <= 1e-6


@pytest.mark.parametrize("merge", [False, True])
def test_lora_is_merged_for_steps_without_noise_and_only_then(session, merge):
    session.merged = MergedLora(session.policy.lora_layers) if merge else None
    layer = session.adapter.transformer.transformer_blocks[0].attn.to_q
    off, velocity = [], session.adapter.velocity

    def seen(*args, **kwargs):
        off.append(layer.disable_adapters)
        return velocity(*args, **kwargs)

    session.adapter.velocity = seen
    samples = sample_epoch(session, 0)
    assert off == [False, False, merge] * len(samples)
    assert not layer.disable_adapters
