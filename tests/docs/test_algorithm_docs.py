"""The pages on methods agree with the code, and every preset can be built."""

import ast
import csv
import inspect
import json
import re
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path

import pytest
from algorithm_fixtures import METHODS

from flow_grpo.diffusion.algorithms import ALGORITHMS, Algorithm
from flow_grpo.diffusion.algorithms.forward_process import ForwardProcessAlgorithm
from flow_grpo.diffusion.algorithms.trajectory import TrajectoryAlgorithm
from flow_grpo.diffusion.config_checks import check_config, collect_config_warnings
from flow_grpo.diffusion.models import ModelAdapter
from flow_grpo.diffusion.presets import PRESETS, SD3, TINY, VARIANTS, get_config
from flow_grpo.diffusion.session import build_algorithm
from flow_grpo.vlm.presets import PRESETS as VLM_PRESETS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
sys.path.append(str(DOCS))
import make_methods  # noqa: E402

PAGES = sorted(f"methods/{path.name}" for path in (DOCS / "methods").glob("*.md"))


def text(name: str) -> str:
    return (DOCS / name).read_text("utf-8")


def page_of(method: str) -> str:
    return text(f"methods/{'baselines' if method in ('sft', 'rwr') else method}.md")


@pytest.mark.parametrize("name", PAGES)
def test_generated_parts_are_up_to_date(name):
    """Settings, results and comparisons. If not: python docs/make_methods.py"""
    assert make_methods.page(text(name)) == text(name)


@pytest.mark.parametrize("preset", make_methods.LABELS)
def test_curves_are_up_to_date(preset):
    """If not: python docs/make_methods.py"""
    assert text(f"images/methods/{preset}.svg") == make_methods.curve(preset)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_its_settings_and_results(name):
    page, preset = page_of(name), "tiny_ocr" if name == "grpo" else f"tiny_{name}"
    assert bool(make_methods.own_settings(name)) == (f"<!-- settings {name} -->" in page)
    results = (f"<!-- results {preset} -->", "<!-- copied compare_opd -->", "Not yet measured")
    assert any(each in page for each in results)


@pytest.mark.parametrize("kind", make_methods.SHARED)
def test_shared_settings_are_listed(kind):
    assert f"<!-- settings {kind} -->" in text(f"methods/{kind}.md")


def test_a_settings_table_has_names_defaults_and_descriptions():
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \| .+ \|$", make_methods.settings_table("nft"), re.M)
    defaults = asdict(ALGORITHMS["nft"].Settings())
    names = make_methods.own_settings("nft")
    assert {name: ast.literal_eval(value) for name, value in rows} == {
        n: defaults[n] for n in names
    }


@pytest.mark.parametrize("name", METHODS)
def test_papers_of_a_page_are_those_of_the_source_file(name):
    source = (ROOT / "flow_grpo" / "diffusion" / "algorithms" / f"{name}.py").read_text("utf-8")
    number = re.compile(r"arXiv\s(\d{4}\.\d{5})")
    assert number.findall(page_of(name)) == number.findall(source)
    assert all(n in text("papers.md") for n in number.findall(source))


@pytest.mark.parametrize("task", ["signs", "scenes"])
def test_the_comparison_table_agrees_with_its_runs(task):
    """Compare learning rates and mean final rewards with the log of every run."""
    with (DOCS / "results/fair_h200.csv").open(encoding="utf-8") as file:
        runs = [row for row in csv.DictReader(file) if row["task"] == task and row["seed"] != "0"]
    rows = make_methods.read_results(make_methods.TUNED)[task]
    assert rows.keys() == make_methods.LABELS.keys() == {row["method"] for row in runs}
    for preset, row in rows.items():
        method_runs = [each for each in runs if each["method"] == preset]
        rate, after = row["learning rate"], row[make_methods.REWARD].partition(" -> ")[2]
        assert {float(each["rate"]) for each in method_runs} == {float(rate.rstrip("*"))}
        last = {each["seed"]: float(each["reward"]) for each in method_runs}
        assert float(after.split()[0]) == pytest.approx(sum(last.values()) / 3, abs=0.0051)


@pytest.mark.parametrize(
    ("pattern", "runs"),
    [
        (r"`grpo` up to", ["health/healthy", "methods_h200/*ocr*", "tiny_[!e]*_seed?"]),
        (r"with guidance", ["*_guided_*"]),
        (r"`sample.async_depth=1`", ["async_h200/depth1-*"]),
        (r"`grpo_guard` up to", ["methods_h200/*guard*"]),
    ],
)
def test_clip_fractions_of_the_page_agree_with_the_runs(pattern, runs):
    """Compare the largest fraction of any epoch on either side; guided runs are a separate row."""
    [fraction] = re.findall(rf"{pattern} ([.\d]+) %", text("metrics.md"))
    paths = {path for run in runs for path in (DOCS / "results").glob(f"{run}.jsonl")}
    paths = [path for path in paths if ("guided" in path.name) == ("guidance" in pattern)]
    rows = [json.loads(line) for path in paths for line in path.read_text("utf-8").splitlines()]
    fractions = [row.get(f"train/clip_{side}") or 0.0 for row in rows for side in ("low", "high")]
    assert f"{100 * max(fractions):.1f}" == fraction


def test_functions_named_on_the_pages_exist():
    page = "\n".join(map(text, PAGES))
    for name in METHODS:
        for method in re.findall(rf"\b{name}\.py, (\w+)\.(\w+)", page):
            assert method[0] == ALGORITHMS[name].__name__
            assert hasattr(ALGORITHMS[name], method[1])
    for file, function in re.findall(r"\b(\w+)\.py, (?!line\b)([a-z_]\w*)\b(?!\.)", page):
        folders = (ROOT / "flow_grpo", ROOT / "flow_grpo" / "diffusion" / "algorithms")
        [path] = [p for f in folders if (p := f / f"{file}.py").exists()]
        assert f"def {function}(" in path.read_text("utf-8")


def test_presets_named_on_the_pages_exist():
    known = {*PRESETS, *VLM_PRESETS, "tiny_"}
    for page in (*PAGES, "papers.md", "configuration.md"):
        assert {*re.findall(r"\btiny_\w*", text(page))} <= known
    suffixes = {*VARIANTS}
    assert set(re.findall(r"^\| `_(\w+)` \|", text("configuration.md"), re.M)) == suffixes
    assert {*re.findall(r"`\*_(\w+)`", text("papers.md"))} == suffixes
    for preset in (*TINY, *SD3):
        assert f"`{preset}`" in text("configuration.md")


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_built_without_warnings(name):
    config = get_config(name)
    settings = check_config(config)
    lines = collect_config_warnings(settings)
    published = ["grpo.clip_range=0.0001"] if name.startswith("pickscore_ltx2") else []
    assert [line.partition(" ")[0] for line in lines] == published, lines
    assert build_algorithm(settings).name == config.algorithm


@pytest.mark.parametrize(
    ("page", "heading", "classes"),
    [
        (
            "methods/custom.md",
            "Protocol",
            (ForwardProcessAlgorithm, TrajectoryAlgorithm, Algorithm),
        ),
        ("adding_models.md", "Signatures", (ModelAdapter,)),
    ],
)
def test_signatures_of_the_page_agree_with_the_code(page, heading, classes):
    signatures = re.findall(
        r"^    (def (\w+)\(.*)$", text(page).partition(f"## {heading}\n")[2], re.M
    )
    # lines that end in a colon or parenthesis belong to an example
    signatures = [(line, name) for line, name in signatures if not line.endswith((":", "("))]
    assert len(signatures) > 8
    for line, name in signatures:
        # the method of the most general class that defines it
        function = next(vars(kind)[name] for kind in reversed(classes) if name in vars(kind))
        source = inspect.getsource(getattr(function, "__func__", function))
        [code] = ast.parse(textwrap.dedent(source)).body
        [documented] = ast.parse(f"{line}: ...").body
        for part in ("args", "returns"):
            assert ast.dump(getattr(documented, part)) == ast.dump(getattr(code, part)), line


def test_learning_rates_of_small_and_full_size_models_are_separate():
    """Rates tried on the small model are not suggested for full-size models, whose presets have the
    rates of the page."""
    page = text("methods/README.md")
    small, _, rest = page.partition("### Small models\n")[2].partition("### Full-size models\n")
    large = rest.partition("\n### ")[0]
    assert "3e-3" in small
    assert not re.search(r"\b[13]e-3", large)
    rates = re.findall(r"^\| .*?`([\w*]+)`.* \| ([\de-]+) \|$", large, re.M)
    assert len(rates) == 2
    for preset, rate in rates:
        preset = preset.replace("*", "general_ocr_sd3")
        assert get_config(preset).train.learning_rate == float(rate)
