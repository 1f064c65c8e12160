"""Comparison of models in an evaluation, with values computed by hand."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flow_grpo.data.prompts import Prompt
from flow_grpo.diffusion.evaluation import EvaluationResult
from flow_grpo.diffusion.results import (
    DIFFERENCE_NOTE,
    SINGLE_PROMPT_NOTE,
    CandidateScores,
    console_summary,
    paired_difference,
    save_images,
    summary_table,
    write_results,
)
from flow_grpo.report.console import format_table
from flow_grpo.training.candidates import Candidate

NAN = math.nan
BASE, OTHER = [0.2, 0.4, 0.9, 0.5], [0.3, 0.6, 0.9, NAN]


def test_the_standard_error_is_that_of_the_paired_difference():
    found = paired_difference(np.array(OTHER), np.array(BASE))
    # differences 0.1 0.2 0: mean 0.1, variance (0 + 0.01 + 0.01) / 2, error 0.1 / sqrt(3)
    assert found.mean == pytest.approx(0.1)
    assert found.standard_error == pytest.approx(0.1 / math.sqrt(3))
    assert found.prompts == 3


def test_a_constant_difference_has_no_standard_error():
    """However much the scores vary between prompts."""
    scores = np.array([0.0, 5.0, -3.0])
    found = paired_difference(scores + 0.25, scores)
    assert (found.mean, found.standard_error) == (0.25, 0.0)


@pytest.mark.parametrize(("count", "mean"), [(0, NAN), (1, 0.5)])
def test_too_few_prompts_have_no_standard_error(count, mean):
    found = paired_difference(np.full(count, 1.5), np.full(count, 1.0))
    assert found.mean == pytest.approx(mean, nan_ok=True)
    assert math.isnan(found.standard_error)
    assert found.prompts == count


def scored(name: str, *, images: int = 0, weights: Path | None = None, **scores) -> CandidateScores:
    columns = {key: np.array(values) for key, values in scores.items()}
    samples = [Image.new("RGB", (24, 16), (40 * i, 0, 0)) for i in range(images)]
    return CandidateScores(Candidate(name, weights), EvaluationResult(columns, samples))


def test_the_table_has_means_differences_and_standard_errors():
    both = [scored("base", ocr=BASE, avg=BASE), scored("step-8", ocr=OTHER, avg=OTHER)]
    both[0].result.scores["ocr/of other prompts"] = np.full(4, NAN)
    assert summary_table(both).splitlines() == [
        "| checkpoint |                       ocr | failed |",
        "|------------|--------------------------:|-------:|",
        "| base       |                    0.5000 |      0 |",
        "| step-8     | 0.6000 (+0.1000 ± 0.0577) |      1 |",
        "",
        DIFFERENCE_NOTE.format(first="base"),
    ]
    assert console_summary(both, 4) == summary_table(both)
    assert console_summary(both[:1], 4) == "4 prompts  ocr 0.5000  avg 0.5000"


def test_several_rewards_have_a_column_each_and_the_total():
    columns = {"jpeg": [-5.0, -7.0], "ocr": [0.5, 0.5], "ocr/words": [1.0, 2.0]}
    both = [scored(name, **columns, avg=[1.0, NAN]) for name in "ab"]
    head, _, first, second, *_, note = summary_table(both).splitlines()
    columns = [cell.strip() for cell in head.split("|")[1:-1]]
    assert columns == ["checkpoint", "jpeg", "ocr", "avg", "failed"]
    assert "-6.0000 |" in first
    assert "-6.0000 (+0.0000 ± 0.0000)" in second
    assert "1.0000 (+0.0000) |" in second
    assert note.endswith(SINGLE_PROMPT_NOTE)


def test_small_rewards_have_more_decimals():
    means = {"a": [0.003], "b": [0.0041]}
    both = [scored(name, jpeg=values, avg=values) for name, values in means.items()]
    assert "| 0.004100 (+0.001100) |" in summary_table(both)


def test_columns_of_a_table_are_aligned():
    assert format_table([["a", "bb"], ["ccc", "1"]]).splitlines() == [
        "| a   | bb |",
        "|-----|---:|",
        "| ccc |  1 |",
    ]


PROMPTS = [Prompt(f"prompt {i}") for i in range(4)]


def test_a_single_candidate_is_merged_with_the_settings(tmp_path):
    only = scored("step-8", images=2, weights=Path("logs/run/step-8"), ocr=OTHER, avg=OTHER)
    write_results(tmp_path, {"model": "m", "prompts": 4}, [only], PROMPTS)
    found = json.loads((tmp_path / "results.json").read_text())
    assert found.pop("means") == pytest.approx({"ocr": 0.6, "avg": 0.6})
    assert found == {
        "model": "m",
        "prompts": 4,
        "weights": "logs/run/step-8",
        "failed": 1,
        "scores": [
            {"prompt": p.prompt, "ocr": score, "avg": score}
            for p, score in zip(PROMPTS, [0.3, 0.6, 0.9, None], strict=True)
        ],
    }
    assert (tmp_path / "grid.png").is_file()


def test_several_candidates_are_a_list(tmp_path):
    names = ("base", "a/step-8")
    each = [scored(n, ocr=s, avg=s) for n, s in zip(names, (BASE, OTHER), strict=True)]
    write_results(tmp_path, {"model": "m"}, each, PROMPTS)
    found = json.loads((tmp_path / "results.json").read_text())
    assert set(found) == {"model", "checkpoints"}
    base, other = found["checkpoints"]
    assert [base["name"], other["name"]] == [*names]
    assert "difference" not in base
    assert other["difference"]["ocr"] == {
        "mean": pytest.approx(0.1),
        "standard_error": pytest.approx(0.1 / math.sqrt(3)),
        "prompts": 3,
    }
    assert (tmp_path / "results.md").read_text() == summary_table(each) + "\n"
    assert not (tmp_path / "grid.png").exists()  # no images were kept


def test_a_reward_that_never_scored_leaves_valid_json(tmp_path):
    failed = [scored(name, ocr=[NAN] * 4, avg=[NAN] * 4) for name in "ab"]
    write_results(tmp_path, {}, failed, PROMPTS)
    text = (tmp_path / "results.json").read_text()
    assert "NaN" not in text
    missing = {"mean": None, "standard_error": None, "prompts": 0}
    assert json.loads(text)["checkpoints"][1]["difference"] == {"ocr": missing, "avg": missing}
    assert "| b          |   - |      4 |" in summary_table(failed)


def test_images_are_saved_with_their_scores(tmp_path):
    save_images(tmp_path, scored("a/b", images=3, ocr=OTHER, avg=OTHER), PROMPTS, 2)
    folder = tmp_path / "samples/a/b"
    lines = (folder / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"file": f"000{i}.png", "prompt": f"prompt {i}", "ocr": OTHER[i], "avg": OTHER[i]}
        for i in range(2)
    ]
    assert sorted(p.name for p in folder.glob("*.png")) == ["0000.png", "0001.png"]
    save_images(tmp_path, scored("none", images=3, ocr=OTHER, avg=OTHER), PROMPTS, 0)
    assert not (tmp_path / "samples/none").exists()
