"""Error codes and responses of the API: always {"error": {"code": ..., "message": ...}}."""

import json
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

STATUS_BY_CODE = {
    "malformed_json": 400,
    "unauthorized": 401,
    "forbidden_host": 403,
    "not_found": 404,
    "unknown_reward": 404,
    "method_not_allowed": 405,
    "client_too_slow": 408,
    "body_too_large": 413,
    "image_too_large": 413,
    "too_many_images": 413,
    "too_many_pixels": 413,
    "unsupported_format": 415,
    "broken_image": 422,
    "counts_differ": 422,
    "invalid_base64": 422,
    "invalid_request": 422,
    "no_images": 422,
    "not_an_image": 422,
    "queue_full": 429,
    "headers_too_large": 431,
    "internal_error": 500,
    "scorer_broken": 500,
    "scorer_down": 500,  # not 503, which clients retry: it may stay down
    "scorer_failed": 500,
    "reward_down": 503,
    "shutting_down": 503,
    "starting": 503,
    "too_many_connections": 503,
    "scorer_timeout": 504,
}
HTTP_CODES = {400: "malformed_json", 404: "not_found", 405: "method_not_allowed"}
UNKNOWN_FIELD = "unknown_field"  # custom pydantic error type
RETRY_AFTER = 1  # seconds
MAX_SHOWN_CHARS = 80  # of a client's value in a message


class ApiError(Exception):
    """A request that is answered with an error."""

    def __init__(self, code: str, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.status = STATUS_BY_CODE[code]
        self.headers = headers or {}


class ServerBusy(ApiError):
    """A temporary error; the same request may succeed after `retry_after` seconds."""

    def __init__(self, code: str, message: str, retry_after: int) -> None:
        super().__init__(code, message, {"Retry-After": str(retry_after)})


def truncated_repr(value: Any) -> str:
    """Return a client's value for a message: one line of at most `MAX_SHOWN_CHARS`."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[: MAX_SHOWN_CHARS - 3]}..."


def json_response(
    content: Any, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """Return a JSON response; NaN is not allowed in the content."""
    # ASCII only: lone surrogates, which JSON can contain, cannot be encoded as UTF-8.
    body = json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")
    return Response(body, status, headers, media_type="application/json")


def error_response(error: ApiError) -> Response:
    """Return the response to a request that failed with this error."""
    content = {"error": {"code": error.code, "message": str(error)}}
    return json_response(content, error.status, error.headers)


async def on_api_error(_: Request, error: ApiError) -> Response:
    return error_response(error)


async def on_http_error(request: Request, error: HTTPException) -> Response:
    """Respond to an error of the framework."""
    code = HTTP_CODES.get(error.status_code, "internal_error")
    path, hint = truncated_repr(request.url.path), "see GET /openapi.json"
    message = {
        "malformed_json": "the body is not valid JSON; send one JSON object in UTF-8",
        "not_found": f"unknown path {path}; {hint}",
        "method_not_allowed": f"{path} does not support {request.method}; {hint}",
    }.get(code, str(error.detail))
    return error_response(ApiError(code, message, dict(error.headers or {})))


async def on_validation_error(_: Request, error: RequestValidationError) -> Response:
    return error_response(validation_error(error.errors()))


async def on_unhandled_error(_: Request, error: Exception) -> Response:
    # The framework raises it again, which logs the traceback.
    message = f"the server failed with {type(error).__name__}; see its log"
    return error_response(ApiError("internal_error", message))


def validation_error(problems: list[dict[str, Any]]) -> ApiError:
    """Convert pydantic's errors to one line about the first of them."""
    first, more = problems[0], len(problems) - 1
    if first["type"] == "json_invalid":
        where = f"at character {first['loc'][-1]}"
        return ApiError("malformed_json", f"the body is not JSON: {first['ctx']['error']} {where}")
    path = _json_path(first["loc"][1:])
    if first["type"] == UNKNOWN_FIELD:
        return ApiError("invalid_request", first["msg"])
    if not path:
        return ApiError(
            "invalid_request",
            "the body must be a JSON object, sent with Content-Type: application/json",
        )
    rest = f" (and {more} more)" if more else ""
    return ApiError("invalid_request", f"{path}: {_lowercase_first(first['msg'])}{rest}")


def _json_path(location: tuple[int | str, ...]) -> str:
    """Convert ("images", 3) to "images[3]"."""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        else:
            plain = step.isidentifier() and len(step) <= MAX_SHOWN_CHARS
            name = step if plain else truncated_repr(step)
            path += f".{name}" if path else name
    return path


def _lowercase_first(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]
