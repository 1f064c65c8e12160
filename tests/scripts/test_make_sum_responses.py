"""Preference pairs of sums for the small language model."""

import json

from make_sum_responses import ROOT, make_rows
from tiny_vlm.texts import ANSWERS, CORRECT, final_answer


def read(name: str) -> list[dict[str, str]]:
    text = (ROOT / "dataset" / name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_demonstrations_are_correct_responses_of_the_models_own_form():
    answers = {row["question"]: row["answer"] for row in read("sums/train.jsonl")}
    rows = make_rows()
    assert rows == read("sum_responses/train.jsonl")
    assert len({tuple(row.values()) for row in rows}) == 200
    for row in rows:
        answer = answers[row["question"]]  # a KeyError for a test question
        first, second = row["question"].removeprefix("What is ").removesuffix("?").split("+")
        assert row["chosen"] == ANSWERS[CORRECT].format(a=first, b=second, total=answer)
        assert final_answer(row["rejected"]) != answer
