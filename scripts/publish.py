"""Write a run's weights, figures and model card to a directory that is ready for the hub.

    python scripts/publish.py logs/RUN --out my-lora
    python scripts/publish.py logs/RUN/checkpoints/best --out my-lora --repo me/my-lora --merged

A diffusion LoRA is written in diffusers' format and with ComfyUI's key names, a VLM LoRA in PEFT's
format. Paths, user names, tokens and server addresses are removed from the published text.
"""

import logging
import re
from argparse import Namespace
from pathlib import Path

from flow_grpo.config.error_reporting import ScriptParser, exit_on_user_error


def main() -> None:
    """Parse the command line and publish a run."""
    parser = ScriptParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "run", type=Path, help="run directory (newest checkpoint), or a checkpoint such as .../best"
    )
    parser.add_argument("--out", type=Path, required=True, help="directory to create")
    parser.add_argument("--raw", action="store_true", help="publish the weights without EMA")
    parser.add_argument(
        "--merged", action="store_true", help="also write the complete model with the LoRA merged"
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="dtype of the merged weights; default: float32",
    )
    parser.add_argument(
        "--repo", default="", help="hub id to upload to, used in the card: USER/NAME"
    )
    parser.add_argument(
        "--base_model", default="", help="hub id of the base model, if the run used a directory"
    )
    parser.add_argument(
        "--license",
        default="",
        help="hub identifier of the licence; default: that of the base model's card, if known",
    )
    parser.add_argument(
        "--samples", type=int, help="prompts in the comparison; default: 8, of a VLM 4"
    )
    parser.add_argument(
        "--bench",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="output directory of flow-grpo bench to include in the card; may be repeated",
    )
    args = parser.parse_args()
    if args.samples is not None and args.samples < 1:
        parser.error(f"--samples={args.samples} must be at least 1")
    if args.dtype and not args.merged:
        parser.error(f"--dtype={args.dtype} has no effect without --merged; omit it")
    exit_on_user_error(lambda: write(args), debug=False)


def write(args: Namespace) -> None:
    """Publish the run of the command line."""
    # imported here so that --help and user errors do not wait for torch
    import torch
    from diffusers.utils import logging as diffusers_logging

    from flow_grpo.diffusion import publish as diffusion
    from flow_grpo.diffusion.fields import DIFFUSION_SPEC
    from flow_grpo.training.export import ExportSource
    from flow_grpo.training.publish import PublishOptions, find_run, publish, upload_command
    from flow_grpo.vlm import publish as vlm
    from flow_grpo.vlm.fields import VLM_SPEC

    diffusers_logging.set_verbosity(logging.CRITICAL)  # errors are reported in one line
    options = PublishOptions(
        out=args.out,
        base_model=args.base_model,
        license=args.license,
        repo=args.repo,
        merged=args.merged,
        dtype=getattr(torch, args.dtype or "float32"),
        samples=args.samples,
    )
    sections = [("Benchmarks", describe_benchmarks(args.bench))] if args.bench else []
    run = find_run(ExportSource.find(args.run, raw=args.raw), options)
    if "question_format" in run.config:
        publish(run, options, VLM_SPEC, vlm.write_weights, sections)
    else:
        publish(run, options, DIFFUSION_SPEC, diffusion.write_weights, sections)
    print(f"wrote {args.out}: {run.source}")
    print(f"upload it with: {upload_command(options)}")


def describe_benchmarks(folders: list[Path]) -> str:
    """Return the tables of benchmarks with their protocols and deviations, as Markdown."""
    from flow_grpo.benchmarks.results import read_results
    from flow_grpo.report.redaction import redact_text

    texts = [redact_text(read_results(folder).to_markdown()) for folder in folders]
    return "\n\n".join(re.sub(r"(?m)^(#+ )", r"##\1", text) for text in texts)


if __name__ == "__main__":
    main()
