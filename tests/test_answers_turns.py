"""Episodes of several turns: what is trained is exactly what was sampled, and bad environments end
their episodes, not the run."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import answer_runs
import numpy as np
import pytest
import small_vlm
import torch
from environments import EPISODES
from ml_collections import ConfigDict
from runner import ROOT

from flow_grpo.answer import environment
from flow_grpo.answer.batches import Talk, packed
from flow_grpo.answer.check import check
from flow_grpo.answer.environment import Environments, Move
from flow_grpo.answer.network import AnswerModel
from flow_grpo.answer.policy import AnswerPolicy
from flow_grpo.answer.rollout import Answerer, Rollout, Sample
from flow_grpo.answer.session import build_session
from flow_grpo.answer.turns import Player
from flow_grpo.config.settings import to_json
from flow_grpo.data.questions import find_questions
from flow_grpo.data.seeding import sample_generators
from flow_grpo.errors import UserError
from flow_grpo.pictures import read_picture
from flow_grpo.run.resume import check_goal

ENVIRONMENTS = Path(__file__).with_name("environments.py")
EXAMPLE, SHAPES = ROOT / "examples/look_closer", ROOT / "dataset/shapes_qa"
ROWS = [0, 0, 1, 1, 1, 2, 2, 2]
TEMPERATURE = 0.9


def player_of(policy: AnswerPolicy, environments: Environments, **settings) -> Player:
    answerer = Answerer(policy, small_vlm.encoder(policy.model), 12, (small_vlm.EOS,))
    return Player(
        answerer, environments, **{"max_turns": 3, "max_observation_tokens": 60, **settings}
    )


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl"])
def policy(request) -> AnswerPolicy:
    model = small_vlm.build(request.param)
    return AnswerPolicy(model, parts=[], use_lora=False, temperature=TEMPERATURE)


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    return small_vlm.questions(tmp_path_factory.mktemp("questions"))


@pytest.fixture(scope="module")
def looker():
    environments = Environments(f"{ENVIRONMENTS}:Looker", {}, timeout=60, workers=2)
    yield environments
    environments.close()


def play(player: Player, questions, index: list[int]) -> tuple[dict, list[Sample]]:
    rows = [ROWS[i] for i in index]
    prompts = player.answerer.encode(questions, rows)
    with player.answerer.awake():
        return prompts, player.play(questions, prompts, rows, sample_generators(1, 2, index))


@pytest.fixture(scope="module")
def episodes(policy, questions, looker):
    return play(player_of(policy, looker), questions, list(range(len(ROWS))))


def stock(network: AnswerModel, ids: torch.Tensor, pictures: list[dict]) -> torch.Tensor:
    """Log-probabilities (S - 1,) of a whole conversation's tokens, by transformers alone."""
    inputs = (
        {name: torch.cat([own[name] for own in pictures]) for name in pictures[0]}
        if pictures
        else {}
    )
    kinds = (ids == small_vlm.IMAGE).int()[None]
    with torch.no_grad():
        logits = network.model(input_ids=ids[None], mm_token_type_ids=kinds, **inputs).logits[0]
    logits = logits.double() / TEMPERATURE
    logits[:, list(network.banned)] = -torch.inf
    return logits.log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]


def test_sampled_tokens_alone_are_trained_and_score_as_in_plain_transformers(policy, episodes):
    """Token by token, on the whole conversation with all its pictures."""
    prompts, samples = episodes
    plan = SimpleNamespace(samples=len(samples))
    rollout = Rollout(plan, None, samples=dict(enumerate(samples)), prompts=prompts)
    batch = packed([rollout.answer(i) for i in range(len(samples))], small_vlm.PAD)
    with torch.no_grad():
        trained = policy.network.eval()(batch)["log_probs"]
    turns, looked = set(), 0
    for number, sample in enumerate(samples):
        prompt, talk = prompts[sample.row], sample.talk
        whole = torch.cat([prompt.ids, talk.ids])
        scores = stock(policy.network, whole, [*prompt.seen, *talk.seen])[len(prompt) - 1 :]
        assert talk.ids[talk.sampled].tolist() == sample.tokens.tolist()
        own = batch.mask[number]
        assert batch.tokens[number][own].tolist() == sample.tokens.tolist()
        for ours in (trained[number][own], sample.log_probs):
            assert (ours - scores[talk.sampled]).abs().max() < 2e-6
        turns.add(len(sample.played.said))
        looked += len(talk.seen)
    assert len(turns) > 1  # episodes of several lengths
    assert looked > 3


def test_a_conversation_reads_as_its_chat_template_writes_it(policy, episodes):
    """An answer that was cut off is closed by the template, and that is not trained."""
    encoder, ended = small_vlm.encoder(policy.model), set()
    for sample in episodes[1]:
        talk, turns = sample.talk, []
        for tokens, heard in zip(_answers(talk), [*sample.played.heard, None], strict=True):
            ended.add(bool(tokens[-1] == small_vlm.EOS))
            said = encoder.tokenizer.decode(tokens).removesuffix("<|im_end|>")
            turns.append({"role": "assistant", "content": said})
            if heard is not None:
                parts = heard.split("<image>")
                content = [{"type": "text", "text": part} for part in parts]
                content[1:1] = [{"type": "image"}] * (len(parts) - 1)
                turns.append({"role": "user", "content": content})
        written = encoder.tokenizer.apply_chat_template(turns, tokenize=False)
        written = written.removeprefix("<|im_start|>").replace("<|image_pad|>", "")
        got = encoder.tokenizer.decode([i for i in talk.ids if i != small_vlm.IMAGE])
        closed = talk.ids[-1] == small_vlm.EOS
        assert got == (written if closed else written.removesuffix("<|im_end|>"))
    assert ended == {True, False}


def _answers(talk: Talk) -> list[torch.Tensor]:
    """The runs of sampled tokens."""
    starts = talk.sampled & ~torch.cat([torch.tensor([False]), talk.sampled[:-1]])
    runs = starts.cumsum(0)[talk.sampled]
    return [talk.ids[talk.sampled][runs == number] for number in runs.unique()]


def test_an_episode_does_not_depend_on_what_is_played_beside_it(
    policy, questions, looker, episodes
):
    _, samples = episodes
    for index in ([2], [7, 4, 0]):
        _, again = play(player_of(policy, looker), questions, index)
        for place, own in zip(index, again, strict=True):
            assert own.tokens.tolist() == samples[place].tokens.tolist()
            assert own.played == samples[place].played


@pytest.fixture(scope="module")
def looking(tmp_path_factory) -> Path:
    """The data of the worked example."""
    folder = tmp_path_factory.mktemp("look_closer")
    subprocess.run([sys.executable, EXAMPLE / "make_data.py", "--out", folder], check=True)
    return folder


def test_the_worked_example_shows_what_was_too_small(looking):
    """The crop is the picture of shapes that was pasted in."""
    question = find_questions(looking, "train")[3]
    [large] = question.images
    environments = Environments(f"{EXAMPLE / 'environment.py'}:LookCloser", {}, 60, workers=1)
    right = f"<answer>{question.answer}</answer>"
    said = ["<look>"], ["<look>", right], ["<look>", "<look>"], [right], ["<answer>9</answer>"]
    moves = [Move.of((0, number), question, each) for number, each in enumerate(said)]
    looked, *ended = environments.step(moves)
    environments.close()
    assert (looked.text, looked.reward, looked.done) == (question.text, 0.0, False)
    assert read_picture(looked.pictures[0]) == read_picture(SHAPES / "images" / large.name)
    assert [(step.reward, step.done) for step in ended] == [(r, True) for r in (1, 0, 1, 0)]


def test_the_worked_example_teaches_a_look_and_what_is_said_of_the_crop_alone(looking, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLE)
    import teach

    questions = find_questions(looking, "train")[:1]
    player = teach.build_player(str(teach.MODEL))
    learned = teach.lessons(player, questions, seed=0)
    player.environments.close()
    tokenizer = player.answerer.encoder.tokenizer
    [question], [(*guesses, looked)] = questions, learned
    assert [guess.talk for guess in guesses] == [None, None]
    talk = looked.talk
    look, said = map(tokenizer.decode, _answers(talk))
    assert look == "<look><|im_end|>"
    [(left, right)] = re.findall(r"(\d)\+(\d)", said)
    assert int(left) + int(right) == int(question.answer)
    assert question.text in tokenizer.decode(talk.ids[~talk.sampled])
    crop = SHAPES / "images" / question.images[0].name
    assert [*map(read_picture, talk.sources)] == [read_picture(crop)]
    policy, batch = player.answerer.policy, packed([looked], player.answerer.pad)
    before = policy.fixed_scores(batch)["log_probs"].sum()
    teach.teach(player, learned, steps=2, lr=1e-3, seed=0)
    assert policy.fixed_scores(batch)["log_probs"].sum() > before + 1


TOLD = {
    "hangs": "no answer within 3 s",
    "dies": "1 worker process died on it",
    "raises": "ZeroDivisionError",
    "long text": "a text of 104,857,600 characters, more than 100,000",
    "large picture": "36,000,000 pixels, more than 16,777,216",
    "odd picture": "the model cannot see a picture of 9000 x 10 pixels",
    "many tokens": "more than sample.max_observation_tokens=60",
    "no reward": "the reward None; it must be a finite number",
    "nothing": "step() returned None; it must return (observation, reward, done)",
}


@pytest.mark.parametrize("trouble", TOLD)
def test_a_bad_environment_ends_its_episode_and_no_other(questions, tmp_path, trouble):
    policy = AnswerPolicy(small_vlm.build(), parts=[], use_lora=False)
    asked = [questions[0], type(questions[0])("What?", (), "bad", {}, "row 2")]
    options = {"trouble": trouble, "mark": "bad", "log": str(tmp_path / "log")}
    timeout = 3 if trouble == "hangs" else 60
    environments = Environments(f"{ENVIRONMENTS}:Misbehaving", options, timeout, workers=1)
    player = player_of(policy, environments)
    prompts = player.answerer.encode(asked, [0, 1])
    start = time.monotonic()
    with player.answerer.awake():
        samples = player.play(asked, prompts, [0, 1, 0], sample_generators(1, 2, [0, 1, 2]))
    environments.close()
    assert time.monotonic() - start < 60
    for sample in (samples[0], samples[2]):
        assert (len(sample.played.said), sample.played.reward) == (2, 1.0)
        assert sample.played.failure == ""
    bad = samples[1]
    assert TOLD[trouble] in bad.played.failure
    assert "\n" not in bad.played.failure
    assert len(bad.played.said) == 1
    if trouble in ("hangs", "dies"):  # what the lost process had begun was played again
        assert sorted((tmp_path / "log").read_text().split()).count("1") > 2


class Text(str):
    def __reduce__(self):
        return print, ("run by whoever reads the pickle",)


class Number(float):
    def __float__(self):
        return float("nan")


def test_a_step_is_made_of_plain_values():
    step = environment.checked((Text("a"), np.float32(0.25), np.bool_(True)))
    assert (type(step.text), type(step.reward), step.done) == (str, float, True)


@pytest.mark.parametrize(
    ("returned", "named"),
    [
        (("a", 0.0, "False"), "done='False'"),
        (("a", 0.0, None), "done=None"),
        (("a", Number(1), False), "a finite number"),
        (("\ud800", 0.0, False), "half a character"),
    ],
)
def test_a_step_that_is_no_step_is_rejected(returned, named):
    with pytest.raises((UserError, ValueError), match=named):
        environment.checked(returned)


def test_what_is_played_again_has_a_time_limit_for_each_answer(questions):
    """As no worker has the episode: what another process played is lost."""
    environments = Environments(f"{ENVIRONMENTS}:Slow", {"seconds": 0.8}, timeout=3, workers=1)
    [step] = environments.step([Move.of((1, 0), questions[0], ["a"] * 4)])
    environments.close()
    assert step.text == "4"


def test_a_worker_waits_in_vain_for_so_many_steps_of_a_turn(questions, monkeypatch):
    """However long those take that keep to the limit."""
    monkeypatch.setattr(environment, "MAX_OVERRUNS", 1)
    environments = Environments(f"{ENVIRONMENTS}:Slow", {}, timeout=2, workers=2)
    said = ["a", "a", "hang", "a", "a", "a"]
    moves = [Move.of((1, number), questions[0], [each]) for number, each in enumerate(said)]
    told = [getattr(each, "text", "") or each.reason for each in environments.step(moves)]
    again = environments.step([Move.of((1, 0), questions[0], ["a", "a"])])
    environments.close()
    late = "1 other steps of its worker took over environment_timeout"
    assert told == ["1", "1", "no answer within 2 s", "1", late, "1"]
    assert again[0].text == "2"


LICENSED = """
import os
from pathlib import Path

folder = Path(__file__).parent
(folder / f"started-{os.getpid()}").touch()
if (folder / "no_more").exists():
    raise RuntimeError("no licence left")

class Licensed:
    def reset(self, row): ...

    def step(self, answer):
        if answer == "crash":
            (folder / "no_more").touch()
            os._exit(3)
        return "", 0.0, False
"""


def test_workers_that_cannot_start_again_end_episodes_and_at_first_the_run(
    questions, tmp_path, monkeypatch
):
    """The module lies where only the trainer would look, as beside a config."""
    (tmp_path / "licensed_environment.py").write_text(LICENSED)
    monkeypatch.syspath_prepend(tmp_path)
    settings = ("licensed_environment:Licensed", {}, 60)
    environments = Environments(*settings, workers=2)
    environments.try_out(questions[0])
    assert len(list(tmp_path.glob("started-*"))) == 2
    said = {0: "crash", 2: "a", 1: "a"}
    moves = [Move.of((5, number), questions[0], [each]) for number, each in said.items()]
    died, lost, fine = environments.step(moves)
    environments.close()
    assert died.reason == "1 worker process died on it"
    assert "no licence left" in lost.reason
    assert fine.text == ""
    environments = Environments(*settings, workers=1)
    with pytest.raises(UserError, match=r"fails when it is tried: .*no licence left"):
        environments.try_out(questions[0])
    environments.close()


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("answers")
    model, data = small_vlm.save(folder / "model"), small_vlm.small_data(folder / "data")
    return {"pretrained.model": str(model), "dataset": str(data), **EPISODES}


def test_a_run_trains_episodes_and_adds_their_rewards(places, tmp_path):
    session = answer_runs.run(**places, logdir=str(tmp_path), num_epochs=2)
    for line in map(json.loads, (session.folder / "metrics.jsonl").read_text().splitlines()[1:]):
        assert line["train/first_update_ratio_dev"] <= 1e-5
        assert line["train/grad_norm"] > 0
        assert 1 < line["answer/turns"] < 2
        both = line["reward/mine"] + line["reward/environment"]
        assert line["reward/avg"] == pytest.approx(both)
    again = answer_runs.config_of(**places, logdir=str(tmp_path), num_epochs=2, resume="auto")
    build_session(again).close()  # the same command goes on


@pytest.mark.parametrize("other", [{}, {"tool": True, "box": (1, 2)}, {"box": (1, 2)}])
def test_other_options_are_another_goal(places, tmp_path, other):
    config = answer_runs.config_of(**places, logdir=str(tmp_path), resume="auto")
    config.environment_options = {"tool": False, "box": (1, 2)}
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").write_text(json.dumps(to_json(check(config))))
    check_goal(config)
    config.environment_options = ConfigDict(other)
    with pytest.raises(UserError, match="had another goal: environment_options="):
        check_goal(config)


def test_missing_rewards_are_counted_and_the_run_goes_on(places, tmp_path):
    options = {"trouble": "raises", "mark": "5", "log": str(tmp_path / "log")}
    fields = {**places, "environment": f"{ENVIRONMENTS}:Misbehaving", "num_epochs": 1}
    fields |= {"sample.questions_per_epoch": 8, "max_failed_fraction": 0.2}
    config = answer_runs.config_of(**fields, logdir=str(tmp_path))
    config.environment_options = options
    session = build_session(config)
    try:
        answer_runs.train_vlm.train(session)
    finally:
        session.close()
    line = json.loads((session.folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["reward/failed"] == line["reward/mine/failed"] == 4  # a group of 8 has none
    assert np.isfinite(line["reward/avg"])


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"environment": f"{ENVIRONMENTS}:NoStep"}, "must name a class with reset(row) and step"),
        ({"environment": f"{ENVIRONMENTS}:Nobody"}, "cannot import"),
        ({"sample.max_turns": 50}, "do not fit into the model's 256 positions"),
        (
            {"environment": "", "sample.max_turns": 4, "sample.max_observation_tokens": 512},
            "reward_fn has 'environment'",
        ),
        ({"environment": f"{ENVIRONMENTS}:Misbehaving"}, "fails when it is tried"),
    ],
)
def test_a_mistake_is_told_before_training(places, tmp_path, fields, told):
    config = answer_runs.config_of(**{**places, "logdir": str(tmp_path), **fields})
    config.reward_fn = {"mine": 1.0, "environment": 0.5}
    with pytest.raises(UserError) as caught:
        build_session(config)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
