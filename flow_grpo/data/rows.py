"""Read the rows of data files: text, JSON lines, JSON, CSV and parquet.

Both trainers read their datasets here. A trainer's `RowLayout` names the columns that it uses and
converts a row to a prompt or a question. Errors carry the position of the row as their `field`:
"train.jsonl:3" or "train.parquet row 3".
"""

import csv
import importlib
import io
import json
import logging
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

from flow_grpo.data.columns import BINARY, IMAGE, ColumnRules, parse_json_or_none
from flow_grpo.data.images import IMAGE_COLUMNS
from flow_grpo.errors import UserError, did_you_mean_file, first_line, join_hints
from flow_grpo.untrusted_files import parse_json, read_json, read_text, split_lines

if TYPE_CHECKING:
    import pyarrow

T = TypeVar("T")
Row = dict[str, Any]
Split = Literal["train", "test"]
NO_COLUMN = "none"
DELIMITERS = ",;\t"  # spreadsheets write ";" in locales with a decimal comma
BATCH_ROWS = 16  # rows of a Parquet file read at a time
PAGE_BUFFER = 2**20  # bytes of a column read at a time
INSTALL_HINT = "pip install -e '.[data]'"
PREFERENCE_COLUMN = ("belongs to a preference dataset", "")
logger = logging.getLogger("flow_grpo")


@dataclass(frozen=True)
class RowLayout(ABC, Generic[T]):
    """Columns that a trainer reads, and the conversion of a row to a prompt or a question.

    Args:
        text: Column of the prompt or question.
        image: Column of the images; "" for the first of `IMAGE_COLUMNS`, "none" to ignore images.
        metadata: Columns that are metadata for the rewards even if they look like inputs.
    """

    noun: ClassVar[str]  # what a row is, for messages
    suffixes: ClassVar[tuple[str, ...]]  # of the files that are read
    rules: ClassVar[ColumnRules]

    text: str = ""
    image: str = ""
    metadata: tuple[str, ...] = ()

    @property
    @abstractmethod
    def required(self) -> str:
        """What a row must contain, for messages."""

    @abstractmethod
    def parse(self, row: Row | str, folder: Path, where: str) -> T:
        """Convert a row.

        Args:
            row: Values by column, or a line of a text file.
            folder: Directory that relative paths start from.
            where: File and row, the `field` of errors.
        """

    def check_columns(self, names: Collection[str], where: str) -> None:
        """Reject a table or a JSON object without a column that a setting names."""

    def columns_to_load(self, schema: "pyarrow.Schema", where: str) -> list[str] | None:
        """Return the columns of an Arrow table to load, or None for all."""

    def from_arrow(self, row: Row) -> Row:
        """Convert the values of a row of an Arrow table."""
        return row

    @property
    def text_columns(self) -> tuple[str, ...]:
        """Columns of which a header has one."""
        return (self.text,)

    @property
    def images(self) -> tuple[str, ...]:
        """Columns that may contain the images, in order of precedence."""
        return self._resolve(self.image, IMAGE_COLUMNS)

    @property
    def ignored_kinds(self) -> tuple[str, ...]:
        """Kinds of content that may be left unused."""
        return (IMAGE, BINARY) if self.image == NO_COLUMN else ()

    def reject_unused(self, row: Mapping[str, Any], used: Collection[str], where: str) -> None:
        """Raise for the first column that looks like an input and is not used."""
        self.rules.check(row, used, where, allowed=self.metadata, ignored=self.ignored_kinds)

    def _resolve(self, name: str, default: Sequence[str]) -> tuple[str, ...]:
        """Return the columns that a setting selects: none, the named one, or the default ones."""
        if name == NO_COLUMN:
            return ()
        return (name,) if name else tuple(each for each in default if each not in self.metadata)


def read_file(path: Path, layout: RowLayout[T]) -> list[T]:
    """Read and parse all rows of a file; paths of images and videos are relative to it."""
    if path.suffix not in layout.suffixes:
        raise UserError(f"must be a {join_with_or(layout.suffixes)} file", field=path)
    try:
        rows = READERS[path.suffix](path, layout)
        parsed = [layout.parse(row, path.parent, where) for where, row in rows]
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", field=path) from error
    if not parsed:
        raise UserError("is empty", field=path, hint=f"write one {layout.noun} per row")
    return parsed


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the lines that are not blank with their positions."""
    for number, line in enumerate(split_lines(read_text(path)), 1):
        if line.strip():
            yield f"{path}:{number}", line


def _read_text_lines(path: Path, layout: RowLayout) -> Iterator[tuple[str, str]]:
    """Yield (position, line) of a text file, whose only column may have any name."""
    layout.check_columns([layout.text], str(path))
    for where, line in _lines(path):
        line = line.strip()
        if line.startswith("{") and parse_json_or_none(line) is not None:
            raise UserError(
                f"is a JSON object, but a .txt file has one plain {layout.noun} per line",
                field=where,
                hint="rename the file to .jsonl",
            )
        yield where, line


def _read_json_lines(path: Path, layout: RowLayout) -> Iterator[tuple[str, Row]]:
    """Yield (position, row) of a JSON Lines file."""
    for where, line in _lines(path):
        yield where, _check_object(parse_json(line, where), layout, where)


def _read_json_list(path: Path, layout: RowLayout) -> Iterator[tuple[str, Row]]:
    """Yield (position, row) of a JSON file, which must contain a list."""
    try:
        rows = read_json(path)
    except UserError as error:
        first = split_lines(read_text(path).strip())[0]
        if first.startswith("{") and first.endswith("}"):
            raise UserError(
                str(error), hint="if it is a JSON Lines file, rename it to .jsonl"
            ) from error
        raise
    if not isinstance(rows, list):
        raise UserError(f"must be a list of rows, got {type(rows).__name__}", field=path)
    for number, row in enumerate(rows, 1):
        where = f"{path} row {number}"
        yield where, _check_object(row, layout, where)


def _check_object(row: Any, layout: RowLayout, where: str) -> Row:
    """Return `row`, or raise a UserError unless it is a JSON object with the required columns."""
    if not isinstance(row, dict):
        shown = json.dumps(row, ensure_ascii=False)[:80]
        raise UserError(f"must be an object with {layout.required}, got {shown}", field=where)
    layout.check_columns(row, where)
    return row


def _read_csv(path: Path, layout: RowLayout) -> Iterator[tuple[str, Row]]:
    """Yield (position, row) of a CSV file with a header; values are text, blank rows skipped."""
    text = read_text(path)
    records = _csv_records(text, _delimiter(text, layout.text_columns), path)
    where, header = next(records, (str(path), []))
    header = [name.strip() for name in header]
    if not header:
        return
    layout.check_columns(header, where)
    _reject_duplicate_columns(header, where)
    for where, values in records:
        if len(values) != len(header):
            raise UserError(
                f"has {len(values)} values for {len(header)} columns",
                field=where,
                hint="put double quotes around a value that contains a separator",
            )
        yield where, dict(zip(header, values, strict=True))


def _delimiter(text: str, columns: Collection[str]) -> str:
    """Return the delimiter with which the header has one of `columns`; a comma if none does."""
    first = next((line for line in text.splitlines() if line.strip()), "")
    with suppress(csv.Error):  # reported when the rows are read
        for delimiter in DELIMITERS:
            names = next(csv.reader([first], delimiter=delimiter), [])
            if not {*columns}.isdisjoint(name.strip() for name in names):
                return delimiter
    return DELIMITERS[0]


def _csv_records(text: str, delimiter: str, path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield each record that is not blank, with the position of its first line."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    while True:
        where = f"{path}:{reader.line_num + 1}"
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise UserError(
                f"is not valid CSV ({error})",
                field=where,
                hint="put double quotes around a value that contains a separator, a line break or "
                'quotes, and double those quotes ("")',
            ) from error
        if any(value.strip() for value in values):
            yield where, values


def _read_parquet(path: Path, layout: RowLayout) -> Iterator[tuple[str, Row]]:
    """Yield (position, row) of a parquet file, with images as bytes; read it in small batches."""
    parquet = import_or_hint("pyarrow.parquet", f"{path} needs pyarrow")
    number = 0
    with _parquet_errors(path):
        # otherwise whole columns of a row group, possibly gigabytes, are read at once
        file = parquet.ParquetFile(path, buffer_size=PAGE_BUFFER, pre_buffer=False)
        names = select_columns(file.schema_arrow, layout, str(path))
        batches = file.iter_batches(batch_size=BATCH_ROWS, columns=names)
    while True:
        with _parquet_errors(path):
            batch = next(batches, None)
            rows = [] if batch is None else batch.to_pylist()
        if batch is None:
            return
        for row in rows:
            number += 1
            yield f"{path} row {number}", layout.from_arrow(row)


@contextmanager
def _parquet_errors(path: Path) -> Iterator[None]:
    """Turn pyarrow's errors, which are ValueErrors, into a UserError."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise UserError(f"is not a valid parquet file: {first_line(error)}", field=path) from error


def select_columns(schema: "pyarrow.Schema", layout: RowLayout, where: str) -> list[str] | None:
    """Check the columns of an Arrow table and return those to load, None for all.

    Raises:
        UserError: If a column is missing or occurs twice.
    """
    _reject_duplicate_columns(schema.names, where)
    layout.check_columns(schema.names, where)
    return layout.columns_to_load(schema, where)


READERS = {
    ".txt": _read_text_lines,
    ".jsonl": _read_json_lines,
    ".json": _read_json_list,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def _reject_duplicate_columns(names: Sequence[str], where: str) -> None:
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"has two columns named {repeated[0]!r}", field=where, hint="rename one")


def check_text(
    text: Any, column: str, where: str, limit: int, *, allow_blank: bool = False
) -> None:
    """Reject a value that is not text, is blank, or has more than `limit` characters."""
    if not isinstance(text, str) or not (text.strip() or allow_blank):
        raise UserError(f'needs text in column "{column}", got {text!r:.80}', field=where)
    if len(text) > limit:
        raise UserError(
            f'has {len(text):,} characters in column "{column}", more than the maximum of '
            f"{limit:,}",
            field=where,
            hint="shorten it or remove the row",
        )


def to_jsonable(value: Any) -> Any:
    """Convert a value to JSON types: dates and the like to text, non-finite floats to None."""
    if isinstance(value, dict):
        return {str(key): to_jsonable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_jsonable(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)


def import_or_hint(module: str, why: str) -> ModuleType:
    """Import an optional dependency; without it, raise an error with the command to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(why, hint=INSTALL_HINT) from error


def join_with_or(names: Iterable[str]) -> str:
    """Join names for a sentence: "a, b or c"."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def list_split_files(folder: Path, split: str, known: Collection[Path] = ()) -> list[Path]:
    """Return the files of a directory that are named like a split, except the `known` ones."""
    if not os.path.isdir(folder):
        return []
    names = (f"{split}.", f"{split}_metadata.")
    files = (each for each in sorted(folder.iterdir()) if each.name.startswith(names))
    return [each for each in files if each.is_file() and each not in known]


def warn_unread_files(folder: Path, split: str, read: Sequence[Path]) -> None:
    """Warn if a directory has further files of a split besides `read`, the ones that are used."""
    if others := list_split_files(folder, split, read):
        ignored = ", ".join(file.name for file in others)
        used = ", ".join(file.name for file in read) or f"no {split} file"
        logger.warning("%s: ignoring %s, reading %s", folder, ignored, used)


def missing_split_error(
    source: str | Path,
    path: Path,
    split: str,
    what: str,
    *,
    found: Sequence[str],
    hint: str,
    field: str = "dataset",
) -> UserError:
    """Return the error for a dataset without a split.

    Args:
        source: Value of the setting `field`.
        path: Its local directory.
        split: The missing split.
        what: What its rows are.
        found: Files that it has instead.
        hint: Which file to give.
        field: Setting that names the dataset.
    """
    if not os.path.exists(path):
        rule, hint = "does not exist", join_hints(hint, did_you_mean_file(path))
    else:
        only = f", only {', '.join(found[:4])}" if found else ""
        rule = f"has no {split} {what}{only}"
    return UserError(rule, field=field, value=str(source), hint=hint)
