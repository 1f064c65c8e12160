"""Shell scripts: --help only prints, and what they do not know is refused before they install."""

import os
import subprocess
from pathlib import Path

import pytest
from runner import ROOT

SCRIPTS = sorted(
    path
    for ending in ("*.sh", "*.sbatch")
    for path in (ROOT / "scripts").rglob(ending)
    if path.name != "start.sh"  # sourced by the others beside it
)


@pytest.fixture
def bash(tmp_path):
    """Runs a script where every Python leaves a mark, and environments would go to a new folder."""
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


def test_the_list_is_whole():
    assert len(SCRIPTS) >= 9
    assert {"quickstart.sh", "test.sh", "venv.sh", "main.sh", "train.sbatch"} <= {
        path.name for path in SCRIPTS
    }


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--confg.seed=1"], "unknown argument '--confg.seed=1'"),
        (["tiny_ocr", "tiny_awm"], "unknown argument 'tiny_awm'"),
        (["--config.seed", "1"], "unknown argument '--config.seed'"),
        (["--config=config/base.py"], "unknown argument '--config=config/base.py'"),
        (["--config.run_name=mine"], "--config.run_name=mine: the quickstart names its own run"),
    ],
)
def test_the_quickstart_refuses_what_it_does_not_know(bash, arguments, told):
    done = bash(ROOT / "scripts/quickstart.sh", *arguments)
    assert done.returncode == 2
    usage = "usage: bash scripts/quickstart.sh [PRESET] [--config.FIELD=VALUE ...]"
    assert done.stderr == f"error: {told}; {usage}\n"
    assert not done.stdout


def test_the_environment_takes_no_arguments(bash):
    done = bash(ROOT / "scripts/venv.sh", "ocr")
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown argument 'ocr'; usage: ")
    assert done.stderr.count("\n") == 1
