"""The pages on methods say what the code says; every preset can be built."""

import ast
import csv
import inspect
import json
import re
import textwrap
from dataclasses import asdict
from pathlib import Path

import pytest
from methods import METHODS

from flow_grpo.draw.algorithms import ALGORITHMS, Algorithm
from flow_grpo.draw.algorithms.forward import ForwardProcess, ForwardSettings
from flow_grpo.draw.algorithms.trajectory import TrajectoryAlgorithm, TrajectorySettings
from flow_grpo.draw.check import check, unusual
from flow_grpo.draw.models import ModelAdapter
from flow_grpo.draw.presets import PRESETS, SD3, TINY, VARIANTS, get_config
from flow_grpo.draw.session import build_algorithm

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SHARED = {"Trajectory methods": TrajectorySettings, "Forward-process methods": ForwardSettings}


def text(name: str) -> str:
    return (DOCS / name).read_text("utf-8")


def section(heading: str) -> str:
    """Of docs/algorithms.md, up to the next heading."""
    [part] = [
        p
        for p in re.split(r"^#+ ", text("algorithms.md"), flags=re.M)
        if p.startswith(heading + "\n")
    ]
    return part


def settings_in(heading: str) -> dict:
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \| .+ \|$", section(heading), re.M)
    return {name: ast.literal_eval(default) for name, default in rows}


@pytest.mark.parametrize("heading", [*SHARED, *METHODS])
def test_settings_are_listed_with_their_defaults(heading):
    """Of a method those that are not its parent's."""
    settings = SHARED.get(heading) or ALGORITHMS[heading].Settings
    own = settings in SHARED.values() and heading not in SHARED
    names = {} if own else settings.__annotations__
    defaults = asdict(settings())
    assert settings_in(heading) == {name: defaults[name] for name in defaults if name in names}


@pytest.mark.parametrize("name", METHODS)
def test_papers_are_those_of_the_files(name):
    source = (ROOT / "flow_grpo" / "draw" / "algorithms" / f"{name}.py").read_text("utf-8")
    number = re.compile(r"arXiv\s(\d{4}\.\d{5})")
    assert number.findall(section(name)) == number.findall(source)
    assert all(n in text("papers.md") for n in number.findall(source))


@pytest.mark.parametrize("name", METHODS)
def test_scores_of_the_page_are_those_of_the_runs(name):
    """Of seeds 1, 2 and 3, at so many thousand passes."""
    preset = "tiny_ocr" if name == "grpo" else f"tiny_{name}"
    told = re.findall(r"([.\d]+), ([.\d]+), ([.\d]+) at (\d+) k passes", section(name))
    elsewhere = re.search(r"Not measured yet|In \[the table\]", section(name))
    assert told or elsewhere or name == "opd"  # on both tasks at once
    for *scores, passes in told:
        for seed, score in enumerate(scores, 1):
            lines = (DOCS / f"results/methods_h200/{preset}-{seed}.jsonl").read_text().splitlines()
            rows = [row for row in map(json.loads, lines) if row["epoch"]]
            [row] = [r for r in rows if round(r["perf/passes"] / 1000) == int(passes)]
            assert row["eval/avg"] == pytest.approx(float(score), abs=6e-4)


@pytest.mark.parametrize("task", ["signs", "scenes"])
def test_the_table_of_the_page_is_that_of_its_runs(task):
    """Rates, and means of the last evaluations."""
    with (DOCS / "results/fair_h200.csv").open(encoding="utf-8") as file:
        runs = [row for row in csv.DictReader(file) if row["task"] == task and row["seed"] != "0"]
    page = section("Measured on the small model")
    rows = re.findall(r"^\| `(\w+)`(?:, branched \(`(\w+)`\))? \|(.+)\|$", page, re.M)
    assert len(rows) == len({row["method"] for row in runs}) == 12
    for name, preset, cells in rows:
        preset = preset or ("tiny_ocr" if name == "grpo" else f"tiny_{name}")
        rate, after = [c.strip() for c in cells.split("|")][0 if task == "signs" else 5 :][:2]
        own = [row for row in runs if row["method"] == preset]
        assert {float(row["rate"]) for row in own} == {float(rate.rstrip("*"))}
        last = {row["seed"]: float(row["reward"]) for row in own}
        assert float(after.split()[0]) == pytest.approx(sum(last.values()) / 3, abs=0.0051)


@pytest.mark.parametrize(
    ("said", "runs"),
    [
        (r"`grpo` up to", ["health/healthy", "methods_h200/*ocr*", "tiny_ocr_*cpu*", "*_seed?"]),
        (r"with guidance", ["*_guided_*"]),
        (r"`sample.async_depth=1`", ["async_h200/depth1-*"]),
        (r"`grpo_guard` up to", ["methods_h200/*guard*"]),
    ],
)
def test_clip_shares_of_the_page_are_those_of_the_runs(said, runs):
    """The largest of any epoch, on either side; runs with guidance are a row of their own."""
    [told] = re.findall(rf"{said} ([.\d]+) %", text("metrics.md"))
    paths = {path for run in runs for path in (DOCS / "results").glob(f"{run}.jsonl")}
    paths = [path for path in paths if ("guided" in path.name) == ("guidance" in said)]
    rows = [json.loads(line) for path in paths for line in path.read_text("utf-8").splitlines()]
    shares = [row.get(f"train/clip_{side}") or 0.0 for row in rows for side in ("low", "high")]
    assert f"{100 * max(shares):.1f}" == told


def test_functions_that_the_page_names_exist():
    page = text("algorithms.md")
    for name in METHODS:
        for method in re.findall(rf"\b{name}\.py, (\w+)\.(\w+)", page):
            assert method[0] == ALGORITHMS[name].__name__
            assert hasattr(ALGORITHMS[name], method[1])
    for file, function in re.findall(r"\b(\w+)\.py, (?!line\b)([a-z_]\w*)\b(?!\.)", page):
        folders = (ROOT / "flow_grpo", ROOT / "flow_grpo" / "draw" / "algorithms")
        [path] = [p for f in folders if (p := f / f"{file}.py").exists()]
        assert f"def {function}(" in path.read_text("utf-8")


def test_presets_that_are_named_exist():
    known = {*PRESETS, "tiny_"}
    for page in ("algorithms.md", "papers.md", "configuration.md"):
        assert {*re.findall(r"\btiny_\w*", text(page))} <= known
    endings = {*VARIANTS}
    assert set(re.findall(r"^\| `_(\w+)` \|", text("configuration.md"), re.M)) == endings
    assert {*re.findall(r"`\*_(\w+)`", text("papers.md"))} == endings
    for preset in (*TINY, *SD3):
        assert f"`{preset}`" in text("configuration.md")


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_sound(name):
    config = get_config(name)
    check(config)
    assert unusual(config) == []
    assert build_algorithm(config).name == config.algorithm


@pytest.mark.parametrize(
    ("page", "heading", "classes"),
    [
        (
            "algorithms.md",
            "How to add a method",
            (ForwardProcess, TrajectoryAlgorithm, Algorithm),
        ),
        ("models.md", "How to add a model", (ModelAdapter,)),
    ],
)
def test_signatures_of_the_page_are_those_of_the_code(page, heading, classes):
    told = re.findall(r"^    (def (\w+)\(.*)$", text(page).partition(f"## {heading}\n")[2], re.M)
    told = [(line, name) for line, name in told if not line.endswith((":", "("))]  # an example's
    assert len(told) > 8
    for line, name in told:
        # the base's, which the others inherit; what they have beside is theirs
        own = next(vars(kind)[name] for kind in reversed(classes) if name in vars(kind))
        source = inspect.getsource(getattr(own, "__func__", own))
        [code] = ast.parse(textwrap.dedent(source)).body
        [said] = ast.parse(f"{line}: ...").body
        for part in ("args", "returns"):
            assert ast.dump(getattr(said, part)) == ast.dump(getattr(code, part)), line


def test_one_place_says_which_method_to_start_with():
    """Sections of methods say when to take them, not that they come first; and the learning rates
    that were tried on the small model are offered for that."""
    methods = text("algorithms.md")
    assert not re.findall(r"\*\*When\.\*\* First", methods)
    [start] = re.findall(r"In short: (.*?)\n\n", methods, re.S)
    assert start.index("on the small model") < start.index("3e-3") < start.index("full-size")
