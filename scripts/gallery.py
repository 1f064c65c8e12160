"""Draw prompts with a model and checkpoints of a run, on one picture and one page.

    python scripts/gallery.py logs/RUN --out gallery
    python scripts/gallery.py logs/RUN --checkpoints 40 80 best --prompts mine.txt --out gallery

Writes gallery.png, gallery.html, which needs no other file and no network, and the pictures with
their scores to samples/. All else is as the run's config has it; --config.FIELD=VALUE changes it.
"""

from argparse import Namespace
from pathlib import Path

from flow_grpo.config import command_line
from flow_grpo.config.mistakes import Parser
from flow_grpo.config.places import find_files
from flow_grpo.data.prompts import read_file
from flow_grpo.errors import UserError

COUNT = 8


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="the folder of a run, logs/RUN")
    parser.add_argument(
        "--checkpoints",
        nargs="+",
        default=["latest"],
        metavar="NAME",
        help="latest, best, a step or a path; the base always comes first",
    )
    parser.add_argument("--prompts", type=Path, help="a .txt, .jsonl, .csv or .parquet file")
    parser.add_argument(
        "--count", type=int, help=f"how many prompts; of a file all, of the run's tests {COUNT}"
    )
    parser.add_argument("--out", type=Path, default=Path("gallery"), help="new folder")
    parser.add_argument("--debug", action="store_true", help="show the traceback of a mistake")
    args, options = parser.parse_with_fields()
    if args.count is not None and args.count < 1:
        parser.error(f"--count {args.count} must be at least 1")
    command_line.set_up_logging()
    command_line.call_and_exit(lambda: draw(args, options), debug=args.debug)


def draw(args: Namespace, options: list[str]) -> None:
    # here: help and mistakes should not wait for torch
    from flow_grpo.demo import gallery
    from flow_grpo.demo.painter import find_checkpoints
    from flow_grpo.draw.compare import evaluate_all
    from flow_grpo.draw.evaluation import BASE
    from flow_grpo.draw.prompts import build_test_prompts
    from flow_grpo.draw.saved import check_eval_fields, config_of_run

    config = config_of_run(args.run, options)
    check_eval_fields(options, config)
    if any(option.startswith("--config.log_images") for option in options):
        raise UserError("--config.log_images has no effect in a gallery; set --count")
    checkpoints = find_checkpoints(args.run, args.checkpoints)
    find_files(config)
    if args.prompts:
        columns = config.dataset_column, config.image_column, config.metadata_columns
        prompts = read_file(args.prompts, *columns)
        prompts = prompts[: args.count]
    else:
        prompts = build_test_prompts(config)[: args.count or COUNT]
    config.log_images = len(prompts)
    evaluate_all(
        config,
        [BASE, *map(str, checkpoints)],
        args.out,
        pictures=len(prompts),
        prompts=prompts,
        write=gallery.write,
    )


if __name__ == "__main__":
    main()
