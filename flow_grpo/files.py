"""Text and JSON that somebody else wrote: what cannot be used is told in one line."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flow_grpo.errors import UserError, first_line

MOST_BYTES = 4 * 2**30  # of a file that is read at once; prompts take a thousandth of it
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
MOST_DEPTH = 100  # of lists and objects in each other: what walks through them recurses


def read_text(path: Path) -> str:
    """Newlines as they are, for CSV."""
    if (size := path.stat().st_size) > MOST_BYTES:
        raise UserError(
            f"{path} has {size:,} bytes, and at most {MOST_BYTES:,} are read; split it, or name "
            "another file"
        )
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error}); save it as UTF-8") from error
    if "\0" in text:  # each second byte of UTF-16 without a mark at its start
        raise UserError(f"{path} is not UTF-8 text (it has zero bytes); save it as UTF-8")
    return text


def split_lines(text: str) -> list[str]:
    """Split at the ends of lines of all systems, and not at U+2028."""
    return re.split(r"\r\n|\r|\n", text)


def read_json(path: Path, **options: Any) -> Any:
    return parse_json(read_text(path), f"cannot read {path}", **options)


def parse_json(text: str | bytes, where: str, **options: Any) -> Any:
    """`options` are those of `json.loads`."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            repeated = next(name for name in names if names.count(name) > 1)
            raise UserError(f'{where}: the key "{repeated:.80}" appears twice; remove one')
        return found

    try:
        value = json.loads(text, object_pairs_hook=unique, **options)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({first_line(error)})") from error
    level, depth = [value], 0
    while level := [each for parent in level for each in _inside(parent)]:
        if (depth := depth + 1) > MOST_DEPTH:
            raise UserError(f"{where}: more than {MOST_DEPTH} lists and objects in each other")
    refuse_halves(json.dumps(value, ensure_ascii=False), where)
    return value


def _inside(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def refuse_halves(text: str, where: str) -> None:
    """Half of a surrogate pair, which JSON and paths can hold, and no tokenizer or file takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        broken = ascii(text[error.start])
        raise UserError(f"{where}: {broken} is half a character; write it whole") from error


def lies_in(folder: Path, path: Path) -> bool:
    """Also after links were followed: a run folder that somebody sent may link to anything."""
    try:
        return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))
    except ValueError:  # a zero byte in its name
        return False


def refuse_pickles(folder: Path) -> None:
    """Say so where all there is would run code when it is loaded."""
    for path in (path for pattern in PICKLES for path in sorted(folder.glob(pattern))):
        raise UserError(f"{path} is a pickle, which can run code; save it as .safetensors")


def dotted(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Fields by their full names."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from dotted(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
