"""The FastAPI application and its routes."""

import asyncio
import math
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import Response

from flow_grpo.rewards.failure import Failed, NotApplicable
from flow_grpo.rewards.frames import WHOLE_VIDEO
from flow_grpo.rewards.protocol import BatchScores
from reward_server import errors, openrlhf, schemas
from reward_server.limits import Limits
from reward_server.middleware import (
    CLIENT_CLOSED_REQUEST,
    AccessMiddleware,
    BodyLimitMiddleware,
    RequestMetricsMiddleware,
)
from reward_server.service import Service

BEARER_SECURITY: dict[str, Any] = {"security": [{}, {"bearer": []}]}  # {}: servers without a token
# Request bodies may take this fraction of the image memory in addition; parsing doubles it.
BODY_MEMORY_DIVISOR = 8
# Codes that other routes have; /v1/score has all the others.
OTHER_ERRORS = ("not_found", "method_not_allowed", "reward_down")
SCORE_ERRORS = tuple(code for code in errors.STATUS_BY_CODE if code not in OTHER_ERRORS)


def create_app(
    service: Service, *, token: str | None = None, served_at: str = "localhost"
) -> FastAPI:
    """Create the application.

    Args:
        service: The rewards.
        token: Token that clients must send, if any.
        served_at: Host name or address of the server, for the check of the Host header.
    """
    app = FastAPI(
        title="reward_server",
        version="1",
        description='Scores images. Errors are always {"error": {"code": ..., "message": ...}}.',
        docs_url=None,  # would load scripts from a CDN
        redoc_url=None,
        redirect_slashes=False,
    )
    _add_routes(app, service)
    _document_token(app)
    limit = service.limits.max_body_bytes
    # Requests pass the middleware added last first.
    buffered = service.limits.max_memory_bytes // BODY_MEMORY_DIVISOR
    app.add_middleware(BodyLimitMiddleware, max_bytes=limit, max_buffered_bytes=buffered)
    app.add_middleware(AccessMiddleware, served_at=served_at, token=token, max_body_bytes=limit)
    app.add_middleware(RequestMetricsMiddleware, metrics=service.metrics)
    app.add_exception_handler(errors.ApiError, errors.on_api_error)
    app.add_exception_handler(HTTPException, errors.on_http_error)
    app.add_exception_handler(RequestValidationError, errors.on_validation_error)
    app.add_exception_handler(Exception, errors.on_unhandled_error)
    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    """Add the routes of scoring, rewards, health and metrics."""

    @app.post(
        "/v1/score",
        response_model=schemas.ScoreResponse,
        responses=schemas.document_errors(*SCORE_ERRORS),
        openapi_extra=BEARER_SECURITY,
    )
    async def score(body: schemas.ScoreRequest, request: Request) -> Response:
        """Score images with one reward."""
        scores = await _score(service, body, request)
        if scores is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)  # not sent
        return errors.json_response(_response_body(body.reward, scores))

    @app.post(
        "/get_reward",
        response_model=schemas.GetRewardResponse,
        responses=schemas.document_errors(*SCORE_ERRORS),
        openapi_extra=BEARER_SECURITY,
    )
    async def get_reward(
        body: schemas.GetRewardRequest, request: Request, reward: str = ""
    ) -> Response:
        """Score responses for a client with OpenRLHF's protocol."""
        score_request = openrlhf.to_score_request(body, reward, service.served_rewards)
        scores = await _score(service, score_request, request)
        if scores is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)  # not sent
        return errors.json_response(openrlhf.response_body(scores))

    @app.get(
        "/v1/rewards",
        response_model=schemas.RewardList,
        responses=schemas.document_errors("unauthorized", "forbidden_host"),
        openapi_extra=BEARER_SECURITY,
    )
    async def rewards() -> Response:
        """List the rewards and limits of this server."""
        items = service.served_rewards.items()
        states = [{"name": name, "ready": served.ready} for name, served in items]
        clips = [name for name, served in items if served.scorer.frames == WHOLE_VIDEO]
        shortest = {n: each.scorer.min_frames for n, each in items if each.scorer.min_frames > 1}
        readers = [name for name, served in items if served.scorer.reads_images]
        content = {
            "rewards": states,
            "clips": clips,
            "min_frames": shortest,
            "reads_images": readers,
            "limits": vars(service.limits),
        }
        return errors.json_response(content)

    @app.get(
        "/healthz",
        response_model=schemas.Status,
        responses=schemas.document_errors("forbidden_host"),
    )
    async def healthz() -> Response:
        """Liveness check: the process responds."""
        return errors.json_response({"status": "ok"})

    @app.get(
        "/readyz",
        response_model=schemas.Status,
        responses=schemas.document_errors(
            "forbidden_host", "reward_down", "shutting_down", "starting"
        ),
    )
    async def readyz() -> Response:
        """Readiness check: all rewards can score."""
        service.check_ready()
        return errors.json_response({"status": "ready"})

    @app.get(
        "/metrics",
        response_class=Response,
        responses={
            200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
            **schemas.document_errors("unauthorized", "forbidden_host"),
        },
        openapi_extra=BEARER_SECURITY,
    )
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


async def _score(
    service: Service, body: schemas.ScoreRequest, request: Request
) -> BatchScores | None:
    """Return the scores, or None if the client disconnected."""
    if body.reward in service.served_rewards:
        request.state.reward = body.reward
    work = asyncio.ensure_future(service.score(body))
    return work.result() if await _wait_unless_disconnected(work, request) else None


def openapi() -> dict[str, Any]:
    """Return the OpenAPI schema, which does not depend on rewards and limits."""
    return create_app(Service({}, limits=Limits())).openapi()


def _document_token(app: FastAPI) -> None:
    scheme = {"type": "http", "scheme": "bearer", "description": "if the server has a token"}
    app.openapi()["components"]["securitySchemes"] = {"bearer": scheme}


async def _wait_unless_disconnected(work: asyncio.Future, request: Request) -> bool:
    """Wait for `work`, or cancel it and return False if the client disconnects."""
    disconnect = asyncio.ensure_future(_wait_for_disconnect(request))
    await asyncio.wait({work, disconnect}, return_when=asyncio.FIRST_COMPLETED)
    disconnect.cancel()
    if not work.done():
        work.cancel()
    return not work.cancelled() and work.done()


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _response_body(reward: str, scores: BatchScores) -> dict[str, Any]:
    """Return the body of /v1/score; failed scores are null, with the reason in "errors"."""
    return {
        "reward": reward,
        "scores": list(map(_nan_to_null, scores.values)),
        "asked": [not isinstance(v, NotApplicable) for v in scores.values],
        "errors": [v.reason if isinstance(v, Failed) else None for v in scores.values],
        "extras": {name: list(map(_nan_to_null, values)) for name, values in scores.extras.items()},
    }


def _nan_to_null(value: float) -> float | None:
    return value if math.isfinite(value) else None
