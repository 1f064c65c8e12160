"""scripts/evaluate.py with a language model, in one and in two processes."""

import json

from runner import Runner, torchrun

OPTIONS = ("--checkpoint=base", "--dataset=dataset/sums", "--num_responses=2")


def test_two_processes_and_another_batch_size_give_the_same_results(tmp_path):
    folder = tmp_path / "out"
    run = Runner(
        tmp_path / "logs",
        eval_questions=6,
        sample__max_new_tokens=6,
        reward_fn="{'answer_format': 1.0}",
    )
    for out, fields in (
        (folder / "one", {}),
        (folder / "two", {"launcher": torchrun(), "sample__batch_size": 5}),
    ):
        done = run(
            *(*OPTIONS, f"--out={out}"),
            script="scripts/evaluate.py",
            config="config/vlm.py:tiny_text",
            **fields,
        )
        assert done.returncode == 0, done.stderr
    one, two = folder / "one", folder / "two"
    for name in ("results.csv", "samples.jsonl"):
        assert (one / name).read_text() == (two / name).read_text()
    assert len((one / "samples.jsonl").read_text().splitlines()) == 12
    logs = [path.read_text().splitlines() for path in (two / "log").iterdir()]
    assert [len(lines) for lines in logs] == [12, 12]  # a response and its scores
    [candidate] = json.loads((two / "results.json").read_text())["candidates"]
    assert candidate["scores"]["pass@2"]["count"] == 6
    assert {path.name for path in folder.iterdir()} == {"one", "two"}  # the locks are removed


def test_checkpoints_of_the_other_trainer_are_rejected(tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints/checkpoint-8/model").mkdir(parents=True)
    (run / "config.json").write_text('{"question_format": "", "pretrained": {"model": "m"}}')
    evaluate = Runner(tmp_path / "logs")
    done = evaluate(
        *(f"--checkpoint={run}", f"--out={tmp_path / 'out'}"),
        script="scripts/evaluate.py",
        config="config/grpo.py:tiny_ocr",
    )
    assert done.returncode == 2
    [line] = done.stderr.strip().splitlines()
    assert line.startswith(f"error: --checkpoint={str(run)!r} ")
    assert "train_vlm.py" in line
