"""Cards of the built-in rewards, and the check of a reward on its example pairs."""

import sys
from argparse import Namespace
from dataclasses import fields, is_dataclass

import pytest
import rewards
from runner import ROOT, run_script
from small_clip import clip_folder  # noqa: F401
from user_errors import raises_user_error

from flow_grpo.errors import UserError
from flow_grpo.rewards import REWARDS, reward_check
from flow_grpo.rewards.cards import get_card, plain_text, reward_cards
from flow_grpo.rewards.custom import import_scorer
from flow_grpo.rewards.example_pairs import EXAMPLES, example_pairs
from flow_grpo.rewards.protocol import as_scorer
from flow_grpo.rewards.reward_check import CheckResult, check_reward, score_pairs

sys.path.append(str(ROOT / "docs"))
import make_rewards

CARDS = reward_cards()


def test_every_built_in_reward_has_a_card():
    """If this fails, add it to flow_grpo/rewards/cards.toml (CONTRIBUTING.md, "Add a reward")."""
    assert {*CARDS} == {*REWARDS.paths}
    for card in CARDS.values():
        assert card.pairs in EXAMPLES, card.name
        assert bool(card.measured) == (card.images_per_s is not None), card.name


@pytest.mark.parametrize("path", make_rewards.PAGES, ids=lambda path: path.parent.name)
def test_the_tables_of_rewards_are_up_to_date(path):
    """If this fails, run python docs/make_rewards.py."""
    text = path.read_text("utf-8")
    assert text.count("<!-- rewards ") >= 1
    assert make_rewards.page(text) == text


@pytest.mark.parametrize("name", CARDS)
def test_the_weights_of_a_card_are_the_default_model(name):
    scorer = import_scorer(name, REWARDS.paths[name])
    if not is_dataclass(scorer):
        return
    defaults = {each.name: each.default for each in fields(scorer)}
    default = defaults.get("model") or ""
    assert (default in CARDS[name].weights) == bool(default), default


def test_a_card_tells_whether_its_weights_are_cached(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert get_card("pickscore").weights_state() == "missing"
    for name in get_card("pickscore").weights:
        (tmp_path / f"models--{name.replace('/', '--')}/snapshots/1").mkdir(parents=True)
    assert get_card("pickscore").weights_state() == "in cache"
    assert get_card("jpeg_compressibility").weights_state() == "-"
    with raises_user_error("did you mean pickscore?", field="reward", value="pikscore"):
        get_card("pikscore")


def test_markdown_is_removed_for_a_terminal():
    assert plain_text("as [an edit](a.md#b); *`raw`: all*") == "as an edit; raw: all"


@pytest.mark.parametrize("kind", EXAMPLES)
def test_there_are_three_different_example_pairs(kind):
    pairs = EXAMPLES[kind]()
    assert len(pairs) == (0 if kind == "none" else 3)
    for pair in pairs:
        good, bad = pair.rows()
        assert pair.prompt
        assert pair.good != pair.bad or good != bad


def test_a_reward_that_prefers_the_bad_samples_is_reported():
    def inverted(images, prompts, metadata):
        return [float("sign" in prompt) * -index for index, prompt in enumerate(prompts)][::-1]

    pairs = score_pairs(as_scorer(inverted), example_pairs("sign", {}))
    assert [pair.is_right for pair in pairs] == [False] * 3
    assert CheckResult("x", pairs, 0, 0).verdict().startswith("0 of 3 pairs ranked as expected: ch")


def test_a_missing_score_is_reported():
    pairs = score_pairs(as_scorer(lambda *batch: [1.0, None] * 3), example_pairs("quality", {}))
    result = CheckResult("x", pairs, 0, 0)
    assert not result.is_right
    assert result.verdict() == "3 of 3 pairs have no score: it returned None"


def test_geneval_finds_the_shapes_of_its_detector():
    assert check_reward("geneval", options={"detector": "shapes"}).is_right


def test_a_network_is_checked_with_its_options(folder):
    result = check_reward("clipscore", options={"model": str(folder)})
    assert len(result.pairs) == 3
    assert not any(pair.failure for pair in result.pairs)
    with raises_user_error(field="reward_options.clipscore.modle"):
        check_reward("clipscore", options={"modle": str(folder)})


def test_people_and_missing_servers_are_reported(monkeypatch):
    monkeypatch.setattr("flow_grpo.rewards.workers.remote.STARTUP_TIMEOUT", 0.5)
    with raises_user_error("flow-grpo vote", field="reward 'human'"):
        check_reward("human", options={})
    with raises_user_error("does not respond", value="http://127.0.0.1:9"):
        check_reward("jpeg_compressibility", options={}, server="http://127.0.0.1:9")
    with pytest.raises(UserError, match="url"):
        check_reward("qwenvl", options={})


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    """Use an empty hub cache, without a network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_every_reward_is_listed(empty_cache, capsys):
    rewards.list_rewards(Namespace())
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == rewards.HEAD
    assert [line.split()[0] for line in lines[: len(CARDS)]] == [*CARDS]
    [pickscore] = [line for line in lines if line.startswith("pickscore ")]
    assert pickscore.split()[1:4] == ["missing", "986", "M"]


def test_check_all_reports_each_reward_in_a_line(empty_cache, capsys):
    """Rewards that need no weights work; the others report what they need."""
    options = {"options": {}, "device": "cpu", "server": []}
    assert rewards.check_rewards(Namespace(names=["all"], **options)) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    found = {line.split()[0]: line for line in lines[:-1]}
    assert {*found} == {*CARDS}
    for name, card in CARDS.items():
        state = found[name].split()[1]
        if card.weights:
            assert all(f"hf download {weights}" in found[name] for weights in card.weights)
        offline = card.runs in ("in process", "worker processes")
        works = offline and (not card.model or name in ("ocr", "keep_source"))
        assert state == ("ok" if works else "skipped"), found[name]


def test_any_error_while_a_reward_is_loaded_is_one_line(monkeypatch):
    """Then `check all` goes on with the next reward."""

    def fails(*names, **settings):
        raise RuntimeError("no kernel image\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(reward_check, "build_scorers", fails)
    with raises_user_error("cannot be loaded: RuntimeError: no kernel", field="reward 'choice'"):
        check_reward("choice", options={})


def test_check_prints_the_scores_and_exits_by_the_verdict():
    done = run_script("scripts/rewards.py", "check", "choice")
    assert done.returncode == 0, done.stderr
    assert "choice: 3 of 3 pairs ranked as expected" in done.stdout
    wrong = run_script(
        "scripts/rewards.py", "check", "overlong", "--options", '{"overlong": {"limit": 10000}}'
    )
    assert wrong.returncode == 1
    assert "0 of 3" in wrong.stdout


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["check", "chioce"], "did you mean choice?"),
        (["check", "choice", "--options", "[1]"], "must be {"),
        (["check", "choice", "--options", '{"ocr": {}}'], "--options names 'ocr'"),
    ],
)
def test_wrong_arguments_are_reported_in_one_line(arguments, shown):
    done = run_script("scripts/rewards.py", *arguments)
    assert done.returncode == 2
    assert shown in done.stderr
    assert done.stderr.count("\n") == 1
