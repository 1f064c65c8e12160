"""Options of the scripts that make small models."""

import argparse
from pathlib import Path
from typing import Any, NoReturn

import torch


class Options(argparse.ArgumentParser):
    """With those that every such script has; an error is one line."""

    def __init__(self, description: str, *, out: str, time_limit: float) -> None:
        super().__init__(description=description)
        add = self.add_argument
        add("--out", type=Path, default=Path(out), help="new folder for the model")
        add("--time-limit", type=float, default=time_limit, help="seconds; trains less to keep it")
        add("--seed", type=int, default=0)
        add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        add("--toy", action="store_true", help="a few small steps on CPU, to see that it runs")

    def read(self, argv: list[str] | None, script: str, toy: dict[str, Any]) -> argparse.Namespace:
        """The options, and the `command` that makes the same model."""
        if self.parse_known_args(argv)[0].toy:
            self.set_defaults(**toy)
        args = self.parse_args(argv)
        if args.out.exists():
            self.fail(f"{args.out} already exists; remove it or name a new folder with --out")
        if args.time_limit <= 0:
            self.fail(f"--time-limit must be more than 0 seconds, got {args.time_limit:g}")
        changed = [
            f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
            for name, value in vars(args).items()
            if name not in ("out", "device") and value != self.get_default(name)
        ]
        args.command = " ".join([f"python {script}", *changed])
        return args

    def fail(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")
