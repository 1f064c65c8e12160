"""Read text and JSON from untrusted sources; invalid content raises a one-line UserError."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flow_grpo.errors import UserError, first_line

MAX_BYTES = 4 * 2**30  # files are read at once; prompt files are a thousand times smaller
PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
MAX_NESTING = 100  # of JSON values, because code that traverses them recurses


def read_text(path: Path) -> str:
    """Read UTF-8 text with unchanged newlines, as CSV needs them.

    Raises:
        UserError: If the file is too large, or is not UTF-8 text.
    """
    if (size := path.stat().st_size) > MAX_BYTES:
        raise UserError(
            f"has {size:,} bytes, but at most {MAX_BYTES:,} are read",
            field=path,
            hint="split it or use another file",
        )
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"is not UTF-8 text ({error})", field=path, hint="save it as UTF-8"
        ) from error
    if "\0" in text:  # every second byte of UTF-16 without a byte order mark
        raise UserError(
            "is not UTF-8 text (it has zero bytes)", field=path, hint="save it as UTF-8"
        )
    return text


def split_lines(text: str) -> list[str]:
    """Split at the line ends of all systems, but not at U+2028 as `str.splitlines` does."""
    return re.split(r"\r\n|\r|\n", text)


def read_json(path: Path, **options: Any) -> Any:
    """Read a JSON file; see `parse_json`."""
    return parse_json(read_text(path), f"cannot read {path}", **options)


def parse_json(text: str | bytes, where: str, **options: Any) -> Any:
    """Parse JSON; reject duplicate keys, deep nesting and lone surrogates.

    Args:
        text: The JSON text.
        where: Start of the error message: file, line or field.
        **options: Arguments of `json.loads`.
    """

    def reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Build the dict of a JSON object; raise a UserError if a key occurs twice."""
        unique = dict(pairs)
        if len(unique) < len(pairs):
            names = [name for name, _ in pairs]
            repeated = next(name for name in names if names.count(name) > 1)
            raise UserError(f'{where}: the key "{repeated:.80}" appears twice; remove one')
        return unique

    try:
        value = json.loads(text, object_pairs_hook=reject_duplicate_keys, **options)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({first_line(error)})") from error
    level, depth = [value], 0
    while level := [each for parent in level for each in _children(parent)]:
        if (depth := depth + 1) > MAX_NESTING:
            raise UserError(
                f"{where}: lists and objects are nested more than {MAX_NESTING} levels deep"
            )
    reject_lone_surrogates(json.dumps(value, ensure_ascii=False), where)
    return value


def _children(value: Any) -> Any:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def reject_lone_surrogates(text: str, where: str) -> None:
    """Reject half of a surrogate pair, which JSON and paths can contain but UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        surrogate = ascii(text[error.start])
        raise UserError(f"{where}: {surrogate} is a lone surrogate; remove it") from error


def is_inside(folder: Path, path: Path) -> bool:
    """Return whether `path` is in `folder` after resolving symlinks, which may point anywhere."""
    try:
        return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))
    except ValueError:  # zero byte in the path
        return False


def reject_pickles(folder: Path) -> None:
    """Raise a UserError if a directory contains pickles, which can execute code when loaded."""
    paths = (path for pattern in PICKLE_PATTERNS for path in sorted(folder.glob(pattern)))
    if (path := next(paths, None)) is not None:
        raise UserError(
            "is a pickle, which can execute code when loaded",
            field=path,
            hint="save it as .safetensors",
        )


def flatten_fields(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested dicts by their dotted names."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flatten_fields(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
