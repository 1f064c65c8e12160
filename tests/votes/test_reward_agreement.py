"""Agreement of rewards with a preference set, and its command."""

import csv
import json
import math

import numpy as np
import pytest
from PIL import Image
from runner import run_script
from user_errors import raises_user_error

from flow_grpo.data.preferences import load_preferences
from flow_grpo.votes.agreement import (
    PairScore,
    agreement_by_category,
    area_under_curve,
    choose_pairs,
    effective_count,
    measure_agreement,
    score_pairs,
)

LEVELS = {"white": 255, "light": 180, "dark": 60, "black": 0}
ROWS = [
    {"prompt": "a", "chosen": "white.png", "rejected": "dark.png", "kind": "easy"},
    {"prompt": "a", "chosen": "white.png", "rejected": "black.png", "kind": "easy"},
    {"prompt": "b", "chosen": "light.png", "rejected": "dark.png", "kind": "easy"},
    {"prompt": "c", "chosen": "dark.png", "rejected": "light.png", "kind": "hard"},
    {"prompt": "d", "chosen": "black.png", "rejected": "dark.png", "kind": "hard"},
]
REWARDS = """
from pathlib import Path

def bright(images, prompts, metadata):
    with Path(__file__).with_name("calls").open("a") as calls:
        calls.write(f"{len(images)}\\n")
    return [image.convert("L").getpixel((0, 0)) / 255 for image in images]

def fails_on_black(images, prompts, metadata):
    return [value or None for value in bright(images, prompts, metadata)]

def broken(images, prompts, metadata):
    raise ValueError("no such thing")

class Brighter:
    compares_groups = True

    def __call__(self, images, prompts, metadata):
        assert len(images) == 2 and prompts[0] == prompts[1]
        first, second = bright(images, prompts, metadata)
        return [float(first > second), float(second > first)]
"""


@pytest.fixture
def votes(tmp_path):
    """Write five pairs; `bright` agrees with the three easy ones."""
    for name, level in LEVELS.items():
        Image.new("RGB", (8, 8), (level,) * 3).save(tmp_path / f"{name}.png")
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    return tmp_path


def scores_of(votes, attribute, **options):
    custom = {"mine": f"{votes / 'my_rewards.py'}:{attribute}"}
    pairs = load_preferences(votes).pairs
    options = {"batch": 3, "category": "kind", "follow": lambda items, *_: items, **options}
    return score_pairs(pairs, "mine", custom=custom, **options)


def pair(chosen, rejected, prompt="a", category="-"):
    return PairScore(prompt, category, chosen, rejected, 1.0)


def test_images_are_scored_once_and_grouped_by_category(votes):
    scored = scores_of(votes, "bright")
    assert [(p.chosen, p.rejected) for p in scored[:2]] == [(1.0, 60 / 255), (1.0, 0.0)]
    whole, easy, hard = agreement_by_category("mine", scored)
    assert (whole.accuracy, easy.accuracy, hard.accuracy) == (0.6, 1.0, 0.0)
    assert (whole.category, easy.category, easy.pairs) == ("all", "easy", 3)
    assert hard.interval[0] == 0 < hard.interval[1] < 1
    calls = (votes / "calls").read_text().split()
    assert calls == ["3", "3", "3"]  # nine images: white of prompt "a" is in two pairs


def test_a_pairwise_judge_gets_the_two_images_of_a_pair(votes):
    scored = scores_of(votes, "Brighter")
    assert [p.credit for p in scored] == [1, 1, 1, 0, 0]


def test_pairs_without_scores_are_counted_and_left_out(votes):
    [whole, *_] = agreement_by_category("mine", scores_of(votes, "fails_on_black"))
    assert (whole.pairs, whole.missing) == (3, 2)
    assert whole.accuracy == pytest.approx(2 / 3)
    with raises_user_error("no such thing", field="reward 'mine'"):
        scores_of(votes, "broken")


def test_ties_count_half():
    found = measure_agreement("r", "all", [pair(1, 1), pair(2, 1), pair(0, 1), pair(5, 5)])
    assert (found.accuracy, found.ties) == (0.5, 2)
    assert math.isnan(measure_agreement("r", "all", [pair(math.nan, 1)]).accuracy)


def test_the_auc_equals_its_definition():
    rng = np.random.default_rng(0)
    positive, negative = rng.integers(0, 6, 40), rng.integers(0, 5, 30)
    wins = [np.sign(p - n) / 2 + 0.5 for p in positive for n in negative]
    assert area_under_curve(positive, negative) == pytest.approx(np.mean(wins))


def test_scores_that_are_comparable_only_within_a_prompt_have_a_low_auc():
    pairs = [pair(offset + 1, offset, prompt=str(offset)) for offset in range(0, 100, 10)]
    found = measure_agreement("r", "all", pairs)
    assert found.accuracy == 1
    assert found.auc == pytest.approx(0.55)


def test_copies_of_a_pair_do_not_narrow_the_interval():
    values = np.array([1.0, 0, 1, 1, 0, 1])
    names = list("abcdef")
    alone = effective_count(values, names)
    assert alone == pytest.approx(6 / 1.2)  # the variance is estimated from 6 clusters: 6 / 5
    copies = effective_count(np.repeat(values, 50), np.repeat(names, 50).tolist())
    assert copies == pytest.approx(alone)
    independent = effective_count(np.tile(values, 50), [str(i) for i in range(300)])
    assert independent == pytest.approx(300 * 299 / 300)
    assert effective_count(np.ones(9), list("aaabbbccc")) == 3


def test_a_limit_chooses_the_same_random_pairs_again(votes):
    found = load_preferences(votes)
    chosen = choose_pairs(found, 2, "x")
    assert len(chosen) == 2
    assert choose_pairs(found, 2, "x") == chosen
    assert choose_pairs(found, 9, "x") == found.pairs


def test_the_command_writes_scores_agreement_and_figure(votes):
    out = votes / "out"
    custom = [f"--custom=mine={votes / 'my_rewards.py'}:bright", "--reward=mine"]
    command = ("scripts/rewards.py", "agree", votes, *custom, "--category=kind")
    done = run_script(*command, "--reward=jpeg_compressibility", "--out", out)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()]
    assert ["mine", "easy", "3", "0", "0", "100.0%"] in [row[:6] for row in rows]
    with (out / "scores.csv").open(newline="") as file:
        scores = list(csv.DictReader(file))
    assert len(scores) == 10
    assert scores[0]["chosen"] == "1.0"
    content = json.loads((out / "agreement.json").read_text())
    assert [each["accuracy"] for each in content["agreement"][:3]] == [0.6, 1.0, 0.0]
    assert Image.open(out / "agreement.png").width > 500
    again = run_script(*command, "--out", out)
    assert again.returncode == 2
    assert "is not empty" in again.stderr


def test_an_error_does_not_discard_the_rewards_before_it(votes):
    custom = [f"--custom={name}={votes / 'my_rewards.py'}:{name}" for name in ("bright", "broken")]
    command = ("scripts/rewards.py", "agree", votes, *custom, "--reward=bright", "--reward=broken")
    done = run_script(*command, "--out", votes / "out")
    assert done.returncode == 2
    assert "reward 'broken' gave no score" in done.stderr
    assert "bright" in done.stdout
    content = json.loads((votes / "out/agreement.json").read_text())
    assert [each["reward"] for each in content["agreement"]] == ["bright"]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["nowhere", "--reward=ocr"], "PAIRS='nowhere'"),
        (["dataset/ocr", "--reward=ocrr"], "did you mean ocr?"),
        (["dataset/ocr"], "--reward"),
        (["dataset/ocr", "--reward=ocr", "--limit=0"], "at least 1"),
        (["dataset/ocr", "--reward=ocr", "--custom=mine"], "NAME=VALUE"),
        (["nowhere", "--reward=ocr", "--out=README.md/out"], "cannot be written because of"),
    ],
)
def test_wrong_arguments_of_agree_are_reported_in_one_line(arguments, shown):
    done = run_script("scripts/rewards.py", "agree", *arguments)
    assert done.returncode == 2
    assert shown in done.stderr
    assert done.stderr.count("\n") == 1
