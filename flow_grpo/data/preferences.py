"""Preference sets: given images of which people, or a rule, preferred one to another.

A set has pairs (a prompt with a preferred and a rejected image) and rated images (a prompt with an
image that was liked or disliked; a demonstration is a liked image). The columns of its files are
read by `preference_rows`. `docs/preferences.md` describes them.
"""

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from flow_grpo.data.preference_rows import (
    TIES,
    Judgement,
    PreferenceLayout,
    PreferenceRow,
    RatedImage,
)
from flow_grpo.data.prompts import Prompt
from flow_grpo.data.rows import Split, read_file
from flow_grpo.errors import UserError
from flow_grpo.images import ImageSource

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
    """Load a preference set without decoding its images.

    Args:
        source: Directory, file or hub name.
        split: "train" or "test".
        layout: Columns to read.

    Raises:
        UserError: If the set is missing or a row is invalid.
    """
    return _combine(read_file(Path(source), layout), str(source))


def _combine(rows: Iterable[PreferenceRow], source: str) -> PreferenceSet:
    """Join the judgements of each pair of images, and leave out ties.

    Raises:
        UserError: If nothing is left.
    """
    rows = list(rows)
    left_out = Counter(reason for row in rows for reason in row.left_out)
    pairs = []
    for judgement in (each for row in rows for each in row.judgements):
        if judgement.probability == 0.5:
            left_out[TIES] += 1
        else:
            pairs.append(_pair(judgement))
    found = PreferenceSet(pairs, [image for row in rows for image in row.images], dict(left_out))
    shown = ", ".join(f"{count} {reason}" for reason, count in found.left_out.items())
    if not found.pairs and not found.images:
        raise UserError(f"has no pair of images to train on: {shown} left out", field=source)
    if shown:
        logger.info("%s: left out %s", source, shown)
    return found


def _pair(judgement: Judgement) -> ComparedImages:
    """Return a judgement that is not a tie with the preferred image first."""
    first, second, probability = judgement.first, judgement.second, judgement.probability
    if probability < 0.5:
        first, second, probability = second, first, 1 - probability
    return ComparedImages(judgement.prompt, first, second, probability)
