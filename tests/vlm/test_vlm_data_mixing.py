"""Runs with several data sets, other column names, overlong prompts and reward models."""

import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import small_reward_model
import small_vlm
import vlm_runs
from user_errors import raises_user_error

from flow_grpo.data.mixing import set_indices
from flow_grpo.data.questions import QuestionLayout
from flow_grpo.data.rows import read_file
from flow_grpo.vlm.config_checks import preflight_check
from flow_grpo.vlm.fields import VLM_SPEC, get_config
from flow_grpo.vlm.plan import VlmBatchPlan, build_plan
from flow_grpo.vlm.prompts import PromptEncoder
from flow_grpo.vlm.questions import build_questions
from flow_grpo.vlm.rollout import Rollout
from flow_grpo.vlm.session import build_session

CLASS = "flow_grpo.rewards.text.reward_model:RewardModel"
BATCH_SIZE = {"max_batch_size": 20}
SHARES = [(9, Fraction("0.3")), (12, Fraction("0.7"))]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(small_vlm.save(tmp_path_factory.mktemp("model")))


def questions(folder: Path, count: int, key: str = "question", **columns: str) -> Path:
    """Write a data set of sums with a training and a test split."""
    folder.mkdir()
    rows = [{key: f"What is {i}+{i}?", **columns} for i in range(count)]
    for split in ("train", "test"):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(lines)
    return folder


def drawn(epoch: int, before: Rollout | None = None, processes: int = 1) -> Rollout:
    plan = VlmBatchPlan(
        processes, 10, group_size=2, updates_per_pass=1, inner_epochs=1, **BATCH_SIZE
    )
    saved = [] if before is None else [state.to_json() for state in before.passes]
    return Rollout.draw(plan, SHARES, seed=3, epoch=epoch, saved=saved)


def counts(rows: np.ndarray) -> list[int]:
    return np.bincount(set_indices([9, 12], rows), minlength=2).tolist()


def test_an_epoch_has_exactly_its_share_of_each_data_set():
    """Every question of a set is used before any is repeated."""
    orders, rollout, times_drawn = set(), None, np.zeros(21, int)
    for epoch in range(24):  # 8 passes of the first set and 14 of the second
        rollout = drawn(epoch, rollout)
        assert counts(rollout.rows) == [3, 7]
        assert len({*rollout.rows}) == 10
        orders.add(tuple(set_indices([9, 12], rollout.rows)))
        times_drawn[rollout.rows] += 1
        assert all(np.ptp(own) <= 1 for own in np.split(times_drawn, [9]))
    assert len(orders) > 10  # updates mix the sets
    assert times_drawn.tolist() == [8] * 9 + [14] * 12


def test_drawn_questions_do_not_depend_on_the_world_size():
    first = drawn(0)
    assert np.array_equal(drawn(1, first).rows, drawn(1, first, processes=2).rows)
    assert not np.array_equal(first.rows, drawn(1, first).rows)


def test_a_question_is_replaced_by_one_of_the_same_data_set():
    before, drawn_rows = drawn(0), []
    rollout = drawn(1, before)
    while (
        not rollout.all_questions_drawn
    ):  # 6 questions of the first set and 5 of the second remain
        drawn_rows += rollout.rows.tolist()
        rollout.keep_groups_with_advantage(np.zeros(20))
        again = rollout.refill()
        assert counts(rollout.rows) == [3, 7]
        assert not {*rollout.rows[again // 2]} & {*drawn_rows}
    assert {*drawn_rows, *rollout.rows} == set(range(21))
    assert [state.taken for state in before.passes] == [
        3,
        7,
    ]  # an epoch does not modify the previous one
    assert [state.taken for state in rollout.passes] == [3 + 9, 7 + 12]


def test_replaced_questions_are_not_repeated_within_a_pass():
    rollout, times_drawn = None, np.zeros(21, int)
    for epoch in range(20):
        rollout = drawn(epoch, rollout)
        times_drawn[rollout.rows] += 1
        rollout.keep_groups_with_advantage(np.repeat(np.arange(10.0) % 4, 2))  # 7 of 10 groups
        times_drawn[rollout.rows[rollout.refill()[::2] // 2]] += 1
        assert rollout.refilled == 3
        assert all(np.ptp(own) <= 1 for own in np.split(times_drawn, [9]))
    assert times_drawn.sum() == 20 * 13


def test_column_names_are_configurable(tmp_path):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 1+1?"}]
    rows = [{"prompt": "What is 1+1?", "solution": 2}, {"prompt": chat, "solution": "2"}]
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain, chat_row = read_file(path, QuestionLayout("prompt", answer="solution"))
    assert (plain.text, plain.answer, plain.system) == ("What is 1+1?", "2", "")
    assert (chat_row.text, chat_row.answer, chat_row.system) == ("What is 1+1?", "2", "Be brief.")
    assert plain.metadata["answer"] == "2"
    assert read_file(path, QuestionLayout("prompt", answer=""))[0].answer == ""
    for layout, setting in (
        (QuestionLayout("text", answer="solution"), "input_key"),
        (QuestionLayout("prompt", answer="truth"), "answer_key"),
    ):
        with raises_user_error(f"{path}:1", setting, "prompt, solution"):
            read_file(path, layout)


def test_a_run_with_two_data_sets_and_two_reward_models(model, tmp_path, caplog, monkeypatch):
    """Reward models need no reference answers. Each prompt is measured once."""
    measured, length = [], PromptEncoder.prompt_length
    monkeypatch.setattr(
        PromptEncoder, "prompt_length", lambda *own: measured.append(length(*own)) or measured[-1]
    )
    caplog.set_level("INFO")
    few = questions(tmp_path / "few", 4, "prompt")
    many = questions(tmp_path / "many", 9, "prompt")
    long = {"prompt": "What is " + "1+" * 60 + "1?"}
    with (many / "train.jsonl").open("a") as file:
        file.write(json.dumps(long) + "\n")
    judges = {
        name: str(small_reward_model.save(tmp_path / name, seed)) for seed, name in enumerate("ab")
    }
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
    config = vlm_runs.make_config(num_epochs=1, **fields)
    config.custom_rewards = dict.fromkeys(judges, CLASS)
    config.reward_options = {name: {"model": folder} for name, folder in judges.items()}
    config.reward_fn = {"a": 0.5, "b": 2.0}
    config.unlock()
    session = build_session(config)
    assert len(measured) == 14 + 2
    try:
        vlm_runs.train_vlm.train(session)
    finally:
        session.close()
    last = vlm_runs.read_metrics(session)[-1]
    assert last["reward/avg"] == pytest.approx(0.5 * last["reward/a"] + 2 * last["reward/b"])
    assert last["train/grad_norm"] > 0
    assert {"eval/few/a", "eval/many/avg"} <= last.keys()
    assert "few                   3 of 10 questions" in caplog.text
    assert "many                  7 of 10 questions" in caplog.text
    [dropped] = [line for line in caplog.messages if "max_prompt_length" in line]
    assert "1 of 14 " in dropped
    assert "0 of 2 " in dropped
    trained = sum(p.numel() for p in session.policy.parameters())
    [described] = [line for line in caplog.messages if line.startswith("trained  ")]
    assert "LoRA on 14 layers" in described
    assert f"{trained:,} parameters" in described


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"max_prompt_length": 9}, ["train.jsonl:1 has 1", "max_prompt_length=9"]),
        (
            {"max_prompt_length": 9, "filter_overlong_prompts": True},
            ["max_prompt_length=9", "2 test questions"],
        ),
        ({"answer_key": ""}, ["reward_fn.math_answer", "8 questions", "answer_key"]),
    ],
)
def test_unusable_data_is_rejected(model, tmp_path, fields, shown):
    data = questions(tmp_path / "data", 8, answer="2")
    config = vlm_runs.make_config(
        **{"pretrained.model": model, "dataset": str(data), "logdir": str(tmp_path), **fields}
    )
    if "answer_key" in fields:
        config.reward_fn = {"math_answer": 0.9, "answer_format": 0.1}
    with raises_user_error(*shown):
        build_session(config)


def test_an_eval_dataset_replaces_the_test_split(tmp_path):
    """Without it, a tenth of the single file would be held out."""
    train = questions(tmp_path / "train", 20, answer="1") / "train.jsonl"
    other = questions(tmp_path / "other", 30, key="text", solution="2")
    (other / "train.jsonl").rename(other / "test.jsonl")
    config = get_config()
    config.dataset, config.eval_dataset = str(train), f"{other}@test,{train}"
    config.sample.questions_per_epoch = 10
    plan = build_plan(config.sample, config.train, 1)
    with raises_user_error("--config.eval_answer_key"):
        config.eval_input_key = "text"
        build_questions(config, plan)
    config.eval_dataset, config.eval_answer_key = f"{other}@test", "solution"
    data = build_questions(config, plan)
    assert len(data.train) == 20
    assert [q.answer for q in data.test] == ["2"] * 30
    config.eval_questions, config.eval_image_key = 5, "picture"
    with raises_user_error("all 30 questions", field="eval_image_key", value="picture"):
        build_questions(config, plan)
    config.eval_image_key = "none"
    assert build_questions(config, plan).test == data.test[:5]
    config.eval_dataset = str(tmp_path / "nowhere")
    for check in (
        lambda: build_questions(config, plan),
        lambda: preflight_check(VLM_SPEC.freeze(config)),
    ):
        with raises_user_error("does not exist", field="eval_dataset", value=config.eval_dataset):
            check()
