"""The preset of the small model that ships with the repo, as a user runs it."""

import json

import pytest

from flow_grpo.answer.losses import KINDS


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """Two epochs of half the size."""
    from runner import Runner

    run = Runner(tmp_path_factory.mktemp("tiny") / "logs")
    done = run(
        script="scripts/train_vlm.py",
        config="config/vlm.py:tiny_vlm",
        num_epochs=2,
        eval_questions=32,
        sample__questions_per_epoch=8,
    )
    assert done.returncode == 0, done.stderr
    return run, done


def test_it_answers_badly_at_first_and_learns(short):
    run, done = short
    before, *epochs = run.metrics()
    assert before["eval/avg"] <= 0.5
    assert [line["epoch"] for line in epochs] == [1, 2]
    for line in epochs:
        assert line["train/first_update_ratio_dev"] <= 1e-5
        assert line["reward/failed"] == 0
    assert epochs[-1]["eval/avg"] > before["eval/avg"]
    assert "samples per epoch     64 = 8 questions x 8 answers" in done.stdout
    assert "torchvision" not in done.stdout


def test_answers_are_shown_with_their_pictures(short):
    run, _ = short
    folder = run.logdir / "run/samples/eval-00002"
    rows = list(map(json.loads, (folder / "samples.jsonl").read_text().splitlines()))
    assert len(rows) == 16
    assert all({"prompt", "answer", "truth", "math_answer", "avg"} <= row.keys() for row in rows)
    assert any("file" in row and (folder / row["file"]).is_file() for row in rows)


def test_a_mistake_is_one_line(short):
    run, _ = short
    for fields, told in (
        ({"train__loss": "ppo"}, f"train.loss='ppo' must be one of {', '.join(map(repr, KINDS))}"),
        ({"dataset": "nowhere"}, "no questions at nowhere"),
        (
            {"pretrained__model": "assets/tiny-sd3"},
            "assets/tiny-sd3' cannot be loaded as a",
        ),
    ):
        done = run(
            script="scripts/train_vlm.py",
            config="config/vlm.py:tiny_vlm",
            run_name="other",
            **fields,
        )
        assert done.returncode == 2
        assert told in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert not (run.logdir / "other").exists()
