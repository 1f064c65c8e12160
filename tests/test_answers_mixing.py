"""Several data sets in one run, other names of columns, prompts that are too long, and reward
models: what a user's own data bring along."""

import json
from fractions import Fraction
from pathlib import Path

import answer_runs
import numpy as np
import pytest
import small_judge
import small_vlm

from flow_grpo.answer.plan import AnswerPlan
from flow_grpo.answer.prompts import PromptEncoder
from flow_grpo.answer.rollout import Rollout
from flow_grpo.answer.session import build_session
from flow_grpo.data.mixing import set_of
from flow_grpo.data.questions import Keys, read_questions
from flow_grpo.errors import UserError

CLASS = "flow_grpo.rewards.answers.reward_model:RewardModel"
AT_ONCE = {"most_at_once": 20}
SHARES = [(9, Fraction("0.3")), (12, Fraction("0.7"))]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(small_vlm.save(tmp_path_factory.mktemp("answers")))


def questions(folder: Path, count: int, key: str = "question", **columns: str) -> Path:
    """A data set of sums, with files to train and to test on."""
    folder.mkdir()
    rows = [{key: f"What is {i}+{i}?", **columns} for i in range(count)]
    for split in ("train", "test"):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(lines)
    return folder


def drawn(epoch: int, before: Rollout | None = None, processes: int = 1) -> Rollout:
    plan = AnswerPlan(processes, 10, group_size=2, updates_per_pass=1, inner_epochs=1, **AT_ONCE)
    saved = [] if before is None else [state.to_json() for state in before.passes]
    return Rollout.draw(plan, SHARES, seed=3, epoch=epoch, saved=saved)


def counts(rows: np.ndarray) -> list[int]:
    return np.bincount(set_of([9, 12], rows), minlength=2).tolist()


def test_an_epoch_has_exactly_its_share_of_each_data_set():
    """And uses every question of a set before any is used again, as often as its share asks."""
    orders, rollout, often = set(), None, np.zeros(21, int)
    for epoch in range(24):  # 8 passes of the first set and 14 of the second
        rollout = drawn(epoch, rollout)
        assert counts(rollout.rows) == [3, 7]
        assert len({*rollout.rows}) == 10
        orders.add(tuple(set_of([9, 12], rollout.rows)))
        often[rollout.rows] += 1
        assert all(np.ptp(own) <= 1 for own in np.split(often, [9]))
    assert len(orders) > 10  # updates mix the sets
    assert often.tolist() == [8] * 9 + [14] * 12


def test_neither_processes_nor_epochs_before_change_what_an_epoch_draws():
    first = drawn(0)
    assert np.array_equal(drawn(1, first).rows, drawn(1, first, processes=2).rows)
    assert not np.array_equal(first.rows, drawn(1, first).rows)


def test_a_question_is_replaced_by_one_of_its_own_data_set():
    before, asked = drawn(0), []
    rollout = drawn(1, before)
    while not rollout.has_drawn_all:  # 6 questions of the first set are left, 5 of the second
        asked += rollout.rows.tolist()
        rollout.keep_groups_with(np.zeros(20))
        again = rollout.refill()
        assert counts(rollout.rows) == [3, 7]
        assert not {*rollout.rows[again // 2]} & {*asked}
    assert {*asked, *rollout.rows} == set(range(21))
    assert [state.taken for state in before.passes] == [3, 7]  # an epoch leaves the one before
    assert [state.taken for state in rollout.passes] == [3 + 9, 7 + 12]


def test_questions_that_were_replaced_are_not_drawn_again_in_the_pass():
    rollout, often = None, np.zeros(21, int)
    for epoch in range(20):
        rollout = drawn(epoch, rollout)
        often[rollout.rows] += 1
        rollout.keep_groups_with(np.repeat(np.arange(10.0) % 4, 2))  # three of ten have none
        often[rollout.rows[rollout.refill()[::2] // 2]] += 1
        assert rollout.refilled == 3
        assert all(np.ptp(own) <= 1 for own in np.split(often, [9]))
    assert often.sum() == 20 * 13


def test_columns_may_have_other_names(tmp_path):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 1+1?"}]
    rows = [{"prompt": "What is 1+1?", "solution": 2}, {"prompt": chat, "solution": "2"}]
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain, talked = read_questions(path, Keys("prompt", "solution"))
    assert (plain.text, plain.answer, plain.system) == ("What is 1+1?", "2", "")
    assert (talked.text, talked.answer, talked.system) == ("What is 1+1?", "2", "Be brief.")
    assert plain.metadata["answer"] == "2"
    assert read_questions(path, Keys("prompt", ""))[0].answer == ""
    for keys, told in (
        (Keys("text", "solution"), "has no 'text' (input_key), it has: prompt, solution"),
        (Keys("prompt", "truth"), "--config.answer_key; it has: prompt, solution"),
    ):
        with pytest.raises(UserError) as caught:
            read_questions(path, keys)
        assert f"{path}:1: " in str(caught.value)
        assert told in str(caught.value)


def test_a_run_with_two_data_sets_and_two_reward_models(model, tmp_path, caplog, monkeypatch):
    """Rows have no truth: reward models need none. Each prompt is measured once."""
    measured, length = [], PromptEncoder.length
    monkeypatch.setattr(
        PromptEncoder, "length", lambda *own: measured.append(length(*own)) or measured[-1]
    )
    caplog.set_level("INFO")
    few = questions(tmp_path / "few", 4, "prompt")
    many = questions(tmp_path / "many", 9, "prompt")
    long = {"prompt": "What is " + "1+" * 60 + "1?"}
    with (many / "train.jsonl").open("a") as file:
        file.write(json.dumps(long) + "\n")
    judges = {name: str(small_judge.save(tmp_path / name, seed)) for seed, name in enumerate("ab")}
    fields = {
        "pretrained.model": model,
        "dataset": f"{few}:0.3,{many}:0.7",
        "input_key": "prompt",
        "answer_key": "",
        "max_prompt_length": 60,
        "filter_overlong_prompts": True,
        "sample.questions_per_epoch": 10,
        "logdir": str(tmp_path / "logs"),
    }
    config = answer_runs.config_of(num_epochs=1, **fields)
    config.custom_rewards = dict.fromkeys(judges, CLASS)
    config.reward_options = {name: {"model": folder} for name, folder in judges.items()}
    config.reward_fn = {"a": 0.5, "b": 2.0}
    config.unlock()
    session = build_session(config)
    assert len(measured) == 14 + 2
    try:
        answer_runs.train_vlm.train(session)
    finally:
        session.close()
    lines = (session.folder / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    assert last["reward/avg"] == pytest.approx(0.5 * last["reward/a"] + 2 * last["reward/b"])
    assert last["train/grad_norm"] > 0
    assert {"eval/few/a", "eval/many/avg"} <= last.keys()
    told = caplog.text
    assert "few                   3 of 10 questions" in told
    assert "many                  7 of 10 questions" in told
    assert "left out: 1 of 14 questions to train on and 0 of 2 to test on have prompts" in told
    trained = sum(p.numel() for p in session.policy.parameters())
    assert (
        f"trained               LoRA on 14 layers, not in the vision tower: {trained:,} p" in told
    )


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"max_prompt_length": 9}, "train.jsonl:1 has 1"),
        ({"max_prompt_length": 9, "filter_overlong_prompts": True}, "none of the 2 test questions"),
        ({"answer_key": ""}, "reward 'math_answer' scores none of the 8 questions"),
    ],
)
def test_what_cannot_be_trained_is_told_in_a_line(model, tmp_path, fields, told):
    data = questions(tmp_path / "data", 8, answer="2")
    config = answer_runs.config_of(
        **{"pretrained.model": model, "dataset": str(data), "logdir": str(tmp_path), **fields}
    )
    if "answer_key" in fields:
        config.reward_fn = {"math_answer": 0.9, "answer_format": 0.1}
    with pytest.raises(UserError) as caught:
        build_session(config)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
