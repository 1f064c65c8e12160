"""scripts/train_vlm.py with rewards of drawn responses."""

import json

import pytest
from PIL import Image
from server_process import Server

DRAWN = "drawn:jpeg_incompressibility"  # needs no OCR workers


def test_a_run_draws_and_scores_its_responses_here_or_on_a_server(run, tmp_path):
    short = dict(
        script="scripts/train_vlm.py",
        config="config/vlm.py:tiny_enhancer",
        num_epochs=1,
        eval_freq=1,
        eval_questions=4,
        log_images=4,
        reward_fn=str({DRAWN: 1.0, "prompt_similarity": 0.1, "prompt_length": 0.1}),
        sample__questions_per_epoch=2,
        sample__group_size=4,
    )
    draw = {"num_steps": 2, "guidance_scale": 1.0, "height": 32, "width": 96}
    draw |= {"model": "assets/tiny-sd3", "max_sequence_length": 8, "prompt_key": "prompt"}
    with Server(
        DRAWN, "--options", json.dumps({DRAWN: draw}), path=tmp_path, OMP_NUM_THREADS="1"
    ) as server:
        done = run(draw__num_steps=2, **short)  # while the server starts
        assert done.returncode == 0, done.stderr
        remote = {"reward_servers": str({DRAWN: server.url}), "draw__model": ""}
        done = run(run_name="remote", **remote, **short)
        assert done.returncode == 0, done.stderr
    before, last = run.metrics()
    assert last["reward/failed"] == 0
    assert last["train/first_update_ratio_dev"] <= 1e-5
    assert last[f"reward/{DRAWN}"] > 0
    assert 0 < last["reward/prompt_similarity"] < 1
    assert before[f"eval/{DRAWN}"] > 0
    for own, there in zip((before, last), run.metrics("remote"), strict=True):
        for name in {f"reward/{DRAWN}", f"eval/{DRAWN}"} & own.keys():
            assert there[name] == pytest.approx(own[name], rel=0.02)  # pixels are rounded
    folder = run.logdir / "run/samples/eval-00000"
    rows = list(map(json.loads, (folder / "samples.jsonl").read_text().splitlines()))
    assert len(rows) == 4
    assert all(row["answer"] for row in rows)
    assert {Image.open(folder / row["file"]).size for row in rows} == {(96, 32)}


def test_invalid_settings_are_one_line_errors(run):
    for fields, message in (
        ({"draw__model": ""}, "draw.model is missing, and drawn:ocr draws with it"),
        ({"reward_fn": "{'drawn:ocs': 1.0}"}, "did you mean drawn:ocr?"),
        (
            {"draw__prompt_key": "target", "metadata_columns": "prompt"},
            "no column 'target', which draw.prompt_key names",
        ),
    ):
        done = run(script="scripts/train_vlm.py", config="config/vlm.py:tiny_enhancer", **fields)
        assert done.returncode == 2
        assert message in done.stderr, done.stderr
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
