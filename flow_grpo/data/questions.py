"""Questions with pictures, videos and answers, from files. Every mistake names file and line.

Three layouts are read as they are, row by row: ours (`question`, `images`, `videos`, `answer`),
EasyR1's (the same with `problem`) and LMM-R1's (`message`, a chat as a JSON string, and `answer`).
"""

import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flow_grpo.config.places import check_made
from flow_grpo.data.hub import check_data, download_data
from flow_grpo.data.images import COLUMNS, contents, find_picture, listed
from flow_grpo.data.mixing import split_off
from flow_grpo.data.rows import Split, as_json, is_hub_name, read_table
from flow_grpo.data.videos import Video, find_videos
from flow_grpo.errors import UserError, with_nearest_file
from flow_grpo.files import parse_json, read_json, read_text
from flow_grpo.pictures import Picture

logger = logging.getLogger("flow_grpo")

MARK = "<image>"  # in a text: a picture stands here
VIDEO_MARK = "<video>"  # the same of a video
ENDINGS = (".jsonl", ".json", ".parquet")
TEXTS = ("question", "problem", "message")  # of which a row has one
# names that a split may have, the first of which is there is read
SPLITS: dict[Split, tuple[str, ...]] = {"train": ("train",), "test": ("test", "validation", "val")}
PICTURE_FILES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")
VIDEO_FILES = (".mp4", ".mov", ".webm", ".mkv", ".avi")
FETCHED = [f"*{ending}" for ending in (*ENDINGS, *PICTURE_FILES, *VIDEO_FILES)]


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
        train, test = split_off(
            train, seed, str(source), "questions", lambda q: contents(q.text, q.shown)
        )
    return train, test


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
    names = (keys.input,) if keys.input else TEXTS
    name = next((name for name in names if row.get(name) is not None), None)
    if name is None:
        wanted = f"{', '.join(TEXTS[:-1])} or {TEXTS[-1]}"
        wanted = f"{keys.input!r} (input_key)" if keys.input else wanted
        raise UserError(f"{where}: has no {wanted}, it has: {', '.join(row)}")
    system, text, sources = "", row[name], listed(row, where)
    if name == "message" or isinstance(text, list):
        if sources:
            raise UserError(f"{where}: has a {name} and images; the {name} names its pictures")
        system, text, sources = _chat(text, where)
    if not isinstance(text, str) or not text.strip():
        raise UserError(f'{where}: needs a text in "{name}", got {text!r}')
    videos = find_videos(row.get("videos") or [], row.get("fps"), folder, where)
    if row.get("video") and not (sources or videos):
        raise UserError(
            f'{where}: has a "video" and no "videos"; name the column "videos", and make it a list '
            "of paths"
        )
    _check_marks(text, MARK, len(sources), "pictures", where)
    _check_marks(text, VIDEO_MARK, len(videos), "videos", where)
    answer = row.get(keys.answer) if keys.answer else ""
    bad = isinstance(answer, bool) or not isinstance(answer, str | int | float) or answer == ""
    if bad and keys.answer:
        hint = "" if keys.answer == LAYOUTS.answer else f" (answer_key); it has: {', '.join(row)}"
        raise UserError(
            f'{where}: needs a text or a number in "{keys.answer}", got {answer!r}{hint}'
        )
    images = tuple(find_picture(each, folder, where) for each in sources)
    rest = {k: v for k, v in row.items() if k not in (*COLUMNS, "videos", "message")}
    metadata = {**as_json(rest), "question": text, "answer": str(answer)}
    return Question(text, images, str(answer), metadata, where, system, videos)


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
        rows = read_json(path)
        if not isinstance(rows, list):
            raise UserError(f"{path}: must hold a list of rows, got {type(rows).__name__}")
        yield from ((f"{path} row {n}", row) for n, row in enumerate(rows, 1))
    else:
        lines = enumerate(read_text(path).split("\n"), 1)
        for number, line in lines:
            if line.strip():
                yield f"{path}:{number}", parse_json(line, f"{path}:{number}")


def _chat(message: Any, where: str) -> tuple[str, str, list[Any]]:
    """(system prompt, text with marks, pictures) of a chat that ends with the question."""
    chat = parse_json(message, f"{where}: message") if isinstance(message, str) else message
    if not isinstance(chat, list) or not all(isinstance(turn, dict) for turn in chat):
        raise UserError(f"{where}: message must be a list of turns, as a JSON string")
    roles = [turn.get("role") for turn in chat]
    if roles not in (["user"], ["system", "user"]):
        raise UserError(
            f"{where}: message has the roles {', '.join(map(str, roles))}; it must be one question "
            "of the user, after a system prompt or none"
        )
    texts, sources = [], []
    for turn in chat:
        content = turn.get("content")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        pieces = [_part(part, sources, where) for part in parts or []]
        texts.append("".join(pieces))
    return "".join(texts[:-1]), texts[-1], sources


def _part(part: Any, sources: list[Any], where: str) -> str:
    """Its text; a picture goes to `sources` and leaves a mark."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return part["text"]
    source = part.get(kind) if kind in ("image", "image_url") else None
    source = source.get("url") if kind == "image_url" and isinstance(source, dict) else source
    if not isinstance(source, str):
        raise UserError(f"{where}: message has a part that is no text and no image: {part!r:.80}")
    sources.append(source)
    return MARK
