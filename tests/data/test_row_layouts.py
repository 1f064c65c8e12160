"""Row layouts of both trainers: every column is used or rejected by name, never dropped."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet
from user_errors import raises_user_error

from flow_grpo.data.columns import has_binary
from flow_grpo.data.prompts import MAX_PROMPT, Prompt, PromptLayout, load_prompts
from flow_grpo.data.questions import (
    Question,
    QuestionLayout,
    check_media_columns,
    load_questions,
)
from flow_grpo.data.rows import read_file


def image_bytes(kind: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (9, 9), "red").save(file, kind)
    return file.getvalue()


PNG, JPEG, WEBP = map(image_bytes, ("PNG", "JPEG", "WEBP"))
STORED = {"bytes": PNG, "path": None}  # how the `datasets` package stores an image
BASE64 = base64.b64encode(PNG).decode()
TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
QUESTION = {"question": "How many?", "answer": "2"}
PROMPT = {"prompt": "a cat"}
LMM_R1 = [
    {"role": "system", "content": "Think first."},
    {
        "role": "user",
        "content": [{"type": "text", "text": "How many?"}, {"type": "image", "image": "a.png"}],
    },
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.png", "b.png", "0001"):
        (tmp_path / name).write_bytes(PNG)
    (tmp_path / "a.mp4").touch()
    return tmp_path


def write(folder: Path, row: dict[str, Any]) -> Path:
    """Write a row as JSON lines, or as parquet if it has bytes."""
    path = folder / ("train.parquet" if has_binary(row) else "train.jsonl")
    if has_binary(row):
        parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    else:
        path.write_text(json.dumps(row) + "\n")
    return path


def read_question(folder: Path, row: dict[str, Any], **columns: Any) -> Question:
    [question] = read_file(write(folder, row), QuestionLayout(**columns))
    return question


def read_prompt(folder: Path, row: dict[str, Any], **columns: Any) -> Prompt:
    [prompt] = read_file(write(folder, row), PromptLayout(**columns))
    return prompt


def read_questions(path: Path) -> list[Question]:
    return read_file(path, QuestionLayout())


def names(images: tuple) -> list[str]:
    return ["bytes" if isinstance(each, bytes) else each.name for each in images]


def rejection(read, folder: Path, row: dict[str, Any], **settings: Any) -> str:
    with raises_user_error() as caught:
        read(folder, row, **settings)
    message = str(caught.value)
    assert message.startswith(str(folder))
    return message


# Columns that neither trainer reads.
MEDIA = [
    *(
        (name, "a.png")
        for name in (
            *("image_path", "image_paths", "img", "imgs", "img_path", "image_file", "image_url"),
            *("Image", "imagePath", "image-path", "image_0", "jpg", "png", "photo", "picture"),
            *("screenshot", "figure", "file_name", "thumbnail", "mask_path", "reference"),
        )
    ),
    ("img", "0001"),
    *((name, "0001") for name in ("source_img", "style_image", "question_image", "image_left")),
    ("photo", 17),
    ("image_path", "no/suffix"),
    ("pictures", ["0001", "0002"]),
    ("shown", ["a.png", "b.png"]),
    ("frames", [["a.png"], ["b.png"]]),
    ("shown", "C:\\data\\A.JPG"),
    ("shown", "https://example.org/a.jpeg?width=9"),
    ("shown", "file:///data/a.webp"),
    ("shown", f"data:image/png;base64,{BASE64}"),
    ("shown", BASE64),
    ("shown", '["a.png", "b.png"]'),
    ("shown", {"bytes": None, "path": "a.png"}),
    ("extra", {"files": [{"name": "a.png"}]}),
    ("img", PNG),
    ("shown", JPEG),
    ("shown", WEBP),
    ("shown", [PNG]),
    ("shown", STORED),
    ("shown", [STORED]),
    ("blob", b"\0\1"),
    ("clip", "a.mp4"),
    ("video_path", "a.mp4"),
    ("film", ["a.webm"]),
    ("audio", "a.wav"),
    ("speech", "0001"),
    ("sound", "a.mp3"),
    ("audio", {"bytes": b"RIFF\0\0\0\0WAVE", "path": None}),
    ("conversations", SHAREGPT),
    ("conversations", "User: Hi"),
    ("messages", TURNS),
    ("messages", json.dumps(TURNS)),
    ("log", TURNS),
    ("system", "Be brief."),
    ("chosen", "good.png"),
    ("rejected", "bad"),
    ("chosen", TURNS),
]
# Columns that rewards may use.
METADATA = [
    *(("id", 7), ("id", "a-7"), ("source", "web"), ("level", "easy"), ("solution", "1+1=2.")),
    *(("image_id", "0001"), ("image_width", 640), ("num_images", 2), ("video_id", 3)),
    *(("score", 0.5), ("tags", ["x", "y"]), ("include", [{"class": "kite", "count": 1}])),
    *(("extra_info", {"index": 3, "split": "train"}), ("note", "ends with png"), ("empty", None)),
    *(("img", None), ("img", ""), ("photos", []), ("vector", [0.1] * 300), ("ok", True)),
    # properties of images, by the last word of the name or because the value cannot be an image
    *(("image_area", 4), ("image_nsfw", 0.1), ("image_mode", "RGB"), ("photo_credit", "Bob")),
    *(("image_bbox", [0, 0, 1, 1]), ("image_classes", ["Belt"]), ("image_dir", "train")),
    *(("img_h", 9), ("image_amount_in_total", 5), ("requires_image", True), ("max_pixels", 9)),
    *(("speech", 0.5), ("languages", {"from": "en", "value": "de"}), ("options", "[]")),
]


def case(name: str, value: Any) -> str:
    return f"{name}-{type(value).__name__}"


@pytest.mark.parametrize(("name", "value"), MEDIA, ids=[case(*each) for each in MEDIA])
def test_an_input_under_another_name_is_rejected_by_name(folder, name, value):
    for read, row in ((read_question, QUESTION), (read_prompt, PROMPT)):
        message = rejection(read, folder, row | {name: value})
        assert f'column "{name}"' in message
        assert f"metadata_columns={name}" in message


@pytest.mark.parametrize(("name", "value"), MEDIA, ids=[case(*each) for each in MEDIA])
def test_an_input_under_another_name_may_be_declared_metadata(folder, name, value):
    """Binary data is left out, because rewards may get metadata as JSON."""
    question = read_question(folder, QUESTION | {name: value}, metadata=(name,))
    prompt = read_prompt(folder, PROMPT | {name: value}, metadata=("other", name))
    for found in (question, prompt):
        assert found.images == ()
        assert found.metadata.get(name) == (None if has_binary(value) else value)


@pytest.mark.parametrize(("name", "value"), METADATA, ids=[case(*each) for each in METADATA])
def test_metadata_goes_to_the_rewards(folder, name, value):
    assert read_question(folder, QUESTION | {name: value}).metadata[name] == value
    assert read_prompt(folder, PROMPT | {name: value}).metadata[name] == value


SELECTED = ["image_path", "img", "imgs", "photo", "shown"]
VALUES = {"path": "a.png", "list": ["a.png"], "bytes": PNG, "stored": STORED, "several": [STORED]}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize("name", SELECTED)
def test_the_column_of_images_may_be_named(folder, name, value):
    expected = ["bytes"] if has_binary(value) else ["a.png"]
    question = read_question(folder, QUESTION | {name: value}, image=name)
    prompt = read_prompt(folder, PROMPT | {name: value}, image=name)
    for found in (question, prompt):
        assert names(found.images) == expected
        assert name not in found.metadata


def chat(*parts: dict, **turn: Any) -> list[dict]:
    return [{"role": "user", "content": list(parts), **turn}]


TEXT, PLACEHOLDER = {"type": "text", "text": "How many?"}, {"type": "image"}
QUESTIONS = {  # row, settings, what arrives
    "ours": ({"images": ["a.png"]}, {}, {"images": ["a.png"]}),
    "image": ({"image": "a.png"}, {}, {"images": ["a.png"]}),
    "image without images": ({"images": [], "image": "a.png"}, {}, {"images": ["a.png"]}),
    "video": ({"video": "a.mp4"}, {}, {"videos": 1}),
    "videos": ({"videos": ["a.mp4"]}, {}, {"videos": 1}),
    "frames": ({"videos": [["a.png", "b.png"]], "fps": 2}, {}, {"videos": 1}),
    "video and image": (
        {"video": "a.mp4", "image": "a.png"},
        {},
        {"videos": 1, "images": ["a.png"]},
    ),
    "video_key": ({"clip": "a.mp4"}, {"video": "clip"}, {"videos": 1}),
    "easyr1": (
        {"question": None, "problem": "<image>How many?", "images": [STORED]},
        {},
        {"text": "<image>How many?", "images": ["bytes"]},
    ),
    "lmm-r1": (
        {"message": json.dumps(LMM_R1)},
        {},
        {"text": "How many?<image>", "images": ["a.png"], "system": "Think first."},
    ),
    "message as a list": (
        {"message": LMM_R1},
        {},
        {"text": "How many?<image>", "images": ["a.png"], "system": "Think first."},
    ),
    "video in a message": (
        {"message": chat({"type": "video", "video": "a.mp4"}, TEXT)},
        {},
        {"text": "<video>How many?", "videos": 1},
    ),
    "image_url in a message": (
        {"message": chat({"type": "image_url", "image_url": {"url": "a.png"}}, TEXT)},
        {},
        {"text": "<image>How many?", "images": ["a.png"]},
    ),
    "verl": (
        {
            "question": "",
            "prompt": [{"role": "user", "content": "<image>How many?"}],
            "images": [STORED],
            "reward_model": {"style": "rule", "ground_truth": "2"},
            "extra_info": {"index": 3},
        },
        {"text": "prompt"},
        {"text": "<image>How many?", "images": ["bytes"]},
    ),
    "trl": (
        {"question": "", "prompt": chat(PLACEHOLDER, TEXT), "images": ["a.png"]},
        {"text": "prompt"},
        {"text": "<image>How many?", "images": ["a.png"]},
    ),
    "trl without placeholders": (
        {"question": "", "prompt": chat(TEXT), "image": "a.png"},
        {"text": "prompt"},
        {"images": ["a.png"]},
    ),
    "chat as a string": (
        {"question": json.dumps(LMM_R1)},
        {},
        {"text": "How many?<image>", "images": ["a.png"], "system": "Think first."},
    ),
    "sharegpt of one turn": (
        {"question": None, "conversations": [{"from": "human", "value": "How many?"}]},
        {"text": "conversations"},
        {},
    ),
    "base64": ({"image": BASE64}, {}, {"images": ["bytes"]}),
    "list as JSON": ({"images": '["a.png", "b.png"]'}, {}, {"images": ["a.png", "b.png"]}),
    "no images": ({"img": "a.png", "image": "b.png"}, {"image": "none"}, {"images": []}),
    "no videos": ({"clip": "a.mp4", "videos": ["b.mp4"]}, {"video": "none"}, {"videos": 0}),
    "message as metadata": ({"message": "seen"}, {"metadata": ("message",)}, {}),
}


@pytest.mark.parametrize(("row", "settings", "expected"), QUESTIONS.values(), ids=QUESTIONS)
def test_a_layout_of_questions_is_used(folder, row, settings, expected):
    question = read_question(folder, QUESTION | row, **settings)
    expected = {"text": "How many?", "images": [], "videos": 0, "system": ""} | expected
    assert question.text == question.metadata["question"] == expected["text"]
    assert names(question.images) == expected["images"]
    assert len(question.videos) == expected["videos"]
    assert question.system == expected["system"]
    assert question.answer == question.metadata["answer"] == "2"


SEEN = {"type": "image", "image": "a.png"}
BAD_QUESTIONS = {  # row, settings, what the message names
    "image and images": ({"images": ["a.png"], "image": "b.png"}, {}, 'column "image"'),
    "image and image_key": ({"img": "a.png", "image": "b.png"}, {"image": "img"}, '"image"'),
    "video and videos": ({"videos": ["a.mp4"], "video": "b.mp4"}, {}, 'column "video"'),
    "question and input_key": ({"text": "x"}, {"text": "text"}, 'column "question"'),
    "message and input_key": ({"message": LMM_R1}, {"text": "question"}, 'column "message"'),
    "problem and message": ({"message": LMM_R1, "problem": "x"}, {}, 'column "problem"'),
    **{
        f"{name} and question": ({name: value}, {}, f'column "{name}"')
        for name, value in {
            **dict.fromkeys(("prompt", "problem", "query", "instruction", "context"), "x"),
            **{"options": ["A. 1", "B. 2"], "choices": ["A. 1", "B. 2"]},
            **{"system_prompt": "x", "history": ["x"], "A": "1", "tools": [{"name": "x"}]},
            **{"prompt": TURNS, "conversation": SHAREGPT, "passage": "x"},
            **{"choice_a": "x", "option1": "x", "Incorrect Answer 1": "x", "distractor2": "x"},
            **{"hint": "x", "article": "x", "input": "x", "video_start": 1.5},
        }.items()
    },
    "images in both": ({"message": chat(SEEN, TEXT), "images": ["b.png"]}, {}, "images"),
    "videos in both": (
        {"message": chat({"type": "video", "video": "a.mp4"}), "video": "a.mp4"},
        {},
        "videos",
    ),
    "image in a system turn": (
        {"message": [{"role": "system", "content": [SEEN]}, *chat(TEXT)]},
        {},
        "system",
    ),
    "placeholder in a system turn": (
        {"message": [{"role": "system", "content": "<image>"}, *chat(TEXT)], "image": "a.png"},
        {},
        "system",
    ),
    "too few images for placeholders": (
        {"message": chat(SEEN, PLACEHOLDER, TEXT)},
        {},
        "<image> 2 times",
    ),
    "audio part": ({"message": chat({"type": "audio", "audio": "a.wav"}, TEXT)}, {}, "audio"),
    "size of a part": ({"message": chat(SEEN | {"max_pixels": 99}, TEXT)}, {}, "max_pixels"),
    "detail of a part": (
        {"message": chat({"type": "image_url", "image_url": {"url": "a.png", "detail": "low"}})},
        {},
        "detail",
    ),
    "tool calls of a turn": ({"message": chat(TEXT, tool_calls=[{"id": 1}])}, {}, "tool_calls"),
    "sharegpt": ({"message": SHAREGPT}, {}, "user, assistant"),
    "answer of a turn": ({"message": TURNS}, {}, "user, assistant"),
    "turn that is a number": ({"message": [{"role": "user", "content": 5}]}, {}, '"message"'),
    "chat of another column": (
        {"question": "", "chat": TURNS},
        {"text": "chat"},
        "user, assistant",
    ),
    "answer of another name": ({"answer": None, "solution": "2"}, {}, "answer_key"),
    "data URL without data": ({"image": "data:image/png;base64,"}, {}, "data:image/png;base64,"),
    "NaN": ({"answer": float("nan")}, {}, '"answer", got nan'),
    "infinity": ({"answer": float("inf")}, {}, '"answer", got inf'),
    "blank answer": ({"answer": " "}, {}, '"answer"'),
    "long question": ({"question": "a" * 10**6}, {}, '1,000,000 characters in column "question"'),
    "long system prompt": (
        {"message": [{"role": "system", "content": "a" * 10**6}, *chat(TEXT)]},
        {},
        '1,000,000 characters in column "message"',
    ),
}


@pytest.mark.parametrize(("row", "settings", "named"), BAD_QUESTIONS.values(), ids=BAD_QUESTIONS)
def test_a_layout_of_questions_is_rejected_by_name(folder, row, settings, named):
    assert named in rejection(read_question, folder, QUESTION | row, **settings)


def test_a_key_that_no_row_has_is_rejected(folder):
    """A text-only data set may be mixed with one that has images."""
    layout = QuestionLayout(image="photo")
    words = read_question(folder, QUESTION, image="photo")
    seen = read_question(folder, QUESTION | {"photo": "a.png"}, image="photo")
    check_media_columns([words, seen], layout)
    check_media_columns([words], QuestionLayout(image="none"))
    with raises_user_error(field="image_key", value="photo"):
        check_media_columns([words], layout)
    with raises_user_error(field="video_key", value="film"):
        check_media_columns([words, seen], QuestionLayout(video="film"))


PROMPTS = {  # row, settings, what arrives
    "plain": ({}, {}, {}),
    "image": ({"image": "a.png"}, {}, {"images": ["a.png"]}),
    "images": ({"images": ["a.png", "b.png"]}, {}, {"images": ["a.png", "b.png"]}),
    "image without images": ({"images": [], "image": "a.png"}, {}, {"images": ["a.png"]}),
    "bytes": ({"image": PNG}, {}, {"images": ["bytes"]}),
    "stored": ({"image": STORED}, {}, {"images": ["bytes"]}),
    "mask": ({"image": "a.png", "mask": "b.png"}, {}, {"images": ["a.png"], "mask": True}),
    "negative prompt": ({"negative_prompt": "blurry"}, {}, {"negative": "blurry"}),
    "video": ({"video": "a.mp4"}, {}, {"images": ["a.mp4"]}),
    "video_column": ({"clip": "a.mp4"}, {"image": "clip"}, {"images": ["a.mp4"]}),
    "no images": ({"image": "a.png", "img": PNG, "mask": PNG}, {"image": "none"}, {}),
    "no video": ({"video": "a.mp4"}, {"image": "none"}, {}),
    "image as metadata": ({"image": "a.png"}, {"metadata": ("image",)}, {}),
    "caption": (
        {"prompt": None, "caption": "a cat", "jpg": STORED},
        {"text": "caption", "image": "jpg"},
        {"images": ["bytes"]},
    ),
}


@pytest.mark.parametrize(("row", "settings", "expected"), PROMPTS.values(), ids=PROMPTS)
def test_a_layout_of_prompts_is_used(folder, row, settings, expected):
    prompt = read_prompt(folder, PROMPT | row, **settings)
    assert prompt.prompt == prompt.metadata["prompt"] == "a cat"
    assert names(prompt.images) == expected.get("images", [])
    assert (prompt.mask is not None) == expected.get("mask", False)
    assert prompt.negative_prompt == expected.get("negative", "")


REJECTED_PROMPT_COLUMNS = [
    "negative",
    "neg_prompt",
    "negative_prompts",
    "negativePrompt",
    "negative_prompt_2",
    "prompt_2",
    "prompt_3",
    "system_prompt",
    "conversation",
    "chosen",
    "rejected",
]
BAD_PROMPTS = {  # row, settings, what the message names
    "image and images": ({"images": ["a.png"], "image": "b.png"}, {}, 'column "image"'),
    "image and image_column": (
        {"img": "a.png", "image": "b.png"},
        {"image": "img"},
        'column "image"',
    ),
    "mask without an image": ({"mask": "a.png"}, {}, '"mask"'),
    "list of masks": ({"image": "a.png", "mask": ["b.png"]}, {}, "each mask, got ['b.png']"),
    "mask as runs": ({"image": "a.png", "mask": {"counts": "x"}}, {}, "each mask, got {'counts'"),
    "mask bytes without an image": ({"mask": PNG}, {}, '"mask"'),
    "mask_path and mask": (
        {"image": "a.png", "mask": "b.png", "mask_path": "b.png"},
        {},
        'column "mask_path"',
    ),
    "video and image": ({"image": "a.png", "video": "a.mp4"}, {}, 'column "video"'),
    "videos": ({"videos": "a.mp4"}, {}, "--config.image_column=videos"),
    "videos and image": ({"image": "a.png", "videos": ["0001"]}, {}, 'column "videos"'),
    **{name: ({name: "x"}, {}, f'column "{name}"') for name in REJECTED_PROMPT_COLUMNS},
    "long prompt": ({"prompt": "a" * 10**6}, {}, '1,000,000 characters in column "prompt"'),
    "long negative prompt": (
        {"negative_prompt": "a" * 10**6},
        {},
        '1,000,000 characters in column "negative_prompt"',
    ),
}


@pytest.mark.parametrize(("row", "settings", "named"), BAD_PROMPTS.values(), ids=BAD_PROMPTS)
def test_a_layout_of_prompts_is_rejected_by_name(folder, row, settings, named):
    assert named in rejection(read_prompt, folder, PROMPT | row, **settings)


def test_there_are_enough_layouts():
    shared = 2 * len(MEDIA) + len(METADATA) + len(SELECTED) * len(VALUES)
    own = len(QUESTIONS) + len(BAD_QUESTIONS) + len(PROMPTS) + len(BAD_PROMPTS)
    assert 2 * shared + own >= 112


def test_an_answer_may_be_a_key_within_a_column(folder):
    row = {"prompt": TURNS[:1], "reward_model": {"style": "rule", "ground_truth": "72"}}
    question = read_question(folder, row, text="prompt", answer="reward_model.ground_truth")
    assert question.answer == "72"


def test_a_setting_is_suggested_only_for_what_it_can_read(folder):
    row = QUESTION | {"image": "a.png", "meta_info": {"image_path": "images/0.jpg"}}
    message = rejection(read_question, folder, row)
    assert "metadata_columns=meta_info" in message
    assert "image_key" not in message


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_all_line_endings_are_recognised(tmp_path, end):
    (tmp_path / "train.txt").write_bytes(f"a cat{end}a dog{end}".encode())
    assert [p.prompt for p in load_prompts(tmp_path, "train")] == ["a cat", "a dog"]
    rows = [json.dumps({"question": text, "answer": "1"}) for text in ("a", "b")]
    (tmp_path / "train.jsonl").write_bytes(end.join(rows).encode())
    assert [q.text for q in read_questions(tmp_path / "train.jsonl")] == ["a", "b"]


def test_utf_16_without_a_byte_order_mark_is_rejected(tmp_path):
    (tmp_path / "train.txt").write_bytes("a cat".encode("utf-16-le"))
    with raises_user_error(tmp_path / "train.txt", "UTF-8"):
        load_prompts(tmp_path, "train")


def test_json_lines_in_a_json_file_are_rejected_with_a_hint(tmp_path):
    (tmp_path / "train.json").write_text(f"{json.dumps(QUESTION)}\n" * 2)
    with raises_user_error(tmp_path / "train.json", ".jsonl"):
        read_questions(tmp_path / "train.json")


def test_other_files_of_a_split_are_reported(tmp_path, caplog):
    (tmp_path / "train.jsonl.gz").touch()
    for load in (lambda: load_questions(tmp_path, 0), lambda: load_prompts(tmp_path, "train")):
        with raises_user_error("train.jsonl.gz", field="dataset", value=str(tmp_path)):
            load()
    (tmp_path / "train.jsonl").write_text(json.dumps(QUESTION | PROMPT | {"prompt": None}) + "\n")
    (tmp_path / "test.csv").touch()
    load_questions(tmp_path, 0)
    assert "ignoring train.jsonl.gz, reading train.jsonl" in caplog.text
    assert "ignoring test.csv" in caplog.text
    caplog.clear()
    (tmp_path / "train.jsonl").write_text(json.dumps(PROMPT) + "\n")
    load_prompts(tmp_path, "train")
    assert "ignoring train.jsonl.gz, reading train.jsonl" in caplog.text


def test_a_text_file_with_json_lines_is_rejected(tmp_path):
    path = tmp_path / "train.txt"
    path.write_text('a cat\n{"prompt": "a dog"}\n')
    with raises_user_error("JSON", ".jsonl", field=f"{path}:2"):
        load_prompts(path, "train")
    path.write_text("{a cat}\n[dog]\n")
    assert [p.prompt for p in load_prompts(path, "train")] == ["{a cat}", "[dog]"]
    path.write_text("a" * MAX_PROMPT + "\n" + "a" * (MAX_PROMPT + 1))
    with raises_user_error("10,001 characters", field=f"{path}:2"):
        load_prompts(path, "train")


@pytest.mark.parametrize(
    "row", ['"answer": "1", "answer": "2"', '"answer": "1", "x": [{"a":1,"a":2}]']
)
def test_a_repeated_key_is_rejected(tmp_path, row):
    path = tmp_path / "train.jsonl"
    path.write_text(f'{{"question": "?", "prompt": "a", {row}}}')
    for read in (read_questions, lambda path: load_prompts(path, "train")):
        with raises_user_error(f"{path}:1", '"answer"' if "x" not in row else '"a"'):
            read(path)


def test_two_columns_of_the_same_name_are_rejected(tmp_path):
    path = tmp_path / "train.parquet"
    columns = {"question": "?", "answer": "1", "prompt": "a", "image": "a.png"}
    arrays = [pyarrow.array([value]) for value in (*columns.values(), "b.png")]
    parquet.write_table(pyarrow.Table.from_arrays(arrays, [*columns, "image"]), path)
    for read in (read_questions, lambda path: load_prompts(path, "train")):
        with raises_user_error("'image'", field=str(path)):
            read(path)


def test_repeated_rows_are_reported(tmp_path, caplog):
    def load(train: list[str], test: list[str]) -> str:
        for split, texts in (("train", train), ("test", test)):
            rows = [{"question": text, "answer": "1"} for text in texts]
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (tmp_path / f"{split}.jsonl").write_text(lines)
        caplog.clear()
        load_questions(tmp_path, seed=0)
        return caplog.text

    assert load(["a", "b"], ["c"]) == ""
    assert "2 of 2 test questions are also training questions" in load(["a", "b"], ["a", "b"])
    assert "1 of 2 test questions are also training questions" in load(["a", "b"], ["a", "c"])
    assert "all 3 training questions are identical" in load(["a"] * 3, ["b"])
