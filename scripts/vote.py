"""Serve a page on which people choose the better of two images.

    python scripts/vote.py --out votes      # for runs with reward_fn={'human': 1.0}

Votes are appended to votes.jsonl in --out, which --config.preferences reads. The page is served to
this machine only, unless --host is given.
"""

import contextlib
import logging
import os
import signal
from argparse import Namespace
from pathlib import Path

from flow_grpo.config import command_line
from flow_grpo.config.error_reporting import ScriptParser
from flow_grpo.errors import UserError
from flow_grpo.host_header import is_local
from flow_grpo.votes.ask import ORDERS
from flow_grpo.votes.book import VoteBook
from flow_grpo.votes.image_files import ImageFiles
from flow_grpo.votes.server import VoteService, build_server
from flow_grpo.votes.store import writer_lock

LOCAL = "127.0.0.1"
PORT = 8701
logger = logging.getLogger("flow_grpo")


def main() -> None:
    """Parse the command line and serve the page."""
    parser = ScriptParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory of the votes")
    parser.add_argument(
        "--ask", choices=list(ORDERS), default="random", help="which pairs first; default random"
    )
    parser.add_argument(
        "--host", default=LOCAL, help=f"default {LOCAL}; addresses of a network need --token-env"
    )
    parser.add_argument("--port", type=int, default=PORT, help=f"default {PORT}; 0: any free port")
    parser.add_argument(
        "--token-env", metavar="NAME", help="environment variable with the required token"
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks of user errors")
    args = parser.parse_args()
    command_line.set_up_logging()
    command_line.call_and_exit(lambda: serve(args), debug=args.debug)


def serve(args: Namespace) -> None:
    """Serve the voting page until Ctrl-C or SIGTERM."""
    token = read_token(args)
    with writer_lock(args.out), contextlib.closing(VoteBook(args.out, ORDERS[args.ask])) as book:
        service = VoteService(book, ImageFiles(args.out), token=token)
        server = build_server(service, args.host, args.port)
        suffix = f"/#token={token}" if token else ""
        logger.info("open http://%s:%d%s  (Ctrl-C to stop)", args.host, server.server_port, suffix)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with server, contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


def read_token(args: Namespace) -> str | None:
    """Return the required token; an address that other machines can reach needs one."""
    token = os.environ.get(args.token_env, "").strip() if args.token_env else ""
    if args.token_env and not token:
        raise UserError(
            "names an environment variable that is not set",
            field="--token-env",
            value=args.token_env,
        )
    if not token and not is_local(args.host):
        raise UserError(
            "is reachable from other machines and needs a token",
            field="--host",
            value=args.host,
            hint="set an environment variable to one and name it with --token-env",
        )
    return token or None


if __name__ == "__main__":
    main()
