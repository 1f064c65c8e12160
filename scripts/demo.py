"""Compare a model before and after training in the browser.

    python scripts/demo.py logs/RUN
    python scripts/demo.py logs/RUN --no-rewards --port 7870 --config.device=cpu
    python scripts/demo.py --config config/grpo.py:tiny_ocr       # an untrained model
    python scripts/demo.py --config config/grpo.py:general_ocr_sd3 \\
        --checkpoint jieliu/SD3.5M-FlowGRPO-Text

Both generate from the same noise. The page is served to this machine only, unless --host is given.
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
from flow_grpo.config.error_reporting import ScriptParser
from flow_grpo.errors import UserError
from flow_grpo.host_header import is_local

LOCAL = "127.0.0.1"
PORT = 7860
logger = logging.getLogger("flow_grpo")


def main() -> None:
    """Parse the command line and show the demo."""
    parser = ScriptParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, nargs="?", help="run directory, logs/RUN")
    parser.add_argument("--config", help="path/to/config.py:preset, for a model without a run")
    parser.add_argument(
        "--checkpoint",
        action="append",
        default=[],
        help="further weights to offer: the path or hub id of a run, a checkpoint, a LoRA or a "
        "model; may be repeated, or several separated by commas",
    )
    parser.add_argument("--host", default=LOCAL, help=f"address to listen on; default {LOCAL}")
    parser.add_argument("--port", type=int, default=PORT, help=f"default {PORT}; 0: any free port")
    parser.add_argument(
        "--rewards", action=BooleanOptionalAction, default=True, help="score generated images"
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks of user errors")
    args, options = parser.parse_with_overrides()
    if (args.run is None) == (args.config is None):
        parser.error("pass either a run (logs/RUN) or --config")
    command_line.set_up_logging()
    command_line.call_and_exit(lambda: show(args, options), debug=args.debug)


def show(args: Namespace, options: list[str]) -> None:
    """Serve the demo page until Ctrl-C or SIGTERM."""
    if find_spec("gradio") is None:
        raise UserError("the demo needs gradio", hint="pip install -e '.[demo]'")
    port = check_port(args.host, args.port)
    # imported here so that --help and user errors do not wait for torch
    from flow_grpo.demo.generator import DemoGenerator
    from flow_grpo.diffusion.config_loading import (
        check_eval_fields,
        load_config_file,
        load_run_config,
    )

    config = (
        load_run_config(args.run, options) if args.run else load_config_file(args.config, options)
    )
    check_eval_fields(options, config)
    generator = DemoGenerator(config, args.run, rewards=args.rewards, checkpoints=args.checkpoint)
    with tempfile.TemporaryDirectory(prefix="flow_grpo-demo-") as folder:
        # gradio reads these on import: no telemetry, and temporary files are removed at exit
        os.environ.update(GRADIO_ANALYTICS_ENABLED="False", GRADIO_TEMP_DIR=folder)
        from flow_grpo.demo.page import build_page, serve

        page = build_page(generator, Path(folder))
        is_editing = bool(generator.limits.images[-1])
        url = serve(page, Path(folder), args.host, port, uploads=is_editing)
        logger.info("open %s  (Ctrl-C to stop)", url)
        if not is_local(args.host):
            logger.warning("anyone who can reach %s can generate images: no password", args.host)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
        generator.close()


def check_port(host: str, port: int) -> int:
    """Return `port` if it is free, or any free port for 0; else raise a UserError.

    This runs before a model is loaded, which may take minutes.
    """
    try:
        if not 0 <= port < 2**16:
            raise OverflowError("ports range from 0 to 65535")
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return probe.getsockname()[1]
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"cannot be listened on ({host}): {reason}",
            field="--port",
            value=port,
            hint="--port 0 uses any free port",
        ) from error


if __name__ == "__main__":
    main()
