"""The messages, as pydantic checks them and the OpenAPI schema documents them."""

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

from reward_server.errors import STATUS, UNKNOWN_FIELD, shown


def _whole_characters(text: str) -> str:
    # JSON can hold half a surrogate pair, and few scorers expect that of a string.
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"half a character at {error.start}") from None
    return text


def _picture_or_clip(value: Any) -> Any:
    # A union of pydantic's would name its branches in the path of a mistake.
    frames = value if isinstance(value, list) else [value]
    if not frames or not all(isinstance(frame, str) for frame in frames):
        raise PydanticCustomError(
            "picture_or_clip", "Input should be a valid string, or a list of one or more (a clip)"
        )
    return value


def _source(value: Any) -> Any:
    return None if value is None else _picture_or_clip(value)


Text = Annotated[str, AfterValidator(_whole_characters)]
PICTURE = {"type": "string"}
PICTURES = [PICTURE, {"type": "array", "items": PICTURE, "minItems": 1}]
Sample = Annotated[
    str | list[str], PlainValidator(_picture_or_clip), WithJsonSchema({"anyOf": PICTURES})
]
Source = Annotated[
    str | list[str] | None,
    PlainValidator(_source),
    WithJsonSchema({"anyOf": [*PICTURES, {"type": "null"}]}),
]


class ScoreRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    # The first mistake is enough: a list of them would be many times as large as the body.
    reward: Text = Field(description="a name from GET /v1/rewards")
    images: list[Sample] = Field(
        [],
        description="PNG, WebP or JPEG files in base64; of a clip the list of its frames",
        fail_fast=True,
    )
    answers: list[Text] | None = Field(
        None, description="texts to score, in the place of images", fail_fast=True
    )
    prompts: list[Text] = Field(description="one per image", fail_fast=True)
    metadata: list[dict[str, Any]] | None = Field(
        None, description="one object per image", fail_fast=True
    )
    sources: list[Source] | None = Field(
        None,
        description="for each image the picture that it was made from, the list of several, or "
        'null; rewards find it in the metadata as "source"',
        fail_fast=True,
    )
    masks: list[str | None] | None = Field(
        None,
        description="for each image a picture that is white where it may differ from its source, "
        'or null; rewards find it in the metadata as "mask"',
        fail_fast=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, data: Any) -> Any:
        for name in data if isinstance(data, dict) else ():
            if name not in cls.model_fields:
                fields = ", ".join(cls.model_fields)
                raise PydanticCustomError(
                    UNKNOWN_FIELD,
                    "unknown field {name}; there are {fields}",
                    {"name": shown(name), "fields": fields},
                )
        return data

    @property
    def samples(self) -> list[Any]:
        return self.images if self.answers is None else self.answers


class ScoreResponse(BaseModel):
    reward: str
    scores: list[float | None] = Field(description="one per image; null where there is none")
    asked: list[bool] = Field(description="one per image; false where its prompt asks for none")
    errors: list[str | None] = Field(description="one per image; why it got no score")
    extras: dict[str, list[float | None]] = Field(description="further values per image")


class RewardState(BaseModel):
    name: str
    ready: bool


class LimitValues(BaseModel):
    max_images: int = Field(description="of one request; each frame of a clip is one")
    max_pixels: int = Field(description="of one image")
    max_body_bytes: int
    max_queue: int = Field(description="images of one reward that wait or are being scored")
    max_queue_pixels: int = Field(description="the pixels of those images")
    max_memory_bytes: int = Field(description="for the decoded images of all rewards")
    max_connections: int


class RewardList(BaseModel):
    rewards: list[RewardState]
    clips: list[str] = Field(description="names of those that score whole clips, not frames")
    limits: LimitValues


class Status(BaseModel):
    status: Literal["ok", "ready"]


class ErrorDetail(BaseModel):
    code: Literal[tuple(STATUS)]  # type: ignore[valid-type]
    message: str = Field(description="one line: what was sent, the rule, the way out")


class ErrorBody(BaseModel):
    error: ErrorDetail


_HEADERS = {
    401: {"WWW-Authenticate": {"schema": {"type": "string"}, "required": True}},
    429: {"Retry-After": {"schema": {"type": "integer"}, "required": True}},
    503: {"Retry-After": {"schema": {"type": "integer"}, "required": True}},
}


def error_docs(*codes: str) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that may answer with these codes."""
    docs: dict[int | str, dict[str, Any]] = {}
    for status in sorted({STATUS[code] for code in codes}):
        docs[status] = {
            "model": ErrorBody,
            "description": ", ".join(code for code in codes if STATUS[code] == status),
            **({"headers": _HEADERS[status]} if status in _HEADERS else {}),
        }
    return docs
