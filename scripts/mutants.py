"""Run mutation tests: every small change of the code should fail a unit test.

python scripts/mutants.py [flow_grpo/sde.py ...]

Runs mutmut on each file with its unit tests and lists the surviving mutants, except those in
tests/equivalent_mutants.toml. Exits with 1 if less than 95 % of the others are killed, or if that
list names a mutant that does not survive any more. See docs/testing.md.
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
MIN_KILLED_SHARE = 0.95
KILLED = ("killed", "timeout", "segfault")
FORWARD = ("forward_methods", "forward_kl", "algorithm_gradients")
PREFERENCE = ("preference_methods", "algorithm_gradients")
TRAJECTORY = ("trajectory_methods", "algorithm_gradients")
# the unit tests of each file: test_<name>.py, anywhere under tests/
TESTS: dict[str, tuple[str, ...]] = {
    "sde": ("sde", "dpm2"),
    "advantages": ("advantages",),
    "losses": ("losses",),
    "windows": ("windows",),
    "diffusion/algorithms/base": (
        "grpo",
        "algorithm_settings",
        "unrequested_rewards",
        *TRAJECTORY,
        *PREFERENCE[:1],
    ),
    "diffusion/algorithms/trajectory": (
        "grpo",
        "objective_gradients",
        "algorithm_settings",
        *TRAJECTORY,
    ),
    "diffusion/algorithms/forward_process": (*FORWARD, "algorithm_settings"),
    "diffusion/algorithms/grpo": ("grpo", "objective_gradients", *TRAJECTORY),
    "diffusion/algorithms/grpo_guard": (*TRAJECTORY, "algorithm_settings"),
    "diffusion/algorithms/dppo": (*TRAJECTORY, "algorithm_settings"),
    "diffusion/algorithms/mix": (*TRAJECTORY, "algorithm_settings"),
    "diffusion/algorithms/nft": FORWARD,
    "diffusion/algorithms/awm": FORWARD,
    "diffusion/algorithms/ram": FORWARD,
    "diffusion/algorithms/leap": ("leap", "algorithm_gradients"),
    "diffusion/algorithms/dgpo": (*PREFERENCE, "forward_methods"),
    "diffusion/algorithms/dpo": PREFERENCE,
    "diffusion/algorithms/ipo": PREFERENCE,
    "diffusion/algorithms/kto": PREFERENCE,
    "diffusion/algorithms/sft": PREFERENCE,
    "diffusion/algorithms/rwr": PREFERENCE,
    "diffusion/algorithms/opd": ("opd", "algorithm_gradients", "algorithm_settings"),
    "data/epoch_batches": ("prompts", "prompt_sets"),
    "data/prompts": ("prompts", "prompt_files", "prompt_sets", "prompt_tables"),
    "diffusion/rollout": ("rollout", "dpm2"),
    "training/metrics": ("metrics", "grpo", "unrequested_rewards", "algorithm_settings"),
    "diffusion/plan": ("batch_plan", "group_judges"),
    "training/snapshot": ("snapshot", "ema"),
    "training/checkpoint": ("checkpoint",),
    "training/checkpoint_writer": ("checkpoint", "power_loss", "saving"),
    "training/state_copies": ("saving",),
    "atomic_io": ("disk",),
    "vlm/losses/base": ("vlm_losses",),
    "vlm/losses/cispo": ("vlm_losses",),
    "vlm/losses/clip": ("vlm_losses",),
    "vlm/losses/gspo": ("vlm_losses",),
    "vlm/advantages": ("credit_assignment", "vlm_losses"),
}
# forkserver: torch does not survive a fork once its threads have started, so a process that has
# only imported it forks the others. no:unraisableexception: its garbage collection takes most of
# the time of a short run.
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

if not hasattr(pytest.Item, "_nodeid"):  # read by mutmut 3.8, missing from pytest 9.2
    pytest.Item._nodeid = property(lambda item: item.nodeid)

# the same few examples for every mutant, without shrinking
phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
hypothesis.settings.register_profile(
    "mutants", phases=phases, max_examples=20, derandomize=True, database=None, deadline=None
)
hypothesis.settings.load_profile("mutants")


# fast tests first: they kill most mutants
def pytest_collection_modifyitems(items):
    def slow(item):
        runs = {"tiny_sd3", "make_session"}.intersection(item.fixturenames)
        return bool(runs), hasattr(item.obj, "hypothesis")

    items.sort(key=slow)
"""


class Mutant(NamedTuple):
    """A change of one function, identified by its text rather than its line numbers."""

    function: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"  {self.function}\n    - {self.old}\n    + {self.new}"


def main(files: list[str]) -> int:
    """Test the mutants of each file and print a table.

    Returns:
        0 if enough are killed and the list of equivalent mutants is up to date, 1 if not, 2 for an
        unknown file.
    """
    names = [file.removeprefix("flow_grpo/").removesuffix(".py") for file in files] or list(TESTS)
    if unknown := [name for name in names if name not in TESTS]:
        known = ", ".join(TESTS)
        print(f"error: unknown file {', '.join(unknown)}; choose from {known}", file=sys.stderr)
        return 2
    listed = read_equivalent()
    passed, rows = (
        True,
        [("file", "mutants", "killed", "equivalent", "alive", "killed of the rest")],
    )
    for name in names:
        print(f"{name}: running", flush=True)
        total, survivors = surviving_mutants(name)
        prefix = f"{name.replace('/', '.')}."
        equivalent = {mutant for mutant in listed if mutant.function.startswith(prefix)}
        alive = [mutant for mutant in survivors if mutant not in equivalent]
        stale = sorted(equivalent.difference(survivors))
        for title, mutants in (("alive", alive), ("listed, but killed or missing", stale)):
            if mutants:
                print(f"{name}, {title}:", *mutants, sep="\n")
        killed, same = total - len(survivors), len(survivors) - len(alive)
        share = killed / (total - same)
        passed = passed and share >= MIN_KILLED_SHARE and not stale
        rows.append((f"{name}.py", total, killed, same, len(alive), f"{share:.1%}"))
    print(*("{:<20}{:>9}{:>9}{:>12}{:>6}{:>20}".format(*row) for row in rows), sep="\n")
    return 0 if passed else 1


def read_equivalent() -> set[Mutant]:
    entries = tomllib.loads(EQUIVALENT.read_text("utf-8"))["equivalent"]
    return {Mutant(e["function"], *change) for e in entries for change in e["changes"]}


def find_test(name: str) -> str:
    """Return the path of test_<name>.py relative to the repository; base names are unique."""
    (path,) = (ROOT / "tests").rglob(f"test_{name}.py")
    return str(path.relative_to(ROOT))


def surviving_mutants(name: str) -> tuple[int, list[Mutant]]:
    """Run mutmut on flow_grpo/<name>.py; return the number of mutants and those that survive.

    It works on a fresh copy of the repository in build/mutants.
    """
    folder = WORK / name
    shutil.rmtree(folder, ignore_errors=True)
    for part in ("flow_grpo", "scripts", "tests", "assets", "dataset", "reward_server", "docs"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    source = folder / "flow_grpo" / f"{name}.py"
    source.write_text(without_decorators(source.read_text("utf-8")), "utf-8")
    tests = [find_test(test) for test in TESTS[name]]
    settings = SETTINGS.format(name=name, tests=json.dumps(tests))
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    (folder / "pyproject.toml").write_text(project + settings, "utf-8")
    (folder / "conftest.py").write_text(CONFTEST, "utf-8")
    mutmut(folder, "run", "--max-children", str(os.cpu_count()))
    results = [line.split(": ") for line in mutmut(folder, "results", "--all", "true")]
    survivors = [mutant.strip() for mutant, status in results if status not in KILLED]
    return len(results), [describe_mutant(folder, mutant) for mutant in survivors]


def mutmut(folder: Path, *arguments: str) -> list[str]:
    """Run mutmut in a folder and return its output lines; exit if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "mutmut", *arguments],
        cwd=folder,
        # one mutant per core, without loading plugins for each
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{done.stdout[-5000:]}\nerror: mutmut {arguments[0]} failed in {folder}")
    return done.stdout.splitlines()


def describe_mutant(folder: Path, mutant: str) -> Mutant:
    """Read a mutant by mutmut's name for it.

    Names look like flow_grpo.sde.x_sde_step__mutmut_3 or flow_grpo.plan.xǁBatchPlanǁgroups__...
    """
    path, _, mangled = mutant.rpartition(".")
    function = mangled.rpartition("__mutmut_")[0][2:].replace("ǁ", ".")
    diff = mutmut(folder, "show", mutant)
    old, new = (
        " ".join(line[1:].strip() for line in diff if line[:1] == sign and line[:3] != 3 * sign)
        for sign in "-+"
    )
    return Mutant(f"{path.removeprefix('flow_grpo.')}.{function}", old, new)


def without_decorators(source: str) -> str:
    """Rewrite `@f` above `def g` as `g = f(g)` below it, as mutmut skips decorated functions."""
    lines = source.splitlines()
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)]
    for node in sorted(functions, key=lambda node: node.lineno, reverse=True):
        for decorator in node.decorator_list:  # each is inserted above those before it
            call = f"{node.name} = {ast.unparse(decorator)}({node.name})"
            lines.insert(node.end_lineno, " " * node.col_offset + call)
        del lines[node.lineno - 1 - len(node.decorator_list) : node.lineno - 1]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
