"""The command `flow-grpo`, installed from a wheel, and presets from any folder."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from runner import ROOT

from flow_grpo.config import command_line, places
from flow_grpo.config.command import commands, summary
from flow_grpo.draw import presets
from flow_grpo.draw.check import check
from flow_grpo.draw.compare import evaluate_all
from flow_grpo.draw.fields import get_config
from flow_grpo.errors import UserError

PACKAGED = ("flow_grpo", "reward_server", "scripts", "config", "dataset", "assets")


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder with the package as a wheel brings it, built without a network."""
    folder = tmp_path_factory.mktemp("installed")
    source = folder / "source"
    for name in PACKAGED:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index"]
    wheel = [*pip, "wheel", *offline, "--no-build-isolation", "--wheel-dir", folder, source]
    subprocess.run(wheel, check=True, capture_output=True)
    [built] = folder.glob("*.whl")
    target = folder / "site"
    subprocess.run([*pip, "install", *offline, "--target", target, built], check=True)
    return target


@pytest.fixture
def flow_grpo(installed, tmp_path):
    """Runs the command in an empty folder, which has nothing of the repo."""

    def run(*arguments: str) -> subprocess.CompletedProcess:
        environment = {**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, installed / "bin/flow-grpo", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
        )

    return run


def test_it_lists_its_commands_with_a_line_each(flow_grpo):
    told = flow_grpo().stdout
    assert told == flow_grpo("--help").stdout
    for name, path in commands().items():
        assert f"  {name} " in told
        assert summary(path) in told
    assert all(len(line) < 100 for line in told.splitlines())
    for name in ("train", "evaluate", "benchmark", "compare", "plot", "export", "make-small"):
        assert name in commands()
    assert {"train-vlm", "report", "demo", "gallery"} <= commands().keys()


def test_an_unknown_command_is_told_in_one_line(flow_grpo):
    done = flow_grpo("trian")
    assert done.returncode == 2
    assert done.stderr == "error: unknown command 'trian'; did you mean train?\n"
    done = flow_grpo("xyz")
    assert done.stderr.startswith(
        "error: unknown command 'xyz'; choose one of benchmark, benchmark-vlm, "
    )


def test_a_mistake_is_one_line_as_with_the_scripts(flow_grpo):
    done = flow_grpo("train", "--config=config/grpo.py:tiny_ocr", "--config.resume_from=logs/a")
    assert done.returncode == 2
    assert done.stderr == "error: unknown config key 'resume_from'; it is resume here\n"


@pytest.mark.slow
def test_a_preset_runs_from_a_folder_without_the_repo(flow_grpo, installed, tmp_path):
    fields = {
        **{"run_name": "run", "num_epochs": 1, "eval_prompts": 2, "sample.num_steps": 6},
        **{"sample.num_batches_per_epoch": 1, "train.gradient_accumulation_steps": 1},
        **{"sample.train_batch_size": 12, "train.batch_size": 12},
        "reward_fn": "{'jpeg_compressibility': 1.0}",
        **{"dataset": "dataset/ocr", "pretrained.model": "assets/tiny-sd3"},
    }
    overrides = [f"--config.{name}={value}" for name, value in fields.items()]
    done = flow_grpo("train", "--config=config/grpo.py:tiny_ocr", "--config.device=cpu", *overrides)
    assert done.returncode == 0, done.stderr
    config = json.loads((tmp_path / "logs/run/config.json").read_text())
    assert config["dataset"] == str(installed / "flow_grpo/share/dataset/ocr")
    assert config["pretrained"]["model"] == str(installed / "flow_grpo/share/assets/tiny-sd3")


def test_files_of_the_current_folder_come_before_ours(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = presets.get_config("tiny_ocr_1gpu")
    assert config.dataset == str(ROOT / "dataset/ocr")
    assert config.pretrained.model == str(ROOT / "assets/tiny-sd3")
    ours = f"{ROOT}/config/grpo.py:tiny_ocr"
    for argv in (["--config", ours], [f"--config={ours}"]):
        theirs = [arg.replace(f"{ROOT}/", "") for arg in argv]
        assert command_line._with_our_configs(["train.py", *theirs]) == ["train.py", *argv]
    (tmp_path / "dataset/ocr").mkdir(parents=True)
    (tmp_path / "config").mkdir()
    (tmp_path / "config/grpo.py").touch()
    assert presets.get_config("tiny_ocr_1gpu").dataset == "dataset/ocr"
    assert places.find_config("config/grpo.py:tiny_ocr") == "config/grpo.py:tiny_ocr"
    assert places.find("no/such/file") == "no/such/file"


def test_an_evaluation_finds_our_prompts_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = get_config()  # as a config file of one's own has it
    with pytest.raises(UserError, match="no/such"):
        evaluate_all(config, ["no/such"], tmp_path / "out")
    assert check(config).dataset == str(ROOT / "dataset/ocr")
