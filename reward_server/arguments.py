"""Command-line arguments of the server."""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from flow_grpo.config.error_reporting import ScriptParser
from flow_grpo.errors import UserError
from flow_grpo.untrusted_files import parse_json
from reward_server.limits import Limits

MB = 2**20
LIMIT_HELP = {
    "max_images": "images per request",
    "max_pixels": "pixels per image",
    "max_queue": "images per reward that are queued or being scored",
    "max_queue_pixels": "pixels of these images",
    "max_connections": "open connections; idle and stalled ones are closed for new ones",
}


class _ServerParser(ScriptParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message, hint="--help lists all options")


def build_limits(args: argparse.Namespace) -> Limits:
    """Return the limits that the command line sets."""
    limits = {name: getattr(args, name) for name in LIMIT_HELP}
    if args.max_memory_mb is not None:
        limits["max_memory_bytes"] = args.max_memory_mb * MB
    return Limits(max_body_bytes=args.max_body_mb * MB, **limits)


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; invalid arguments raise `UserError`."""
    parser = _ServerParser(
        description="Scores images over HTTP.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--rewards", type=_parse_names, default=[], help="comma-separated names")
    add("--host", default="127.0.0.1", help="address; non-loopback ones need --token-env")
    add("--port", type=_parse_port, default=18085, help="port; 0 for any free one")
    add(
        "--fd",
        type=_parse_positive_int,
        help="descriptor of an inherited listening socket instead of --host and --port; the server "
        "ends with the process that started it",
    )
    add(
        "--parent-pid",
        type=_parse_positive_int,
        metavar="PID",
        help="that process: with --fd, the server exits if it has already ended",
    )
    add("--token-env", metavar="NAME", help="environment variable with the required token")
    add(
        "--workers",
        type=_parse_positive_int,
        help="processes of each reward that uses some, such as ocr",
    )
    add("--options", type=_parse_options, default={}, help='JSON: {"reward": {"option": value}}')
    add(
        "--custom",
        type=_parse_custom,
        action="append",
        default=[],
        metavar="NAME=PACKAGE.MODULE:ATTR",
        help="custom reward, served under this name",
    )
    add("--device", default="cpu", help="device of rewards with a model")
    add("--max-batch", type=_parse_positive_int, default=64, help="images per call of a scorer")
    add(
        "--max-wait-ms",
        type=_parse_milliseconds,
        default=5.0,
        help="time to wait for more images before a call",
    )
    for name, meaning in LIMIT_HELP.items():
        default = getattr(Limits(), name)
        add(f"--{name.replace('_', '-')}", type=_parse_positive_int, default=default, help=meaning)
    add(
        "--max-body-mb",
        type=_parse_positive_int,
        default=64,
        help="size of a request in MiB",
    )
    add(
        "--max-memory-mb",
        type=_parse_positive_int,
        help="MiB for decoded images; half of the machine's memory if not given",
    )
    add(
        "--score-timeout",
        type=_parse_seconds,
        default=300.0,
        help="seconds per call of a scorer",
    )
    add(
        "--client-timeout",
        type=_parse_seconds,
        default=20.0,
        help="seconds to send the headers, or 64 KiB of a body",
    )
    add("--grace", type=_parse_seconds, default=20.0, help="seconds from SIGTERM to exit")
    add("--isolate", action="store_true", help="run each reward in a process that is restarted")
    add("--print-openapi", action="store_true", help="print the OpenAPI schema and exit")
    add("--debug", action="store_true", help="show tracebacks of user errors")
    return parser.parse_args(argv)


def _parse_names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _parse_custom(text: str) -> tuple[str, str]:
    """Parse NAME=PACKAGE.MODULE:ATTRIBUTE to (name, import path)."""
    name, _, path = text.partition("=")
    if not name or ":" not in path:
        raise argparse.ArgumentTypeError(f"{text!r} must be name=package.module:attribute")
    return name, path


def _parse_options(text: str) -> dict[str, dict[str, Any]]:
    """Parse the JSON of --options: options by reward."""
    try:
        options = parse_json(text, f"{text!r:.80}")
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if not isinstance(options, dict) or not all(isinstance(o, dict) for o in options.values()):
        raise argparse.ArgumentTypeError(f'{text!r} must be {{"reward": {{"option": value}}}}')
    return options


def _parse_positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least 1")
    return int(text)


def _parse_port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} must be a port from 0 to 65535")
    return int(text)


def _parse_seconds(text: str) -> float:
    """Parse seconds above 0 and up to a day."""
    value = _parse_float(text)
    if not 0 < value <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} must be seconds above 0 and at most 86400")
    return value


def _parse_milliseconds(text: str) -> float:
    """Parse milliseconds from 0 to a minute."""
    value = _parse_float(text)
    if not 0 <= value <= 60_000:
        raise argparse.ArgumentTypeError(f"{text!r} must be milliseconds from 0 to 60000")
    return value


def _parse_float(text: str) -> float:
    """Parse a number; other text is -1, which no option accepts."""
    try:
        return float(text)
    except ValueError:
        return -1.0
