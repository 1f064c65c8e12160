"""Try a model before and after training, in a browser.

    python scripts/demo.py logs/RUN
    python scripts/demo.py logs/RUN --no-rewards --port 7870 --config.device=cpu
    python scripts/demo.py --config config/grpo.py:tiny_ocr       # a model as it is

Both draw your prompt from the same noise. Only this machine reaches the page, unless --host says
otherwise.
"""

import contextlib
import logging
import os
import signal
import socket
import tempfile
import threading
from argparse import BooleanOptionalAction, Namespace
from importlib.util import find_spec
from pathlib import Path

from flow_grpo.config import command_line
from flow_grpo.config.mistakes import Parser
from flow_grpo.errors import UserError
from flow_grpo.hosts import is_local

LOCAL = "127.0.0.1"
PORT = 7860
logger = logging.getLogger("flow_grpo")


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, nargs="?", help="the folder of a run, logs/RUN")
    parser.add_argument("--config", help="path/to/config.py:preset, for a model without a run")
    parser.add_argument("--host", default=LOCAL, help=f"who may reach it; {LOCAL}: this machine")
    parser.add_argument("--port", type=int, default=PORT, help=f"{PORT}; 0 takes a free one")
    parser.add_argument(
        "--rewards", action=BooleanOptionalAction, default=True, help="score what is drawn"
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of a mistake")
    args, options = parser.parse_with_fields()
    if (args.run is None) == (args.config is None):
        parser.error("name a run (logs/RUN) or a --config, and not both")
    command_line.set_up_logging()
    command_line.call_and_exit(lambda: show(args, options), debug=args.debug)


def show(args: Namespace, options: list[str]) -> None:
    if find_spec("gradio") is None:
        raise UserError("the demo needs gradio: pip install -e '.[demo]'")
    port = find_port(args.host, args.port)
    # here: help and mistakes should not wait for torch
    from flow_grpo.demo.painter import Painter
    from flow_grpo.draw.saved import check_eval_fields, config_of_file, config_of_run

    config = config_of_run(args.run, options) if args.run else config_of_file(args.config, options)
    check_eval_fields(options, config)
    painter = Painter(config, args.run, rewards=args.rewards)
    with tempfile.TemporaryDirectory(prefix="flow_grpo-demo-") as folder:
        # read when gradio is imported: no report of its use, and no files that stay
        os.environ.update(GRADIO_ANALYTICS_ENABLED="False", GRADIO_TEMP_DIR=folder)
        from flow_grpo.demo.page import build_page, serve

        place, edits = Path(folder), bool(painter.limits.pictures[-1])
        page = build_page(painter, place)
        url = serve(page, place, args.host, port, uploads=edits)
        logger.info("open %s  (Ctrl-C ends it)", url)
        if not is_local(args.host):
            logger.warning("whoever reaches %s can draw: there is no password", args.host)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
        painter.close()


def find_port(host: str, port: int) -> int:
    """That it is free is known before a model loads, which may take minutes."""
    try:
        if not 0 <= port < 2**16:
            raise OverflowError("ports go from 0 to 65535")
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return probe.getsockname()[1]
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(
            f"cannot listen on --host {host} --port {port}: {why}; --port 0 takes a free one"
        ) from error


if __name__ == "__main__":
    main()
