"""Questions from the hub, and local directories with the layout of a hub data set."""

import io
import json
import shutil
from pathlib import Path

import huggingface_hub
import pyarrow
import pytest
import small_vlm
import vlm_runs
from PIL import Image
from pyarrow import parquet
from user_errors import raises_user_error

from flow_grpo.data.preferences import load_preferences
from flow_grpo.data.questions import load_questions
from flow_grpo.training.export import ExportSource
from flow_grpo.vlm import export
from flow_grpo.vlm.models import load_processors

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def rows(start: int, count: int) -> list[dict]:
    """Return rows in the layout of hiyouga/geometry3k."""
    buffer = io.BytesIO()
    Image.new("RGB", (32, 16), "red").save(buffer, "PNG")
    image = {"bytes": buffer.getvalue(), "path": None}
    return [
        {"images": [image], "problem": f"<image>Find {n}.", "answer": str(n)}
        for n in range(start, start + count)
    ]


def write(folder: Path, **files: list[dict]) -> Path:
    """Write parquet files, named without .parquet and with __ for a slash."""
    for name, content in files.items():
        path = folder / f"{name.replace('__', '/')}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pyarrow.Table.from_pylist(content), path)
    return folder


def numbers(questions: list) -> list[int]:
    return [int(question.answer) for question in questions]


PARTS = {
    "data__train-00000-of-00002": rows(0, 3),
    "data__train-00001-of-00002": rows(3, 3),
    "data__validation-00000-of-00001": rows(6, 2),
}


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """Return an empty hub cache; the hub itself is offline."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def make_repo(cache: Path, kind: str = "datasets", name: str = "someone--geometry") -> Path:
    """Create a repository in the cache and return the directory of its newest snapshot."""
    repo = cache / f"{kind}--{name}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    (repo / "snapshots" / COMMIT).mkdir(parents=True)
    return repo / "snapshots" / COMMIT


def test_shards_are_read_in_order_and_a_validation_split_is_used_for_testing(tmp_path):
    train, test = load_questions(write(tmp_path, **PARTS), seed=0)
    assert numbers(train) == [0, 1, 2, 3, 4, 5]
    assert numbers(test) == [6, 7]
    assert train[4].where.endswith("data/train-00001-of-00002.parquet row 2")
    assert len(train[0].images) == 1


@pytest.mark.parametrize(
    "files",
    [
        {"train-00000-of-00001": rows(0, 2), "test-00000-of-00001": rows(2, 1)},
        {"data__train": rows(0, 2), "data__test": rows(2, 1), "data__validation": rows(3, 1)},
        {"train__0000": rows(0, 1), "train__0001": rows(1, 1), "val__0000": rows(2, 1)},
    ],
)
def test_other_layouts_of_the_hub(tmp_path, files):
    train, test = load_questions(write(tmp_path, **files), seed=0)
    assert (numbers(train), numbers(test)) == ([0, 1], [2])


def test_a_missing_shard_is_an_error(tmp_path):
    write(tmp_path, **PARTS)
    (tmp_path / "data" / "train-00001-of-00002.parquet").unlink()
    with raises_user_error("1 of the 2", "train-00000-of-00002", field=str(tmp_path / "data")):
        load_questions(tmp_path, seed=0)


def test_the_error_for_a_missing_training_split_lists_the_files(tmp_path):
    write(tmp_path, **{"data__testmini-00000-of-00001": rows(0, 1)})
    name = "data/testmini-00000-of-00001.parquet"
    with raises_user_error(name, field="dataset", value=str(tmp_path)):
        load_questions(tmp_path, seed=0)


def test_a_preference_set_on_the_hub_may_have_tables_and_image_files(cache):
    snapshot = make_repo(cache)
    for name in ("red", "blue"):
        Image.new("RGB", (8, 8), name).save(snapshot / f"{name}.png")
    row = {"prompt": "a", "chosen": "red.png", "rejected": "blue.png"}
    (snapshot / "train.jsonl").write_text(json.dumps(row))
    for name in ("someone/geometry", "someone/geometry@main"):
        [pair] = load_preferences(name).pairs
        assert pair.chosen == snapshot / "red.png"
    with raises_user_error(field="preferences.data", value="someone/other"):
        load_preferences("someone/other")


@pytest.mark.parametrize("name", ["someone/geometry", "someone/geometry@train"])
def test_a_hub_name_is_read_from_the_cache_when_offline(cache, name):
    write(make_repo(cache), **PARTS)
    train, test = load_questions(name, seed=0)
    assert (len(train), len(test)) == (6, 2)
    assert train[0].where.startswith(str(cache))


def test_the_given_revision_is_read(cache):
    make_repo(cache)
    other = cache / "datasets--someone--geometry" / "snapshots" / COMMIT[::-1]
    write(other, **PARTS)
    assert len(load_questions(f"someone/geometry@{COMMIT[::-1]}", seed=0)[0]) == 6
    with raises_user_error(" --revision v2 ", field="dataset", value="someone/geometry@v2"):
        load_questions("someone/geometry@v2", seed=0)


def test_the_error_for_a_failed_download_has_the_command(cache):
    command = "hf download someone/geometry --repo-type dataset --local-dir geometry"
    shown = (command, "--config.dataset=geometry")
    with raises_user_error(*shown, field="dataset", value="someone/geometry"):
        load_questions("someone/geometry", seed=0)


def test_a_run_takes_model_and_questions_from_the_cache(cache, tmp_path):
    """The model is laid out like Qwen2.5-VL, with its chat template in a separate file."""
    write(make_repo(cache), **PARTS)
    small_vlm.save_as_published(make_repo(cache, "models", "someone--small"), "qwen2_5_vl")
    assert load_processors("someone/small")[0].chat_template == small_vlm.TEMPLATE
    fields = {"pretrained.model": "someone/small", "dataset": "someone/geometry"}
    session = vlm_runs.run(**fields, logdir=str(tmp_path / "logs"), num_epochs=1)
    assert session.progress.step == 2
    assert {q.answer for q in session.questions} == set("012345")
    # a LoRA copied out of its run directory, for a model given by its hub name
    lora = shutil.copytree(session.folder / "checkpoints/latest/lora", tmp_path / "mine")
    source = ExportSource.find(lora)
    assert source.run is None
    assert export.is_vlm_checkpoint(source, "someone/small")
    assert not export.is_vlm_checkpoint(source, "someone/other")
    export.export(source, "someone/small", tmp_path / "exported")
    assert (tmp_path / "exported/model.safetensors").is_file()
