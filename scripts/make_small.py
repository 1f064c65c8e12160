"""Write a small diffusers pipeline with random weights, to test a setup offline.

python scripts/make_small.py flux small-flux
python scripts/train.py --config config/grpo.py:PRESET --config.pretrained.model=small-flux
"""

from pathlib import Path

import transformers
from untrained.small import FAMILIES, build

from flow_grpo.config.error_reporting import ScriptParser


def main() -> None:
    """Write a small random pipeline of the chosen family to a new directory."""
    parser = ScriptParser(description=__doc__.splitlines()[0])
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("folder", type=Path, help="new directory for the pipeline")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.folder.exists():
        parser.fail(f"{args.folder} already exists; choose a new directory")
    transformers.logging.disable_progress_bar()
    pipeline = build(args.family, seed=args.seed)
    try:
        pipeline.save_pretrained(args.folder)
    except OSError as error:
        parser.fail(f"cannot write {args.folder}: {error.strerror}; choose another directory")
    print(f"wrote a small random {type(pipeline).__name__} to {args.folder}")


if __name__ == "__main__":
    main()
