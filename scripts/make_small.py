"""Writes a small diffusers pipeline with random weights, offline: to try a setup before a real run.

python scripts/make_small.py flux small-flux
python scripts/train.py --config config/grpo.py:PRESET --config.pretrained.model=small-flux
"""

from pathlib import Path

import transformers
from untrained.small import FAMILIES, build

from flow_grpo.config.mistakes import Parser


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("folder", type=Path, help="where to write the pipeline")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.folder.exists():
        parser.fail(f"{args.folder} already exists; name a new folder")
    transformers.logging.disable_progress_bar()
    pipeline = build(args.family, seed=args.seed)
    try:
        pipeline.save_pretrained(args.folder)
    except OSError as error:
        parser.fail(f"cannot write {args.folder}: {error.strerror}; name another folder")
    print(f"wrote a small random {type(pipeline).__name__} to {args.folder}")


if __name__ == "__main__":
    main()
