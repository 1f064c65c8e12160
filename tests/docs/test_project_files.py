"""Development files: containers, workflows, hooks, and lower bounds of requirements."""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import mutants
import pytest
import yaml
from packaging.requirements import Requirement
from runner import ROOT

from flow_grpo.diffusion.algorithms import ALGORITHMS

DOCKERFILES = ["Dockerfile", "reward_server/Dockerfile"]
UNTESTED_EXTRAS = {"bitsandbytes"}


def text_of(name: str) -> str:
    text = (ROOT / name).read_text("utf-8")
    return re.search(r"^```dockerfile\n(.*?)^```$", text, re.M | re.S)[1] if ".md" in name else text


@pytest.mark.parametrize("name", [*DOCKERFILES, "docs/docker.md"])
def test_dockerfiles_pass_hadolint(name):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = [shutil.which("hadolint", path=path), "--config", ".hadolint.yaml", "-"]
    done = subprocess.run(command, cwd=ROOT, input=text_of(name), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", DOCKERFILES)
def test_a_container_pins_its_base_image_copies_its_files_and_is_not_root(name):
    text = (ROOT / name).read_text().replace("\\\n", " ")
    lines = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    [base] = [line[1] for line in lines if line[0] == "FROM"]
    assert re.search(r":\d+\.\d+\.\d+-", base)
    copied = [part for line in lines if line[0] == "COPY" for part in line[1:-1]]
    shared = re.search(r"^SHARED = (\(.+\))$", text_of("setup.py"), re.M)[1]
    assert {"setup.py", "flow_grpo", "reward_server", *ast.literal_eval(shared)} <= set(copied)
    ignored = text_of(".dockerignore").splitlines()
    assert not {part.partition("/")[0] for part in copied} & {*ignored}
    assert ignored.index("docs/*") < ignored.index("!docs/benchmarks")
    assert all((ROOT / part).exists() for part in copied)
    assert [line[1] for line in lines if line[0] == "USER"] == ["10001"]


def test_the_workflow_runs_the_readmes_two_commands():
    readme = (ROOT / "README.md").read_text("utf-8")
    commands = re.findall(r"^    (bash scripts/\S+\.sh) +#", readme, re.M)
    workflow = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())
    steps = workflow["jobs"]["tests"]["steps"]
    assert [step["run"] for step in steps if "run" in step] == commands
    assert len(commands) == 2


def test_pre_commit_hooks_include_the_linters():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    entries = " ".join(hook["entry"] for hook in hooks)
    for command in ("ruff check", "ruff format", "hadolint"):
        assert command in entries


def test_files_with_mutants_and_their_tests_exist():
    for name, tests in mutants.TESTS.items():
        paths = [f"flow_grpo/{name}.py", *map(mutants.find_test, tests)]
        assert tests
        assert [path for path in paths if not (ROOT / path).is_file()] == []
    algorithms = {f"diffusion/algorithms/{name}" for name in ALGORITHMS}
    assert algorithms <= set(mutants.TESTS)


def test_installed_versions_satisfy_the_requirements():
    """No requirement demands a newer version than the one that the tests run with."""
    strings = [
        node.value
        for node in ast.walk(ast.parse((ROOT / "setup.py").read_text("utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and ">=" in node.value
    ]
    checked = set()
    for requirement in map(Requirement, (s for s in strings if s[0].isalpha())):
        if requirement.name in UNTESTED_EXTRAS:
            continue
        try:
            installed = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            continue  # of an extra that the tests do not need
        assert requirement.specifier.contains(installed), (requirement, installed)
        checked.add(requirement.name)
    assert {"torch", "diffusers", "transformers", "peft", "accelerate", "numpy"} <= checked
