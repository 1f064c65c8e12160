"""Command-line options of the scripts that train the small models."""

import argparse
from pathlib import Path
from typing import Any, NoReturn

import torch


class Options(argparse.ArgumentParser):
    """Parser with the options that all these scripts share; errors are one line."""

    def __init__(self, description: str, *, out: str, time_limit: float) -> None:
        super().__init__(description=description)
        add = self.add_argument
        add("--out", type=Path, default=Path(out), help="new directory for the model")
        add("--time-limit", type=float, default=time_limit, help="seconds; shortens training")
        add("--seed", type=int, default=0)
        add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        add("--toy", action="store_true", help="smoke test: a few small steps on the CPU")

    def read(self, argv: list[str] | None, script: str, toy: dict[str, Any]) -> argparse.Namespace:
        """Parse the options and add the `command` that reproduces the model."""
        if self.parse_known_args(argv)[0].toy:
            self.set_defaults(**toy)
        args = self.parse_args(argv)
        if args.out.exists():
            self.fail(f"{args.out} already exists; remove it or choose a new directory with --out")
        if args.time_limit <= 0:
            self.fail(f"--time-limit={args.time_limit:g} must be more than 0 seconds")
        changed = [
            f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
            for name, value in vars(args).items()
            if name not in ("out", "device") and value != self.get_default(name)
        ]
        args.command = " ".join([f"python {script}", *changed])
        return args

    def fail(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")
