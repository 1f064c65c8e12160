"""scripts/train_vlm.py with the preset of the small VLM in the repository."""

import json

import pytest

from flow_grpo.vlm.losses import BUILT_IN_LOSSES


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A run of two epochs with half the questions of the preset."""
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


def test_training_improves_the_evaluation_reward(short):
    run, done = short
    before, *epochs = run.metrics()
    assert before["eval/avg"] <= 0.5
    assert [line["epoch"] for line in epochs] == [1, 2]
    for line in epochs:
        assert line["train/first_update_ratio_dev"] <= 1e-5
        assert line["reward/failed"] == 0
    assert epochs[-1]["eval/avg"] > before["eval/avg"]
    assert "samples per epoch     64 = 8 questions x 8 responses" in done.stdout
    assert "torchvision" not in done.stdout


def test_sample_records_contain_responses_and_images(short):
    run, _ = short
    folder = run.logdir / "run/samples/eval-00002"
    rows = list(map(json.loads, (folder / "samples.jsonl").read_text().splitlines()))
    assert len(rows) == 16
    assert all({"prompt", "answer", "truth", "math_answer", "avg"} <= row.keys() for row in rows)
    assert any("file" in row and (folder / row["file"]).is_file() for row in rows)


def test_an_invalid_field_is_a_one_line_error(short):
    run, _ = short
    for fields, message in (
        (
            {"train__loss": "ppo"},
            f"train.loss='ppo' must be one of {', '.join(map(repr, BUILT_IN_LOSSES))}",
        ),
        ({"dataset": "nowhere"}, "dataset='nowhere'"),
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
        assert message in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert not (run.logdir / "other").exists()
