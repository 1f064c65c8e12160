import difflib
import os
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

MOST_NAMES = 5000  # of files that are compared, which takes a second


class UserError(Exception):
    """A mistake the user can mend, shown as one line without a traceback, in notebooks too."""

    exit_code = 2
    seen_by_all = True  # of several processes, one tells it

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of the traceback."""
        return [f"{type(self).__name__}: {self}"]


class OutOfMemory(UserError):
    """A GPU's memory is short, perhaps that of one of several."""

    seen_by_all = False


class Stopped(UserError):
    """Asked to stop by a signal. EX_TEMPFAIL: starting it again is the way to go on."""

    exit_code = 75


class LostPeer(UserError):
    """Another process, perhaps on another machine, does not answer any more."""

    exit_code = 4


class RewardOutage(UserError):
    """So many scores are missing that the run stopped."""

    exit_code = 3


def first_line(error: BaseException) -> str:
    """The first line of another library's message, which may have many."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.65) -> str:
    """Which of the known names may have been meant; "" where none is near."""
    plain = {_plain(each): each for each in known}
    close = difflib.get_close_matches(_plain(name), plain, n=1, cutoff=cutoff)
    return plain[close[0]] if close else ""


def _plain(name: str) -> str:
    return str(name).lower().replace("-", "_")


def with_nearest(message: str, name: str, known: Iterable[str]) -> str:
    near = nearest(name, known)
    return f"{message}; did you mean {near}?" if near else message


def with_nearest_file(message: str, path: str | Path, pattern: str = "*") -> str:
    """The same for a file or folder that is not there, of those beside it that are of a kind."""
    folder = Path(path).parent
    found = folder.glob(pattern) if os.path.isdir(folder) else ()  # which too long a name is not
    beside = {each.relative_to(folder).parts[0] for each in islice(found, MOST_NAMES)}
    near = nearest(Path(path).name, beside)
    return f"{message}; did you mean {folder / near}?" if near else message


def check_model_folder(model: str, marker: str) -> None:
    """Refuse a path with nothing there: the hub would be asked for it, again and again. `marker` is
    a file that every model's folder has."""
    if os.path.isdir(Path(model).parent) and not os.path.exists(model):  # too long is not there
        message = (
            f"no model at pretrained.model={model!r}: there is no such folder; name one, or a hub "
            "id (owner/name)"
        )
        raise UserError(with_nearest_file(message, model, f"*/{marker}"))
