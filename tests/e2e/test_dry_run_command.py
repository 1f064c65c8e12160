"""scripts/train.py --dry_run builds everything, reports the plan, and writes nothing."""

import os
import re
from pathlib import Path

import pytest
from runner import list_repo_files, run_script, torchrun

ESTIMATES = ("memory", "time per epoch", "time per evaluation", "time of the run")


def report(done) -> dict[str, str]:
    """Return the printed values by the label of their line."""
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return dict(re.findall(r"(?m)^(\S+(?: \S+)*)  +(.*)$", done.stdout))


def files(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the size and modification time of each file in a directory."""
    found = [path for path in folder.rglob("*") if not path.is_symlink()]
    return {
        str(path): (path.stat().st_size, path.stat().st_mtime_ns if path.is_file() else 0)
        for path in found
    }


def test_a_dry_run_logs_the_plan_and_writes_nothing(train, tmp_path):
    """Neither a tracker nor a prompt cache is created."""
    fields = {"prompt_cache": tmp_path / "cache", "num_epochs": 9, "eval_freq": 2}
    files_before = list_repo_files()
    lines = report(train("--dry_run", log_with="tensorboard", **fields))
    run = train.logdir / "run"
    assert lines["dry run"] == f"{run} would be a new run; nothing is written now"
    assert lines["samples per epoch"].startswith("8 = 4 per batch x 2 batches")
    assert lines["updates per epoch"].startswith("2 ")
    assert lines["evaluation"] == "8 prompts x 3 steps, every 2 epochs"
    assert lines["measured"].startswith("2 of 2 batches sampled, scored and trained, 1 of 1 of an")
    assert re.match(r"\d+\.\d GiB at the peak, of \d+\.\d GiB of this machine$", lines["memory"])
    assert re.match(r"\S+ s = sampling .* \+ training \S+ s$", lines["time per epoch"])
    assert ": 9 epochs and 6 evaluations, " in lines["time of the run"]
    assert not os.listdir(tmp_path)
    assert list_repo_files() == files_before


@pytest.mark.slow
def test_an_existing_run_of_the_same_name_is_not_modified(train):
    done = train()
    assert done.returncode == 0, done.stderr
    run, before = train.logdir / "run", files(train.logdir)
    rejected = train("--dry_run")
    assert rejected.returncode == 2
    assert rejected.stderr.startswith(f"error: {run} already exists")
    assert f"--resume {run}" in rejected.stderr
    lines = report(train("--dry_run", resume="auto", num_epochs=4, eval_freq=0))
    assert lines["dry run"].startswith(f"{run} would resume after epoch 1; ")
    assert ": 3 epochs and 1 evaluation, " in lines["time of the run"]
    words = train.command("--dry_run", resume=run, run_name="next", num_epochs=2)[1:]
    lines = report(run_script("flow_grpo/config/command.py", "train", *words))
    assert lines["dry run"].startswith(f"{run.with_name('next')} would be a new run from {run}; ")
    assert files(train.logdir) == before


@pytest.mark.slow
def test_two_processes_report_the_plan_once(train, tmp_path):
    done = train("--dry_run", launcher=torchrun(), device="cpu")
    lines = report(done)
    assert lines["samples per epoch"] == "16 = 4 per batch x 2 batches x 2 processes"
    assert "at the peak, on each of 2 processes, of " in lines["memory"]
    for name in ESTIMATES:
        assert len(re.findall(rf"(?m)^{name} ", done.stdout)) == 1
    assert not os.listdir(tmp_path)


def test_an_invalid_field_is_reported_as_in_training(train):
    done = train("--dry_run", reward_fn="{'beauty': 1.0}")
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown reward 'beauty'; ")
    assert not train.logdir.exists()


def test_world_size_requires_a_dry_run(train):
    """Both errors are raised before torch is imported."""
    done = train("--world_size=2")
    assert done.returncode == 2
    assert "--world_size=2" in done.stderr
    assert "--dry_run" in done.stderr
    done = train("--dry_run", "--world_size=3", sample__num_image_per_prompt=16)
    assert done.returncode == 2
    assert "x 3 processes" in done.stderr


def test_only_training_has_a_dry_run(run):
    done = run("--dry_run", script="scripts/evaluate.py", config="config/grpo.py:tiny_ocr")
    assert done.returncode == 2
    assert "--dry_run" in done.stderr
