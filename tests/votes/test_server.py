"""The HTTP API of the vote server: votes, groups of runs, and what it rejects."""

import base64
import io
import threading
from collections.abc import Iterator

import pytest
import requests
from PIL import Image, PngImagePlugin

from flow_grpo.votes.ask import ORDERS
from flow_grpo.votes.book import VoteBook
from flow_grpo.votes.image_files import ImageFiles
from flow_grpo.votes.server import VoteService, build_server

TOKEN = {"Authorization": "Bearer secret"}


class Server:
    """A vote server in this process, with a token, and requests to it."""

    def __init__(self, folder) -> None:
        self.folder = folder
        self.book = VoteBook(folder, ORDERS["random"])
        service = VoteService(self.book, ImageFiles(folder), token="secret")
        self.http = build_server(service, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}).start()

    def request(self, method: str, path: str, body=None, headers=TOKEN, **options):
        if body is not None:
            options["json"] = body
        return requests.request(method, self.url + path, headers=headers, timeout=60, **options)

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.book.close()


@pytest.fixture
def server(tmp_path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.close()


def png(level: int, size: tuple[int, int] = (8, 8), **options) -> str:
    file = io.BytesIO()
    Image.new("RGB", size, (level, 0, 0)).save(file, "PNG", **options)
    return base64.b64encode(file.getvalue()).decode()


def group(**changes) -> dict:
    body = {"run": "my run", "key": "run-1:epoch-2", "prompts": ["a cat", "a dog", "a cat"]}
    return {**body, "images": [png(0), png(99), png(255)], "pairs_per_image": 1, **changes}


def test_a_group_is_voted_on_and_read_back(server):
    assert server.request("POST", "/api/groups", group()).json()["pairs"] == [[0, 2]]
    assert server.request("POST", "/api/groups", group()).status_code == 200
    [ballot] = server.request("GET", "/api/next?voter=ann").json()["ballots"]
    assert ballot["prompt"] == "a cat"
    pixels = {}
    for image in ballot["images"]:
        response = server.request("GET", f"/{image['url']}")
        assert response.headers["Content-Type"] == "image/png"
        shown = Image.open(io.BytesIO(response.content))
        pixels[image["choice"]] = shown.getpixel((0, 0))[0]
    assert pixels == {"first": 0, "second": 255}
    vote = {"id": "1", "ballot": ballot["id"], "voter": " ann ", "choice": "second"}
    assert server.request("POST", "/api/vote", vote).json() == {"counted": True}
    assert server.request("POST", "/api/vote", vote).json() == {"counted": True}
    result = server.request("GET", "/api/groups/run-1:epoch-2").json()
    assert result == {"pairs": [[0, 2, 0, 1, 0]], "done": True}
    content = server.request("GET", "/api/next?voter=ann").json()
    assert content == {
        "ballots": [],
        "progress": {"answered": 1, "left": 0},
        "state": "wait",
        "last": "1",
    }
    undo = {"voter": "ann", "vote": "1"}
    for _ in range(2):
        assert server.request("POST", "/api/undo", undo).json() == {"undone": "1"}
    assert server.request("GET", "/api/groups/run-1:epoch-2").json()["done"] is False
    assert server.request("DELETE", "/api/groups/run-1:epoch-2").status_code == 200
    assert server.request("GET", "/api/next?voter=ann").json()["ballots"] == []


def test_posted_images_lose_their_metadata_and_equal_ones_are_stored_once(server):
    comment = PngImagePlugin.PngInfo()
    comment.add_text("comment", "private")
    images = [png(7), png(7, pnginfo=comment), png(8)]
    body = group(images=images, prompts=["a"] * 3)
    body["sources"] = [png(50)] * 3
    assert server.request("POST", "/api/groups", {**body, "pairs_per_image": 2}).ok
    files = [*(server.folder / "images").iterdir()]
    assert len(files) == 3
    assert not any(b"private" in each.read_bytes() for each in files)
    [ballot, _] = server.request("GET", "/api/next?voter=ann").json()["ballots"]
    assert len(ballot["sources"]) == 1
    rows = server.request("GET", "/api/groups/run-1:epoch-2").json()["pairs"]
    assert rows == [[0, 1, 0, 0, 1], [0, 2, 0, 0, 0], [1, 2, 0, 0, 0]]  # equal images are a tie


def test_edits_of_different_source_images_are_not_compared(server):
    sources = [png(50), [png(50)], [png(50), png(60)]]
    body = group(prompts=["a"] * 3, sources=sources, pairs_per_image=2)
    assert server.request("POST", "/api/groups", body).json()["pairs"] == [[0, 1]]


def test_the_token_and_the_host_are_required(server):
    paths = ("/api/next?voter=ann", "/images/x.png", "/api/groups/x", "/other")
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}):
        assert {server.request("GET", p, headers=headers).status_code for p in paths} == {401}
        assert server.request("POST", "/api/groups", group(), headers).status_code == 401
    assert server.request("GET", "/healthz", headers={}).json() == {"status": "ok"}
    foreign = {**TOKEN, "Host": "example.org"}
    assert server.request("GET", "/", headers=foreign).status_code == 403
    assert not list((server.folder / "images").iterdir())


def test_the_page_may_load_nothing_from_elsewhere(server):
    page = server.request("GET", "/", headers={})
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    assert "unsafe" not in page.headers["Content-Security-Policy"]
    assert page.headers["X-Content-Type-Options"] == "nosniff"
    assert "Set-Cookie" not in page.headers
    for path in ("/page.js", "/page.css"):
        assert server.request("GET", path, headers={}).status_code == 200


def test_only_images_of_ballots_are_served(server):
    (server.folder / "secret.png").write_bytes(b"secret")
    server.request("POST", "/api/groups", group())
    for name in ("secret.png", "../secret.png", "%2e%2e%2fsecret.png", "..%2fvotes.jsonl", "."):
        assert server.request("GET", f"/images/{name}").status_code == 404, name
    assert server.request("GET", "/votes.jsonl").status_code == 404


@pytest.mark.parametrize(
    ("changes", "status", "shown"),
    [
        ({"images": [png(0), "!", png(1)]}, 422, "images[1]"),
        ({"images": [png(0), png(1), base64.b64encode(b"GIF89a" * 9).decode()]}, 422, "images[2]"),
        ({"images": [png(0)[:60], png(1), png(2)]}, 422, "images[0]"),
        ({"images": [png(0, (60_000, 300)), png(1), png(2)]}, 422, "60000 x 300"),
        ({"images": [png(0)]}, 422, "1 images"),
        ({"prompts": ["a", "b", 3]}, 422, "prompts[2]"),
        ({"sources": [None, png(0)[:60], None]}, 422, "sources[1]"),
        ({"key": "../x"}, 422, "key"),
        ({"run": ""}, 422, "run"),
        ({"votes_per_pair": 0}, 422, "votes_per_pair"),
        ({"pairs_per_image": True}, 422, "pairs_per_image"),
        ({"other": 1}, 422, "other"),
        ({"images": []}, 422, "images"),
    ],
)
def test_an_invalid_group_is_rejected_in_one_line(server, changes, status, shown):
    response = server.request("POST", "/api/groups", group(**changes))
    assert response.status_code == status
    message = response.json()["error"]["message"]
    assert shown in message
    assert "\n" not in message
    assert server.request("GET", "/api/next?voter=ann").json()["ballots"] == []


def test_invalid_requests_are_rejected(server):
    vote = {"id": "1", "ballot": "none", "voter": "ann", "choice": "first"}
    assert server.request("POST", "/api/vote", vote).status_code == 404
    for change in ({"voter": ""}, {"voter": "x" * 41}, {"voter": "a\0"}, {"choice": "left"}):
        assert server.request("POST", "/api/vote", {**vote, **change}).status_code == 422
    for change in ({"id": "<b>"}, {"ballot": 3}, {"voter": ["ann"]}, {"more": 1}):
        assert server.request("POST", "/api/vote", {**vote, **change}).status_code == 422
    assert server.request("POST", "/api/vote", ["x"]).status_code == 422
    form = {**TOKEN, "Content-Type": "text/plain"}  # what another web page can send
    assert server.request("POST", "/api/vote", None, form, data='{"id": 1}').status_code == 415
    typed = {**TOKEN, "Content-Type": "application/json"}
    for data, status in {"{": 400, "[" * 2000: 400, "x" * 2**17: 413}.items():
        assert server.request("POST", "/api/vote", None, typed, data=data).status_code == status
    long = {**typed, "Content-Length": "9" * 5000}
    assert server.request("POST", "/api/vote", None, long).status_code == 411
    for path in ("/api/groups/none", "/api/groups/", "/api/next?voter=", "/a"):
        assert server.request("GET", path).status_code in (404, 422)
    assert server.request("PUT", "/api/vote", vote).status_code == 501
    assert not server.book.votes_by_ballot()


def test_a_changed_group_with_a_known_key_is_a_conflict(server):
    server.request("POST", "/api/groups", group())
    changed = server.request("POST", "/api/groups", group(images=[png(1), png(2), png(3)]))
    assert (changed.status_code, changed.json()["error"]["code"]) == (409, "conflict")


def test_a_full_disk_is_a_temporary_error(server, monkeypatch):
    server.request("POST", "/api/groups", group())
    [ballot] = server.request("GET", "/api/next?voter=ann").json()["ballots"]
    vote = {"id": "1", "ballot": ballot["id"], "voter": "ann", "choice": "tie"}

    def fail(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("flow_grpo.votes.store.os.fsync", fail)
        assert server.request("POST", "/api/vote", vote).status_code == 503
    assert server.request("GET", "/api/next?voter=ann").json()["progress"]["answered"] == 0
    assert server.request("POST", "/api/vote", vote).json() == {"counted": True}


def test_many_voters_at_once_are_all_stored(server):
    server.request("POST", "/api/groups", group(votes_per_pair=30))
    [ballot] = server.request("GET", "/api/next?voter=ann").json()["ballots"]

    def vote(number: int) -> None:
        body = {"id": str(number), "ballot": ballot["id"], "voter": f"v{number}", "choice": "first"}
        for _ in range(2):
            assert server.request("POST", "/api/vote", body).json() == {"counted": True}

    threads = [threading.Thread(target=vote, args=(n,)) for n in range(30)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    result = server.request("GET", "/api/groups/run-1:epoch-2").json()
    assert result == {"pairs": [[0, 2, 30, 0, 0]], "done": True}
