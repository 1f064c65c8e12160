"""Eight concurrent clients get the scores of their own images, each scored exactly once."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import local

import pytest
import requests
from server_process import TIMEOUT, Server, encoded
from sign_images import WORDS, prompt, sign

IMAGES, CLIENTS, WORKERS = 80, 8, 2
PER_REQUEST = 2


class Clients:
    """Threads that keep their connection to the server open between requests."""

    def __init__(self, server: Server) -> None:
        self._url = f"{server.url}/v1/score"
        self._thread = local()

    def score(self, contents: list[dict]) -> list[float]:
        with ThreadPoolExecutor(CLIENTS) as threads:
            answers = list(threads.map(self._post, contents))
        return [score for answer in answers for score in answer["scores"]]

    def _post(self, content: dict) -> dict:
        if not hasattr(self._thread, "session"):
            self._thread.session = requests.Session()
        response = self._thread.session.post(self._url, json=content, timeout=TIMEOUT)
        assert response.status_code == 200, response.text
        return response.json()


@pytest.mark.slow
def test_eight_clients_get_the_scores_of_their_own_signs(start: Callable[..., Server]) -> None:
    server = start("ocr", "--workers", str(WORKERS))
    words = [WORDS[i % len(WORDS)] for i in range(IMAGES)]
    # A third of the prompts ask for another word, so that mixed-up requests are detected.
    asked = [word if i % 3 else "XQJ" for i, word in enumerate(words)]
    files = {word: encoded(sign(word)) for word in WORDS}
    contents = [
        {
            "reward": "ocr",
            "images": [files[word] for word in words[first : first + PER_REQUEST]],
            "prompts": [prompt(word) for word in asked[first : first + PER_REQUEST]],
        }
        for first in range(0, IMAGES, PER_REQUEST)
    ]
    scores = Clients(server).score(contents)
    assert [score == 1.0 for score in scores] == [a == b for a, b in zip(asked, words, strict=True)]
    assert server.metric("images_scored_total", reward="ocr") == IMAGES
    assert server.metric("batch_images_sum", reward="ocr") == IMAGES  # each exactly once
    assert server.metric("images_failed_total", reward="ocr") == 0
    assert server.metric("requests_total") == IMAGES / PER_REQUEST
