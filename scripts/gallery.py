"""Render prompts with the base model and trained weights as one image and one HTML page.

    python scripts/gallery.py logs/RUN --out gallery
    python scripts/gallery.py logs/RUN --checkpoints 40 80 best --prompts mine.txt --out gallery
    python scripts/gallery.py --config config/grpo.py:tiny_ocr --checkpoints lora.safetensors

Writes gallery.png, a self-contained gallery.html, and the images with their scores to samples/.
Settings come from the run's config or from --config; --config.FIELD=VALUE overrides them.
"""

from argparse import Namespace
from pathlib import Path

from flow_grpo.config import command_line
from flow_grpo.config.error_reporting import ScriptParser
from flow_grpo.config.paths import resolve_config_paths
from flow_grpo.data.rows import read_file
from flow_grpo.errors import UserError

COUNT = 8


def main() -> None:
    """Parse the command line and write the gallery."""
    parser = ScriptParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, nargs="?", help="run directory, logs/RUN")
    parser.add_argument("--config", help="path/to/config.py:preset, for weights without a run")
    parser.add_argument(
        "--checkpoints",
        nargs="+",
        metavar="NAME",
        help="latest (default), best or a step of the run, or the path or hub id of a run, a "
        "checkpoint, a LoRA or a model; the base model always comes first",
    )
    parser.add_argument("--prompts", type=Path, help="a .txt, .jsonl, .csv or .parquet file")
    parser.add_argument(
        "--count",
        type=int,
        help=f"number of prompts; default: all of --prompts, or {COUNT} of the run's test prompts",
    )
    parser.add_argument("--out", type=Path, default=Path("gallery"), help="new directory")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of user errors")
    args, options = parser.parse_with_overrides()
    if args.count is not None and args.count < 1:
        parser.error(f"--count={args.count} must be at least 1")
    if (args.run is None) == (args.config is None):
        parser.error("pass either a run (logs/RUN) or --config")
    if args.config and not args.checkpoints:
        parser.error("--config needs --checkpoints")
    command_line.set_up_logging()
    command_line.call_and_exit(lambda: draw(args, options), debug=args.debug)


def draw(args: Namespace, options: list[str]) -> None:
    """Evaluate the base model and trained weights on some prompts, and write a gallery."""
    # imported here so that --help and user errors do not wait for torch
    from flow_grpo.demo import gallery
    from flow_grpo.demo.generator import find_checkpoints
    from flow_grpo.diffusion.checkpoint_evaluation import evaluate_checkpoints
    from flow_grpo.diffusion.config_loading import (
        check_eval_fields,
        load_config_file,
        load_run_config,
    )
    from flow_grpo.diffusion.prompts import build_test_prompts, row_layout
    from flow_grpo.training.candidates import BASE
    from flow_grpo.training.checkpoint import LATEST

    config = (
        load_run_config(args.run, options) if args.run else load_config_file(args.config, options)
    )
    check_eval_fields(options, config)
    if any(option.startswith("--config.log_images") for option in options):
        raise UserError(
            "has no effect in a gallery", field="--config.log_images", hint="use --count"
        )
    checkpoints = find_checkpoints(args.run, args.checkpoints or [LATEST])
    resolve_config_paths(config)
    if args.prompts:
        prompts = read_file(args.prompts, row_layout(config))[: args.count]
    else:
        prompts = build_test_prompts(config)[: args.count or COUNT]
    config.log_images = len(prompts)
    evaluate_checkpoints(
        config,
        [BASE, *checkpoints],
        args.out,
        num_images=len(prompts),
        prompts=prompts,
        write=gallery.write,
    )


if __name__ == "__main__":
    main()
