"""Short runs of scripts/train_vlm.py in this process, or as a script in several processes.

    torchrun --nproc_per_node 2 tests/support/vlm_runs.py \\
        '[{"logdir": ..., "exact": true}]' [ENGINE]

Runs with `exact` are in float64, so that equivalent runs agree to the last digits. ENGINE is
`fsdp2`, or `zero` for runs whose field `zero` is the path of a DeepSpeed config.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import small_vlm
import torch
from accelerate.state import AcceleratorState
from fsdp_on_cpu import shard_on_cpu
from ml_collections import ConfigDict
from runner import ROOT, environment, torchrun
from torch import Tensor
from torch.nn import functional

from flow_grpo.errors import RewardOutage
from flow_grpo.vlm.fields import BRADLEY_TERRY, get_config
from flow_grpo.vlm.policy import VlmPolicy
from flow_grpo.vlm.reward_models import training as reward_models
from flow_grpo.vlm.session import VlmSession, build_session

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import train_vlm

FIELDS = {
    "device": "cpu",
    "run_name": "run",
    "eval_freq": 0,
    "eval_questions": 2,
    "log_images": 2,
    "question_format": "{question}",  # short, because the small model has few positions
    "num_checkpoint_limit": 0,
    "sample.questions_per_epoch": 4,
    "sample.group_size": 4,
    "sample.max_new_tokens": 10,
    "train.learning_rate": 1e-3,
    "train.lora_rank": 4,
}


def make_config(reward: str = "early_letters", **fields: Any) -> ConfigDict:
    config = get_config()
    config.update_from_flattened_dict({**FIELDS, **fields})
    config.custom_rewards = ConfigDict({"mine": f"small_vlm:{reward}"})
    config.reward_fn = ConfigDict({"mine": 1.0})
    return config


@contextmanager
def in_float64() -> Iterator[None]:
    """Keep float64 tensors in float64: transformers casts some operations to float32."""

    def keep_float64(function: Callable) -> Callable:
        def call(tensor: Tensor, *args: Any, **settings: Any) -> Tensor:
            if tensor.dtype == torch.float64:
                args = [torch.float64 if x is torch.float32 else x for x in args]
                if settings.get("dtype") is torch.float32:
                    settings["dtype"] = torch.float64
            return function(tensor, *args, **settings)

        return call

    grid_sample = functional.grid_sample

    def sample_in_float64(values: Tensor, grid: Tensor, **settings: Any) -> Tensor:
        return grid_sample(values, grid.to(values.dtype), **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "grid_sample", sample_in_float64)  # GLM's grid is in float32
        patch.setattr(Tensor, "to", keep_float64(Tensor.to))
        patch.setattr(Tensor, "float", lambda tensor: tensor.to(torch.float32))
        patch.setattr(functional, "softmax", keep_float64(functional.softmax))
        yield


def run(exact: bool = False, **fields: Any) -> VlmSession:
    """Train with these dotted config fields, and return the closed session."""
    load = (lambda *_: small_vlm.build().double()) if exact else None
    config, build, train = make_config(**fields), build_session, train_vlm.train
    if config.train.loss == BRADLEY_TERRY:
        config.reward_fn = get_config().reward_fn
        config.sample.group_size = get_config().sample.group_size
        build, train = reward_models.build_session, reward_models.train
    with in_float64() if exact else nullcontext():
        session = build(config, load=load)
        try:
            train(session)
        finally:
            session.close()
    return session


def read_metrics(session: VlmSession) -> list[dict]:
    """Return the lines of a run's metrics.jsonl."""
    return [
        json.loads(line) for line in (session.folder / "metrics.jsonl").read_text().splitlines()
    ]


def run_on_two_processes(runs: list[dict], *engine: str) -> None:
    """Execute the runs one after the other in the same two processes."""
    launch(2, __file__, json.dumps(runs), *engine)


def launch(processes: int, *command: str) -> None:
    """Run a script with its arguments in several processes."""
    done = subprocess.run(
        [*torchrun(processes), *command],
        cwd=ROOT,
        env={**environment(warmed=True), "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def _apply_launch_settings(zero: str) -> None:
    """Set what `accelerate launch` sets; each run may have another DeepSpeed config."""
    AcceleratorState._reset_state()
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = zero


def run_recording(**fields: Any) -> None:
    """Train, and record the samples and micro-batches of this process.

    `seen-<process>.jsonl` in the run directory has the sampled tokens and their rewards by index,
    and whether each micro-batch had an image. If the rewards fail, the error message is written to
    `outage-<process>.txt` next to the run directory.
    """
    prepare, forward = train_vlm.compute_rollout_log_probs, VlmPolicy.forward_tokens
    lines, sessions = [], []

    def recording_prepare(session, rollout):
        sessions[:] = [session]
        lines.append(
            {
                "tokens": {i: sample.tokens.tolist() for i, sample in rollout.samples.items()},
                "rewards": {
                    i: rollout.scores["avg"][i] for i in rollout.samples if "avg" in rollout.scores
                },
                "images": [],
            }
        )
        return prepare(session, rollout)

    def recording_forward(policy, batch, **settings):
        if lines:  # empty without a rollout
            lines[-1]["images"].append(
                [sessions[0].progress.step, batch.inputs.image_indices is not None]
            )
        return forward(policy, batch, **settings)

    train_vlm.compute_rollout_log_probs, VlmPolicy.forward_tokens = (
        recording_prepare,
        recording_forward,
    )
    try:
        session = run(**fields)
    except RewardOutage as outage:
        path = Path(fields["logdir"], f"outage-{os.environ['RANK']}.txt")
        path.write_text(str(outage), encoding="utf-8")
        return
    finally:
        train_vlm.compute_rollout_log_probs, VlmPolicy.forward_tokens = prepare, forward
    path = session.folder / f"seen-{session.accelerator.process_index}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    if "fsdp2" in sys.argv:
        shard_on_cpu()
    if "zero" in sys.argv:
        import deepspeed

        deepspeed.ops.__compatible_ops__ = {}  # compiling kernels takes minutes
    for fields in json.loads(sys.argv[1]):
        if "zero" in fields:
            _apply_launch_settings(fields.pop("zero"))
        run_recording(**fields)
