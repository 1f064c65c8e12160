"""List the built-in rewards, or check that they work.

    python scripts/rewards.py               # what each scores, size, speed, whether it is cached
    python scripts/rewards.py check pickscore --device cuda
    python scripts/rewards.py check all     # those whose weights are here

`check` loads a reward and scores three built-in pairs of a good and a bad sample.
"""

import shutil
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterator
from typing import Any

from flow_grpo.config import command_line
from flow_grpo.config.error_reporting import ScriptParser, invoked_command, print_text
from flow_grpo.errors import UserError
from flow_grpo.rewards.cards import RewardCard, get_card, plain_text, reward_cards
from flow_grpo.untrusted_files import parse_json

ALL = "all"
WRONG = 1  # exit code of a check whose pairs are ranked otherwise
HEAD = ["reward", "weights", "parameters", "GiB", "images/s", "range", "licence", "scores"]


def main() -> None:
    """Parse the command line and run a subcommand; list the rewards without one."""
    parser = ScriptParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    prog = invoked_command()
    check = commands.add_parser(
        "check",
        prog=f"{prog} check",
        help="load rewards and score three built-in pairs",
        description="Load rewards and score three built-in pairs of a good and a bad sample.",
    )
    check.add_argument("names", nargs="+", metavar="NAME", help=f"rewards, or {ALL!r}")
    add_reward_options(check)
    args = parser.parse_args()
    if args.command:
        command_line.set_up_logging()  # imports transformers, which the list does not need
    run = {None: list_rewards, "check": check_rewards}[args.command]
    command_line.call_and_exit(lambda: sys.exit(run(args)), debug=False)


def add_reward_options(parser: ScriptParser) -> None:
    """Add the options by which a reward is built."""
    parser.add_argument(
        "--options",
        type=_parse_options,
        default={},
        metavar="JSON",
        help='options of the reward, as in reward_options: {"dtype": "bfloat16"}',
    )
    parser.add_argument("--device", default="cpu", help="device of the model; default: cpu")
    parser.add_argument("--server", default="", metavar="URL", help="reward server to use instead")


def _parse_options(text: str) -> dict[str, Any]:
    try:
        options = parse_json(text, f"{text!r:.80}")
    except UserError as error:
        raise ArgumentTypeError(str(error)) from error
    if not isinstance(options, dict):
        raise ArgumentTypeError(f'{text!r} must be a JSON object: {{"option": value}}')
    return options


def list_rewards(args: Namespace) -> None:
    """Print a line per built-in reward; the last column is cut to the width of a terminal."""
    rows = [HEAD, *(_row(card) for card in reward_cards().values())]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        lines = [line[:width] for line in lines]
    notes = "GiB and images/s: measured on an H200. Weights: whether the hub cache has them."
    print_text("\n".join([*(line.rstrip() for line in lines), "", notes]))


def _row(card: RewardCard) -> list[str]:
    measured = [card.gpu_memory_gib, card.images_per_s]
    texts = [card.name, card.weights_state(), card.parameters or "-"]
    texts += ["-" if value is None else f"{value:g}" for value in measured]
    return texts + [plain_text(t) or "-" for t in (card.range, card.licence, card.score)]


def check_rewards(args: Namespace) -> int:
    """Check one reward in detail, or several with a line each; return the exit code."""
    if args.names == [ALL]:
        names = list(reward_cards())
    else:
        names = list(dict.fromkeys(args.names))
        for name in names:
            get_card(name)
    if len(names) == 1:
        return _check_one(names[0], args)
    if args.options or args.server:
        raise UserError("are those of a single reward", field="--options and --server")
    states = []
    for state, line in _check_several(names, args):
        states.append(state)
        print_text(line)
    print_text(
        f"\n{states.count('ok')} work, {states.count('wrong')} do not, "
        f"{states.count('skipped')} cannot be checked here"
    )
    return WRONG if "wrong" in states else 0


def _check_one(name: str, args: Namespace) -> int:
    from flow_grpo.rewards.reward_check import check_reward

    result = check_reward(name, options=args.options, device=args.device, server=args.server)
    width = max(len(pair.prompt) for pair in result.pairs)
    lines = [f"{'pair':{width}}  {'good':>9}  {'bad':>9}"]
    for pair in result.pairs:
        state = "ok" if pair.is_right else pair.failure or "wrong"
        lines.append(f"{pair.prompt:{width}}  {pair.good:>9.4g}  {pair.bad:>9.4g}  {state}")
    seconds = f"loaded in {result.load_seconds:.1f} s, scored in {result.score_seconds:.1f} s"
    print_text("\n".join([*lines, "", f"{name}: {result.verdict()} ({seconds})"]))
    return 0 if result.is_right else WRONG


def _check_several(names: list[str], args: Namespace) -> Iterator[tuple[str, str]]:
    """Yield the state ("ok", "wrong" or "skipped") and a line for each reward.

    Missing weights are not downloaded.
    """
    from flow_grpo.rewards.reward_check import check_reward

    width = max(map(len, names))
    for name in names:
        if missing := get_card(name).missing_weights():
            yield "skipped", f"{name:{width}}  skipped  weights missing: hf download {missing[0]}"
            continue
        try:
            result = check_reward(name, options={}, device=args.device)
        except UserError as error:
            yield "skipped", f"{name:{width}}  skipped  {error}"
            continue
        state = "ok" if result.is_right else "wrong"
        yield state, f"{name:{width}}  {state:7}  {result.verdict()}"


if __name__ == "__main__":
    main()
