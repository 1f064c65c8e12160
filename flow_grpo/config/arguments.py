"""Command lines of the scripts whose config, if any, comes from elsewhere."""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from flow_grpo.errors import UserError
from flow_grpo.files import refuse_halves


class Parser(argparse.ArgumentParser):
    """Tells a mistake in one line, as the scripts with a config do."""

    def error(self, message: str) -> NoReturn:
        self.fail(f"{message}; --help says more")

    def parse_known_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        try:
            refuse_halves(" ".join(sys.argv[1:] if args is None else args), "the command line")
        except UserError as error:
            self.fail(str(error))
        return super().parse_known_args(args, namespace)

    def parse_with_fields(self) -> tuple[argparse.Namespace, list[str]]:
        """Also the options --config.FIELD=VALUE."""
        args, rest = self.parse_known_args()
        for word in rest:
            if not word.startswith("--config."):
                self.error(f"unexpected argument {word!r}")
        return args, rest

    def fail(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")
