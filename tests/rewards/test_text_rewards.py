"""Rewards of text responses: correct, wrong, and those that cannot be checked."""

import contextlib
import math
import random
import textwrap
from pathlib import Path

import pytest
import small_reward_model
from user_errors import raises_user_error

from flow_grpo.data.questions import Question
from flow_grpo.rewards import TEXT_REWARDS, build_reward, build_scorers, close_scorers
from flow_grpo.rewards.failure import Failed, NotApplicable
from flow_grpo.rewards.text import (
    MAX_FINAL_ANSWER_CHARS,
    MAX_RESPONSE_CHARS,
    AnswerFormat,
    Choice,
    MathAnswer,
    Overlong,
    compare_without_algebra,
    extract_final_answer,
)
from flow_grpo.rewards.text.math_parsing import UnparsableFormula
from flow_grpo.rewards.workers.pool import WorkerTimedOut
from flow_grpo.vlm.builders import check_reward_inputs

PAIRS = [
    (answer, truth, right)
    for line in Path(__file__).with_name("answer_pairs.tsv").read_text().splitlines()
    if not line.startswith("#")
    for truth, *columns in [line.split("\t")]
    for right, column in zip((1, 0), columns, strict=True)
    for answer in column.split(" ;; ")
]
# formulas that never end in sympy, or exhaust a worker's memory
BOMBS = [
    "9^{9^{9^9}}",
    "5^{5^{5^{5}}}",
    "((((9^9)^{99})^{99})^{99})^{99}",
    "x^{10^{10}}",
    "2^{10!}",
    r"e^{e^{99}}",
    r"\exp(\exp(\exp(99)))",
    "(10^9)!",
    "10^9!",
    "9!!!!",
    "((9!)!)!",
    r"\binom{10^9}{5}",
    r"\binom{1000000000}{500000000}",
    r"\sum_{k=1}^{10^9} k",
    r"\prod_{k=1}^{999999} k",
    r"\int_0^1 x^x dx",
    r"\det(x)",
    "9" + "^{9" * 600,
    r"\begin{vmatrix}1&x\\x&1\end{vmatrix}",
    "(" * 12 + "1" + ")" * 12,
    "(" * 500,
    r"\frac{1}{" * 12 + "2" + "}" * 12,
    "1+" * 999 + "1",
    "√" * 1999,
    r"\ln" * 660,
    "x^2+" * 99 + "1",
]


@pytest.fixture(scope="module")
def patient():
    with MathAnswer(untagged=True, timeout=60.0, budget=600.0) as scorer:
        yield scorer


def test_every_pair_is_judged_as_labelled(patient):
    assert len(PAIRS) >= 2000
    answers, truths, _ = zip(*PAIRS, strict=True)
    scores, _ = patient(list(answers), [""] * len(PAIRS), [{"answer": each} for each in truths])
    wrong = [pair for pair, score in zip(PAIRS, scores, strict=True) if score != pair[2]]
    assert not wrong


@pytest.mark.parametrize(
    ("answer", "truth"),
    [("1/2", r"\frac{1}{2}"), ("2 1/2", "2.5"), ("50%", "50"), ("1e3", "1,000")],
)
def test_numbers_are_compared_without_sympy(answer, truth):
    assert compare_without_algebra(answer, truth) == 1


@pytest.mark.parametrize("bomb", BOMBS)
def test_costly_formulas_are_rejected_before_sympy_sees_them(bomb):
    with pytest.raises(UnparsableFormula):
        compare_without_algebra(bomb, "3")
    assert math.isnan(compare_without_algebra("x+1", r"9^{9^{9^9}}"))


@pytest.mark.parametrize("answer", ["I do not know", "", r"\frac{1}{2", "3 4", "?", "x;é"])
def test_text_that_is_not_a_formula_is_unparsable(answer):
    with pytest.raises(UnparsableFormula):
        compare_without_algebra(answer, "3")


def test_an_unsupported_ground_truth_gives_no_score():
    integral = r"\int_0^1 f"
    assert compare_without_algebra(r"\int_0^1f", integral) == 1
    missing = compare_without_algebra("3", integral)
    assert math.isnan(missing)
    assert integral in missing.reason.replace("\\\\", "\\")


def test_text_is_parsed_and_not_executed():
    """`parse_expr` evaluates its argument as Python code; only literals may reach it."""
    from flow_grpo.rewards.text.sympy_checker import restrict_parse_expr

    seen = []
    guarded = restrict_parse_expr(seen.append)
    guarded("12.5")
    with pytest.raises(UnparsableFormula, match="__import__"):
        guarded("__import__('os')")
    assert seen == ["12.5"]


@pytest.mark.parametrize(
    ("text", "expected"),
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
def test_the_final_answer_is_extracted_from_tags_or_box(text, expected):
    assert extract_final_answer(text) == expected


@pytest.fixture(scope="module")
def math_scorer():
    reward = build_reward({"math_answer": 1.0}, options={"math_answer": {"timeout": 3.0}})
    yield reward
    close_scorers(reward)


def test_malicious_responses_do_not_affect_the_others(math_scorer):
    """Power towers and 1 MB of text are wrong, and rejected at once."""
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
        "<answer>+1</answer>",
        "<answer>(1,</answer>",
        "<answer>__import__('os')</answer>",
    ]
    result = math_scorer(answers, ["q"] * len(answers), [{"answer": "2"}] * len(answers))
    scores = result["math_answer"].tolist()
    assert scores == [1, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0]
    assert result["math_answer/unread"].tolist() == [0, 1, 0, 1, 1, 0, 1, 0, 0, 0, 1, 1]
    assert "math_answer" not in math_scorer.last_errors


def test_a_final_answer_that_is_too_long_is_wrong_and_not_a_failure(patient):
    long = "1" * (MAX_FINAL_ANSWER_CHARS + 1)
    responses = [
        f"<answer>{long}</answer>",
        rf"\boxed{{{long}}}",
        long,
        "x" * (MAX_RESPONSE_CHARS + 1),
    ]
    scores, logged = patient(responses, [""] * 4, [{"answer": "11"}] * 4)
    assert scores == [0, 0, 0, 0]
    assert logged["unread"] == [1, 1, 1, 1]


@pytest.mark.parametrize("kind", ["text", "integer", "decimal"])
def test_a_huge_ground_truth_fails_its_row_alone_and_is_rejected_before_training(patient, kind):
    """Python refuses to convert more than 4,300 digits."""
    digits = {"text": "7" * 5000, "integer": 7 * 10**5000, "decimal": "0." + "7" * 5000}[kind]
    rows = [{"answer": "2"}, {"answer": digits}, {"answer": "3"}]
    scores, _ = patient(["2", "2", "3"], [""] * 3, rows)
    assert [scores[0], scores[2]] == [1, 1]
    assert math.isnan(scores[1])
    assert "ground truth" in scores[1].reason
    questions = [
        Question("a", answer=row["answer"], where=f"train.jsonl:{line}")
        for line, row in enumerate(rows, 6)
    ]
    reward = build_reward({"math_answer": 0.9, "answer_format": 0.1})
    with raises_user_error("train.jsonl:7", "'math_answer'", "ground truth") as caught:
        check_reward_inputs(reward, questions, max_new_tokens=8)
    assert len(str(caught.value)) < 300
    close_scorers(reward)


@pytest.mark.parametrize(
    ("answer", "truth"),
    [("9" * 1990 + ".5 m", "3 cm"), ("1e999", "2"), ("9" * 400 + ".1 km", "1.5 m")],
    ids=["decimal", "exponent", "converted"],
)
def test_numbers_beyond_the_range_of_floats_are_compared(answer, truth):
    assert compare_without_algebra(answer, truth) == 0


# separated by spaces; ? stands for the nested formula
PIECES = (
    r"9 99 123456789 0.1 x y e i \pi \infty \sqrt \sqrt{ \frac{ \frac12 \binom{9}{4} \log_2 \ln"
)
PIECES += (
    r" \sin \exp ( ) [ ] { } \{ \} | , ; = < \le \in \cup \pm + - * / ^ ^{ ^9 ^{-1} _ ! !! % & . '"
)
PIECES += (
    r" \begin{pmatrix} \end{pmatrix} \\ \sum \int \lim \mathbb{R} \text{a} lambda cm million and"
)
NESTS = (
    r"(?)! ?^{9} 9^{?} (?)^{99} \sqrt{?} \frac{1}{?} \exp(?) \binom{?}{9} (?,?) |?| -? \log_2(?)"
)
NESTS += r" ?+x^9 (x+?)^9 ?=x x<? \{?\} \sin(?) ?y"


def hostile(draw: random.Random) -> str:
    """Return pieces of formulas, nested formulas, repetitions, or random characters."""
    kind = draw.choices(range(4), (5, 1, 2, 2))[0]
    if kind == 0:
        return "".join(draw.choices(PIECES.split(), k=draw.randint(1, 60)))
    if kind == 1:
        text = draw.choice("9xe")
        for _ in range(draw.randint(1, 8)):
            text = draw.choice(NESTS.split()).replace("?", text)[:2000]
        return text
    if kind == 2:
        return draw.choice([*PIECES.split(), "1+", "x^2+", "1,"]) * draw.randint(2, 120)
    return "".join(chr(draw.randrange(32, 0x2FF)) for _ in range(draw.randint(1, 200)))


def test_a_thousand_hostile_responses_cause_no_failure(patient):
    """None exceeds its worker's limits, and correct responses among them score 1."""
    draw = random.Random(33)
    truths = draw.choices(["3", "x^2+1", "(1,2)", "[0,1)", "x=3", "x<3", r"\sqrt{2}"], k=1000)
    texts = [hostile(draw) for _ in truths]
    texts[::100] = [each.replace("x", " x ") for each in truths[::100]]
    scores, _ = patient(texts, [""] * 1000, [{"answer": truth} for truth in truths])
    assert not [score.reason for score in scores if isinstance(score, Failed)]
    assert scores[::100] == [1] * 10


class FakePool:
    """A worker pool that records its payloads and returns `check(*payload)` for each."""

    def __init__(self, check):
        self.check, self.asked = check, []

    def map(self, payloads):
        self.asked += payloads
        return [self.check(*payload) for payload in payloads]


def test_a_response_that_takes_too_long_is_wrong_and_a_slow_ground_truth_a_failure():
    """Also if the worker has to be killed because its code ignores the signal."""

    def check(answer, truth, seconds):
        slow = "slow" in (answer if answer is not None else truth)
        return WorkerTimedOut("no answer within 15 s") if slow else answer == truth

    scorer = MathAnswer(untagged=True)
    scorer.pool = FakePool(check)
    scores = scorer._check_pairs(dict.fromkeys([("slow", "x"), ("x", "x"), ("slow y", "slow z")]))
    assert list(scores.values())[:2] == [0, 1]
    assert "15 s" in scores["slow y", "slow z"].reason


def test_checks_that_use_up_the_budget_leave_less_time_to_the_others(monkeypatch):
    """The remaining checks share the remaining time before the rest fails."""
    now = iter(range(0, 1000, 10))
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    scorer = MathAnswer(timeout=5.0, budget=60.0)
    scorer.pool = FakePool(lambda answer, truth, seconds: None)
    scores = scorer._check_pairs(dict.fromkeys((str(n), "x") for n in range(400)))
    limits = [seconds for _, _, seconds in scorer.pool.asked]
    assert limits[0] == 5
    assert max(limits[4 * 7 :]) <= 0.25
    assert min(limits) >= 0.02
    late = [score for score in scores.values() if isinstance(score, Failed)]
    assert len(limits) + len(late) == 400
    assert "180 s" in late[-1].reason


def test_cpu_time_is_limited_in_python_code():
    from flow_grpo.rewards.text.sympy_checker import CpuTimeExceeded, cpu_limit

    def forever():
        while True:
            with contextlib.suppress(Exception):
                sum(range(1000))

    with pytest.raises(CpuTimeExceeded), cpu_limit(0.05):
        forever()


def test_a_worker_that_hangs_is_killed_and_its_response_wrong(monkeypatch):
    monkeypatch.setattr("flow_grpo.rewards.text.equality.reject_costly_formula", lambda text: None)
    with MathAnswer(timeout=0.5) as scorer:
        responses = [r"<answer>5^{9^{9^{9}}}</answer>", r"<answer>\sqrt{4}</answer>"]
        scores, logged = scorer(responses, [""] * 2, [{"answer": "2"}] * 2)
    assert scores == [0, 1]
    assert logged["unread"] == [1, 0]


def test_untagged_answers_are_an_option():
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
        "Answer: B": 1,
        "**B**": 1,
        "Option B": 1,
        "The answer is **B**.": 1,
        r"\boxed{B}": 1,
        "Answer: (A)": 0,
        "A. is wrong: it is no dog. So the answer is B.": 1,
        "The answer is B or C": 0,
        "The answer is not B": 0,
        "I first thought the answer is A, but the answer is (B)": 1,
        "<answer>A</answer>": 0,
        "<answer>A dog or B</answer>": 0,
        "Because": 0,
        "": 0,
    }
    truths = [{"answer": "(B)"}] * len(texts)
    assert Choice()(list(texts), [""] * len(texts), truths) == list(texts.values())
    late = ["<answer>H</answer>", "The answer is J", "The answer is, I think, I", "Option I think"]
    letters = [{"answer": "H"}, {"answer": "J"}, {"answer": "I"}, {"answer": "I"}]
    assert Choice()(late, [""] * 4, letters) == [1, 1, 0, 0]
    [free] = Choice()(["A"], [""], [{"answer": "12"}])
    assert isinstance(free, NotApplicable)
    # would take minutes in quadratic time
    endless = "1 " + "a" * (MAX_RESPONSE_CHARS - 3) + "!"
    assert Choice()([endless], [""], [{"answer": "B"}]) == [0]
    assert Choice()(["B" * 10**6], [""], [{"answer": "B"}]) == [0]


@pytest.mark.parametrize(
    ("truth", "right", "wrong"),
    [
        (
            "B",
            "B ;; (B) ;; b ;; B. 12 ;; (B) 12 ;; B) a dog ;; B: 12 ;; B. Vitamin C ;; B, a dog"
            " ;; [B] ;; The answer is B ;; Answer: B. A dog ;; B.",
            "B, C ;; (A) or (B) ;; B or C ;; A/B ;; B and C ;; BC ;; A, B ;; B. 1 or C. 2"
            " ;; maybe B ;; B? ;; either B or C ;; not B ;; B. 1, C. 2 ;; A B C D ;; ABCD ;; (B)(C)"
            " ;; B (or C) ;; the answer is B or C ;; the answer is A, B ;; B, maybe C ;; B & C"
            " ;; B, C, D ;; 12 ;; C. B ;; (C) (B) ;; B; C ;; B. 1 / C. 2 ;; answers: B, C ;; A"
            " ;; B. but C is also right",
        ),
        (
            "A, C",
            "A, C ;; C, A ;; AC ;; CA ;; A and C ;; (A) and (C) ;; A & C ;; A,C ;; A. cat, C. dog"
            " ;; [A, C] ;; the answers are A and C ;; (A), (C) ;; A; C ;; ['A', 'C'] ;; A C",
            "A ;; C ;; A, B ;; A, B, C ;; A or C ;; A/C ;; ABC ;; B ;; A. cat ;; A, C or D"
            " ;; neither",
        ),
        ("ABD", "A, B, D ;; ABD ;; A, B and D", "AB ;; ABCD ;; A, B or D ;; D"),
        ("C. 12 cm", "C ;; (C) ;; C. 12 cm", "B ;; C or D ;; 12 cm"),
    ],
    ids=["one", "two", "joined", "with text"],
)
def test_a_choice_needs_exactly_the_letters_of_the_ground_truth(truth, right, wrong):
    for column, score in ((right, 1), (wrong, 0)):
        texts = column.split(" ;; ")
        responses = [f"<answer>{text}</answer>" for text in texts]
        got = Choice()(responses, [""] * len(texts), [{"answer": truth}] * len(texts))
        assert dict(zip(texts, got, strict=True)) == dict.fromkeys(texts, score)


def test_overlong_responses_are_punished_linearly():
    def score(tokens: int, **options: float) -> float:
        metadata = {"answer_tokens": tokens, "max_new_tokens": 100}
        return Overlong(**options)([""], [""], [metadata])[0]

    assert [score(n) for n in (10, 80, 90, 100)] == [0, 0, -0.5, -1]
    assert score(60, buffer=50) == pytest.approx(-0.2)
    assert score(60, limit=50) == -1
    assert math.isnan(Overlong()([""], [""], [{}])[0])


def test_a_custom_reward_is_loaded_by_module_or_file(tmp_path, monkeypatch):
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
    with raises_user_error("'mine'", "'none.py:short'"):
        build_scorers(["mine"], custom={"mine": "none.py:short"})


@pytest.mark.parametrize("name", TEXT_REWARDS)
def test_a_text_reward_rejects_images(name, tmp_path):
    options = (
        {name: {"model": str(small_reward_model.save(tmp_path))}} if name == "reward_model" else {}
    )
    [scorer] = build_scorers([name], options=options).values()
    assert scorer.kind == "answer"
    with pytest.raises(TypeError, match=f"'{name}'"):
        scorer([object()], [""], [{"answer": "A"}])


@pytest.mark.parametrize(
    ("name", "option"),
    [("math_answer", "timeout"), ("math_answer", "workers"), ("overlong", "buffer")],
)
def test_options_out_of_range_are_rejected(name, option):
    with raises_user_error(f"reward_options.{name}.{option}=0"):
        build_scorers([name], options={name: {option: 0}})
