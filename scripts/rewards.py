"""List the built-in rewards, check one, measure its agreement with votes, or convert weights.

    python scripts/rewards.py               # what each scores, size, speed, whether it is cached
    python scripts/rewards.py check pickscore --device cuda
    python scripts/rewards.py check all     # those whose weights are cached
    python scripts/rewards.py agree votes --reward pickscore --reward clipscore --out agreement
    python scripts/rewards.py convert pytorch_model.bin model.safetensors

`check` loads a reward and scores three built-in pairs of a good and a bad sample. `agree` scores
the pairs of a preference set (docs/preferences.md), prints how often each reward prefers the image
that people prefer, and writes scores.csv, agreement.json and agreement.png to --out. `convert`
reads pickled weights without executing code and prints the checksums.
"""

import csv
import importlib.util
import json
import math
import shutil
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flow_grpo.atomic_io import check_output_folder
from flow_grpo.config import command_line
from flow_grpo.config.error_reporting import ScriptParser, invoked_command, print_text
from flow_grpo.errors import UserError
from flow_grpo.rewards.cards import RewardCard, get_card, plain_text, reward_cards
from flow_grpo.untrusted_files import parse_json

if TYPE_CHECKING:
    from flow_grpo.votes.agreement import PairScore, RewardAgreement

ALL = "all"
WRONG = 1  # exit code if pairs are not ranked as expected
HEAD = ["reward", "weights", "parameters", "GiB", "samples/s", "range", "licence", "scores"]


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
    agree = commands.add_parser(
        "agree",
        prog=f"{prog} agree",
        help="measure the agreement of rewards with a preference set",
        description="Measure how often rewards prefer the image that people prefer.",
    )
    add = agree.add_argument
    add("pairs", metavar="PAIRS", help="preference set: file, directory or hub id")
    add("--reward", action="append", required=True, metavar="NAME", help="repeatable")
    add("--split", choices=("train", "test"), default="train", help="default: train")
    add("--category", default="category", metavar="COLUMN", help="default: category")
    add("--limit", type=_parse_count, help="number of pairs; default: all")
    add("--batch", type=_parse_count, default=64, help="images per call; default: 64")
    add("--out", type=Path, help="new directory for CSV, JSON and figure")
    add(
        "--custom",
        action="append",
        default=[],
        type=_parse_assignment,
        metavar="NAME=PATH",
        help="custom reward, as package.module:attribute or file.py:attribute",
    )
    add_reward_options(agree)
    convert = commands.add_parser(
        "convert",
        prog=f"{prog} convert",
        help="convert pickled weights to safetensors",
        description="Convert weights saved by torch.save to safetensors without executing code.",
    )
    convert.add_argument("source", type=Path, metavar="IN", help="file written by torch.save")
    convert.add_argument("target", type=Path, metavar="OUT", help="new .safetensors file")
    convert.add_argument(
        "--modules", action="store_true", help="IN contains a whole module instead of a state dict"
    )
    convert.add_argument("--sha256", default="", metavar="DIGEST", help="expected checksum of IN")
    args = parser.parse_args()
    if args.command:
        command_line.set_up_logging()  # imports transformers, which the list does not need
    run = {
        None: list_rewards,
        "check": check_rewards,
        "agree": measure_rewards,
        "convert": convert_file,
    }[args.command]
    command_line.call_and_exit(lambda: sys.exit(run(args) or 0), debug=False)


def add_reward_options(parser: ScriptParser) -> None:
    """Add the options from which rewards are built."""
    parser.add_argument(
        "--options",
        type=_parse_options,
        default={},
        metavar="JSON",
        help='options by reward, as in reward_options: {"pickscore": {"dtype": "bfloat16"}}',
    )
    parser.add_argument("--device", default="cpu", help="device of the models; default: cpu")
    parser.add_argument(
        "--server",
        action="append",
        default=[],
        type=_parse_assignment,
        metavar="NAME=URL",
        help="reward server to use instead, or env:NAME for an isolated environment",
    )


def _parse_options(text: str) -> dict[str, dict[str, Any]]:
    try:
        options = parse_json(text, f"{text!r:.80}")
    except UserError as error:
        raise ArgumentTypeError(str(error)) from error
    if not isinstance(options, dict) or not all(isinstance(o, dict) for o in options.values()):
        raise ArgumentTypeError(f'{text!r} must be {{"reward": {{"option": value}}}}')
    return options


def _parse_assignment(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if not name or not value:
        raise ArgumentTypeError(f"{text!r} must be NAME=VALUE")
    return name, value


def _parse_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} must be an integer of at least 1")
    return int(text)


def list_rewards(args: Namespace) -> None:
    """Print a line per built-in reward; the last column is cut to the width of a terminal."""
    rows = [HEAD, *(_row(card) for card in reward_cards().values())]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        lines = [line[:width] for line in lines]
    notes = "GiB and samples/s: measured on an H200. Weights: whether the hub cache has them."
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
    for field, given in (("--options", args.options), ("--server", dict(args.server))):
        if unknown := given.keys() - {*names}:
            raise UserError(f"names {min(unknown)!r}, which is not checked", field=field)
    if len(names) == 1:
        return _check_one(names[0], args)
    states = []
    for state, line in _check_several(names, args):
        states.append(state)
        print_text(line)
    print_text(
        f"\n{states.count('ok')} work, {states.count('wrong')} do not, "
        f"{states.count('skipped')} cannot be checked here"
    )
    return WRONG if "wrong" in states else 0


def _settings(name: str, args: Namespace) -> dict[str, Any]:
    """Return the arguments of `check_reward` for a reward."""
    options, server = args.options.get(name, {}), dict(args.server).get(name, "")
    return {"options": options, "device": args.device, "server": server}


def _check_one(name: str, args: Namespace) -> int:
    from flow_grpo.rewards.reward_check import check_reward

    result = check_reward(name, **_settings(name, args))
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
        settings = _settings(name, args)
        missing = get_card(name).missing_weights()
        if missing and not settings["server"] and "model" not in settings["options"]:
            commands = " && ".join(f"hf download {each}" for each in missing)
            yield "skipped", f"{name:{width}}  skipped  weights missing: {commands}"
            continue
        try:
            result = check_reward(name, **settings)
        except UserError as error:
            yield "skipped", f"{name:{width}}  skipped  {error}"
            continue
        state = "ok" if result.is_right else "wrong"
        yield state, f"{name:{width}}  {state:7}  {result.verdict()}"


def measure_rewards(args: Namespace) -> None:
    """Print the agreement of each reward with a preference set, and write it to --out."""
    from flow_grpo.data.preferences import load_preferences
    from flow_grpo.report.console import progress_bar
    from flow_grpo.rewards.config_checks import check_reward_names
    from flow_grpo.votes.agreement import agreement_by_category, choose_pairs, score_pairs

    names = list(dict.fromkeys(args.reward))
    custom, servers = dict(args.custom), dict(args.server)
    check_reward_names(names, args.options, custom, servers)
    if args.out is not None:
        _check_output(args.out)
    try:
        found = load_preferences(args.pairs, args.split)
    except UserError as error:
        if error.field != "preferences.data":
            raise
        raise UserError(error.rule, field="PAIRS", value=args.pairs, hint=error.hint) from error
    pairs = choose_pairs(found, args.limit, args.pairs)
    scores, agreements = {}, []
    try:
        for name in names:
            scores[name] = score_pairs(
                pairs,
                name,
                category=args.category,
                batch=args.batch,
                follow=progress_bar,
                device=args.device,
                custom=custom,
                servers={name: servers.get(name, "")},
                options={name: args.options[name]} if name in args.options else {},
            )
            agreements += agreement_by_category(name, scores[name])
    finally:  # an error or an interrupt does not discard the rewards before it
        if agreements:
            print_text(_agreement_table(agreements))
            if args.out is not None:
                write_agreement(args.out, args.pairs, scores, agreements)
                print_text(f"\nwrote scores.csv, agreement.json and agreement.png to {args.out}")


def _check_output(out: Path) -> None:
    """Reject a directory that has files or cannot be made, and a missing matplotlib.

    Nothing has been scored yet.
    """
    check_output_folder(out, "--out", out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError("is not empty", field="--out", value=str(out), hint="use a new directory")
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("figures need matplotlib", hint="pip install -e '.[plot]'")


def _agreement_table(agreements: "list[RewardAgreement]") -> str:
    from flow_grpo.report.console import format_table

    head = ["reward", "category", "pairs", "no score", "ties", "accuracy", "95 % interval", "AUC"]
    rows = [
        [
            found.reward,
            found.category,
            *(f"{n:,}" for n in (found.pairs, found.missing, found.ties)),
            f"{found.accuracy:.1%}",
            " to ".join(f"{limit:.1%}" for limit in found.interval),
            f"{found.auc:.3f}",
        ]
        for found in agreements
    ]
    return format_table([head, *rows])


def write_agreement(
    out: Path,
    source: str,
    scores: "dict[str, list[PairScore]]",
    agreements: "list[RewardAgreement]",
) -> None:
    """Write the scores of all pairs, the agreement and its figure."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "scores.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["reward", "prompt", "category", "chosen", "rejected", "probability"])
        for name, pairs in scores.items():
            writer.writerows([name, *asdict(pair).values()] for pair in pairs)
    rows = [
        {key: _json_number(value) for key, value in asdict(found).items()} for found in agreements
    ]
    content = {"pairs": source, "agreement": rows}
    (out / "agreement.json").write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    draw_agreement(out / "agreement.png", agreements)


def _json_number(value: Any) -> Any:
    """Replace NaN, which JSON does not support, by None."""
    if isinstance(value, tuple):
        return [_json_number(each) for each in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def draw_agreement(path: Path, agreements: "list[RewardAgreement]") -> None:
    """Draw the accuracies with their intervals, a row per reward and category."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [found for found in agreements if found.pairs][::-1]
    labels = [f"{found.reward}, {found.category} ({found.pairs})" for found in shown]
    values = [found.accuracy for found in shown]
    limits = [[abs(f.accuracy - f.interval[side]) for f in shown] for side in (0, 1)]
    figure, axes = plt.subplots(figsize=(7, 1.2 + 0.35 * len(shown)), layout="constrained")
    axes.errorbar(values, labels, xerr=limits, fmt="o", capsize=3)
    axes.axvline(0.5, color="grey", linestyle=":", label="chance")
    axes.set(xlim=(0, 1), xlabel="accuracy (95 % interval)")
    axes.legend(loc="lower left")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def convert_file(args: Namespace) -> None:
    """Convert pickled weights and print the checksums."""
    from flow_grpo.rewards.convert_weights import convert_weights

    digests = convert_weights(args.source, args.target, args.sha256, modules=args.modules)
    paths = (args.source, args.target)
    print_text("\n".join(f"{d}  {path}" for d, path in zip(digests, paths, strict=True)))


if __name__ == "__main__":
    main()
