"""Short runs of both trainers with NaN gradients in their first and last update.

    torchrun --nproc_per_node 2 tests/support/nonfinite_runs.py FOLDER

executes RUNS one after the other with the files that `make_files` wrote to FOLDER.
"""

import itertools
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import float64_run
import pytest
import small_vlm
import torch
import vlm_runs
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from fsdp_on_cpu import shard_on_cpu
from ml_collections import ConfigDict
from train import train
from untrained import small

from flow_grpo.diffusion.fields import get_config
from flow_grpo.diffusion.models import ADAPTERS, ModelAdapter
from flow_grpo.diffusion.session import Session, build_session

# runs of two processes; FSDP2 comes last, because its patch stays for the rest of the process
RUNS = [
    *(("image", "ddp"), ("vlm", "ddp")),
    *(("image", "zero2"), ("vlm", "zero2")),
    ("vlm", "zero3"),
    *(("image", "fsdp2"), ("vlm", "fsdp2")),
]
UPDATES = 3  # per epoch, and there is one epoch
COMMON = {"num_epochs": 1, "eval_freq": 0, "log_images": 0, "train.ema_update_interval": 1}
IMAGE = {
    "max_sequence_length": 4,
    "sample.num_steps": 2,
    "sample.num_image_per_prompt": 2,
    "sample.train_batch_size": 2,
    "sample.num_batches_per_epoch": UPDATES,
    "train.batch_size": 2,
    "train.gradient_accumulation_steps": 1,
}
VLM = {
    "eval_questions": 1,
    "sample.questions_per_epoch": 2 * UPDATES,
    "sample.group_size": 2,
    "sample.max_new_tokens": 4,
    "train.updates_per_epoch": UPDATES,
    "train.ema": True,
}


@contextmanager
def nan_gradients(*updates: int) -> Iterator[None]:
    """Make the gradients of these updates NaN on the last rank only; the loss stays finite."""
    backward, count = Accelerator.backward, itertools.count(1)

    def poisoned(accelerator: Accelerator, loss: torch.Tensor, **options) -> None:
        last = accelerator.process_index == accelerator.num_processes - 1
        if accelerator.sync_gradients and next(count) in updates and last:
            loss.register_hook(lambda gradient: gradient * torch.nan)
        backward(accelerator, loss, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Accelerator, "backward", poisoned)
        yield


def load_small(config: ConfigDict, _: Accelerator) -> ModelAdapter:
    pipeline = small.build("sd3")
    return ADAPTERS[type(pipeline).__name__](
        pipeline, max_sequence_length=config.max_sequence_length
    )


def image_session(folder: Path, **fields) -> Session:
    config = get_config()
    paths = {"dataset": str(folder / "prompts"), "logdir": str(folder / "image")}
    config.update_from_flattened_dict({**float64_run.FIELDS, **IMAGE, **COMMON, **paths, **fields})
    config.custom_rewards = ConfigDict({"light": "brightness_reward:score"})
    config.reward_fn = ConfigDict({"light": 1.0})
    return build_session(config, load=load_small)


def run(folder: Path, trainer: str, name: str, *poisoned: int, **fields) -> None:
    """Train in the directory `folder`/`trainer`/`name`, with NaN gradients in some updates."""
    with nan_gradients(*poisoned):
        if trainer == "vlm":
            vlm_runs.run(**vlm_fields(folder), run_name=name, **fields)
            return
        session = image_session(folder, run_name=name, **fields)
        try:
            train(session)
        finally:
            session.close()


def vlm_fields(folder: Path) -> dict[str, Any]:
    paths = {"pretrained.model": "model", "dataset": "data", "logdir": "vlm"}
    return {**COMMON, **VLM, **{field: str(folder / path) for field, path in paths.items()}}


def make_files(folder: Path) -> None:
    """Write the model, datasets and DeepSpeed configs of the runs."""
    for stage in (2, 3):
        settings = {"stage": stage, "stage3_param_persistence_threshold": 0}
        (folder / f"zero{stage}.json").write_text(json.dumps({"zero_optimization": settings}))
    small_vlm.save(folder / "model")
    small_vlm.write_data(folder / "data")
    make_prompts(folder)


def make_prompts(folder: Path) -> None:
    (folder / "prompts").mkdir()
    for split in ("train", "test"):
        lines = [f"{split} prompt number {i}" for i in range(2 * UPDATES)]
        (folder / f"prompts/{split}.txt").write_text("\n".join(lines))


def main(folder: Path) -> None:
    for trainer, engine in RUNS:
        _select_engine(engine, folder)
        run(folder, trainer, engine, 1, UPDATES)


def _select_engine(engine: str, folder: Path) -> None:
    """Let each new `Accelerator` use this engine."""
    AcceleratorState._reset_state()
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    if engine.startswith("zero"):
        import deepspeed

        deepspeed.ops.__compatible_ops__ = {}  # compiling kernels takes minutes
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(folder / f"{engine}.json")
    if engine == "fsdp2":
        shard_on_cpu()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
