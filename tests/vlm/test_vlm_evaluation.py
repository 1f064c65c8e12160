"""Evaluation of VLM checkpoints: equality with the run's own, sampling, resuming, errors."""

import json
import re
import shutil
from pathlib import Path

import pytest
import small_vlm
import torch
import vlm_runs
from safetensors.torch import load_file, save_file
from user_errors import raises_user_error

from flow_grpo.errors import RewardOutage
from flow_grpo.report.score_table import ScoreTable
from flow_grpo.vlm.checkpoint_evaluation import evaluate_responses, evaluation_settings
from flow_grpo.vlm.config_checks import check_config
from flow_grpo.vlm.presets import get_config
from flow_grpo.vlm.response_generation import Sampling
from flow_grpo.vlm.response_log import open_evaluation
from flow_grpo.vlm.response_metrics import Correctness

FIELDS = {"eval_freq": 1, "num_epochs": 1, "eval_questions": 3, "train.learning_rate": 1e-2}


@pytest.fixture(scope="module")
def run(model_and_data, tmp_path_factory):
    """A run of one epoch with LoRA, and its settings."""
    fields = {**FIELDS, **model_and_data, "logdir": str(tmp_path_factory.mktemp("run"))}
    session = vlm_runs.run(**fields)
    return session, fields


def evaluate(run, out: Path, *checkpoints: str, changed: dict | None = None, **options):
    session, fields = run
    config = vlm_runs.make_config(**{**fields, **(changed or {})})
    named = [str(session.folder) if each == "RUN" else each for each in checkpoints]
    return evaluate_responses(config, named, out, **options)


def read_samples(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def sampled(run, tmp_path_factory) -> tuple[Path, ScoreTable]:
    """Three sampled responses of two candidates to the questions of two data sets."""
    data = Path(run[1]["dataset"])
    other = shutil.copytree(data, tmp_path_factory.mktemp("data") / "other")
    (other / "train.jsonl").unlink()  # an evaluation needs no training questions
    out = tmp_path_factory.mktemp("out") / "sampled"
    return out, evaluate(run, out, "base", "RUN", datasets=[str(data), str(other)], n=3)


def test_greedy_scores_are_those_of_the_run(run, tmp_path):
    session, _ = run
    out = tmp_path / "new/greedy"
    table = evaluate(run, out, "base", "RUN")
    names = {"mine": "eval/mine", "avg": "eval/avg", "tokens": "eval/length"}
    for candidate, metrics in zip(table.scores, vlm_runs.read_metrics(session), strict=True):
        for column, metric in names.items():
            assert table.score(candidate, column).mean == metrics[metric]
        assert table.score(candidate, "mine").count == 3
    assert table.difference("checkpoint-2", "mine").mean != 0
    assert not any(session.folder.parent.glob(".*.lock"))
    shown = [json.loads(s) for s in (session.folder / "samples/eval-00001/samples.jsonl").open()]
    answers = [s["answer"] for s in read_samples(out) if s["checkpoint"] != "base"]
    assert answers[: len(shown)] == [each["answer"] for each in shown]


def test_the_files_of_a_sampled_evaluation_agree(sampled):
    out, table = sampled
    samples = read_samples(out)
    assert len(samples) == 2 * 2 * 4 * 3
    for candidate in table.scores:
        own = [s for s in samples if s["checkpoint"] == candidate and s["dataset"] == "other"]
        assert len({each["answer"] for each in own}) == 12  # each response has its own noise
        mean = sum(each["scores"]["mine"] for each in own) / 12
        assert table.score(candidate, "other/mine avg@3").mean == pytest.approx(mean)
        passed = {s["row"] for s in own if s["correct"]}
        assert table.score(candidate, "other/pass@3").mean == len(passed) / 4
    content = json.loads((out / "results.json").read_text())
    assert content["n"] == 3
    assert [each["questions"] for each in content["datasets"].values()] == [4, 4]
    markdown = (out / "results.md").read_text()
    assert "other, 4 questions, 3 responses at temperature 1" in markdown


def test_the_page_has_all_responses_side_by_side(sampled):
    out, table = sampled
    page = (out / "report.html").read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])
    assert data["candidates"] == list(table.scores)
    other = data["datasets"][1]
    assert (other["name"], other["of"], len(other["questions"])) == ("other", 4, 4)
    samples = [s for s in read_samples(out) if s["dataset"] == "other"]
    for row, question in enumerate(other["questions"]):
        for candidate, own in zip(data["candidates"], question["responses"], strict=True):
            expected = [s for s in samples if (s["checkpoint"], s["row"]) == (candidate, row)]
            assert [r["answer"] for r in own] == [s["answer"] for s in expected]
            assert [r["scores"] for r in own] == [s["scores"] for s in expected]
    assert other["questions"][1]["images"][0].startswith("data:image/webp;base64,")
    assert other["chart"]["values"][0][0]["mean"] == table.score("base", "other/mine avg@3").mean


def test_an_interrupted_evaluation_continues(run, sampled, tmp_path):
    finished, _ = sampled
    data = json.loads((finished / "results.json").read_text())["datasets"]
    sources = [each["source"] for each in data.values()]
    out = shutil.copytree(finished, tmp_path / "interrupted")
    [log] = (out / "log").iterdir()
    lines = log.read_text().splitlines(keepends=True)
    kept = [line for line in lines[: len(lines) // 2] if json.loads(line)["row"] != 1]
    unscored = next(line for line in kept if "scores" in json.loads(line))
    kept.remove(unscored)
    # a response of another process, and the start of a line
    log.write_text("".join(kept[2:]) + lines[-1][:20])
    log.with_name("responses-00001.jsonl").write_text("".join(kept[:2]))
    for name in ("results.json", "samples.jsonl"):
        (out / name).unlink()
    options = {"datasets": sources, "n": 3}
    evaluate(run, out, "base", "RUN", **options, changed={"sample.batch_size": 5})
    for name in ("results.json", "results.csv", "results.md", "samples.jsonl"):
        assert (out / name).read_text() == (finished / name).read_text()
    logged = log.read_text().splitlines()
    assert len(kept) < len(logged) < len(lines) + 1
    with raises_user_error("n=3", field="--out", value=str(out)):
        evaluate(run, out, "base", "RUN", datasets=sources, n=4)
    with raises_user_error("seed", field="--out", value=str(out)):
        evaluate(run, out, "base", "RUN", **options, changed={"seed": 1})
    assert log.read_text().splitlines() == logged


def test_images_of_an_evaluation_have_one_model_and_its_settings(tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"

    def save_lora(step: int) -> None:
        lora = run / f"checkpoints/checkpoint-{step}/lora"
        lora.mkdir(parents=True)
        save_file({"weight": torch.zeros(1)}, lora / "adapter_model.safetensors")

    def open_with(own: dict, **draw) -> None:
        config = get_config("tiny_enhancer")
        config.draw.model = ""  # the reward names it
        config.draw.update(draw)
        model = {"model": "assets/tiny-sd3", "lora": str(run), **own}
        config.reward_options = {"drawn:ocr": model}
        checked, weights = check_config(config), {"drawn:ocr": 1.0}
        correct = Correctness.parse("", weights)
        open_evaluation(out, evaluation_settings(checked, [], [], Sampling(), correct, weights))

    save_lora(1)
    open_with({})
    open_with({}, batch_size=5)
    with raises_user_error("draw.num_steps=8", field="--out"):
        open_with({}, num_steps=9)
    with raises_user_error("num_steps", field="--out"):
        open_with({"num_steps": 9})
    save_lora(2)
    with raises_user_error("draw_loras.drawn:ocr.weights", field="--out"):
        open_with({})


def test_failed_scores_are_computed_again(run, tmp_path):
    out, changed = tmp_path / "out", {"reward_retries": 0, "eval_questions": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small_vlm, "early_letters", fail_after_smoke_test(small_vlm.early_letters))
        with pytest.raises(RewardOutage):
            evaluate(run, out, "base", changed=changed)
    assert not (out / "results.json").exists()
    log = out / "log/responses-00000.jsonl"
    answers = [line for line in log.read_text().splitlines() if "answer" in json.loads(line)]
    assert len(answers) == 2
    evaluate(run, out, "base", changed=changed)
    assert [
        line for line in log.read_text().splitlines() if "answer" in json.loads(line)
    ] == answers
    assert all(each["scores"]["mine"] is not None for each in read_samples(out))


def logged_answers(log: Path) -> list[dict]:
    return [row for row in map(json.loads, log.read_text().splitlines()) if "answer" in row]


def fail_after_smoke_test(reward):
    calls = []

    def call(responses, questions, metadata):
        calls.append(len(responses))
        if len(calls) > 1:
            raise RuntimeError("the judge is down")
        return reward(responses, questions, metadata)

    return call


def test_invalid_options_are_rejected_before_the_model_is_loaded(run, tmp_path, monkeypatch):
    session, _ = run
    monkeypatch.setattr("flow_grpo.vlm.builders.load_model", None)
    monkeypatch.setattr("flow_grpo.vlm.checkpoint_evaluation.load_policy_model", None)
    out, lora = tmp_path / "out", session.folder / "checkpoints/latest/lora"
    with raises_user_error(field="--temperature", value=0.5):
        evaluate(run, out, "base", temperature=0.5)
    with raises_user_error(field="sample.temperature", value=-1.0):
        evaluate(run, out, "base", n=2, temperature=-1.0)
    with raises_user_error(field="--n", value=0):
        evaluate(run, out, "base", n=0)
    with raises_user_error(field="--dataset", value=str(tmp_path / "none")):
        evaluate(run, out, "base", datasets=[str(tmp_path / "none")])
    for value in ("", f"{tmp_path}:0.5"):
        with raises_user_error(field="--dataset", value=value):
            evaluate(run, out, "base", datasets=[value])
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "a", "answer": "1"}\n')
    with raises_user_error("text", field=f"{file}:1"):
        evaluate(run, out, "base", datasets=[str(file)])
    with raises_user_error(field="--correct", value="math"):
        evaluate(run, out, "base", n=2, correct="math")

    other = shutil.copytree(lora, tmp_path / "other")
    tensors = load_file(other / "adapter_model.safetensors")
    wide = {name: tensor.repeat(2, 2).contiguous() for name, tensor in tensors.items()}
    save_file(wide, other / "adapter_model.safetensors")
    with raises_user_error(other):
        evaluate(run, out, str(other))
    cut = shutil.copytree(lora, tmp_path / "cut")
    path = cut / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with raises_user_error(cut):
        evaluate(run, out, str(cut))
    assert not out.exists()
    out.mkdir()
    (out / "results.json").write_text("{}")
    with raises_user_error(field="--out", value=str(out)):
        evaluate(run, out, "base")
    assert [each.name for each in out.iterdir()] == ["results.json"]
