"""Measure reward hacking on the small model, with and without each countermeasure.

    python scripts/hacking.py --seeds 1 2 3 --jobs 3 --out docs/results/hacking_h200

Trains awm on signs until all of them are dark, or all are pale; then again with each anchor of
docs/reward_hacking.md and with all of them. Writes OUT.md with the held-out OCR score, which is
trained, and the distance of the background colours from those of clean signs, which is not. Each
run is a directory under --logdir; repeat the command to resume.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from compare import logged, read_run
from compare_utils import format_change, make_directories, run_comparison, write_results
from runs import SIGNS, Run, resolve, train_all
from tiny.images import CLEAN, Painter, encode_word
from tiny.prompts import parse_sign
from tiny.quality import clean_background_colours, colour_error, evaluation_colour_error

from flow_grpo.config.error_reporting import ScriptParser
from flow_grpo.report.console import markdown_table
from flow_grpo.rewards.frames import to_pil

ROOT = Path(__file__).parents[1]
PRESET = "tiny_hacked"
NUM_IMAGES = 512  # in anchors.data
GUARD = {"anchors.norm_guard": 3.0}
KL = {"awm.kl_beta": 0.3}
DATA = {"anchors.data_weight": 0.3}
SECOND = {  # a second reward, which is not the one that the table reports
    "reward_fn": {"ocr": 1.0, "colour": 0.0},
    "custom_rewards": {"colour": "tiny.quality:colour"},
    "anchors.kl_gate": 0.25,
    "anchors.reset_epochs": 4,
}
DIVERSE = {"anchors.diversity": True}
ARMS = {
    "nothing": {},
    "KL": KL,
    "norm guard": GUARD,
    "data": DATA,
    "gated KL, reset": {**KL, **SECOND},
    "diversity": DIVERSE,
    "all": {**KL, **SECOND, **GUARD, **DATA, **DIVERSE},
}
WEIGHTS = ("anchors.norm_guard", "anchors.data_weight", "awm.kl_beta")  # scaled by --strengths


def write_images(folder: Path) -> None:
    """Write clean signs of training words with captions in .txt files, for `anchors.data`."""
    prompts = (ROOT / "dataset/ocr/train.txt").read_text("utf-8").split("\n")
    prompts = np.random.default_rng(0).permutation([p for p in prompts if p])[:NUM_IMAGES].tolist()
    letters = torch.tensor([encode_word(parse_sign(prompt)) for prompt in prompts])
    signs = Painter().signs(letters, CLEAN, torch.Generator().manual_seed(0))
    make_directories(folder)
    for number, (prompt, sign) in enumerate(zip(prompts, to_pil(signs.images), strict=True)):
        sign.save(folder / f"{number:04d}.png")
        (folder / f"{number:04d}.txt").write_text(prompt, "utf-8")


def options(arm: str, strength: float, images: Path) -> list[str]:
    """Return the overrides of an arm of the experiment, with its weights scaled by `strength`."""
    fields = {k: v * strength if k in WEIGHTS else v for k, v in ARMS[arm].items()}
    if "anchors.data_weight" in fields:
        fields["anchors.data"] = images
    return [f"--config.{name}={value}" for name, value in fields.items()]


def row(name: str, folders: Sequence[Path], expected: np.ndarray) -> list[str]:
    """Return the table row of one arm: reward, colour error and diversity, first -> last.

    Args:
        name: Name of the arm.
        folders: Its run directories, one per seed.
        expected: Background colours of clean signs.
    """
    runs = [read_run(folder) for folder in folders]
    evaluations = [sorted((folder / "samples").glob("eval-*")) for folder in folders]
    errors = [
        [evaluation_colour_error(found[i], expected) for found in evaluations] for i in (0, -1)
    ]
    rewards = [[run[i].reward for run in runs] for i in (0, -1)]
    diverse = [[logged(run, "diversity")[i] for run in runs] for i in (0, -1)]
    return [name, *(format_change(*each) for each in (rewards, errors, diverse))]


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    """Return the arguments, and the options --config.FIELD=VALUE."""
    parser = ScriptParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[*ARMS])
    parser.add_argument("--seeds", nargs="+", type=int, required=True)
    strengths = "factors for the weights of the anchors"
    parser.add_argument("--strengths", nargs="+", type=float, default=[1.0], help=strengths)
    parser.add_argument("--out", type=Path, required=True, help="output file, without .md")
    parser.add_argument("--logdir", type=Path, default=Path("logs/hacking"))
    parser.add_argument("--jobs", type=int, default=1, help="concurrent runs")
    return parser.parse_with_overrides()


def train_arms(args: argparse.Namespace, overrides: list[str]) -> Iterator[tuple[str, list[Path]]]:
    """Train each arm and yield its name and run directories."""
    images = (args.logdir / "pictures").resolve()
    if not images.is_dir():
        write_images(images)
    for arm in args.arms:
        has_weights = {*WEIGHTS} & {*ARMS[arm]}
        for strength in args.strengths if has_weights else [1.0]:
            name = arm if strength == 1 else f"{arm} x {strength:g}"
            logdir = args.logdir / name.replace(" ", "_")
            fields = [*options(arm, strength, images), *overrides]
            runs = [Run(SIGNS, PRESET, seed) for seed in args.seeds]
            resolve(runs[0], fields)
            make_directories(logdir)
            if not train_all(runs, logdir, fields, args.jobs):
                sys.exit(1)
            yield name, [logdir / run.name for run in runs]


def compare() -> None:
    """Train all arms and write the table."""
    args, overrides = parse_args()
    expected = clean_background_colours()
    rows = [["arm", "held-out OCR", "colour error", "diversity, first -> last epoch"]]
    for arm in train_arms(args, overrides):
        rows.append(row(*arm, expected))
        print(" | ".join(rows[-1]), flush=True)
    floor = colour_error(clean_background_colours(96), expected)
    note = f"Means over the seeds (lowest to highest). 96 clean signs have an error of {floor:.2f}."
    write_results(args.out, markdown_table(rows), note)


if __name__ == "__main__":
    run_comparison(compare)
