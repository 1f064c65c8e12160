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
VIDEO_SIGNATURES = {  # (offset, magic bytes) by format
    "MP4 or MOV": (4, b"ftyp"),
    "WebM or MKV": (0, b"\x1a\x45\xdf\xa3"),
    "AVI": (8, b"AVI "),
}
SIGNATURES = {  # (offset, magic bytes or alternatives) by kind
    IMAGE: (
        (0, (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"BM", b"II*\0", b"MM\0*")),
        (8, b"WEBP"),
    ),
    VIDEO: tuple(VIDEO_SIGNATURES.values()),
    AUDIO: ((8, b"WAVE"), (0, (b"ID3", b"fLaC", b"OggS", b"\xff\xfb"))),
}
BASE64_IMAGES = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR")  # PNG, JPEG, GIF, WebP
MIN_BASE64 = 64  # characters; anything shorter is plain text
MAX_PATH = 4096  # characters; longer text is not a path
MAX_ITEMS = 100  # list items that are examined
# values of "from" in a ShareGPT turn {"from": ..., "value": ...}
SHAREGPT_ROLES = "human gpt user assistant system chatgpt bing bard tool function_call observation"

INPUT_WORDS = {
    IMAGE: "image images img imgs picture pictures photo photos png jpg jpeg webp bmp pixel pixels",
    VIDEO: "video videos mp4 webm",
    AUDIO: "audio audios wav mp3 speech waveform",
}
WORD_KINDS = {word: kind for kind, words in INPUT_WORDS.items() for word in words.split()}
WORD_KINDS |= {"maskpath": IMAGE, "maskpaths": IMAGE, "maskfile": IMAGE, "maskimage": IMAGE}
# Words that may follow such a noun in the name of an input column: "image_path". Any other word
# makes the column a property of the input: "image_width", "photo_credit".
SUFFIX_WORDS = """path paths file files filename filenames name names url urls uri uris link links
    bytes base64 b64 data raw blob array arrays tensor values list input inputs src source sources
    ref refs reference left right first second third before after front back original a b"""
# Words that make it a property when they precede the noun: "num_images".
QUANTIFIERS = """num number count n total min max has is with no use uses need needs require
    requires contains include includes"""
METADATA_SETTING = "metadata_columns"
NOUN_PHRASES = {
    IMAGE: "an image",
    VIDEO: "a video",
    AUDIO: "audio",
    BINARY: "binary data",
    CONVERSATION: "a conversation",
}


@dataclass(frozen=True)
class ColumnRules:
    """Rules for columns that a reader does not use.

    Args:
        settings: Name of the setting that selects the column to read, by kind of content.
        reserved: Column names that are never metadata, mapped to (problem, remedy). The remedy may
            contain "{name}" for the column's name, or be "".
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
        """Raise a UserError for the first column that looks like an input and is not used.

        Args:
            row: Values by column.
            used: Columns that the reader has read.
            where: File and row, the `field` of the error.
            allowed: Columns that the user has declared to be metadata.
            ignored: Kinds of content that the user has excluded.
        """
        for name, value in row.items():
            if name in used or name in allowed or is_empty(value) or is_empty_text(value):
                continue
            problem, remedy = self._problem(name, value, ignored)
            if problem:
                remedies = [remedy] if remedy else []
                remedies.append(f"pass it to the rewards with --config.{METADATA_SETTING}={name}")
                raise UserError(
                    f'has a column "{name}" that {problem} and is not used',
                    field=where,
                    hint=", ".join([*remedies, "or remove it"]),
                )

    def _problem(self, name: str, value: Any, ignored: Collection[str]) -> tuple[str, str]:
        """Return (problem, remedy) of an unused column; both are empty for plain metadata."""
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


def parse_column_names(setting: str) -> tuple[str, ...]:
    """Split a comma-separated list of column names."""
    return tuple(name.strip() for name in setting.split(",") if name.strip())


def is_empty(value: Any) -> bool:
    """Return whether a value is None or an empty string or container; 0 and False are not."""
    return value is None or (isinstance(value, str | list | tuple | dict) and not value)


def is_empty_text(value: Any) -> bool:
    """Return whether a string spells an empty value: MMMU has "[]" for no options."""
    return isinstance(value, str) and value.strip() in ("", "[]", "{}")


def is_readable(value: Any) -> bool:
    """Return whether a column with this value can be read as an image, video or conversation."""
    return not isinstance(value, dict) or not value.keys().isdisjoint({"bytes", "path"})


def has_binary(value: Any) -> bool:
    """Return whether a value contains bytes or an image, which JSON metadata cannot hold."""
    if isinstance(value, dict):
        return any(map(has_binary, value.values()))
    if isinstance(value, list | tuple):
        return any(map(has_binary, value))
    return isinstance(value, bytes | bytearray | memoryview | Image.Image)


def content_kind(value: Any) -> str:
    """Return the kind of input that a value contains at any depth, or "" for plain metadata."""
    if isinstance(value, Image.Image):
        return IMAGE
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes_kind(bytes(value[:16]))
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
    """Return whether a dict is a chat turn in the OpenAI or ShareGPT format."""
    if {"from", "value"} <= value.keys():
        return isinstance(value["from"], str) and value["from"] in SHAREGPT_ROLES.split()
    return {"role", "content"} <= value.keys()


def is_conversation(value: Any) -> bool:
    """Return whether a value is a list of chat turns, possibly as a JSON string."""
    return content_kind(value) == CONVERSATION


def bytes_kind(start: bytes) -> str:
    """Return the kind of a file by its first 16 bytes; `BINARY` if the format is unknown."""
    for kind, signatures in SIGNATURES.items():
        if any(start[offset:].startswith(mark) for offset, mark in signatures):
            return kind
    return BINARY


def is_base64_image(text: str) -> bool:
    """Return whether a text is a base64 image without the prefix of a data URL."""
    start = text[:MIN_BASE64]
    return (
        start.startswith(BASE64_IMAGES)
        and len(text) >= MIN_BASE64
        and start.isascii()
        and not ({*start} & {*" .:\\"})
    )


def _text_kind(text: str) -> str:
    """Return the kind of input that a text contains or refers to, by its suffix; "" for plain text.

    It may be a data URL, a base64 image, JSON, a path or a URL.
    """
    for kind in SUFFIXES:
        if text.startswith(f"data:{kind}/"):
            return kind
    if is_base64_image(text):
        return IMAGE
    text = text.strip()
    if text[:1] + text[-1:] in ("[]", "{}"):
        return content_kind(parse_json_or_none(text))
    if len(text) <= MAX_PATH and "\n" not in text:
        path = text.lower()
        if path.startswith(("http://", "https://")):
            path = re.split(r"[?#]", path)[0]
        for kind, suffixes in SUFFIXES.items():
            if path.endswith(suffixes):
                return kind
    return ""


def parse_json_or_none(text: str) -> Any:
    """Parse text that may be JSON; return None if it is not."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


@cache
def name_kind(name: str) -> str:
    """Return the kind of input that a column's name denotes, or "".

    "img_path" and "source_image" are images; "image_width" and "num_images" are not.
    """
    words = [word.rstrip("0123456789") or word for word in split_name(name)]
    if kind := WORD_KINDS.get("".join(words)):
        return kind
    nouns = [index for index, word in enumerate(words) if word in WORD_KINDS]
    if not nouns or not {*QUANTIFIERS.split()}.isdisjoint(words[: nouns[0]]):
        return ""
    suffix = words[nouns[-1] + 1 :]
    is_input = all(word in SUFFIX_WORDS.split() or word.isdigit() for word in suffix)
    return WORD_KINDS[words[nouns[-1]]] if is_input else ""


@cache
def _spellings(name: str) -> tuple[str, ...]:
    """Return a name in snake case, with and without a numeric or letter suffix ("choice_a")."""
    words = split_name(name)
    whole = "_".join(words)
    numbered = re.fullmatch(r"(.*[a-z])_?(\d+|_[a-z])", whole)
    return (whole, numbered[1]) if numbered else (whole,)


@cache
def split_name(name: str) -> tuple[str, ...]:
    """Return the lower-case words of a name: imagePath and image-path both have two."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name)
    return tuple(re.findall(r"[a-z0-9]+", spaced.lower()))
