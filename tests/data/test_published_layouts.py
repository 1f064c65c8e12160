"""Prompt files in published layouts (GenEval, Flow-GRPO) load unchanged; the content is made up."""

import json

import pytest
from small_vlm import encode_image, random_image
from user_errors import raises_user_error

from flow_grpo.data.prompts import find_prompts, load_prompts
from flow_grpo.rewards.scorers.geneval import GenEval
from flow_grpo.rewards.scorers.geneval.rules import TAGS, parse_task
from flow_grpo.rewards.scorers.ocr import quoted_text
from flow_grpo.vlm.fields import VLM_SPEC, get_config
from flow_grpo.vlm.plan import build_plan
from flow_grpo.vlm.questions import build_questions

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


def write(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_lines(rows), encoding="utf-8")
    return str(path.parent)


def vlm_questions(dataset, **columns):
    """Return the training questions that a VLM run reads, with these settings."""
    config = get_config()
    config.update({"dataset": dataset, "sample": {"questions_per_epoch": 1}, **columns})
    config.train.updates_per_epoch = 1
    settings = VLM_SPEC.check(config)
    return build_questions(settings, build_plan(settings.sample, settings.train, 1)).train


def test_easyr1s_files_with_an_image_directory(tmp_path):
    """Rows of hiyouga/geometry3k load with `data.prompt_key=problem data.image_dir=...`."""
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures/1.png").write_bytes(encode_image(random_image(0)))
    row = {"images": ["1.png"], "problem": "<image>Find x.", "answer": "4"}
    data = write(tmp_path / "data/train.jsonl", row, {**row, "answer": "5"}, {**row, "answer": "6"})
    found = vlm_questions(
        data, input_key="problem", image_dir=str(tmp_path / "figures"), max_samples=2
    )
    assert [each.answer for each in found] == ["4", "5"]
    assert found[0].images == (tmp_path / "figures/1.png",)


def test_max_samples_counts_rows_of_the_file(tmp_path):
    """Not their turns or responses, as `--max_samples` of LMM-R1."""
    turns = [{"role": role, "content": role} for role in ("user", "assistant")] * 2
    data = write(tmp_path / "data/train.jsonl", {"messages": turns}, {"messages": turns})
    write(tmp_path / "data/test.jsonl", {"question": "Q", "answer": "A"})
    fields = {"response_turns": "all", "train": {"loss": "sft"}, "max_samples": 1}
    found = vlm_questions(data, **fields)
    assert [len(each.history) for each in found] == [0, 2]


def test_lmm_r1s_files(tmp_path):
    """A chat as JSON text with a system prompt loads (`--input_key message --label_key answer`)."""
    system = {"role": "system", "content": "Solve the problem step by step."}
    image = {"type": "image", "image": f"file://{tmp_path}/1.png"}
    (tmp_path / "1.png").write_bytes(encode_image(random_image(0)))
    text = {"type": "text", "text": "What is the area?"}
    chat = json.dumps([system, {"role": "user", "content": [image, text]}])
    row = {"question": "What is the area?", "message": chat, "answer": "$7$", "id": "a-1"}
    data = write(tmp_path / "data/train.jsonl", row)
    [found] = vlm_questions(data, input_key="message", answer_key="answer")[:1]
    assert (found.text, found.answer) == ("<image>What is the area?", "$7$")
    assert found.system == "Solve the problem step by step."
    assert found.images == (tmp_path / "1.png",)


def test_trls_files(tmp_path):
    """Rows with a conversational `prompt`, `images` and `solution` load; `image` is named."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/1.png").write_bytes(encode_image(random_image(0)))
    content = [{"type": "image"}, {"type": "text", "text": "How many?"}]
    system = {"role": "system", "content": "A conversation."}
    prompt = [system, {"role": "user", "content": content}]
    row = {"prompt": prompt, "images": ["1.png"], "solution": "<answer>3</answer>"}
    data = write(tmp_path / "data/train.jsonl", row)
    [found] = vlm_questions(data, answer_key="solution")[:1]
    assert (found.text, found.system) == ("<image>How many?", "A conversation.")
    assert (found.answer, len(found.images)) == ("<answer>3</answer>", 1)
    write(tmp_path / "data/train.jsonl", {**row, "image_path": "1.png"})
    with raises_user_error('"image_path"', "train.jsonl:1"):
        vlm_questions(data, answer_key="solution")


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
