"""Validate what clients of the vote server send."""

import re
import reprlib
import unicodedata
from typing import Any

from flow_grpo.errors import UserError
from flow_grpo.votes.ballots import CHOICES, Ballot, Group, Vote, pairs_within_groups, stable_id
from flow_grpo.votes.image_files import ImageFiles, decode_posted

MAX_NAME = 40  # characters of a voter's name
MAX_PROMPT = 10_000  # characters
MAX_IMAGES = 1024  # per group
MAX_VOTES = 100  # per pair
ID = re.compile(r"[A-Za-z0-9._:-]{1,200}")


class Rejected(Exception):
    """A request that is answered with an error, {"error": {"code": ..., "message": ...}}."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


def check_voter(value: Any, field: str = "voter") -> str:
    """Return a name in normal form (NFC, single blanks)."""
    if not isinstance(value, str):
        raise _invalid(field, "must be text", value)
    name = unicodedata.normalize("NFC", " ".join(value.split()))
    if not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise _invalid(field, f"must have 1 to {MAX_NAME} printable characters", value)
    return name


def check_id(value: Any, field: str) -> str:
    """Return an id that a client has sent, if it is valid; raise `Rejected` otherwise."""
    if not isinstance(value, str) or not ID.fullmatch(value):
        raise _invalid(field, "must be 1 to 200 letters, digits or any of . _ : -", value)
    return value


def parse_vote(body: dict[str, Any]) -> Vote:
    """Return the vote of POST /api/vote."""
    _check_fields(body, {"id", "ballot", "voter", "choice"})
    if body.get("choice") not in CHOICES:
        raise _invalid("choice", f"must be one of {', '.join(CHOICES)}", body.get("choice"))
    ids = (check_id(body.get(name), name) for name in ("id", "ballot"))
    return Vote(*ids, check_voter(body.get("voter")), body["choice"])


def parse_undo(body: dict[str, Any]) -> tuple[str, str | None]:
    """Return the voter and the id of the vote of POST /api/undo; None: the last vote."""
    _check_fields(body, {"voter", "vote"})
    vote = body.get("vote")
    return check_voter(body.get("voter")), None if vote is None else check_id(vote, "vote")


def parse_group(body: dict[str, Any], images: ImageFiles) -> Group:
    """Return the group of POST /api/groups, after writing its images to disk.

    All headers are checked before the first image is decoded.
    """
    names = {"run", "key", "prompts", "images", "sources", "votes_per_pair", "pairs_per_image"}
    _check_fields(body, names)
    key, run = check_id(body.get("key"), "key"), check_voter(body.get("run"), "run")
    prompts = _check_list(body.get("prompts"), "prompts")
    for i, prompt in enumerate(prompts):
        if not isinstance(prompt, str) or len(prompt) > MAX_PROMPT:
            raise _invalid(f"prompts[{i}]", f"must be text of up to {MAX_PROMPT} characters")
    posted = _check_list(body.get("images"), "images")
    sources = _check_list(body.get("sources") or [None] * len(posted), "sources")
    if not len(prompts) == len(posted) == len(sources):
        lengths = f"{len(prompts)} prompts, {len(posted)} images and {len(sources)} sources"
        raise Rejected(422, "counts_differ", f"there are {lengths}")
    votes = _check_count(body.get("votes_per_pair", 1), "votes_per_pair", MAX_VOTES)
    opponents = _check_count(body.get("pairs_per_image", 1), "pairs_per_image", MAX_IMAGES)
    try:
        decode = [decode_posted(text, f"images[{i}]") for i, text in enumerate(posted)]
        lists = [each if isinstance(each, list) else [each] * bool(each) for each in sources]
        decode_sources = [
            [decode_posted(text, f"sources[{i}]") for text in each] for i, each in enumerate(lists)
        ]
        files = [images.add(each()) for each in decode]
        source_files = [tuple(images.add(each()) for each in row) for row in decode_sources]
    except UserError as error:
        raise Rejected(422, "broken_image", str(error)) from error
    ballots, pairs = [], []
    questions = list(zip(prompts, source_files, strict=True))
    for i, j in pairs_within_groups(questions, opponents):
        ballot = Ballot(
            stable_id("group", key, i, j),
            prompts[i],
            (files[i], files[j]),
            source=run,
            sources=source_files[i],
            votes=votes,
        )
        ballots.append(ballot)
        pairs.append((i, j, ballot.id))
    digest = stable_id(run, prompts, files, source_files, votes, opponents)
    return Group(key, run, digest, tuple(pairs), tuple(ballots))


def _check_fields(body: Any, known: set[str]) -> None:
    """Reject a body that is not an object, and unknown fields."""
    if not isinstance(body, dict):
        raise _invalid("the body", "must be a JSON object")
    if unknown := sorted({*body} - known):
        raise _invalid(unknown[0], f"is unknown; known are {', '.join(sorted(known))}")


def _check_list(value: Any, field: str) -> list[Any]:
    if not isinstance(value, list) or not 0 < len(value) <= MAX_IMAGES:
        raise _invalid(field, f"must be a list of 1 to {MAX_IMAGES}")
    return value


def _check_count(value: Any, field: str, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise _invalid(field, f"must be an integer from 1 to {most}", value)
    return value


def _invalid(field: str, rule: str, *value: Any) -> Rejected:
    """Return the error for a field; its value, if given, is shown in short."""
    shown = f", not {reprlib.repr(value[0])}" if value else ""
    return Rejected(422, "invalid_request", f"{field:.80} {rule}{shown}")
