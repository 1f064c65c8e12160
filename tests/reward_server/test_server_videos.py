"""Videos (whole, or single frames, depending on the reward) and source images at the server."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import requests
from PIL import Image
from server_process import GOOD, Server, body, encoded
from user_errors import raises_user_error

from flow_grpo.rewards import build_reward
from flow_grpo.rewards.frames import encode_png_base64

JPEG = "jpeg_compressibility"
WHOLE = """
import numpy as np

class Whole:
    '''The number of frames, and the mean of the last one.'''
    frames = "clip"
    min_frames = 2  # not enforced in calls

    def __call__(self, images, prompts, metadata):
        return [len(video) + np.asarray(video[-1]).mean() / 255 for video in images]

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


def noise_videos(*frames: int, size: int = 24) -> list[list[Image.Image]]:
    rng = np.random.default_rng(0)
    shape = (size, size, 3)
    return [
        [Image.fromarray(rng.integers(0, 255, shape, dtype=np.uint8)) for _ in range(count)]
        for count in frames
    ]


def request_of(reward: str, *videos: list[Image.Image]) -> dict:
    images = [[encoded(frame) for frame in video] for video in videos]
    return {"reward": reward, "images": images, "prompts": ["p"] * len(videos)}


def rejection(response: requests.Response) -> tuple[int, str, str]:
    error = response.json()["error"]
    assert "\n" not in error["message"]
    return response.status_code, error["code"], error["message"]


def test_videos_are_scored_as_in_process(server: Server) -> None:
    videos = noise_videos(5, 5, 5)
    for rule in ("first", "middle", "mean of 3"):
        options = {JPEG: {"frames": rule}}
        here = build_reward({JPEG: 1.0}, options=options)(videos, ["p"] * 3)[JPEG]
        there = build_reward({JPEG: 1.0}, options=options, servers={JPEG: server.url})
        np.testing.assert_array_equal(there(videos, ["p"] * 3)[JPEG], here)


def test_whole_videos_are_sent_to_a_reward_that_takes_them(server: Server) -> None:
    """A request has at most 12 images: these videos need three requests."""
    assert server.get("/v1/rewards").json()["clips"] == ["whole"]
    videos = noise_videos(7, 3, 1, 7)
    reward = build_reward({"whole": 1.0}, servers={"whole": server.url})
    expected = [len(video) + np.asarray(video[-1]).mean() / 255 for video in videos]
    np.testing.assert_allclose(reward(videos, ["p"] * 4)["whole"], expected)
    image = videos[0][0]  # a video of one frame
    expected = [1 + np.asarray(image).mean() / 255]
    np.testing.assert_allclose(reward([image], ["p"])["whole"], expected)


def test_a_run_with_too_few_frames_is_rejected_before_it_scores(server: Server) -> None:
    assert server.get("/v1/rewards").json()["min_frames"] == {"whole": 2}
    [video] = noise_videos(2)
    reward = build_reward({"whole": 1.0}, servers={"whole": server.url})
    reward.smoke_test_with(video, ["p"], [{}])
    with raises_user_error("at least 2 frames, not 1", field="reward 'whole'"):
        reward.smoke_test_with(video[0], ["p"], [{}])


def test_a_request_may_mix_images_and_videos(server: Server) -> None:
    """An image reward scores videos by the frame rule of the server."""
    [video] = noise_videos(5)
    images = [GOOD, [encoded(frame) for frame in video]]
    content = {"reward": JPEG, "images": images, "prompts": ["a", "b"]}
    image, of_video = server.score(content).json()["scores"]
    assert [image] == server.score(body(JPEG, "a")).json()["scores"]  # format of old clients
    assert of_video == pytest.approx(build_reward({JPEG: 1.0})([video], ["b"])[JPEG][0])
    answer = server.score({**content, "reward": "obey"}).json()
    assert answer["scores"] == [1.0, 1.0]
    assert answer["extras"] == {"images_in_call": [2.0, 2.0]}  # the first frame only


def test_rewards_on_the_server_get_source_images(server: Server) -> None:
    """A request has at most 12 images including sources: these need three requests."""
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


INVALID = {
    "a source too few": (
        body("sources", "a", "b", sources=[GOOD]),
        (422, "counts_differ", "2 images but 1 sources"),
    ),
    "an invalid mask": (
        body("masks", "a", "b", masks=[None, "AAAA"]),
        (422, "not_an_image", "masks[1] "),
    ),
    "too many masks": (
        body("masks", *"abcdefg", masks=[GOOD] * 7),
        (413, "too_many_images", "14 images, sources and masks in one request; at most 12"),
    ),
    "an invalid source": (
        body("sources", "a", "b", sources=[None, [GOOD, "AAAA"]]),
        (422, "not_an_image", "sources[1][1] "),
    ),
    "a source that is a number": (
        body("sources", "a", sources=[3]),
        (422, "invalid_request", "sources[0]: "),
    ),
    "too many sources": (
        body("sources", "a", sources=[[GOOD] * 12]),
        (413, "too_many_images", "13 images and sources in one request; at most 12"),
    ),
    "too many frames": (
        request_of("whole", *noise_videos(7, 6)),
        (413, "too_many_images", "13 frames of videos in one request; at most 12"),
    ),
    "too many pixels in total": (
        request_of("whole", *noise_videos(12, size=44)),
        (413, "too_many_pixels", "the images have 23232 pixels"),
    ),
    "a frame that is too large": (
        request_of("whole", noise_videos(2)[0] + noise_videos(1, size=45)[0]),
        (413, "image_too_large", "images[0][2] has 45 x 45 pixels"),
    ),
    "an invalid frame": (
        {**body("whole", "a"), "images": [[GOOD, "AAAA"]]},
        (422, "not_an_image", "images[0][1] "),
    ),
    "a video without frames": (
        {**body("whole", "a", "b"), "images": [GOOD, []]},
        (422, "invalid_request", "images[1]: "),
    ),
    "nested videos": (
        {**body("whole", "a"), "images": [[[GOOD]]]},
        (422, "invalid_request", "images[0]: "),
    ),
    "a prompt for each frame": (
        {**body("whole", "a", "b"), "images": [[GOOD, GOOD]]},
        (422, "counts_differ", "1 images but 2 prompts"),
    ),
}


@pytest.mark.parametrize("case", INVALID)
def test_an_invalid_video_is_rejected_in_one_line(server: Server, case: str) -> None:
    content, (status, code, message) = INVALID[case]
    seen = rejection(server.score(content))
    assert seen[:2] == (status, code)
    assert seen[2].startswith(message)


def test_the_client_reports_why_a_video_is_too_large(server: Server) -> None:
    reward = build_reward({"whole": 1.0}, servers={"whole": server.url})
    scores = reward(noise_videos(13, 2), ["p"] * 2)["whole"]
    assert np.isnan(scores).tolist() == [True, False]
    assert "413 13 frames of videos in one request; at most 12" in reward.last_errors["whole"]


def test_a_server_of_an_older_version_gets_images() -> None:
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
        videos = noise_videos(5)
        scores = build_reward({JPEG: 1.0}, servers={JPEG: url})(videos, ["p"])[JPEG]
        older.shutdown()
    assert scores.tolist() == [4.0]
    assert sent == [encode_png_base64(videos[0][place]) for place in (0, 1, 3, 4)]


def test_servers_must_agree_on_whole_videos_or_frames(server: Server, start: Callable) -> None:
    videos = start("obey", "--options", '{"obey": {"frames": "clip"}}')
    assert videos.get("/v1/rewards").json()["clips"] == ["obey"]
    with raises_user_error("http", ", http"):
        build_reward({"obey": 1.0}, servers={"obey": f"{server.url},{videos.url}"})


def test_frame_rules_incompatible_with_the_server_are_rejected(server: Server) -> None:
    with raises_user_error("'whole'"):
        ask(server, "whole", "middle")
    with raises_user_error("frames='clip'", f"'{JPEG}'"):
        ask(server, JPEG, "clip")
    with raises_user_error(f"reward_options.{JPEG}.frames='lst'"):
        ask(server, JPEG, "lst")


def ask(server: Server, name: str, rule: str) -> None:
    build_reward({name: 1.0}, options={name: {"frames": rule}}, servers={name: server.url})
