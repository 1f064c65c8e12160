"""Pictures that are uploaded to the demo: how large they may be, how many stay, and which are
read."""

import shutil
from pathlib import Path
from typing import Any

from flow_grpo.errors import UserError
from flow_grpo.files import lies_in

MOST_BYTES = 20 * 2**20  # of a file
ENVELOPE = 2**14  # what a form has besides
KEPT = 128  # folders of uploads and drawings, whose files can still be looked at


class Keeper:
    """The folder that gradio keeps files in: what is there at the start, and the newest."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.own = folder, {*folder.iterdir()}

    def tidy(self) -> None:
        others = [path for path in self.folder.iterdir() if path not in self.own]
        for path in sorted(others, key=_changed)[:-KEPT]:
            shutil.rmtree(path, ignore_errors=True)

    def read(self, given: Any) -> bytes | None:
        """What a browser says of an upload; no other file of this machine is read."""
        if given is None:
            return None
        path = given.get("path") if isinstance(given, dict) else None
        known = isinstance(path, str) and lies_in(self.folder, Path(path))
        if not known or not Path(path).is_file():
            raise UserError("the picture is not here any more; upload it again")
        return Path(path).read_bytes()


class BoundedUploads:
    """Around an ASGI app: an upload has one small file, and makes place for itself."""

    def __init__(self, app, keeper: Keeper) -> None:
        self.app, self.keeper = app, keeper

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http" or not scope["path"].endswith("/upload"):
            return await self.app(scope, receive, send)
        length = dict(scope["headers"]).get(b"content-length", b"")
        if length.isdigit() and int(length) <= MOST_BYTES + ENVELOPE:
            self.keeper.tidy()
            return await self.app(scope, receive, send)
        await send({"type": "http.response.start", "status": 413, "headers": []})
        told = f"a picture of {MOST_BYTES} bytes at most can be uploaded"
        await send({"type": "http.response.body", "body": told.encode()})


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # gone meanwhile
        return 0.0
