"""Prompts from parquet files and from the `datasets` package."""

import datetime
import json
import sys

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from user_errors import raises_user_error

from flow_grpo.data.hub import is_hub_name, read_hub
from flow_grpo.data.prompts import Prompt, PromptLayout, load_prompts

COLUMNS = {
    "prompt": ["a cat", "a dog", "a cat"],
    "negative_prompt": [None, "blurry", ""],
    "count": [1, None, 3],
    "score": [0.5, float("nan"), None],
    "tags": [["x"], None, []],
    "day": [datetime.date(2024, 1, 31), None, None],
    "image": [b"\x89PNG", None, b""],
}
STORED = [{"bytes": b"1", "path": "1.jpg"}, None]  # how the `datasets` package stores images


def test_a_parquet_file_may_have_nulls_dates_and_images(tmp_path):
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
    json.dumps([p.metadata for p in prompts], allow_nan=False)  # as sent to reward servers


@pytest.mark.parametrize(
    ("columns", "row", "shown"),
    [
        ({"text": ["a"], "n": [1]}, "", ('"prompt"', "text, n", "--config.dataset_column=")),
        ({"prompt": ["a", None]}, " row 2", ('"prompt"', "got None")),
        ({"prompt": [3]}, " row 1", ('"prompt"', "got 3")),
        ({"prompt": [b"a"], "n": [1]}, " row 1", ('"prompt"', "got b'a'")),
        ({"prompt": ["a"], "negative_prompt": [3]}, " row 1", ('"negative_prompt"', "got 3")),
        ({"prompt": []}, "", ("empty",)),
    ],
)
def test_an_error_in_a_parquet_file_has_the_row(tmp_path, columns, row, shown):
    path = tmp_path / "mine.parquet"
    pq.write_table(pa.table(columns), path)
    with raises_user_error(*shown, field=f"{path}{row}"):
        load_prompts(path, "train")


def test_an_invalid_parquet_file_is_named(tmp_path):
    path = tmp_path / "mine.parquet"
    path.write_text("prompt\na cat\n")
    with raises_user_error("parquet file", field=str(path)):
        load_prompts(path, "train")


def test_missing_packages_are_named_with_the_command(tmp_path, monkeypatch):
    path = tmp_path / "mine.parquet"
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with raises_user_error(field="dataset", value=str(path)):
        load_prompts(path, "train")
    path.touch()
    install = "pip install -e '.[data]'"
    with raises_user_error(path, "pyarrow", install):
        load_prompts(path, "train")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with raises_user_error("dataset='someone/prompts'", "datasets", install):
        load_prompts("someone/prompts", "train")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Return a function that creates a local directory in the layout of a hub data set."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()

    def make(**splits):
        for split, columns in splits.items():
            folder = tmp_path / "set" / "data"
            folder.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.table(columns), folder / f"{split}-00000-of-00001.parquet")
        return str(tmp_path / "set")

    return make


def test_a_data_set_is_read_with_the_datasets_package(hub):
    columns = {"caption": ["a cat", "a dog"], "n": [1, None], "image": STORED}
    columns["mask"] = [b"2", None]
    name = hub(train=columns, validation={k: v[:1] for k, v in columns.items()})
    train, test = (read_hub(name, split, PromptLayout("caption")) for split in ("train", "test"))
    assert train == [
        Prompt(text, "", {"caption": text, "n": n, "prompt": text}, images, mask)
        for text, n, images, mask in (("a cat", 1, (b"1",), b"2"), ("a dog", None, (), None))
    ]
    assert test == train[:1]
    assert not any(p.images for p in read_hub(name, "train", PromptLayout("caption", "none")))
    with raises_user_error('"prompt"', "caption, n, image, mask", field=f"{name} (train)"):
        read_hub(name, "train", PromptLayout())


def test_a_single_split_is_used_for_training(hub):
    name = hub(test={"prompt": ["a cat"]})
    assert [p.prompt for p in read_hub(name, "train", PromptLayout())] == ["a cat"]
    assert read_hub(name, "test", PromptLayout()) is None


def test_the_error_for_a_missing_training_split_lists_the_splits(hub):
    name = hub(test={"prompt": ["a cat"]}, validation={"prompt": ["a dog"]})
    with raises_user_error('"train"', "test", "validation", field=name):
        read_hub(name, "train", PromptLayout())


def test_a_data_set_that_cannot_be_loaded_is_a_one_line_error(monkeypatch):
    def load(name):
        raise ValueError("Config name is missing\nlong story")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # no requests
    monkeypatch.setattr(datasets, "load_dataset", load)
    with raises_user_error("Config name is missing", field="dataset", value="someone/prompts"):
        load_prompts("someone/prompts", "train")


def test_hub_names_are_distinguished_from_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_hub_name("someone/prompts-1.0_b")
    for other in ("prompts", "a/b/c", "./prompts", "/prompts", "someone/a.csv", "../a"):
        assert not is_hub_name(other)
    (tmp_path / "dataset").mkdir()
    assert not is_hub_name("dataset/mistyped")  # the parent exists, so it is a path
