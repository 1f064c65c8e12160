"""Preference sets: images that people, or a rule, have compared or rated.

A set has pairs (a prompt with a preferred and a rejected image) and rated images (a prompt with an
image that was liked or disliked; a demonstration is a liked image). `preference_rows` reads the
columns of its files, and `preference_checks` decodes the images; see docs/preferences.md.
"""

import logging
import os
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from flow_grpo.config.paths import check_dataset_available
from flow_grpo.data.captioned_images import load_captioned_images
from flow_grpo.data.columns import IMAGE, IMAGE_SUFFIXES
from flow_grpo.data.columns import SUFFIXES as SUFFIXES_OF
from flow_grpo.data.hub import check_hub_dataset, download_dataset, is_hub_name
from flow_grpo.data.images import row_identity
from flow_grpo.data.preference_rows import (
    CHOSEN,
    IDENTICAL,
    REJECTED,
    Judgement,
    PreferenceLayout,
    PreferenceRow,
    RatedImage,
)
from flow_grpo.data.preference_votes import TIES, count_votes
from flow_grpo.data.prompts import Prompt
from flow_grpo.data.rows import Split, join_with_or, missing_split_error, read_file
from flow_grpo.data.split_files import split_files
from flow_grpo.errors import UserError
from flow_grpo.images import ImageSource

FIELD = "preferences.data"  # the setting
SUFFIXES = PreferenceLayout.suffixes
DOWNLOAD_PATTERNS = [f"*{ending}" for ending in (*SUFFIXES, *IMAGE_SUFFIXES)]
VOTES = "votes.jsonl"
DEFAULT_LAYOUT = PreferenceLayout()
logger = logging.getLogger("flow_grpo")


@dataclass(frozen=True)
class ComparedImages:
    """A prompt with a preferred and a rejected image.

    Args:
        prompt: Text, source images of an editing model, and position in the data.
        chosen: The preferred image: a file or its content.
        rejected: The other one.
        probability: Probability that `chosen` is preferred, above 0.5.
    """

    prompt: Prompt
    chosen: ImageSource
    rejected: ImageSource
    probability: float = 1.0


@dataclass(frozen=True)
class PreferenceSet:
    """Pairs and rated images of a preference set, in the order of its rows.

    Args:
        pairs: Compared images.
        images: Images that were rated by themselves, such as demonstrations.
        left_out: Number of judgements that are not used, by reason ("ties").
    """

    pairs: list[ComparedImages]
    images: list[RatedImage]
    left_out: dict[str, int] = field(default_factory=dict)

    def rated(self) -> list[RatedImage]:
        """Return the pairs as one liked and one disliked image each, and the rated images."""
        split = [
            RatedImage(pair.prompt, image, liked)
            for pair in self.pairs
            for image, liked in ((pair.chosen, True), (pair.rejected, False))
        ]
        return split + self.images

    def demonstrations(self) -> list[RatedImage]:
        """Return the images to imitate: those preferred in pairs, and the liked ones."""
        return [image for image in self.rated() if image.liked]


def load_preferences(
    source: str | Path, split: Split = "train", layout: PreferenceLayout = DEFAULT_LAYOUT
) -> PreferenceSet:
    """Load a split of a preference set without decoding its images.

    Args:
        source: Directory, file, or hub name with an optional @revision.
        split: "train" or "test".
        layout: Columns to read.

    Raises:
        UserError: If the split is missing or a row is invalid.
    """
    found = find_preferences(source, split, layout)
    if found is None:
        raise _missing_error(source, split)
    return found


def find_preferences(
    source: str | Path, split: Split = "train", layout: PreferenceLayout = DEFAULT_LAYOUT
) -> PreferenceSet | None:
    """Load a split like `load_preferences`, or return None if it is missing, as "test" may be."""
    check_dataset_available(str(source), FIELD)
    path = Path(source)
    if is_hub_name(str(source).partition("@")[0]):
        path = download_dataset(str(source), DOWNLOAD_PATTERNS, FIELD)
    if files := _split_files(path, split):
        rows = [
            row for file in files for row in read_file(file, replace(layout, subfolder=file.stem))
        ]
        return _combine(rows, str(source))
    if split == "train" and os.path.isdir(path) and not _tables(path):
        return _combine(_load_image_folders(path), str(source))
    return None


def check_preferences_exist(source: str) -> None:
    """Reject a preference set that does not exist, without reading it."""
    check_dataset_available(source, FIELD)
    if is_hub_name(source.partition("@")[0]):
        check_hub_dataset(source, FIELD)
    elif not os.path.isfile(source) and not os.path.isdir(source):
        raise _missing_error(source, "train")


def _split_files(path: Path, split: Split) -> list[Path]:
    """Return the tables of a split; a single file and the votes of a folder are training data."""
    if os.path.isfile(path):
        return [path] if split == "train" else []
    if files := split_files(path, split, SUFFIXES):
        return files
    votes = path / VOTES
    return [votes] if split == "train" and os.path.isfile(votes) else []


def _tables(folder: Path) -> list[Path]:
    return sorted(each for each in folder.iterdir() if each.suffix in SUFFIXES)


def _load_image_folders(folder: Path) -> list[PreferenceRow]:
    """Return the pairs of `chosen` and `rejected` subfolders, or the captioned images of a folder.

    Both images of a pair have the same name; the caption is next to the chosen one.
    """
    if not os.path.isdir(folder / CHOSEN):
        images = load_captioned_images(folder, FIELD)
        return [PreferenceRow(images=[_demonstration(image)]) for image in images]
    rejected: dict[str, list[Path]] = defaultdict(list)
    for file in sorted((folder / REJECTED).glob("*")):
        if file.suffix.lower() in SUFFIXES_OF[IMAGE]:
            rejected[file.stem].append(file)
    rows = []
    for image in map(_demonstration, load_captioned_images(folder / CHOSEN, FIELD)):
        others = rejected.pop(image.image.stem, [])
        if len(others) != 1:
            names = ", ".join(each.name for each in others) or "none"
            raise UserError(
                f"needs one image of the same name in {folder / REJECTED}, found {names}",
                field=image.image,
            )
        rows.append(PreferenceRow([Judgement(image.prompt, image.image, others[0], 1.0)]))
    if rejected:
        raise UserError(
            f"needs an image of the same name in {folder / CHOSEN}",
            field=next(iter(rejected.values()))[0],
        )
    return rows


def _demonstration(captioned: Prompt) -> RatedImage:
    [image] = captioned.images
    return RatedImage(replace(captioned, images=()), image, liked=True)


def _missing_error(source: str | Path, split: Split) -> UserError:
    path = Path(source)
    found = [each.name for each in _tables(path)] if os.path.isdir(path) else []
    names = join_with_or(f"{split}{ending}" for ending in SUFFIXES)
    hint = f"pass a directory with {names} or with images and captions, or such a file"
    return missing_split_error(
        source, path, split, "preferences", found=found, hint=hint, field=FIELD
    )


def _combine(rows: Iterable[PreferenceRow], source: str) -> PreferenceSet:
    """Merge the judgements of each pair of images, count the votes, and leave out ties.

    Raises:
        UserError: If rows contradict each other, or nothing is left.
    """
    rows = list(rows)
    left_out = Counter(reason for row in rows for reason in row.left_out)
    ballots, left_out_votes = count_votes(row.vote for row in rows if row.vote)
    left_out += left_out_votes
    given = [judgement for row in rows for judgement in row.judgements]
    for ballot in ballots:
        if ballot.first == ballot.second:
            left_out[IDENTICAL] += 1
        else:
            images = (ballot.first, ballot.second)
            given.append(Judgement(ballot.prompt, *images, ballot.share, judged=True))
    pairs = []
    for judgement in _join_judgements(given):
        if judgement.probability == 0.5:
            left_out[TIES] += 1
        else:
            pairs.append(_order_images(judgement))
    found = PreferenceSet(pairs, [image for row in rows for image in row.images], dict(left_out))
    shown = ", ".join(f"{count} {reason}" for reason, count in found.left_out.items())
    if not found.pairs and not found.images:
        rule = "contains no pairs and no rated images"
        raise UserError(f"{rule}: {shown} left out" if shown else rule, field=source)
    if shown:
        logger.info("%s: left out %s", source, shown)
    return found


def _join_judgements(given: list[Judgement]) -> list[Judgement]:
    """Return the given pairs, and one judgement with the mean probability per judged pair.

    Raises:
        UserError: If a given pair contradicts another row.
    """
    by_pair: dict[tuple, list[Judgement]] = defaultdict(list)
    for judgement in given:
        by_pair[_pair_identity(judgement)].append(judgement)
    joined = []
    for same in by_pair.values():
        first = same[0]
        probabilities = [_turned(each, first) for each in same]
        if all(each.judged for each in same):
            joined.append(replace(first, probability=sum(probabilities) / len(same)))
            continue
        for each, probability in zip(same, probabilities, strict=True):
            if (probability - 0.5) * (probabilities[0] - 0.5) < 0:
                raise UserError(
                    f"prefers the image that {first.prompt.where} rejects",
                    field=each.prompt.where,
                    hint="remove one of the rows, or write one row with a probability",
                )
        joined += same
    return joined


def _pair_identity(judgement: Judgement) -> tuple:
    """Return a key that judgements share if prompt and images are the same, in any order."""
    images = (row_identity("", (each,)) for each in (judgement.first, judgement.second))
    return judgement.prompt.identity, frozenset(images)


def _turned(judgement: Judgement, like: Judgement) -> float:
    """Return the probability that the first image of `like`, the same pair, is preferred."""
    return judgement.probability if judgement.first == like.first else 1 - judgement.probability


def _order_images(judgement: Judgement) -> ComparedImages:
    """Return a judgement that is not a tie with the preferred image first."""
    first, second, probability = judgement.first, judgement.second, judgement.probability
    if probability < 0.5:
        first, second, probability = second, first, 1 - probability
    return ComparedImages(judgement.prompt, first, second, probability)
