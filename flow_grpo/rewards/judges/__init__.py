"""Rewards judged by a vision-language model behind an OpenAI-compatible API (vLLM, SGLang).

Each image is one request, or two. What could not be asked, or whose answer holds no score, is
`Failed`; an answer is not asked for again, since at temperature 0 it would be the same.
"""

import itertools
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from flow_grpo.advantages import win_shares
from flow_grpo.errors import UserError
from flow_grpo.rewards.calling import map_in_threads
from flow_grpo.rewards.calling.http import Refused, ServerGroup, Unavailable, parse_urls, token_from
from flow_grpo.rewards.failure import DEFAULT_POLICY, Failed, FailurePolicy, NotAsked, describe
from flow_grpo.rewards.frames import png_base64
from flow_grpo.rewards.judges import forms
from flow_grpo.rewards.judges.forms import HIGHEST, Reply, Unscorable, labelled_score
from flow_grpo.rewards.protocol import Returned, Rows, Scorer, pictures_in
from flow_grpo.rewards.scorers.ocr import ocr_score, quoted_text, without_quotes

Judged = tuple[float, dict[str, float]]  # a score, and further values

CHAT_PATH = "/v1/chat/completions"
SLOT = "{prompt}"
AXES = ("alignment", "coherence", "style")

# UnifiedReward's forms: the question and the names of the further values.
FORMS = {"final": (forms.FINAL_QUESTION, ("raw",)), "axes": (forms.AXES_QUESTION, AXES)}


@dataclass(kw_only=True, eq=False)
class ChatJudge(Scorer):
    """Asks a model about each image and turns its answer into a score.

    A `question` replaces our wording, for instance by the one a model was trained on; "{prompt}"
    stands for the prompt, and the answer has to have the form our question asks for.
    """

    name: ClassVar[str]  # in the registry, for messages
    url_env: ClassVar[str]
    model_env: ClassVar[str]
    default_question: ClassVar[str]
    extras: ClassVar[tuple[str, ...]] = ()  # further values that `parse` gives
    packages: ClassVar[tuple[str, ...]] = ()  # that it needs besides those of every install
    images_per_question: ClassVar[int] = 1
    has_policy: ClassVar[bool] = True

    url: str | None = None  # the servers, with or without /v1, several with commas between
    model: str | None = None  # as they serve it, for vLLM usually the path it was started with
    api_key_env: str | None = "OPENAI_API_KEY"  # where the servers' key is, if they want one
    concurrency: int = 16  # requests under way at a time
    max_tokens: int = 512  # length of an answer, thinking included
    question: str | None = None
    policy: FailurePolicy = DEFAULT_POLICY  # attempts per image, and seconds for a whole call

    def __post_init__(self) -> None:
        for package in self.packages:
            if find_spec(package) is None:
                raise UserError(f"reward {self.name!r} needs {package}: pip install {package}")
        for option in ("concurrency", "max_tokens"):
            number = getattr(self, option)
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise UserError(f"{self._option(option)}={number!r} must be a number from 1")
        self.question = self.default_question if self.question is None else self.question
        self.check_question(self.question)
        servers, setting = self._setting("url", self.url_env)
        self.model, _ = self._setting("model", self.model_env)
        self._servers = ServerGroup(
            [address.removesuffix("/v1") for address in parse_urls(servers, setting)],
            policy=self.policy,
            probe="/v1/models",
            token=token_from(self.api_key_env or ""),
            connections=self.concurrency,
        )
        self._turns = itertools.count()  # over all calls: a batch may be one image

    def build_question(self, prompt: str) -> str:
        """The text to send along with the image; `Unscorable` if there is no use in asking."""
        return self.question.replace(SLOT, prompt)  # `format` would choke on other braces

    def parse(self, answer: Reply, prompt: str) -> Judged:
        """The score in an answer and the further values; `Unscorable` where there is none."""
        raise NotImplementedError

    def check_question(self, question: Any) -> None:
        if not isinstance(question, str) or SLOT not in question:
            raise UserError(
                f"{self._option('question')}={question!r} must be a text with {SLOT} where the "
                "prompt belongs"
            )

    def check_servers(self) -> None:
        """Raise `UserError` unless each server, or one that stands in for it, takes a question."""
        blank = [data_url(Image.new("RGB", (64, 64)))] * self.images_per_question
        for number in range(len(self._servers.urls)):
            deadline = time.monotonic() + self.policy.timeout
            body = {**self._body(blank, self.question), "max_tokens": 1}
            try:
                self._servers.post(CHAT_PATH, body, deadline=deadline, start=number)
            except (Refused, Unavailable) as error:
                raise UserError(f"the judge of reward {self.name!r}: {error}") from error

    def __call__(
        self, images: list[Image.Image], prompts: list[str], metadata: Rows | None = None
    ) -> Returned:
        deadline = time.monotonic() + self.policy.timeout

        def judge(item: tuple[Image.Image, str, dict[str, Any]]) -> Judged:
            image, prompt, row = item
            if self.why_not(prompt, row):
                return NotAsked(), {}
            try:
                return self.judge(image, prompt, row, deadline)
            except (Unscorable, Refused, Unavailable) as error:
                return Failed(str(error)), {}

        rows = [{}] * len(prompts) if metadata is None else metadata
        judged = map_in_threads(judge, zip(images, prompts, rows, strict=True), self.concurrency)
        extras = {name: [more.get(name, math.nan) for _, more in judged] for name in self.extras}
        return [score for score, _ in judged], extras

    def judge(
        self, image: Image.Image, prompt: str, row: dict[str, Any], deadline: float
    ) -> Judged:
        """Ask about one image; `row` is its metadata."""
        return self._ask([data_url(image)], prompt, deadline)

    def _ask(self, images: Sequence[str], prompt: str, deadline: float) -> Judged:
        """`images` are data URLs."""
        return self.parse(self._reply(images, self.build_question(prompt), deadline), prompt)

    def _reply(self, images: Sequence[str], question: str, deadline: float) -> Reply:
        body, turn = self._body(images, question), next(self._turns)
        completion = self._servers.post(CHAT_PATH, body, deadline=deadline, start=turn)
        return forms.read_completion(completion)

    def _body(self, images: Sequence[str], question: str) -> dict[str, Any]:
        content = [
            *({"type": "image_url", "image_url": {"url": url}} for url in images),
            {"type": "text", "text": question},
        ]
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": self.max_tokens,
        }

    def _option(self, option: str) -> str:
        return f"reward_options.{self.name}.{option}"

    def _setting(self, option: str, variable: str) -> tuple[str, str]:
        """A value and the name of what it was set with."""
        value = getattr(self, option)
        if value is not None and not isinstance(value, str):
            raise UserError(f"{self._option(option)}={value!r} must be a text")
        if value:
            return value, self._option(option)
        if os.environ.get(variable):
            return os.environ[variable], variable
        raise UserError(
            f"reward {self.name!r} has no {option}: set {self._option(option)} or the environment "
            f"variable {variable}"
        )


class QwenVlOcr(ChatJudge):
    """The score of the `ocr` reward, for text that a vision-language model read.

    The question asks for "[no text]" where there is none, which scores 0; an empty answer is a
    failure. What a model says instead of reading, such as that it cannot, cannot be told from a
    text it read, and scores about 0.
    """

    name = "qwenvl_ocr"
    url_env = "QWEN_VL_OCR_VLLM_URL"
    model_env = "QWEN_VL_OCR_PATH"
    default_question = forms.READ_QUESTION
    packages = ("Levenshtein",)

    def check_question(self, question: Any) -> None:
        # A reader that knows what it should find tends to find it.
        if not isinstance(question, str) or not question.strip() or SLOT in question:
            raise UserError(
                f"{self._option('question')}={question!r} must be a text without {SLOT}: the "
                "model is to read what is there, not what was asked for"
            )

    def why_not(self, prompt: str, metadata: dict[str, Any]) -> str | None:
        return without_quotes(prompt)

    def build_question(self, prompt: str) -> str:
        return self.question

    def parse(self, answer: Reply, prompt: str) -> Judged:
        if not answer.text.strip():
            raise Unscorable("the answer is empty")
        score = ocr_score(forms.read_text(answer), quoted_text(prompt))
        if answer.cut_off and score < 1:
            raise Unscorable(
                f"max_tokens={self.max_tokens} cut off what it read: {forms.quote(answer.text)}"
            )
        return score, {}


class QwenVl(ChatJudge):
    """Quality and fidelity to the prompt in one grade; the reward is a fifth of it, the further
    value "raw" the grade from 1 to 5 itself."""

    name = "qwenvl"
    url_env = "QWEN_VL_VLLM_URL"
    model_env = "QWEN_VL_PATH"
    default_question = forms.GRADE_QUESTION
    extras = ("raw",)

    def parse(self, answer: Reply, prompt: str) -> Judged:
        grade = labelled_score(answer, "Score")
        return grade / HIGHEST, {"raw": grade}


@dataclass(kw_only=True, eq=False)
class UnifiedReward(ChatJudge):
    """The two forms in which UnifiedReward models grade; a fifth of the grade is the reward.

    form: "final" for one grade of alignment and quality, with the further value "raw"; "axes"
        for UnifiedReward 2.0 and its three grades, whose mean is the reward, with the further
        values "alignment", "coherence" and "style".
    weights: of the axes in that mean; an axis that is left out weighs 0.
    """

    name = "unifiedreward"
    url_env = "UNIFIED_REWARD_VLLM_URL"
    model_env = "UNIFIED_REWARD_PATH"

    form: str = "final"
    weights: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            known = ", ".join(FORMS)
            raise UserError(f"{self._option('form')}={self.form!r} must be one of {known}")
        self.default_question, self.extras = FORMS[self.form]
        self._weights = self._check_weights(self.weights)
        super().__post_init__()

    def parse(self, answer: Reply, prompt: str) -> Judged:
        if self.form == "final":
            grade = labelled_score(answer, "Final Score")
            return grade / HIGHEST, {"raw": grade}
        grades = {axis: labelled_score(answer, f"{axis.capitalize()} Score") for axis in AXES}
        weighted = sum(self._weights.get(axis, 0) * grade for axis, grade in grades.items())
        return weighted / sum(self._weights.values()) / HIGHEST, grades

    def _check_weights(self, weights: Mapping[str, float] | None) -> dict[str, float]:
        if weights is None:
            return dict.fromkeys(AXES, 1.0)
        setting = self._option("weights")
        if not isinstance(weights, Mapping):
            raise UserError(f"{setting}={weights!r} must be a dict of {', '.join(AXES)}")
        if self.form != "axes":
            raise UserError(f"{setting} is of use with form='axes' only; form is {self.form!r}")
        wrong = [w for w in weights.values() if not (isinstance(w, int | float) and w >= 0)]
        if set(weights) - set(AXES) or wrong or not 0 < sum(weights.values()) < math.inf:
            raise UserError(
                f"{setting}={dict(weights)!r} must give {', '.join(AXES)}, or some of them, "
                "weights from 0, at least one above 0"
            )
        return dict(weights)


class VieScore(ChatJudge):
    """How good an edit is, by VIEScore's rubric (Ku et al. 2024, arXiv 2312.14867), which
    GEdit-Bench uses too: the root of the lower of "success" and "kept", times the lower of
    "naturalness" and "cleanness".

    Two requests: the first two grades are of the picture beside what it was made from, the other
    two of the picture alone. All four, from 0 to 10, are further values; the reward is a tenth.
    `question` replaces the wording of the first request.
    """

    name = "viescore"
    url_env = "VIESCORE_URL"
    model_env = "VIESCORE_MODEL"
    default_question = forms.EDIT_QUESTION
    extras = ("success", "kept", "naturalness", "cleanness")
    images_per_question = 2

    def why_not(self, prompt: str, metadata: dict[str, Any]) -> str | None:
        return None if pictures_in(metadata) else "it has no picture that was edited"

    def judge(
        self, image: Image.Image, prompt: str, row: dict[str, Any], deadline: float
    ) -> Judged:
        edited, sources = data_url(image), [data_url(source) for source in pictures_in(row)]
        compared = self._reply([*sources, edited], self.build_question(prompt), deadline)
        grades = self._grades(compared, self.extras[:2])
        grades |= self._grades(
            self._reply([edited], forms.LOOK_QUESTION, deadline), self.extras[2:]
        )
        success, kept, naturalness, cleanness = grades.values()
        return math.sqrt(min(success, kept) * min(naturalness, cleanness)) / 10, grades

    def _grades(self, answer: Reply, names: Sequence[str]) -> dict[str, float]:
        return {name: labelled_score(answer, name.capitalize(), 0, 10) for name in names}


@dataclass(frozen=True)
class Verdict:
    """On two pictures."""

    first_wins: float  # 1, 0, or 1/2 for a tie; `Failed` where there is none
    flipped: bool = False  # the judge changed its mind with their order


class VlmPairwise(ChatJudge):
    """The share of other pictures of its prompt, among those it is called with, that a picture
    beats; a tie is half a win (Pref-GRPO, Wang et al. 2025, arXiv 2508.20751).

    Each pair is shown in both orders, since judges like one place better: where the answers differ
    it is a tie. A pair without a verdict counts for neither. Further values, of a picture's pairs:
    "flipped" is the share of those judged whose answers differed, "unjudged" the share without a
    verdict.
    """

    name = "vlm_pairwise"
    url_env = "VLM_PAIRWISE_URL"
    model_env = "VLM_PAIRWISE_MODEL"
    default_question = forms.BETTER_QUESTION
    extras = ("flipped", "unjudged")
    images_per_question = 2
    compares_groups = True

    def parse(self, answer: Reply, prompt: str) -> Judged:
        return forms.labelled_winner(answer, "Better"), {}

    def __call__(
        self, images: list[Image.Image], prompts: list[str], metadata: Rows | None = None
    ) -> Returned:
        deadline = time.monotonic() + self.policy.timeout
        urls = map_in_threads(_encoded, images, self.concurrency)
        pairs = [
            (i, j)
            for i, j in itertools.combinations(range(len(urls)), 2)
            if prompts[i] == prompts[j]
        ]

        def compare(pair: tuple[int, int]) -> Verdict:
            i, j = pair
            return self._compare(urls[i], urls[j], prompts[i], deadline)

        verdicts = map_in_threads(compare, pairs, self.concurrency)
        return _shares(len(urls), dict(zip(pairs, verdicts, strict=True)))

    def _compare(
        self, first: str | Failed, second: str | Failed, prompt: str, deadline: float
    ) -> Verdict:
        for picture in (first, second):
            if isinstance(picture, Failed):
                return Verdict(picture)
        try:
            wins, _ = self._ask([first, second], prompt, deadline)
            loses, _ = self._ask([second, first], prompt, deadline)
        except (Unscorable, Refused, Unavailable) as error:
            return Verdict(Failed(str(error)))
        flipped = wins != 1 - loses
        return Verdict(0.5 if flipped else wins, flipped)


def _shares(
    count: int, verdicts: dict[tuple[int, int], Verdict]
) -> tuple[list[float], dict[str, list[float]]]:
    wins, flipped = np.full((2, count, count), np.nan)
    reasons = dict.fromkeys(range(count), "no other picture of its prompt came with it")
    pairs = np.zeros(count)
    for (i, j), verdict in verdicts.items():
        won = verdict.first_wins
        pairs[[i, j]] += 1
        if isinstance(won, Failed):
            reasons[i] = reasons[j] = won.reason
        else:
            wins[i, j], wins[j, i] = won, 1 - won
            flipped[i, j] = flipped[j, i] = verdict.flipped
    scores = [
        Failed(reasons[i]) if math.isnan(share) else share
        for i, share in enumerate(win_shares(wins).tolist())
    ]
    judged = (~np.isnan(wins)).sum(axis=1)
    unjudged = 1 - judged / np.where(pairs > 0, pairs, np.nan)
    return scores, {"flipped": win_shares(flipped).tolist(), "unjudged": unjudged.tolist()}


def _encoded(image: Image.Image) -> str | Failed:
    """Once, however many pictures it is compared with."""
    try:
        return data_url(image)
    except Unscorable as error:
        return Failed(str(error))


def data_url(image: Image.Image) -> str:
    # PIL decodes when pixels are first asked for, and each format raises errors of its own.
    try:
        return f"data:image/png;base64,{png_base64(image)}"
    except Exception as error:
        raise Unscorable(f"the picture cannot be read, {describe(error)}") from error
