"""scripts/make_ocr.py with user-provided words."""

import sys
from pathlib import Path

import make_ocr
import pytest

from flow_grpo.data.prompts import load_prompts
from flow_grpo.rewards.scorers.ocr import quoted_text


def make(monkeypatch, *args) -> None:
    monkeypatch.setattr(sys, "argv", ["make_ocr.py", *map(str, args)])
    make_ocr.main()


def written(folder: Path) -> tuple[list[str], list[str]]:
    return tuple([p.prompt for p in load_prompts(folder, split)] for split in ("train", "test"))


@pytest.fixture
def words(tmp_path) -> Path:
    path = tmp_path / "words.txt"
    lines = ["Hello", "hel lo", "", " Straße 7 ", *(f"Text {n}" for n in range(18))]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path  # twenty texts: two are equal for the OCR reward


@pytest.mark.parametrize(("size", "counts"), [(None, (18, 2)), (10, (9, 1)), (500, (450, 50))])
def test_sentences_around_given_words(monkeypatch, tmp_path, words, size, counts):
    out, extra = tmp_path / "out", () if size is None else (f"--size={size}",)
    make(monkeypatch, "full", "--words", words, "--out", out, *extra)
    train, test = written(out)
    assert (len(train), len(test)) == counts
    assert len({*train, *test}) == sum(counts)
    texts = [{quoted_text(prompt) for prompt in part} for part in (train, test)]
    assert not texts[0] & texts[1]
    allowed = {"hel lo", "Straße 7", *(f"Text {n}" for n in range(18))}
    assert texts[0] | texts[1] <= allowed
    if size != 10:
        assert texts[0] | texts[1] == allowed
    make(monkeypatch, "full", "--words", words, "--out", tmp_path / "again", *extra)
    assert written(tmp_path / "again") == (train, test)
    make(monkeypatch, "full", "--words", words, "--out", tmp_path / "other", "--seed=1", *extra)
    assert written(tmp_path / "other") != (train, test)


@pytest.mark.parametrize("kind", ["tiny", "full"])
def test_the_number_of_prompts(monkeypatch, tmp_path, kind):
    make(monkeypatch, kind, "--size=50", "--out", tmp_path / "out")
    train, test = written(tmp_path / "out")
    assert (len(train), len(test)) == (45, 5)
    assert len({quoted_text(prompt).lower() for prompt in train + test}) == 50


def test_signs_with_given_words(monkeypatch, tmp_path):
    (tmp_path / "words.txt").write_text("zebra\nowl\n")
    make(monkeypatch, "tiny", "--words", tmp_path / "words.txt", "--out", tmp_path / "out")
    train, test = written(tmp_path / "out")
    assert sorted(train + test) == ['a sign that says "OWL"', 'a sign that says "ZEBRA"']


@pytest.mark.parametrize(
    ("arguments", "content", "message"),
    [
        (["full"], 'ok\nthe "end"', "words.txt:2"),
        (["full"], "one", "1 texts"),
        (["full", "--size=1"], "a\nb", "--size=1 must be from 2 to 100000"),
        (["tiny", "--size=3"], "owl\ncat", "--size=3 must be at most 2"),
        (["tiny"], "owl\nthree words here", "'THREE WORDS HERE'"),
        (["full"], None, "No such file or directory"),
        (["full"], b"\xff", "can't decode"),
    ],
)
def test_user_errors_are_one_line(monkeypatch, tmp_path, capsys, arguments, content, message):
    words, out = tmp_path / "words.txt", tmp_path / "out"
    if content is not None:
        words.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SystemExit) as end:
        make(monkeypatch, *arguments, "--words", words, "--out", out)
    assert end.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line
    assert not out.exists()
