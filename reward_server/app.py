"""The routes."""

import asyncio
import math
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import Response

from flow_grpo.rewards.failure import Failed, NotAsked
from flow_grpo.rewards.frames import CLIP
from flow_grpo.rewards.protocol import BatchScores
from reward_server import errors, schemas
from reward_server.gate import GONE, CheckHost, CountRequests, LimitBody, RequireToken
from reward_server.limits import Limits
from reward_server.service import Service

BEARER: dict[str, Any] = {"security": [{}, {"bearer": []}]}  # only where the server has a token
BODY_SHARE = 8  # of the memory for pictures, that bodies may take besides; parsed they take two
SCORE_ERRORS = (
    *("malformed_json", "unauthorized", "forbidden_host", "unknown_reward"),
    *("body_too_large", "image_too_large", "too_many_images", "too_many_pixels"),
    *("unsupported_format", "broken_image", "counts_differ", "invalid_base64"),
    *("invalid_request", "no_images", "not_an_image"),
    *("queue_full", "internal_error", "scorer_broken", "scorer_down", "scorer_failed"),
    *("scorer_timeout", "shutting_down", "starting"),
    *("client_too_slow", "headers_too_large", "too_many_connections"),
)


def create_app(
    service: Service, *, token: str | None = None, served_at: str = "localhost"
) -> FastAPI:
    app = FastAPI(
        title="reward_server",
        version="1",
        description='Scores images. Errors are always {"error": {"code": ..., "message": ...}}.',
        docs_url=None,  # it would load its pages from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    _add_routes(app, service)
    _document_token(app)
    limit = service.limits.max_body_bytes
    # The last one added is the first one passed.
    held = service.limits.max_memory_bytes // BODY_SHARE
    app.add_middleware(LimitBody, max_bytes=limit, max_held=held)
    if token:
        app.add_middleware(RequireToken, token=token, max_body_bytes=limit)
    app.add_middleware(CheckHost, served_at=served_at, max_body_bytes=limit)
    app.add_middleware(CountRequests, metrics=service.metrics)
    app.add_exception_handler(errors.ApiError, errors.on_api_error)
    app.add_exception_handler(HTTPException, errors.on_http_error)
    app.add_exception_handler(RequestValidationError, errors.on_validation_error)
    app.add_exception_handler(Exception, errors.on_crash)
    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    @app.post(
        "/v1/score",
        response_model=schemas.ScoreResponse,
        responses=schemas.error_docs(*SCORE_ERRORS),
        openapi_extra=BEARER,
    )
    async def score(body: schemas.ScoreRequest, request: Request) -> Response:
        """Score images with one reward."""
        if body.reward in service.desks:
            request.state.reward = body.reward
        work = asyncio.ensure_future(service.score(body))
        if not await _done_before_disconnect(work, request):
            return Response(status_code=GONE)  # to nobody
        return errors.json_response(_answer(body.reward, work.result()))

    @app.get(
        "/v1/rewards",
        response_model=schemas.RewardList,
        responses=schemas.error_docs("unauthorized", "forbidden_host"),
        openapi_extra=BEARER,
    )
    async def rewards() -> Response:
        """The rewards of this server, and how much it takes."""
        states = [{"name": name, "ready": desk.ready} for name, desk in service.desks.items()]
        clips = [name for name, desk in service.desks.items() if desk.scorer.frames == CLIP]
        content = {"rewards": states, "clips": clips, "limits": vars(service.limits)}
        return errors.json_response(content)

    @app.get(
        "/healthz",
        response_model=schemas.Status,
        responses=schemas.error_docs("forbidden_host"),
    )
    async def healthz() -> Response:
        """Whether the process serves."""
        return errors.json_response({"status": "ok"})

    @app.get(
        "/readyz",
        response_model=schemas.Status,
        responses=schemas.error_docs("forbidden_host", "reward_down", "shutting_down", "starting"),
    )
    async def readyz() -> Response:
        """Whether all rewards can be had now."""
        service.check_ready()
        return errors.json_response({"status": "ready"})

    @app.get(
        "/metrics",
        response_class=Response,
        responses={
            200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
            **schemas.error_docs("unauthorized", "forbidden_host"),
        },
        openapi_extra=BEARER,
    )
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


def openapi() -> dict[str, Any]:
    """The schema; it is the same for all rewards and limits."""
    return create_app(Service({}, limits=Limits())).openapi()


def _document_token(app: FastAPI) -> None:
    scheme = {"type": "http", "scheme": "bearer", "description": "where the server has a token"}
    app.openapi()["components"]["securitySchemes"] = {"bearer": scheme}


async def _done_before_disconnect(work: asyncio.Future, request: Request) -> bool:
    """Wait for `work`, and give it up when its client goes away."""
    gone = asyncio.ensure_future(_disconnect(request))
    await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
    gone.cancel()
    if not work.done():
        work.cancel()
    return not work.cancelled() and work.done()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _answer(reward: str, scores: BatchScores) -> dict[str, Any]:
    return {
        "reward": reward,
        "scores": list(map(_or_null, scores.values)),
        "asked": [not isinstance(v, NotAsked) for v in scores.values],
        "errors": [v.reason if isinstance(v, Failed) else None for v in scores.values],
        "extras": {name: list(map(_or_null, values)) for name, values in scores.extras.items()},
    }


def _or_null(value: float) -> float | None:
    return value if math.isfinite(value) else None
