"""Decoded images stay within the memory budget, however small their files are."""

import io
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import requests
from PIL import Image
from server_process import Server, base64_of, body, encoded, wait_until

from reward_server.image_decoding import DECODER_BYTES_PER_PIXEL, RGB_BYTES_PER_PIXEL

MB = 2**20
SLACK = 48  # MB for everything but images
SIDE = 2048
IMAGE_MB = SIDE * SIDE * RGB_BYTES_PER_PIXEL / MB  # 16


def png(mode: str = "1", side: int = SIDE) -> str:
    """Return an image of half a kilobyte."""
    return encoded(Image.new(mode, (side, side)))


def webp(side: int = SIDE) -> str:
    """Return an image of a few hundred bytes."""
    return encoded(Image.new("RGB", (side, side), "red"), "WEBP", lossless=True)


def jpeg(side: int = SIDE) -> str:
    """Return a progressive JPEG, whose coefficients are all in memory while it is decoded."""
    image = Image.new("CMYK", (side, side), (1, 2, 3, 4))
    return encoded(image, "JPEG", progressive=True, subsampling=0)


def deep_png(side: int = SIDE) -> str:
    buffer = io.BytesIO()
    Image.fromarray(np.full((side, side), 40_000, np.uint16)).save(buffer, "PNG")
    return base64_of(buffer.getvalue())


@pytest.mark.parametrize(
    ("kind", "make_image"),
    [
        ("PNG", lambda: png("RGBA")),
        ("PNG", lambda: png("LA")),
        ("PNG", deep_png),
        ("JPEG", jpeg),
        ("WEBP", webp),
    ],
    ids=["rgba", "grey and alpha", "16 bits", "jpeg", "webp"],
)
def test_decoding_takes_no_more_memory_than_reserved(
    start: Callable[..., Server], kind: str, make_image: Callable[[], str]
) -> None:
    image, count = make_image(), 4
    # One decoder at a time plus the results: exactly this budget suffices.
    need = SIDE * SIDE * (count * RGB_BYTES_PER_PIXEL + DECODER_BYTES_PER_PIXEL[kind]) // MB
    server = start("obey", "--max-memory-mb", str(need))
    before = server.memory_mb("VmHWM")
    assert server.score(body("obey", *["a"] * count, image=image)).status_code == 200
    assert server.memory_mb("VmHWM") < before + need + SLACK
    # one more image never fits
    response = server.score(body("obey", *["a"] * (count + 1), image=image))
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "too_many_pixels"
    assert "--max-memory-mb" in response.json()["error"]["message"]


@pytest.mark.parametrize("make_image", [png, webp], ids=["png", "webp"])
def test_many_tiny_files_stay_within_the_budget(
    start: Callable[..., Server], tmp_path: Path, make_image: Callable[[], str]
) -> None:
    """Without the budget, 14 KiB of requests took 5 GB."""
    limit = 192
    server = start("obey", "--max-memory-mb", str(limit))
    image, go = make_image(), tmp_path / "go"
    content = body("obey", *["abc"] * 4, image=image)  # 64 MB, and up to 64 MB more while decoding
    assert len(str(content)) < 20_000
    before = server.memory_mb("VmHWM")
    with ThreadPoolExecutor(12) as threads:
        holder = threads.submit(server.score, body("obey", f"wait {go}"))
        wait_until((tmp_path / "go.started").exists)
        flood = [threads.submit(server.score, content) for _ in range(10)]
        wait_until(lambda: any(f.done() for f in flood))  # some are rejected
        go.touch()
        answers = [f.result() for f in flood]
        assert holder.result().status_code == 200
    assert {a.status_code for a in answers} == {200, 429}
    for answer in answers:
        if answer.status_code == 200:
            assert answer.json()["scores"] == [3.0] * 4
        else:
            assert answer.json()["error"]["code"] == "queue_full"
            assert int(answer.headers["Retry-After"]) >= 1
    assert server.memory_mb("VmHWM") < before + limit + SLACK
    # Both the memory and its count are released.
    wait_until(lambda: server.memory_mb() < before + SLACK)
    assert server.score(body("obey", *["a"] * 8, image=make_image())).status_code == 200


def test_images_of_disconnected_clients_are_freed(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    server = start("obey", "--max-memory-mb", "192")
    image, go = png(), tmp_path / "go"
    before = server.memory_mb()
    with ThreadPoolExecutor(2) as threads:
        holder = threads.submit(server.score, body("obey", f"wait {go}"))
        wait_until((tmp_path / "go.started").exists)
        for _ in range(3):
            with server.connect() as client:
                _send(client, body("obey", *["abc"] * 8, image=image))
                wait_until(lambda: server.memory_mb() > before + 7 * IMAGE_MB)
            wait_until(lambda: server.memory_mb() < before + SLACK)
        after = threads.submit(server.score, body("obey", *["abc"] * 8, image=image))
        wait_until(lambda: server.memory_mb() > before + 7 * IMAGE_MB)
        go.touch()
        assert holder.result().status_code == 200
        assert after.result().json()["scores"] == [3.0] * 8


def _send(client: socket.socket, content: dict) -> None:
    request = requests.Request("POST", "http://x/v1/score", json=content).prepare()
    lines = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    client.sendall(
        f"POST /v1/score HTTP/1.1\r\nHost: localhost\r\n{lines}\r\n".encode() + request.body
    )
