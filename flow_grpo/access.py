"""Whether a model or a data set can be had from the hub: one short request, before libraries ask it
many times, and one line for each way in which it fails."""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Literal

from flow_grpo.errors import UserError, first_line, nearest

Kind = Literal["model", "dataset"]
SECONDS = 4.0  # to connect, and again to answer
NEWEST = "main"
# what httpx, in older versions requests, and Python raise
OUTAGES = {"TransportError", "RequestException", "ConnectionError", "TimeoutError"}


def check_access(
    option: str,
    name: str,
    *,
    kind: Kind = "model",
    revision: str = NEWEST,
    file: str = "config.json",
    known: Iterable[str] = (),
) -> None:
    """Refuse the hub id that `option` has where the hub cannot be reached, does not let us read it
    or has none of that name. What is on the disk is not asked for.

    `file` is one that will be read: a gated model shows some to everybody. `known` are names that
    may have been meant.
    """
    is_name = re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not os.path.exists(name)
    if not is_name or is_offline() or name in cached(kind):
        return
    try:
        _ask(name, kind, revision, file)
    except Exception as error:  # of httpx, which is not always called so, or of the hub's client
        if told := refusal(error, option, name, kind=kind, known=known):
            raise UserError(told) from error


@cache  # of what can be had: an error is raised, and so not kept
def _ask(name: str, kind: Kind, revision: str, file: str) -> None:
    """Raise what the hub says against reading this file; that there is none is no matter."""
    from huggingface_hub import get_token, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError
    from huggingface_hub.utils import get_session, hf_raise_for_status

    url = hf_hub_url(name, file, repo_type=kind, revision=revision)
    headers = {"Authorization": f"Bearer {token}"} if (token := get_token()) else {}
    with suppress(EntryNotFoundError):
        hf_raise_for_status(get_session().head(url, headers=headers, timeout=SECONDS))


def refusal(
    error: BaseException,
    option: str,
    name: str,
    *,
    kind: Kind = "model",
    known: Iterable[str] = (),
) -> str:
    """What to tell of a library's error; "" where the hub has nothing to do with it."""
    from huggingface_hub import constants, errors, get_token

    start, page = f"{option}={name!r}", f"{constants.ENDPOINT}/{_folder(kind)}{name}"
    for each in _chain(error):
        response = getattr(each, "response", None)
        status = getattr(response, "status_code", 0)
        code = response.headers.get("X-Error-Code") if status else ""
        if isinstance(each, errors.RevisionNotFoundError):
            return f"{start} is on the hub without that revision; {page} has a list of them"
        if status and isinstance(each, errors.EntryNotFoundError):
            return ""  # the model is there, and a file is not
        if status in (401, 403) and code != "RepoNotFound":
            who = "your token may not read it" if get_token() else "you are not logged in"
            return (
                f"{start}: the hub answers {status}, {who}; ask for access on {page}, then run "
                "`hf auth login` or set HF_TOKEN"
            )
        if status in (401, 404):
            near = nearest(name, [each for each in (*known, *cached(kind)) if each != name])
            hint = f"did you mean {near}? A" if near else "write owner/name as its page has it; a"
            return (
                f"{start} is no folder here, and the hub has no such {kind}; {hint} private one "
                "needs `hf auth login` or HF_TOKEN"
            )
        if isinstance(each, errors.OfflineModeIsEnabled):
            return ""
        if status or OUTAGES & {base.__name__ for base in type(each).__mro__}:
            why = f"it answers {status}" if status else first_line(each)
            more = " --repo-type dataset" if kind == "dataset" else ""
            place = Path(name).name
            fetch = f"hf download {name}{more} --local-dir {place}"
            return (
                f"{start} is not in the cache, and the hub cannot be reached "
                f"({constants.ENDPOINT}: {why}); check the network and HF_ENDPOINT, or fetch it "
                f"where there is a network ({fetch}) and give {option}={place}"
            )
    return ""


def cached(kind: Kind) -> list[str]:
    """Names of what is in the hub's cache, or in that of the package datasets."""
    from huggingface_hub import constants

    start = f"{kind}s--"
    hub = Path(constants.HF_HUB_CACHE).glob(f"{start}*/snapshots/*")
    names = [path.parents[1].name.removeprefix(start).replace("--", "/") for path in hub]
    if kind == "dataset":
        tables = Path(constants.HF_HOME, "datasets").glob("*___*")
        names += [path.name.replace("___", "/") for path in tables]
    return list(dict.fromkeys(names))


def is_offline() -> bool:
    """Then the libraries ask for nothing, and say so."""
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


def _folder(kind: Kind) -> str:
    return "datasets/" if kind == "dataset" else ""


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and what it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
