"""Score models on a benchmark with its pinned protocol.

    python scripts/bench.py --list
    python scripts/bench.py tiny_scenes --checkpoint base --checkpoint logs/RUN
    python scripts/bench.py geneval --config config/grpo.py:geneval_sd3 --checkpoint base,logs/RUN
    python scripts/bench.py geneval --help

The protocol fixes prompts, samples per prompt, sampler and scorers; every deviation is printed and
stored with the scores. Model and precision come from --config, from the first run among the
checkpoints, or for the tiny benchmarks from their preset. Repeat an interrupted command to resume
it; for diffusion models, more candidates can be added. Writes results.json, results.md,
results.csv, and the samples of each candidate. docs/quality_benchmarks.md lists the protocols.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from flow_grpo.benchmarks.protocol import Protocol, benchmark_names, get_protocol
from flow_grpo.benchmarks.session import Overrides
from flow_grpo.config import command_line
from flow_grpo.config.error_reporting import ScriptParser, exit_on_user_error, print_text
from flow_grpo.errors import UserError

SAMPLING = {  # options that replace a sampling setting of the protocol
    "steps": (int, "sampling steps"),
    "guidance": (float, "guidance scale"),
    "height": (int, "height of the images in pixels"),
    "width": (int, "width of the images in pixels"),
    "temperature": (float, "sampling temperature of responses; 0 is greedy decoding"),
    "max_new_tokens": (int, "maximum length of a response in tokens"),
}
# fields of the config that the protocol sets, and the options for a deviation
PINNED = {
    "sample.eval_num_steps": "--steps",
    "sample.num_steps": "--steps",
    "sample.eval_guidance_scale": "--guidance",
    "sample.guidance_scale": "--guidance",
    "height": "--height",
    "width": "--width",
    "resolution": "--height and --width",
    "seed": "--seed",
    "dataset": "--prompts",
    "eval_prompts": "--num_prompts",
    "eval_questions": "--num_prompts",
    "eval_dataset": "--prompts",
    "sample.max_new_tokens": "--max_new_tokens",
    "sample.temperature": "--temperature",
    "eval_reward_fn": "--scorers",
    "reward_fn": "--scorers",
}


def build_parser() -> ScriptParser:
    """Return the parser of the command line."""
    parser = ScriptParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", metavar="NAME", help="benchmark; see --list")
    parser.add_argument("--list", action="store_true", help="list the benchmarks")
    parser.add_argument(
        "--checkpoint",
        action="append",
        default=[],
        help="base, a run, a checkpoint, a LoRA or a model, as in evaluate; several are compared "
        "with the first; default: base",
    )
    parser.add_argument("--config", help="config or preset of the base model")
    parser.add_argument("--out", type=Path, help="output directory; default: bench/NAME")
    group = parser.add_argument_group("deviations from the protocol")
    group.add_argument("--prompts", type=Path, help="file or directory with the prompts")
    group.add_argument(
        "--num_prompts", type=_positive, help="evaluate a subset, spread evenly over the prompts"
    )
    group.add_argument("--samples", type=_positive, help="images or responses per prompt")
    group.add_argument("--seed", type=int, help="noise seed")
    group.add_argument("--scorers", help="scorers to use, separated by commas")
    for name, (kind, text) in SAMPLING.items():
        group.add_argument(f"--{name}", type=kind, help=text)
    parser.add_argument("--debug", action="store_true", help="show tracebacks of user errors")
    return parser


def main() -> None:
    """Parse the command line and run a benchmark."""
    parser = build_parser()
    words = sys.argv[1:]
    if {"-h", "--help"} & {*words} and (named := [w for w in words if w in benchmark_names()]):
        print_text(describe(get_protocol(named[0])) + "\n")
    args, options = parser.parse_with_overrides()
    if args.list:
        print_text("\n".join(map(describe_in_a_line, benchmark_names())))
        return
    if args.name is None:
        parser.error("NAME is missing; --list lists the benchmarks")
    protocol = exit_on_user_error(lambda: check_options(args, options), debug=args.debug)
    command_line.set_up_logging()
    command_line.call_and_exit(lambda: run(protocol, args, options), debug=args.debug)


def check_options(args: argparse.Namespace, options: list[str]) -> Protocol:
    """Return the protocol; reject settings of the config that it pins."""
    protocol = get_protocol(args.name)
    for option in options:
        name = option.removeprefix("--config.").partition("=")[0]
        field = name if name in PINNED else name.partition(".")[0]
        if field in PINNED:
            raise UserError(
                "is fixed by the protocol of the benchmark",
                field=f"--config.{name}",
                hint=f"to deviate from it, use {PINNED[field]}",
            )
    return protocol


def run(protocol: Protocol, args: argparse.Namespace, options: list[str]) -> None:
    """Run the benchmark of the command line."""
    # imported here so that --help and user errors do not wait for torch
    from flow_grpo.config.saved_config import find_run_directory
    from flow_grpo.diffusion.config_loading import load_config_file, load_run_config

    if protocol.trainer == "diffusion":
        from flow_grpo.diffusion.benchmark import run_benchmark
        from flow_grpo.diffusion.fields import DIFFUSION_SPEC as SPEC
    else:
        from flow_grpo.vlm.benchmark import run_benchmark
        from flow_grpo.vlm.fields import VLM_SPEC as SPEC

    paths = [path for word in args.checkpoint for path in (word, *word.split(","))]
    found = next(filter(None, map(find_run_directory, map(Path, paths))), None)
    if args.config:
        config = load_config_file(args.config, options, SPEC)
    elif found:
        config = load_run_config(found, options, SPEC)
    elif protocol.preset:
        config = load_config_file(protocol.preset, options, SPEC)
    else:
        raise UserError(
            "is missing, so the model is unknown",
            field="--config",
            hint=f"pass a preset such as --config {SPEC.example}, or a run with --checkpoint",
        )
    out = args.out or Path("bench") / protocol.name
    run_benchmark(config, protocol, args.checkpoint, out, overrides_of(args, options, config))


def overrides_of(args: argparse.Namespace, options: list[str], config: Any) -> Overrides:
    """Return the deviations that the command line asks for."""
    given = any(option.startswith("--config.reward_options") for option in options)
    return Overrides(
        sampling={n: getattr(args, n) for n in SAMPLING if getattr(args, n) is not None},
        samples=args.samples,
        seed=args.seed,
        num_prompts=args.num_prompts,
        prompts=args.prompts,
        scorers=[each.strip() for each in args.scorers.split(",")] if args.scorers else (),
        # those of a run's config belong to its training
        scorer_options=config.reward_options.to_dict() if given else {},
    )


def describe_in_a_line(name: str) -> str:
    """Return the name and the title of a benchmark, and whether its scorers are available."""
    protocol = get_protocol(name)
    needs_judge = {*protocol.scorers} <= {*protocol.missing_scorers()}
    return f"{name:18} {protocol.title}" + " (needs a scorer that you provide)" * needs_judge


def describe(protocol: Protocol) -> str:
    """Return the protocol for --help."""
    source = protocol.prompts
    lines = [
        f"{protocol.name}: {protocol.title} ({protocol.paper})",
        f"prompts: {source.count}, {source.source} {source.files}",
        f"commit: {source.commit or '-'}  SHA-256: {source.sha256 or 'not pinned'}",
        f"samples per prompt: {protocol.samples}  seed: {protocol.seed}",
        *(f"sampling, {family}: {each}" for family, each in protocol.sampling.items()),
        f"scorers: {protocol.scorers}  formula: {protocol.formula}",
        *(f"not available: {n} ({why})" for n, why in protocol.missing_scorers().items()),
        f"from: {protocol.settings_from}",
        protocol.notes,
    ]
    return "\n".join(filter(None, lines))


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least 1")
    return number


if __name__ == "__main__":
    main()
