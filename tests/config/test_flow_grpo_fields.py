"""Settings shared with Flow-GRPO: evaluation guidance, TF32, revisions, optimizer offload.

tests/gpu/test_optimizer_offload.py tests the transfers of the offload.
"""

import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from ml_collections import ConfigDict
from train import run_evaluation
from user_errors import raises_user_error

from flow_grpo.data.hub import download_revision
from flow_grpo.diffusion.config_checks import check_config
from flow_grpo.diffusion.fields import get_config
from flow_grpo.errors import UserError
from flow_grpo.training.builder import build_accelerator
from flow_grpo.training.optimizer import build_lr_schedule, offload_optimizer_state

DOWNLOAD = """
from flow_grpo.data.hub import download_revision
from flow_grpo.training.optimizer import offload_optimizer_state
print(download_revision("someone/signs", "v2"))
download_revision("someone/signs", "v3")
"""


def with_fields(**fields) -> ConfigDict:
    config = get_config()
    config.update_from_flattened_dict({k.replace("__", "."): v for k, v in fields.items()})
    return config


def test_evaluations_can_have_their_own_guidance_scale(make_session):
    session = make_session(eval_prompts=2, **{"sample.eval_guidance_scale": 1.0})
    assert session.policy.dynamics.guidance_scale == 2.0

    def score(scale: float, of_eval: float | None) -> float:
        guidance = {"guidance_scale": scale, "eval_guidance_scale": of_eval}
        sample = replace(session.config.sample, **guidance)
        session.config = replace(session.config, sample=sample)
        return run_evaluation(session, epoch=1)["eval/jpeg_compressibility"]

    unguided = score(2.0, 1.0)
    assert score(1.0, None) == unguided
    assert score(2.0, None) != unguided


def test_a_negative_guidance_scale_is_rejected():
    with raises_user_error("at least 0", field="sample.eval_guidance_scale", value=-1.0):
        check_config(with_fields(sample__eval_guidance_scale=-1.0))


@pytest.mark.parametrize("allowed", [True, False])
def test_tf32_is_off_unless_allowed(allowed):
    try:
        build_accelerator(with_fields(allow_tf32=allowed, device="cpu"))
        assert torch.backends.cuda.matmul.allow_tf32 is allowed
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    assert get_config().allow_tf32 is False


def test_the_revision_of_a_hub_id_is_loaded(tiny_sd3, tmp_path):
    """Offline, from the hub's cache."""
    cached = tmp_path / "models--someone--signs"
    for name, commit in {"main": "a" * 40, "v2": "b" * 40}.items():
        shutil.copytree(tiny_sd3, cached / "snapshots" / commit)
        (cached / "refs").mkdir(exist_ok=True)
        (cached / "refs" / name).write_text(commit)
    done = subprocess.run(
        [sys.executable, "-c", DOWNLOAD],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == str(cached / "snapshots" / ("b" * 40))
    message = done.stderr.splitlines()[-1]
    assert "pretrained.model='someone/signs'" in message
    assert "pretrained.revision=" in message


def test_a_revision_of_a_local_directory_is_rejected(tiny_sd3):
    assert download_revision(str(tiny_sd3), "main") == str(tiny_sd3)
    assert download_revision("someone/signs", "main") == "someone/signs"
    with raises_user_error(field="pretrained.revision", value="v2"):
        download_revision(str(tiny_sd3), "v2")


def test_offloaded_moments_train_the_same_weights():
    weights = []
    for offload in (False, True):
        torch.manual_seed(0)
        layer = torch.nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
        if offload:
            offload_optimizer_state(optimizer)
        for _ in range(3):
            layer(torch.randn(2, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.load_state_dict(optimizer.state_dict())
        weights.append(layer.weight.detach().clone())
    assert torch.equal(*weights)


def test_a_run_offloads_the_optimizer_if_set(make_session, monkeypatch):
    offloaded = []
    monkeypatch.setattr("flow_grpo.training.optimizer.offload_optimizer_state", offloaded.append)
    session = make_session(**{"train.offload_optimizer": True})
    assert offloaded == [session.optimizer.optimizer]


def test_offload_is_incompatible_with_8bit_adam_and_deepspeed(monkeypatch):
    config = with_fields(train__offload_optimizer=True, train__use_8bit_adam=True)
    with raises_user_error("train.use_8bit_adam=True", field="train.offload_optimizer", value=True):
        check_config(config)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(UserError, match=r"DeepSpeed.*offload_optimizer_device"):
        build_accelerator(config)


def test_learning_rate_schedules():
    def rates(**fields) -> list[float]:
        given = {f"train__{name}": value for name, value in fields.items()}
        train = check_config(with_fields(train__learning_rate=1.0, **given)).train
        return [build_lr_schedule(train, 6)(done) for done in range(6)]

    assert rates() == [1.0] * 6
    assert rates(lr_warmup_steps=2) == [0.0, 0.5, 1.0, 1.0, 1.0, 1.0]
    assert rates(lr_scheduler="linear", lr_warmup_steps=2) == [0.0, 0.5, 1.0, 0.75, 0.5, 0.25]
    third = 0.5 * (1 + math.cos(math.pi / 3))
    assert rates(lr_scheduler="cosine")[2] == pytest.approx(third)
    assert rates(lr_scheduler="cosine", lr_min_ratio=0.2)[2] == pytest.approx(0.8 * third + 0.2)
    with pytest.raises(UserError, match=r"lr_warmup_steps=6 must be below the 6 updates of the ru"):
        rates(lr_warmup_steps=6)
    with pytest.raises(UserError, match=r"lr_min_ratio=0\.1 has no effect with .*='constant'"):
        rates(lr_min_ratio=0.1)
