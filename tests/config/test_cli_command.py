"""The command `flow-grpo`, installed from a wheel, and presets from any directory."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import doctor
import pytest
import torch
from runner import ROOT
from user_errors import raises_user_error

from flow_grpo import __version__
from flow_grpo.config import command_line, paths
from flow_grpo.config.command import COMMANDS, list_commands
from flow_grpo.data.mixing import parse_sources
from flow_grpo.data.prompts import load_prompts
from flow_grpo.data.questions import QuestionLayout, load_questions
from flow_grpo.data.responses import ResponseLayout, load_responses
from flow_grpo.diffusion import presets
from flow_grpo.diffusion.config_checks import check_config
from flow_grpo.diffusion.fields import get_config
from flow_grpo.vlm import presets as vlm

PACKAGED = (
    "flow_grpo",
    "reward_server",
    "scripts",
    "config",
    "dataset",
    "assets",
    "docs/benchmarks",
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A directory with the package installed from a wheel, built without a network."""
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
    """Run the command in an empty directory, outside the repository."""

    def run(*arguments: str) -> subprocess.CompletedProcess:
        environment = {**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, installed / "bin/flow-grpo", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
        )

    return run


def test_help_lists_the_commands_with_a_line_each(flow_grpo):
    shown = flow_grpo().stdout
    assert shown == flow_grpo("--help").stdout
    for name, path in list_commands().items():
        assert path.is_file()
        assert re.search(rf"(?m)^  {name} +{re.escape(COMMANDS[name])}$", shown)
    assert all(len(line) < 100 for line in shown.splitlines())


@pytest.mark.parametrize(("loop", "script"), [("train", "train"), ("train-vlm", "train_vlm")])
def test_cp_copies_a_training_loop_and_never_overwrites(flow_grpo, tmp_path, loop, script):
    copy = tmp_path / "my_train.py"
    done = flow_grpo("cp", loop, "my_train.py")
    assert done.returncode == 0, done.stderr
    assert copy.read_bytes() == (ROOT / f"scripts/{script}.py").read_bytes()
    copy.write_text("edited")
    again = flow_grpo("cp", loop, "my_train.py")
    assert again.returncode == 2
    assert again.stderr.startswith("error: my_train.py already exists")
    assert copy.read_text() == "edited"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [(["doctor", "a.py"], "'doctor'"), (["train"], "file"), (["train", "no/a.py"], "no/a.py")],
)
def test_cp_reports_wrong_arguments_in_one_line(flow_grpo, arguments, shown):
    done = flow_grpo("cp", *arguments)
    assert done.returncode == 2
    assert shown in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_copied_loop_runs_as_a_script(flow_grpo, installed, tmp_path):
    flow_grpo("cp", "train", "my_train.py")
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, "my_train.py", "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--config.train.learning_rate=" in done.stdout


def test_the_measurements_of_a_plan_are_installed(flow_grpo):
    done = flow_grpo("plan", "--config=general_ocr_sd3", "--world_size=8")
    assert done.returncode == 0, done.stderr
    assert re.search(r"(?m)^measured +sd3_h200.jsonl, ", done.stdout)


def test_an_unknown_command_is_reported_in_one_line(flow_grpo):
    done = flow_grpo("trian")
    assert done.returncode == 2
    assert done.stderr == "error: unknown command 'trian'; did you mean train?\n"
    done = flow_grpo("xyz")
    assert done.stderr.startswith("error: unknown command 'xyz'; choose one of bench, benchmark, ")


def test_the_reward_server_and_the_version(flow_grpo):
    done = flow_grpo("reward-server", "--rewards", "ocrr")
    assert done.returncode == 2
    assert "'ocrr'" in done.stderr
    assert "aesthetic, " in done.stderr
    assert flow_grpo("--version").stdout == f"flow-grpo {__version__}\n"


WAYS = {  # how to get a data set that does not ship: pattern of the hint
    "dataset/geneval": r"python (\S+) coco dataset/geneval --size 50000$",
    "dataset/pickscore": r"git clone https://github.com/yifan123/flow_grpo (\S+), and pass",
    **dict.fromkeys(
        ("dataset/counting_edit", "dataset/sharegpt4o_image_mini"),
        r"--config.dataset=path/to/data \((\S+)\)$",
    ),
    "dataset/text_math": r"--config.dataset=path/to/data \((\S+)\)$",
}


@pytest.mark.parametrize(("module", "load"), [(presets, load_prompts), (vlm, load_questions)])
def test_a_presets_data_set_ships_or_the_error_says_how_to_get_it(
    monkeypatch, tmp_path, module, load
):
    """Outside the repository, where the name of a bundled data set looks like a hub id."""
    monkeypatch.chdir(tmp_path)
    sets = {s.path for n in module.PRESETS for s in parse_sources(module.get_config(n).dataset)}
    for path in sets:
        if path.startswith(("hiyouga/", "BUAADreamer/")):  # on the hub
            continue
        if path.endswith("sum_responses"):  # responses, which `load_questions` does not read
            assert load_responses(path, ResponseLayout())
            continue
        if path.endswith("sign_requests"):  # with a column for the preset's reward
            assert load_questions(path, 0, QuestionLayout(answer="", metadata=("prompt",)))
            continue
        name = os.path.relpath(path, ROOT) if os.path.isabs(path) else path
        if name not in WAYS:
            assert load(path, "train" if load is load_prompts else 0)
            continue
        with raises_user_error(field="dataset", value=name) as error:
            load(path, "train" if load is load_prompts else 0)
        [way] = re.findall(WAYS[name], str(error.value))
        assert os.path.exists(ROOT / way) == (name != "dataset/pickscore")


def test_the_doctor_reports_the_installation(flow_grpo, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # a closed port
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    done = flow_grpo("doctor")
    assert done.returncode == 0, done.stderr
    *lines, _, verdict = done.stdout.splitlines()
    rows = {row[1]: row for row in (re.split("  +", line) for line in lines)}
    assert rows["flow_grpo"] == ["ok", "flow_grpo", __version__]
    assert rows["torch"] == ["ok", "torch", torch.__version__]
    assert {"Python", "CPU", "logs", "hub cache", "reward ocr", "log_with=wandb"} <= rows.keys()
    assert rows["hub"][0] == "offline"
    assert rows["hub"][2].startswith("http://127.0.0.1:9 ")
    assert "(ConnectionError); check" in rows["hub"][2]
    assert rows["hub login"][2].startswith("none; hf auth login, or set HF_TOKEN")
    missing = sum(not line.startswith("ok") for line in lines)
    assert verdict.startswith(f"training can run; {missing} optional ")


def test_the_doctor_says_how_to_install_missing_packages():
    required = ["no-such-package>=1", "numpy>=10000", "none-such>=2; extra == 'ocr'"]
    found = {each.what: each for each in doctor.packages(required)}
    assert found["no-such-package"][::3] == ("broken", "pip install 'no-such-package>=1'")
    assert found["numpy"][::3] == ("untried", "pip install 'numpy>=10000'")
    assert found["reward ocr"][::3] == ("missing", "pip install 'none-such>=2'")
    extras = importlib.metadata.metadata("flow_grpo").get_all("Provides-Extra")
    assert {*extras} - {"test", "docs", "tensorboard", "wandb"} == doctor.EXTRAS.keys()


@pytest.mark.parametrize(
    ("able", "formats"),
    [((9, 0), "bf16 and FP8"), ((8, 0), "bf16"), ((7, 5), "neither bf16 nor FP8")],
)
def test_the_doctor_reports_the_formats_a_gpu_supports(monkeypatch, able, formats):
    known = {"device_count": 1, "get_device_name": "A card", "get_device_capability": able}
    for name, value in {**known, "mem_get_info": (60 * 2**30, 80 * 2**30)}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    [found] = doctor.gpus()
    kind = f"A card, compute capability {able[0]}.{able[1]}"
    assert found == ("ok", "GPU 0", f"{kind}, 60 of 80 GiB free, {formats}", "")


def test_the_doctor_distinguishes_no_gpu_from_an_unusable_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    [found] = doctor.gpus()
    assert found[:2] == ("ok", "GPU")
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    [found] = doctor.gpus()
    assert found[:2] == ("unused", "GPU")
    assert found.remedy
    monkeypatch.setitem(sys.modules, "torch", None)
    [broken] = doctor.gpus()
    assert broken.state == "broken"
    verdict = doctor.verdict([found, broken])
    assert verdict.startswith("training cannot run")
    assert "torch" in verdict
    assert doctor.verdict([found]).startswith("training can run; 1 optional ")


def test_a_user_error_is_one_line_as_in_the_scripts(flow_grpo):
    done = flow_grpo("train", "--config=config/grpo.py:tiny_ocr", "--config.resume_from=logs/a")
    assert done.returncode == 2
    assert done.stderr == "error: unknown config key 'resume_from'; it is called resume here\n"


@pytest.mark.slow
def test_a_preset_runs_outside_the_repository(flow_grpo, installed, tmp_path):
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


def test_files_in_the_current_directory_take_precedence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = presets.get_config("tiny_ocr_1gpu")
    assert config.dataset == str(ROOT / "dataset/ocr")
    assert config.pretrained.model == str(ROOT / "assets/tiny-sd3")
    ours = f"{ROOT}/config/grpo.py:tiny_ocr"
    for argv in (["--config", ours], [f"--config={ours}"]):
        theirs = [arg.replace(f"{ROOT}/", "") for arg in argv]
        assert command_line._resolve_config_options(["train.py", *theirs]) == ["train.py", *argv]
    (tmp_path / "dataset/ocr").mkdir(parents=True)
    (tmp_path / "config").mkdir()
    (tmp_path / "config/grpo.py").touch()
    assert presets.get_config("tiny_ocr_1gpu").dataset == "dataset/ocr"
    assert paths.resolve_config_file("config/grpo.py:tiny_ocr") == "config/grpo.py:tiny_ocr"
    assert paths.resolve_path("no/such/file") == "no/such/file"


def test_bundled_prompts_are_found_from_any_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = check_config(get_config())  # as in a custom config file
    assert config.dataset == str(ROOT / "dataset/ocr")
