"""Prompts from text files: one per line, JSON lines, CSV. Every mistake names file and line."""

import csv
import importlib
import io
import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from flow_grpo.access import check_access, refusal
from flow_grpo.data.columns import (
    BINARY,
    IMAGE,
    ColumnRules,
    content_kind,
    has_binary,
    is_empty,
    parse_names,
)
from flow_grpo.data.images import COLUMNS, find_picture, listed, source_column
from flow_grpo.errors import UserError, first_line
from flow_grpo.files import parse_json, read_text, split_lines
from flow_grpo.pictures import Picture

DELIMITERS = ",;\t"  # spreadsheets write the second where the comma is a decimal point
Split = Literal["train", "test"]
INSTALL = "pip install -e '.[data]'"
NO_IMAGES = "none"
MASK = "mask"  # the column of masks, in files that have pictures
NEGATIVE = "negative_prompt"
MAX_PROMPT = 10_000  # characters; text encoders read at most 1,024 tokens
PREFERENCE = ("belongs to a preference data set, while training compares samples of the policy", "")
RULES = ColumnRules(
    settings={IMAGE: "image_column", BINARY: "image_column"},
    reserved={
        **dict.fromkeys(
            ("negative", "negatives", "neg", "neg_prompt", "negative_prompts", NEGATIVE),
            ("is named like a negative prompt", f'rename it to "{NEGATIVE}"'),
        ),
        **dict.fromkeys(
            (f"{name}_{n}" for name in ("prompt", NEGATIVE) for n in (2, 3)),
            ("is a prompt for one of several text encoders, which all get the same one", ""),
        ),
        **dict.fromkeys(
            ("conversations", "conversation", "messages", "system", "system_prompt"),
            ("belongs to a chat", "write all of it into the prompt"),
        ),
        **dict.fromkeys(("chosen", "rejected"), PREFERENCE),
    },
)


@dataclass(frozen=True)
class Columns:
    """Which of a file's columns have what the model is given."""

    prompt: str = "prompt"
    image: str = ""  # "": `images` or `image`, where there is one; "none": none
    metadata: tuple[str, ...] = ()  # metadata for the rewards, whatever their content

    @property
    def pictures(self) -> tuple[str, ...]:
        return named_or(self.image, COLUMNS, self.metadata)

    @property
    def unread(self) -> dict[str, tuple[str, ...]]:
        """Columns and kinds of content that the user allows to be ignored."""
        ignored = (IMAGE, BINARY) if self.image == NO_IMAGES else ()
        return {"allowed": self.metadata, "ignored": ignored}

    def check(self, columns: Iterable[str], where: str) -> None:
        """Refuse a file that lacks one that was named."""
        columns = list(columns)
        named = {"dataset_column": (self.prompt, "prompts")}
        if self.image not in ("", NO_IMAGES):
            named["image_column"] = (self.image, "pictures")
        for setting, (name, what) in named.items():
            if name not in columns:
                raise UserError(
                    f'{where} has no column "{name}", it has: {", ".join(columns)}; name the one '
                    f"with the {what}: --config.{setting}=NAME"
                )


def named_or(name: str, usual: Sequence[str], metadata: Sequence[str]) -> tuple[str, ...]:
    """Return the column that a setting names ("none": no column), or else the `usual` ones that are
    not declared to be metadata."""
    if name == NO_IMAGES:
        return ()
    return (name,) if name else tuple(each for each in usual if each not in metadata)


@dataclass(frozen=True)
class Prompt:
    prompt: str
    negative_prompt: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)  # handed to the rewards
    images: tuple[Picture, ...] = ()  # for the model to start from
    mask: Picture | None = None  # of the first of these: white is what may change
    where: str = field(default="", compare=False)  # file and line


def to_prompt(row: dict[str, Any], columns: Columns, folder: Path, where: str) -> Prompt:
    """The rewards get the whole row but its pictures, with the prompt under that name whatever its
    column's is. `folder`: where paths of pictures start."""
    text, negative = row[columns.prompt], row.get("negative_prompt") or ""
    if not isinstance(text, str) or not text.strip():
        raise UserError(f'{where}: needs a text in column "{columns.prompt}", got {text!r:.80}')
    if not isinstance(negative, str):
        raise UserError(f'{where}: "negative_prompt" must be a string, got {negative!r:.80}')
    check_prompt_length(text, columns.prompt, where)
    check_prompt_length(negative, NEGATIVE, where)
    given = {k: v for k, v in row.items() if v != ""}  # CSV has no other way to name none
    sources = listed(given, where, columns.pictures)
    images = tuple(find_picture(each, folder, where) for each in sources)
    masked = images and given.get(MASK)
    mask = find_picture(given[MASK], folder, where, MASK) if masked else None
    used = {columns.prompt, NEGATIVE, source_column(given, columns.pictures)}
    if images:
        used.add(MASK)
    elif (
        columns.image != NO_IMAGES
        and MASK not in columns.metadata
        and content_kind(given.get(MASK)) in (IMAGE, BINARY)
    ):
        raise UserError(f'{where}: has a column "{MASK}" but no image to mask; add the image')
    RULES.check(given, used, where, **columns.unread)
    left_out = {NEGATIVE, *columns.pictures}
    if images or is_empty(given.get(MASK)):
        left_out.add(MASK)
    metadata = {k: v for k, v in row.items() if k not in left_out and not has_binary(v)}
    return Prompt(text, negative, metadata | {"prompt": text}, images, mask, where)


def check_prompt_length(text: str, column: str, where: str) -> None:
    if len(text) > MAX_PROMPT:
        raise UserError(
            f'{where}: "{column}" has {len(text):,} characters, more than the allowed '
            f"{MAX_PROMPT:,}; shorten it or remove the row"
        )


def read_lines(path: Path, columns: Columns) -> list[Prompt]:
    """There is but one column."""
    columns.check([columns.prompt], str(path))
    text = read_text(path)
    lines = [(f"{path}:{n}", line.strip()) for n, line in enumerate(split_lines(text), 1)]
    for where, line in lines:
        check_prompt_length(line, columns.prompt, where)
        if line.startswith("{") and line.endswith("}") and _is_json(line):
            raise UserError(
                f"{where}: is a JSON object, but a .txt file has one prompt per line; rename the "
                "file to .jsonl"
            )
    return [Prompt(line, where=where) for where, line in lines if line]


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def read_jsonl(path: Path, columns: Columns) -> list[Prompt]:
    lines = enumerate(split_lines(read_text(path)), 1)
    return [_read_json(line, columns, path, n) for n, line in lines if line.strip()]


def _read_json(line: str, columns: Columns, path: Path, number: int) -> Prompt:
    where, column = f"{path}:{number}", columns.prompt
    row = parse_json(line, where)
    if not isinstance(row, dict) or not isinstance(row.get(column), str) or not row[column]:
        others = isinstance(row, dict) and column not in row and ", ".join(row)
        hint = f" (it has {others}; set --config.dataset_column)" if others else ""
        shown = line.strip()[:80]
        raise UserError(f'{where}: needs an object with a "{column}" string{hint}, got {shown}')
    columns.check(row, where)
    return to_prompt(row, columns, path.parent, where)


def read_csv(path: Path, columns: Columns) -> list[Prompt]:
    """The first line names the columns; values are text. Lines without any value are left out."""
    text = read_text(path)
    lines = _csv_lines(text, _delimiter(text, columns.prompt), path)
    number, header = next(lines, (1, []))
    header = [name.strip() for name in header]
    if not header:
        return []
    columns.check(header, f"{path}:{number}")
    if twice := sorted({name for name in header if header.count(name) > 1}):
        raise UserError(f"{path}:{number}: two columns are named {twice[0]!r}; rename one")
    prompts = []
    for number, values in lines:
        where = f"{path}:{number}"
        if len(values) != len(header):
            raise UserError(
                f"{where}: {len(values)} values for {len(header)} columns; put double quotes "
                "around a value that has a separator in it"
            )
        row = dict(zip(header, values, strict=True))
        prompts.append(to_prompt(row, columns, path.parent, where))
    return prompts


def _delimiter(text: str, column: str) -> str:
    """The one that gives the first line the column."""
    first = next((line for line in text.splitlines() if line.strip()), "")
    with suppress(csv.Error):  # told when the lines are read
        for delimiter in DELIMITERS:
            names = next(csv.reader([first], delimiter=delimiter), [])
            if column in [name.strip() for name in names]:
                return delimiter
    return DELIMITERS[0]


def _csv_lines(text: str, delimiter: str, path: Path) -> Iterable[tuple[int, list[str]]]:
    """Each record with the number of the line it starts in."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    while True:
        start = reader.line_num + 1
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise UserError(
                f"{path}:{start}: not CSV ({error}); put double quotes around a value that has a "
                'separator, a line break or quotes in it, and write those quotes twice ("")'
            ) from error
        if any(value.strip() for value in values):
            yield start, values


if TYPE_CHECKING:
    import pyarrow


def read_parquet(path: Path, columns: Columns) -> list[Prompt]:
    parquet = _import("pyarrow.parquet", f"{path} needs pyarrow")
    try:
        schema = parquet.read_schema(path)
        columns.check(schema.names, str(path))
        table = parquet.read_table(path, columns=kept(schema, columns, str(path)))
        return prompts_of(table, columns, path.parent, str(path))
    except (ValueError, OSError) as error:  # pyarrow's own errors are ValueErrors
        raise UserError(f"{path} is not a whole parquet file: {first_line(error)}") from error


def read_table(path: Path) -> list[dict[str, Any]]:
    """All of a parquet file, pictures as their bytes."""
    parquet = _import("pyarrow.parquet", f"{path} needs pyarrow")
    try:
        reject_repeated(parquet.read_schema(path).names, str(path))
        return parquet.read_table(path).to_pylist()
    except (ValueError, OSError) as error:
        raise UserError(f"{path} is not a whole parquet file: {first_line(error)}") from error


def is_hub_name(source: str) -> bool:
    """owner/name, unless it looks like a path on this machine that was mistyped."""
    path = Path(source)
    named = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", source) is not None
    files = (".txt", ".jsonl", ".json", ".csv", ".parquet")
    return named and path.suffix not in files and not any(map(os.path.exists, (path, path.parent)))


def read_hub(
    name: str, split: Split, column: str, image_column: str = "", metadata_columns: str = ""
) -> list[Prompt] | None:
    """None where there is no such split. "validation" will do for "test", and a set with one split
    alone has that to train on."""
    here = f"there is no folder or file {name}, and as the name of a Hugging Face dataset it"
    datasets = _import("datasets", f"{here} needs the package datasets")
    check_access("dataset", name, kind="dataset", file="README.md")
    try:
        splits = datasets.load_dataset(name)
    except Exception as error:  # of many kinds: no network, no such set, a choice to be made
        if told := refusal(error, "dataset", name, kind="dataset"):
            raise UserError(told) from error
        raise UserError(
            f"{here} cannot be loaded: {first_line(error)}; save what you need of it as "
            "train.parquet in a folder, with the columns you want"
        ) from error
    wanted = {"train": ["train"], "test": ["test", "validation"] if "train" in splits else []}
    chosen = [each for each in wanted[split] if each in splits]
    if split == "train" and len(splits) == 1:
        chosen = list(splits)
    if not chosen:
        if split == "test":
            return None
        raise UserError(f'{name} has no split "train", it has: {", ".join(splits)}')
    columns = Columns(column, image_column, parse_names(metadata_columns))
    part, where = splits[chosen[0]], f"{name} ({chosen[0]})"
    schema = part.features.arrow_schema
    columns.check(schema.names, where)
    table = part.select_columns(kept(schema, columns, where)).with_format("arrow")[:]
    return prompts_of(table, columns, Path(), where)


def kept(schema: "pyarrow.Schema", columns: Columns, where: str) -> list[str]:
    """Return the columns to load: images and masks for the model, and all that are not binary,
    which metadata cannot be (rewards may get it as JSON). Other binary columns are rejected unless
    the user allows them to be ignored."""
    reject_repeated(schema.names, where)
    used = {columns.prompt, *_files(schema.names, columns)}
    types = dict(zip(schema.names, schema.types, strict=True))
    binary = {name: b"\0" for name, kind in types.items() if not _plain(kind)}
    RULES.check(binary, used, where, **columns.unread)
    return [name for name in types if name not in binary or name in used]


def reject_repeated(names: list[str], where: str) -> None:
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"{where}: two columns are named {repeated[0]!r}; rename one")


def _files(names: Iterable[str], columns: Columns) -> tuple[str, ...]:
    """Columns that may have pictures."""
    return (*columns.pictures, MASK) if {*names} & {*columns.pictures} else ()


def prompts_of(table: "pyarrow.Table", columns: Columns, folder: Path, where: str) -> list[Prompt]:
    columns.check(table.column_names, where)  # a column of bytes is gone by now
    files = _files(table.column_names, columns)

    def plain(row: dict[str, Any]) -> dict[str, Any]:
        raw = (*files, columns.prompt)
        return {k: v if k in raw else as_json(v) for k, v in row.items()}

    rows = enumerate(table.to_pylist(), 1)
    return [to_prompt(plain(row), columns, folder, f"{where} row {n}") for n, row in rows]


def as_json(value: Any) -> Any:
    """Dates and the like as text; what is not a number as None."""
    if isinstance(value, dict):
        return {str(key): as_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)


def _plain(kind: "pyarrow.DataType") -> bool:
    inner = [kind.field(i).type for i in range(kind.num_fields)]
    return "binary" not in str(kind) if not inner else all(map(_plain, inner))


def _import(module: str, why: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{why}: {INSTALL}") from error
