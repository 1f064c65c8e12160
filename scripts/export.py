"""Merge a checkpoint into its model: a folder that diffusers or transformers load by themselves.

    python scripts/export.py --checkpoint logs/RUN --out exported
    python scripts/export.py --checkpoint logs/RUN/checkpoints/checkpoint-8 --raw \\
        --model assets/tiny-sd3 --dtype bfloat16 --out exported

Afterwards `DiffusionPipeline.from_pretrained("exported")`, or for a model that answers
`AutoModelForImageTextToText.from_pretrained("exported")`, needs neither peft nor this repo.
"""

import logging
from argparse import Namespace
from pathlib import Path

from flow_grpo.config.mistakes import Parser, told_plainly


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--checkpoint",
        type=Path,
        required=True,
        help="a run (its newest checkpoint), a checkpoint (its EMA) or a folder in one",
    )
    parser.add_argument("--out", type=Path, required=True, help="new folder for the pipeline")
    parser.add_argument(
        "--model", help="pipeline folder or hub id; by default the one the run was trained from"
    )
    parser.add_argument("--raw", action="store_true", help="the weights that are not averaged")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        default="float32",
        help="how weights are stored; parts that were not trained are copied as they are",
    )
    args = parser.parse_args()
    if args.model == "":
        parser.error("--model is empty; name a pipeline folder or hub id, or leave it out")
    told_plainly(lambda: merge(args), debug=False)


def merge(args: Namespace) -> None:
    # here: help and mistakes should not wait for these
    import torch
    from diffusers.utils import logging as diffusers_logging

    from flow_grpo.answer import export as vlm
    from flow_grpo.draw.export import export
    from flow_grpo.run.export import Source

    diffusers_logging.set_verbosity(logging.CRITICAL)  # what is wrong is told in one line
    source = Source.find(args.checkpoint, raw=args.raw)
    model, revision = (args.model, "main") if args.model else source.trained_model()
    write = vlm.export if vlm.answers(source, model) else export
    write(source, model, args.out, getattr(torch, args.dtype), revision)
    print(f"wrote {args.out}: {model} with {source}")


if __name__ == "__main__":
    main()
