"""A vote server process and a scripted voter that prefers the brighter image."""

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import requests
from PIL import Image
from server_process import ROOT, TIMEOUT

TOKEN = "secret of the voters"
TOKEN_VARIABLE = "REWARD_SERVER_TOKEN"


class VoteServer:
    """`scripts/vote.py` on a free port, with a token."""

    def __init__(self, folder: Path) -> None:
        self._command = [sys.executable, "scripts/vote.py", "--out", str(folder)]
        self._command += ["--token-env", TOKEN_VARIABLE]
        self.votes = folder / "votes.jsonl"
        self.start(port=0)

    def start(self, port: int) -> None:
        self.process = subprocess.Popen(
            [*self._command, "--port", str(port)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), TOKEN_VARIABLE: TOKEN},
            stdout=subprocess.PIPE,
            text=True,
        )
        words = self.process.stdout.readline().split()
        self.url = next(word for word in words if word.startswith("http")).partition("/#")[0]

    def restart(self) -> None:
        """Start a killed server again on the same port."""
        self.start(port=int(self.url.rpartition(":")[2]))

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def __enter__(self) -> "VoteServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def prefer_brighter(first: Image.Image, second: Image.Image) -> str:
    one, two = (float(np.asarray(image).mean()) for image in (first, second))
    return "tie" if one == two else "first" if one > two else "second"


class Voter:
    """Votes through the HTTP API, as the page does."""

    def __init__(self, server: VoteServer, name: str = "ann") -> None:
        self._server, self._name = server, name
        self._headers = {"Authorization": f"Bearer {TOKEN}"}

    def shown(self) -> list[dict[str, Any]]:
        """Return the next ballots."""
        return self._get(f"/api/next?voter={self._name}").json()["ballots"]

    def progress(self) -> dict[str, int]:
        """Return the numbers of ballots that are answered and left."""
        return self._get(f"/api/next?voter={self._name}").json()["progress"]

    def vote(self, ballot: dict[str, Any], choice: str) -> requests.Response:
        """Send a vote, whose id depends on voter and ballot only."""
        body = {"id": f"{self._name}-{ballot['id']}", "ballot": ballot["id"]}
        body |= {"voter": self._name, "choice": choice}
        url = f"{self._server.url}/api/vote"
        return requests.post(url, json=body, headers=self._headers, timeout=TIMEOUT)

    def vote_on_all(
        self, most: int = 10**6, prefer: Callable[[Image.Image, Image.Image], str] = prefer_brighter
    ) -> int:
        """Vote on up to `most` ballots, as long as there are any; return on how many."""
        count = 0
        while count < most and (ballots := self.shown()):
            ballot = ballots[0]
            urls = {image["choice"]: image["url"] for image in ballot["images"]}
            first, second = (self._image(urls[name]) for name in ("first", "second"))
            assert self.vote(ballot, prefer(first, second)).json() == {"counted": True}
            count += 1
        return count

    def _image(self, path: str) -> Image.Image:
        return Image.open(io.BytesIO(self._get(f"/{path}").content))

    def _get(self, path: str) -> requests.Response:
        return requests.get(self._server.url + path, headers=self._headers, timeout=TIMEOUT)
