"""A scripted server of the chat completions protocol that validates requests strictly."""

import base64
import contextlib
import io
import json
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from PIL import Image

MODEL = "judge-7b"
DATA_URL = "data:image/png;base64,"


@dataclass(frozen=True)
class ChatRequest:
    """A parsed chat completion request."""

    text: str
    images: list[Image.Image]
    max_tokens: int
    authorization: str | None = None
    system: str | None = None
    layout: tuple[str, ...] = ()  # texts of the user's message; "" stands for an image
    sampling: dict[str, Any] = field(default_factory=dict)

    @property
    def image(self) -> Image.Image:
        [image] = self.images
        return image


@dataclass(frozen=True)
class RawResponse:
    """Send exactly this response."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


class HangUp:
    """Close the connection without a response."""


class Hang:
    """Never respond."""


@dataclass(frozen=True)
class Delay:
    """Respond as usual after a delay in seconds."""

    seconds: float


Step = RawResponse | HangUp | Hang | Delay


def error(status: int, message: str, **headers: str) -> RawResponse:
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return RawResponse(status, json.dumps({"error": {"message": message}}).encode(), headers)


def completion(content: str | None, finish_reason: str = "stop", **message: Any) -> dict:
    message = {"role": "assistant", "content": content, **message}
    choice = {"index": 0, "message": message, "finish_reason": finish_reason}
    return {"id": "1", "object": "chat.completion", "model": MODEL, "choices": [choice]}


class OpenAiServer:
    """Server whose completions are the results of `reply`, or scripted.

    `requests` lists the valid requests in the order of their arrival, and `malformed` the errors of
    those that violate the protocol, which get status 400.

    Args:
        reply: Returns the content of a completion, or a complete one, for a request.
        script: Steps for the first requests, one each.
        always: Step for all later requests; by default they get a reply.
        hide_models: Never respond to requests for the list of models.
    """

    def __init__(
        self,
        reply: Callable[[ChatRequest], str | dict] = lambda request: "",
        *,
        script: Iterable[Step] = (),
        always: Step | None = None,
        hide_models: bool = False,
        port: int = 0,
    ) -> None:
        self.reply = reply
        self.script = list(script)
        self.always = always
        self.hide_models = hide_models
        self.requests: list[ChatRequest] = []
        self.malformed: list[str] = []
        self.probes = 0
        self.max_concurrent = 0
        self._concurrent = 0
        self._port = port
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._connections: set[Any] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> "OpenAiServer":
        handler = type("Handler", (_Handler,), {"server_of": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", self._port), handler)
        self._http.daemon_threads = True
        self._http.block_on_close = False
        self._port = self._http.server_address[1]
        self._thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.02}
        )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
        for connection in list(self._connections):  # persistent connections would still be served
            with contextlib.suppress(OSError):
                connection.shutdown(2)

    def handle(self, path: str, headers: Any, body: bytes) -> RawResponse | HangUp:
        try:
            request = parse_request(path, headers, body)
        except Exception as problem:
            self.malformed.append(f"{type(problem).__name__}: {problem}")
            return error(400, f"malformed request, {problem}")
        with self._lock:
            self.requests.append(request)
            step = self.script.pop(0) if self.script else self.always
            self._concurrent += 1
            self.max_concurrent = max(self.max_concurrent, self._concurrent)
        try:
            return self._act(step, request)
        finally:
            with self._lock:
                self._concurrent -= 1

    def _act(self, step: Step | None, request: ChatRequest) -> RawResponse | HangUp:
        if isinstance(step, Hang):
            self._closing.wait()
            return HangUp()
        if isinstance(step, Delay):
            time.sleep(step.seconds)
        elif step is not None:
            return step
        reply = self.reply(request)
        content = reply if isinstance(reply, dict) else completion(reply)
        return RawResponse(200, json.dumps(content).encode())


class _Handler(BaseHTTPRequestHandler):
    server_of: OpenAiServer
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.server_of._connections.add(self.connection)

    def finish(self) -> None:
        self.server_of._connections.discard(self.connection)
        with contextlib.suppress(OSError):
            super().finish()

    def do_GET(self) -> None:
        self.server_of.probes += 1
        if self.server_of.hide_models:
            self.server_of._closing.wait()
            return
        found = self.path == "/v1/models"
        models = {"object": "list", "data": [{"id": MODEL, "object": "model"}]}
        body = json.dumps(models).encode()
        self._send(RawResponse(200, body) if found else error(404, "no such path"))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self._send(self.server_of.handle(self.path, self.headers, body))

    def _send(self, response: RawResponse | HangUp) -> None:
        if isinstance(response, HangUp):
            self.close_connection = True
            return
        with contextlib.suppress(OSError):  # the client may have given up
            self.send_response(response.status)
            headers = {"Content-Type": "application/json", **response.headers}
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(response.body)))
            self.end_headers()
            self.wfile.write(response.body)

    def log_message(self, *_: object) -> None:
        pass


def parse_request(path: str, headers: Any, body: bytes) -> ChatRequest:
    """Parse a request; anything that vLLM may reject is an error."""
    require(path == "/v1/chat/completions", f"path {path}")
    require(headers["Content-Type"] == "application/json", f"type {headers['Content-Type']}")
    request = json.loads(body)
    sampling = {name: request.pop(name) for name in ("top_p", "top_k", "seed") if name in request}
    require(set(request) == {"model", "messages", "temperature", "max_tokens"}, f"{set(request)}")
    require(request["model"] == MODEL, f"model {request['model']!r} does not exist")
    temperature = request["temperature"]
    require(temperature == 0 or ("seed" in sampling and temperature > 0), f"{temperature}")
    require(type(request["max_tokens"]) is int and request["max_tokens"] > 0, "max_tokens")
    *system, message = request["messages"]
    require(set(message) == {"role", "content"} and message["role"] == "user", f"{message}")
    require([each["role"] for each in system] in ([], ["system"]), f"{system}")
    texts = [part for part in message["content"] if part["type"] == "text"]
    require(all(set(text) == {"type", "text"} for text in texts), "text")
    require(all(isinstance(part["text"], str) and part["text"].strip() for part in texts), "text")
    require(message["content"][-1] in texts, "the question is not the last part")
    images = [parse_image(part) for part in message["content"] if part not in texts]
    require(bool(images), "no image")
    return ChatRequest(
        texts[-1]["text"],
        images,
        request["max_tokens"],
        headers["Authorization"],
        system[0]["content"] if system else None,
        tuple(part.get("text", "") for part in message["content"]),
        {**sampling, "temperature": temperature},
    )


def parse_image(part: dict) -> Image.Image:
    require(part["type"] == "image_url" and set(part) == {"type", "image_url"}, "image")
    url = part["image_url"]["url"]
    require(url.startswith(DATA_URL), f"url {url[:40]}")
    png = base64.b64decode(url.removeprefix(DATA_URL), validate=True)
    image = Image.open(io.BytesIO(png))
    require(image.format == "PNG" and image.mode == "RGB", f"{image.format} {image.mode}")
    image.load()
    return image


def require(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(problem)
