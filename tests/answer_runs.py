"""Short runs of scripts/train_vlm.py in this process, and as a script for several processes.

    torchrun --nproc_per_node 2 tests/answer_runs.py '[{"logdir": ..., "exact": true}]' [ENGINE]

With `exact` in float64, where runs that should be equal are, to the last digits. ENGINE: `fsdp2`;
or `zero`, for runs that have a `zero` file of DeepSpeed's settings.
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

from flow_grpo.answer.fields import get_config
from flow_grpo.answer.policy import AnswerPolicy
from flow_grpo.answer.session import VlmSession, build_session
from flow_grpo.errors import RewardOutage

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
import train_vlm

FIELDS = {
    "device": "cpu",
    "run_name": "run",
    "eval_freq": 0,
    "eval_questions": 2,
    "log_images": 2,
    "question_format": "{question}",  # short, as the small model's positions are few
    "num_checkpoint_limit": 0,
    "sample.questions_per_epoch": 4,
    "sample.group_size": 4,
    "sample.max_new_tokens": 10,
    "train.learning_rate": 1e-3,
    "train.lora_rank": 4,
}


def config_of(reward: str = "early_letters", **fields: Any) -> ConfigDict:
    config = get_config()
    config.update_from_flattened_dict({**FIELDS, **fields})
    config.custom_rewards = ConfigDict({"mine": f"small_vlm:{reward}"})
    config.reward_fn = ConfigDict({"mine": 1.0})
    return config


@contextmanager
def exactly() -> Iterator[None]:
    """What is in float64 stays so: transformers takes some steps in float32, whatever the weights
    are in."""

    def wide(function: Callable) -> Callable:
        def call(tensor: Tensor, *args: Any, **settings: Any) -> Tensor:
            if tensor.dtype == torch.float64:
                args = [torch.float64 if x is torch.float32 else x for x in args]
                if settings.get("dtype") is torch.float32:
                    settings["dtype"] = torch.float64
            return function(tensor, *args, **settings)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "to", wide(Tensor.to))
        patch.setattr(Tensor, "float", lambda tensor: tensor.to(torch.float32))
        patch.setattr(functional, "softmax", wide(functional.softmax))
        yield


def run(exact: bool = False, **fields: Any) -> VlmSession:
    """`fields` are dotted; a session that is closed."""
    load = (lambda *_: small_vlm.build().double()) if exact else None
    with exactly() if exact else nullcontext():
        session = build_session(config_of(**fields), load=load)
        try:
            train_vlm.train(session)
        finally:
            session.close()
    return session


def run_by_two(runs: list[dict], *engine: str) -> None:
    """Each after the other, by two processes that start once."""
    done = subprocess.run(
        [*torchrun(), __file__, json.dumps(runs), *engine],
        cwd=ROOT,
        env={**environment(warmed=True), "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def _take_settings(zero: str) -> None:
    """As `accelerate launch` would; every run may have its own."""
    AcceleratorState._reset_state()
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = zero


def run_watched(**fields: Any) -> None:
    """Each process leaves, in `seen-<process>.jsonl` of the run: the tokens that it sampled and
    their rewards, by index, and of each micro-batch whether it had a picture. Where rewards fail,
    `outage-<process>.txt` beside the run says what was told."""
    prepare, scores, lines, runs = train_vlm.prepare, AnswerPolicy.scores, [], []

    def watched_prepare(session, rollout):
        runs[:] = [session]
        lines.append(
            {
                "tokens": {i: sample.tokens.tolist() for i, sample in rollout.samples.items()},
                "rewards": {i: rollout.scores["avg"][i] for i in rollout.samples},
                "pictures": [],
            }
        )
        return prepare(session, rollout)

    def watched_scores(policy, batch, **settings):
        lines[-1]["pictures"].append([runs[0].progress.step, batch.inputs.shown is not None])
        return scores(policy, batch, **settings)

    train_vlm.prepare, AnswerPolicy.scores = watched_prepare, watched_scores
    try:
        session = run(**fields)
    except RewardOutage as outage:
        told = Path(fields["logdir"], f"outage-{os.environ['RANK']}.txt")
        told.write_text(str(outage), encoding="utf-8")
        return
    finally:
        train_vlm.prepare, AnswerPolicy.scores = prepare, scores
    path = session.folder / f"seen-{session.accelerator.process_index}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    if "fsdp2" in sys.argv:
        shard_on_cpu()
    if "zero" in sys.argv:
        import deepspeed

        deepspeed.ops.__compatible_ops__ = {}  # kernels that it would compile first, for minutes
    for one in json.loads(sys.argv[1]):
        if "zero" in one:
            _take_settings(one.pop("zero"))
        run_watched(**one)
