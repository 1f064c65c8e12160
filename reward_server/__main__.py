"""`python -m reward_server --rewards ocr,jpeg_compressibility --port 18085`"""

import argparse
import importlib
import inspect
import json
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from flow_grpo.errors import UserError
from flow_grpo.rewards import REWARDS, Scorer, build_scorers
from flow_grpo.rewards.failure import describe
from reward_server.limits import Limits

USAGE_ERROR = 2  # exit code of every UserError, as in flow_grpo
INTERRUPTED = 130
HELP = {
    "max_images": "images in one request",
    "max_pixels": "pixels of one image",
    "max_queue": "images of one reward that wait or are being scored",
    "max_queue_pixels": "the pixels of those images",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; --help lists all options")


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    try:
        _run(_parse(argv))
    except UserError as error:
        if "--debug" in argv:
            raise
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:  # while the scorers were built, or requests unanswered
        return INTERRUPTED
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="python -m reward_server",
        description="Scores images over HTTP.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--rewards", type=_names, default=[], help="names with commas between")
    add("--host", default="127.0.0.1", help="others than this machine's own need --token-env")
    add("--port", type=_port, default=18085, help="0: any that is free")
    add("--token-env", metavar="NAME", help="environment variable with the token to ask for")
    add("--workers", type=_positive, help="processes of each reward that has some, like ocr")
    add("--options", type=_options, default={}, help='JSON, {"reward": {"option": value}}')
    add(
        "--custom",
        type=_custom,
        action="append",
        default=[],
        metavar="NAME=PACKAGE.MODULE:ATTR",
        help="a reward of your own, served under this name",
    )
    add("--device", default="cpu", help="for rewards with a model")
    add("--max-batch", type=_positive, default=64, help="images in one call of a scorer")
    add("--max-wait-ms", type=_milliseconds, default=5.0, help="how long a call waits for more")
    for name, default in vars(Limits()).items():
        if name != "max_body_bytes":
            add(f"--{name.replace('_', '-')}", type=_positive, default=default, help=HELP[name])
    add("--max-body-mb", type=_positive, default=64, help="size of a request, in units of 2^20")
    add("--print-openapi", action="store_true", help="write the schema and end")
    add("--debug", action="store_true", help="show the traceback of a mistake")
    return parser.parse_args(argv)


def _run(args: argparse.Namespace) -> None:
    # After the arguments are read: --help and mistakes should not wait for these.
    from reward_server.app import openapi
    from reward_server.serve import bind, serve
    from reward_server.service import Service

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
        limits = Limits(
            max_images=args.max_images,
            max_pixels=args.max_pixels,
            max_body_bytes=args.max_body_mb * 2**20,
            max_queue=args.max_queue,
            max_queue_pixels=args.max_queue_pixels,
        )
        service = Service(
            scorers, limits=limits, max_batch=args.max_batch, max_wait=args.max_wait_ms / 1000
        )
        try:
            serve(service, listener, token=token, workers=args.workers)
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
    if args.workers and _takes_workers({**REWARDS, **custom}[name]):
        options.setdefault("workers", args.workers)
    try:
        return build_scorers([name], device=args.device, custom=custom, options={name: options})[
            name
        ]
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"reward {name!r} cannot be built: {describe(error)} (--debug shows where)"
        ) from error


def _takes_workers(path: str) -> bool:
    module, _, attribute = path.partition(":")
    try:
        scorer = getattr(importlib.import_module(module), attribute)
        return isinstance(scorer, type) and "workers" in inspect.signature(scorer).parameters
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


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _custom(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if not name or ":" not in path:
        raise argparse.ArgumentTypeError(f"{text!r} must read name=package.module:attribute")
    return name, path


def _options(text: str) -> dict[str, dict[str, Any]]:
    try:
        options = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON ({error})") from error
    if not isinstance(options, dict) or not all(isinstance(o, dict) for o in options.values()):
        raise argparse.ArgumentTypeError(f'{text!r} must read {{"reward": {{"option": value}}}}')
    return options


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of 1 or more")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} must be a port, 0 to 65535")
    return int(text)


def _milliseconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 60_000:
        raise argparse.ArgumentTypeError(f"{text!r} must be milliseconds, 0 to 60000")
    return value


if __name__ == "__main__":
    sys.exit(main())
