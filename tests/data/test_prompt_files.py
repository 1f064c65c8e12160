"""Prompts from text, JSON lines and CSV files, in a directory or as a single file."""

import json

import pytest
from user_errors import raises_user_error

from flow_grpo.data.prompts import Prompt, PromptLayout, find_prompts, load_prompts
from flow_grpo.data.rows import READERS, read_file
from flow_grpo.errors import UserError

HATS = '"zwei Hüte\nauf einem Stuhl"'
ROWS = [
    {"caption": 'a sign, "OPEN"', "seed": "1"},
    {"caption": "zwei Hüte\nauf einem Stuhl", "seed": ""},
    {"caption": 'a sign, "OPEN"', "seed": "3"},  # a repeated prompt
]
DEEP = b'{"prompt": %s, "n": ' + b"[" * 150 + b"]" * 150 + b"}"
PROMPTS = [Prompt(r["caption"], "", {**r, "prompt": r["caption"]}) for r in ROWS]


def as_csv(separator: str = ",", newline: str = "\r\n") -> str:
    """Return CSV with quotes, separators and a line break in values, and rows without values."""
    sign = '"a sign, ""OPEN"""'
    rows = [["caption", " seed"], [sign, "1"], [], [" ", ""], [HATS, ""], [sign, "3"]]
    return newline.join(separator.join(row) for row in rows)


def load_error(*args, **kwargs) -> UserError:
    with raises_user_error() as caught:
        load_prompts(*args, **kwargs)
    return caught.value


@pytest.mark.parametrize(
    ("ending", "content"),
    [
        (".jsonl", "\n\n".join(map(json.dumps, ROWS))),
        ("_metadata.jsonl", "\n".join(map(json.dumps, ROWS))),
        (".csv", as_csv()),
        (".csv", "\ufeff" + as_csv()),  # byte order mark, as spreadsheets write
        (".csv", "\n\n" + as_csv(newline="\n")),
        (".csv", as_csv(";")),
        (".csv", as_csv("\t")),
    ],
    ids=["jsonl", "metadata", "csv", "csv-mark", "csv-newlines", "csv-semicolons", "csv-tabs"],
)
def test_every_format_gives_the_same_prompts(tmp_path, ending, content):
    file = tmp_path / f"train{ending}"
    file.write_bytes(content.encode())
    for source in (tmp_path, file):
        assert load_prompts(source, "train", PromptLayout("caption")) == PROMPTS
        assert find_prompts(source, "test", PromptLayout("caption")) is None


def test_a_single_text_file_is_a_training_set(tmp_path):
    (tmp_path / "mine.txt").write_text("a cat\na dog\n")
    assert load_prompts(str(tmp_path / "mine.txt"), "train") == [Prompt("a cat"), Prompt("a dog")]


def test_files_have_an_order_of_precedence(tmp_path):
    (tmp_path / "train.txt").write_text("text")
    assert load_prompts(tmp_path, "train")[0].prompt == "text"
    (tmp_path / "train.csv").write_text("prompt\ncsv")
    assert load_prompts(tmp_path, "train")[0].prompt == "csv"
    assert find_prompts(tmp_path, "train") == read_file(tmp_path / "train.csv", PromptLayout())
    (tmp_path / "train.jsonl").write_text('{"prompt": "jsonl"}')
    assert load_prompts(tmp_path, "train")[0].prompt == "jsonl"
    (tmp_path / "train_metadata.jsonl").write_text('{"prompt": "metadata"}')
    assert load_prompts(tmp_path, "train")[0].prompt == "metadata"
    assert load_prompts(tmp_path, "train", prompt_fn="text")[0].prompt == "text"


def test_negative_prompts_come_from_their_column(tmp_path):
    (tmp_path / "train.csv").write_text("negative_prompt,prompt\nblurry,a cat\n,a dog\n")
    cat, dog = load_prompts(tmp_path, "train")
    assert cat == Prompt("a cat", "blurry", {"prompt": "a cat"})
    assert dog == Prompt("a dog", "", {"prompt": "a dog"})


def test_the_chosen_column_replaces_a_column_named_prompt_in_the_metadata(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"prompt": "short", "caption": "long"}')
    [row] = load_prompts(tmp_path, "train", PromptLayout("caption"))
    assert row == Prompt("long", "", {"prompt": "long", "caption": "long"})


@pytest.mark.parametrize(
    ("name", "content", "line", "shown"),
    [
        ("a.csv", b"text,n\na,1\n", ":1", ('"prompt"', "text, n", "--config.dataset_column=")),
        ("a.csv", b"prompt,n\na,1\na cat, a dog,2\n", ":3", ("3 values", "2 columns")),
        ("a.csv", b'prompt,n\n"a\nb",1\n"c,2\n', ":4", ("CSV", "unexpected end of data")),
        ("a.csv", b'prompt,n\n"OPEN" sign,1\n', ":2", ("CSV", "',' expected after '\"'")),
        ("a.csv", b"prompt,n\n,1\n", ":2", ('"prompt"', "got ''")),
        ("a.csv", b"prompt,n,n\na,1,2\n", ":1", ("two columns", "'n'")),
        ("a.csv", "prompt\nHüte\n".encode("latin-1"), "", ("UTF-8", "'utf-8' codec can't")),
        ("a.csv", "prompt\nHüte\n".encode("utf-16"), "", ("UTF-8", "'utf-8' codec can't")),
        ("a.csv", b"prompt,n\n\n,\n", "", ("empty",)),
        ("a.csv", b"", "", ("empty",)),
        ("a.jsonl", b'{"prompt": "a"}\n["b"]\n', ":2", ('"prompt"', 'got ["b"]')),
        ("a.jsonl", b"[" * 100_000, ":1", ("JSON", "maximum recursion depth exceeded")),
        ("a.jsonl", DEEP % b'"a"', ":1", ("100",)),
        ("a.jsonl", b'{"prompt": "a", "n": %s}' % (b"1" * 9999), ":1", ("Exceeds the limit",)),
        ("a.jsonl", b'{"prompt": "a", "n": {"\\udc00": 1}}', ":1", (r"'\udc00'",)),
        ("a.csv", b"prompt%s\na\n" % (b"t" * 200_000), ":1", ("CSV", "field larger than")),
        ("a.jsonl", b'"a"\n', ":1", ('"prompt"', 'got "a"')),
        ("a.jsonl", b'{"text": "a", "n": 1}', ":1", ('"prompt"', "dataset_column", "text, n")),
        ("a.jsonl", b'{"prompt": " "}', ":1", ('"prompt"', "got ' '")),
    ],
)
def test_an_error_has_file_and_line(tmp_path, name, content, line, shown):
    path = tmp_path / name
    path.write_bytes(content)
    with raises_user_error(f"{path}{line}", *shown):
        load_prompts(path, "train")


@pytest.mark.parametrize("column", ["image", "images", "photo"])
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_rows_may_have_images_relative_to_their_file(tmp_path, kind, column):
    """A row may have none, or several in JSON; images are not in the metadata."""
    for name in ("1.png", "2.png"):
        (tmp_path / name).write_bytes(b"not decoded yet")
    values = ["1.png", "", "2.png"] if kind == "csv" else ["1.png", None, ["2.png", "1.png"]]
    if kind == "csv":
        text = f"prompt,n,{column}\n" + "".join(f"a,1,{value}\n" for value in values)
    else:
        rows = ({"prompt": "a", "n": "1", column: value} for value in values)
        text = "".join(json.dumps(row) + "\n" for row in rows)
    file = tmp_path / f"train.{kind}"
    file.write_text(text)
    named = "photo" if column == "photo" else ""
    prompts = load_prompts(tmp_path, "train", PromptLayout(image=named))
    several = ("2.png",) if kind == "csv" else ("2.png", "1.png")
    expected = [("1.png",), (), several]
    assert [tuple(each.name for each in p.images) for p in prompts] == expected
    assert {str(p.metadata) for p in prompts} == {"{'prompt': 'a', 'n': '1'}"}
    assert prompts[0].where == f"{file}:{2 if kind == 'csv' else 1}"
    left_out = load_prompts(tmp_path, "train", PromptLayout(image="none"))
    assert [(p.images, p.metadata[column]) for p in left_out] == [((), v) for v in values]
    with raises_user_error('"other"', "image_column", field=f"{file}:1"):
        load_prompts(tmp_path, "train", PromptLayout(image="other"))
    (tmp_path / "1.png").unlink()
    with raises_user_error(f"image {tmp_path}/1.png", field=prompts[0].where):
        load_prompts(tmp_path, "train", PromptLayout(image=named))


def test_a_row_with_an_image_may_have_a_mask(tmp_path):
    """Without an image, a text column named "mask" is metadata."""
    for name in ("1.png", "2.png"):
        (tmp_path / name).touch()
    rows = [{"image": "1.png", "mask": "2.png"}, {"mask": "a mask"}, {"image": "1.png"}]
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps({"prompt": "a", **row}) + "\n" for row in rows))
    found = [(p.mask and p.mask.name, p.metadata) for p in load_prompts(tmp_path, "train")]
    assert found == [
        ("2.png", {"prompt": "a"}),
        (None, {"prompt": "a", "mask": "a mask"}),
        (None, {"prompt": "a"}),
    ]
    (tmp_path / "2.png").unlink()
    with raises_user_error(f"mask {tmp_path}/2.png", field=f"{file}:1"):
        load_prompts(tmp_path, "train")


def test_a_hub_name_is_read_from_the_hub(monkeypatch):
    monkeypatch.setattr("flow_grpo.data.prompts.read_hub", lambda *asked: asked)
    asked = ("someone/some-set", "test", PromptLayout("caption", "photo", ("jpg",)))
    assert find_prompts(*asked) == asked


def test_files_that_cannot_be_read_are_named(tmp_path, monkeypatch):
    (tmp_path / "a.json").write_text("[]")
    error = load_error(tmp_path / "a.json", "train")
    assert error.field == f"{tmp_path}/a.json"
    assert ".txt, .jsonl, .csv or .parquet" in str(error)
    with (tmp_path / "b.txt").open("wb") as file:
        file.truncate(2**33)  # sparse
    large = str(load_error(tmp_path / "b.txt", "train"))
    assert f"{tmp_path}/b.txt" in large
    assert "8,589,934,592" in large
    assert load_error("x" * 5000, "train").value == "x" * 5000
    missing = load_error(tmp_path / "other.csv", "train")
    assert (missing.field, missing.value) == ("dataset", str(tmp_path / "other.csv"))
    (tmp_path / "prompts.txt").touch()
    near = load_error(tmp_path / "promts.txt", "train")
    assert f"did you mean {tmp_path}/prompts.txt?" in near.hint
    (tmp_path / "ocr").mkdir()
    assert f"did you mean {tmp_path}/ocr?" in load_error(tmp_path / "orc", "train").hint

    def broken(path, layout):
        raise OSError(5, "Input/output error")

    monkeypatch.setitem(READERS, ".txt", broken)
    with raises_user_error("Input/output error", field=f"{tmp_path}/b.txt"):
        load_prompts(tmp_path / "b.txt", "train")
