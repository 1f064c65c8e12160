"""Score pictures and answers for others, over HTTP.

python -m reward_server --rewards ocr,jpeg_compressibility --port 18085
"""

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from flow_grpo.errors import UserError
from flow_grpo.rewards import REWARDS
from flow_grpo.rewards.failure import describe
from flow_grpo.rewards.given import import_scorer
from flow_grpo.rewards.protocol import Scorer, parameters_of
from reward_server.options import limits, parse

USAGE_ERROR = 2  # exit code of every UserError, as in flow_grpo
INTERRUPTED = 130
REQUIRED = ("fastapi", "prometheus_client", "starlette", "uvicorn")  # setup.py: [server]


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    try:
        _run(parse(argv))
    except UserError as error:
        if "--debug" in argv:
            raise
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:  # while the scorers were built, or requests unanswered
        return INTERRUPTED
    return 0


def _run(args: argparse.Namespace) -> None:
    # After the arguments are read: --help and mistakes should not wait for these.
    try:
        from reward_server.app import openapi
        from reward_server.serve import bind, serve
        from reward_server.service import Service
    except ModuleNotFoundError as error:
        if error.name not in REQUIRED:
            raise
        raise UserError(
            f"the reward server needs the package {error.name!r}, which is not installed; "
            "pip install 'flow_grpo[server]'"
        ) from error

    if args.print_openapi:
        print(json.dumps(openapi(), indent=2))
        return
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s"
    )
    token = _token(args.token_env)
    custom = dict(args.custom)
    args.rewards = list(dict.fromkeys([*args.rewards, *custom]))
    _check_names(args.rewards, custom, args.options)
    with bind(args.host, args.port, public=token is not None) as listener:
        scorers = {name: _build(name, args, custom) for name in args.rewards}
        service = Service(
            scorers,
            limits=limits(args),
            max_batch=args.max_batch,
            max_wait=args.max_wait_ms / 1000,
            score_timeout=args.score_timeout,
        )
        try:
            serve(
                service,
                listener,
                token=token,
                workers=args.workers,
                grace=args.grace,
                client_timeout=args.client_timeout,
            )
        finally:
            service.close()


def _check_names(names: list[str], custom: dict[str, str], options: dict[str, Any]) -> None:
    known = {**REWARDS, **custom}
    if not names:
        raise UserError("--rewards is missing; name at least one, e.g. --rewards ocr")
    for name in names:
        if name not in known:
            raise UserError(
                f"unknown reward {name!r}; known are {', '.join(sorted(known))}; add your own "
                f"with --custom {name}=package.module:attribute"
            )
    for name in options:
        if name not in names:
            raise UserError(f"--options has {name!r}, which is not among --rewards")


def _build(name: str, args: argparse.Namespace, custom: dict[str, str]) -> Scorer:
    options = dict(args.options.get(name, {}))
    if args.workers and _takes_workers(name, {**REWARDS, **custom}[name]):
        options.setdefault("workers", args.workers)
    settings = {"device": args.device, "custom": custom, "options": {name: options}}
    from reward_server.isolated import IsolatedScorer, build_scorer

    try:
        if args.isolate:
            return IsolatedScorer(name, timeout=args.score_timeout, **settings)
        return build_scorer(name, **settings)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"reward {name!r} cannot be built: {describe(error)} (--debug shows where)"
        ) from error


def _takes_workers(name: str, path: str) -> bool:
    try:
        return "workers" in parameters_of(import_scorer(name, path))
    except Exception:
        return False  # `build_scorers` says what is wrong with it


def _token(variable: str | None) -> str | None:
    if variable is None:
        return None
    token = os.environ.get(variable, "").strip()
    if not token:
        raise UserError(
            f"--token-env {variable}: that environment variable is not set or empty; put the "
            "token there"
        )
    return token


if __name__ == "__main__":
    sys.exit(main())
