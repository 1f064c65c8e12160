"""Prompts in GenEval's layout, and the script that makes them."""

import json
from pathlib import Path

import pytest
from runner import run_script
from tiny.prompts import parse_scene

from flow_grpo.rewards.scorers.geneval.rules import COLOURS, NAMES, TAGS, parse_task

SCRIPT = "dataset/geneval/make_prompts.py"


def rows_of(folder: Path) -> dict[str, list[dict]]:
    return {
        path.name.removesuffix("_metadata.jsonl"): [json.loads(line) for line in path.open()]
        for path in folder.glob("*.jsonl")
    }


@pytest.fixture(scope="module", params=["coco", "scenes"])
def made(request, tmp_path_factory) -> dict[str, list[dict]]:
    folder = tmp_path_factory.mktemp("made") / request.param
    done = run_script(SCRIPT, request.param, folder, "--size", "600")
    assert done.returncode == 0, done.stderr
    return rows_of(folder)


def pair(row: dict) -> frozenset | None:
    things = [(each["class"], each.get("color")) for each in row["include"]]
    if row["tag"] in ("two_object", "position", "color_attr") and row["prompt"].startswith(
        "a photo"
    ):
        return frozenset(name for name, _ in things)
    return frozenset(things) if len(things) == 2 else None


def test_training_and_testing_share_no_prompt_and_no_pair(made):
    train, test = made["train"], made["test"]
    assert (len(train), len(test)) == (540, 60)
    assert len({row["prompt"] for row in train + test}) == 600
    pairs = [{pair(row) for row in rows} - {None} for rows in (train, test)]
    assert pairs[0]
    assert pairs[1]
    assert not pairs[0] & pairs[1]


def test_each_row_asks_for_something_that_can_be_found(made):
    for rows in made.values():
        for row in rows:
            task = parse_task(row)
            assert task.tag in TAGS
            if row["prompt"].startswith("a photo"):
                assert {wanted.name for wanted in task.include} <= set(NAMES)
                assert task.coloured <= set(NAMES)
                assert {wanted.colour for wanted in task.include} <= {None, *COLOURS}
            else:
                assert parse_scene(row["prompt"]) is not None, row["prompt"]


def test_unseen_things_are_not_in_training(made):
    is_coco = made["train"][0]["prompt"].startswith("a photo")
    assert ("test_unseen" in made) == is_coco
    if not is_coco:
        return
    classes = {
        name: {each["class"] for row in rows for each in row["include"]}
        for name, rows in made.items()
    }
    assert 10 < len(classes["test_unseen"]) <= 20
    assert not classes["test_unseen"] & (classes["train"] | classes["test"])


def test_a_seed_makes_the_same_prompts_and_nothing_is_overwritten(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        done = run_script(SCRIPT, "scenes", tmp_path / name, "--size", "100", "--seed", str(seed))
        assert done.returncode == 0, done.stderr
    a, b, c = (rows_of(tmp_path / name) for name in "abc")
    assert a == b
    assert a != c
    again = run_script(SCRIPT, "coco", tmp_path / "a")
    assert again.returncode == 2
    assert "is there already" in again.stderr
    assert len(again.stderr.splitlines()) == 1
    assert rows_of(tmp_path / "a") == a


def test_the_shipped_scenes_are_what_the_script_makes(tmp_path):
    done = run_script(SCRIPT, "scenes", tmp_path / "scenes", "--size", "1920")
    assert done.returncode == 0, done.stderr
    assert rows_of(tmp_path / "scenes") == rows_of(Path("dataset/scenes"))
