"""docs/architecture.md and its picture are those of the code."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "docs"))
from make_architecture import PAGE, PICTURE, ROOMS, arrows, drawn, floors, room, ways  # noqa: E402

TEXT = PAGE.read_text("utf-8")
STOPS = [(way, stop) for way, stops in ways(TEXT).items() for stop in stops]
# who may import whom, beside maths, basics and config, which are below all
BELOW = {
    "speed": set(),
    "data": set(),
    "rewards": {"speed"},
    "show": {"rewards", "data"},
    "run": {"show", "rewards", "data", "speed"},
    "draw": {"run", "show", "rewards", "data", "speed"},
    "answer": {"run", "show", "rewards", "data", "speed"},
    "demo": {"draw", "run", "show", "rewards", "data"},
    "reward_server": {"rewards"},
}


def test_every_room_imports_from_rooms_below_alone():
    imported = arrows()
    assert imported.keys() == ROOMS.keys()
    assert not imported["maths"]
    assert not imported["basics"]
    assert imported["config"] <= {"basics"}
    for name, allowed in BELOW.items():
        assert imported[name] <= {*allowed, "maths", "basics", "config"}, name
    assert floors(imported)[0] == ["scripts"]


def test_there_is_no_other_room():
    rooms = {room(f"flow_grpo.{path.stem}") for path in (ROOT / "flow_grpo").iterdir()}
    assert {*rooms, "scripts", "reward_server"} - {None, "__init__", "__pycache__"} <= {*ROOMS}


@pytest.mark.parametrize(("way", "stop"), STOPS)
def test_every_stop_is_in_the_code(way, stop):
    names = set()
    for node in ast.parse((ROOT / stop.file).read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names |= {
                node.name,
                *(f"{node.name}.{each.name}" for each in node.body if hasattr(each, "name")),
            }
    assert stop.function in names


def test_the_picture_is_up_to_date():
    """If not: python docs/make_architecture.py"""
    assert PICTURE.read_text("utf-8") == drawn(arrows(), ways(TEXT))
