"""Questions under a Hugging Face name, and folders that are laid out as the hub has them."""

import io
import shutil
from pathlib import Path

import answer_runs
import huggingface_hub
import pyarrow
import pytest
import small_vlm
from PIL import Image
from pyarrow import parquet

from flow_grpo.answer import export
from flow_grpo.answer.models import load_processors
from flow_grpo.data.questions import load_questions
from flow_grpo.errors import UserError
from flow_grpo.run.export import Source

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def rows(start: int, count: int) -> list[dict]:
    """As hiyouga/geometry3k has them."""
    buffer = io.BytesIO()
    Image.new("RGB", (32, 16), "red").save(buffer, "PNG")
    picture = {"bytes": buffer.getvalue(), "path": None}
    return [
        {"images": [picture], "problem": f"<image>Find {n}.", "answer": str(n)}
        for n in range(start, start + count)
    ]


def write(folder: Path, **files: list[dict]) -> Path:
    """`files` by their names without .parquet, with __ for a slash."""
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
    """The hub's cache, and no network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def put(cache: Path, kind: str = "datasets", name: str = "someone--geometry") -> Path:
    """The folder of the newest snapshot of a repository."""
    own = cache / f"{kind}--{name}"
    (own / "refs").mkdir(parents=True)
    (own / "refs" / "main").write_text(COMMIT)
    (own / "snapshots" / COMMIT).mkdir(parents=True)
    return own / "snapshots" / COMMIT


def test_parts_are_read_in_their_order_and_a_validation_split_is_for_tests(tmp_path):
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


def test_a_part_that_is_missing_is_told(tmp_path):
    write(tmp_path, **PARTS)
    (tmp_path / "data" / "train-00001-of-00002.parquet").unlink()
    with pytest.raises(UserError, match=r"data has 1 of the 2 parts that train-00000-of-00002"):
        load_questions(tmp_path, seed=0)


def test_a_folder_without_a_training_split_has_its_files_named(tmp_path):
    write(tmp_path, **{"data__testmini-00000-of-00001": rows(0, 1)})
    with pytest.raises(UserError, match=r"; it has data/testmini-00000-of-00001.parquet$"):
        load_questions(tmp_path, seed=0)


@pytest.mark.parametrize("name", ["someone/geometry", "someone/geometry@train"])
def test_a_name_is_read_from_the_cache_without_a_network(cache, name):
    write(put(cache), **PARTS)
    train, test = load_questions(name, seed=0)
    assert (len(train), len(test)) == (6, 2)
    assert train[0].where.startswith(str(cache))


def test_a_revision_is_the_one_that_is_read(cache):
    put(cache)
    other = cache / "datasets--someone--geometry" / "snapshots" / COMMIT[::-1]
    write(other, **PARTS)
    assert len(load_questions(f"someone/geometry@{COMMIT[::-1]}", seed=0)[0]) == 6
    with pytest.raises(UserError, match=r"dataset='someone/geometry@v2' .* --revision v2 "):
        load_questions("someone/geometry@v2", seed=0)


def test_a_name_that_cannot_be_fetched_is_told_with_the_command_that_does(cache):
    with pytest.raises(UserError) as told:
        load_questions("someone/geometry", seed=0)
    message = str(told.value)
    assert message.startswith("dataset='someone/geometry' is no folder or file here, and cannot be")
    command = "hf download someone/geometry --repo-type dataset --local-dir geometry"
    assert f"({command}) and give --config.dataset=geometry" in message
    assert "\n" not in message


def test_a_run_takes_model_and_questions_from_the_cache(cache, tmp_path):
    """Of a model as Qwen2.5-VL is published, with its chat template in a file of its own."""
    write(put(cache), **PARTS)
    small_vlm.save_as_published(put(cache, "models", "someone--small"), "qwen2_5_vl")
    assert load_processors("someone/small")[0].chat_template == small_vlm.TEMPLATE
    fields = {"pretrained.model": "someone/small", "dataset": "someone/geometry"}
    session = answer_runs.run(**fields, logdir=str(tmp_path / "logs"), num_epochs=1)
    assert session.progress.step == 2
    assert {q.answer for q in session.questions} == set("012345")
    # a LoRA that was taken out of its run, of a model by its name
    lora = shutil.copytree(session.folder / "checkpoints/latest/lora", tmp_path / "mine")
    source = Source.find(lora)
    assert source.run is None
    assert export.answers(source, "someone/small")
    assert not export.answers(source, "someone/other")
    export.export(source, "someone/small", tmp_path / "exported")
    assert (tmp_path / "exported/model.safetensors").is_file()
