"""Rewards judged by a vision-language model behind an OpenAI-compatible API (vLLM, SGLang).

Each image is one request, or two. What could not be asked, or whose answer holds no score, is
`Failed`; an answer is not asked for again, since at temperature 0 it would be the same.
"""

import itertools
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar

from PIL import Image

from flow_grpo.errors import UserError
from flow_grpo.rewards.calling import map_in_threads
from flow_grpo.rewards.calling.http import Refused, ServerGroup, Unavailable, parse_urls, token_from
from flow_grpo.rewards.failure import DEFAULT_POLICY, Failed, FailurePolicy, NotAsked, describe
from flow_grpo.rewards.frames import png_base64
from flow_grpo.rewards.judges import forms
from flow_grpo.rewards.judges.forms import Reply, Unscorable
from flow_grpo.rewards.protocol import Returned, Rows, Scorer

Judged = tuple[float, dict[str, float]]  # a score, and further values

CHAT_PATH = "/v1/chat/completions"
SLOT = "{prompt}"


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


def data_url(image: Image.Image) -> str:
    # PIL decodes when pixels are first asked for, and each format raises errors of its own.
    try:
        return f"data:image/png;base64,{png_base64(image)}"
    except Exception as error:
        raise Unscorable(f"the picture cannot be read, {describe(error)}") from error
