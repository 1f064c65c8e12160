import difflib
import os
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

MAX_COMPARED_FILES = 5000  # comparing their names takes about a second
NO_VALUE = object()  # an error without a value; None is a value


class UserError(Exception):
    """An error that the user can correct, shown as one line without a traceback, in notebooks too.

    The line is `field=value rule; hint`, for example
    `train.beta=-1 must be at least 0; set 0 to train without a KL penalty`.

    Args:
        rule: What the value must be or what is wrong with it, as the predicate of the sentence:
            "must be at least 0". The whole message if no `field` is given.
        field: Full name of what is wrong: a setting, an argument, or a file with its line.
        value: The value that was given; left out of the message if there is none.
        hint: What to do about it.
    """

    exit_code = 2
    raised_on_all_ranks = True  # every rank raises it, so one of them reports it

    def __init__(
        self, rule: str, *, field: str | Path = "", value: Any = NO_VALUE, hint: str = ""
    ) -> None:
        self.rule, self.field, self.value, self.hint = rule, str(field), value, hint
        subject = self.field if value is NO_VALUE else f"{field}={value!r}"
        line = f"{subject} {rule}" if subject else rule
        super().__init__(f"{line}; {hint}" if hint else line)

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows in place of the traceback."""
        return [f"{type(self).__name__}: {self}"]


class OutOfMemory(UserError):
    """A GPU ran out of memory, possibly on one rank only."""

    raised_on_all_ranks = False


class StoppedBySignal(UserError):
    """The run was asked to stop by a signal; starting it again resumes it (EX_TEMPFAIL)."""

    exit_code = 75


class LostPeer(UserError):
    """Another process, possibly on another machine, stopped responding."""

    exit_code = 4


class RewardOutage(UserError):
    """The run stopped because too many scores are missing."""

    exit_code = 3


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.65) -> str:
    """Return the known name most similar to `name`, or "" if none is similar."""
    by_plain_name = {_normalize(each): each for each in known}
    close = difflib.get_close_matches(_normalize(name), by_plain_name, n=1, cutoff=cutoff)
    return by_plain_name[close[0]] if close else ""


def _normalize(name: str) -> str:
    return str(name).lower().replace("-", "_")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the hint "did you mean X?" for the most similar known name, or ""."""
    near = nearest(name, known)
    return f"did you mean {near}?" if near else ""


def did_you_mean_file(path: str | Path, pattern: str = "*") -> str:
    """Return the hint "did you mean X?" for a missing file or directory, or "".

    Args:
        path: The missing path; candidates are the entries of its parent directory.
        pattern: Glob below the parent that a candidate has to match: "*/config.json".
    """
    folder = Path(path).parent
    found = folder.glob(pattern) if os.path.isdir(folder) else ()  # False if the name is too long
    siblings = {each.relative_to(folder).parts[0] for each in islice(found, MAX_COMPARED_FILES)}
    siblings.discard(Path(path).name)  # a dangling link, or not of the needed kind
    near = nearest(Path(path).name, siblings)
    return f"did you mean {folder / near}?" if near else ""


def join_hints(*hints: str) -> str:
    """Join the hints that are not empty."""
    return "; ".join(filter(None, hints))


def check_model_folder(model: str, marker: str) -> None:
    """Reject a local path that does not exist: otherwise the hub is queried for it repeatedly.

    A value whose parent directory exists is regarded as a local path. The content of an existing
    directory is not checked.

    Args:
        model: Value of `pretrained.model`.
        marker: A file that every model directory has, by which the hint finds a similar path.
    """
    if os.path.isdir(Path(model).parent) and not os.path.exists(model):
        raise UserError(
            "does not exist",
            field="pretrained.model",
            value=model,
            hint=did_you_mean_file(model, f"*/{marker}")
            or "pass a model directory or a hub id (owner/name)",
        )
