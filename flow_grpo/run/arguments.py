"""Command lines of the scripts whose config, if any, comes from elsewhere."""

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Tells a mistake in one line, as the scripts with a config do."""

    def error(self, message: str) -> NoReturn:
        self.fail(f"{message}; --help says more")

    def parse_with_fields(self) -> tuple[argparse.Namespace, list[str]]:
        """Also the options --config.FIELD=VALUE."""
        args, rest = self.parse_known_args()
        for word in rest:
            if not word.startswith("--config."):
                self.error(f"unexpected argument {word!r}")
        return args, rest

    def fail(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")
