"""Prompts of benchmarks: find, download and verify the pinned files, and read their rows.

A file comes from the path that the user gives, from this project, or from a cache that is filled
from the pinned commit. Nothing of a benchmark is part of this repository.
"""

import hashlib
import os
import shlex
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flow_grpo.benchmarks.protocol import PromptSource
from flow_grpo.config.paths import ROOT
from flow_grpo.data.hub import download_dataset
from flow_grpo.data.prompts import Prompt, PromptLayout
from flow_grpo.data.rows import READERS
from flow_grpo.errors import UserError, did_you_mean_file, first_line
from flow_grpo.hub_access import is_offline
from flow_grpo.untrusted_files import read_text, split_lines

BUNDLED, HUB = "bundled", "hub"
RAW_URL = "https://raw.githubusercontent.com"
TIMEOUT_SECONDS = 20.0  # to connect, and between two parts of a response
MAX_BYTES = 1 << 28
FILE_TAG = "file"  # category of prompts from several files: the name without suffix


@dataclass(frozen=True)
class PromptFiles:
    """The files of a benchmark's prompts with their checksum."""

    files: list[Path]
    sha256: str


def find_files(
    source: PromptSource, given: Path | None = None, *, option: str = "--prompts"
) -> PromptFiles:
    """Return the prompt files, downloaded if necessary.

    Args:
        source: The pinned files.
        given: The user's own file or directory; its checksum may differ.
        option: Option that names it, for messages.

    Raises:
        UserError: If the files are missing, or downloaded ones differ from the pinned ones.
    """
    if given is not None:
        files = _list_files(given, source, option)
        return PromptFiles(files, checksum(files))
    kind = source.source.partition(" ")[0]
    if kind == BUNDLED:
        files = _list_files(ROOT / source.files, source, option)
    elif kind == HUB:
        files = _download_from_hub(source, option)
    else:
        files = [_download(source, option)]
    found = checksum(files)
    if source.sha256 and found != source.sha256:
        raise UserError(
            f"has the SHA-256 {found[:12]}..., not the {source.sha256[:12]}... of the protocol",
            field=files[0],
            hint=f"remove it to download it again, or pass another file with {option}",
        )
    return PromptFiles(files, found)


def checksum(files: list[Path]) -> str:
    """Return the SHA-256 of a file; of several, that of the output of `sha256sum FILES`."""
    hashes = [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]
    if len(files) == 1:
        return hashes[0]
    lines = [f"{each}  {path.name}\n" for each, path in zip(hashes, files, strict=True)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def fetch_command(source: PromptSource, option: str = "--prompts") -> str:
    """Return how to get the files on a machine with network access."""
    name = Path(source.files).name
    if source.source.startswith(HUB):
        folder = Path(source.repository).name
        include = f"--include '{source.files}' --local-dir {folder}"
        download = f"hf download {source.repository} --repo-type dataset {include}"
        return f"run {download} and pass {option} {folder}"
    if not source.is_glob:
        return f"run curl -L -o {name} {shlex.quote(file_url(source))} and pass {option} {name}"
    folder = Path(source.repository).name
    url = f"https://github.com/{source.repository}"
    path = f"{folder}/{Path(source.files).parent}"
    checkout = f"git clone {url} && git -C {folder} checkout -q {source.commit}"
    return f"run {checkout} and pass {option} {path}"


def file_url(source: PromptSource) -> str:
    return f"{RAW_URL}/{source.repository}/{source.commit}/{source.files}"


def read_prompts(files: PromptFiles, source: PromptSource) -> tuple[list[Prompt], list[str]]:
    """Read the distinct prompts of a benchmark of images.

    Returns:
        The prompts in the order of the files, and the category of each, "" without categories.

    Raises:
        UserError: If there are no prompts, or the column of the categories is missing.
    """
    layout = PromptLayout(source.column or "prompt")
    is_whole_file = source.is_glob and not source.tag and len(files.files) == source.count
    prompts: dict[tuple[str, ...], tuple[Prompt, str]] = {}
    for path in files.files:
        for where, row in _rows(path, layout, is_whole_file):
            tag = path.stem if source.tag == FILE_TAG else ""
            if source.tag and isinstance(row, dict):
                if source.tag not in row:
                    raise UserError(f'has no column "{source.tag}"', field=where)
                tag = str(row[source.tag])
            prompt = layout.parse(row, path.parent, where)
            prompts.setdefault(prompt.identity, (prompt, tag))
    if not prompts:
        raise UserError("has no prompts", field=files.files[0])
    chosen, tags = zip(*prompts.values(), strict=True)
    return list(chosen), list(tags)


def _rows(path: Path, layout: PromptLayout, is_whole_file: bool) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a file with their positions; a whole file may be one prompt."""
    if is_whole_file:
        yield str(path), " ".join(read_text(path).split())
    elif path.suffix == ".tsv":
        yield from _read_tsv(path, layout)
    elif path.suffix in READERS:
        yield from READERS[path.suffix](path, layout)
    else:
        raise UserError(f"must be one of {', '.join([*READERS, '.tsv'])}", field=path)


def _read_tsv(path: Path, layout: PromptLayout) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the rows of a file with tabs between values and quotes without a meaning."""
    lines = [line for line in split_lines(read_text(path)) if line.strip()]
    header, *rows = [line.split("\t") for line in lines] or [[]]
    layout.check_columns(header, str(path))
    for number, values in enumerate(rows, 2):
        where = f"{path}:{number}"
        if len(values) != len(header):
            raise UserError(f"has {len(values)} values for {len(header)} columns", field=where)
        yield where, dict(zip(header, values, strict=True))


def _list_files(path: Path, source: PromptSource, option: str) -> list[Path]:
    """Return the file, or those of a folder that match the glob, in order of their names."""
    if source.is_glob and path.is_dir():
        pattern = Path(source.files).name
        found = (each for each in path.rglob(pattern) if each.is_file())
        files = sorted(found, key=lambda file: file.name)
        if not files:
            raise UserError(f"has no files {pattern}", field=option, value=str(path))
        return files
    if not os.path.isfile(path):
        hint = did_you_mean_file(path) or (
            "" if source.source == BUNDLED else fetch_command(source, option)
        )
        what = "is a directory, not a file" if path.is_dir() else "does not exist"
        raise UserError(what, field=option, value=str(path), hint=hint)
    return [path]


def cache_folder(source: PromptSource) -> Path:
    """Return where downloaded files are kept: a folder next to the cache of the hub."""
    from huggingface_hub import constants

    name = source.repository.replace("/", "--")
    return Path(constants.HF_HOME, "flow_grpo", "benchmarks", name, source.commit)


def _download(source: PromptSource, option: str) -> Path:
    """Return the file in the cache, downloaded from the pinned commit if it is not there."""
    path = cache_folder(source) / source.files
    if not source.is_glob and path.is_file():
        return path
    reason = "it consists of many files"
    if not source.is_glob:
        reason = "HF_HUB_OFFLINE is set" if is_offline() else _try_download(file_url(source), path)
        if not reason:
            return path
    raise UserError(
        f"is missing: the prompts are not in {path.parent}, and cannot be downloaded ({reason})",
        field=option,
        hint=f"on a machine with network access {fetch_command(source, option)}",
    )


def _download_from_hub(source: PromptSource, option: str) -> list[Path]:
    """Return the files of a dataset on the hub, downloaded if they are not in its cache."""
    name = f"{source.repository}@{source.commit}" if source.commit else source.repository
    try:
        return _list_files(download_dataset(name, [source.files]), source, option)
    except UserError as error:
        raise UserError(
            f"is missing: the prompts cannot be downloaded from the hub ({error.rule})",
            field=option,
            hint=f"on a machine with network access {fetch_command(source, option)}",
        ) from error


def _try_download(url: str, path: Path) -> str:
    """Download a file atomically; return "" or why it failed."""
    import requests

    try:
        with requests.get(url, timeout=TIMEOUT_SECONDS, stream=True) as response:
            response.raise_for_status()
            path.parent.mkdir(parents=True, exist_ok=True)
            size = 0
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                partial = Path(folder, path.name)
                with partial.open("wb") as file:
                    for part in response.iter_content(1 << 16):
                        size += len(part)
                        if size > MAX_BYTES:
                            raise OSError(f"it has more than {MAX_BYTES} bytes")
                        file.write(part)
                partial.replace(path)
    except requests.ConnectionError:
        return f"no connection to {RAW_URL}"
    except (requests.RequestException, OSError) as error:
        return first_line(error)
    return ""
