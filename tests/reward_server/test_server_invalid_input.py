"""Invalid requests get a status, a code and a helpful message, and the server keeps working."""

import base64
import http.client
import io
import json
import re
import socket
from collections.abc import Callable, Iterator

import pytest
import requests
from malicious_files import png_header
from PIL import Image
from server_process import GOOD, Server, base64_of, body, encoded, error

JPEG = "jpeg_compressibility"
PNG = base64.b64decode(GOOD)


@pytest.fixture(scope="module")
def server(start: Callable[..., Server]) -> Server:
    return start(f"{JPEG},obey", "--max-images", "8", "--max-pixels", "1000000")


@pytest.fixture(autouse=True)
def _still_serves(server: Server) -> Iterator[None]:
    yield
    answer = server.score(body(JPEG, "a", "b")).json()
    assert answer["errors"] == [None, None]
    assert answer["scores"][0] == answer["scores"][1] < 0


def rejection(response: requests.Response) -> tuple[int, str, str]:
    """Return status, code and message after checking the format of the error."""
    assert response.headers["Content-Type"] == "application/json"
    content = response.json()
    assert list(content) == ["error"]
    assert list(content["error"]) == ["code", "message"]
    code, message = content["error"]["code"], content["error"]["message"]
    assert "\n" not in message
    assert 10 < len(message) < 400
    return response.status_code, code, message


def bomb(side: int = 20_000) -> str:
    buffer = io.BytesIO()
    Image.new("1", (side, side)).save(buffer, "PNG")
    return base64_of(buffer.getvalue())


def header_only(width: int, height: int) -> str:
    return base64_of(png_header(width, height))


def other_format(kind: str) -> str:
    return encoded(Image.new("RGB", (8, 8)), kind)


def photo(kind: str) -> bytes:
    noise = Image.effect_noise((64, 64), 80).convert("RGB")
    return base64.b64decode(encoded(noise, kind))


IMAGES = {
    "not base64": ("*not base64*", 422, "invalid_base64", r"images\[1\].*standard base64"),
    "not ascii": ("héé=", 422, "invalid_base64", r"images\[1\] is not base64"),
    "wrong padding": (GOOD[:-1], 422, "invalid_base64", r"images\[1\] is not base64"),
    "line breaks": (f"{GOOD[:8]}\n{GOOD[8:]}", 422, "invalid_base64", "without line breaks"),
    "a data URL": (f"data:image/png;base64,{GOOD}", 422, "invalid_base64", "data: prefix"),
    "empty": ("", 422, "not_an_image", r"images\[1\].*empty"),
    "text": (
        base64_of(b"hello there"),
        422,
        "not_an_image",
        r"images\[1\].*b'hello th'.*PNG, WebP",
    ),
    "a GIF": (other_format("GIF"), 415, "unsupported_format", r"images\[1\] is a GIF.*PNG"),
    "a BMP": (other_format("BMP"), 415, "unsupported_format", r"images\[1\] is a BMP"),
    "a TIFF": (other_format("TIFF"), 415, "unsupported_format", r"images\[1\] is a TIFF"),
    "a bomb": (bomb(), 413, "image_too_large", r"images\[1\] has 20000 x 20000 .* 1000000"),
    "one row too many": (bomb(1001), 413, "image_too_large", "1001 x 1001"),
    "a header of a bomb": (header_only(2**31 - 1, 2**31 - 1), 413, "image_too_large", "2147483647"),
    "a header of nothing": (header_only(0, 0), 422, "broken_image", r"images\[1\]"),
    "only a PNG header": (header_only(8, 8), 422, "broken_image", r"images\[1\] cannot be decoded"),
    "only a signature": (
        base64_of(PNG[:8]),
        422,
        "broken_image",
        r"images\[1\] cannot be decoded",
    ),
    "half a PNG": (
        base64_of(photo("PNG")[:5000]),
        422,
        "broken_image",
        r"images\[1\].*truncated",
    ),
    "half a JPEG": (
        base64_of(photo("JPEG")[:1000]),
        422,
        "broken_image",
        r"images\[1\].*truncated",
    ),
    "half a WebP": (
        base64_of(photo("WEBP")[:300]),
        422,
        "broken_image",
        r"images\[1\] cannot be",
    ),
    "a damaged PNG": (
        base64_of(PNG[:50] + bytes(10) + PNG[60:]),
        422,
        "broken_image",
        r"images\[1\] cannot be decoded",
    ),
}


@pytest.mark.parametrize("case", IMAGES)
def test_an_image_that_cannot_be_scored_is_named(server: Server, case: str) -> None:
    image, status, code, message = IMAGES[case]
    content = {"reward": JPEG, "images": [GOOD, image], "prompts": ["a", "b"]}
    before = server.memory_mb("VmHWM")
    seen = rejection(server.score(content))
    assert seen[:2] == (status, code)
    assert re.search(message, seen[2]), seen[2]
    assert server.memory_mb("VmHWM") < before + 50  # the bomb has 400 megapixels


BODIES = {
    "unknown reward": (body("beauty", "a"), 404, "unknown_reward", f"'beauty'.*{JPEG}, obey"),
    "a reward of a megabyte": (body("x" * 2**20, "a"), 404, "unknown_reward", r"xxx\.\.\."),
    "lone surrogate": (body("\ud800", "a"), 422, "invalid_request", "reward"),
    "lone surrogate in a prompt": (
        body(JPEG, "a\ud800"),
        422,
        "invalid_request",
        r"prompts\[0\]",
    ),
    "lone surrogate in a name": ({**body(JPEG, "a"), "\ud800": 1}, 422, "invalid_request", "."),
    "no images": (body(JPEG), 422, "no_images", "at least one"),
    "too many images": (body(JPEG, *"abcdefghi"), 413, "too_many_images", "9 images.* 8 "),
    "too few prompts": (
        {**body(JPEG, "a", "b"), "prompts": ["a"]},
        422,
        "counts_differ",
        "2 images but 1 prompts",
    ),
    "too few metadata": (
        body(JPEG, "a", "b", metadata=[{}]),
        422,
        "counts_differ",
        "2 images but 1 metadata",
    ),
    "no reward": ({"images": [GOOD], "prompts": ["a"]}, 422, "invalid_request", "reward.*required"),
    "a number as reward": (body(5, "a"), 422, "invalid_request", "reward.*string"),
    "images not a list": (
        {**body(JPEG), "images": GOOD},
        422,
        "invalid_request",
        "images: .*valid list",
    ),
    "a number as image": (
        {**body(JPEG), "images": [GOOD, 3]},
        422,
        "invalid_request",
        r"images\[1\]: .*string",
    ),
    "metadata not objects": (
        body(JPEG, "a", metadata=["x"]),
        422,
        "invalid_request",
        r"metadata\[0\]: .*dictionary",
    ),
    "a field too many": (
        body(JPEG, "a", seed=1),
        422,
        "invalid_request",
        "field 'seed'.*reward, ",
    ),
    "many errors": (
        {"reward": JPEG, "images": [1, 2], "prompts": [3]},
        422,
        "invalid_request",
        r"images\[0\].*and 1 more",
    ),
    "a list": ([], 422, "invalid_request", "JSON object"),
    "null": (None, 422, "invalid_request", "JSON object"),
}


@pytest.mark.parametrize("case", BODIES)
def test_an_invalid_body_is_rejected_with_its_code(server: Server, case: str) -> None:
    content, status, code, message = BODIES[case]
    seen = rejection(server.post(json.dumps(content)))
    assert seen[:2] == (status, code)
    assert re.search(message, seen[2]), seen[2]


RAW = {
    "malformed": (b'{"reward": ', 400, "malformed_json", "not JSON.*character 11"),
    "not utf-8": (b'{"reward": "\xff\xfe"}', 400, "malformed_json", "UTF-8"),
    "too deep": (b"[" * 100_000, 400, "malformed_json", "JSON"),
    "a number too long": (b'{"reward": %s}' % (b"1" * 10_000), 400, "malformed_json", "JSON"),
    "nothing": (b"", 422, "invalid_request", "JSON object"),
}


@pytest.mark.parametrize("case", RAW)
def test_bytes_that_are_not_json_are_rejected(server: Server, case: str) -> None:
    data, status, code, message = RAW[case]
    seen = rejection(server.post(data))
    assert seen[:2] == (status, code)
    assert re.search(message, seen[2]), seen[2]


def test_a_form_is_not_json(server: Server) -> None:
    # A web page can make a browser send this without a CORS preflight.
    response = server.post(json.dumps(body(JPEG, "a")), **{"Content-Type": "text/plain"})
    assert rejection(response)[:2] == (422, "invalid_request")


def test_unknown_paths_and_methods_answer_in_the_same_form(server: Server) -> None:
    assert rejection(server.get("/v2/score"))[:2] == (404, "not_found")
    assert rejection(server.get("/v1/score/"))[:2] == (404, "not_found")
    assert rejection(server.get("/v1/score"))[:2] == (405, "method_not_allowed")
    response = requests.delete(f"{server.url}/metrics", timeout=10)
    assert rejection(response)[:2] == (405, "method_not_allowed")
    assert response.headers["Allow"] == "GET"


def test_metadata_may_be_any_json(server: Server) -> None:
    odd = {"n": 1e400, "deep": [[[None]]], "half": "\ud800", "": {"a": True}}
    assert server.post(json.dumps(body(JPEG, "a", metadata=[odd]))).status_code == 200
    assert server.score(body(JPEG, "\0 emoji \U0001f600 ", metadata=None)).status_code == 200


def test_a_body_of_100_mb_is_rejected_without_buffering_it(server: Server) -> None:
    before = server.memory_mb("VmHWM")
    status, code, message = rejection(server.post(b" " * 100_000_000))
    assert (status, code) == (413, "body_too_large")
    assert "100000000 bytes" in message
    assert "67108864" in message
    assert server.memory_mb("VmHWM") < before + 20


def test_a_client_that_reads_after_sending_gets_the_error(server: Server) -> None:
    client = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
    for _ in range(2):  # on one connection
        client.request("POST", "/v1/score", b" " * 100_000_000)
        response = client.getresponse()
        assert response.status == 413
        assert b"body_too_large" in response.read()
    client.close()


def test_a_chunked_body_is_limited(server: Server) -> None:
    before = server.memory_mb("VmHWM")
    chunks = (b" " * 1_000_000 for _ in range(200))
    assert rejection(server.post(chunks))[:2] == (413, "body_too_large")
    assert server.memory_mb("VmHWM") < before + 100  # the limit is 64


def test_the_last_chunk_may_exceed_the_limit(start: Callable[..., Server]) -> None:
    server = start(JPEG, "--max-body-mb", "1")
    for size in (2**20 + 1, 2**21):
        assert rejection(server.post(iter([b" " * size])))[:2] == (413, "body_too_large")
    assert rejection(server.post(iter([b" " * 2**20])))[:2] == (400, "malformed_json")


def test_a_client_that_expects_100_continue_sends_no_body(server: Server) -> None:
    for expect in (b"Expect: 100-continue\r\n", b""):  # without it: too large to drain
        with socket.create_connection(server.url.removeprefix("http://").split(":")) as client:
            client.settimeout(10)
            client.sendall(
                b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: 1000000000000\r\n" + expect + b"\r\n"
            )
            answer = b""
            while part := client.recv(65536):
                answer += part
        assert answer.startswith(b"HTTP/1.1 413")
        assert b"connection: close" in answer.lower()


def test_a_client_may_disconnect_in_mid_request(server: Server) -> None:
    with socket.create_connection(server.url.removeprefix("http://").split(":")) as client:
        client.sendall(b"POST /v1/score HTTP/1.1\r\nHost: [::1]\r\nContent-Length: 1000\r\n\r\n{")


def test_a_scorer_that_breaks_its_contract_is_reported(server: Server) -> None:
    status, code, message = rejection(server.score(body("obey", "twice")))
    assert (status, code) == (500, "scorer_broken")
    assert re.search(r"'obey' failed.*shape \(2,\) for 1 images", message)


def test_an_error_of_a_scorer_may_contain_lone_surrogates(server: Server) -> None:
    content = body("obey", "a", metadata=[{"raise": "it is \ud800"}])
    status, code, message = rejection(server.post(json.dumps(content)))
    assert (status, code) == (500, "scorer_broken")
    assert "it is \ud800" in message


@pytest.mark.parametrize("field", ["images", "prompts", "metadata", None])
def test_many_errors_take_no_more_memory_than_one(server: Server, field: str | None) -> None:
    if field:
        data = f'{{"{field}": [{"1," * 300_000}1]}}'
    else:
        data = "{" + ",".join(f'"{n}":1' for n in range(300_000)) + "}"
    rejection(server.post("[" + "1," * 5_000_000 + "1]"))  # raises the peak to what parsing takes
    before = server.memory_mb("VmHWM")
    assert rejection(server.post(data))[:2] == (422, "invalid_request")
    assert server.memory_mb("VmHWM") < before + 100  # 300 if every error were collected


@pytest.mark.parametrize("path", ["/v1/score", "/v1/rewards", "/healthz", "/readyz", "/metrics"])
def test_a_request_for_another_host_is_rejected(server: Server, path: str) -> None:
    """A web page whose name resolves to this machine (DNS rebinding) gets no scores."""
    content = body(JPEG, "a")
    for host in ("evil.example", "localhost.evil.example:80", "", "["):
        headers = {"Host": host}
        if path == "/v1/score":
            response = server.score(content, headers=headers)
        else:
            response = server.get(path, headers=headers)
        assert error(response) == (403, "forbidden_host")
    assert server.score(content, headers={"Host": "localhost"}).status_code == 200
