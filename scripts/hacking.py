"""Hacking and its cures on the small model: awm is trained on signs until it draws none but dark
ones, or none but pale ones; then again with each anchor of docs/hacking.md, and with all of them.

    python scripts/hacking.py --seeds 1 2 3 --jobs 3 --out docs/results/hacking_h200

Prints and writes OUT.md: held-out OCR, which is trained, and how far the colours of the grounds
are from those of clean signs, which nothing in training knows. Each run is a folder under --logdir,
with its pictures; the same command goes on where it was stopped.
"""

import argparse
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from compare import logged, make_folders, read_run, with_range
from runs import SIGNS, Run, resolve, train_all
from tiny.pictures import CLEAN, Painter, encode_word
from tiny.prompts import parse_sign
from tiny.quality import clean_grounds, colour_error, error_of

from flow_grpo.config.mistakes import Parser, told_plainly
from flow_grpo.errors import Stopped
from flow_grpo.rewards.frames import to_pil

ROOT = Path(__file__).parents[1]
PRESET = "tiny_hacked"
PICTURES = 512  # of anchors.data
GUARD = {"anchors.norm_guard": 3.0}
KL = {"awm.kl_beta": 0.3}
DATA = {"anchors.data_weight": 0.3}
SECOND = {  # a second opinion, which is not what the table tells
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
WEIGHTS = ("anchors.norm_guard", "anchors.data_weight", "awm.kl_beta")  # what --strength scales


def write_pictures(folder: Path) -> None:
    """Clean signs of words to train on, each with its caption: what a user's own pictures are."""
    prompts = (ROOT / "dataset/ocr/train.txt").read_text("utf-8").split("\n")
    prompts = np.random.default_rng(0).permutation([p for p in prompts if p])[:PICTURES].tolist()
    letters = torch.tensor([encode_word(parse_sign(prompt)) for prompt in prompts])
    signs = Painter().signs(letters, CLEAN, torch.Generator().manual_seed(0))
    make_folders(folder)
    for number, (prompt, sign) in enumerate(zip(prompts, to_pil(signs.images), strict=True)):
        sign.save(folder / f"{number:04d}.png")
        (folder / f"{number:04d}.txt").write_text(prompt, "utf-8")


def options(arm: str, strength: float, pictures: Path) -> list[str]:
    fields = {k: v * strength if k in WEIGHTS else v for k, v in ARMS[arm].items()}
    if "anchors.data_weight" in fields:
        fields["anchors.data"] = pictures
    return [f"--config.{name}={value}" for name, value in fields.items()]


def row(name: str, folders: Sequence[Path], expected: np.ndarray) -> list[str]:
    """The row of the table for the runs of one arm."""
    runs = [read_run(folder) for folder in folders]
    evaluations = [sorted((folder / "samples").glob("eval-*")) for folder in folders]
    errors = [[error_of(found[i], expected) for found in evaluations] for i in (0, -1)]
    rewards = [[run[i].reward for run in runs] for i in (0, -1)]
    diverse = [[logged(run, "diversity")[i] for run in runs] for i in (0, -1)]
    return [name, *(" -> ".join(map(with_range, each)) for each in (rewards, errors, diverse))]


def table(rows: list[list[str]]) -> str:
    head = ["arm", "held-out OCR", "colour error", "diversity, first -> last epoch"]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    parser = Parser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[*ARMS])
    parser.add_argument("--seeds", nargs="+", type=int, required=True)
    strength = "what the weights of the anchors are multiplied by; several to choose one"
    parser.add_argument("--strengths", nargs="+", type=float, default=[1.0], help=strength)
    parser.add_argument("--out", type=Path, required=True, help="without .md")
    parser.add_argument("--logdir", type=Path, default=Path("logs/hacking"))
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    return parser.parse_known_args()


def train_arms(args: argparse.Namespace, overrides: list[str]) -> Iterator[tuple[str, list[Path]]]:
    """Each arm's name and folders, once it is trained."""
    pictures = (args.logdir / "pictures").resolve()
    if not pictures.is_dir():
        write_pictures(pictures)
    for arm in args.arms:
        for strength in args.strengths if {*WEIGHTS} & {*ARMS[arm]} else [1.0]:
            name = arm if strength == 1 else f"{arm} x {strength:g}"
            logdir = args.logdir / name.replace(" ", "_")
            fields = [*options(arm, strength, pictures), *overrides]
            runs = [Run(SIGNS, PRESET, seed) for seed in args.seeds]
            resolve(runs[0], fields)
            make_folders(logdir)
            if not train_all(runs, logdir, fields, args.jobs):
                sys.exit(1)
            yield name, [logdir / run.name for run in runs]


def compare() -> None:
    args, overrides = parse_args()
    expected, rows = clean_grounds(), []
    try:
        for arm in train_arms(args, overrides):
            rows.append(row(*arm, expected))
            print(" | ".join(rows[-1]), flush=True)
    except KeyboardInterrupt as stop:
        raise Stopped("stopped; the same command goes on") from stop
    command = shlex.join(["python", "scripts/hacking.py", *sys.argv[1:]])
    floor = colour_error(clean_grounds(96), expected)
    note = f"Means over the seeds (lowest to highest). 96 clean signs have an error of {floor:.2f}."
    text = f"{table(rows)}\n\n{note}\n\n    {command}\n"
    make_folders(args.out.parent)
    Path(f"{args.out}.md").write_text(text, encoding="utf-8")
    print(text)


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    told_plainly(compare, debug=False)


if __name__ == "__main__":
    main()
