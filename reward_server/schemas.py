"""Pydantic models of requests and responses, which also define the OpenAPI schema."""

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from reward_server.errors import STATUS_BY_CODE, UNKNOWN_FIELD, truncated_repr


def _reject_lone_surrogates(text: str) -> str:
    """Reject strings that JSON can contain but that cannot be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"lone surrogate at character {error.start}") from None
    return text


def _validate_image_or_video(value: Any) -> Any:
    """Return a string or a non-empty list of strings; reject other values."""
    # A pydantic union would add its branches to the path of an error.
    frames = value if isinstance(value, list) else [value]
    if not frames or not all(isinstance(frame, str) for frame in frames):
        raise PydanticCustomError(
            "image_or_video", "Input should be a valid string, or a non-empty list of frames"
        )
    return value


def _validate_source(value: Any) -> Any:
    return None if value is None else _validate_image_or_video(value)


Text = Annotated[str, AfterValidator(_reject_lone_surrogates)]
IMAGE_SCHEMA = {"type": "string"}
IMAGES_SCHEMA = [IMAGE_SCHEMA, {"type": "array", "items": IMAGE_SCHEMA, "minItems": 1}]
Sample = Annotated[
    str | list[str],
    PlainValidator(_validate_image_or_video),
    WithJsonSchema({"anyOf": IMAGES_SCHEMA}),
]
Source = Annotated[
    str | list[str] | None,
    PlainValidator(_validate_source),
    WithJsonSchema({"anyOf": [*IMAGES_SCHEMA, {"type": "null"}]}),
]


# Body of a request to /v1/score; a docstring would be part of the OpenAPI schema
class ScoreRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    # fail_fast: the errors of all items could be many times larger than the body
    reward: Text = Field(description="a name from GET /v1/rewards")
    images: list[Sample] = Field(
        [],
        description="PNG, WebP or JPEG files in base64; for a video the list of its frames",
        fail_fast=True,
    )
    answers: list[Text] | None = Field(
        None, description="text responses to score instead of images", fail_fast=True
    )
    prompts: list[Text] = Field(description="one per image", fail_fast=True)
    metadata: list[dict[str, Any]] | None = Field(
        None, description="one object per image", fail_fast=True
    )
    sources: list[Source] | None = Field(
        None,
        description="for each image its source image, a list of several, or null; rewards get it "
        'in the metadata as "source"',
        fail_fast=True,
    )
    masks: list[str | None] | None = Field(
        None,
        description="for each image a mask that is white where it may differ from its source, or "
        'null; rewards get it in the metadata as "mask"',
        fail_fast=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _reject_unknown_fields(cls, data: Any) -> Any:
        """Raise an error that lists the known fields for the first unknown one."""
        for name in data if isinstance(data, dict) else ():
            if name not in cls.model_fields:
                fields = ", ".join(cls.model_fields)
                raise PydanticCustomError(
                    UNKNOWN_FIELD,
                    "unknown field {name}; choose from {fields}",
                    {"name": truncated_repr(name), "fields": fields},
                )
        return data

    @property
    def samples(self) -> list[Any]:
        return self.images if self.answers is None else self.answers


# Body of a response of /v1/score
class ScoreResponse(BaseModel):
    reward: str
    scores: list[float | None] = Field(description="one per image; null if it has no score")
    asked: list[bool] = Field(description="one per image; false if the reward does not apply")
    errors: list[str | None] = Field(description="one per image; why it has no score")
    extras: dict[str, list[float | None]] = Field(description="additional values per image")


# Body of a request to /get_reward, OpenRLHF's protocol
class GetRewardRequest(BaseModel):
    query: list[Text] = Field(description="prompts with their responses", fail_fast=True)
    prompts: list[Text] = Field(description="one per query", fail_fast=True)
    labels: list[Text | None] | None = Field(
        None, description="one reference answer per query", fail_fast=True
    )


# Body of a response of /get_reward
class GetRewardResponse(BaseModel):
    rewards: list[float] = Field(description="one per query")
    scores: list[float] = Field(description="the rewards again")
    extra_logs: dict[str, list[float]] = Field(description="additional values per query")


class RewardState(BaseModel):
    name: str
    ready: bool


# Limits of the server in /v1/rewards
class LimitValues(BaseModel):
    max_images: int = Field(description="per request, counting each frame of a video")
    max_pixels: int = Field(description="per image")
    max_body_bytes: int
    max_queue: int = Field(description="images per reward that are queued or being scored")
    max_queue_pixels: int = Field(description="pixels of these images")
    max_memory_bytes: int = Field(description="for the decoded images of all rewards")
    max_connections: int


class RewardList(BaseModel):
    rewards: list[RewardState]
    clips: list[str] = Field(description="rewards that score whole videos, not single frames")
    min_frames: dict[str, int] = Field(
        description="minimum number of frames, for rewards that need more than one"
    )
    reads_images: list[str] = Field(description="rewards of responses that need `sources`")
    limits: LimitValues


class Status(BaseModel):
    status: Literal["ok", "ready"]


class ErrorDetail(BaseModel):
    code: Literal[tuple(STATUS_BY_CODE)]  # type: ignore[valid-type]
    message: str = Field(description="one line: what is wrong, the rule, what to do")


class ErrorBody(BaseModel):
    error: ErrorDetail


_HEADERS = {
    401: {"WWW-Authenticate": {"schema": {"type": "string"}, "required": True}},
    429: {"Retry-After": {"schema": {"type": "integer"}, "required": True}},
    503: {"Retry-After": {"schema": {"type": "integer"}, "required": True}},
}


def document_errors(*codes: str) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` argument of a route that may return these error codes."""
    docs: dict[int | str, dict[str, Any]] = {}
    for status in sorted({STATUS_BY_CODE[code] for code in codes}):
        docs[status] = {
            "model": ErrorBody,
            "description": ", ".join(code for code in codes if STATUS_BY_CODE[code] == status),
            **({"headers": _HEADERS[status]} if status in _HEADERS else {}),
        }
    return docs
