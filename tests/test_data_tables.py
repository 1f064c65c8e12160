"""Prompts from parquet files and through the package datasets."""

import datetime
import json
import sys

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flow_grpo.data.prompts import Prompt, load_prompts
from flow_grpo.data.rows import is_hub_name, read_hub
from flow_grpo.errors import UserError

COLUMNS = {
    "prompt": ["a cat", "a dog", "a cat"],
    "negative_prompt": [None, "blurry", ""],
    "count": [1, None, 3],
    "score": [0.5, float("nan"), None],
    "tags": [["x"], None, []],
    "day": [datetime.date(2024, 1, 31), None, None],
    "image": [b"\x89PNG", None, b""],
}
STORED = [{"bytes": b"1", "path": "1.jpg"}, None]  # as the package datasets saves an image


def told(call, *args, **kwargs) -> str:
    with pytest.raises(UserError) as error:
        call(*args, **kwargs)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_parquet_file_may_have_nulls_dates_and_pictures(tmp_path):
    pq.write_table(pa.table(COLUMNS), tmp_path / "train.parquet")
    prompts = load_prompts(tmp_path, "train")
    assert prompts == load_prompts(tmp_path / "train.parquet", "train")
    first = {"prompt": "a cat", "count": 1, "score": 0.5, "tags": ["x"], "day": "2024-01-31"}
    nothing = {"prompt": "a dog", "count": None, "score": None, "tags": None, "day": None}
    last = {"prompt": "a cat", "count": 3, "score": None, "tags": [], "day": None}
    assert prompts == [
        Prompt("a cat", "", first, (b"\x89PNG",)),
        Prompt("a dog", "blurry", nothing),
        Prompt("a cat", "", last, (b"",)),
    ]
    json.dumps([p.metadata for p in prompts], allow_nan=False)  # reward servers get it so


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"text": ["a"], "n": [1]}, ' has no column "prompt", it has: text, n; name the one with'),
        ({"prompt": ["a", None]}, ' row 2: needs a text in column "prompt", got None'),
        ({"prompt": [3]}, ' row 1: needs a text in column "prompt", got 3'),
        ({"prompt": [b"a"], "n": [1]}, """ row 1: needs a text in column "prompt", got b'a'"""),
        ({"prompt": ["a"], "negative_prompt": [3]}, ' row 1: "negative_prompt" must be a string'),
        ({"prompt": []}, " is empty"),
    ],
)
def test_a_mistake_in_a_parquet_file_is_told_with_its_row(tmp_path, columns, message):
    path = tmp_path / "mine.parquet"
    pq.write_table(pa.table(columns), path)
    assert told(load_prompts, path, "train").startswith(f"{path}{message}")


def test_what_is_no_parquet_file_is_named(tmp_path):
    path = tmp_path / "mine.parquet"
    path.write_text("prompt\na cat\n")
    assert told(load_prompts, path, "train").startswith(f"{path} is not a whole parquet file: ")


def test_missing_packages_are_named_with_the_command(tmp_path, monkeypatch):
    path = tmp_path / "mine.parquet"
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert told(load_prompts, path.parent / "mine.parquet", "train") == (
        f"no dataset at {path}: there is no such file"
    )
    path.touch()
    install = "pip install -e '.[data]'"
    assert told(load_prompts, path, "train") == f"{path} needs pyarrow: {install}"
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert told(load_prompts, "someone/prompts", "train") == (
        "there is no folder or file someone/prompts, and as the name of a Hugging Face dataset it "
        f"needs the package datasets: {install}"
    )


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Folders that the package reads as it reads sets from the hub."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()

    def make(**splits):
        for split, columns in splits.items():
            folder = tmp_path / "set" / "data"
            folder.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.table(columns), folder / f"{split}-00000-of-00001.parquet")
        return str(tmp_path / "set")

    return make


def test_a_set_is_read_through_the_package_datasets(hub):
    columns = {"caption": ["a cat", "a dog"], "n": [1, None], "image": STORED}
    columns["mask"] = [b"2", None]
    name = hub(train=columns, validation={k: v[:1] for k, v in columns.items()})
    train, test = (read_hub(name, split, "caption") for split in ("train", "test"))
    assert train == [
        Prompt(text, "", {"caption": text, "n": n, "prompt": text}, images, mask)
        for text, n, images, mask in (("a cat", 1, (b"1",), b"2"), ("a dog", None, (), None))
    ]
    assert test == train[:1]
    assert not any(p.images for p in read_hub(name, "train", "caption", "none"))
    assert told(read_hub, name, "train", "prompt").startswith(
        f'{name} (train) has no column "prompt", it has: caption, n, image, mask; name the'
    )


def test_of_one_split_alone_nothing_is_left_to_test_on(hub):
    name = hub(test={"prompt": ["a cat"]})
    assert [p.prompt for p in read_hub(name, "train", "prompt")] == ["a cat"]
    assert read_hub(name, "test", "prompt") is None


def test_a_set_without_a_training_split_has_its_splits_named(hub):
    name = hub(test={"prompt": ["a cat"]}, validation={"prompt": ["a dog"]})
    assert told(read_hub, name, "train", "prompt") in (
        f'{name} has no split "train", it has: {both}'
        for both in ("test, validation", "validation, test")
    )


def test_a_set_that_cannot_be_loaded_is_told_in_one_line(monkeypatch):
    def load(name):
        raise ValueError("Config name is missing\nlong story")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # it is not asked
    monkeypatch.setattr(datasets, "load_dataset", load)
    message = told(load_prompts, "someone/prompts", "train")
    assert "a Hugging Face dataset it cannot be loaded: Config name is missing; save" in message


def test_what_may_be_a_name_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_hub_name("someone/prompts-1.0_b")
    for other in ("prompts", "a/b/c", "./prompts", "/prompts", "someone/a.csv", "../a"):
        assert not is_hub_name(other)
    (tmp_path / "dataset").mkdir()
    assert not is_hub_name("dataset/mistyped")  # a folder here, so a path was meant
