"""Which columns of a data row are used, and which are rejected because nothing would read them.

A row has three kinds of columns:

- columns that the reader uses (prompt, images, answer, ...): each reader declares them;
- metadata for the rewards: text, numbers, lists and objects under any other name;
- inputs that nothing uses: images, videos, audio, conversations or parts of a question under a name
  that the reader does not read.

A run that ignored the third kind would train on a different task than the one in the file, so such
a column is an error. It is recognised by its name (`img`, `mask_path`, `conversations`) or by its
content (a path that ends in `.png`, JPEG bytes, a list of chat turns). The setting
`metadata_columns` names columns that are metadata although they look like an input.
"""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

from PIL import Image

from flow_grpo.errors import UserError

IMAGE, VIDEO, AUDIO, BINARY, CONVERSATION = "image", "video", "audio", "binary", "conversation"
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")  # the formats that are read
VIDEO_SUFFIXES = (".mp4", ".mov", ".webm", ".mkv", ".avi")
SUFFIXES = {
    IMAGE: (*IMAGE_SUFFIXES, ".tif", ".tiff", ".heic", ".heif", ".avif", ".svg", ".jfif"),
    VIDEO: (*VIDEO_SUFFIXES, ".m4v", ".mpg", ".mpeg", ".flv", ".wmv"),
    AUDIO: (".wav", ".mp3", ".flac", ".ogg", ".opus", ".m4a", ".aac"),
}
SIGNATURES = {  # by kind: (offset, bytes)
    IMAGE: (
        *(
            (0, start)
            for start in (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"BM", b"II*\0", b"MM\0*")
        ),
        (8, b"WEBP"),
    ),
    VIDEO: ((4, b"ftyp"), (0, b"\x1a\x45\xdf\xa3"), (8, b"AVI ")),
    AUDIO: ((8, b"WAVE"), *((0, start) for start in (b"ID3", b"fLaC", b"OggS", b"\xff\xfb"))),
}
BASE64_IMAGES = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR")  # PNG, JPEG, GIF, WebP
MIN_BASE64 = 64  # characters; anything shorter is plain text
MAX_PATH = 4096  # characters; a longer text is not a path
MAX_ITEMS = 100  # of a list that are examined
# who speaks in a turn {"from": ..., "value": ...} of ShareGPT's format
SHAREGPT_ROLES = "human gpt user assistant system chatgpt bing bard tool function_call observation"

WORDS = {
    IMAGE: "image images img imgs picture pictures photo photos png jpg jpeg webp bmp pixel pixels",
    VIDEO: "video videos mp4 webm",
    AUDIO: "audio audios wav mp3 speech waveform",
}
NOUNS = {word: kind for kind, words in WORDS.items() for word in words.split()}
NOUNS |= {"maskpath": IMAGE, "maskpaths": IMAGE, "maskfile": IMAGE, "maskimage": IMAGE}
# what may follow such a noun in the name of a column of images: "image_path". After any other word
# the column is a property of an image: "image_width", "photo_credit"
CARRIERS = """path paths file files filename filenames name names url urls uri uris link links
    bytes base64 b64 data raw blob array arrays tensor values list input inputs src source sources
    ref refs reference left right first second third before after front back original a b"""
# with one of these words in front of a noun, the column is a property too: "num_images"
QUANTIFIERS = """num number count n total min max has is with no use uses need needs require
    requires contains include includes"""
METADATA = "metadata_columns"  # the setting
NOUN_PHRASES = {
    IMAGE: "an image",
    VIDEO: "a video",
    AUDIO: "audio",
    BINARY: "binary data",
    CONVERSATION: "a conversation",
}


@dataclass(frozen=True)
class ColumnRules:
    """What to do about columns that a reader does not use.

    Args:
        settings: By kind of content, the setting that names the column to read it from.
        reserved: Names that are never metadata: what the column is, and how to use it ({name} is
            its name) or "".
    """

    settings: Mapping[str, str]
    reserved: Mapping[str, tuple[str, str]]

    def check(
        self,
        row: Mapping[str, Any],
        used: Collection[str],
        where: str,
        *,
        allowed: Collection[str] = (),
        ignored: Collection[str] = (),
    ) -> None:
        """Raise for the first column that looks like an input and is not used.

        Args:
            row: Values by column.
            used: Columns that the reader has read.
            where: The file and the row, for the message.
            allowed: Columns that the user has declared to be metadata.
            ignored: Kinds of content that the user has excluded.
        """
        for name, value in row.items():
            if name in used or name in allowed or is_empty(value) or is_empty_text(value):
                continue
            problem, remedy = self._problem(name, value, ignored)
            if problem:
                remedies = [remedy] if remedy else []
                remedies.append(f"pass it to the rewards with --config.{METADATA}={name}")
                raise UserError(
                    f'{where}: column "{name}" {problem}, and nothing reads it; '
                    f"{', '.join([*remedies, 'or remove it'])}"
                )

    def _problem(self, name: str, value: Any, ignored: Collection[str]) -> tuple[str, str]:
        """What is wrong with a column and how to use it; empty for plain metadata."""
        for known in (name, *_spellings(name)):
            if known in self.reserved:
                problem, remedy = self.reserved[known]
                return problem, remedy.format(name=name)
        found, named = content_kind(value), name_kind(name)
        kind = found or named
        if not kind or kind in ignored or (not found and isinstance(value, bool | float)):
            return "", ""
        setting = self.settings.get(kind) if is_readable(value) else None
        remedy = f"use it with --config.{setting}={name}" if setting else ""
        return f"{'contains' if found else 'is named like'} {NOUN_PHRASES[kind]}", remedy


def parse_names(setting: str) -> tuple[str, ...]:
    """Split the names in `metadata_columns`."""
    return tuple(name.strip() for name in setting.split(",") if name.strip())


def is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | tuple | dict) and not value)


def is_empty_text(value: Any) -> bool:
    """Whether it is an empty value that was written as a string: MMMU has "[]" for no options."""
    return isinstance(value, str) and value.strip() in ("", "[]", "{}")


def is_readable(value: Any) -> bool:
    """Whether a setting that names a column can name one with this value: an object of other keys
    than those of an image or a chat turn is not."""
    return not isinstance(value, dict) or not value.keys().isdisjoint({"bytes", "path"})


def has_binary(value: Any) -> bool:
    """Return whether a value contains bytes or an image, which metadata (JSON) cannot."""
    if isinstance(value, dict):
        return any(map(has_binary, value.values()))
    if isinstance(value, list | tuple):
        return any(map(has_binary, value))
    return isinstance(value, bytes | bytearray | memoryview | Image.Image)


def content_kind(value: Any) -> str:
    """The kind of input that a value holds, at any depth; "" for plain metadata."""
    if isinstance(value, Image.Image):
        return IMAGE
    if isinstance(value, bytes | bytearray | memoryview):
        return _bytes_kind(bytes(value[:16]))
    if isinstance(value, str):
        return _text_kind(value)
    if isinstance(value, dict):
        if _is_turn(value):
            return CONVERSATION
        value = [each for each in value.values() if each is not None]
    if isinstance(value, list | tuple):
        return next(filter(None, map(content_kind, islice(value, MAX_ITEMS))), "")
    return ""


def _is_turn(value: dict[str, Any]) -> bool:
    """Whether it is a chat turn in OpenAI's format or ShareGPT's."""
    if {"from", "value"} <= value.keys():
        return isinstance(value["from"], str) and value["from"] in SHAREGPT_ROLES.split()
    return {"role", "content"} <= value.keys()


def is_conversation(value: Any) -> bool:
    """Return whether a value is a list of chat turns, or one as a JSON string."""
    return content_kind(value) == CONVERSATION


def _bytes_kind(start: bytes) -> str:
    for kind, signatures in SIGNATURES.items():
        if any(start[offset:].startswith(mark) for offset, mark in signatures):
            return kind
    return BINARY


def is_base64_image(text: str) -> bool:
    """Whether a text is an image in base64, without the start of a data URL."""
    start = text[:MIN_BASE64]
    return (
        start.startswith(BASE64_IMAGES)
        and len(text) >= MIN_BASE64
        and start.isascii()
        and not ({*start} & {*" .:\\"})
    )


def _text_kind(text: str) -> str:
    for kind in SUFFIXES:
        if text.startswith(f"data:{kind}/"):
            return kind
    if is_base64_image(text):
        return IMAGE
    text = text.strip()
    if text[:1] + text[-1:] in ("[]", "{}"):
        return _json_kind(text)
    if len(text) <= MAX_PATH and "\n" not in text:
        path = text.lower()
        if path.startswith(("http://", "https://")):
            path = re.split(r"[?#]", path)[0]
        for kind, suffixes in SUFFIXES.items():
            if path.endswith(suffixes):
                return kind
    return ""


def _json_kind(text: str) -> str:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    return "" if isinstance(value, str) else content_kind(value)


@cache
def name_kind(name: str) -> str:
    """Return the kind of input that a column's name denotes: "img_path" and "source_image" are
    images, "image_width" and "num_images" are not."""
    words = [word.rstrip("0123456789") or word for word in words_of(name)]
    if kind := NOUNS.get("".join(words)):
        return kind
    places = [place for place, word in enumerate(words) if word in NOUNS]
    if not places or not {*QUANTIFIERS.split()}.isdisjoint(words[: places[0]]):
        return ""
    rest = words[places[-1] + 1 :]
    carried = all(word in CARRIERS.split() or word.isdigit() for word in rest)
    return NOUNS[words[places[-1]]] if carried else ""


@cache
def _spellings(name: str) -> tuple[str, ...]:
    """A name in lower case with underscores, whole and without a number or a letter at its end:
    "choice_a" is one of several choices."""
    words = words_of(name)
    whole = "_".join(words)
    numbered = re.fullmatch(r"(.*[a-z])_?(\d+|_[a-z])", whole)
    return (whole, numbered[1]) if numbered else (whole,)


@cache
def words_of(name: str) -> tuple[str, ...]:
    """The words of a column's name in lower case: imagePath and image-path are the same."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name)
    return tuple(re.findall(r"[a-z0-9]+", spaced.lower()))
