"""Command lines of the scripts that take no config."""

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Tells a mistake in one line, as the scripts with a config do."""

    def error(self, message: str) -> NoReturn:
        self.fail(f"{message}; --help says more")

    def fail(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")
