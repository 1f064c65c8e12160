"""Serve a page on which people choose the better of two images.

    python scripts/vote.py --checkpoint logs/RUN --prompts prompts.txt --out votes
    python scripts/vote.py --checkpoint base --checkpoint logs/RUN --prompts prompts.txt --out votes
    python scripts/vote.py --out votes           # for runs with reward_fn={'human': 1.0}
    python scripts/vote.py --summary votes       # win rates so far

One checkpoint generates two images per prompt, two checkpoints one each from the same noise. Votes
are appended to votes.jsonl in --out, which --config.preferences reads. Run the same command again
to continue. Settings come from --config or the first checkpoint's run; --config.FIELD=VALUE
overrides them. The page is served to this machine only, unless --host is given.
"""

import contextlib
import logging
import os
import signal
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from flow_grpo.config import command_line
from flow_grpo.config.error_reporting import ScriptParser
from flow_grpo.config.saved_config import find_run_directory
from flow_grpo.errors import UserError
from flow_grpo.host_header import is_local
from flow_grpo.votes.ask import ORDERS
from flow_grpo.votes.book import VoteBook
from flow_grpo.votes.image_files import ImageFiles
from flow_grpo.votes.server import VoteService, build_server
from flow_grpo.votes.store import writer_lock
from flow_grpo.votes.summary import format_summary, read_votes

if TYPE_CHECKING:
    from flow_grpo.votes.pairs import PairGenerator

LOCAL = "127.0.0.1"
PORT = 8701
PAIR_DEFAULTS = {"pairs_per_prompt": 1, "votes_per_pair": 1, "ahead": 32}
logger = logging.getLogger("flow_grpo")


def main() -> None:
    """Parse the command line; serve the page or print a summary."""
    parser = ScriptParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, help="directory of votes and images; an existing one is continued")
    add("--summary", type=Path, metavar="DIR", help="print a summary of a directory and exit")
    add(
        "--checkpoint",
        action="append",
        default=[],
        help="base, or the path or hub id of a run, a checkpoint, a LoRA or a model; once or twice",
    )
    add("--prompts", type=Path, help="a .txt, .jsonl, .csv or .parquet file")
    add("--config", help="path/to/config.py:preset; default: the run of the first checkpoint")
    add("--pairs_per_prompt", type=int, help="pairs per prompt, from different noise; default 1")
    add("--votes_per_pair", type=int, help="votes per pair, from different voters; default 1")
    add("--ahead", type=int, help="pairs generated in advance; default 32")
    add(
        "--ask",
        choices=list(ORDERS),
        default="random",
        help="order of the pairs: random (default), disagreement (first those on which voters are "
        "split, then those without votes) or margin (smallest difference in --reward first)",
    )
    add("--reward", help="reward for --ask margin")
    add("--host", default=LOCAL, help=f"default {LOCAL}; other addresses need --token-env")
    add("--port", type=int, default=PORT, help=f"default {PORT}; 0: any free port")
    add("--token-env", metavar="NAME", help="environment variable with the required token")
    add("--debug", action="store_true", help="show tracebacks of user errors")
    args, options = parser.parse_with_overrides()
    if (args.out is None) == (args.summary is None):
        parser.error("pass either --out or --summary")
    if args.checkpoint:
        command_line.set_up_logging()
    else:  # in a second, without torch
        command_line.log_to_stdout()
    if args.summary is None:
        check_arguments(parser, args, options)
    call = partial(serve, args, options) if args.out else partial(print_summary, args.summary)
    command_line.call_and_exit(call, debug=args.debug)


def check_arguments(parser: ScriptParser, args: Namespace, options: list[str]) -> None:
    """Reject options without effect and values out of range, and set defaults."""
    if bool(args.checkpoint) != bool(args.prompts):
        parser.error("--checkpoint and --prompts must be used together")
    needs_models = [name for name in (*PAIR_DEFAULTS, "config", "reward") if getattr(args, name)]
    if not args.checkpoint and (needs_models or options):
        parser.error(f"{(options or [f'--{needs_models[0]}'])[0]} needs --checkpoint")
    if bool(args.reward) != (args.ask == "margin"):
        parser.error("--reward and --ask margin must be used together")
    for name, default in PAIR_DEFAULTS.items():
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name}={value} must be at least 1")
        setattr(args, name, default if value is None else value)


def print_summary(folder: Path) -> None:
    """Print the win rates of a directory."""
    print(format_summary(read_votes(folder)))


def serve(args: Namespace, options: list[str]) -> None:
    """Serve the voting page until Ctrl-C or SIGTERM, then print the summary."""
    token = read_token(args)
    with contextlib.ExitStack() as stack:
        stack.enter_context(writer_lock(args.out))
        book = stack.enter_context(contextlib.closing(VoteBook(args.out, ORDERS[args.ask])))
        images = ImageFiles(args.out)
        generator = None
        service = VoteService(
            book,
            images,
            token=token,
            generation_status=lambda: generator.status() if generator else (0, ""),
            waits_for_runs=not args.checkpoint,
        )
        server = stack.enter_context(build_server(service, args.host, args.port))
        if args.checkpoint:
            generator = stack.enter_context(contextlib.closing(build_generator(args, options)))
            generator.start(book, images)
        fragment = f"#token={token}" if token else ""
        url = f"http://{args.host}:{server.server_port}/{fragment}"
        logger.info("open %s  (Ctrl-C to stop)", url)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
        print(format_summary(book.votes_by_ballot()), flush=True)


def build_generator(args: Namespace, options: list[str]) -> "PairGenerator":
    """Load the models that generate the pairs."""
    # imported here so that --help and user errors do not wait for torch
    from flow_grpo.config.paths import resolve_config_paths
    from flow_grpo.data.rows import read_file
    from flow_grpo.diffusion.config_loading import (
        check_eval_fields,
        load_config_file,
        load_run_config,
    )
    from flow_grpo.diffusion.prompts import row_layout
    from flow_grpo.votes.pairs import PairGenerator

    if args.config:
        config = load_config_file(args.config, options)
    else:
        named = [Path(part) for name in args.checkpoint for part in (name, *name.split(","))]
        run = next(filter(None, map(find_run_directory, named)), None)
        if run is None:
            raise UserError(
                "is not in a run directory, so its config is unknown",
                field="--checkpoint",
                value=args.checkpoint,
                hint="pass a config with --config",
            )
        config = load_run_config(run, options)
    check_eval_fields(options, config)
    resolve_config_paths(config)
    return PairGenerator(
        config,
        args.checkpoint,
        read_file(args.prompts, row_layout(config)),
        rounds=args.pairs_per_prompt,
        votes=args.votes_per_pair,
        ahead=args.ahead,
        reward=args.reward or "",
    )


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
            hint="put one in an environment variable and name it with --token-env",
        )
    return token or None


if __name__ == "__main__":
    main()
