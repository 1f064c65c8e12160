"""Prompts from tables of pyarrow's: parquet files and Hugging Face datasets."""

import importlib
import math
import os
import re
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from flow_grpo.errors import UserError, first_line
from flow_grpo.sampling.rows import Prompt, check_column, to_prompt

if TYPE_CHECKING:
    import pyarrow

Split = Literal["train", "test"]
INSTALL = "pip install -e '.[data]'"


def read_parquet(path: Path, column: str) -> list[Prompt]:
    parquet = _import("pyarrow.parquet", f"{path} needs pyarrow")
    try:
        schema = parquet.read_schema(path)
        check_column(column, schema.names, str(path))
        return prompts_of(parquet.read_table(path, columns=kept(schema)), column, str(path))
    except (ValueError, OSError) as error:  # pyarrow's own errors are ValueErrors
        raise UserError(f"{path} is not a whole parquet file: {first_line(error)}") from error


def read_table(path: Path) -> list[dict[str, Any]]:
    """All of a parquet file, pictures as their bytes."""
    parquet = _import("pyarrow.parquet", f"{path} needs pyarrow")
    try:
        return parquet.read_table(path).to_pylist()
    except (ValueError, OSError) as error:
        raise UserError(f"{path} is not a whole parquet file: {first_line(error)}") from error


def is_hub_name(source: str) -> bool:
    """owner/name, unless it looks like a path on this machine that was mistyped."""
    path = Path(source)
    named = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", source) is not None
    files = (".txt", ".jsonl", ".json", ".csv", ".parquet")
    return named and path.suffix not in files and not any(map(os.path.exists, (path, path.parent)))


def read_hub(name: str, split: Split, column: str) -> list[Prompt] | None:
    """None where there is no such split. "validation" will do for "test", and a set with one split
    alone has that to train on."""
    here = f"there is no folder or file {name}, and as the name of a Hugging Face dataset it"
    datasets = _import("datasets", f"{here} needs the package datasets")
    try:
        splits = datasets.load_dataset(name)
    except Exception as error:  # of many kinds: no network, no such set, a choice to be made
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
    part, where = splits[chosen[0]], f"{name} ({chosen[0]})"
    schema = part.features.arrow_schema
    check_column(column, schema.names, where)
    table = part.select_columns(kept(schema)).with_format("arrow")[:]
    return prompts_of(table, column, where)


def kept(schema: "pyarrow.Schema") -> list[str]:
    """All but columns with bytes, such as pictures: rewards may get the metadata as JSON."""
    return [name for name, kind in zip(schema.names, schema.types, strict=True) if _plain(kind)]


def prompts_of(table: "pyarrow.Table", column: str, where: str) -> list[Prompt]:
    check_column(column, table.column_names, where)  # a column of bytes is gone by now
    rows = enumerate(table.to_pylist(), 1)
    return [to_prompt(as_json(row), column, f"{where} row {n}") for n, row in rows]


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
