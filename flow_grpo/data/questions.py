"""Questions of vision-language and language models: their row layout, and loading of question sets.

Recognised row layouts: ours (`question`, `images`, `videos`, `answer`), EasyR1's (the same with
`problem`), LMM-R1's (`message`, a chat as a JSON string, and `answer`; its `question` repeats the
text of the chat), and `prompt` of TRL and verl, text or a chat. `QuestionLayout` names other
columns. A column that looks like a model input but is not used is rejected:
flow_grpo/data/columns.py.
"""

import logging
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from flow_grpo.config.paths import check_dataset_available
from flow_grpo.data.chats import (
    IMAGE_PLACEHOLDER,
    USER,
    VIDEO_PLACEHOLDER,
    Chat,
    Turn,
    parse_chat,
)
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
)
from flow_grpo.data.hub import check_hub_dataset, download_dataset, is_hub_name
from flow_grpo.data.images import (
    cache_images,
    find_image,
    first_nonempty_column,
    listed_images,
    row_identity,
)
from flow_grpo.data.mixing import split_held_out, warn_duplicates
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
from flow_grpo.data.split_files import split_files
from flow_grpo.data.videos import Video, find_videos
from flow_grpo.errors import UserError
from flow_grpo.images import ImageSource

QUESTION_SUFFIXES = (".jsonl", ".json", ".parquet")
CHAT_COLUMN = "message"
QUESTION_COLUMNS = (CHAT_COLUMN, "question", "problem", "prompt")  # in order of precedence
VIDEO_COLUMNS = ("videos", "video")
logger = logging.getLogger("flow_grpo")
MAX_QUESTION = 500_000  # characters; about 128k tokens
LIKE_QUESTION = ("is named like a question", "use it with --config.input_key={name}")
LIKE_QUESTION_PART = ("is named like a part of the question", "write it into the question")
QUESTION_NAMES = """message messages question questions problem prompt prompts query instruction
    instructions conversation conversations dialog dialogue chat history"""
QUESTION_PART_NAMES = """options option choices choice distractors distractor incorrect_answers
    incorrect_answer wrong_answers context passage paragraph article story hint hints input
    tools system system_prompt A B C D E F G H"""
# names of a split in order of precedence
DOWNLOAD_PATTERNS = [
    f"*{ending}" for ending in (*QUESTION_SUFFIXES, *IMAGE_SUFFIXES, *VIDEO_SUFFIXES)
]


@dataclass(frozen=True)
class Question:
    """A question with its images and videos, ground truth, and the metadata that rewards get."""

    text: str
    images: tuple[ImageSource, ...] = ()  # one per placeholder in the text; without any, all first
    answer: str = ""  # the ground truth
    metadata: dict[str, Any] = field(default_factory=dict)
    where: str = ""  # file and line
    system: str = ""  # system prompt of this row
    videos: tuple[Video, ...] = ()  # like `images`
    history: tuple[Turn, ...] = ()  # user and assistant turns before the text

    @property
    def shown(self) -> tuple[ImageSource, ...]:
        """All images, and the file or the frames of each video."""
        sources = [video.source for video in self.videos]
        files = [s if isinstance(s, tuple) else (s,) for s in sources]
        return (*self.images, *chain.from_iterable(files))

    @cached_property
    def identity(self) -> tuple[str, ...]:
        """Key that questions with the same text, images and videos share."""
        turns = (*(turn.text for turn in self.history), self.text)
        return row_identity("\n".join(turns), self.shown)


AnyQuestion = TypeVar("AnyQuestion", bound=Question)


@dataclass(frozen=True)
class QuestionLayout(RowLayout[Question]):
    """Row layout of questions: a text or a chat, optional images and videos, and the ground truth.

    Args:
        text: The question, or a chat that ends with it; "" for the first of `QUESTION_COLUMNS`.
        answer: The ground truth, possibly a key within a column; "" if there is none.
        video: Column of the videos; "" for the first of `VIDEO_COLUMNS`, "none" to ignore videos.
        image_dir: Directory that relative paths of images and videos start from; "" for that of
            the file.
        image_cache: Directory to which images inside data files are written, so that they are not
            kept in memory; "" keeps them.
    """

    noun: ClassVar[str] = "question"
    required: ClassVar[str] = "question and answer"
    suffixes: ClassVar[tuple[str, ...]] = QUESTION_SUFFIXES
    rules: ClassVar[ColumnRules] = ColumnRules(
        settings={
            IMAGE: "image_key",
            BINARY: "image_key",
            VIDEO: "video_key",
            CONVERSATION: "input_key",
        },
        reserved={
            **dict.fromkeys(QUESTION_NAMES.split(), LIKE_QUESTION),
            **dict.fromkeys(QUESTION_PART_NAMES.split(), LIKE_QUESTION_PART),
            **dict.fromkeys(("chosen", "rejected"), PREFERENCE_COLUMN),
            **dict.fromkeys(
                ("video_start", "video_end"), ("trims a video, which is unsupported", "")
            ),
        },
    )

    answer: str = "answer"
    video: str = ""
    image_dir: str = ""
    image_cache: str = ""

    def media_folder(self, folder: Path) -> Path:
        """Return the directory that relative paths of a file in `folder` start from."""
        return Path(self.image_dir) if self.image_dir else folder

    @property
    def videos(self) -> tuple[str, ...]:
        """Columns that may contain the videos, in order of precedence."""
        return self._resolve(self.video, VIDEO_COLUMNS)

    @property
    def ignored_kinds(self) -> tuple[str, ...]:
        """Kinds of content that may be left unused."""
        videos = (VIDEO,) if self.video == NO_COLUMN else ()
        return (*super().ignored_kinds, *videos)

    def parse(self, row: Row, folder: Path, where: str) -> Question:
        """Convert a row to a question; see `RowLayout.parse`.

        All columns but images and videos become metadata. Images are not decoded yet.
        """
        name = first_nonempty_column(row, self._resolve(self.text, QUESTION_COLUMNS))
        if name is None:
            wanted = f"{self.text!r} (input_key)" if self.text else join_with_or(QUESTION_COLUMNS)
            raise UserError(f"has no column {wanted}, only {', '.join(row)}", field=where)
        image_column, video_column, images, videos = self.find_media(row, where)
        chat = Chat([Turn(USER, row[name])])
        if name == CHAT_COLUMN or is_conversation(row[name]):
            chat = parse_chat(row[name], f'{where}: "{name}"')
            chat.check_is_prompt(
                f'{where}: "{name}"', "remove the last turn, or train on it with train.loss=sft"
            )
        chat.add_columns(images, videos, f'{where}: "{name}"')
        chat.show_media_first()
        text = chat.turns[-1].text
        for turn in chat.turns:
            check_text(turn.text, name, where, MAX_QUESTION)
        check_text(chat.system, name, where, MAX_QUESTION, allow_blank=True)
        used = {name, self.answer, self.answer.partition(".")[0], image_column, video_column}
        if name == CHAT_COLUMN:
            used.add("question")  # LMM-R1's files repeat the text of the chat there
        self.reject_unused(row, used, where)
        shown = "".join(turn.text for turn in chat.turns)
        images, videos = resolve_media(chat, row, shown, self.media_folder(folder), where)
        images = cache_images(images, self.image_cache)
        answer = _parse_answer(row, self.answer, where) if self.answer else ""
        left_out = {name, *self.images, *self.videos}
        rest = {k: v for k, v in row.items() if k not in left_out and not has_binary(v)}
        metadata = {**to_jsonable(rest), "question": text, "answer": answer}
        history = tuple(chat.turns[:-1])
        return Question(text, images, answer, metadata, where, chat.system, videos, history)

    def find_media(
        self, row: Row, where: str
    ) -> tuple[str | None, str | None, list[Any], list[Any]]:
        """Return the columns of the images and of the videos of a row, and their values."""
        image_column = first_nonempty_column(row, self.images)
        video_column = first_nonempty_column(row, self.videos)
        videos = row[video_column] if video_column else []
        videos = videos if isinstance(videos, list) else [videos]
        return image_column, video_column, listed_images(row, where, self.images), videos


def resolve_media(
    chat: Chat, row: Row, text: str, folder: Path, where: str
) -> tuple[tuple[ImageSource, ...], tuple[Video, ...]]:
    """Return the images and videos of a chat; `text` must have a placeholder for each, or none."""
    videos = find_videos(chat.videos, row.get("fps"), folder, where)
    _check_placeholders(text, IMAGE_PLACEHOLDER, len(chat.images), "images", where)
    _check_placeholders(text, VIDEO_PLACEHOLDER, len(videos), "videos", where)
    return tuple(find_image(each, folder, where) for each in chat.images), videos


DEFAULT_LAYOUT = QuestionLayout()


def load_questions(
    source: str | Path,
    seed: int,
    layout: QuestionLayout = DEFAULT_LAYOUT,
    *,
    hold_out: bool = True,
) -> tuple[list[Question], list[Question]]:
    """Load (train, test) questions.

    Args:
        source: Directory with a file per split, a single file, or a hub name to download.
        seed: Selects the held-out tenth of a dataset without a test split.
        layout: Columns to read.
        hold_out: Whether test questions are needed; otherwise they are not read, and the training
            split is returned whole.
    """
    check_dataset_available(str(source))
    path = _local_path(source)
    train = find_questions(path, "train", layout)
    if train is None:
        raise _missing_error(source, path, "train")
    if not hold_out:
        warn_duplicates(train, [], str(source), "questions")
        return train, []
    test = find_questions(path, "test", layout)
    if test is None:
        train, test = split_held_out(train, seed, str(source), "questions")
    warn_duplicates(train, test, str(source), "questions")
    return train, test


def first_rows(rows: list[AnyQuestion], limit: int, source: str) -> list[AnyQuestion]:
    """Return the first `limit` rows (`max_samples`) of a training set, or all if it is 0."""
    if not limit:
        return rows
    logger.info("%-21s %d of %d rows (max_samples)", source, min(limit, len(rows)), len(rows))
    return rows[:limit]


def check_media_columns(questions: Iterable[Question], layout: QuestionLayout) -> None:
    """Reject an image or video column that is empty in all rows of all datasets."""
    questions = list(questions)
    for setting, key, found in (
        ("image_key", layout.image, any(q.images for q in questions)),
        ("video_key", layout.video, any(q.videos for q in questions)),
    ):
        if key not in ("", NO_COLUMN) and not found:
            raise UserError(
                f"names a column that is empty in all {len(questions)} questions",
                field=setting,
                value=key,
                hint=f'name another, or leave it empty for "{setting.removesuffix("_key")}s"',
            )


def load_split(
    source: str | Path, split: Split, layout: QuestionLayout = DEFAULT_LAYOUT
) -> list[Question]:
    """Load a split; raise a UserError if it is missing."""
    questions = find_split(source, split, layout)
    if questions is None:
        raise _missing_error(source, _local_path(source), split)
    return questions


def find_split(
    source: str | Path, split: Split, layout: QuestionLayout = DEFAULT_LAYOUT
) -> list[Question] | None:
    """Load a split of a local or downloaded dataset, or return None if it is missing."""
    check_dataset_available(str(source))
    return find_questions(_local_path(source), split, layout)


def _local_path(source: str | Path) -> Path:
    """Return the path of a dataset, which is downloaded if it is on the hub."""
    if _is_hub_dataset(source):
        return download_dataset(str(source), DOWNLOAD_PATTERNS)
    return Path(source)


def check_questions_exist(source: str, splits: Sequence[Split] = ("train",)) -> None:
    """Reject a dataset that has none of `splits`, without reading it."""
    if _is_hub_dataset(source):
        check_hub_dataset(source)
    elif not os.path.isfile(source) and not any(
        split_files(Path(source), s, QUESTION_SUFFIXES) for s in splits
    ):
        raise _missing_error(source, Path(source), splits[0])


def _is_hub_dataset(source: str | Path) -> bool:
    return is_hub_name(str(source).partition("@")[0]) and not os.path.exists(source)


def find_questions(
    path: Path, split: Split, layout: QuestionLayout = DEFAULT_LAYOUT
) -> list[Question] | None:
    """Read a split, or return None if it is missing; a single file is the training split."""
    if os.path.isfile(path):
        return read_file(path, layout) if split == "train" else None
    files = split_files(path, split, QUESTION_SUFFIXES)
    warn_unread_files(path, split, files)
    return [question for file in files for question in read_file(file, layout)] or None


def _missing_error(source: str | Path, path: Path, split: Split) -> UserError:
    """Return the UserError for a dataset without a split.

    Args:
        source: Value of the setting `dataset`.
        path: Its local directory.
        split: The missing split.
    """
    found = []
    if os.path.isdir(path):
        found = sorted(each for ending in QUESTION_SUFFIXES for each in path.rglob(f"*{ending}"))
        found += list_split_files(path, split, found)
    names = join_with_or(f"{split}{ending}" for ending in QUESTION_SUFFIXES)
    return missing_split_error(
        source,
        path,
        split,
        "questions",
        found=[str(file.relative_to(path)) for file in found],
        hint=f"pass a directory with {names}, or such a file",
    )


def _parse_answer(row: dict[str, Any], key: str, where: str) -> str:
    """Return the ground truth of a row as text; reject blank text and other types than numbers."""
    answer = _nested_value(row, key)
    valid = isinstance(answer, str | int | float) and not isinstance(answer, bool)
    if isinstance(answer, float) and not math.isfinite(answer):
        valid = False
    if not valid or not str(answer).strip():
        raise UserError(
            f'needs text or a finite number in "{key}", got {answer!r:.80}',
            field=where,
            hint=f"set --config.answer_key to one of its columns: {', '.join(row)}",
        )
    return str(answer)


def _nested_value(row: dict[str, Any], key: str) -> Any:
    """Return the value of a column or of a key in it: verl has "reward_model.ground_truth"."""
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _check_placeholders(text: str, placeholder: str, given: int, kind: str, where: str) -> None:
    """Raise a UserError unless the text has no `placeholder`, or one for each image or video.

    Args:
        text: The question.
        placeholder: "<image>" or "<video>".
        given: Number of images or videos of the row.
        kind: "images" or "videos", for the message.
        where: File and row, the `field` of the error.
    """
    count = text.count(placeholder)
    if count not in (0, given):
        raise UserError(
            f"has {placeholder} {count} times in its text, but {given} {kind}",
            field=where,
            hint=f"write {placeholder} once for each, or leave it out to show all of them first",
        )
