"""scripts/train_vlm.py with the built-in tools: the small model learns to call them."""

import json

import pytest
from make_tool_questions import BOXES

from flow_grpo.errors import UserError
from flow_grpo.vlm.environments.python_sandbox import check_isolation


def test_the_model_learns_to_search(run):
    done = run(
        script="scripts/train_vlm.py",
        config="config/vlm.py:tiny_search",
        num_epochs=2,
        save_freq=0,
    )
    assert done.returncode == 0, done.stderr
    before, *_, last = run.metrics()
    assert before["eval/math_answer"] < 0.3  # guesses of ten colours
    assert last["eval/math_answer"] > 0.8
    assert last["reward/failed"] == 0
    file = run.logdir / "run/samples/eval-00002/samples.jsonl"
    answers = [json.loads(line)["answer"] for line in file.read_text().splitlines()]
    called = ['{"name": "search"' in answer and "\n[1] " in answer for answer in answers]
    assert sum(called) > 0.8 * len(called)


def test_the_model_learns_to_zoom_into_the_right_corner(run):
    done = run(
        script="scripts/train_vlm.py",
        config="config/vlm.py:tiny_zoom",
        num_epochs=2,
        eval_questions=32,
        save_freq=0,
    )
    assert done.returncode == 0, done.stderr
    before, *_, last = run.metrics()
    assert before["eval/math_answer"] < 0.3  # guesses of ten digits
    assert last["eval/math_answer"] > 0.7
    assert last["reward/failed"] == 0
    file = run.logdir / "run/samples/eval-00002/samples.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    right = 0
    for row in rows:
        [box] = [box for corner, box in BOXES.items() if corner in row["prompt"]]
        right += f'"box": {list(box)}' in row["answer"]
    assert right > 0.8 * len(rows)


def test_the_model_runs_python(run):
    try:
        check_isolation(False)
    except UserError as missing:  # such as in a container without user namespaces
        pytest.skip(str(missing))
    done = run(
        script="scripts/train_vlm.py",
        config="config/vlm.py:tiny_python",
        num_epochs=1,
        eval_questions=4,
        sample__questions_per_epoch=4,
        save_freq=0,
        environment_options__timeout=20.0,
        environment_timeout=60,
    )
    assert done.returncode == 0, done.stderr
    last = run.metrics()[-1]
    assert last["reward/failed"] == 0
    assert 0 < last["reward/math_answer"] < 1
    assert last["train/first_update_ratio_dev"] <= 1e-5
