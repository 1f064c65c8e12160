"""docs/architecture.md and its figure match the code."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs"))
from make_architecture import (  # noqa: E402
    FIGURE,
    PACKAGES,
    PAGE,
    data_flows,
    layers,
    package_imports,
    package_of,
    render_svg,
)

TEXT = PAGE.read_text("utf-8")
STOPS = [(way, stop) for way, stops in data_flows(TEXT).items() for stop in stops]
# packages each may import, besides maths, basics and config, which are at the bottom
BELOW = {
    "perf": set(),
    "data": set(),
    "rewards": {"perf"},
    "report": {"rewards", "data"},
    "training": {"report", "rewards", "data", "perf"},
    "benchmarks": {"report", "data"},
    "diffusion": {"training", "benchmarks", "report", "rewards", "data", "perf"},
    "vlm": {"training", "benchmarks", "report", "rewards", "data", "perf"},
    "demo": {"diffusion", "training", "report", "rewards", "data"},
    "votes": {"diffusion", "training", "report", "rewards", "data"},
    "reward_server": {"rewards"},
}


def test_packages_import_only_from_lower_layers():
    imported = package_imports()
    assert imported.keys() == PACKAGES.keys()
    assert not imported["maths"]
    assert not imported["basics"]
    assert imported["config"] <= {"basics"}
    for name, allowed in BELOW.items():
        assert imported[name] <= {*allowed, "maths", "basics", "config"}, name
    assert layers(imported)[0] == ["scripts"]


def test_every_package_is_listed():
    packages = {package_of(f"flow_grpo.{path.stem}") for path in (ROOT / "flow_grpo").iterdir()}
    assert {*packages, "scripts", "reward_server"} - {None, "__pycache__"} <= {*PACKAGES}


@pytest.mark.parametrize(("way", "stop"), STOPS)
def test_every_function_of_a_data_flow_exists(way, stop):
    names = set()
    for node in ast.parse((ROOT / stop.file).read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names |= {
                node.name,
                *(f"{node.name}.{each.name}" for each in node.body if hasattr(each, "name")),
            }
    assert stop.function in names


def test_the_figure_is_up_to_date():
    """If not: python docs/make_architecture.py"""
    assert FIGURE.read_text("utf-8") == render_svg(package_imports(), data_flows(TEXT))
