"""Mutation tests of the pure files: every small change of the code should fail a unit test.

python scripts/mutants.py [flow_grpo/sde.py ...]

Runs mutmut on each file with the unit tests of that file and lists the mutants that live, but for
those in tests/equivalent_mutants.toml. Exits with 1 if less than 95 % of the others are killed, or
if that list names a mutant that does not live any more. docs/testing.md says more.
"""

import ast
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build" / "mutants"
EQUIVALENT = ROOT / "tests" / "equivalent_mutants.toml"
ENOUGH = 0.95
KILLED = ("killed", "timeout", "segfault")
FORWARD = ("forward_methods", "forward_kl", "method_gradients")
PREFERENCE = ("preference_methods", "method_gradients")
TRAJECTORY = ("trajectory_methods", "method_gradients")
# the unit tests of each file: tests/test_<name>.py
TESTS: dict[str, tuple[str, ...]] = {
    "sde": ("sde", "dpm2"),
    "advantages": ("advantages",),
    "losses": ("losses",),
    "windows": ("windows",),
    "draw/algorithms/base": (
        "grpo",
        "algorithm_settings",
        "not_asked",
        *TRAJECTORY,
        *PREFERENCE[:1],
    ),
    "draw/algorithms/trajectory": ("grpo", "gradients", "algorithm_settings", *TRAJECTORY),
    "draw/algorithms/forward": (*FORWARD, "algorithm_settings"),
    "draw/algorithms/grpo": ("grpo", "gradients", *TRAJECTORY),
    "draw/algorithms/grpo_guard": (*TRAJECTORY, "algorithm_settings"),
    "draw/algorithms/dppo": (*TRAJECTORY, "algorithm_settings"),
    "draw/algorithms/mix": (*TRAJECTORY, "algorithm_settings"),
    "draw/algorithms/nft": FORWARD,
    "draw/algorithms/awm": FORWARD,
    "draw/algorithms/ram": FORWARD,
    "draw/algorithms/leap": ("leap", "method_gradients"),
    "draw/algorithms/dgpo": (*PREFERENCE, "forward_methods"),
    "draw/algorithms/dpo": PREFERENCE,
    "draw/algorithms/sft": PREFERENCE,
    "draw/algorithms/rwr": PREFERENCE,
    "draw/algorithms/opd": ("opd", "method_gradients", "algorithm_settings"),
    "data/prompts": ("data", "data_files", "data_sets", "data_tables"),
    "draw/rollout": ("rollout", "dpm2"),
    "run/metrics": ("metrics", "grpo", "not_asked", "algorithm_settings"),
    "draw/plan": ("plan", "judges"),
    "run/snapshot": ("snapshot", "ema"),
    "run/checkpoint": ("checkpoint",),
    "disk": ("disk",),
    "answer/losses/base": ("answers_losses",),
    "answer/losses/cispo": ("answers_losses",),
    "answer/losses/clip": ("answers_losses",),
    "answer/losses/gspo": ("answers_losses",),
    "answer/credit": ("answers_credit", "answers_losses"),
}
# torch does not survive a fork once it has started its threads, so a process that has only
# imported it forks the others. Most of the time of a short run is pytest's collecting garbage, to
# warn of exceptions in it.
SETTINGS = """
[tool.mutmut]
source_paths = ["flow_grpo"]
only_mutate = ["flow_grpo/{name}.py"]
also_copy = ["scripts", "assets", "dataset", "reward_server", "docs", "conftest.py"]
pytest_add_cli_args_test_selection = {tests}
pytest_add_cli_args = ["-p", "no:cacheprovider", "-p", "no:unraisableexception"]
process_isolation = "forkserver"
use_git_change_detection = false
"""
CONFTEST = """
import hypothesis
import pytest

if not hasattr(pytest.Item, "_nodeid"):  # pytest 9.2 has no such attribute, mutmut 3.8 reads it
    pytest.Item._nodeid = property(lambda item: item.nodeid)

# the same few examples for every mutant, and no time spent on making a failing one smaller
phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
hypothesis.settings.register_profile(
    "mutants", phases=phases, max_examples=20, derandomize=True, database=None, deadline=None
)
hypothesis.settings.load_profile("mutants")


# the quick ones first: most mutants need no other
def pytest_collection_modifyitems(items):
    def slow(item):
        runs = {"tiny_sd3", "make_session"}.intersection(item.fixturenames)
        return bool(runs), hasattr(item.obj, "hypothesis")

    items.sort(key=slow)
"""


class Mutant(NamedTuple):
    """Named by what it changes, which stays true when lines move."""

    function: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"  {self.function}\n    - {self.old}\n    + {self.new}"


def main(files: list[str]) -> int:
    names = [file.removeprefix("flow_grpo/").removesuffix(".py") for file in files] or list(TESTS)
    if unknown := [name for name in names if name not in TESTS]:
        print(f"error: {', '.join(unknown)} is none of {', '.join(TESTS)}", file=sys.stderr)
        return 2
    listed = read_equivalent()
    good, rows = True, [("file", "mutants", "killed", "equivalent", "left", "killed of the rest")]
    for name in names:
        print(f"{name}: running", flush=True)
        total, alive = survivors(name)
        equivalent = {mutant for mutant in listed if mutant.function.startswith(f"{dotted(name)}.")}
        left = [mutant for mutant in alive if mutant not in equivalent]
        gone = sorted(equivalent.difference(alive))
        for title, mutants in (("alive", left), ("listed, but killed or not there", gone)):
            if mutants:
                print(f"{name}, {title}:", *mutants, sep="\n")
        killed, same = total - len(alive), len(alive) - len(left)
        share = killed / (total - same)
        good = good and share >= ENOUGH and not gone
        rows.append((f"{name}.py", total, killed, same, len(left), f"{share:.1%}"))
    print(*("{:<20}{:>9}{:>9}{:>12}{:>6}{:>20}".format(*row) for row in rows), sep="\n")
    return 0 if good else 1


def dotted(name: str) -> str:
    return name.replace("/", ".")


def read_equivalent() -> set[Mutant]:
    entries = tomllib.loads(EQUIVALENT.read_text("utf-8"))["equivalent"]
    return {Mutant(e["function"], *change) for e in entries for change in e["changes"]}


def survivors(name: str) -> tuple[int, list[Mutant]]:
    """How many mutants flow_grpo/<name>.py has, and those that pass its unit tests."""
    folder = WORK / name
    shutil.rmtree(folder, ignore_errors=True)
    for part in ("flow_grpo", "scripts", "tests", "assets", "dataset", "reward_server", "docs"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    source = folder / "flow_grpo" / f"{name}.py"
    source.write_text(without_decorators(source.read_text("utf-8")), "utf-8")
    tests = [f"tests/test_{test}.py" for test in TESTS[name]]
    settings = SETTINGS.format(name=name, tests=json.dumps(tests))
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    (folder / "pyproject.toml").write_text(project + settings, "utf-8")
    (folder / "conftest.py").write_text(CONFTEST, "utf-8")
    mutmut(folder, "run", "--max-children", str(os.cpu_count()))
    results = [line.split(": ") for line in mutmut(folder, "results", "--all", "true")]
    alive = [mutant.strip() for mutant, status in results if status not in KILLED]
    return len(results), [described(folder, mutant) for mutant in alive]


def mutmut(folder: Path, *arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "mutmut", *arguments],
        cwd=folder,
        # a mutant for each core, and no plugins to load for each
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{done.stdout[-5000:]}\nerror: mutmut {arguments[0]} failed in {folder}")
    return done.stdout.splitlines()


def described(folder: Path, mutant: str) -> Mutant:
    """mutmut's names: flow_grpo.sde.x_sde_step__mutmut_3, flow_grpo.plan.xǁBatchPlanǁgroups__..."""
    path, _, mangled = mutant.rpartition(".")
    function = mangled.rpartition("__mutmut_")[0][2:].replace("ǁ", ".")
    diff = mutmut(folder, "show", mutant)
    old, new = (
        " ".join(line[1:].strip() for line in diff if line[:1] == sign and line[:3] != 3 * sign)
        for sign in "-+"
    )
    return Mutant(f"{path.removeprefix('flow_grpo.')}.{function}", old, new)


def without_decorators(source: str) -> str:
    """mutmut leaves decorated functions alone, so `@f` above `def g` becomes `g = f(g)` below it.

    Methods of classes and functions are the only kinds with decorators in the pure files.
    """
    lines = source.splitlines()
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)]
    for node in sorted(functions, key=lambda node: node.lineno, reverse=True):
        for decorator in node.decorator_list:  # the lowest goes first
            call = f"{node.name} = {ast.unparse(decorator)}({node.name})"
            lines.insert(node.end_lineno, " " * node.col_offset + call)
        del lines[node.lineno - 1 - len(node.decorator_list) : node.lineno - 1]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
