"""Row layouts of preference sets.

The columns of a row tell its layout:

- `chosen`, `rejected`: a pair; several rejected images are several pairs; `probability` that the
  preference holds, if it is uncertain;
- `jpg_0`, `jpg_1`, `label_0`: Pick-a-Pic, with `label_0` 1, 0 or 0.5 for a tie;
- `path1`, `path2`: HPDv3, whose first image is the preferred one;
- a list of images and their `rank` (HPDv2, ImageReward; the lowest is the best) or
  `human_preference` (HPDv2; 1 for the preferred image): all pairs that differ in it;
- `ballot`, `choice` and so on: votes, `preference_votes`;
- `image`, and `label` or `liked` (0 or 1): an image that was rated by itself;
- `image` alone: a demonstration.

The prompt is in `prompt` or `caption`. Source images of an editing model are in `source_image` or
`source_images`; in rows whose `image` or `images` is not one of the above, also there. Every other
column is read as in a prompt set: negative prompt, mask and metadata.

The third-party layouts follow the code of their authors, or of a trainer that reads them:

- Pick-a-Pic: SalesforceAIResearch/DiffusionDPO, train.py:782-786 and 857-860 (swapped if `label_0`
  is 0; a label other than 0 and 1 is a tie), commit 5233e75;
- HPDv2: tgxs002/HPSv2, README.md:258-280 for the columns, hpsv2/evaluation.py:98-104 for the order
  of `rank`, commit 866735e;
- HPDv3: opendilab/LightRFT, lightrft/datasets/hpdv3.py, `get_media_info` (`path1` is preferred).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar

from flow_grpo.data.columns import ColumnRules, is_empty, parse_json_or_none
from flow_grpo.data.images import IMAGE_COLUMNS, find_image, first_nonempty_column, listed_images
from flow_grpo.data.preference_votes import (
    BALLOT,
    CHOICE,
    UNDO,
    Undo,
    Vote,
    parse_undo,
    parse_vote,
)
from flow_grpo.data.prompts import MASK_COLUMN, Prompt, PromptLayout
from flow_grpo.data.rows import Row, RowLayout, join_with_or
from flow_grpo.errors import UserError
from flow_grpo.images import ImageSource

PROMPT_COLUMNS = ("prompt", "caption")
SOURCE_COLUMNS = ("source_images", "source_image")
CHOSEN, REJECTED, PROBABILITY = "chosen", "rejected", "probability"
FIRST, SECOND, LABEL = "jpg_0", "jpg_1", "label_0"  # Pick-a-Pic
BETTER, WORSE = "path1", "path2"  # HPDv3
RANKED_IMAGES = ("file_path", "image_path", "generations", *IMAGE_COLUMNS)
PREFERENCE_IMAGES = (
    *(CHOSEN, REJECTED, FIRST, SECOND, BETTER, WORSE, MASK_COLUMN),
    *(*RANKED_IMAGES, *SOURCE_COLUMNS),
)
RANKS = {"human_preference": -1, "rank": 1, "ranking": 1}  # 1: the lowest is the best
RATINGS = ("liked", "label")
UNLABELLED, IDENTICAL = "unlabelled", "identical"  # why a row is left out
# Columns of Pick-a-Pic that describe the images and their labels (dataset card of
# yuvalkirstain/pickapic_v2); the images themselves are in jpg_0 and jpg_1.
PICK_A_PIC_DETAILS = (
    *(f"image_{i}_{what}" for i in (0, 1) for what in ("uid", "url")),
    *("label_1", "best_image_uid", "are_different", "has_label"),
)
# Columns that say how good an image is, in rows whose layout does not read them: an image that
# somebody disliked would be imitated.
JUDGEMENTS = (
    *("like", "likes", "is_liked", "dislike", "dislikes", "disliked", "is_disliked", "labels"),
    *("rating", "ratings", "vote", "votes", "preference", "preferences", "winner", "weight"),
    *(*RATINGS, *RANKS, LABEL, PROBABILITY),
)
READ_COLUMNS = (
    f'write "liked" for one image, "{PROBABILITY}" for "{CHOSEN}" and "{REJECTED}", or "ranking"'
)
# columns of which a row needs all, by layout
REQUIRED_COLUMNS = ({CHOSEN, REJECTED}, {FIRST, SECOND, LABEL}, {BETTER, WORSE})


@dataclass(frozen=True)
class RatedImage:
    """A prompt with an image that was liked or disliked; a demonstration counts as liked."""

    prompt: Prompt
    image: ImageSource
    liked: bool


@dataclass(frozen=True)
class Judgement:
    """Two images of a prompt, and the probability that the first one is preferred.

    Judgements of people (`judged`) may contradict each other; a pair that is given as chosen and
    rejected may not.
    """

    prompt: Prompt
    first: ImageSource
    second: ImageSource
    probability: float
    judged: bool = False


@dataclass(frozen=True)
class PreferenceRow:
    """Content of a row: judgements, rated images or a vote, or why it is left out."""

    judgements: list[Judgement] = field(default_factory=list)
    images: list[RatedImage] = field(default_factory=list)
    vote: Vote | Undo | None = None
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
        }
        | dict.fromkeys(JUDGEMENTS, ("is named like a judgement of the images", READ_COLUMNS)),
    )


@dataclass(frozen=True)
class PreferenceLayout(RowLayout[PreferenceRow]):
    """Row layout of preference sets; see the module docstring.

    Args:
        subfolder: Folder next to the file in which HPDv2 keeps the images of its split.
    """

    noun: ClassVar[str] = "pair of images"
    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".json", ".csv", ".parquet")
    rules: ClassVar[ColumnRules] = _PromptPart.rules

    subfolder: str = ""

    @property
    def required(self) -> str:
        return f'"{PROMPT_COLUMNS[0]}", "{CHOSEN}" and "{REJECTED}"'

    @property
    def text_columns(self) -> tuple[str, ...]:
        return PROMPT_COLUMNS

    def check_columns(self, names: Collection[str], where: str) -> None:
        """Reject a table or a JSON object without a prompt or without images."""
        if _is_vote(names):
            return
        if not {*PROMPT_COLUMNS} & {*names}:
            only = f", only {', '.join(names)}" if names else ""
            raise UserError(
                f'has no column "{PROMPT_COLUMNS[0]}"{only}',
                field=where,
                hint=f'name the column of the prompts "{PROMPT_COLUMNS[0]}"',
            )
        for required in REQUIRED_COLUMNS:
            missing, found = sorted(required - {*names}), sorted(required & {*names})
            if found and not missing:
                return
            if found:
                present = " and ".join(f'"{name}"' for name in found)
                raise UserError(f'has {present} but no column "{missing[0]}"', field=where)
        if {*RANKED_IMAGES}.isdisjoint(names):
            raise UserError(
                f"has no images to compare, only {', '.join(names)}",
                field=where,
                hint=f'put their paths in "{CHOSEN}" and "{REJECTED}", or one in "image"',
            )

    def parse(self, row: Row | str, folder: Path, where: str) -> PreferenceRow:
        """Convert a row; see `RowLayout.parse`."""
        assert isinstance(row, dict)  # text files are not read
        present = {name for name, value in row.items() if not is_empty(value)}
        if _is_vote(present):
            return self._parse_vote(row, folder, where)
        if {CHOSEN, REJECTED} & present:
            return self._parse_pair(row, folder, where)
        if {FIRST, SECOND} & present:
            return self._parse_pick_a_pic(row, folder, where)
        if {BETTER, WORSE} & present:
            return self._parse_hpdv3(row, folder, where)
        if {*RANKS} & present - {*self.metadata}:
            return self._parse_ranking(row, folder, where)
        return self._parse_rated(row, folder, where)

    def _parse_pair(self, row: Row, folder: Path, where: str) -> PreferenceRow:
        """Convert a row with one chosen and one or more rejected images."""
        prompt = self._prompt(row, folder, where, used=(CHOSEN, REJECTED, PROBABILITY))
        chosen = self._image(row, CHOSEN, folder, where)
        rejected = self._images(row, REJECTED, folder, where)
        if chosen in rejected:
            raise UserError("has the same image as chosen and rejected", field=where)
        probability = 1.0
        if not is_empty(row.get(PROBABILITY)):
            probability = read_fraction(row[PROBABILITY], PROBABILITY, where)
        return PreferenceRow([Judgement(prompt, chosen, each, probability) for each in rejected])

    def _parse_pick_a_pic(self, row: Row, folder: Path, where: str) -> PreferenceRow:
        """Convert a row of Pick-a-Pic."""
        prompt = self._prompt(row, folder, where, used=(FIRST, SECOND, LABEL, *PICK_A_PIC_DETAILS))
        if is_empty(row.get(LABEL)) or str(row.get("has_label")).lower() == "false":
            return PreferenceRow(left_out=(UNLABELLED,))
        probability = read_fraction(row[LABEL], LABEL, where)
        images = [self._image(row, name, folder, where) for name in (FIRST, SECOND)]
        return _judged(prompt, *images, probability)

    def _parse_hpdv3(self, row: Row, folder: Path, where: str) -> PreferenceRow:
        """Convert a row of HPDv3; its first image is the preferred one."""
        prompt = self._prompt(row, folder, where, used=(BETTER, WORSE))
        images = [self._image(row, name, folder, where) for name in (BETTER, WORSE)]
        return _judged(prompt, *images, 1.0)

    def _parse_ranking(self, row: Row, folder: Path, where: str) -> PreferenceRow:
        """Convert a row with ranked images to all pairs of them."""
        column = first_nonempty_column(row, [each for each in RANKS if each not in self.metadata])
        listed = first_nonempty_column(row, RANKED_IMAGES) or RANKED_IMAGES[-1]
        prompt = self._prompt(row, folder, where, used=(*RANKS, *RANKED_IMAGES))
        images = self._images(row, listed, folder, where)
        ranks = row[column]
        if isinstance(ranks, str):  # a list in CSV
            ranks = parse_json_or_none(ranks)
        valid = isinstance(ranks, list) and all(
            isinstance(rank, int | float) and rank == rank for rank in ranks
        )
        if not valid or len(ranks) != len(images) or len(images) < 2:
            raise UserError(
                f'needs one number for each of at least two images in column "{column}", got '
                f"{row[column]!r:.80} for {len(images)}",
                field=where,
            )
        rows = [
            _judged(prompt, a, b, (1 + sign(RANKS[column] * (rank_b - rank_a))) / 2)
            for (a, rank_a), (b, rank_b) in combinations(zip(images, ranks, strict=True), 2)
        ]
        return PreferenceRow(
            [judgement for each in rows for judgement in each.judgements],
            left_out=tuple(reason for each in rows for reason in each.left_out),
        )

    def _parse_vote(self, row: Row, folder: Path, where: str) -> PreferenceRow:
        """Convert a line of votes.jsonl."""
        if UNDO in row:
            return PreferenceRow(vote=parse_undo(row, where))
        inputs = {*PROMPT_COLUMNS, *SOURCE_COLUMNS, *IMAGE_COLUMNS} & {*row}
        prompt = self._prompt({name: row[name] for name in inputs}, folder, where, used=())
        decided = [
            self._image(row, name, folder, where) if not is_empty(row.get(name)) else None
            for name in (CHOSEN, REJECTED)
        ]
        return PreferenceRow(vote=parse_vote(row, prompt, *decided, where))

    def _parse_rated(self, row: Row, folder: Path, where: str) -> PreferenceRow:
        """Convert a row with one image; without a rating, it is a demonstration."""
        name = first_nonempty_column(row, IMAGE_COLUMNS) or IMAGE_COLUMNS[-1]
        ratings = [each for each in RATINGS if each not in self.metadata]
        prompt = self._prompt(row, folder, where, used=(*IMAGE_COLUMNS, *ratings))
        image = self._image(row, name, folder, where)
        rated = {column: row[column] for column in ratings if column in row}
        if empty := [column for column, value in rated.items() if is_empty(value)]:
            raise UserError(
                f'has no value in column "{empty[0]}"',
                field=where,
                hint="write 0 or 1, or put demonstrations into a file without this column",
            )
        if len({read_rating(value, column, where) for column, value in rated.items()}) > 1:
            raise UserError("is both liked and disliked", field=where, hint="remove one column")
        liked = all(read_rating(value, column, where) for column, value in rated.items())
        return PreferenceRow(images=[RatedImage(prompt, image, liked)])

    def _image(self, row: Row, column: str, folder: Path, where: str) -> ImageSource:
        """Return the only image of a column."""
        images = self._images(row, column, folder, where)
        if len(images) > 1:
            raise UserError(f'needs one image in column "{column}", got {len(images)}', field=where)
        return images[0]

    def _images(self, row: Row, column: str, folder: Path, where: str) -> list[ImageSource]:
        """Return the images of a column, of which there is at least one."""
        given = [] if is_empty(row.get(column)) else listed_images(row, where, (column,))
        if not given:
            raise UserError(f'needs an image in column "{column}"', field=where)
        return [self._find(each, column, folder, where) for each in given]

    def _find(self, given: Any, column: str, folder: Path, where: str) -> ImageSource:
        """Resolve an image; HPDv2 names those of train.json relative to the folder train."""
        if isinstance(given, str) and self.subfolder and column in RANKED_IMAGES:
            path = folder / self.subfolder / given
            if not (folder / given).exists() and path.is_file():
                return path
        return find_image(given, folder, where, f"{column} image")

    def _prompt(
        self, row: Mapping[str, Any], folder: Path, where: str, *, used: Collection[str]
    ) -> Prompt:
        """Return the prompt of a row: its text, source images and remaining columns.

        Args:
            row: Values by column.
            folder: Directory that relative paths start from.
            where: File and row, the `field` of errors.
            used: Columns that do not belong to the prompt.
        """
        rest = {name: value for name, value in row.items() if name not in used}
        text = first_nonempty_column(rest, PROMPT_COLUMNS)
        if text is None:
            names = join_with_or(f'"{name}"' for name in PROMPT_COLUMNS)
            raise UserError(f"needs text in column {names}", field=where)
        prompt = rest.pop(text)
        source = first_nonempty_column(rest, (*SOURCE_COLUMNS, *IMAGE_COLUMNS))
        images = {"images": rest.pop(source)} if source else {}
        layout = _PromptPart(metadata=self.metadata, image="images")
        return layout.parse({**rest, **images, "prompt": prompt}, folder, where)


def _is_vote(names: Collection[str]) -> bool:
    """Return whether a row is a line of votes.jsonl."""
    return UNDO in names or {BALLOT, CHOICE} <= {*names}


def _judged(
    prompt: Prompt, first: ImageSource, second: ImageSource, probability: float
) -> PreferenceRow:
    """Return a human judgement, or leave the row out if both images are the same."""
    if first == second:
        return PreferenceRow(left_out=(IDENTICAL,))
    return PreferenceRow([Judgement(prompt, first, second, probability, judged=True)])


def sign(number: float) -> int:
    """Return 1, 0 or -1."""
    return (number > 0) - (number < 0)


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
