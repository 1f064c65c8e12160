"""Prompts of diffusion models: their row layout, and loading of prompt sets."""

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from flow_grpo.config.paths import check_dataset_available
from flow_grpo.data.columns import (
    BINARY,
    IMAGE,
    VIDEO,
    ColumnRules,
    content_kind,
    has_binary,
    is_empty,
)
from flow_grpo.data.hub import check_hub_dataset, download_dataset, is_hub_name, read_hub
from flow_grpo.data.images import (
    IMAGE_COLUMNS,
    find_image,
    first_nonempty_column,
    listed_images,
    row_identity,
)
from flow_grpo.data.rows import (
    NO_COLUMN,
    PREFERENCE_COLUMN,
    Row,
    RowLayout,
    Split,
    check_text,
    join_with_or,
    list_split_files,
    missing_split_error,
    read_file,
    to_jsonable,
    warn_unread_files,
)
from flow_grpo.errors import UserError
from flow_grpo.images import ImageSource
from flow_grpo.modelscope_hub import is_modelscope

if TYPE_CHECKING:
    import pyarrow

VIDEO_COLUMN = "video"  # used if the image columns are missing or empty
MASK_COLUMN = "mask"  # read in rows with images
NEGATIVE_COLUMN = "negative_prompt"
MAX_PROMPT = 10_000  # characters; text encoders read at most 1,024 tokens
# suffixes after "train" and "test" by `prompt_fn`; the first file that exists is read
SPLIT_SUFFIXES = {
    "auto": ("_metadata.jsonl", ".jsonl", ".csv", ".parquet", ".txt"),
    "text": (".txt",),
    "metadata": ("_metadata.jsonl",),
}


@dataclass(frozen=True)
class Prompt:
    """A prompt with its conditioning images and the metadata that rewards get."""

    prompt: str
    negative_prompt: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    # source images (editing, image-to-video), or a source video as one file or its frames
    images: tuple[ImageSource, ...] = ()
    mask: ImageSource | None = None  # of the first image: white is what may change
    where: str = field(default="", compare=False)  # file and line

    @cached_property
    def identity(self) -> tuple[str, ...]:
        """Key that prompts with the same text and images share."""
        return row_identity(self.prompt, self.images)


@dataclass(frozen=True)
class PromptLayout(RowLayout[Prompt]):
    """Row layout of prompts: the text, and optional images, mask and negative prompt."""

    noun: ClassVar[str] = "prompt"
    suffixes: ClassVar[tuple[str, ...]] = (".txt", ".jsonl", ".csv", ".parquet")
    rules: ClassVar[ColumnRules] = ColumnRules(
        settings={IMAGE: "image_column", VIDEO: "image_column", BINARY: "image_column"},
        reserved={
            **dict.fromkeys(
                ("negative", "negatives", "neg", "neg_prompt", "negative_prompts", NEGATIVE_COLUMN),
                ("is named like a negative prompt", f'rename it to "{NEGATIVE_COLUMN}"'),
            ),
            **dict.fromkeys(
                ("prompt_2", "prompt_3", f"{NEGATIVE_COLUMN}_2", f"{NEGATIVE_COLUMN}_3"),
                ("is a prompt for one text encoder, while all encoders get the same prompt", ""),
            ),
            **dict.fromkeys(
                ("conversations", "conversation", "messages", "system", "system_prompt"),
                ("belongs to a chat", "write all of it into the prompt"),
            ),
            **dict.fromkeys(
                ("chosen", "rejected"),
                (PREFERENCE_COLUMN[0], "train on it with --config.preferences.data=PATH"),
            ),
        },
    )

    text: str = "prompt"

    @property
    def required(self) -> str:
        return f'text in "{self.text}"'

    @property
    def images(self) -> tuple[str, ...]:
        return self._resolve(self.image, (*IMAGE_COLUMNS, VIDEO_COLUMN))

    @property
    def ignored_kinds(self) -> tuple[str, ...]:
        return (IMAGE, VIDEO, BINARY) if self.image == NO_COLUMN else ()

    def check_columns(self, names: Collection[str], where: str) -> None:
        """Reject a table or a JSON object without a column that a setting names."""
        required = {"dataset_column": (self.text, "prompts")}
        if self.image not in ("", NO_COLUMN):
            required["image_column"] = (self.image, "images")
        for setting, (name, what) in required.items():
            if name not in names:
                only = f", only {', '.join(names)}" if names else ""
                raise UserError(
                    f'has no column "{name}"{only}',
                    field=where,
                    hint=f"name the column with the {what}: --config.{setting}=NAME",
                )

    def columns_to_load(self, schema: "pyarrow.Schema", where: str) -> list[str]:
        """Return the columns with images or masks, and all that are not binary.

        Other binary columns cannot be metadata, which is JSON; they are rejected unless the user
        allows them to be ignored.
        """
        used = self._inputs(schema.names)
        types = dict(zip(schema.names, schema.types, strict=True))
        binary = {name: b"\0" for name, kind in types.items() if _is_binary(kind)}
        self.reject_unused(binary, used, where)
        return [name for name in types if name not in binary or name in used]

    def from_arrow(self, row: Row) -> Row:
        """Convert all values but model inputs to JSON types."""
        inputs = self._inputs(row)
        return {k: v if k in inputs else to_jsonable(v) for k, v in row.items()}

    def _inputs(self, names: Collection[str]) -> set[str]:
        """Return the columns of the prompts, and of images and masks if a table has images."""
        has_images = not {*self.images}.isdisjoint(names)
        return {self.text, *self.images, MASK_COLUMN} if has_images else {self.text}

    def parse(self, row: Row | str, folder: Path, where: str) -> Prompt:
        """Convert a row to a prompt; see `RowLayout.parse`.

        All columns but images become metadata, with the prompt as "prompt". The line of a text file
        is a prompt without metadata.
        """
        text = row if isinstance(row, str) else row[self.text]
        check_text(text, self.text, where, MAX_PROMPT)
        if isinstance(row, str):
            return Prompt(row, where=where)
        negative = row.get(NEGATIVE_COLUMN) or ""
        check_text(negative, NEGATIVE_COLUMN, where, MAX_PROMPT, allow_blank=True)
        sources = listed_images(row, where, self.images)
        images = tuple(find_image(each, folder, where) for each in sources)
        mask, used = None, {self.text, NEGATIVE_COLUMN, first_nonempty_column(row, self.images)}
        if images:
            used.add(MASK_COLUMN)
            if given := row.get(MASK_COLUMN):
                mask = find_image(given, folder, where, MASK_COLUMN)
        elif (
            self.image != NO_COLUMN
            and MASK_COLUMN not in self.metadata
            and content_kind(row.get(MASK_COLUMN)) in (IMAGE, BINARY)
        ):
            raise UserError(
                f'has a column "{MASK_COLUMN}" but no image to mask',
                field=where,
                hint="add the image",
            )
        self.reject_unused(row, used, where)
        left_out = {NEGATIVE_COLUMN, *self.images}
        if images or is_empty(row.get(MASK_COLUMN)):
            left_out.add(MASK_COLUMN)
        rest = {k: v for k, v in row.items() if k not in left_out and not has_binary(v)}
        metadata = to_jsonable(rest) | {"prompt": text}
        return Prompt(text, negative, metadata, images, mask, where)


def _is_binary(kind: "pyarrow.DataType") -> bool:
    """Return whether an Arrow type contains bytes at any depth."""
    inner = [kind.field(i).type for i in range(kind.num_fields)]
    return any(map(_is_binary, inner)) if inner else "binary" in str(kind)


DEFAULT_LAYOUT = PromptLayout()


def load_prompts(
    source: str | Path, split: Split, layout: PromptLayout = DEFAULT_LAYOUT, prompt_fn: str = "auto"
) -> list[Prompt]:
    """Load a split of a prompt set.

    Args:
        source: Directory, file or hub name.
        split: "train" or "test".
        layout: Columns to read.
        prompt_fn: Which file of a directory to read, a key of `SPLIT_SUFFIXES`.

    Raises:
        UserError: If the split is missing or a row is invalid.
    """
    prompts = find_prompts(source, split, layout, prompt_fn)
    if prompts is None:
        raise _missing_error(source, split, prompt_fn)
    return prompts


def find_prompts(
    source: str | Path, split: Split, layout: PromptLayout = DEFAULT_LAYOUT, prompt_fn: str = "auto"
) -> list[Prompt] | None:
    """Load a split like `load_prompts`, or return None if it is missing, as "test" of a file is."""
    _check_prompt_fn(prompt_fn)
    check_dataset_available(str(source))
    if is_modelscope(str(source)):
        source = download_dataset(str(source), ())
    if is_hub_name(str(source)):
        return read_hub(str(source), split, layout)
    file = _find_file(Path(source), split, prompt_fn)
    if prompt_fn == "auto":  # otherwise the user has chosen the file
        warn_unread_files(Path(source), split, [file] if file else [])
    return None if file is None else read_file(file, layout)


def check_prompts_exist(source: str, prompt_fn: str, splits: Sequence[Split] = ("train",)) -> None:
    """Reject a dataset that has none of `splits`, without reading it."""
    _check_prompt_fn(prompt_fn)
    if is_hub_name(source):
        check_hub_dataset(source)
    elif all(_find_file(Path(source), split, prompt_fn) is None for split in splits):
        raise _missing_error(source, splits[0], prompt_fn)


def _check_prompt_fn(prompt_fn: str) -> None:
    """Raise a UserError unless `prompt_fn` is a key of `SPLIT_SUFFIXES`."""
    if prompt_fn not in SPLIT_SUFFIXES:
        raise UserError(
            f"must be one of {', '.join(SPLIT_SUFFIXES)}", field="prompt_fn", value=prompt_fn
        )


def _find_file(path: Path, split: Split, prompt_fn: str) -> Path | None:
    """Return the file of a split, or None if there is none; a single file is the training split."""
    if os.path.isfile(path):  # does not raise for a name that is too long
        return path if split == "train" else None
    files = (path / f"{split}{suffix}" for suffix in SPLIT_SUFFIXES[prompt_fn])
    return next((each for each in files if os.path.isfile(each)), None)


def _missing_error(source: str | Path, split: Split, prompt_fn: str) -> UserError:
    """Return the UserError for a prompt set without this split."""
    names = join_with_or(f"{split}{suffix}" for suffix in SPLIT_SUFFIXES[prompt_fn])
    return missing_split_error(
        source,
        Path(source),
        split,
        "prompts",
        found=[file.name for file in list_split_files(Path(source), split)],
        hint=f"pass a directory with {names} (prompt_fn={prompt_fn!r}), or such a file",
    )
