"""The command `flow-grpo`, installed from a wheel, and presets from any folder."""

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

from flow_grpo import __version__
from flow_grpo.answer import presets as vlm
from flow_grpo.config import command_line, places
from flow_grpo.config.command import commands, summary
from flow_grpo.data.mixing import parse_sources
from flow_grpo.data.prompts import load_prompts
from flow_grpo.data.questions import load_questions
from flow_grpo.draw import presets
from flow_grpo.draw.check import check
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


def test_the_reward_server_and_the_version(flow_grpo):
    done = flow_grpo("reward-server", "--rewards", "ocrr")
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown reward 'ocrr'; known are aesthetic, ")
    assert flow_grpo("--version").stdout == f"flow-grpo {__version__}\n"


WAYS = {  # to what does not ship
    "dataset/geneval": r"python (\S+) coco dataset/geneval --size 50000$",
    "dataset/pickscore": r"git clone https://github.com/yifan123/flow_grpo (\S+), and give",
    **dict.fromkeys(
        ("dataset/counting_edit", "dataset/sharegpt4o_image_mini"),
        r"--config.dataset=path/to/data \((\S+)\)$",
    ),
    "dataset/text_math": r"--config.dataset=path/to/data \((\S+)\)$",
}


@pytest.mark.parametrize(("module", "load"), [(presets, load_prompts), (vlm, load_questions)])
def test_data_of_a_preset_is_here_or_told_how_to_get(monkeypatch, tmp_path, module, load):
    """In a folder without the repo, where a name of ours looks like one of the hub."""
    monkeypatch.chdir(tmp_path)
    sets = {s.path for n in module.PRESETS for s in parse_sources(module.get_config(n).dataset)}
    for path in sets - {"hiyouga/geometry3k"}:
        name = os.path.relpath(path, ROOT) if os.path.isabs(path) else path
        if name not in WAYS:
            assert load(path, "train" if load is load_prompts else 0)
            continue
        with pytest.raises(UserError, match=f"^dataset='{name}' does not ship") as told:
            load(path, "train" if load is load_prompts else 0)
        [way] = re.findall(WAYS[name], str(told.value))
        assert os.path.exists(ROOT / way) == (name != "dataset/pickscore")


def test_the_doctor_says_what_there_is(flow_grpo, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
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
    assert rows["hub"][2].startswith("http://127.0.0.1:9 does not answer (ConnectionError); check")
    assert rows["hub login"][2].startswith("none; hf auth login, or set HF_TOKEN")
    missing = sum(not line.startswith("ok") for line in lines)
    assert verdict == f"training can run; {missing} optional things are missing: see what is not ok"


def test_the_doctor_has_a_remedy_for_what_is_missing():
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
def test_the_doctor_says_what_a_gpu_can_do(monkeypatch, able, formats):
    known = {"device_count": 1, "get_device_name": "A card", "get_device_capability": able}
    for name, value in {**known, "mem_get_info": (60 * 2**30, 80 * 2**30)}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    [found] = doctor.gpus()
    kind = f"A card, compute capability {able[0]}.{able[1]}"
    assert found == ("ok", "GPU 0", f"{kind}, 60 of 80 GiB free, {formats}", "")


def test_the_doctor_tells_a_machine_without_a_gpu_from_one_that_torch_cannot_use(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    [found] = doctor.gpus()
    assert found[:2] == ("ok", "GPU")
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    [found] = doctor.gpus()
    assert found[:3] == ("unused", "GPU", "one is there, and torch cannot use it")
    assert found.remedy
    monkeypatch.setitem(sys.modules, "torch", None)
    [broken] = doctor.gpus()
    assert broken.state == "broken"
    assert doctor.verdict([found, broken]) == "training cannot run: mend torch first"
    assert doctor.verdict([found]).startswith("training can run; 1 optional thing is missing")


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


def test_our_prompts_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = check(get_config())  # as a config file of one's own has it
    assert config.dataset == str(ROOT / "dataset/ocr")
