"""Parse chats of data rows: lists of turns in the OpenAI or ShareGPT format, possibly as JSON text.

A turn is {"role", "content"} or {"from", "value"}. Its content is text or a list of parts that name
images and videos, as in LMM-R1's files. A chat may also have only placeholders ("<image>" in text,
or a part {"type": "image"} without a source, as in verl and TRL); its images then come from other
columns of the row.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flow_grpo.data.columns import is_empty
from flow_grpo.errors import UserError
from flow_grpo.untrusted_files import parse_json

IMAGE_PLACEHOLDER = "<image>"
VIDEO_PLACEHOLDER = "<video>"
SYSTEM, USER, ASSISTANT = ROLES = ("system", "user", "assistant")
ROLE_ALIASES = {"human": USER, "gpt": ASSISTANT}  # ShareGPT


class Turn(NamedTuple):
    """A turn of a chat, with a placeholder for each image and video."""

    role: str
    text: str


@dataclass
class Chat:
    """A chat, with images and videos still unresolved."""

    turns: list[Turn]
    images: list[Any] = field(default_factory=list)
    videos: list[Any] = field(default_factory=list)
    system: str = ""

    def add_columns(self, images: list[Any], videos: list[Any], where: str) -> None:
        """Add the images and videos of the row's columns; reject a row that has both kinds."""
        for kind, in_chat, in_columns in (
            ("images", self.images, images),
            ("videos", self.videos, videos),
        ):
            if in_chat and in_columns:
                raise UserError(f"has {kind} in the chat and in a column; remove one", field=where)
        self.images = self.images or images
        self.videos = self.videos or videos

    def show_media_first(self) -> None:
        """Write placeholders into the first of several turns, if there are none."""
        if len(self.turns) == 1:
            return
        for placeholder, count in (
            (IMAGE_PLACEHOLDER, len(self.images)),
            (VIDEO_PLACEHOLDER, len(self.videos)),
        ):
            if not any(placeholder in turn.text for turn in self.turns):
                first = self.turns[0]
                self.turns[0] = first._replace(text=placeholder * count + first.text)

    def check_is_prompt(self, where: str, hint: str = "") -> None:
        """Raise a UserError unless the chat starts and ends with a user turn."""
        if not self.turns or self.turns[0].role != USER or self.turns[-1].role != USER:
            roles = ", ".join(turn.role for turn in self.turns) or "none"
            raise UserError(
                f"has a prompt with the turns {roles}, but it must start and end with a user turn",
                field=where,
                hint=hint,
            )


def parse_chat(message: Any, where: str) -> Chat:
    """Parse a chat: an optional system turn, then user and assistant turns.

    Args:
        message: A list of turns, possibly as a JSON string.
        where: File, row and column, the `field` of errors.
    """
    turns = parse_json(message, where) if isinstance(message, str) else message
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise UserError("must be a list of turns, possibly as a JSON string", field=where)
    given = [turn.get("role", turn.get("from")) for turn in turns]
    roles = [ROLE_ALIASES.get(role, role) if isinstance(role, str) else "" for role in given]
    if not roles or not {*roles[1:]} <= {USER, ASSISTANT} or roles[0] not in ROLES:
        raise UserError(
            f"has turns with the roles {', '.join(map(str, given))}, but must be user and "
            "assistant turns, optionally preceded by a system turn",
            field=where,
        )
    chat = Chat([])
    for turn, role in zip(turns, roles, strict=True):
        keys = ("role", "content") if "role" in turn else ("from", "value")  # OpenAI or ShareGPT
        _reject_keys(turn, {*keys}, "turn", where)
        content = turn.get(keys[1])
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
        if not isinstance(parts, list):
            raise UserError("needs text or a list of parts in each turn", field=where)
        before = len(chat.images) + len(chat.videos)
        text = "".join(_parse_part(part, chat, where) for part in parts)
        if role != USER:
            found = any(p in text for p in (IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER))
            if found or len(chat.images) + len(chat.videos) > before:
                name = "its system turn" if role == SYSTEM else "an assistant turn"
                raise UserError(
                    f"has an image or a video in {name}",
                    field=where,
                    hint="move it to the user turn",
                )
        if role == SYSTEM:
            chat.system = text
        else:
            chat.turns.append(Turn(role, text))
    return chat


def _parse_part(part: Any, chat: Chat, where: str) -> str:
    """Return the text of a part; add an image or video to `chat` and return its placeholder."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        _reject_keys(part, {"type", "text"}, "part", where)
        return part["text"]
    if kind not in ("image", "image_url", "video"):
        raise UserError(f"has a part that is not text, image or video: {part!r:.80}", field=where)
    _reject_keys(part, {"type", kind}, "part", where)
    source = part.get(kind)
    if kind == "image_url" and isinstance(source, dict):
        _reject_keys(source, {"url"}, "part", where)
        source = source.get("url")
    if source is not None:
        (chat.videos if kind == "video" else chat.images).append(source)
    return VIDEO_PLACEHOLDER if kind == "video" else IMAGE_PLACEHOLDER


def _reject_keys(given: dict[str, Any], known: set[str], what: str, where: str) -> None:
    """Reject unknown keys that have a value; parquet fills missing keys with None."""
    for key, value in given.items():
        if key not in known and not is_empty(value):
            raise UserError(f'has a {what} with the unused key "{key}"; remove it', field=where)
