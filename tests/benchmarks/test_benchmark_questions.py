"""Rows of question benchmarks: placeholders, choices, answers and images."""

import json
from dataclasses import replace

import pytest
from PIL import Image
from user_errors import raises_user_error

from flow_grpo.benchmarks.protocol import PromptSource, get_protocol
from flow_grpo.benchmarks.questions import read_questions
from flow_grpo.benchmarks.sources import find_files

COLUMNS = {"text": "question", "answer": "answer", "image": "image", "choices": "options"}
SOURCE = PromptSource(
    "github someone/questions",
    "test.jsonl",
    4,
    tag="subject",
    options={**COLUMNS, "images": "someone/questions images.zip"},
)


@pytest.fixture
def read(tmp_path):
    """Write rows to a file of this name and read them as a benchmark does."""
    Image.new("RGB", (8, 8)).save(tmp_path / "1.png")

    def write_and_read(rows, name="test.jsonl", source=SOURCE):
        file = tmp_path / name
        is_lines = name.endswith(".jsonl")
        text = "\n".join(map(json.dumps, rows)) if is_lines else json.dumps(rows)
        file.write_text(text)
        return read_questions(find_files(source, file), source)

    return write_and_read


def test_rows_of_the_authors_become_questions_with_lettered_choices(read, tmp_path):
    rows = [
        {"question": "How many?\n<image1>", "answer": "60", "image": "1.png", "subject": "a"},
        {"question": "Which?", "answer": "40", "options": ["12", "40"], "subject": "b"},
        {"question": "Which?", "answer": "B", "options": ["A", "B"], "subject": "b"},
        {"question": "See <image1> and <image2>", "answer": ["$2$", "3"], "image": "1.png"},
    ]
    questions, tags = read(rows)
    assert [each.text for each in questions] == [
        "How many?\n<image>",
        "Which?\n(A) 12\n(B) 40",
        "Which?",
        "See  and",
    ]
    assert [each.answer for each in questions] == ["60", "B", "B", "2, 3"]
    assert [len(each.images) for each in questions] == [1, 0, 0, 1]
    assert tags == ["a", "b", "b", ""]
    assert questions[1].metadata == {
        "subject": "b",
        "question": questions[1].text,
        "answer": "B",
    }


def test_an_object_of_rows_is_read_and_missing_images_have_a_command(read, tmp_path):
    rows = {"1": {"question": "Why?", "answer": 3, "image": "images/1.jpg", "subject": "a"}}
    with raises_user_error("someone/questions/resolve/main/images.zip", str(tmp_path)):
        read(rows, "test.json")
    source = replace(SOURCE, options={"text": "question", "answer": "answer"})
    [question], _ = read(rows, "test.json", source)
    assert (question.text, question.answer) == ("Why?", "3")
    with raises_user_error('"solution"'):
        read(rows, "test.json", replace(source, options={"text": "question", "answer": "solution"}))


def test_the_bundled_questions_match_their_checksum_and_count():
    source = get_protocol("tiny_shapes_qa").prompts
    questions, tags = read_questions(find_files(source), source)
    assert len(questions) == len(tags) == source.count
    assert all(tags)
