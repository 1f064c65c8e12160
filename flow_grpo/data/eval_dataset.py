"""The dataset of evaluations during training: `eval_dataset`, if it is not the test split.

Training then uses all rows of `dataset`: nothing is held out, and its test split is not read.
"""

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from flow_grpo.data.mixing import (
    DataRow,
    PromptSource,
    interleave,
    parse_sources,
    tag_rows,
    warn_known_rows,
)
from flow_grpo.data.rows import Split
from flow_grpo.errors import UserError

T = TypeVar("T", bound=DataRow)
# settings of `dataset` that `eval_dataset` has too, with the prefix "eval_"
DIFFUSION_NAMES = ("dataset_column", "image_column")
VLM_NAMES = ("input_key", "image_key", "video_key", "answer_key")
NAMES = ("dataset", *DIFFUSION_NAMES, *VLM_NAMES)
# as in "use --config.image_key=img" and in "dataset='x/y' is not in the cache"
MENTION = re.compile(rf"(?<=--config\.)({'|'.join(NAMES)})\b|(?<![\w.-])(dataset)(?==)")
logger = logging.getLogger("flow_grpo")


@contextmanager
def name_eval_settings() -> Iterator[None]:
    """Make errors about a dataset name the settings of `eval_dataset`, not those of `dataset`."""
    try:
        yield
    except UserError as error:
        field = f"eval_{error.field}" if error.field in NAMES else error.field
        rule, hint = (MENTION.sub(r"eval_\g<0>", text) for text in (error.rule, error.hint))
        raise UserError(rule, field=field, value=error.value, hint=hint) from error


def parse_eval_sources(dataset: str) -> list[PromptSource]:
    """Parse the value of `eval_dataset`; EasyR1's "owner/name@test" is accepted too."""
    return parse_sources(re.sub(r"@test(?=$|[,:])", "", dataset))


def load_eval_dataset(
    dataset: str,
    train: Sequence[T],
    find: Callable[[str, Split], list[T] | None],
    load: Callable[[str, Split], list[T]],
    what: str = "prompts",
) -> list[T]:
    """Load the rows to evaluate on: of each dataset the test split, or all rows without one.

    Args:
        dataset: Value of `eval_dataset`, which is not empty.
        train: All training rows; those among the result are logged.
        find: Reads a split of a dataset, or returns None if it is missing.
        load: Reads a split of a dataset, or raises a UserError if it is missing.
        what: What a row is, for messages.
    """
    parts = []
    with name_eval_settings():
        sources = parse_eval_sources(dataset)
        for source in sources:
            rows = find(source.path, "test")
            if rows is None:
                rows = find(source.path, "train") or load(source.path, "test")
                logger.info(
                    "%s has no test %s: evaluating on all its %d %s",
                    source.path,
                    what,
                    len(rows),
                    what,
                )
            parts.append(tag_rows(rows, source.name) if len(sources) > 1 else rows)
    rows = interleave(parts)
    warn_known_rows(train, rows, dataset, what)
    return rows
