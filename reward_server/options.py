"""The command line of the server."""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from flow_grpo.config.mistakes import Parser
from flow_grpo.errors import UserError
from flow_grpo.files import parse_json
from reward_server.limits import Limits

MB = 2**20
HELP = {
    "max_images": "images in one request",
    "max_pixels": "pixels of one image",
    "max_queue": "images of one reward that wait or are being scored",
    "max_queue_pixels": "the pixels of those images",
    "max_connections": "open connections; idle and stalled ones make room for new ones",
}


class _Parser(Parser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; --help lists all options")


def limits(args: argparse.Namespace) -> Limits:
    given = {name: getattr(args, name) for name in HELP}
    if args.max_memory_mb is not None:
        given["max_memory_bytes"] = args.max_memory_mb * MB
    return Limits(max_body_bytes=args.max_body_mb * MB, **given)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(
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
    for name, meaning in HELP.items():
        default = getattr(Limits(), name)
        add(f"--{name.replace('_', '-')}", type=_positive, default=default, help=meaning)
    add("--max-body-mb", type=_positive, default=64, help="size of a request, in units of 2^20")
    add("--max-memory-mb", type=_positive, help="for decoded images; else half of the machine's")
    add("--score-timeout", type=_seconds, default=300.0, help="seconds for one call of a scorer")
    add("--client-timeout", type=_seconds, default=20.0, help="seconds to send headers, or 64 KiB")
    add("--grace", type=_seconds, default=20.0, help="seconds from SIGTERM to the end")
    add("--isolate", action="store_true", help="each reward in a process of its own, restarted")
    add("--print-openapi", action="store_true", help="write the schema and end")
    add("--debug", action="store_true", help="show the traceback of a mistake")
    return parser.parse_args(argv)


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _custom(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if not name or ":" not in path:
        raise argparse.ArgumentTypeError(f"{text!r} must read name=package.module:attribute")
    return name, path


def _options(text: str) -> dict[str, dict[str, Any]]:
    try:
        options = parse_json(text, f"{text!r:.80}")
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
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


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} must be seconds, more than 0, at most 86400")
    return value


def _milliseconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 60_000:
        raise argparse.ArgumentTypeError(f"{text!r} must be milliseconds, 0 to 60000")
    return value
