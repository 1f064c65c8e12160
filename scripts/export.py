"""Merge a checkpoint into its model and save it as a stock diffusers or transformers model.

    python scripts/export.py --checkpoint logs/RUN --out exported
    python scripts/export.py --checkpoint logs/RUN/checkpoints/checkpoint-8 --raw \\
        --model assets/tiny-sd3 --dtype bfloat16 --out exported

Load it with `DiffusionPipeline.from_pretrained("exported")`, or for a VLM with
`AutoModelForImageTextToText.from_pretrained("exported")`; neither needs peft or this repository.
"""

import logging
from argparse import Namespace
from pathlib import Path

from flow_grpo.config.error_reporting import ScriptParser, exit_on_user_error


def main() -> None:
    """Parse the command line and export a model."""
    parser = ScriptParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--checkpoint",
        type=Path,
        required=True,
        help="a run (its newest checkpoint), a checkpoint (its EMA weights) or a directory in one",
    )
    parser.add_argument("--out", type=Path, required=True, help="new directory for the model")
    parser.add_argument(
        "--model", help="model directory or hub id; default: the model that the run started from"
    )
    parser.add_argument("--raw", action="store_true", help="export the weights without EMA")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        default="float32",
        help="dtype of the saved weights; components that were not trained are copied unchanged",
    )
    args = parser.parse_args()
    if args.model == "":
        parser.error("--model is empty; pass a model directory or hub id, or omit it")
    exit_on_user_error(lambda: merge(args), debug=False)


def merge(args: Namespace) -> None:
    """Write the exported model; torch is imported only now."""
    # imported here so that --help and user errors do not wait for torch
    import torch
    from diffusers.utils import logging as diffusers_logging

    from flow_grpo.diffusion.export import export
    from flow_grpo.training.export import ExportSource
    from flow_grpo.vlm import export as vlm

    diffusers_logging.set_verbosity(logging.CRITICAL)  # errors are reported in one line
    source = ExportSource.find(args.checkpoint, raw=args.raw)
    model, revision = (args.model, "main") if args.model else source.trained_model()
    write = vlm.export if vlm.is_vlm_checkpoint(source, model) else export
    write(source, model, args.out, getattr(torch, args.dtype), revision)
    print(f"wrote {args.out}: {model} with {source}")


if __name__ == "__main__":
    main()
