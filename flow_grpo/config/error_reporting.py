"""Report a user error in one line, from one of several processes, and in torchrun's report."""

import argparse
import contextlib
import errno
import json
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from flow_grpo.config.paths import ROOT
from flow_grpo.errors import LostPeer, StoppedBySignal, UserError
from flow_grpo.untrusted_files import reject_lone_surrogates

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
LAUNCHER_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # torchrun and accelerate launch read it
# Seconds until the launcher terminates the other processes of a node after a failure.
LAUNCHER_SHUTDOWN_SECONDS = 5.0
# Seconds until the slowest process should have raised the same error.
SLOWEST_RANK_SECONDS = 30.0


def exit_on_user_error(call: Callable, *, debug: bool):
    """Return the result of `call`, or print a user error in one line and exit with its code.

    Interrupts and lost contact with another process are reported in the same way.

    Args:
        call: Called without arguments.
        debug: Raise the error instead, for its traceback.
    """
    try:
        return call()
    except UserError as error:
        if debug:
            raise
        _exit_with_error(error)
    except KeyboardInterrupt:
        if debug:
            raise
        _exit_with_error(StoppedBySignal("interrupted; start it again with the same command"))
    except OSError as error:
        if debug or error.errno != errno.ENAMETOOLONG:
            raise
        _exit_with_error(UserError(f"{str(error.filename)[:60]}... is too long for a path"))
    except RuntimeError as error:
        if debug or not is_lost_peer_error(error):
            raise
        # without the source file and the advice that follows
        reason = re.sub(r"^\[\S+\] ", "", str(error).strip()).splitlines()[0].split(". ")[0]
        _exit_with_error(
            LostPeer(
                f"lost contact with another process ({reason}); start all nodes again with "
                "--config.resume=auto"
            )
        )


def print_text(text: str) -> None:
    """Print requested output; exit silently if the reader closes the pipe, as `head` does."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    print(text, flush=True)


def invoked_command() -> str:
    """Return how this script was started: `flow-grpo train` or `python scripts/train.py`."""
    words = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
    if len(words) > 1 and Path(words[-2]).name in ("flow-grpo", "flow_grpo.config.command"):
        return f"flow-grpo {words[-1]}"
    script = Path(sys.argv[0])
    return f"python -m {script.parent.name}" if script.name == "__main__.py" else f"python {script}"


def format_command(*words: str, without: Sequence[str]) -> str:
    """Return the command that started this script, for messages, with changed options.

    Args:
        *words: Options to add in place of --config and --resume.
        without: Settings whose overrides are dropped.
    """
    if Path(sys.argv[0]).resolve().parent != ROOT / "scripts":  # in a notebook or a test
        return " ".join(words)
    options = []
    for word in sys.argv[1:]:
        if word.startswith("-"):
            options.append(word)
        elif options and "=" not in options[-1]:  # --option value
            options[-1] += f"={word}"
    fields = "|".join(map(re.escape, without))
    left_out = re.compile(rf"--(config|resume|config\.({fields})(\..*)?)(=|$)")
    kept = [quote_for_shell(option) for option in options if not left_out.match(option)]
    launched = "WORLD_SIZE" in os.environ
    start = f"... {sys.argv[0]}" if launched else invoked_command()
    return " ".join([start, *words, *kept])


def quote_for_shell(word: str) -> str:
    """Quote a word for the shell; in double quotes if it contains single ones."""
    plain = shlex.quote(word)
    if plain == word or re.search(r'["$`\\!]', word):
        return plain
    option, equals, value = word.partition("=")
    return f'{option}{equals}"{value}"' if equals else plain


def rewrite_examples(text: str) -> str:
    """Rewrite `python scripts/NAME.py` as `flow-grpo NAME` if that is how we were started."""
    if not invoked_command().startswith("flow-grpo "):
        return text
    text = re.sub(r"python scripts/(\w+)\.py", lambda m: f"flow-grpo {_command_name(m[1])}", text)
    module = "-m flow_grpo.config.command"  # what launchers start
    return re.sub(r"(?<= )scripts/(\w+)\.py", lambda m: f"{module} {_command_name(m[1])}", text)


def _command_name(script: str) -> str:
    return script.replace("_", "-")


def is_rank_zero() -> bool:
    """Return whether this is rank 0 by the launcher's environment; needs no process group."""
    return os.environ.get("RANK", "0") == "0"


def is_local_rank_zero() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def is_lost_peer_error(error: RuntimeError) -> bool:
    """Return whether another process was lost.

    Errors of gloo have no type of their own, but most name their source file.
    """
    from torch.distributed import (
        DistError,
    )  # imported here so that scripts without torch start fast

    gloo = r"\bgloo/(transport|rendezvous)/|^Application timeout caused pair closure"
    return isinstance(error, DistError) or re.search(gloo, str(error)) is not None


def _exit_with_error(error: UserError) -> NoReturn:
    """Print the error once per job, write it for the launcher, and exit with its code."""
    line = f"{error}" if isinstance(error, StoppedBySignal) else f"error: {error}"
    wait = _seconds_to_wait(error) if LAUNCHER_ERROR_FILE in os.environ else 0.0
    if wait:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # sent by the launcher
        time.sleep(wait)
    lost_here = isinstance(error, LostPeer) and is_local_rank_zero()
    if is_rank_zero() or not error.raised_on_all_ranks or lost_here or wait:
        print(line, file=sys.stderr)
    _write_launcher_error(line)
    sys.exit(error.exit_code)


def _seconds_to_wait(error: UserError) -> float:
    """Return the seconds to wait for the launcher to terminate this process.

    Another process reports the same error; if this one survives the wait, it reports it instead.
    """
    if isinstance(error, StoppedBySignal) or not error.raised_on_all_ranks:
        return 0.0
    if not is_local_rank_zero():
        return SLOWEST_RANK_SECONDS
    return LAUNCHER_SHUTDOWN_SECONDS if isinstance(error, LostPeer) else 0.0


def _write_launcher_error(line: str) -> None:
    """Write the error to the file whose contents end the launcher's report."""
    if LAUNCHER_ERROR_FILE not in os.environ:
        return
    extra = {"py_callstack": line, "timestamp": str(int(time.time()))}
    content = json.dumps({"message": {"message": line, "extraInfo": extra}})
    with contextlib.suppress(OSError):  # it was printed already
        Path(os.environ[LAUNCHER_ERROR_FILE]).write_text(content, encoding="utf-8")


class ScriptParser(argparse.ArgumentParser):
    """Argument parser of the scripts without --config; it reports errors in one line."""

    def __init__(self, **options: Any) -> None:
        about = sys.modules["__main__"].__doc__ or ""
        first, _, rest = about.partition("\n\n")
        if options.get("description") == about.partition("\n")[0]:
            # the whole first paragraph; the examples come after the options
            options |= {"description": first, "epilog": rewrite_examples(rest.strip("\n"))}
            options |= {"formatter_class": argparse.RawDescriptionHelpFormatter}
        super().__init__(**{"prog": invoked_command(), **options})

    def print_help(self, file: IO[str] | None = None) -> None:
        print_text(self.format_help())

    def error(self, message: str) -> NoReturn:
        self.fail(f"{message}; see --help")

    def parse_known_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse like argparse; also reject arguments that are not valid UTF-8."""
        try:
            reject_lone_surrogates(
                " ".join(sys.argv[1:] if args is None else args), "the command line"
            )
        except UserError as error:
            self.fail(str(error))
        return super().parse_known_args(args, namespace)

    def parse_with_overrides(self) -> tuple[argparse.Namespace, list[str]]:
        """Return the arguments and the options --config.FIELD=VALUE."""
        args, rest = self.parse_known_args()
        for word in rest:
            if not word.startswith("--config."):
                self.error(f"unexpected argument {word!r}")
        return args, rest

    def fail(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")
