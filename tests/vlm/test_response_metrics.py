"""avg@n, pass@k and maj@n, with values computed by hand."""

from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
from user_errors import raises_user_error

from flow_grpo.rewards.text.scorers import AnswerFormat, Choice
from flow_grpo.vlm.response_metrics import (
    Correctness,
    answer_parser,
    majority_correct,
    pass_at_k,
)

NAN, INF = np.nan, np.inf


def test_pass_at_k_is_the_fraction_of_subsets_with_a_correct_response():
    correct = np.array([[0, 1, 0, 0, 1, 0], [0] * 6, [1] * 6, [1, 0, 0, 0, 0, 0]], float)
    for k in range(1, 7):
        expected = [np.mean([max(each) for each in combinations(row, k)]) for row in correct]
        assert pass_at_k(correct, k) == pytest.approx(expected)


def test_pass_at_n_is_whether_any_response_is_correct():
    correct = np.array([[0, 1, 0], [0, 0, 0]], float)
    assert pass_at_k(correct, 3).tolist() == [1, 0]
    assert pass_at_k(correct, 1) == pytest.approx([1 / 3, 0])
    with pytest.raises(ValueError, match="pass@4"):
        pass_at_k(correct, 4)


def test_questions_without_all_scores_have_no_pass_at_k_and_majority():
    correct = np.array([[1, NAN], [-INF, -INF], [1, 1]])
    for values in (pass_at_k(correct, 2), majority_correct(correct, [["1", "1"]] * 3)):
        assert np.isnan(values[0])
        assert values[1:].tolist() == [-INF, 1]


def test_the_majority_is_counted_by_equal_answers():
    answers = [
        ["1/2", "0.5", "3"],  # two notations of one number
        ["3", "4", None],  # a tie: the first answer counts
        [None, None, "7"],  # a response without an answer does not vote
        [None, None, None],
    ]
    correct = np.array([[1, 1, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0]], float)
    assert majority_correct(correct, answers).tolist() == [1, 0, 1, 0]


def test_the_reward_with_the_largest_weight_decides_by_default():
    weights = {"answer_format": 0.1, "math_answer": 0.9}
    assert Correctness.parse("", weights) == Correctness("math_answer", 1.0)
    assert Correctness.parse("answer_format:0.5", weights) == Correctness("answer_format", 0.5)
    scores = np.array([0.5, 0.4, 0.49999999, NAN, -INF])
    assert Correctness("mine", 0.5).of(scores).tolist()[:3] == [1, 0, 1]
    assert np.isnan(Correctness("mine").of(scores)[3])
    for text in ("math:1", "math_answer:high", "math_answer:nan"):
        with raises_user_error(text, field="--correct", value=text):
            Correctness.parse(text, weights)


def test_final_answers_are_parsed_as_the_reward_does():
    reward = SimpleNamespace(scorers={"choice": Choice(), "format": AnswerFormat()})
    letters, tagged = answer_parser(reward, "choice"), answer_parser(reward, "format")
    assert letters("The answer is B") == "B"
    assert letters("<answer>C, A</answer>") == "A, C"
    assert tagged("The answer is 4") is None
    assert tagged(r"so \boxed{4}") == "4"
