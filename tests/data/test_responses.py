"""Given responses: demonstrations, preference pairs and rated responses in published formats."""

import json

import pytest
from user_errors import raises_user_error

from flow_grpo.data.responses import ResponseLayout, load_responses


def user(text):
    return {"role": "user", "content": text}


def reply(text):
    return {"role": "assistant", "content": text}


def load(folder, *rows, kind="demonstrations", max_rows=0, **settings):
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return load_responses(str(path), ResponseLayout(kind=kind, **settings), max_rows)


TURNS = [user("What is 1+2?"), reply("3")]
TURN_ROW = {"messages": TURNS}
SHAREGPT = [{"from": "human", "value": "What is 1+2?"}, {"from": "gpt", "value": "3"}]
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "What is 1+2?", "completion": "3"},
        {"prompt": TURNS[:1], "completion": TURNS[1:]},
        {"messages": TURNS},
        {"messages": json.dumps(TURNS)},
        {"conversations": SHAREGPT},
        {"question": "What is 1+2?", "response": "3", "answer": "3"},
        {"problem": "What is 1+2?", "response": "3"},
        {"message": json.dumps(TURNS[:1]), "response": "3"},
        {"prompt": "What is 1+2?", "chosen": "3", "rejected": "4"},
    ],
)
def test_demonstrations_are_read_from_every_format(tmp_path, row):
    [found] = load(tmp_path, row)
    assert (found.text, found.responses, found.history) == ("What is 1+2?", ("3",), ())
    assert found.where.endswith("data.jsonl:1")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "What is 1+2?", "chosen": "3", "rejected": "4"},
        {"prompt": TURNS[:1], "chosen": TURNS[1:], "rejected": [reply("4")]},
        {"chosen": TURNS, "rejected": [TURNS[0], reply("4")]},
        {"prompt": "What is 1+2?", "chosen": TURNS, "rejected": [TURNS[0], reply("4")]},
        {"chosen": "What is 1+2? 3", "rejected": "What is 1+2? 4"},
    ],
)
def test_pairs_have_explicit_and_implicit_prompts(tmp_path, row):
    [found] = load(tmp_path, row, kind="pairs")
    assert (found.text, found.responses) == ("What is 1+2?", ("3", "4"))


def test_ratings_have_labels_or_come_from_pairs(tmp_path):
    rows = [
        {"prompt": "What is 1+2?", "completion": "3", "label": True},
        {"prompt": "What is 1+2?", "completion": "4", "label": False},
    ]
    rated = load(tmp_path, *rows, kind="ratings")
    pair = {"prompt": "What is 1+2?", "chosen": "3", "rejected": "4"}
    unpaired = load(tmp_path, pair, kind="ratings")
    for found in (rated, unpaired):
        assert [(each.responses, each.liked) for each in found] == [(("3",), True), (("4",), False)]
    assert [each.response for each in load(tmp_path, *rows)] == ["3"]  # liked ones are copied
    with raises_user_error(field="dataset"):
        load(tmp_path, rows[1])


def test_earlier_turns_are_part_of_the_prompt(tmp_path):
    turns = [user("A?"), reply("a"), user("B?"), reply("b")]
    system = {"role": "system", "content": "Be brief."}
    [found] = load(tmp_path, {"messages": [system, *turns]})
    assert (found.system, found.text, found.response) == ("Be brief.", "B?", "b")
    assert found.history == (("user", "A?"), ("assistant", "a"))


def test_every_assistant_turn_can_be_a_response(tmp_path):
    """The prompt of a turn is what precedes it; labels and pairs are converted as before."""
    (tmp_path / "a.png").write_bytes(b"not decoded here")
    (tmp_path / "b.png").write_bytes(b"nor here")
    turns = [user("<image>A?"), reply("a"), user("B <image>?"), reply("b"), user("C?"), reply("c")]
    row = {"messages": [SYSTEM, *turns], "images": ["a.png", "b.png"]}
    found = load(tmp_path, row, TURN_ROW, all_turns=True)
    assert [each.text for each in found] == ["<image>A?", "B <image>?", "C?", "What is 1+2?"]
    assert [each.response for each in found] == ["a", "b", "c", "3"]
    assert [len(each.history) for each in found] == [0, 2, 4, 0]
    assert [len(each.images) for each in found] == [1, 2, 2, 0]
    assert {each.system for each in found[:3]} == {"Be brief."}
    assert load(tmp_path, row, TURN_ROW, all_turns=True, max_rows=1) == found[:3]
    assert [each.response for each in load(tmp_path, row)] == ["c"]
    for bad in ([user("A?"), reply("a"), reply("b")], [user("A?"), reply(""), *turns[2:]]):
        with raises_user_error("data.jsonl:1"):
            load(tmp_path, {"messages": bad, "images": ["a.png"]}, all_turns=True)


def test_images_belong_to_the_first_turn_or_to_their_placeholders(tmp_path):
    (tmp_path / "a.png").write_bytes(b"not decoded here")
    turns = [user("A?"), reply("a"), user("B?"), reply("b")]
    [found] = load(tmp_path, {"messages": turns, "image": "a.png"})
    assert (found.images, found.history[0]) == ((tmp_path / "a.png",), ("user", "<image>A?"))
    turns[2] = user("<image>B?")
    [found] = load(tmp_path, {"messages": turns, "images": ["a.png"]})
    assert (found.history[0].text, found.text) == ("A?", "<image>B?")


@pytest.mark.parametrize(
    ("kind", "row", "shown"),
    [
        ("demonstrations", {"prompt": "A?", "completion": " "}, "completion"),
        ("demonstrations", {"prompt": "A?"}, "response_key"),
        ("demonstrations", {"prompt": "A?", "answer": "a"}, "response_key"),
        ("demonstrations", {"completion": "a"}, "prompt"),
        ("demonstrations", {"messages": [user("A?")]}, "no chat ends"),
        ("demonstrations", {"messages": [reply("a")]}, "prompt"),
        ("demonstrations", {"messages": [user("A?"), reply("")]}, "assistant"),
        ("demonstrations", {"messages": TURNS, "completion": "3"}, "completion"),
        ("demonstrations", {"messages": [{"role": "tool", "content": "x"}, *TURNS]}, "tool"),
        ("demonstrations", {"prompt": "A?", "completion": "a", "audio": "a.wav"}, "audio"),
        ("demonstrations", {"prompt": "A?", "completion": "a", "image": "b.png"}, "b.png"),
        ("pairs", {"prompt": "A?", "completion": "a"}, "rejected"),
        ("pairs", {"prompt": "A?", "chosen": "a"}, "rejected"),
        ("pairs", {"prompt": "A?", "chosen": "a", "rejected": "a"}, "rejected"),
        ("pairs", {"chosen": "One", "rejected": "Two"}, "prompt"),
        ("pairs", {"chosen": TURNS, "rejected": [user("B?"), reply("b")]}, "rejected"),
        ("pairs", {"prompt": "B?", "chosen": TURNS, "rejected": [TURNS[0], reply("")]}, "rejected"),
        (
            "pairs",
            {"chosen": [SYSTEM, user("A?"), reply("a")], "rejected": [user("A?"), reply("b")]},
            "rejected",
        ),
        ("pairs", {"prompt": "A?", "chosen": [SYSTEM, *TURNS], "rejected": [SYSTEM, *TURNS]}, "ch"),
        ("demonstrations", {"prompt": "A?", "completion": [SYSTEM, reply("a")]}, "completion"),
        ("demonstrations", {"prompt": "A?", "completion": "a", "response": "b"}, "response_key"),
        ("demonstrations", {"prompt": "A?", "completion": "a", "label": 0}, "label"),
        ("demonstrations", {"prompt": "A?", "completion": "a", "label": "false"}, "label"),
        ("ratings", {"prompt": "A?", "completion": "a"}, "label"),
        ("ratings", {"prompt": "A?", "completion": "a", "label": 1}, "label"),
    ],
)
def test_bad_rows_are_named(tmp_path, kind, row, shown):
    good = {"prompt": "A?", "chosen": "a", "rejected": "b"}
    with raises_user_error("data.jsonl:2", shown):
        load(tmp_path, good, row, kind=kind)


def test_other_columns_can_be_named(tmp_path):
    row = {"prompt": "A?", "answer": "a", "text": "b"}
    assert load(tmp_path, row, response="answer")[0].response == "a"
    row = {"text": "A?", "completion": "a"}
    assert load(tmp_path, row, text="text")[0].text == "A?"
