"""Check access to models and datasets on the Hugging Face hub.

One short request comes before the libraries send many, and each failure becomes a one-line error.
"""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Literal

from flow_grpo.errors import UserError, first_line, nearest
from flow_grpo.modelscope_hub import check_modelscope, is_modelscope

RepoType = Literal["model", "dataset"]
TIMEOUT_SECONDS = 4.0  # to connect, and again for the response
DEFAULT_REVISION = "main"
# owner/name, or owner/name/file.safetensors for one file of a repository
HUB_ID = re.compile(r"([\w.-]+/[\w.-]+)(?:/(.+\.safetensors))?")
# Names of exceptions of httpx, requests (older versions of the hub client) and Python.
CONNECTION_ERRORS = {"TransportError", "RequestException", "ConnectionError", "TimeoutError"}


def split_hub_id(source: str) -> tuple[str, str] | None:
    """Return the repository and the file ("" for all) of a hub id; None for a local path.

    A name in an existing directory is a mistyped local path.
    """
    match = HUB_ID.fullmatch(source)
    if not match or os.path.exists(source) or os.path.isdir(os.path.dirname(match[1])):
        return None
    return match[1], match[2] or ""


def check_hub_access(
    option: str,
    name: str,
    *,
    kind: RepoType = "model",
    revision: str = DEFAULT_REVISION,
    file: str = "config.json",
    known: Iterable[str] = (),
) -> None:
    """Reject a hub id that does not exist, may not be read, or cannot be reached.

    Local paths and cached repositories are accepted without a request, as are names on ModelScope
    if its package is installed.

    Args:
        option: Setting or option that names the repository, for the message.
        name: Its value.
        kind: Type of the repository.
        revision: Branch, tag or commit.
        file: A file that will be read; gated repositories show some files to everyone.
        known: Names to suggest for a misspelt one.
    """
    if is_modelscope(name):
        check_modelscope(name, option)
    is_name = re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not os.path.exists(name)
    if not is_name or is_offline() or name in cached_repos(kind):
        return
    try:
        _probe_hub(name, kind, revision, file)
    except Exception as error:  # of httpx, requests or the hub client, by version
        if message := hub_error_message(error, option, name, kind=kind, known=known):
            raise UserError(message) from error


@cache  # caches successes only: errors are raised
def _probe_hub(name: str, kind: RepoType, revision: str, file: str) -> None:
    """Raise the hub's error for reading this file; a missing file is none."""
    from huggingface_hub import get_token, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError
    from huggingface_hub.utils import get_session, hf_raise_for_status

    url = hf_hub_url(name, file, repo_type=kind, revision=revision)
    headers = {"Authorization": f"Bearer {token}"} if (token := get_token()) else {}
    with suppress(EntryNotFoundError):
        hf_raise_for_status(get_session().head(url, headers=headers, timeout=TIMEOUT_SECONDS))


def hub_error_message(
    error: BaseException,
    option: str,
    name: str,
    *,
    kind: RepoType = "model",
    known: Iterable[str] = (),
) -> str:
    """Return the message for an error of a library, or "" if the hub did not cause it."""
    from huggingface_hub import constants, errors, get_token

    subject = f"{option}={name!r}"
    page = f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{name}"
    for each in _exception_chain(error):
        response = getattr(each, "response", None)
        status = getattr(response, "status_code", 0)
        code = response.headers.get("X-Error-Code") if status else ""
        if isinstance(each, errors.RevisionNotFoundError):
            return f"{subject} does not have this revision on the hub; choose one on {page}"
        if status and isinstance(each, errors.EntryNotFoundError):
            return ""  # the repository exists, only the file is missing
        if status in (401, 403) and code != "RepoNotFound":
            reason = "your token has no access" if get_token() else "you are not logged in"
            return (
                f"{subject} cannot be read from the hub (status {status}: {reason}); request "
                f"access on {page}, then run `hf auth login` or set HF_TOKEN"
            )
        if status in (401, 404):
            near = nearest(name, [each for each in (*known, *cached_repos(kind)) if each != name])
            hint = f"did you mean {near}?" if near else "check owner/name"
            return (
                f"{subject} is neither a local directory nor a {kind} on the hub; {hint} (a "
                "private one needs `hf auth login` or HF_TOKEN)"
            )
        if isinstance(each, errors.OfflineModeIsEnabled):
            return ""
        if status or CONNECTION_ERRORS & {base.__name__ for base in type(each).__mro__}:
            reason = f"status {status}" if status else first_line(each)
            repo_type = " --repo-type dataset" if kind == "dataset" else ""
            folder = Path(name).name
            download = f"hf download {name}{repo_type} --local-dir {folder}"
            return (
                f"{subject} is not in the cache, and the hub cannot be reached "
                f"({constants.ENDPOINT}: {reason}); check the network and HF_ENDPOINT, or download "
                f"it on a machine with network access ({download}) and set {option}={folder}"
            )
    return ""


def cached_repos(kind: RepoType) -> list[str]:
    """Return the names of repositories in the cache of the hub or of the datasets package."""
    from huggingface_hub import constants

    prefix = f"{kind}s--"
    hub = Path(constants.HF_HUB_CACHE).glob(f"{prefix}*/snapshots/*")
    names = [path.parents[1].name.removeprefix(prefix).replace("--", "/") for path in hub]
    if kind == "dataset":
        tables = Path(constants.HF_HOME, "datasets").glob("*___*")
        names += [path.name.replace("___", "/") for path in tables]
    return list(dict.fromkeys(names))


def is_offline() -> bool:
    """Return whether HF_HUB_OFFLINE disables requests to the hub."""
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


def _exception_chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and the errors that caused it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
