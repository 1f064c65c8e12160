"""Prompts from files of several kinds, in a folder or alone."""

import json

import pytest

from flow_grpo.data.prompts import READERS, Prompt, find_prompts, load_prompts, read_file
from flow_grpo.errors import UserError

HATS = '"zwei Hüte\nauf einem Stuhl"'
ROWS = [
    {"caption": 'a sign, "OPEN"', "seed": "1"},
    {"caption": "zwei Hüte\nauf einem Stuhl", "seed": ""},
    {"caption": 'a sign, "OPEN"', "seed": "3"},  # the same prompt again
]
DEEP = b'{"prompt": %s, "n": ' + b"[" * 150 + b"]" * 150 + b"}"
PROMPTS = [Prompt(r["caption"], "", {**r, "prompt": r["caption"]}) for r in ROWS]


def as_csv(separator: str = ",", newline: str = "\r\n") -> str:
    """Quotes, separators and a line break in values, empty lines and one without values."""
    sign = '"a sign, ""OPEN"""'
    rows = [["caption", " seed"], [sign, "1"], [], [" ", ""], [HATS, ""], [sign, "3"]]
    return newline.join(separator.join(row) for row in rows)


def told(*args, **kwargs) -> str:
    with pytest.raises(UserError) as error:
        load_prompts(*args, **kwargs)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("ending", "content"),
    [
        (".jsonl", "\n\n".join(map(json.dumps, ROWS))),
        ("_metadata.jsonl", "\n".join(map(json.dumps, ROWS))),
        (".csv", as_csv()),
        (".csv", "\ufeff" + as_csv()),  # as spreadsheets begin a file
        (".csv", "\n\n" + as_csv(newline="\n")),
        (".csv", as_csv(";")),
        (".csv", as_csv("\t")),
    ],
    ids=["jsonl", "metadata", "csv", "csv-mark", "csv-newlines", "csv-semicolons", "csv-tabs"],
)
def test_files_with_columns_hold_the_same_prompts(tmp_path, ending, content):
    (tmp_path / f"train{ending}").write_bytes(content.encode())
    assert load_prompts(tmp_path, "train", column="caption") == PROMPTS
    alone = tmp_path / f"train{ending}"
    assert load_prompts(alone, "train", column="caption") == PROMPTS
    assert find_prompts(tmp_path, "test", column="caption") is None
    assert find_prompts(alone, "test", column="caption") is None


def test_one_text_file_is_a_training_set(tmp_path):
    (tmp_path / "mine.txt").write_text("a cat\na dog\n")
    assert load_prompts(str(tmp_path / "mine.txt"), "train") == [Prompt("a cat"), Prompt("a dog")]


def test_of_several_files_the_first_kind_is_read(tmp_path):
    (tmp_path / "train.txt").write_text("text")
    assert load_prompts(tmp_path, "train")[0].prompt == "text"
    (tmp_path / "train.csv").write_text("prompt\ncsv")
    assert load_prompts(tmp_path, "train")[0].prompt == "csv"
    assert find_prompts(tmp_path, "train") == read_file(tmp_path / "train.csv")
    (tmp_path / "train.jsonl").write_text('{"prompt": "jsonl"}')
    assert load_prompts(tmp_path, "train")[0].prompt == "jsonl"
    (tmp_path / "train_metadata.jsonl").write_text('{"prompt": "metadata"}')
    assert load_prompts(tmp_path, "train")[0].prompt == "metadata"
    assert load_prompts(tmp_path, "train", "text")[0].prompt == "text"


def test_negative_prompts_come_from_their_column(tmp_path):
    (tmp_path / "train.csv").write_text("negative_prompt,prompt\nblurry,a cat\n,a dog\n")
    cat, dog = load_prompts(tmp_path, "train")
    assert cat == Prompt("a cat", "blurry", {"prompt": "a cat"})
    assert dog == Prompt("a dog", "", {"prompt": "a dog"})


def test_the_prompt_is_under_its_name_even_where_another_column_has_that(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"prompt": "short", "caption": "long"}')
    [row] = load_prompts(tmp_path, "train", column="caption")
    assert row == Prompt("long", "", {"prompt": "long", "caption": "long"})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"text,n\na,1\n", ':1 has no column "prompt", it has: text, n; name the one'),
        ("a.csv", b"prompt,n\na,1\na cat, a dog,2\n", ":3: 3 values for 2 columns; put double"),
        ("a.csv", b'prompt,n\n"a\nb",1\n"c,2\n', ":4: not CSV (unexpected end of data); put"),
        ("a.csv", b'prompt,n\n"OPEN" sign,1\n', ":2: not CSV (',' expected after '\"'); put"),
        ("a.csv", b"prompt,n\n,1\n", """:2: needs a text in column "prompt", got ''"""),
        ("a.csv", b"prompt,n,n\na,1,2\n", ":1: two columns are named 'n'; rename one"),
        ("a.csv", "prompt\nHüte\n".encode("latin-1"), " is not UTF-8 text ('utf-8' codec can't"),
        ("a.csv", "prompt\nHüte\n".encode("utf-16"), " is not UTF-8 text ('utf-8' codec can't"),
        ("a.csv", b"prompt,n\n\n,\n", " is empty; write one prompt per line"),
        ("a.csv", b"", " is empty; write one prompt per line"),
        ("a.jsonl", b'{"prompt": "a"}\n["b"]\n', ':2: needs an object with a "prompt" string, got'),
        ("a.jsonl", b"[" * 100_000, ":1: not JSON (maximum recursion depth exceeded"),
        ("a.jsonl", DEEP % b'"a"', ":1: more than 100 lists and objects in each other"),
        ("a.jsonl", b'{"prompt": "a", "n": %s}' % (b"1" * 9999), ":1: not JSON (Exceeds the limit"),
        ("a.jsonl", b'{"prompt": "a", "n": {"\\udc00": 1}}', ":1: '\\udc00' is half a character;"),
        ("a.csv", b"prompt%s\na\n" % (b"t" * 200_000), ":1: not CSV (field larger than"),
        ("a.jsonl", b'"a"\n', ':1: needs an object with a "prompt" string, got "a"'),
        (
            "a.jsonl",
            b'{"text": "a", "n": 1}\n',
            ':1: needs an object with a "prompt" string (it has text, n; set --config.dataset_col',
        ),
        ("a.jsonl", b'{"prompt": " "}', """:1: needs a text in column "prompt", got ' '"""),
    ],
)
def test_a_mistake_is_told_with_file_line_and_rule(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    assert told(tmp_path / name, "train").startswith(f"{tmp_path / name}{message}")


@pytest.mark.parametrize("column", ["image", "images", "photo"])
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_row_may_have_pictures_beside_its_file(tmp_path, kind, column):
    """Also none, and with JSON several; they leave the metadata."""
    for name in ("1.png", "2.png"):
        (tmp_path / name).write_bytes(b"not looked at yet")
    values = ["1.png", "", "2.png"] if kind == "csv" else ["1.png", None, ["2.png", "1.png"]]
    if kind == "csv":
        text = f"prompt,n,{column}\n" + "".join(f"a,1,{value}\n" for value in values)
    else:
        rows = ({"prompt": "a", "n": "1", column: value} for value in values)
        text = "".join(json.dumps(row) + "\n" for row in rows)
    file = tmp_path / f"train.{kind}"
    file.write_text(text)
    named = "photo" if column == "photo" else ""
    prompts = load_prompts(tmp_path, "train", image_column=named)
    several = ("2.png",) if kind == "csv" else ("2.png", "1.png")
    expected = [("1.png",), (), several]
    assert [tuple(each.name for each in p.images) for p in prompts] == expected
    assert {str(p.metadata) for p in prompts} == {"{'prompt': 'a', 'n': '1'}"}
    assert prompts[0].where == f"{file}:{2 if kind == 'csv' else 1}"
    left_out = load_prompts(tmp_path, "train", image_column="none")
    assert [(p.images, p.metadata[column]) for p in left_out] == [((), v) for v in values]
    assert f'{file}:1 has no column "other"' in told(tmp_path, "train", image_column="other")
    (tmp_path / "1.png").unlink()
    assert f"there is no picture {tmp_path}/1.png" in told(tmp_path, "train", image_column=named)


def test_a_row_with_a_picture_may_have_a_mask(tmp_path):
    """Without one, a column of that name is as any other."""
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
    assert told(tmp_path, "train").startswith(f"{file}:1: there is no mask {tmp_path}/2.png")


def test_a_name_on_the_hub_is_read_there(monkeypatch):
    monkeypatch.setattr("flow_grpo.data.prompts.read_hub", lambda *asked: asked)
    asked = ("someone/some-set", "test", "caption", "photo", "jpg")
    columns = dict(zip(("column", "image_column", "metadata_columns"), asked[2:], strict=True))
    assert find_prompts(*asked[:2], **columns) == asked


def test_files_that_cannot_be_read_are_named(tmp_path, monkeypatch):
    (tmp_path / "a.json").write_text("[]")
    assert told(tmp_path / "a.json", "train") == (
        f"cannot read prompts from {tmp_path}/a.json: it must be .txt, .jsonl, .csv or .parquet"
    )
    with (tmp_path / "b.txt").open("wb") as file:
        file.truncate(2**33)  # takes no room
    assert told(tmp_path / "b.txt", "train").startswith(f"{tmp_path}/b.txt has 8,589,934,592 bytes")
    assert "no dataset at" in told("x" * 5000, "train")
    missing = tmp_path / "other.csv"
    assert told(missing, "train") == f"no dataset at {missing}: there is no such file"
    (tmp_path / "prompts.txt").touch()
    near = f" no such file; did you mean {tmp_path}/prompts.txt?"
    assert told(tmp_path / "promts.txt", "train").endswith(near)
    (tmp_path / "ocr").mkdir()
    assert told(tmp_path / "orc", "train").endswith(f"; did you mean {tmp_path}/ocr?")

    def broken(path, column):
        raise OSError(5, "Input/output error")

    monkeypatch.setitem(READERS, ".txt", broken)
    assert told(tmp_path / "b.txt", "train") == f"cannot read {tmp_path}/b.txt: Input/output error"
