"""Remove machine paths, user and host names, server addresses and secrets from published text."""

import getpass
import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flow_grpo.config.paths import ROOT

SECRET, URL, ADDRESS, USER, HOST, EMAIL = (
    f"<{name}>" for name in ("secret", "url", "address", "user", "host", "email")
)
SECRET_NAMES = re.compile(r"(^|_)(token|secret|password|passwd|api_?key|credentials?)$", re.I)
SECRETS = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\bsk-[\w-]{16,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}"
    r"|\bglpat-[\w-]{16,}|\bxox[abps]-[\w-]{10,}|\bAKIA[0-9A-Z]{16}\b|\bAIza[\w-]{30,}"
    r"|\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,}|(?<=[Bb]earer )[\w.~+/=-]{8,}"
)
# options of a command line whose value is a secret: --api_key=..., WANDB_API_KEY=...
SECRET_OPTIONS = re.compile(
    r"(?i)([\w.-]*(?:token|secret|password|passwd|api_?key)\s*[=:]\s*)(?!\s|\d+\b)['\"]?[^\s'\"]+"
)
PUBLIC_HOSTS = ("huggingface.co", "github.com", "arxiv.org", "doi.org")
URLS = re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s\"'<>()\[\]{},]+", re.I)
EMAILS = re.compile(r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
ADDRESSES = re.compile(r"\b(?:\d{1,3}\.){3}\d{1,3}(?::\d+)?\b|\b[A-Za-z][\w.-]*:\d{4,5}\b")
# An absolute path with at least two parts; not the rest of a relative path, URL or fraction.
PATHS = re.compile(
    r"(?<![\w.:/<>~)\]}-])~?(?:/[^\s\"'`,:;|<>/]+){2,}/?|\b[A-Za-z]:\\[^\s\"'`,;|<>]+"
)
WHOLE_PATHS = re.compile(r"(?:^|(?<=,))\s*(?:~?/|[A-Za-z]:\\)[^:,]*")
# User and host names that are words of their own, which are kept
COMMON_NAMES = {"root", "user", "users", "admin", "ubuntu", "debian", "runner", "train", "test"}
COMMON_NAMES |= {"data", "model", "models", "localhost", "work", "home", "guest", "docker"}
MIN_NAME_LENGTH = 3


def redact_text(text: str, folders: Sequence[str | Path] = ()) -> str:
    """Return text without private parts.

    Paths inside `folders`, the current directory or the library become relative; of other absolute
    paths only the last part is kept.

    Args:
        text: Any text, such as a command line.
        folders: Working directories of the run.
    """
    text = SECRETS.sub(SECRET, text)
    text = SECRET_OPTIONS.sub(lambda found: found[1] + SECRET, text)
    text = URLS.sub(lambda found: _public_url(found[0]), text)
    text = EMAILS.sub(EMAIL, text)
    text = PATHS.sub(lambda found: shorten_path(found[0], folders), text)
    text = ADDRESSES.sub(ADDRESS, text)
    for name, shown in _private_names():
        text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", shown, text)
    return text


def redact(value: Any, folders: Sequence[str | Path] = (), name: str = "") -> Any:
    """Return a config value without private parts, at any depth; keys are kept.

    Args:
        value: Dicts, lists, strings and numbers.
        folders: Working directories of the run.
        name: Key of the value.
    """
    if isinstance(value, Mapping):
        return {key: redact(each, folders, str(key)) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [redact(each, folders, name) for each in value]
    if not isinstance(value, str):
        return value
    if value and SECRET_NAMES.search(name):
        return SECRET
    # paths with spaces, which could not be distinguished from text elsewhere
    value = WHOLE_PATHS.sub(lambda found: shorten_path(found[0].strip(), folders), value)
    return redact_text(value, folders)


def shorten_path(path: str, folders: Sequence[str | Path] = ()) -> str:
    """Return an absolute path relative to one of the folders, or `.../` and its last part."""
    plain = os.path.normpath(os.path.expanduser(path))
    for folder in (*folders, os.getcwd(), ROOT):
        if Path(plain).is_relative_to(folder) and plain != str(folder):
            return os.path.relpath(plain, folder)
    return ".../" + re.split(r"[/\\]", plain.rstrip("/\\"))[-1]


def _public_url(url: str) -> str:
    host = re.sub(r"^[a-z0-9+.-]*://(?:[^/@]*@)?", "", url, flags=re.I).partition("/")[0]
    known = any(host == each or host.endswith(f".{each}") for each in PUBLIC_HOSTS)
    return url if known and "@" not in url.partition("://")[2].partition("/")[0] else URL


def _private_names() -> list[tuple[str, str]]:
    """Return the names of the user and of the host, with what replaces them."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # no entry in the password file, as in some containers
        user = ""
    home = Path(os.path.expanduser("~")).name
    host = socket.gethostname()
    names = {user: USER, home: USER, host: HOST, host.partition(".")[0]: HOST}
    return [
        (name, shown)
        for name, shown in names.items()
        if len(name) >= MIN_NAME_LENGTH and name.lower() not in COMMON_NAMES
    ]
