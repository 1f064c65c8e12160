"""Prompt files in published layouts (GenEval, Flow-GRPO) load unchanged; the content is made up."""

import json

import pytest

from flow_grpo.data.prompts import find_prompts, load_prompts
from flow_grpo.rewards.scorers.geneval import GenEval
from flow_grpo.rewards.scorers.geneval.rules import TAGS, parse_task
from flow_grpo.rewards.scorers.ocr import quoted_text

GENEVAL = [
    {"tag": "single_object", "include": [{"class": "kite", "count": 1}]},
    {"tag": "two_object", "include": [{"class": "kite", "count": 1}, {"class": "cow", "count": 1}]},
    {
        "tag": "counting",
        "include": [{"class": "tv", "count": 3}],
        "exclude": [{"class": "tv", "count": 4}],
    },
    {"tag": "colors", "include": [{"class": "cow", "count": 1, "color": "pink"}]},
    {
        "tag": "position",
        "include": [
            {"class": "tv", "count": 1},
            {"class": "cow", "count": 1, "position": ["left of", 0]},
        ],
    },
    {
        "tag": "color_attr",
        "include": [
            {"class": "cow", "count": 1, "color": "blue"},
            {"class": "kite", "count": 1, "color": "green"},
        ],
    },
]
SIGNS = [
    'A shop window at dusk with a neon sign reading "Open Late", rain on the glass.',
    'An old map, titled "Here Be Dragons", pinned to a wooden wall',
]
CAPTIONS = [
    "portrait of a fox, oil on canvas, 8 k, (detailed), by nobody -- v2",
    "一只猫 sitting on the moon  ",
]


@pytest.fixture
def rows() -> list[dict]:
    return [{**row, "prompt": f"a photo of number {i}"} for i, row in enumerate(GENEVAL)]


def as_lines(rows: list[dict]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def test_genevals_evaluation_metadata(tmp_path, rows):
    path = tmp_path / "evaluation_metadata.jsonl"
    path.write_text(as_lines(rows))
    prompts = load_prompts(path, "train")
    assert [p.prompt for p in prompts] == [row["prompt"] for row in rows]
    assert [parse_task(p.metadata).tag for p in prompts] == list(TAGS)
    counting, position = parse_task(prompts[2].metadata), parse_task(prompts[4].metadata)
    assert [(wanted.name, wanted.count) for wanted in counting.include] == [("tv", 3)]
    assert counting.exclude == (("tv", 4),)
    assert (position.include[1].relation, position.include[1].of) == ("left of", 0)


def test_flow_grpos_geneval_directory(tmp_path, rows):
    (tmp_path / "train_metadata.jsonl").write_text(as_lines(rows))
    (tmp_path / "test_metadata.jsonl").write_text(as_lines(rows[:2]))
    for prompt_fn in ("auto", "metadata"):
        assert len(load_prompts(tmp_path, "train", prompt_fn=prompt_fn)) == 6
        assert len(find_prompts(tmp_path, "test", prompt_fn=prompt_fn)) == 2


def test_flow_grpos_ocr_and_caption_directories(tmp_path):
    for lines in (SIGNS, CAPTIONS):
        for split in ("train", "test"):
            (tmp_path / f"{split}.txt").write_text("\n".join(lines), encoding="utf-8")
        for prompt_fn in ("auto", "text"):
            loaded = load_prompts(tmp_path, "train", prompt_fn=prompt_fn)
            assert [p.prompt for p in loaded] == [line.strip() for line in lines]
            assert load_prompts(tmp_path, "test", prompt_fn=prompt_fn) == loaded
    assert [quoted_text(sign) for sign in SIGNS] == ["Open Late", "Here Be Dragons"]
    assert '"include"' in GenEval(detector="shapes").skip_reason(CAPTIONS[0], {})
