"""Tell a mistake in one line. Of several processes one tells it, and torchrun's report ends with
it."""

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

from flow_grpo.config.places import ROOT
from flow_grpo.errors import LostPeer, Stopped, UserError
from flow_grpo.files import refuse_halves

SIGNALS = (signal.SIGTERM, signal.SIGINT)  # what ends a run
LAUNCHER_FILE = "TORCHELASTIC_ERROR_FILE"  # torchrun and accelerate launch read it
# Seconds in which the launcher ends what is left of a node after a failure there.
LAUNCHER_IS_QUICK = 5.0
# Processes start at different times: seconds until the slowest should have met the same mistake.
ALL_HAVE_SEEN_IT = 30.0


def told_plainly(call: Callable, *, debug: bool):
    try:
        return call()
    except UserError as error:
        if debug:
            raise
        _leave(error)
    except KeyboardInterrupt:
        if debug:
            raise
        _leave(Stopped("stopped before it was done; start it again with the same command"))
    except OSError as error:
        if debug or error.errno != errno.ENAMETOOLONG:
            raise
        _leave(
            UserError(f"{str(error.filename)[:60]}... is too long for a path; name a shorter one")
        )
    except RuntimeError as error:
        if debug or not is_lost_peer(error):
            raise
        # without the file it comes from and the advice that follows
        reason = re.sub(r"^\[\S+\] ", "", str(error).strip()).splitlines()[0].split(". ")[0]
        _leave(
            LostPeer(
                f"lost contact with another process ({reason}); start all nodes again with "
                "--config.resume=auto"
            )
        )


def say(text: str) -> None:
    """Print what was asked for. Whoever reads it may stop early, as `head` does: then this process
    ends like other programs, without a word."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    print(text, flush=True)


def typed() -> str:
    """What started this script: `flow-grpo train` or `python scripts/train.py`."""
    words = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
    if len(words) > 1 and Path(words[-2]).name in ("flow-grpo", "flow_grpo.config.command"):
        return f"flow-grpo {words[-1]}"
    script = Path(sys.argv[0])
    return f"python -m {script.parent.name}" if script.name == "__main__.py" else f"python {script}"


def line_to_type(*words: str, without: Sequence[str]) -> str:
    """What was typed, with these words in the place of its config and of the fields `without`
    which it should be."""
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
    kept = [quoted(option) for option in options if not left_out.match(option)]
    start = f"... {sys.argv[0]}" if "WORLD_SIZE" in os.environ else typed()  # which was launched
    return " ".join([start, *words, *kept])


def quoted(word: str) -> str:
    """As a shell takes it, in double quotes where it has single ones in it."""
    plain = shlex.quote(word)
    if plain == word or re.search(r'["$`\\!]', word):
        return plain
    option, equals, value = word.partition("=")
    return f'{option}{equals}"{value}"' if equals else plain


def as_typed(text: str) -> str:
    """Its examples as commands of `flow-grpo`, where that is what was typed."""
    if not typed().startswith("flow-grpo "):
        return text
    text = re.sub(r"python scripts/(\w+)\.py", lambda m: f"flow-grpo {_command(m[1])}", text)
    module = "-m flow_grpo.config.command"  # what a launcher starts
    return re.sub(r"(?<= )scripts/(\w+)\.py", lambda m: f"{module} {_command(m[1])}", text)


def _command(script: str) -> str:
    return script.replace("_", "-")


def is_first_process() -> bool:
    return os.environ.get("RANK", "0") == "0"


def is_first_of_node() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def is_lost_peer(error: RuntimeError) -> bool:
    """gloo's errors have no type of their own, but most name the file they come from."""
    from torch.distributed import DistError  # here: scripts without torch start at once

    gloo = r"\bgloo/(transport|rendezvous)/|^Application timeout caused pair closure"
    return isinstance(error, DistError) or re.search(gloo, str(error)) is not None


def _leave(error: UserError) -> NoReturn:
    line = f"{error}" if isinstance(error, Stopped) else f"error: {error}"
    wait = _patience(error) if LAUNCHER_FILE in os.environ else 0.0
    if wait:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # that is the launcher, which ends us
        time.sleep(wait)
    lost_here = isinstance(error, LostPeer) and is_first_of_node()
    if is_first_process() or not error.seen_by_all or lost_here or wait:
        print(line, file=sys.stderr)
    _tell_launcher(line)
    sys.exit(error.exit_code)


def _patience(error: UserError) -> float:
    """How long to wait for the launcher to end this process, because another has told what
    happened. One that is still there after that has to tell it."""
    if isinstance(error, Stopped) or not error.seen_by_all:
        return 0.0
    if not is_first_of_node():
        return ALL_HAVE_SEEN_IT
    return LAUNCHER_IS_QUICK if isinstance(error, LostPeer) else 0.0


def _tell_launcher(line: str) -> None:
    """The last entry of its report is what this file holds, as a traceback."""
    if LAUNCHER_FILE not in os.environ:
        return
    extra = {"py_callstack": line, "timestamp": str(int(time.time()))}
    content = json.dumps({"message": {"message": line, "extraInfo": extra}})
    with contextlib.suppress(OSError):  # the line was printed
        Path(os.environ[LAUNCHER_FILE]).write_text(content, encoding="utf-8")


class Parser(argparse.ArgumentParser):
    """The command line of a script whose config, if any, comes from elsewhere. It tells a mistake
    in one line, as the scripts with a config do."""

    def __init__(self, **options: Any) -> None:
        about = sys.modules["__main__"].__doc__ or ""
        first, _, rest = about.partition("\n\n")
        if options.get("description") == about.partition("\n")[0]:
            # the whole first paragraph; the examples come after the options
            options |= {"description": first, "epilog": as_typed(rest.strip("\n"))}
            options |= {"formatter_class": argparse.RawDescriptionHelpFormatter}
        super().__init__(**{"prog": typed(), **options})

    def print_help(self, file: IO[str] | None = None) -> None:
        say(self.format_help())

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
        """The arguments, and besides them the options --config.FIELD=VALUE."""
        args, rest = self.parse_known_args()
        for word in rest:
            if not word.startswith("--config."):
                self.error(f"unexpected argument {word!r}")
        return args, rest

    def fail(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")
