"""Rewards from a vision-language model (VLM) judge behind an OpenAI-compatible API (vLLM, SGLang).

Each image is one or two requests. An image without a reply, or with a reply that contains no score,
is `Failed`; replies are not sampled again, since at temperature 0 they would be the same.
"""

import itertools
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, ClassVar

from PIL import Image

from flow_grpo.errors import UserError
from flow_grpo.rewards.failure import (
    DEFAULT_POLICY,
    Failed,
    FailurePolicy,
    NotApplicable,
    describe_error,
)
from flow_grpo.rewards.frames import encode_png_base64
from flow_grpo.rewards.judges import templates
from flow_grpo.rewards.judges.templates import JudgeReply, NoScoreError
from flow_grpo.rewards.judges.wordings import PUBLISHED, Wording
from flow_grpo.rewards.option_checks import check_choice
from flow_grpo.rewards.protocol import MetadataRows, Scorer, ScorerOutput
from flow_grpo.rewards.workers import map_in_threads
from flow_grpo.rewards.workers.http import (
    RequestRejected,
    ServerGroup,
    ServersUnavailable,
    parse_urls,
    read_token,
)

JudgedScore = tuple[float, dict[str, float]]  # score, extra values to log

CHAT_PATH = "/v1/chat/completions"
PROMPT_PLACEHOLDER = "{prompt}"
FAIL = "fail"
UNPARSED = "unparsed"  # extra value: 1 for a reply without a score, 0 for others


@dataclass(kw_only=True, eq=False)
class ChatJudge(Scorer):
    """Judge that asks a model about each image and parses its reply into a score.

    Fields are the reward's options. `question` replaces the question of the `wording`; "{prompt}"
    is replaced by the prompt, and the reply must have the format that the wording asks for.
    """

    name: ClassVar[str]  # in the registry, for messages
    url_env: ClassVar[str]
    model_env: ClassVar[str]
    wordings: ClassVar[Mapping[str, Wording]]  # the first is the default
    extras: ClassVar[tuple[str, ...]] = ()  # names of the extra values that `parse` returns
    sampling: ClassVar[Mapping[str, float]] = MappingProxyType({"temperature": 0})
    required_packages: ClassVar[tuple[str, ...]] = ()  # optional dependencies
    images_per_question: ClassVar[int] = 1
    handles_retries: ClassVar[bool] = True

    url: str | None = None  # servers separated by commas, with or without /v1
    model: str | None = None  # name under which it is served; for vLLM usually its path
    api_key_env: str | None = "OPENAI_API_KEY"  # environment variable with the servers' key
    concurrency: int = 16  # concurrent requests
    max_tokens: int | None = None  # per reply, reasoning included; None: that of the wording
    question: str | None = None
    wording: str | None = None  # one of `wordings`
    unparsed: str = FAIL  # "published": the score that the authors give to a reply without one
    policy: FailurePolicy = DEFAULT_POLICY  # retries per image, timeout of a whole call

    def __post_init__(self) -> None:
        """Check the options and packages, and set up the connection to the servers."""
        for package in self.required_packages:
            if find_spec(package) is None:
                raise UserError(
                    f"needs {package}",
                    field=f"reward {self.name!r}",
                    hint=f"pip install {package}",
                )
        self.wording = next(iter(self.wordings)) if self.wording is None else self.wording
        check_choice(self._option_path("wording"), self.wording, self.wordings)
        self._wording = self.wordings[self.wording]
        self._check_unparsed()
        self.max_tokens = self._wording.max_tokens if self.max_tokens is None else self.max_tokens
        for option in ("concurrency", "max_tokens"):
            number = getattr(self, option)
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise UserError(
                    "must be an integer >= 1", field=self._option_path(option), value=number
                )
        if self.question is None:
            self.question = self._wording.question
        else:
            self.check_question(self.question)
        servers, field = self._resolve_setting("url", self.url_env)
        self.model, _ = self._resolve_setting("model", self.model_env)
        self._servers = ServerGroup(
            [url.removesuffix("/v1") for url in parse_urls(servers, field)],
            policy=self.policy,
            probe="/v1/models",
            token=read_token(self.api_key_env or ""),
            connections=self.concurrency,
        )
        self._round_robin = itertools.count()  # over all calls, since a batch may be one image

    def build_question(self, prompt: str) -> str:
        """Return the text to send with the image."""
        # not `format`, which fails on other braces
        return self.question.replace(PROMPT_PLACEHOLDER, prompt)

    def parse(self, reply: JudgeReply, prompt: str) -> JudgedScore:
        """Return the score in a reply and the extra values.

        Raises:
            NoScoreError: The reply contains no score.
        """
        raise NotImplementedError

    def check_question(self, question: Any) -> None:
        """Reject a question without a placeholder for the prompt."""
        if not isinstance(question, str) or PROMPT_PLACEHOLDER not in question:
            raise UserError(
                f"must be a string that contains {PROMPT_PLACEHOLDER}",
                field=self._option_path("question"),
                value=question,
            )

    def check_servers(self) -> None:
        """Send a test question, starting at each server, with failover to the others.

        Raises:
            UserError: If a server rejects the question, or none responds.
        """
        blank = [to_data_url(Image.new("RGB", (64, 64)))] * self.images_per_question
        for number in range(len(self._servers.urls)):
            deadline = time.monotonic() + self.policy.timeout
            body = {**self._body(blank, self.question), "max_tokens": 1}
            try:
                self._servers.post(CHAT_PATH, body, deadline=deadline, start=number)
            except (RequestRejected, ServersUnavailable) as error:
                raise UserError(
                    f"cannot use its judge: {error}", field=f"reward {self.name!r}"
                ) from error

    def __call__(
        self, images: list[Image.Image], prompts: list[str], metadata: MetadataRows | None = None
    ) -> ScorerOutput:
        """Judge a batch of images with concurrent requests and a common deadline."""
        deadline = time.monotonic() + self.policy.timeout

        def judge(item: tuple[Image.Image, str, dict[str, Any]]) -> JudgedScore:
            """Judge one (image, prompt, metadata row); a failure becomes `Failed`."""
            image, prompt, row = item
            if self.skip_reason(prompt, row):
                return NotApplicable(), {}
            try:
                return self.judge(image, prompt, row, deadline)
            except (NoScoreError, RequestRejected, ServersUnavailable) as error:
                return Failed(str(error)), {}

        rows = [{}] * len(prompts) if metadata is None else metadata
        judged = map_in_threads(judge, zip(images, prompts, rows, strict=True), self.concurrency)
        scores = [score for score, _ in judged]
        extras = {
            name: [values.get(name, math.nan) for _, values in judged] for name in self.extras
        }
        if self.unparsed == PUBLISHED:
            extras[UNPARSED] = [
                math.nan if math.isnan(score) else values.get(UNPARSED, 0.0)
                for score, values in judged
            ]
        return scores, extras

    def judge(
        self, image: Image.Image, prompt: str, row: dict[str, Any], deadline: float
    ) -> JudgedScore:
        """Return the score of one image and the extra values.

        Args:
            image: The image.
            prompt: Its prompt.
            row: Its metadata.
            deadline: Time on the clock of `time.monotonic()`.
        """
        if side := self._wording.side:
            image = image.convert("RGB").resize((side, side))
        reply = self._query([to_data_url(image)], self.build_question(prompt), deadline)
        try:
            return self.parse(reply, prompt)
        except NoScoreError:
            if self.unparsed == FAIL:
                raise
            return self._wording.unparsed, {UNPARSED: 1.0}

    def _query(
        self,
        images: Sequence[str],
        question: str,
        deadline: float,
        sampling: Mapping[str, float] | None = None,
    ) -> JudgeReply:
        """Send one question about the images (data URLs) and return the reply.

        Args:
            images: Data URLs.
            question: The text.
            deadline: Time on the clock of `time.monotonic()`.
            sampling: Replaces some of `self.sampling`.
        """
        completion = self._servers.post(
            CHAT_PATH,
            {**self._body(images, question), **(sampling or {})},
            deadline=deadline,
            start=next(self._round_robin),
        )
        return templates.parse_completion(completion)

    def _body(self, images: Sequence[str], question: str) -> dict[str, Any]:
        """Return the JSON body of a chat completion request with images (data URLs)."""
        system = self._wording.system
        messages = [] if system is None else [{"role": "system", "content": system}]
        messages.append({"role": "user", "content": self._content(images, question)})
        return {
            "model": self.model,
            "messages": messages,
            "max_tokens": self.max_tokens,
            **self.sampling,
        }

    def _content(self, images: Sequence[str], question: str) -> list[dict[str, Any]]:
        """Return the parts of the user's message."""
        return [*map(image_part, images), {"type": "text", "text": question}]

    def _check_unparsed(self) -> None:
        """Reject an unknown `unparsed`, and `PUBLISHED` for a wording without such a score."""
        field = self._option_path(UNPARSED)
        check_choice(field, self.unparsed, (FAIL, PUBLISHED))
        if self.unparsed == PUBLISHED and self._wording.unparsed is None:
            raise UserError(
                f"has no value for wording={self.wording!r}: no published code gives one",
                field=field,
                value=self.unparsed,
                hint=f"set unparsed={FAIL!r}",
            )

    def _option_path(self, option: str) -> str:
        return f"reward_options.{self.name}.{option}"

    def _resolve_setting(self, option: str, variable: str) -> tuple[str, str]:
        """Return the value of an option, by default that of an environment variable.

        Returns:
            The value, and the name of the option or variable that it comes from.

        Raises:
            UserError: If neither is set.
        """
        value, field = getattr(self, option), self._option_path(option)
        if value is not None and not isinstance(value, str):
            raise UserError("must be a string", field=field, value=value)
        if value:
            return value, field
        if os.environ.get(variable):
            return os.environ[variable], variable
        raise UserError(
            "is missing", field=field, hint=f"set it or the environment variable {variable}"
        )


def image_part(url: str) -> dict[str, Any]:
    """Return the part of a message for an image, given as a data URL."""
    return {"type": "image_url", "image_url": {"url": url}}


def to_data_url(image: Image.Image) -> str:
    """Encode an image as a PNG data URL.

    Raises:
        NoScoreError: It cannot be decoded.
    """
    # PIL decodes lazily, and each format raises its own errors
    try:
        return f"data:image/png;base64,{encode_png_base64(image)}"
    except Exception as error:
        raise NoScoreError(f"the image cannot be read: {describe_error(error)}") from error
