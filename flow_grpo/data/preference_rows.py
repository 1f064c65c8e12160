"""Row layouts of preference sets.

The columns of a row tell which layout it has:

- `chosen`, `rejected`: a pair; several rejected images are several pairs; `probability` of the
  preference if it is uncertain;
- `jpg_0`, `jpg_1`, `label_0`: Pick-a-Pic, with `label_0` 1, 0 or 0.5 for a tie;
- `image`, and `label` or `liked` (0 or 1): an image that was rated by itself;
- `image` alone: a demonstration.

The prompt is in `prompt` or `caption`. Source images of an editing model are in `source_image` or
`source_images`, and in pairs also in `image` or `images`. Every other column is read as in a prompt
set: negative prompt, mask and metadata.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from flow_grpo.data.columns import ColumnRules, is_empty
from flow_grpo.data.images import IMAGE_COLUMNS, find_image, first_nonempty_column, listed_images
from flow_grpo.data.prompts import Prompt, PromptLayout
from flow_grpo.data.rows import Row, RowLayout, join_with_or
from flow_grpo.errors import UserError
from flow_grpo.images import ImageSource

CHOSEN, REJECTED, PROBABILITY = "chosen", "rejected", "probability"
FIRST, SECOND, LABEL = "jpg_0", "jpg_1", "label_0"
RATINGS = ("liked", "label")
PROMPT_COLUMNS = ("prompt", "caption")
SOURCE_COLUMNS = ("source_images", "source_image")
TIES, UNLABELLED = "ties", "unlabelled"  # why a row is left out
# Columns of Pick-a-Pic that describe the images and their labels (dataset card of
# yuvalkirstain/pickapic_v2): the images themselves are in jpg_0 and jpg_1.
PICK_A_PIC_DETAILS = (
    *(f"image_{i}_{what}" for i in (0, 1) for what in ("uid", "url")),
    *("label_1", "best_image_uid", "are_different", "has_label"),
)


@dataclass(frozen=True)
class RatedImage:
    """A prompt with an image that was liked or disliked; a demonstration is liked."""

    prompt: Prompt
    image: ImageSource
    liked: bool


@dataclass(frozen=True)
class Judgement:
    """Two images of a prompt, and the probability that the first one is preferred."""

    prompt: Prompt
    first: ImageSource
    second: ImageSource
    probability: float


@dataclass(frozen=True)
class PreferenceRow:
    """What a row contains: judgements, rated images, or the reason why it is left out."""

    judgements: list[Judgement] = field(default_factory=list)
    images: list[RatedImage] = field(default_factory=list)
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class _PromptPart(PromptLayout):
    """Layout of the columns of a preference row that belong to its prompt."""

    rules: ClassVar[ColumnRules] = ColumnRules(
        settings={},
        reserved={
            name: why
            for name, why in PromptLayout.rules.reserved.items()
            if name not in (CHOSEN, REJECTED)
        },
    )


@dataclass(frozen=True)
class PreferenceLayout(RowLayout[PreferenceRow]):
    """Row layout of preference sets; see the module."""

    noun: ClassVar[str] = "pair of images"
    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".json", ".csv", ".parquet")
    rules: ClassVar[ColumnRules] = _PromptPart.rules

    @property
    def required(self) -> str:
        return f'"{PROMPT_COLUMNS[0]}" and the images'

    def check_columns(self, names: Collection[str], where: str) -> None:
        """Reject a table or a JSON object without a prompt or without images."""
        only = f", only {', '.join(names)}" if names else ""
        if not {*PROMPT_COLUMNS} & {*names}:
            raise UserError(
                f'has no column "{PROMPT_COLUMNS[0]}"{only}',
                field=where,
                hint=f'name the column of the prompts "{PROMPT_COLUMNS[0]}"',
            )
        self._check_layout(names, where)

    def _check_layout(self, names: Collection[str], where: str) -> None:
        """Reject columns that are not those of any layout."""
        layouts = ({CHOSEN, REJECTED}, {FIRST, SECOND, LABEL})
        if any(layout <= {*names} for layout in layouts):
            return
        for layout in layouts:
            missing, found = sorted(layout - {*names}), sorted(layout & {*names})
            if missing and found:
                present = " and ".join(f'"{name}"' for name in found)
                raise UserError(f'has {present} but no column "{missing[0]}"', field=where)
        if {*IMAGE_COLUMNS}.isdisjoint(names):
            raise UserError(
                f"has no images to compare, only {', '.join(names)}",
                field=where,
                hint=f'put their paths in "{CHOSEN}" and "{REJECTED}", or one in "image"',
            )

    def parse(self, row: Row | str, folder: Path, where: str) -> PreferenceRow:
        """Convert a row; see `RowLayout.parse`."""
        assert isinstance(row, dict)  # text files are not read
        present = {name for name, value in row.items() if not is_empty(value)}
        if {CHOSEN, REJECTED} & present:
            return self._parse_pair(row, folder, where)
        if {FIRST, SECOND} & present:
            return self._parse_pick_a_pic(row, folder, where)
        return self._parse_rated(row, folder, where)

    def _parse_pair(self, row: Row, folder: Path, where: str) -> PreferenceRow:
        """Convert a row with one chosen and one or more rejected images."""
        prompt = self._prompt(
            row,
            folder,
            where,
            (*SOURCE_COLUMNS, *IMAGE_COLUMNS),
            used=(CHOSEN, REJECTED, PROBABILITY),
        )
        [chosen] = self._images(row, CHOSEN, folder, where, most=1)
        rejected = self._images(row, REJECTED, folder, where)
        probability = 1.0
        if not is_empty(row.get(PROBABILITY)):
            probability = read_fraction(row[PROBABILITY], PROBABILITY, where)
        return PreferenceRow([Judgement(prompt, chosen, each, probability) for each in rejected])

    def _parse_pick_a_pic(self, row: Row, folder: Path, where: str) -> PreferenceRow:
        """Convert a row of Pick-a-Pic.

        Diffusion-DPO trains on rows whose label_0 is 0 or 1 and swaps the images if it is 0
        (SalesforceAIResearch/DiffusionDPO, train.py, `preprocess_train`; commit 8d3ee5c).
        """
        sources = (*SOURCE_COLUMNS, *IMAGE_COLUMNS)
        used = (FIRST, SECOND, LABEL, *PICK_A_PIC_DETAILS)
        prompt = self._prompt(row, folder, where, sources, used=used)
        if is_empty(row.get(LABEL)) or row.get("has_label") in (False, "False", "false"):
            return PreferenceRow(left_out=(UNLABELLED,))
        probability = read_fraction(row[LABEL], LABEL, where)
        [first] = self._images(row, FIRST, folder, where, most=1)
        [second] = self._images(row, SECOND, folder, where, most=1)
        return PreferenceRow([Judgement(prompt, first, second, probability)])

    def _parse_rated(self, row: Row, folder: Path, where: str) -> PreferenceRow:
        """Convert a row with one image; without a rating, it is a demonstration."""
        name = first_nonempty_column(row, IMAGE_COLUMNS) or IMAGE_COLUMNS[-1]
        ratings = [each for each in RATINGS if each not in self.metadata]
        prompt = self._prompt(row, folder, where, SOURCE_COLUMNS, used=(*IMAGE_COLUMNS, *ratings))
        [image] = self._images(row, name, folder, where, most=1)
        rating = first_nonempty_column(row, ratings)
        liked = True if rating is None else read_rating(row[rating], rating, where)
        return PreferenceRow(images=[RatedImage(prompt, image, liked)])

    def _images(
        self, row: Row, column: str, folder: Path, where: str, *, most: int | None = None
    ) -> list[ImageSource]:
        """Return the images of a column, of which there is at least one."""
        given = [] if is_empty(row.get(column)) else listed_images(row, where, (column,))
        if not given or (most and len(given) > most):
            count = f"exactly {most}" if most else "at least one"
            raise UserError(
                f'needs {count} image in column "{column}", got {len(given)}', field=where
            )
        return [find_image(each, folder, where, f"{column} image") for each in given]

    def _prompt(
        self,
        row: Mapping[str, Any],
        folder: Path,
        where: str,
        sources: tuple[str, ...],
        *,
        used: Collection[str],
    ) -> Prompt:
        """Return the prompt of a row: its text, source images and what is left of the columns."""
        text = first_nonempty_column(dict(row), PROMPT_COLUMNS)
        if text is None:
            names = join_with_or(f'"{name}"' for name in PROMPT_COLUMNS)
            raise UserError(f"needs text in column {names}", field=where)
        source = first_nonempty_column(dict(row), sources)
        rest = {name: value for name, value in row.items() if name not in {*used, text, source}}
        rest["prompt"] = row[text]
        if source:
            rest["images"] = row[source]
        return _PromptPart(metadata=self.metadata, image="images").parse(rest, folder, where)


def read_fraction(value: Any, column: str, where: str) -> float:
    """Read a number from 0 to 1, which may be text in CSV."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if not 0 <= number <= 1:
        raise UserError(
            f'must have a number from 0 to 1 in column "{column}", got {value!r:.80}', field=where
        )
    return number


def read_rating(value: Any, column: str, where: str) -> bool:
    """Read a rating: 0 or 1, or true or false."""
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    if (number := read_fraction(value, column, where)) in (0, 1):
        return number == 1
    raise UserError(f'must have 0 or 1 in column "{column}", got {value!r:.80}', field=where)
