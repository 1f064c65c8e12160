"""Multi-turn episodes: only sampled tokens are trained, and environment errors end one episode."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import small_vlm
import torch
import vlm_runs
from environments import EPISODES
from ml_collections import ConfigDict
from runner import ROOT
from user_errors import raises_user_error

from flow_grpo.config.settings import to_json
from flow_grpo.data.questions import find_questions
from flow_grpo.data.seeding import sample_generators
from flow_grpo.errors import UserError
from flow_grpo.images import read_image
from flow_grpo.training.config_changes import check_same_goal
from flow_grpo.vlm import environment
from flow_grpo.vlm.config_checks import check_config
from flow_grpo.vlm.environment import EnvironmentPool, StepRequest
from flow_grpo.vlm.multi_turn import EpisodeRunner
from flow_grpo.vlm.network import PolicyModel
from flow_grpo.vlm.packing import Conversation, pack_responses
from flow_grpo.vlm.policy import VlmPolicy
from flow_grpo.vlm.rollout import Rollout, RolloutEngine, Sample
from flow_grpo.vlm.session import build_session

ENVIRONMENTS = Path(__file__).parents[1] / "support/environments.py"
EXAMPLE, SHAPES = ROOT / "examples/look_closer", ROOT / "dataset/shapes_qa"
ROWS = [0, 0, 1, 1, 1, 2, 2, 2]
TEMPERATURE = 0.9


def build_runner(policy: VlmPolicy, environments: EnvironmentPool, **settings) -> EpisodeRunner:
    rollout_engine = RolloutEngine(policy, small_vlm.encoder(policy.model), 12, (small_vlm.EOS,))
    return EpisodeRunner(
        rollout_engine, environments, **{"max_turns": 3, "max_observation_tokens": 60, **settings}
    )


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl", "minicpmv4_7"])
def policy(request) -> VlmPolicy:
    model = small_vlm.build(request.param)
    return VlmPolicy(model, processors=[], use_lora=False, temperature=TEMPERATURE)


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    return small_vlm.questions(tmp_path_factory.mktemp("questions"))


@pytest.fixture(scope="module")
def environments():
    environments = EnvironmentPool(f"{ENVIRONMENTS}:CropEnvironment", {}, timeout=60, workers=2)
    yield environments
    environments.close()


def run_episodes(
    episode_runner: EpisodeRunner, questions, index: list[int]
) -> tuple[dict, list[Sample]]:
    rows = [ROWS[i] for i in index]
    prompts = episode_runner.rollout_engine.encode(questions, rows)
    with episode_runner.rollout_engine.generation_mode():
        return prompts, episode_runner.run(questions, prompts, rows, sample_generators(1, 2, index))


@pytest.fixture(scope="module")
def episodes(policy, questions, environments):
    return run_episodes(build_runner(policy, environments), questions, list(range(len(ROWS))))


def stock(network: PolicyModel, ids: torch.Tensor, images: list[dict]) -> torch.Tensor:
    """Return the log-probabilities (S - 1,) of a conversation by transformers' forward pass."""
    inputs = (
        {name: torch.cat([own[name] for own in images]) for name in images[0]} if images else {}
    )
    if "grid" in inputs:  # MiniCPM-V
        del inputs["grid"]
        inputs["pixel_values"] = inputs["pixel_values"].permute(1, 2, 0, 3).flatten(2)[None]
    kinds = (ids == small_vlm.IMAGE).int()[None]
    with torch.no_grad():
        logits = network.model(input_ids=ids[None], mm_token_type_ids=kinds, **inputs).logits[0]
    logits = logits.double() / TEMPERATURE
    logits[:, list(network.banned_token_ids)] = -torch.inf
    return logits.log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]


def test_only_sampled_tokens_are_trained_with_the_log_probs_of_transformers(policy, episodes):
    prompts, samples = episodes
    plan = SimpleNamespace(samples=len(samples))
    rollout = Rollout(plan, None, samples=dict(enumerate(samples)), prompts=prompts)
    shares = policy.network.family.shares_prompt
    responses = [rollout.response(i, shares_prompt=shares) for i in range(len(samples))]
    batch = pack_responses(responses, small_vlm.PAD)
    with torch.no_grad():
        trained = policy.network.eval()(batch)["log_probs"]
    turns, num_images = set(), 0
    tolerance = 2e-6 if shares else 4e-6  # linear attention rounds differently in chunks
    for number, sample in enumerate(samples):
        prompt, conversation = prompts[sample.row], sample.conversation
        whole = torch.cat([prompt.ids, conversation.ids])
        scores = stock(policy.network, whole, [*prompt.vision_inputs, *conversation.vision_inputs])[
            len(prompt) - 1 :
        ]
        assert conversation.ids[conversation.sampled].tolist() == sample.tokens.tolist()
        own = batch.mask[number]
        assert batch.tokens[number][own].tolist() == sample.tokens.tolist()
        for ours in (trained[number][own], sample.log_probs):
            assert (ours - scores[conversation.sampled]).abs().max() < tolerance
        turns.add(len(sample.episode.responses))
        num_images += len(conversation.vision_inputs)
    assert len(turns) > 1  # episodes of several lengths
    assert num_images > 3


def test_a_conversation_equals_its_rendered_chat_template(policy, episodes):
    """The template closes truncated responses; the closing token is not trained."""
    encoder, ended = small_vlm.encoder(policy.model), set()
    for sample in episodes[1]:
        conversation, turns = sample.conversation, []
        for tokens, observations in zip(
            _responses(conversation), [*sample.episode.observations, None], strict=True
        ):
            ended.add(bool(tokens[-1] == small_vlm.EOS))
            text = encoder.tokenizer.decode(tokens).removesuffix("<|im_end|>")
            turns.append({"role": "assistant", "content": text})
            if observations is not None:
                parts = observations.split("<image>")
                content = [{"type": "text", "text": part} for part in parts]
                content[1:1] = [{"type": "image"}] * (len(parts) - 1)
                turns.append({"role": "user", "content": content})
        written = encoder.tokenizer.apply_chat_template(turns, tokenize=False)
        written = written.removeprefix("<|im_start|>").replace("<|image_pad|>", "")
        got = encoder.tokenizer.decode([i for i in conversation.ids if i != small_vlm.IMAGE])
        shown = len(episodes[0][sample.row].vision_inputs)
        for i in range(shown, shown + len(conversation.vision_inputs)):  # MiniCPM-V
            got = re.sub(f"<image_id>{i}</image_id><image></image>(<slice></slice>|\n)*", "", got)
        closed = conversation.ids[-1] == small_vlm.EOS
        assert got == (written if closed else written.removesuffix("<|im_end|>"))
    assert ended == {True, False}


def _responses(conversation: Conversation) -> list[torch.Tensor]:
    """Return the tokens of each response."""
    starts = conversation.sampled & ~torch.cat([torch.tensor([False]), conversation.sampled[:-1]])
    runs = starts.cumsum(0)[conversation.sampled]
    return [conversation.ids[conversation.sampled][runs == number] for number in runs.unique()]


def test_an_episode_does_not_depend_on_its_batch(policy, questions, environments, episodes):
    _, samples = episodes
    for index in ([2], [7, 4, 0]):
        _, again = run_episodes(build_runner(policy, environments), questions, index)
        for i, own in zip(index, again, strict=True):
            assert own.tokens.tolist() == samples[i].tokens.tolist()
            assert own.episode == samples[i].episode


@pytest.fixture(scope="module")
def look_closer(tmp_path_factory) -> Path:
    """Write the data of examples/look_closer."""
    folder = tmp_path_factory.mktemp("look_closer")
    subprocess.run([sys.executable, EXAMPLE / "make_data.py", "--out", folder], check=True)
    return folder


def test_example_environment_returns_the_crop(look_closer):
    """The crop is the image of shapes that was pasted in."""
    question = find_questions(look_closer, "train")[3]
    [large] = question.images
    environments = EnvironmentPool(f"{EXAMPLE / 'environment.py'}:LookCloser", {}, 60, workers=1)
    correct = f"<answer>{question.answer}</answer>"
    responses = (
        ["<look>"],
        ["<look>", correct],
        ["<look>", "<look>"],
        [correct],
        ["<answer>9</answer>"],
    )
    requests = [
        StepRequest.from_question((0, number), question, each)
        for number, each in enumerate(responses)
    ]
    looked, *ended = environments.step(requests)
    environments.close()
    assert (looked.text, looked.reward, looked.done) == (question.text, 0.0, False)
    assert read_image(looked.images[0]) == read_image(SHAPES / "images" / large.name)
    assert [(step.reward, step.done) for step in ended] == [(r, True) for r in (1, 0, 1, 0)]


def test_example_warm_start_trains_on_the_look_and_the_answer(look_closer, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLE)
    import teach

    questions = find_questions(look_closer, "train")[:1]
    episode_runner = teach.build_episode_runner(str(teach.MODEL))
    learned = teach.sample_conversations(episode_runner, questions, seed=0)
    episode_runner.environments.close()
    tokenizer = episode_runner.rollout_engine.encoder.tokenizer
    [question], [(*guesses, looked)] = questions, learned
    assert [guess.conversation for guess in guesses] == [None, None]
    conversation = looked.conversation
    look, final = map(tokenizer.decode, _responses(conversation))
    assert look == "<look><|im_end|>"
    [(left, right)] = re.findall(r"(\d)\+(\d)", final)
    assert int(left) + int(right) == int(question.answer)
    assert question.text in tokenizer.decode(conversation.ids[~conversation.sampled])
    crop = SHAPES / "images" / question.images[0].name
    assert [*map(read_image, conversation.sources)] == [read_image(crop)]
    policy, batch = (
        episode_runner.rollout_engine.policy,
        pack_responses([looked], episode_runner.rollout_engine.pad),
    )
    before = policy.forward_tokens_no_grad(batch)["log_probs"].sum()
    teach.teach(episode_runner, learned, steps=2, lr=1e-3, seed=0)
    assert policy.forward_tokens_no_grad(batch)["log_probs"].sum() > before + 1


FAILURES = {
    "hangs": "no answer within 3 s",
    "dies": "1 worker process died on it",
    "raises": "ZeroDivisionError",
    "long text": "104,857,600 characters",
    "large image": "36,000,000 pixels",
    "narrow image": "9000 x 10 pixels",
    "many tokens": "sample.max_observation_tokens=60",
    "no reward": "the reward None",
    "nothing": "step() returned None",
    "replaced": "",
}


@pytest.mark.parametrize("trouble", FAILURES)
def test_an_environment_error_ends_only_its_episode(questions, tmp_path, trouble):
    policy = VlmPolicy(small_vlm.build(), processors=[], use_lora=False)
    both = [questions[0], type(questions[0])("What?", (), "bad", {}, "row 2")]
    options = {"trouble": trouble, "mark": "bad", "log": str(tmp_path / "log")}
    timeout = 3 if trouble == "hangs" else 60
    environments = EnvironmentPool(f"{ENVIRONMENTS}:Misbehaving", options, timeout, workers=1)
    episode_runner = build_runner(policy, environments)
    prompts = episode_runner.rollout_engine.encode(both, [0, 1])
    with episode_runner.rollout_engine.generation_mode():
        samples = episode_runner.run(both, prompts, [0, 1, 0], sample_generators(1, 2, [0, 1, 2]))
    environments.close()
    for sample in (samples[0], samples[2]):
        assert (len(sample.episode.responses), sample.episode.reward) == (2, 1.0)
        assert sample.episode.failure == ""
    bad = samples[1]
    if trouble == "replaced":  # a call with a long result must not end the episode
        assert bad.episode.observations == ["too long"]
        assert (len(bad.episode.responses), bad.episode.failure) == (2, "")
        return
    assert FAILURES[trouble] in bad.episode.failure
    assert "\n" not in bad.episode.failure
    assert len(bad.episode.responses) == 1
    if trouble in ("hangs", "dies"):  # episodes of the lost process were replayed
        assert sorted((tmp_path / "log").read_text().split()).count("1") > 2


def test_steps_may_not_last_longer_than_the_timeout_of_the_environment(questions, tmp_path):
    options = {"trouble": "allows long steps", "mark": "", "log": str(tmp_path / "log")}
    environments = EnvironmentPool(f"{ENVIRONMENTS}:Misbehaving", options, 60, workers=1)
    with raises_user_error("environment_timeout=60 must be above 60", field="environment"):
        environments.smoke_test(questions[0])
    environments.close()


class Text(str):
    def __reduce__(self):
        return print, ("executed on unpickling",)


class Number(float):
    def __float__(self):
        return float("nan")


def test_step_results_have_plain_types():
    step = environment.parse_step_result((Text("a"), np.float32(0.25), np.bool_(True)))
    assert (type(step.text), type(step.reward), step.done) == (str, float, True)


@pytest.mark.parametrize(
    ("returned", "named"),
    [
        (("a", 0.0, "False"), "done='False'"),
        (("a", 0.0, None), "done=None"),
        (("a", Number(1), False), "finite"),
        (("\ud800", 0.0, False), r"text returned by step\(\)"),
    ],
)
def test_an_invalid_step_result_is_rejected(returned, named):
    with pytest.raises((UserError, ValueError), match=named):
        environment.parse_step_result(returned)


def test_a_replayed_episode_has_a_time_limit_per_response(questions):
    """No worker has the episode, because the state of another process is lost."""
    environments = EnvironmentPool(f"{ENVIRONMENTS}:Slow", {"seconds": 0.8}, timeout=3, workers=1)
    [step] = environments.step([StepRequest.from_question((1, 0), questions[0], ["a"] * 4)])
    environments.close()
    assert step.text == "4"


def test_a_worker_skips_steps_after_too_many_timeouts_in_a_turn(questions, monkeypatch):
    monkeypatch.setattr(environment, "MAX_TIMEOUTS_PER_TURN", 1)
    environments = EnvironmentPool(f"{ENVIRONMENTS}:Slow", {}, timeout=2, workers=2)
    responses = ["a", "a", "hang", "a", "a", "a"]
    requests = [
        StepRequest.from_question((1, number), questions[0], [each])
        for number, each in enumerate(responses)
    ]
    results = [getattr(each, "text", "") or each.reason for each in environments.step(requests)]
    again = environments.step([StepRequest.from_question((1, 0), questions[0], ["a", "a"])])
    environments.close()
    assert [results[i] for i in (0, 1, 3, 5)] == ["1"] * 4
    assert "2 s" in results[2]
    assert "environment_timeout" in results[4]
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


def test_worker_start_errors_end_episodes_or_the_smoke_test(questions, tmp_path, monkeypatch):
    """The module is in a directory on the trainer's path only, such as that of a config file."""
    (tmp_path / "licensed_environment.py").write_text(LICENSED)
    monkeypatch.syspath_prepend(tmp_path)
    settings = ("licensed_environment:Licensed", {}, 60)
    environments = EnvironmentPool(*settings, workers=2)
    environments.smoke_test(questions[0])
    assert len(list(tmp_path.glob("started-*"))) == 2
    responses = {0: "crash", 2: "a", 1: "a"}
    requests = [
        StepRequest.from_question((5, number), questions[0], [each])
        for number, each in responses.items()
    ]
    died, lost, fine = environments.step(requests)
    environments.close()
    assert died.reason == "1 worker process died on it"
    assert "no licence left" in lost.reason
    assert fine.text == ""
    environments = EnvironmentPool(*settings, workers=1)
    with raises_user_error("no licence left", field="environment"):
        environments.smoke_test(questions[0])
    environments.close()


@pytest.fixture(scope="module")
def settings(model_and_data) -> dict[str, str]:
    return {**model_and_data, **EPISODES}


def test_a_run_trains_episodes_and_adds_their_rewards(settings, tmp_path):
    session = vlm_runs.run(**settings, logdir=str(tmp_path), num_epochs=2)
    for line in vlm_runs.read_metrics(session)[1:]:
        assert line["train/first_update_ratio_dev"] <= 1e-5
        assert line["train/grad_norm"] > 0
        assert 1 < line["answer/turns"] < 2
        both = line["reward/mine"] + line["reward/environment"]
        assert line["reward/avg"] == pytest.approx(both)
    again = vlm_runs.make_config(**settings, logdir=str(tmp_path), num_epochs=2, resume="auto")
    build_session(again).close()  # the same command resumes


def test_gae_credits_each_turn_with_its_own_reward(settings, tmp_path, monkeypatch):
    """Values are still zero, so each return is the sum of the rewards that follow."""
    seen, assign = [], vlm_runs.train_vlm.assign_advantages

    def watched(session, rollout, tensors):
        assign(session, rollout, tensors)
        seen.append((rollout, tensors))

    monkeypatch.setattr(vlm_runs.train_vlm, "assign_advantages", watched)
    vlm_runs.run(**{**settings, "train.advantage": "gae"}, logdir=str(tmp_path), num_epochs=1)
    [(rollout, tensors), *_] = seen
    num_turns = set()
    for index, own in tensors.items():
        episode = rollout.samples[index].episode
        after, expected = float(rollout.scores["avg"][index]), []
        for length, reward in zip(episode.lengths, episode.rewards, strict=True):
            expected += [after] * length
            after -= reward
        assert own.returns.tolist() == pytest.approx(expected, abs=1e-5)
        num_turns.add(len(episode.lengths))
    assert num_turns == {1, 2}


@pytest.mark.parametrize("other", [{}, {"tool": True, "box": (1, 2)}, {"box": (1, 2)}])
def test_changed_environment_options_prevent_a_resume(settings, tmp_path, other):
    config = vlm_runs.make_config(**settings, logdir=str(tmp_path), resume="auto")
    config.environment_options = {"tool": False, "box": (1, 2)}
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").write_text(json.dumps(to_json(check_config(config))))
    check_same_goal(to_json(config))
    config.environment_options = ConfigDict(other)
    with raises_user_error("environment_options="):
        check_same_goal(to_json(config))


def test_missing_rewards_are_counted_and_the_run_continues(settings, tmp_path):
    options = {"trouble": "raises", "mark": "5", "log": str(tmp_path / "log")}
    fields = {**settings, "environment": f"{ENVIRONMENTS}:Misbehaving", "num_epochs": 1}
    fields |= {"sample.questions_per_epoch": 8, "max_failed_fraction": 0.2}
    config = vlm_runs.make_config(**fields, logdir=str(tmp_path))
    config.environment_options = options
    session = build_session(config)
    try:
        vlm_runs.train_vlm.train(session)
    finally:
        session.close()
    line = vlm_runs.read_metrics(session)[-1]
    assert line["reward/failed"] == line["reward/mine/failed"] == 4  # one group of 8
    assert np.isfinite(line["reward/avg"])


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"environment": f"{ENVIRONMENTS}:NoStep"}, ["environment=", "NoStep", "reset"]),
        ({"environment": f"{ENVIRONMENTS}:Nobody"}, ["environment=", "Nobody"]),
        ({"sample.max_turns": 50}, ["sample.max_new_tokens=10", "sample.max_turns=50", "256"]),
        (
            {"environment": "", "sample.max_turns": 4, "sample.max_observation_tokens": 512},
            ["reward_fn.environment"],
        ),
        ({"environment": f"{ENVIRONMENTS}:Misbehaving"}, ["environment=", "Misbehaving"]),
    ],
)
def test_configuration_errors_are_raised_before_training(settings, tmp_path, fields, shown):
    config = vlm_runs.make_config(**{**settings, "logdir": str(tmp_path), **fields})
    config.reward_fn = {"mine": 1.0, "environment": 0.5}
    with raises_user_error(*shown):
        build_session(config)
