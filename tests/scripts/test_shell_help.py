"""Shell scripts: --help only prints, and unknown arguments are rejected before installing."""

import os
import subprocess
from pathlib import Path

import pytest
from runner import ROOT

SCRIPTS = sorted(
    path
    for ending in ("*.sh", "*.sbatch")
    for path in (ROOT / "scripts").rglob(ending)
    if path.name != "start.sh"  # sourced by the other scripts
)


@pytest.fixture
def bash(tmp_path):
    """Run scripts with a fake Python that creates a file, and environments in a new directory."""
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    python.write_text(f"#!/usr/bin/env bash\ntouch {tmp_path}/called\n")
    python.chmod(0o755)
    path = f"{python.parent}:{os.environ['PATH']}"
    places = {"PYTHON": str(python), "VENV": str(tmp_path / "venv"), "PATH": path}

    def run(script: Path, *arguments: str) -> subprocess.CompletedProcess:
        done = subprocess.run(
            ["bash", script, *arguments],
            cwd=ROOT,
            env={**os.environ, **places},
            capture_output=True,
            text=True,
            check=False,
        )
        assert os.listdir(tmp_path) == ["bin"]  # nothing was installed or started
        return done

    return run


@pytest.mark.parametrize("option", ["--help", "-h"])
@pytest.mark.parametrize("script", SCRIPTS, ids=[path.name for path in SCRIPTS])
def test_help_only_prints(bash, script, option):
    done = bash(script, option)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert f"{script.relative_to(ROOT)} " in f"{done.stdout} ".replace("\n", " ")
    assert "#!" not in done.stdout


def test_the_list_of_scripts_is_complete():
    assert len(SCRIPTS) >= 9
    assert {"quickstart.sh", "test.sh", "venv.sh", "main.sh", "train.sbatch"} <= {
        path.name for path in SCRIPTS
    }


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--confg.seed=1"], "'--confg.seed=1'"),
        (["tiny_ocr", "tiny_awm"], "'tiny_awm'"),
        (["--config.seed", "1"], "'--config.seed'"),
        (["--config=config/base.py"], "'--config=config/base.py'"),
        (["--config.run_name=mine"], "--config.run_name=mine"),
    ],
)
def test_the_quickstart_rejects_unknown_arguments(bash, arguments, shown):
    done = bash(ROOT / "scripts/quickstart.sh", *arguments)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert shown in line
    assert "usage: bash scripts/quickstart.sh [PRESET] [--config.FIELD=VALUE ...]" in line
    assert not done.stdout


def test_the_environment_takes_no_arguments(bash):
    done = bash(ROOT / "scripts/venv.sh", "ocr")
    assert done.returncode == 2
    assert "'ocr'" in done.stderr
    assert "usage: " in done.stderr
    assert done.stderr.count("\n") == 1
