"""scripts/reproduce.py checks, trains and publishes, and continues where it stopped."""

import json
import os
import signal
import subprocess
import sys
import time

import fork_server
import pytest
import reproduce
from huggingface_hub import ModelCard, constants
from runner import ROOT, environment, run_script
from user_errors import raises_user_error

from flow_grpo.benchmarks.protocol import benchmark_names
from flow_grpo.diffusion import presets
from flow_grpo.errors import StoppedBySignal, UserError
from flow_grpo.training import readiness
from flow_grpo.training.readiness import Needs, find_problems
from flow_grpo.training.stages import Stage, StageState, run_command, run_stages
from flow_grpo.training.tasks import SMALL, TASKS, Task, TrainingRun
from flow_grpo.untrusted_files import flatten_fields
from flow_grpo.vlm import presets as vlm_presets

QUICK = [
    "--config.num_epochs=1",
    "--config.eval_freq=1",
    "--config.eval_prompts=4",
    "--config.sample.eval_num_steps=2",
    "--config.sample.num_image_per_prompt=4",
    "--config.sample.train_batch_size=4",
    "--config.sample.num_batches_per_epoch=2",
    "--config.train.batch_size=4",
    "--config.train.gradient_accumulation_steps=1",
]


def test_a_task_ends_with_the_card(tmp_path, monkeypatch):
    monkeypatch.setenv(fork_server.INTERPRETER, fork_server.interpreter(environment()))
    out = tmp_path / "out"
    run = out / "logs/train"
    options = ("--small", "--out", out, "--num_prompts", "2")
    done = run_script("scripts/reproduce.py", "sd3_ocr", *options, "--", *QUICK)
    assert done.returncode == 0, done.stderr

    card = out / "flow_grpo-sd3_ocr-small"
    assert ModelCard.load(card / "README.md").data.pipeline_tag == "text-to-image"
    assert (card / "curve.png").stat().st_size > 1000
    assert (card / "before_after.png").stat().st_size > 1000
    epochs = [json.loads(line)["epoch"] for line in (run / "metrics.jsonl").open()]
    assert epochs == [0, 1]
    assert json.loads((out / "reproduce.json").read_text())["done"] == [
        "train train",
        "bench tiny_signs",
        "publish",
    ]
    assert "Deviations from the protocol" in (card / "README.md").read_text()


@pytest.mark.parametrize("table", [TASKS, SMALL], ids=["full", "small"])
def test_every_task_names_presets_and_settings_that_exist(table):
    assert table.keys() == TASKS.keys()
    for task in table.values():
        for run in task.runs:
            presets_of = vlm_presets if run.vlm else presets
            assert run.preset in presets_of.PRESETS
            config = presets_of.get_config(run.preset)
            for option in run.overrides:
                name = option.removeprefix("--config.").partition("=")[0]
                assert name in dict(flatten_fields(config.to_dict()))
        assert {*task.benches} <= {*benchmark_names()}
        for run in task.runs:
            config = (vlm_presets if run.vlm else presets).get_config(run.preset)
            if task.models:
                assert config.pretrained.model in task.models


def test_the_check_lists_all_problems_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(readiness, "is_offline", lambda: True)
    monkeypatch.setattr(readiness, "find_spec", lambda name: None)
    task = Task("t", (), models={"a/b": 10**9}, reward_weights=("c/d",), gpus=2)
    needs = [Needs("a/b", "dataset/pickscore", ("ocr",)), Needs("a/b", "e/f", ())]
    found = [str(problem) for problem in find_problems(task, needs, 10**4, tmp_path)]
    for part in (
        "hf download a/b",
        "hf download c/d",
        "git clone",
        "hf download e/f --repo-type dataset",
        "pip install -e '.[ocr]'",
        "10000 GPUs",
        "disk space",
    ):
        assert sum(part in each for each in found) == 1, part
    assert len(found) == 8  # and the package for data sets on the hub
    assert all("\n" not in each for each in found)


def test_missing_prompts_of_benchmarks_are_found_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    [problem] = reproduce.find_missing_prompts(["tiny_signs", "ocr"])
    assert "benchmark ocr" in problem.what


def test_the_small_tasks_have_no_problem(tmp_path):
    for task in SMALL.values():
        assert reproduce.find_missing_prompts(task.benches) == []
        needs = [reproduce.find_needs(run, [*run.overrides], 0) for run in task.runs]
        assert find_problems(task, needs, 0, tmp_path) == []


def test_the_second_run_starts_from_the_exported_model_of_the_first(tmp_path):
    class Arguments:
        task, small, data, repo, num_prompts = "lmm_r1_two_stages", True, "my/data", "", None

    task = SMALL["lmm_r1_two_stages"]
    stages = reproduce.build_stages(task, Arguments, ["--config.seed=1"], 0, tmp_path)
    assert [stage.name for stage in stages] == [
        "train text",
        "export text",
        "train images",
        "bench tiny_shapes_qa",
        "publish",
    ]
    first, export, second, *_ = ([str(word) for word in stage.command] for stage in stages)
    assert "--config.dataset=my/data" in first
    assert "--config.dataset=my/data" not in second
    assert f"--config.pretrained.model={export[-1]}" in second
    assert export[export.index("--checkpoint") + 1] == str(tmp_path / "logs/text")
    assert "--config.seed=1" in first
    assert "--config.seed=1" in second


def test_several_gpus_are_started_by_accelerate():
    assert reproduce.launcher(1) == [sys.executable]
    words = [str(word) for word in reproduce.launcher(4)]
    assert words[words.index("--num_processes") + 1] == "4"
    assert all(os.path.exists(word) for word in words if word.endswith((".py", ".yaml")))


def test_a_finished_stage_is_skipped_and_a_failed_one_repeated(tmp_path):
    log = tmp_path / "log"
    write = "import sys; open(sys.argv[1], 'a').write(sys.argv[2]); sys.exit(int(sys.argv[3]))"
    stages = [
        Stage("one", [sys.executable, "-c", write, log, "1", "0"]),
        Stage("two", [sys.executable, "-c", write, log, "2", "7"]),
    ]
    for _ in range(2):
        state = StageState.open(tmp_path / "out", {"task": "t"})
        with raises_user_error("7") as caught:
            run_stages(state, stages)
        assert caught.value.exit_code == 7
    assert log.read_text() == "122"


def test_a_killed_task_stops_its_stage(tmp_path):
    """The kernel sends SIGTERM to the stage's process."""
    ready, stopped = tmp_path / "ready", tmp_path / "stopped"
    stage = (
        "import pathlib, signal, sys\n"
        "def stop(*_):\n"
        "    pathlib.Path(sys.argv[2]).touch()\n"
        "    sys.exit()\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "pathlib.Path(sys.argv[1]).touch()\n"
        "while True:\n"
        "    signal.pause()\n"
    )
    task = (
        "import sys\n"
        "from flow_grpo.training.stages import run_command\n"
        "run_command('stage', [sys.executable, '-c', *sys.argv[1:]])\n"
    )
    command = [sys.executable, "-c", task, stage, ready, stopped]
    process = subprocess.Popen(command, cwd=ROOT, env=environment())
    while not ready.exists() and process.poll() is None:
        time.sleep(0.05)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while not stopped.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert stopped.exists()


def test_other_options_and_other_directories_are_rejected(tmp_path):
    StageState.open(tmp_path / "out", {"--gpus": 1})
    with raises_user_error(field="--gpus", value=2):
        StageState.open(tmp_path / "out", {"--gpus": 2})
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").touch()
    with raises_user_error(field=str(tmp_path / "other")):
        StageState.open(tmp_path / "other", {})


def test_a_stop_signal_is_forwarded_and_reported():
    script = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        "os.kill(os.getppid(), signal.SIGTERM)\n"
        "time.sleep(60)\n"
    )
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(StoppedBySignal):
        run_command("train", [sys.executable, "-c", script])
    assert signal.getsignal(signal.SIGTERM) == handler


def test_settings_that_reproduce_sets_are_rejected(tmp_path):
    class Arguments:
        task, small, gpus, out, check = "sd3_ocr", True, None, tmp_path, False

    with raises_user_error(field="--config.run_name=a"):
        reproduce.reproduce(Arguments, ["--config.run_name=a"])
    assert issubclass(StoppedBySignal, UserError)
    assert TrainingRun("a", "b", vlm=True).script == "train_vlm.py"
