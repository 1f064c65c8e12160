"""SIGINT and SIGTERM outside the epochs: a one-line message and the exit code of a stopped run.

Each process sends the signal to itself when it calls a given function.
"""

import os
import subprocess
import sys

import fault_injection
import pytest
import small_vlm
from runner import ROOT, Runner, run_script


@pytest.fixture
def diffusion(short_runs, tmp_path) -> list[str]:
    return Runner(tmp_path / "logs", **short_runs, eval_freq=0).command()


@pytest.fixture
def vlm(tmp_path) -> list[str]:
    runner = Runner(
        tmp_path / "logs",
        device="cpu",
        pretrained__model=small_vlm.save(tmp_path / "model"),
        dataset=small_vlm.write_data(tmp_path / "data"),
        num_epochs=1,
        eval_freq=0,
        eval_questions=2,
        reward_fn="{'mine': 1.0}",
        custom_rewards="{'mine': 'small_vlm:early_letters'}",
        sample__questions_per_epoch=2,
        sample__group_size=2,
        sample__max_new_tokens=4,
        train__lora_rank=4,
    )
    return runner.command(script="scripts/train_vlm.py", config="config/vlm.py")


def stderr_after_signal(command: list[str], target: str, name: str) -> str:
    """Return stderr of a run that receives the signal when it calls `target`."""
    done = run_script(fault_injection.__file__, target, f"1:{name}", *command)
    assert done.returncode == 75, done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("script", "config"), [("train.py", "grpo.py:tiny_ocr"), ("train_vlm.py", "vlm.py:tiny_vlm")]
)
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_during_imports_is_reported_in_one_line(tmp_path, script, config, name):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Signal:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch':\n"
        f"            os.kill(os.getpid(), signal.{name})\n"
        "sys.meta_path.insert(0, Signal())\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, f"scripts/{script}", f"--config=config/{config}"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 75, done.stderr
    assert done.stderr == "interrupted at startup; start it again with the same command\n"


@pytest.mark.parametrize(
    ("kind", "target", "name"),
    [
        ("diffusion", "flow_grpo.diffusion.builders:load_adapter", "SIGINT"),
        ("vlm", "flow_grpo.vlm.builders:load_model", "SIGTERM"),
    ],
)
def test_a_signal_during_model_loading_is_reported_in_one_line(
    request, tmp_path, kind, target, name
):
    stderr = stderr_after_signal(request.getfixturevalue(kind), target, name)
    assert stderr == "interrupted; start it again with the same command\n"
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(("kind", "name"), [("diffusion", "SIGTERM"), ("vlm", "SIGINT")])
def test_a_signal_during_the_final_report_is_handled_after_it(request, tmp_path, kind, name):
    stderr = stderr_after_signal(
        request.getfixturevalue(kind), "flow_grpo.training.session:write_final_report", name
    )
    folder = tmp_path / "logs/run"
    assert stderr.startswith("stopped ")
    assert stderr.endswith(f"{folder}\n")
    assert (folder / "report.html").is_file()
    assert (folder / "checkpoints/latest/state").is_dir()
    assert [path.name for path in folder.parent.iterdir()] == ["run"]  # the lock is removed
