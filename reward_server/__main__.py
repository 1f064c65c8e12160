"""Serve rewards for images and text responses over HTTP.

python -m reward_server --rewards ocr,jpeg_compressibility --port 18085
"""

import argparse
import json
import logging
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

from flow_grpo.errors import UserError
from flow_grpo.rewards import REWARDS
from flow_grpo.rewards.custom import import_scorer
from flow_grpo.rewards.drawn_names import check_drawn_names, drawn_names, image_reward_of
from flow_grpo.rewards.failure import describe_error
from flow_grpo.rewards.protocol import Scorer, constructor_parameters
from flow_grpo.rewards.workers.supervisor import supervise
from reward_server.arguments import build_limits, parse_args

USAGE_ERROR = 2  # exit code of user errors
INTERRUPTED = 130
REQUIRED = ("fastapi", "prometheus_client", "starlette", "uvicorn")  # setup.py: [server]


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal arrives; return the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        _run_server(parse_args(argv))
    except UserError as error:
        if "--debug" in argv:
            raise
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:  # while scorers are built or requests are pending
        return INTERRUPTED
    return 0


def _run_server(args: argparse.Namespace) -> None:
    """Bind the port, build the scorers and serve them; or print the OpenAPI schema."""
    if args.fd is not None:
        supervise(args.fd, args.parent_pid)
    # Slow imports; --help and argument errors do not need them.
    try:
        from reward_server.app import openapi
        from reward_server.serve import serve
        from reward_server.service import Service
    except ModuleNotFoundError as error:
        if error.name not in REQUIRED:
            raise
        raise UserError(
            f"the reward server needs the missing package {error.name!r}",
            hint="pip install 'flow_grpo[server]'",
        ) from error

    if args.print_openapi:
        print(json.dumps(openapi(), indent=2))
        return
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s"
    )
    token = _read_token(args.token_env)
    custom = dict(args.custom)
    args.rewards = list(dict.fromkeys([*args.rewards, *custom]))
    _check_names(args.rewards, custom, args.options)
    with _open_listener(args, public=token is not None) as listener:
        scorers = {name: _build_named_scorer(name, args, custom) for name in args.rewards}
        service = Service(
            scorers,
            limits=build_limits(args),
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


def _open_listener(args: argparse.Namespace, *, public: bool) -> socket.socket:
    """Return the socket of --fd, or one that is bound to --host and --port."""
    from reward_server.serve import bind_socket

    if args.fd is None:
        return bind_socket(args.host, args.port, public=public)
    try:
        return socket.socket(fileno=args.fd)
    except OSError as error:
        raise UserError("is not a socket", field="--fd", value=args.fd) from error


def _check_names(names: list[str], custom: dict[str, str], options: dict[str, Any]) -> None:
    """Raise a UserError for no rewards, unknown ones, and options of others."""
    known = {**REWARDS.paths, **custom}
    if not names:
        raise UserError("is missing", field="--rewards", hint="name one, e.g. --rewards ocr")
    check_drawn_names(names, custom)
    drawn = drawn_names(names)
    for name in names:
        if name not in known and name not in drawn:
            raise UserError(
                f"has the unknown reward {name!r}; choose from {', '.join(sorted(known))}",
                field="--rewards",
                hint=f"or add a custom one with --custom {name}=package.module:attribute",
            )
    for name in options:
        if name not in names and name not in drawn.values():
            raise UserError(f"names {name!r}, which is not in --rewards", field="--options")


def _build_named_scorer(name: str, args: argparse.Namespace, custom: dict[str, str]) -> Scorer:
    """Build a scorer by the command line; any error becomes a UserError that names it."""
    scored = image_reward_of(name) or name  # the image reward of a reward drawn:NAME
    options = {each: dict(args.options.get(each, {})) for each in {name, scored}}
    if args.workers and _takes_workers(scored, {**REWARDS.paths, **custom}[scored]):
        options[scored].setdefault("workers", args.workers)
    settings = {"device": args.device, "custom": custom, "options": options}
    from reward_server.isolated import IsolatedScorer, build_scorer

    try:
        if args.isolate:
            return IsolatedScorer(name, timeout=args.score_timeout, **settings)
        return build_scorer(name, **settings)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"reward {name!r} cannot be built: {describe_error(error)}",
            hint="--debug shows the traceback",
        ) from error


def _takes_workers(name: str, path: str) -> bool:
    """Return whether the reward at `path` has the option `workers`."""
    try:
        return "workers" in constructor_parameters(import_scorer(name, path))
    except Exception:
        return False  # `build_scorers` reports the error


def _read_token(variable: str | None) -> str | None:
    """Return the token in an environment variable, None without a variable; reject empty ones."""
    if variable is None:
        return None
    token = os.environ.get(variable, "").strip()
    if not token:
        raise UserError(
            "names an environment variable that is not set or empty",
            field="--token-env",
            value=variable,
            hint="set it to the token",
        )
    return token


if __name__ == "__main__":
    sys.exit(main())
