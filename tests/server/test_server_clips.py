"""Videos at the server: whole clips for rewards that take them, frames for all others; and pictures
with those that they were made from."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import requests
from PIL import Image
from serving import GOOD, Server, body, encoded

from flow_grpo.errors import UserError
from flow_grpo.rewards import build_reward
from flow_grpo.rewards.frames import png_base64

JPEG = "jpeg_compressibility"
WHOLE = """
import numpy as np

class Whole:
    '''The number of frames, and the mean of the last one.'''
    frames = "clip"

    def __call__(self, images, prompts, metadata):
        return [len(clip) + np.asarray(clip[-1]).mean() / 255 for clip in images]

def sources(images, prompts, metadata):
    '''The colour of each source, its number within the row counted.'''
    rows = [row.get("source", "none") for row in metadata]
    rows = [row if isinstance(row, list) else [row] for row in rows]
    return [
        sum(10**n * each.getpixel((0, 0))[0] for n, each in enumerate(row) if each != "none")
        for row in rows
    ]

def masks(images, prompts, metadata):
    return [row["mask"].convert("L").getpixel((0, 0)) if "mask" in row else -1 for row in metadata]
"""
LIMITS = ("--max-images", "12", "--max-pixels", "2000", "--max-queue-pixels", "20000")


@pytest.fixture(scope="module", params=[(), ("--isolate",)], ids=["threads", "isolated"])
def server(request: pytest.FixtureRequest, start: Callable, stub_folder: Path) -> Server:
    (stub_folder / "whole.py").write_text(WHOLE)
    own = ("whole=whole:Whole", "sources=whole:sources", "masks=whole:masks")
    custom = [word for each in own for word in ("--custom", each)]
    options = (*custom, "--options", '{"obey": {"frames": "first"}}')
    return start(f"{JPEG},obey", *options, *LIMITS, *request.param)


def noise_clips(*frames: int, size: int = 24) -> list[list[Image.Image]]:
    rng = np.random.default_rng(0)
    shape = (size, size, 3)
    return [
        [Image.fromarray(rng.integers(0, 255, shape, dtype=np.uint8)) for _ in range(count)]
        for count in frames
    ]


def request_of(reward: str, *clips: list[Image.Image]) -> dict:
    images = [[encoded(frame) for frame in clip] for clip in clips]
    return {"reward": reward, "images": images, "prompts": ["p"] * len(clips)}


def refusal(response: requests.Response) -> tuple[int, str, str]:
    error = response.json()["error"]
    assert "\n" not in error["message"]
    return response.status_code, error["code"], error["message"]


def test_a_run_scores_clips_there_as_in_its_own_process(server: Server) -> None:
    clips = noise_clips(5, 5, 5)
    for rule in ("first", "middle", "mean of 3"):
        options = {JPEG: {"frames": rule}}
        here = build_reward({JPEG: 1.0}, options=options)(clips, ["p"] * 3)[JPEG]
        there = build_reward({JPEG: 1.0}, options=options, servers={JPEG: server.url})
        np.testing.assert_array_equal(there(clips, ["p"] * 3)[JPEG], here)


def test_whole_clips_travel_to_a_reward_that_takes_them(server: Server) -> None:
    """12 images make up a request: these clips need three."""
    assert server.get("/v1/rewards").json()["clips"] == ["whole"]
    clips = noise_clips(7, 3, 1, 7)
    reward = build_reward({"whole": 1.0}, servers={"whole": server.url})
    expected = [len(clip) + np.asarray(clip[-1]).mean() / 255 for clip in clips]
    np.testing.assert_allclose(reward(clips, ["p"] * 4)["whole"], expected)
    picture = clips[0][0]  # a clip of one frame
    expected = [1 + np.asarray(picture).mean() / 255]
    np.testing.assert_allclose(reward([picture], ["p"])["whole"], expected)


def test_a_request_may_mix_pictures_and_clips(server: Server) -> None:
    """Clips for a picture reward are scored by the rule that the server was given."""
    [clip] = noise_clips(5)
    images = [GOOD, [encoded(frame) for frame in clip]]
    content = {"reward": JPEG, "images": images, "prompts": ["a", "b"]}
    picture, of_clip = server.score(content).json()["scores"]
    assert [picture] == server.score(body(JPEG, "a")).json()["scores"]  # as old clients send it
    assert of_clip == pytest.approx(build_reward({JPEG: 1.0})([clip], ["b"])[JPEG][0])
    answer = server.score({**content, "reward": "obey"}).json()
    assert answer["scores"] == [1.0, 1.0]
    assert answer["extras"] == {"images_in_call": [2.0, 2.0]}  # the first frame alone


def test_rewards_there_see_what_a_picture_was_made_from(server: Server) -> None:
    """12 images make up a request, sources among them: these need three."""
    colours = [Image.new("RGB", (8, 8), (n, 0, 0)) for n in range(8)]
    metadata = [{"source": colours[n], "n": n} for n in range(8)]
    metadata += [{"source": colours[1:3]}, {}, {"source": "none"}]
    reward = build_reward({"sources": 1.0}, servers={"sources": server.url})
    scores = reward([colours[0]] * 11, ["p"] * 11, metadata)["sources"]
    assert scores.tolist() == [*range(8), 21, 0, 0]
    assert metadata[1] == {"source": colours[1], "n": 1}
    content = body("sources", "a", "b", sources=[encoded(colours[3]), None])
    assert server.score(content).json()["scores"] == [3, 0]
    grey = Image.new("L", (8, 8), 7)
    rows = [{"source": colours[1], "mask": grey}] * 8 + [{}]
    reward = build_reward({"masks": 1.0}, servers={"masks": server.url})
    images = [colours[0]] * 9
    assert reward(images, ["p"] * 9, rows)["masks"].tolist() == [7] * 8 + [-1]
    assert rows[0] == {"source": colours[1], "mask": grey}


REFUSED = {
    "a source too few": (
        body("sources", "a", "b", sources=[GOOD]),
        (422, "counts_differ", "2 images but 1 sources; send one per image or none"),
    ),
    "a mask that is no picture": (
        body("masks", "a", "b", masks=[None, "AAAA"]),
        (422, "not_an_image", "masks[1] is not an image"),
    ),
    "too many masks": (
        body("masks", *"abcdefg", masks=[GOOD] * 7),
        (413, "too_many_images", "14 images, sources and masks in one request; at most 12 are"),
    ),
    "a source that is no picture": (
        body("sources", "a", "b", sources=[None, [GOOD, "AAAA"]]),
        (422, "not_an_image", "sources[1][1] is not an image"),
    ),
    "a source that is a number": (
        body("sources", "a", sources=[3]),
        (422, "invalid_request", "sources[0]: input should be a valid string"),
    ),
    "too many sources": (
        body("sources", "a", sources=[[GOOD] * 12]),
        (413, "too_many_images", "13 images and sources in one request; at most 12 are allowed"),
    ),
    "too many frames": (
        request_of("whole", *noise_clips(7, 6)),
        (413, "too_many_images", "13 frames of clips in one request; at most 12 are allowed"),
    ),
    "too many pixels in all": (
        request_of("whole", *noise_clips(12, size=44)),
        (413, "too_many_pixels", "the images have 23232 pixels together, at most 20000"),
    ),
    "a frame that is too large": (
        request_of("whole", noise_clips(2)[0] + noise_clips(1, size=45)[0]),
        (413, "image_too_large", "images[0][2] has 45 x 45 pixels"),
    ),
    "a frame that is no picture": (
        {**body("whole", "a"), "images": [[GOOD, "AAAA"]]},
        (422, "not_an_image", "images[0][1] is not an image"),
    ),
    "a clip without frames": (
        {**body("whole", "a", "b"), "images": [GOOD, []]},
        (422, "invalid_request", "images[1]: input should be a valid string, or a list of one or"),
    ),
    "clips in a clip": (
        {**body("whole", "a"), "images": [[[GOOD]]]},
        (422, "invalid_request", "images[0]: input should be a valid string"),
    ),
    "a prompt for each frame": (
        {**body("whole", "a", "b"), "images": [[GOOD, GOOD]]},
        (422, "counts_differ", "1 images but 2 prompts"),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_clip_that_cannot_be_scored_is_refused_in_one_line(server: Server, case: str) -> None:
    content, (status, code, message) = REFUSED[case]
    seen = refusal(server.score(content))
    assert seen[:2] == (status, code)
    assert seen[2].startswith(message)


def test_the_client_tells_why_a_clip_is_too_large(server: Server) -> None:
    reward = build_reward({"whole": 1.0}, servers={"whole": server.url})
    scores = reward(noise_clips(13, 2), ["p"] * 2)["whole"]
    assert np.isnan(scores).tolist() == [True, False]
    assert "413 13 frames of clips in one request; at most 12" in reward.last_errors["whole"]


def test_a_server_of_an_older_version_gets_pictures() -> None:
    sent = []

    class Older(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            limits = {"max_images": 8, "max_body_bytes": 2**20}
            self._answer({"rewards": [{"name": JPEG, "ready": True}], "limits": limits})

        def do_POST(self) -> None:
            content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            sent.extend(content["images"])
            self._answer({"reward": JPEG, "scores": [float(len(sent))] * len(content["images"])})

        def _answer(self, content: dict) -> None:
            data = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Older) as older:
        threading.Thread(target=older.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{older.server_port}"
        clips = noise_clips(5)
        scores = build_reward({JPEG: 1.0}, servers={JPEG: url})(clips, ["p"])[JPEG]
        older.shutdown()
    assert scores.tolist() == [4.0]
    assert sent == [png_base64(clips[0][place]) for place in (0, 1, 3, 4)]


def test_servers_must_agree_on_what_they_take(server: Server, start: Callable) -> None:
    clips = start("obey", "--options", '{"obey": {"frames": "clip"}}')
    assert clips.get("/v1/rewards").json()["clips"] == ["obey"]
    with pytest.raises(UserError, match=r"some of http.*, http.* take whole clips and some"):
        build_reward({"obey": 1.0}, servers={"obey": f"{server.url},{clips.url}"})


def test_rules_that_do_not_fit_the_server_are_refused(server: Server) -> None:
    with pytest.raises(UserError, match="'whole' takes whole clips; leave it out"):
        ask(server, "whole", "middle")
    with pytest.raises(UserError, match=f"frames='clip', but '{JPEG}' scores pictures"):
        ask(server, JPEG, "clip")
    with pytest.raises(UserError, match=rf"reward_options\.{JPEG}\.frames='lst' must be"):
        ask(server, JPEG, "lst")


def ask(server: Server, name: str, rule: str) -> None:
    build_reward({name: 1.0}, options={name: {"frames": rule}}, servers={name: server.url})
