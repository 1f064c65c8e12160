"""Limits on images uploaded to the demo: their size, how many are kept, which are read."""

import shutil
from pathlib import Path
from typing import Any

from flow_grpo.errors import UserError
from flow_grpo.untrusted_files import is_inside

MAX_FILE_BYTES = 20 * 2**20
FORM_OVERHEAD = 2**14  # other bytes of an upload form
MAX_FOLDERS = 128  # directories of uploads and outputs that are kept


class UploadStore:
    """Gradio's upload directory; only its initial content and the newest uploads are kept."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.initial = folder, {*folder.iterdir()}

    def remove_old_folders(self) -> None:
        """Delete all but the newest `MAX_FOLDERS` directories of uploads."""
        others = [path for path in self.folder.iterdir() if path not in self.initial]
        for path in sorted(others, key=_modified_time)[:-MAX_FOLDERS]:
            shutil.rmtree(path, ignore_errors=True)

    def read(self, upload: Any) -> bytes | None:
        """Return the content of an upload, given as gradio's dict; never reads another file.

        Raises:
            UserError: If the file is not in the directory or no longer exists.
        """
        if upload is None:
            return None
        path = upload.get("path") if isinstance(upload, dict) else None
        known = isinstance(path, str) and is_inside(self.folder, Path(path))
        if not known or not Path(path).is_file():
            raise UserError("the uploaded image no longer exists", hint="upload it again")
        return Path(path).read_bytes()


class UploadLimitMiddleware:
    """ASGI middleware that limits the size of uploads and removes old files."""

    def __init__(self, app, store: UploadStore) -> None:
        self.app, self.store = app, store

    async def __call__(self, scope, receive, send) -> None:
        """Reject uploads that are too large or of unknown size with status 413."""
        if scope["type"] != "http" or not scope["path"].endswith("/upload"):
            return await self.app(scope, receive, send)
        length = dict(scope["headers"]).get(b"content-length", b"")
        if length.isdigit() and int(length) <= MAX_FILE_BYTES + FORM_OVERHEAD:
            self.store.remove_old_folders()
            return await self.app(scope, receive, send)
        await send({"type": "http.response.start", "status": 413, "headers": []})
        message = f"an uploaded image may have at most {MAX_FILE_BYTES} bytes"
        await send({"type": "http.response.body", "body": message.encode()})


def _modified_time(path: Path) -> float:
    """Return the modification time in seconds, or 0 if the path was removed."""
    try:
        return path.stat().st_mtime
    except OSError:  # already removed
        return 0.0
