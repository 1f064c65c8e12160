"""Download models and datasets of ModelScope (https://modelscope.cn): `modelscope:owner/name`.

The `modelscope` package downloads them to its own cache, which later runs reuse. All other code
reads the local directory of the download.
"""

import re
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec

from flow_grpo.errors import UserError, first_line

PREFIX = "modelscope:"
ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
DEFAULT_REVISION = "main"  # of the Hugging Face Hub; ModelScope's is "master"


def is_modelscope(source: str) -> bool:
    """Return whether `source` has the prefix of ModelScope."""
    return source.startswith(PREFIX)


def check_modelscope(source: str, field: str) -> None:
    """Raise a UserError for a malformed name, or if the `modelscope` package is missing."""
    if not ID.fullmatch(source.removeprefix(PREFIX)):
        raise UserError(
            "is not a name on ModelScope",
            field=field,
            value=source,
            hint=f"write {PREFIX}owner/name or {PREFIX}owner/name@revision",
        )
    if find_spec("modelscope") is None:
        raise UserError(
            "needs the package modelscope",
            field=field,
            value=source,
            hint="pip install modelscope",
        )


def local_model(
    source: str, revision: str = DEFAULT_REVISION, field: str = "pretrained.model"
) -> str:
    """Download a model of ModelScope and return its directory; return other sources unchanged.

    Args:
        source: Directory, hub id, or name with the prefix of ModelScope.
        revision: Revision, unless the name contains one.
        field: Name of the setting, for error messages.
    """
    return _download(source, revision, field, "model") if is_modelscope(source) else source


def download_modelscope_dataset(source: str, field: str, patterns: Sequence[str] = ()) -> str:
    """Download a dataset of ModelScope and return its directory.

    Args:
        source: Name with the prefix of ModelScope.
        field: Name of the setting, for error messages.
        patterns: Globs of the files to download; empty for all files.
    """
    return _download(source, DEFAULT_REVISION, field, "dataset", tuple(patterns))


@cache
def _download(
    source: str, revision: str, field: str, kind: str, patterns: tuple[str, ...] = ()
) -> str:
    check_modelscope(source, field)
    hub = import_module("modelscope.hub.snapshot_download")
    name, _, pinned = source.removeprefix(PREFIX).partition("@")
    options = {"allow_file_pattern": list(patterns)} if patterns else {}
    if pinned or revision != DEFAULT_REVISION:
        options["revision"] = pinned or revision
    download = hub.snapshot_download if kind == "model" else hub.dataset_snapshot_download
    try:
        folder = download(name, **options)
        if folder is None:  # modelscope has logged the cause
            raise OSError("no file list")
        return str(folder)
    except Exception as error:  # many types: no network, unknown name, access denied
        raise UserError(
            f"cannot be downloaded from ModelScope ({first_line(error)})",
            field=field,
            value=source,
            hint=f"check the name, or download it elsewhere and pass its directory as {field}",
        ) from error
