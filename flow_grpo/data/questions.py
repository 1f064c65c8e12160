"""Questions with pictures, videos and answers, from files. Every mistake names file and line.

Three layouts are read as they are, row by row: ours (`question`, `images`, `videos`, `answer`),
EasyR1's (the same with `problem`) and LMM-R1's (`message`, a chat as a JSON string, and `answer`;
its `question` repeats the text of the chat). `Keys` names other columns. A column that looks like
an input to the model and that nothing reads is rejected: flow_grpo/data/columns.py.
"""

import logging
import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flow_grpo.config.places import check_made
from flow_grpo.data.columns import (
    BINARY,
    CONVERSATION,
    IMAGE,
    IMAGE_SUFFIXES,
    VIDEO,
    VIDEO_SUFFIXES,
    ColumnRules,
    has_binary,
    is_conversation,
    is_empty,
)
from flow_grpo.data.hub import check_data, download_data
from flow_grpo.data.images import COLUMNS, contents, find_picture, listed, source_column
from flow_grpo.data.mixing import files_named, split_off, warn_of_repeats, warn_of_unread
from flow_grpo.data.rows import (
    NO_IMAGES,
    PREFERENCE,
    Split,
    as_json,
    is_hub_name,
    named_or,
    read_table,
)
from flow_grpo.data.videos import Video, find_videos
from flow_grpo.errors import UserError, with_nearest_file
from flow_grpo.files import parse_json, read_json, read_text, split_lines
from flow_grpo.pictures import Picture

logger = logging.getLogger("flow_grpo")

MARK = "<image>"  # in a text: a picture stands here
VIDEO_MARK = "<video>"  # the same of a video
ENDINGS = (".jsonl", ".json", ".parquet")
MESSAGE = "message"
USERS = {"human": "user"}  # ShareGPT's name of the role
TEXTS = (MESSAGE, "question", "problem")  # of which a row has one
VIDEO_COLUMNS = ("videos", "video")
MAX_QUESTION = 500_000  # characters; about a context of 128k tokens
ANOTHER = ("is named like a question", "use it with --config.input_key={name}")
PART = ("is named like a part of the question", "write it into the question")
ANOTHER_NAMES = """message messages question questions problem prompt prompts query instruction
    instructions conversation conversations dialog dialogue chat history"""
PART_NAMES = """options option choices choice distractors distractor incorrect_answers
    incorrect_answer wrong_answers context passage paragraph article story hint hints input
    tools system system_prompt A B C D E F G H"""
RULES = ColumnRules(
    settings={
        IMAGE: "image_key",
        BINARY: "image_key",
        VIDEO: "video_key",
        CONVERSATION: "input_key",
    },
    reserved={
        **dict.fromkeys(ANOTHER_NAMES.split(), ANOTHER),
        **dict.fromkeys(PART_NAMES.split(), PART),
        **dict.fromkeys(("chosen", "rejected"), PREFERENCE),
        **dict.fromkeys(("video_start", "video_end"), ("cuts a video, which is read whole", "")),
    },
)
# names that a split may have, the first of which is there is read
SPLITS: dict[Split, tuple[str, ...]] = {"train": ("train",), "test": ("test", "validation", "val")}
FETCHED = [f"*{ending}" for ending in (*ENDINGS, *IMAGE_SUFFIXES, *VIDEO_SUFFIXES)]


@dataclass(frozen=True)
class Question:
    text: str
    images: tuple[Picture, ...] = ()  # for each MARK in the text; without marks, all come first
    answer: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)  # handed to the rewards
    where: str = ""  # file and line
    system: str = ""  # told to the model before the question, where the row says so itself
    videos: tuple[Video, ...] = ()  # as images

    @property
    def shown(self) -> tuple[Picture, ...]:
        """All pictures and the files of all videos, or their frames."""
        sources = [video.source for video in self.videos]
        frames = [each for own in sources for each in (own if isinstance(own, tuple) else (own,))]
        return (*self.images, *frames)


@dataclass(frozen=True)
class Keys:
    """Columns of a row, where they are not those of one of the layouts."""

    input: str = ""  # the question, or a chat that ends with it; empty: the first of TEXTS
    answer: str = "answer"  # the truth; empty: there is none
    image: str = ""  # empty: the first of COLUMNS; "none": images are not used
    video: str = ""  # empty: the first of VIDEO_COLUMNS; "none": videos are not used
    metadata: tuple[str, ...] = ()  # metadata for the rewards, whatever their content

    @property
    def inputs(self) -> tuple[str, ...]:
        return named_or(self.input, TEXTS, self.metadata)

    @property
    def images(self) -> tuple[str, ...]:
        return named_or(self.image, COLUMNS, self.metadata)

    @property
    def videos(self) -> tuple[str, ...]:
        return named_or(self.video, VIDEO_COLUMNS, self.metadata)

    @property
    def unread(self) -> dict[str, tuple[str, ...]]:
        """Columns and kinds of content that the user allows to be ignored."""
        images = (IMAGE, BINARY) if self.image == NO_IMAGES else ()
        videos = (VIDEO,) if self.video == NO_IMAGES else ()
        return {"allowed": self.metadata, "ignored": (*images, *videos)}


LAYOUTS = Keys()


def load_questions(
    source: str | Path, seed: int, keys: Keys = LAYOUTS
) -> tuple[list[Question], list[Question]]:
    """(train, test) of a folder with files of each, or of one file, a tenth of which is held out by
    the seed; or of a Hugging Face name, whose files are fetched first."""
    check_made(str(source))
    path = download_data(str(source), FETCHED) if _is_named(source) else Path(source)
    train = find_questions(path, "train", keys)
    if train is None:
        raise UserError(_nothing_to_train(source, path))
    test = find_questions(path, "test", keys)
    if test is None:
        train, test = split_off(train, seed, str(source), "questions", _contents)
    warn_of_repeats(train, test, str(source), "questions", _contents)
    return train, test


def _contents(question: Question) -> tuple[str, ...]:
    return contents(question.text, question.shown)


def check_keys(questions: Iterable[Question], keys: Keys) -> None:
    """Reject an image or video column that is empty in all rows of all data sets."""
    questions = list(questions)
    for setting, key, found in (
        ("image_key", keys.image, any(q.images for q in questions)),
        ("video_key", keys.video, any(q.videos for q in questions)),
    ):
        if key not in ("", NO_IMAGES) and not found:
            raise UserError(
                f"{setting}={key!r}: this column is empty in all {len(questions)} questions; name "
                f'another, or leave the setting empty for "{setting.removesuffix("_key")}s"'
            )


def check_there(source: str) -> None:
    """Refuse a set without questions to train on, before it is read."""
    if _is_named(source):
        check_data(source)
    elif not os.path.isfile(source) and not _files_of(Path(source), "train"):
        raise UserError(_nothing_to_train(source, Path(source)))


def _is_named(source: str | Path) -> bool:
    """As on the hub."""
    return is_hub_name(str(source).partition("@")[0]) and not os.path.exists(source)


def find_questions(path: Path, split: Split, keys: Keys = LAYOUTS) -> list[Question] | None:
    """None where there is no such split: a single file is all for training."""
    if os.path.isfile(path):
        return read_questions(path, keys) if split == "train" else None
    files = _files_of(path, split)
    warn_of_unread(path, split, files)
    return [question for file in files for question in read_questions(file, keys)] or None


def _files_of(path: Path, split: Split) -> list[Path]:
    """Files of the first of the split's names that has any: one, or as the hub has them, several
    parts, data/train-00000-of-00002.parquet, or a folder of parts, data/train/0000.parquet."""
    for name in SPLITS[split]:
        for folder in (path, path / "data"):
            for ending in ENDINGS:
                if os.path.isfile(folder / f"{name}{ending}"):
                    return [folder / f"{name}{ending}"]
                if parts := sorted(folder.glob(f"{name}-*-of-*{ending}")):
                    return _whole(parts)
            if parts := sorted((folder / name).glob("*.parquet")):
                return parts
    return []


def _whole(parts: list[Path]) -> list[Path]:
    """A part that was not downloaded would go unnoticed."""
    total = int(re.search(r"-of-(\d+)", parts[0].name)[1])
    if len(parts) != total:
        raise UserError(
            f"{parts[0].parent} has {len(parts)} of the {total} parts that {parts[0].name} is one "
            "of; download it again"
        )
    return parts


def _nothing_to_train(source: str | Path, path: Path) -> str:
    wanted = " or ".join(f"train{ending}" for ending in ENDINGS)
    message = f"no questions at {source}: it must be a folder with {wanted}, or such a file"
    if not os.path.exists(path):
        return with_nearest_file(message, path)
    there = sorted(file for ending in ENDINGS for file in path.rglob(f"*{ending}"))
    there += files_named(path, "train", there)
    names = ", ".join(str(file.relative_to(path)) for file in there[:4])
    return f"{message}; it has {names}" if there else message


def read_questions(path: Path, keys: Keys = LAYOUTS) -> list[Question]:
    """Pictures are looked for beside the file; `check_pictures` looks at them."""
    if path.suffix not in ENDINGS:
        raise UserError(f"cannot read questions from {path}: it must be {' or '.join(ENDINGS)}")
    try:
        rows = list(_rows(path))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    if not rows:
        raise UserError(f"{path} is empty; it must have one question per row")
    return [to_question(row, path.parent, where, keys) for where, row in rows]


def to_question(row: Any, folder: Path, where: str, keys: Keys = LAYOUTS) -> Question:
    """`folder`: where paths of pictures start."""
    if not isinstance(row, dict):
        raise UserError(f"{where}: needs an object with question and answer, got {str(row)[:80]}")
    name = source_column(row, keys.inputs)
    if name is None:
        wanted = f"{', '.join(TEXTS[:-1])} or {TEXTS[-1]}"
        wanted = f"{keys.input!r} (input_key)" if keys.input else wanted
        raise UserError(f"{where}: has no {wanted}, it has: {', '.join(row)}")
    image_column, video_column = (source_column(row, own) for own in (keys.images, keys.videos))
    videos = row[video_column] if video_column else []
    videos = videos if isinstance(videos, list) else [videos]
    asked = Asked(row[name], listed(row, where, keys.images), videos)
    if name == MESSAGE or is_conversation(row[name]):
        asked = _chat(row[name], asked, where, name)
    if not isinstance(asked.text, str) or not asked.text.strip():
        raise UserError(f'{where}: needs a text in "{name}", got {asked.text!r:.80}')
    for text in (asked.text, asked.system):
        if len(text) > MAX_QUESTION:
            raise UserError(
                f'{where}: "{name}" has {len(text):,} characters, more than the allowed '
                f"{MAX_QUESTION:,}; shorten it or remove the row"
            )
    used = {name, keys.answer, keys.answer.partition(".")[0], image_column, video_column}
    if name == MESSAGE and not keys.input:
        used.add("question")  # LMM-R1's files repeat the text of the chat there
    RULES.check(row, used, where, **keys.unread)
    videos = find_videos(asked.videos, row.get("fps"), folder, where)
    _check_marks(asked.text, MARK, len(asked.images), "pictures", where)
    _check_marks(asked.text, VIDEO_MARK, len(videos), "videos", where)
    answer = _answer(row, keys.answer, where) if keys.answer else ""
    images = tuple(find_picture(each, folder, where) for each in asked.images)
    left_out = {*keys.images, *keys.videos, *([MESSAGE] if name == MESSAGE else [])}
    rest = {k: v for k, v in row.items() if k not in left_out and not has_binary(v)}
    metadata = {**as_json(rest), "question": asked.text, "answer": answer}
    return Question(asked.text, images, answer, metadata, where, asked.system, videos)


def _answer(row: dict[str, Any], key: str, where: str) -> str:
    answer = _value_of(row, key)
    known = isinstance(answer, str | int | float) and not isinstance(answer, bool)
    if isinstance(answer, float) and not math.isfinite(answer):
        known = False
    if not known or not str(answer).strip():
        raise UserError(
            f'{where}: needs a text or a finite number in "{key}", got {answer!r:.80}; name the '
            f"column of the answers with --config.answer_key; it has: {', '.join(row)}"
        )
    return str(answer)


def _value_of(row: dict[str, Any], key: str) -> Any:
    """The value of a column, or of a key within one: verl has "reward_model.ground_truth"."""
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _check_marks(text: str, mark: str, there: int, kind: str, where: str) -> None:
    marks = text.count(mark)
    if marks not in (0, there):
        raise UserError(
            f"{where}: its text has {mark} {marks} times and the row has {there} {kind}; write "
            f"{mark} once for each, or not at all, and all come first"
        )


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Each row with its place."""
    if path.suffix == ".parquet":
        yield from ((f"{path} row {n}", row) for n, row in enumerate(read_table(path), 1))
    elif path.suffix == ".json":
        rows = _read_list(path)
        if not isinstance(rows, list):
            raise UserError(f"{path}: must hold a list of rows, got {type(rows).__name__}")
        yield from ((f"{path} row {n}", row) for n, row in enumerate(rows, 1))
    else:
        for number, line in enumerate(split_lines(read_text(path)), 1):
            if line.strip():
                yield f"{path}:{number}", parse_json(line, f"{path}:{number}")


def _read_list(path: Path) -> Any:
    try:
        return read_json(path)
    except UserError as error:
        first = split_lines(read_text(path).strip())[0]
        if first.startswith("{") and first.endswith("}"):
            raise UserError(f"{error}; JSON lines belong in a .jsonl file: rename it") from error
        raise


@dataclass
class Asked:
    """The input of a row."""

    text: Any
    images: list[Any] = field(default_factory=list)
    videos: list[Any] = field(default_factory=list)
    system: str = ""


def _chat(message: Any, columns: Asked, where: str, name: str) -> Asked:
    """Return the question that the chat in column `name` ends with.

    Its images and videos are those named in its parts, as in LMM-R1's files. If the chat only has
    placeholders ("<image>" in a text, or a part {"type": "image"} without a source, as for verl and
    TRL), they come from the row's columns.
    """
    where = f'{where}: "{name}"'
    chat = parse_json(message, where) if isinstance(message, str) else message
    if not isinstance(chat, list) or not all(isinstance(turn, dict) for turn in chat):
        raise UserError(f"{where} must be a list of turns, or one as a JSON string")
    roles = [turn.get("role", turn.get("from")) for turn in chat]
    if [USERS.get(role, role) for role in roles] not in (["user"], ["system", "user"]):
        raise UserError(
            f"{where} has the roles {', '.join(map(str, roles))}; it must be one question of the "
            "user, after a system prompt or none"
        )
    asked = Asked("")
    for turn, role in zip(chat, roles, strict=True):
        keys = ("role", "content") if "role" in turn else ("from", "value")  # ShareGPT's
        _reject_keys(turn, {*keys}, "turn", where)
        content = turn.get(keys[1])
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
        if not isinstance(parts, list):
            raise UserError(f"{where} must have a text or a list of parts in each turn")
        asked.text = "".join(_part(part, asked, where) for part in parts)
        if role == "system":
            asked.system = asked.text
            if asked.images or asked.videos or MARK in asked.text or VIDEO_MARK in asked.text:
                raise UserError(
                    f"{where} has an image or a video in its system turn; move it to the turn of "
                    "the user"
                )
    for kind, own, given in (
        ("images", asked.images, columns.images),
        ("videos", asked.videos, columns.videos),
    ):
        if own and given:
            raise UserError(f"{where} has {kind}, and a column has others; remove one of them")
    asked.images = asked.images or columns.images
    asked.videos = asked.videos or columns.videos
    return asked


def _part(part: Any, asked: Asked, where: str) -> str:
    """The text of a part; an image or a video is added to `asked` and leaves a mark."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        _reject_keys(part, {"type", "text"}, "part", where)
        return part["text"]
    if kind not in ("image", "image_url", "video"):
        raise UserError(f"{where} has a part that is no text, image or video: {part!r:.80}")
    _reject_keys(part, {"type", kind}, "part", where)
    source = part.get(kind)
    if kind == "image_url" and isinstance(source, dict):
        _reject_keys(source, {"url"}, "part", where)
        source = source.get("url")
    if source is not None:
        (asked.videos if kind == "video" else asked.images).append(source)
    return VIDEO_MARK if kind == "video" else MARK


def _reject_keys(given: dict[str, Any], known: set[str], what: str, where: str) -> None:
    """Reject unknown keys with a value; parquet files fill keys of other parts with None."""
    for key, value in given.items():
        if key not in known and not is_empty(value):
            raise UserError(
                f'{where} has a {what} with the key "{key}", which nothing reads; remove it'
            )
