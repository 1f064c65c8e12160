"""Ballots (one question about two images), votes on them, and ballots within posted groups."""

import hashlib
import itertools
import json
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Choice = Literal["first", "second", "tie", "skip"]
CHOICES: tuple[Choice, ...] = ("first", "second", "tie", "skip")
CHECKPOINTS = "checkpoints"  # the source of ballots that this server's own models generated


@dataclass(frozen=True)
class Ballot:
    """A question to voters: which of two images of a prompt is better?

    Images are file names relative to the directory of the votes. Voters never see `candidates`.
    """

    id: str
    prompt: str
    images: tuple[str, str]  # first, second
    source: str  # CHECKPOINTS or the name of the run that waits for the answer
    candidates: tuple[str, str] = ("", "")
    sources: tuple[str, ...] = ()  # source images of an edit
    margin: float | None = None  # |difference of the rewards| of the two images
    votes: int = 1  # wanted

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Ballot":
        """Return the ballot that `to_json` has written."""
        lists = {"images", "candidates", "sources"}
        return cls(**{k: tuple(v) if k in lists else v for k, v in content.items()})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def is_identical(self) -> bool:
        """Whether both images have the same pixels: a tie that nobody has to judge."""
        return self.images[0] == self.images[1]

    def shown_order(self, voter: str) -> tuple[int, int]:
        """Return the indices of the left and the right image for a voter: random but repeatable."""
        return (1, 0) if int(stable_id("side", self.id, voter), 16) % 2 else (0, 1)


@dataclass(frozen=True)
class Vote:
    """A voter's answer to a ballot, with an id that the page has generated."""

    id: str
    ballot: str
    voter: str
    choice: Choice

    def to_json(self, ballot: Ballot, time: str) -> dict[str, Any]:
        """Return the line of votes.jsonl; paths are relative to it."""
        left, right = (ballot.images[i] for i in ballot.shown_order(self.voter))
        line = {"id": self.id, "ballot": ballot.id, "prompt": ballot.prompt}
        if self.choice in ("first", "second"):
            chosen = int(self.choice == "second")
            line |= {"chosen": ballot.images[chosen], "rejected": ballot.images[1 - chosen]}
        if ballot.sources:
            line["source_image"] = list(ballot.sources)
        line |= {"voter": self.voter, "time": time, "choice": self.choice}
        return line | {"left": left, "right": right}

    @classmethod
    def from_json(cls, line: dict[str, Any]) -> "Vote":
        return cls(*(line[name] for name in ("id", "ballot", "voter", "choice")))


@dataclass(frozen=True)
class Group:
    """Images that a run has posted, and whose votes it waits for.

    Attributes:
        pairs: (index of the first image, of the second, id of the ballot).
        digest: Hash of the request, so that a repeated one is recognised.
    """

    key: str
    run: str
    digest: str
    pairs: tuple[tuple[int, int, str], ...]
    ballots: tuple[Ballot, ...] = field(repr=False)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Group":
        pairs = tuple((i, j, ballot) for i, j, ballot in content["pairs"])
        ballots = tuple(map(Ballot.from_json, content["ballots"]))
        return cls(content["key"], content["run"], content["digest"], pairs, ballots)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def stable_id(*parts: Any) -> str:
    """Return a hexadecimal hash of JSON values, the same on every machine."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def pairs_within_groups(groups: Sequence[Hashable], pairs_per_image: int) -> list[tuple[int, int]]:
    """Return index pairs of images of the same group, in which each image occurs equally often.

    The n images of a group form a ring, and each is compared with those at distance 1, 2, ...
    Each image gets `pairs_per_image` pairs, or one more if that number and n are both odd; from
    n - 1 on, all pairs are compared.

    Args:
        groups: Group of each image, such as its prompt.
        pairs_per_image: Wanted pairs per image.
    """
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    return [
        (images[i], images[j])
        for images in members.values()
        for i, j in ring_pairs(len(images), pairs_per_image)
    ]


def ring_pairs(count: int, per_image: int) -> list[tuple[int, int]]:
    """Return the pairs (i, j), i < j, of a ring of `count` images; see `pairs_within_groups`."""
    if per_image >= count - 1:
        return list(itertools.combinations(range(count), 2))
    pairs: set[tuple[int, int]] = set()
    for distance in range(1, (per_image + 1) // 2 + 1):
        last = distance == (per_image + 1) // 2 and per_image % 2 == 1
        if last and count % 2 == 0:  # the opposite image: one more pair each, not two
            pairs |= {(i, i + count // 2) for i in range(count // 2)}
        else:
            pairs |= {tuple(sorted((i, (i + distance) % count))) for i in range(count)}
    return sorted(pairs)
