"""Questions with images, from files in our layout, EasyR1's and LMM-R1's."""

import base64
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import small_vlm
import vlm_runs
from PIL import Image
from pyarrow import parquet
from runner import ROOT
from small_vlm import process_info
from tiny_vlm.data import DEFAULT_SEED, build, write
from user_errors import raises_user_error

from flow_grpo.data.images import check_images
from flow_grpo.data.questions import Question, QuestionLayout, find_questions, load_questions
from flow_grpo.data.rows import READERS, read_file
from flow_grpo.vlm.session import build_session


def read_questions(path: Path) -> list[Question]:
    return read_file(path, QuestionLayout())


def png(colour: str = "red") -> bytes:
    return small_vlm.encode_image(Image.new("RGB", (16, 8), colour))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pictures").mkdir()
    for name in ("a", "b"):
        (tmp_path / "pictures" / f"{name}.png").write_bytes(png())
    return tmp_path


def write_lines(path: Path, *rows: dict | str) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def chat(*content: dict | str, role: str = "user", system: str = "") -> str:
    parts = [{"type": "text", "text": p} if isinstance(p, str) else p for p in content]
    turns = [{"role": "system", "content": system}] if system else []
    return json.dumps([*turns, {"role": role, "content": parts}])


def test_our_layout_with_zero_one_and_two_images(folder):
    one, two = "pictures/a.png", "pictures/b.png"
    path = write_lines(
        folder / "train.jsonl",
        {"question": "What is 1+1?", "answer": 2},
        {"question": "How many?", "images": [one], "answer": "3", "level": "easy"},
        "",
        {"question": "Is <image> like <image>?", "images": [one, two], "answer": "no"},
    )
    questions = read_questions(path)
    assert [len(q.images) for q in questions] == [0, 1, 2]
    assert questions[0].answer == questions[0].metadata["answer"] == "2"
    assert questions[1].metadata == {"question": "How many?", "answer": "3", "level": "easy"}
    assert questions[2].images == (folder / one, folder / two)
    assert [q.where for q in questions] == [f"{path}:{n}" for n in (1, 2, 4)]


def test_easyr1s_layout_loads_unchanged(folder):
    image = {"bytes": png("blue"), "path": None}
    rows = [
        {"images": [image], "problem": "<image>Find x.", "answer": "\\frac{1}{2}", "id": 7},
        {"images": [{"bytes": None, "path": "../pictures/a.png"}], "problem": "y?", "answer": "3"},
        {"images": [], "problem": "What is 2+2?", "answer": "4"},
    ]
    (folder / "data").mkdir()
    path = folder / "data" / "train-00000-of-00001.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    questions = find_questions(folder, "train")
    assert questions[0].images == (png("blue"),)
    assert questions[0].text == "<image>Find x."
    assert questions[0].metadata["id"] == 7
    assert "images" not in questions[0].metadata
    assert questions[2].images == ()
    assert questions[1].where == f"{path} row 2"
    as_lines = {"problem": "<image>Find x.", "images": ["pictures/a.png"], "answer": "3"}
    assert len(read_questions(write_lines(folder / "val.jsonl", as_lines))[0].images) == 1


def test_lmm_r1s_layout_loads_unchanged(folder):
    absolute = f"file://{folder}/pictures/a.png"
    inline = "data:image/png;base64," + base64.b64encode(png()).decode()
    rows = [
        {"message": chat({"type": "image", "image": absolute}, "How many?"), "answer": "$3$"},
        {"message": chat("Solve x=1.", system="Think first."), "answer": "1"},
        {
            "message": chat("First ", {"type": "image", "image": inline}, " last"),
            "answer": "2",
        },
    ]
    path = folder / "math.json"
    path.write_text(json.dumps(rows))
    questions = read_questions(path)
    assert [q.text for q in questions] == ["<image>How many?", "Solve x=1.", "First <image> last"]
    assert questions[0].images == (folder / "pictures/a.png",)
    assert questions[1].system == "Think first."
    assert questions[2].images == (png(),)
    assert questions[2].where == f"{path} row 3"
    assert questions[0].answer == "$3$"


BAD = {  # row: what the message contains
    '{"question": "x"': ("JSON",),
    "[" * 100_000: ("JSON", "maximum recursion"),
    '{"question": "x", "answer": "\\ud800"}': (r"'\ud800'",),
    '{"question": "x", "images": ["%s.png"], "answer": "1"}' % ("a" * 5000): ("missing image",),
    '{"question": "x", "images": ["\\u0000.png"], "answer": "1"}': ("missing image",),
    '["x"]': ('["x"]',),
    '{"text": "x", "answer": "1"}': ("message, question, problem or prompt", "text, answer"),
    '{"question": "x"}': ('"answer"', "got None", "answer_key"),
    '{"question": " ", "answer": "1"}': ('"question"', "got ' '"),
    '{"question": "x", "images": ["pictures/c.png"], "answer": "1"}': ("did you mean",),
    '{"question": "x", "images": [{"path": null}], "answer": "1"}': ("image", "{'path': None}"),
    '{"question": "x", "images": [3], "answer": "1"}': ('"images"', "[3]"),
    '{"question": "x", "images": ["http://x/y.png"], "answer": "1"}': ("http://x/y.png", "URL"),
    '{"question": "<image>x", "answer": "1"}': ("<image> 1 times", "0 images"),
    '{"question": "<image>x", "images": ["pictures/a.png", "pictures/b.png"], "answer": "1"}': (
        "<image> 1 times",
        "2 images",
    ),
    '{"problem": "x", "images": [], "videos": ["a.mp4"], "answer": "1"}': (
        "missing video",
        "a.mp4",
    ),
    '{"problem": "x", "videos": [["a.png"]], "answer": "1"}': ("missing image", "a.png"),
    '{"problem": "x", "videos": [{"a": 1}], "answer": "1"}': ("video", "{'a': 1}"),
    '{"problem": "x", "videos": [[]], "answer": "1"}': ("video", "got []"),
    '{"problem": "x", "videos": ["a.mp4"], "fps": 1e-308, "answer": "1"}': (
        '"fps"',
        "1e-05 to 100000",
        "got 1e-308",
    ),
    '{"problem": "x", "videos": ["a.mp4"], "fps": 0, "answer": "1"}': ('"fps"', "got 0"),
    '{"problem": "<video>x", "answer": "1"}': ("<video> 1 times", "0 videos"),
    '{"question": "x", "video": "a.mp4", "answer": "1"}': ("missing video", "a.mp4"),
    '{"message": "[{", "answer": "1"}': ('"message"', "JSON"),
    '{"message": "{}", "answer": "1"}': ('"message"', "list of turns"),
}


@pytest.mark.parametrize(("row", "shown"), BAD.items(), ids=range(len(BAD)))
def test_an_invalid_row_is_named_with_file_and_line(folder, row, shown):
    good = {"question": "x", "answer": "1"}
    path = write_lines(folder / "bad.jsonl", good, row, good)
    with raises_user_error(f"{path}:2", *shown):
        read_questions(path)


def test_a_chat_that_does_not_end_with_the_user_is_rejected(folder):
    path = write_lines(folder / "x.jsonl", {"message": chat("x", role="assistant"), "answer": "1"})
    with raises_user_error("turns assistant", "train.loss=sft", field=f'{path}:1: "message"'):
        read_questions(path)


def test_earlier_turns_of_a_chat_are_part_of_the_prompt(folder):
    """In TRL's and verl's column `prompt`, images are shown first, or at their placeholders."""
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How many?"},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "And red ones?"},
    ]
    rows = [{"prompt": turns, "images": ["a.png"], "answer": "1"}]
    rows.append({"prompt": json.dumps(turns[:2]), "answer": "1", "level": "easy"})
    path = write_lines(folder / "x.jsonl", *rows)
    layout = QuestionLayout(image_dir=str(folder / "pictures"))
    chat, single = read_file(path, layout)
    assert (chat.system, chat.text) == ("Be brief.", "And red ones?")
    assert chat.history == (("user", "<image>How many?"), ("assistant", "3"))
    assert chat.images == (folder / "pictures/a.png",)
    assert (single.text, single.history) == ("How many?", ())
    assert single.metadata["level"] == "easy"
    assert chat.identity != Question(chat.text, chat.images).identity


def test_cached_images_of_parquet_files_are_not_kept_in_memory(folder, monkeypatch):
    """Rows are read in batches, and equal images are one file."""
    images = [[png("red")], [png("blue"), png("red")], []]
    rows = [
        {"images": [{"bytes": each, "path": None} for each in own], "problem": "?", "answer": n}
        for n, own in enumerate(images * 3)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "x.parquet")
    monkeypatch.setattr("flow_grpo.data.rows.BATCH_ROWS", 2)
    kept = read_file(folder / "x.parquet", QuestionLayout())
    cached = read_file(folder / "x.parquet", QuestionLayout(image_cache=str(folder / "cache")))
    assert [q.answer for q in cached] == [str(n) for n in range(9)]
    assert [q.where for q in cached] == [q.where for q in kept]
    assert cached[8].where == f"{folder / 'x.parquet'} row 9"
    paths = [path for q in cached for path in q.images]
    assert [path.read_bytes() for path in paths] == [each for own in images * 3 for each in own]
    assert {*paths} == {*(folder / "cache").iterdir()}
    assert len({*paths}) == 2
    paths[0].write_bytes(b"")  # truncated by a full disk
    read_file(folder / "x.parquet", QuestionLayout(image_cache=str(folder / "cache")))
    assert paths[0].read_bytes() == png("red")
    (folder / "file").write_text("")
    with raises_user_error("cannot be written", field="image_cache"):
        read_file(folder / "x.parquet", QuestionLayout(image_cache=str(folder / "file/cache")))


def test_a_parquet_file_is_read_with_bounded_memory(folder, monkeypatch):
    """Memory use is bounded by a page, even if all images are in one row group."""
    rows, size = 64, 2**18
    generator = np.random.default_rng(0)
    images = [[{"bytes": generator.bytes(size), "path": None}] for _ in range(rows)]
    columns = {"problem": ["?"] * rows, "answer": ["1"] * rows, "images": images}
    path = folder / "x.parquet"
    parquet.write_table(
        pyarrow.table(columns), path, row_group_size=rows, write_batch_size=4, data_page_size=size
    )
    assert parquet.ParquetFile(path).num_row_groups == 1
    monkeypatch.setattr("flow_grpo.data.rows.BATCH_ROWS", 2)
    before, peak, read = pyarrow.total_allocated_bytes(), 0, 0
    del columns, images
    for _, row in READERS[".parquet"](path, QuestionLayout()):
        read += len(row["images"][0]["bytes"])
        peak = max(peak, pyarrow.total_allocated_bytes() - before)
    assert read == rows * size
    assert peak < read / 3


def test_image_dir_replaces_the_directory_of_the_file(folder):
    row = {"question": "?", "images": ["a.png"], "answer": "1"}
    path = write_lines(folder / "x.jsonl", row)
    [found] = read_file(path, QuestionLayout(image_dir=str(folder / "pictures")))
    assert found.images == (folder / "pictures/a.png",)
    with raises_user_error(f"{path}:1", "missing image"):
        read_questions(path)


def jpeg(cut: float = 1) -> bytes:
    whole = small_vlm.encode_image(small_vlm.random_image(0, 64, 64), "JPEG")
    return whole[: int(cut * len(whole))]


def some_questions(folder: Path) -> list[Question]:
    """Return questions with images in files and in rows, many of them repeated."""
    lines = [{"question": "?", "images": ["pictures/a.png"], "answer": "1"}] * 20
    lines += [{"question": "?", "images": [f"{n}.jpg"], "answer": "1"} for n in range(10)]
    for n in range(10):
        (folder / f"{n}.jpg").write_bytes(jpeg())
    rows = [{"images": [{"bytes": jpeg(), "path": None}], "problem": "?", "answer": "1"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows * 5), folder / "x.parquet")
    questions = read_questions(write_lines(folder / "x.jsonl", *lines))
    return [*questions, *read_questions(folder / "x.parquet")]


BROKEN = {"end": jpeg(0.9), "start": jpeg(0.1), "empty": b"", "text": b"no", "png": png()[:50]}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_damaged_image_is_named_before_training(folder, content):
    questions = some_questions(folder)
    check_images(questions, process_info())
    (folder / "7.jpg").write_bytes(content)
    with raises_user_error("x.jsonl:28", "7.jpg"):
        check_images(questions, process_info())
    questions = [replace(q, images=(content,)) if q is questions[33] else q for q in questions[:34]]
    (folder / "7.jpg").write_bytes(jpeg())
    with raises_user_error("x.parquet row 4", f"{len(content)} bytes"):
        check_images(questions, process_info())


def test_a_run_does_not_start_with_a_truncated_image(folder):
    some_questions(folder)
    (folder / "3.jpg").write_bytes(jpeg(0.8))
    fields = {"dataset": str(folder / "x.jsonl"), "logdir": str(folder / "logs")}
    with raises_user_error("x.jsonl:24", "3.jpg", "truncated"):
        build_session(vlm_runs.make_config(**fields), load=lambda *_: pytest.fail("loaded"))
    assert not (folder / "logs/run").exists()


def test_images_to_check_are_divided_among_processes(folder, monkeypatch):
    questions, seen = some_questions(folder), []
    monkeypatch.setattr(
        "flow_grpo.data.images.read_image",
        lambda source, where: seen.append(source) or Image.new("1", (1, 1)),
    )
    counts = []
    for index in range(3):
        check_images(questions, process_info(index, 3))
        counts.append(len(seen))
    assert counts == [4, 8, 12]
    assert set(seen) == {source for question in questions for source in question.images}


def test_missing_directories_and_empty_files_are_rejected(folder):
    missing = ROOT / "dataset" / "shapes_qb"
    with raises_user_error("did you mean", "shapes_qa", field="dataset", value=str(missing)):
        load_questions(missing, 0)
    with raises_user_error("empty", field=str(folder / "train.jsonl")):
        load_questions(write_lines(folder / "train.jsonl"), 0)
    image = folder / "pictures" / "a.png"
    with raises_user_error(".jsonl, .json or .parquet", field=str(image)):
        read_questions(image)


def test_without_a_test_file_a_tenth_is_held_out_by_the_seed(folder):
    rows = [{"question": "How many?", "images": ["pictures/a.png"], "answer": "1"}] * 3
    rows += [{"question": f"What is {n}+1?", "answer": n + 1} for n in range(27)]
    path = write_lines(folder / "all.jsonl", *rows)
    train, test = load_questions(path, seed=1)
    assert len(train) + len(test) == 30
    assert 3 <= len(test) <= 5
    assert not {(q.text, q.images) for q in train} & {(q.text, q.images) for q in test}
    assert load_questions(path, seed=1) == (train, test)
    assert load_questions(path, seed=2) != (train, test)


def test_the_shipped_questions_are_reproduced_by_their_script(tmp_path):
    folder = ROOT / "dataset" / "shapes_qa"
    write(tmp_path, build(DEFAULT_SEED))
    for split in ("train", "test"):
        assert (tmp_path / f"{split}.jsonl").read_text() == (folder / f"{split}.jsonl").read_text()
    rendered = sorted((tmp_path / "images").iterdir())
    assert [p.name for p in rendered] == sorted(p.name for p in (folder / "images").iterdir())
    for path in rendered[::20]:  # rounding may differ between machines
        ours, theirs = (np.array(Image.open(p), int) for p in (path, folder / "images" / path.name))
        assert np.abs(ours - theirs).max() <= 1


def test_the_shipped_questions_are_small_mixed_and_held_out():
    folder = ROOT / "dataset" / "shapes_qa"
    train, test = load_questions(folder, 0)
    assert (len(train), len(test)) == (448, 192)
    for questions in (train, test):
        tasks = Counter(q.metadata["task"] for q in questions)
        assert len(tasks) == 4
        assert min(tasks.values()) > 25
        assert {len(q.images) for q in questions} == {0, 1}
        assert {q.answer for q in questions if q.images} == set("01234")
    assert not {q.text for q in train if not q.images} & {q.text for q in test if not q.images}
    images = [q.images[0].read_bytes() for q in (*train, *test) if q.images]
    assert len(set(images)) == len(images)
    assert sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) < 2 * 2**20
