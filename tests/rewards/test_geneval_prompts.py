"""Prompts in GenEval's layout, and the script that generates them."""

import json
from pathlib import Path

import pytest
from runner import run_script
from tiny.prompts import parse_scene

from flow_grpo.rewards.scorers.geneval.rules import COCO_CLASSES, COLOURS, TAGS, parse_task

SCRIPT = "dataset/geneval/make_prompts.py"


def read_rows(folder: Path) -> dict[str, list[dict]]:
    return {
        path.name.removesuffix("_metadata.jsonl"): [json.loads(line) for line in path.open()]
        for path in folder.glob("*.jsonl")
    }


@pytest.fixture(scope="module", params=["coco", "scenes"])
def generated(request, tmp_path_factory) -> dict[str, list[dict]]:
    folder = tmp_path_factory.mktemp("generated") / request.param
    done = run_script(SCRIPT, request.param, folder, "--size", "600")
    assert done.returncode == 0, done.stderr
    return read_rows(folder)


def pair(row: dict) -> frozenset | None:
    objects = [(each["class"], each.get("color")) for each in row["include"]]
    is_coco = row["prompt"].startswith("a photo")
    if is_coco and row["tag"] in ("two_object", "position", "color_attr"):
        return frozenset(name for name, _ in objects)
    return frozenset(objects) if len(objects) == 2 else None


def test_train_and_test_share_no_prompt_and_no_pair(generated):
    train, test = generated["train"], generated["test"]
    assert (len(train), len(test)) == (540, 60)
    assert len({row["prompt"] for row in train + test}) == 600
    pairs = [{pair(row) for row in rows} - {None} for rows in (train, test)]
    assert pairs[0]
    assert pairs[1]
    assert not pairs[0] & pairs[1]


def test_each_row_requires_objects_that_can_be_detected(generated):
    for rows in generated.values():
        for row in rows:
            task = parse_task(row)
            assert task.tag in TAGS
            if row["prompt"].startswith("a photo"):
                assert {required.name for required in task.include} <= set(COCO_CLASSES)
                assert task.colour_classes <= set(COCO_CLASSES)
                assert {required.colour for required in task.include} <= {None, *COLOURS}
            else:
                assert parse_scene(row["prompt"]) is not None, row["prompt"]


def test_unseen_classes_are_not_in_the_training_set(generated):
    is_coco = generated["train"][0]["prompt"].startswith("a photo")
    assert ("test_unseen" in generated) == is_coco
    if not is_coco:
        return
    classes = {
        name: {each["class"] for row in rows for each in row["include"]}
        for name, rows in generated.items()
    }
    assert 10 < len(classes["test_unseen"]) <= 20
    assert not classes["test_unseen"] & (classes["train"] | classes["test"])


def test_a_seed_reproduces_the_prompts_and_nothing_is_overwritten(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        done = run_script(SCRIPT, "scenes", tmp_path / name, "--size", "100", "--seed", str(seed))
        assert done.returncode == 0, done.stderr
    a, b, c = (read_rows(tmp_path / name) for name in "abc")
    assert a == b
    assert a != c
    again = run_script(SCRIPT, "coco", tmp_path / "a")
    assert again.returncode == 2
    assert str(tmp_path / "a") in again.stderr
    assert len(again.stderr.splitlines()) == 1
    assert read_rows(tmp_path / "a") == a


def test_the_shipped_scenes_are_those_of_the_script(tmp_path):
    done = run_script(SCRIPT, "scenes", tmp_path / "scenes", "--size", "1920")
    assert done.returncode == 0, done.stderr
    assert read_rows(tmp_path / "scenes") == read_rows(Path("dataset/scenes"))
