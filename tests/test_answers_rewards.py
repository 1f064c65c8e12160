"""Rewards of answers: what is right, what is wrong, and what cannot be told."""

import math
import textwrap

import pytest

from flow_grpo.errors import UserError
from flow_grpo.rewards import ANSWER_REWARDS, answers, build_reward, build_scorers, close_scorers
from flow_grpo.rewards.answers import (
    MAX_TEXT,
    AnswerFormat,
    Choice,
    MathAnswer,
    Overlong,
    final_answer,
    quick_check,
)
from flow_grpo.rewards.answers.checker import same
from flow_grpo.rewards.answers.maths import Unreadable
from flow_grpo.rewards.failure import NotAsked

# answer, truth, whether they are the same
WITHOUT_ALGEBRA = [
    ("1/2", r"\frac{1}{2}", True),
    ("0.5", r"\frac12", True),
    (r"$\dfrac{3}{4}$", "0.75", True),
    (r"2\frac{1}{2}", "5/2", True),
    ("2 1/2", "2.5", True),
    ("50%", "0.5", True),
    ("50", r"50\%", True),
    ("5%", "0.5", False),
    ("1,000", "1000", True),
    ("1e3", "1000", True),
    (r"10^{-2}", "0.01", True),
    ("-3", "3", False),
    ("1000000", "1000001", False),
    ("0.333333", "1/3", True),
    ("0.33", "1/3", False),
    ("x = 5", "5", True),
    (r"5\text{ cm}", "5", True),
    (r"90^\circ", "90", True),
    (r"\text{Yes}", "yes", True),
    ("no", "yes", False),
    ("0", "0.0", True),
]
WITH_ALGEBRA = [
    (r"\sqrt{4}", "2", True),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}", True),
    (r"\pi", "3.14159265", True),
    (r"\pi", "3.14", False),
    ("x^2+2x+1", "(x+1)^2", True),
    (r"2\pi r", r"2r\pi", True),
    ("(1,2)", "(2,1)", False),
    (r"\{2,1\}", "1, 2", True),
    (r"1\pm\sqrt{2}", r"1+\sqrt2,1-\sqrt2", True),
    ("[0,1)", "(0,1)", False),
    (r"\sin^2 x+\cos^2 x", "1", True),
    ("|−3|", "3", True),
    ("5!", "120", True),
    ("3 + 4i", "4i+3", True),
    ("1/0", "3", False),
    ("2x+3", "2x+5", False),  # off by a constant
    ("2x+5", "5+2x", True),
    ("x^2", "x^2+i", False),
    (r"\sqrt{x}+\pi", r"\sqrt{x}", False),
    ("x+0.0000001", "x", False),
    ("x+3.3333333", r"x+\frac{10}{3}", True),
    ("(x,1)", "(x+1,1)", False),
    (r"\{1,x\}", r"\{1,x+1\}", False),
    (r"\frac{1\pm\sqrt{5}}{2}", r"\frac{1\pm\sqrt{3}}{2}", False),
    (r"\frac{1\pm\sqrt{5}}{2}", r"\frac{1+\sqrt5}{2},\frac{1-\sqrt5}{2}", True),
    (r"0,1\pm x", "1+x,0,1-x", True),
]


@pytest.mark.parametrize(("answer", "truth", "right"), WITHOUT_ALGEBRA)
def test_numbers_are_compared_without_sympy(answer, truth, right):
    assert quick_check(answer, truth) == float(right)


def test_formulas_are_compared_by_sympy():
    for answer, truth, right in WITH_ALGEBRA:
        pair = quick_check(answer, truth)
        assert isinstance(pair, tuple), (answer, truth)
        assert same(*pair) == right, (answer, truth)


@pytest.mark.parametrize(
    "answer",
    ["I do not know", "", r"\frac{1}{2", "(" * 500, "__import__('os')", "3 4", "x;y", "f(1,2)"],
)
def test_what_is_no_formula_is_unreadable(answer):
    with pytest.raises(Unreadable):
        quick_check(answer, "3")


@pytest.mark.parametrize("said", ["1+" * 999 + "1", "2*" * 999 + "1", "√" * 1999, r"\ln" * 660])
def test_an_answer_that_repeats_itself_is_unreadable_and_no_crash(said):
    """A crash would cost its neighbours their scores."""
    with pytest.raises(Unreadable):
        quick_check(said, "3")


def test_a_long_sum_is_read():
    assert quick_check("+".join(["1"] * 100), "100") == 1


def test_a_truth_that_cannot_be_read_gives_no_score():
    matrix = r"\begin{pmatrix}1\\2\end{pmatrix}"
    assert quick_check(matrix.replace("1", " 1 "), matrix) == 1
    missing = quick_check("3", matrix)
    assert math.isnan(missing)
    assert "its truth" in missing.reason
    assert math.isnan(quick_check("(4,6)", "(1,2)+t(3,4)"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<think>1+2</think><answer> 3 </answer>", "3"),
        ("<answer>1</answer> no: <answer>2</answer>", "2"),
        (r"so \boxed{1}, or \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1}<answer>it is \boxed{2}</answer>", "2"),
        (r"\boxed{1", None),
        ("<answer>1", None),
        ("3", None),
    ],
)
def test_where_the_final_answer_stands(text, said):
    assert final_answer(text) == said


@pytest.fixture(scope="module")
def maths():
    reward = build_reward({"math_answer": 1.0}, options={"math_answer": {"timeout": 3.0}})
    yield reward
    close_scorers(reward)


def test_malicious_answers_have_no_score_and_neighbours_are_unharmed(maths):
    """Time-outs, not zeros: of the tower sympy never comes back, and text of 1 MB is not read."""
    answers = [
        r"<answer>\sqrt{4}</answer>",
        r"<answer>5^{5^{5^{5}}}</answer>",
        r"\boxed{\frac{4}{2}}",
        "<answer>" + "9" * 10**6 + "</answer>",
        "(" * 10**6,
        r"\boxed{2\sin(\pi/2)}",
        "<answer>three</answer>",
        "<answer>3</answer>",
        "2",
    ]
    result = maths(answers, ["q"] * len(answers), [{"answer": "2"}] * len(answers))
    scores = result["math_answer"].tolist()
    assert [i for i, score in enumerate(scores) if math.isnan(score)] == [1, 3, 4]
    assert [score for score in scores if not math.isnan(score)] == [1, 1, 1, 0, 0, 0]
    assert result["math_answer/unread"].tolist() == [0, 0, 0, 0, 0, 0, 1, 0, 0]
    assert maths.last_errors["math_answer"]


def test_a_formula_that_is_off_by_a_constant_is_wrong_and_no_outage(maths):
    answers = ["<answer>2x+3</answer>", "<answer>f(1,2)</answer>", "<answer>5+2x</answer>"]
    result = maths(answers, ["q"] * 3, [{"answer": "2x+5"}] * 3)
    assert result["math_answer"].tolist() == [0, 0, 1]


def test_checks_end_with_their_budget(monkeypatch):
    monkeypatch.setattr(answers, "SHARE", 1)
    scorer = MathAnswer(timeout=0.5, budget=0.1)
    towers = [rf"<answer>{n}^{{9^{{9^{{9}}}}}}</answer>" for n in range(2, 5)]
    try:
        scores, _ = scorer(towers, [""] * 3, [{"answer": "2"}] * 3)
    finally:
        scorer.close()
    assert all(map(math.isnan, scores))
    assert "no answer within 0.5 s" in scores[0].reason
    assert "not checked: other answers took 0.1 s" in scores[-1].reason


def test_an_untagged_answer_counts_where_it_is_asked_for():
    for untagged, wanted in ((True, [1.0, 1.0]), (False, [0.0, 1.0])):
        scorer = MathAnswer(untagged=untagged)
        assert scorer(["7", r"\boxed{7}"], ["", ""], [{"answer": "7"}] * 2)[0] == wanted
        assert not scorer.pool.pids()  # numbers start no process


@pytest.mark.parametrize(
    ("text", "tags", "boxed"),
    [
        ("<think>1</think><answer>2</answer>", 1, 0),
        (" <think>1\n</think>\n<answer>\n2</answer>\n", 1, 0),
        (r"<think>1</think> so \boxed{2}", 0, 1),
        (r"<think>1</think><answer>\boxed{2}</answer>", 1, 1),
        ("<think>1</think><answer> </answer>", 0, 0),
        ("<think>1</think>2", 0, 0),
        ("<answer>2</answer>", 0, 0),
        ("<think>1<think></think><answer>2</answer>", 0, 0),
        ("<think>1</think>so <answer>2</answer>", 0, 0),
        ("<answer>2</answer><think>1</think>", 0, 0),
        ("", 0, 0),
    ],
)
def test_the_format_of_an_answer(text, tags, boxed):
    assert AnswerFormat()([text], [""], [{}]) == [tags]
    assert AnswerFormat(boxed=True)([text], [""], [{}]) == [boxed]


def test_a_choice_is_read_from_tags_boxes_and_sentences():
    texts = {
        "<answer>B</answer>": 1,
        "<answer>(b)</answer>": 1,
        r"\boxed{\text{B}}": 1,
        "<answer>B. a dog</answer>": 1,
        "I first thought the answer is A, but the answer is (B)": 1,
        "<answer>A</answer>": 0,
        "<answer>A dog or B</answer>": 0,
        "Because": 0,
        "": 0,
    }
    truths = [{"answer": "(B)"}] * len(texts)
    assert Choice()(list(texts), [""] * len(texts), truths) == list(texts.values())
    [free] = Choice()(["A"], [""], [{"answer": "12"}])
    assert isinstance(free, NotAsked)
    endless = "1 " + "a" * (MAX_TEXT - 3) + "!"  # minutes, were time to grow with its square
    assert Choice()([endless], [""], [{"answer": "B"}]) == [0]
    assert math.isnan(Choice()(["B" * 10**6], [""], [{"answer": "B"}])[0])


def test_long_answers_are_punished_softly():
    def score(tokens: int, **options: float) -> float:
        metadata = {"answer_tokens": tokens, "max_new_tokens": 100}
        return Overlong(**options)([""], [""], [metadata])[0]

    assert [score(n) for n in (10, 80, 90, 100)] == [0, 0, -0.5, -1]
    assert score(60, buffer=50) == pytest.approx(-0.2)
    assert score(60, limit=50) == -1
    assert math.isnan(Overlong()([""], [""], [{}])[0])


def test_a_function_of_ones_own_by_module_or_file(tmp_path, monkeypatch):
    code = """
        def short(answers, questions, metadata):
            return [1.0 / len(answer) for answer in answers], {"words": [2.0] * len(answers)}
    """
    (tmp_path / "own_answers.py").write_text(textwrap.dedent(code))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for path in ("own_answers:short", "own_answers.py:short", f"{tmp_path}/own_answers.py:short"):
        reward = build_reward({"mine": 1.0, "answer_format": 0.5}, custom={"mine": path})
        result = reward(["ab", "<think>1</think><answer>2</answer>"], ["q"] * 2, [{}] * 2)
        assert result["mine"].tolist() == [0.5, 1 / 34]
        assert result["mine/words"].tolist() == [2, 2]
        assert result["avg"][1] == pytest.approx(1 / 34 + 0.5)
    with pytest.raises(UserError, match=r"'mine': cannot import 'none.py:short'"):
        build_scorers(["mine"], custom={"mine": "none.py:short"})


@pytest.mark.parametrize("name", ANSWER_REWARDS)
def test_pictures_are_refused_by_name(name):
    [scorer] = build_scorers([name]).values()
    assert scorer.kind == "answer"
    with pytest.raises(TypeError, match=f"'{name}' scores answers"):
        scorer([object()], [""], [{"answer": "A"}])


@pytest.mark.parametrize(
    ("name", "option"),
    [("math_answer", "timeout"), ("math_answer", "workers"), ("overlong", "buffer")],
)
def test_options_that_make_no_sense_are_refused(name, option):
    with pytest.raises(UserError, match="must be more than 0"):
        build_scorers([name], options={name: {option: 0}})
