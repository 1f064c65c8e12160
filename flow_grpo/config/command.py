"""The command `flow-grpo`: each of its commands is a script of scripts/, or the reward server.

Several processes: torchrun -m flow_grpo.config.command train --config ...
"""

import ast
import re
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

from flow_grpo import __version__
from flow_grpo.config.mistakes import say
from flow_grpo.config.places import ROOT
from flow_grpo.errors import nearest

SCRIPTS = ROOT / "scripts"
# for work on the repo itself, or used by other scripts
NOT_COMMANDS = (
    *("few_steps", "hacking", "health_figures", "make_edits", "make_shapes_qa", "make_tiny_text"),
    *("measuring", "mutants", "pretrain_tiny", "pretrain_tiny_edit", "pretrain_tiny_vlm"),
    *("reference_loops", "runs", "void_settings"),
)
SERVER = "reward_server"
EXAMPLES = """\
flow-grpo doctor                                   what is installed, what is missing
flow-grpo train --config config/grpo.py:tiny_ocr   the small model that ships learns to write
flow-grpo train --help                             the settings of a run

docs/README.md lists the pages of the documentation. --version tells the version."""


def commands() -> dict[str, Path]:
    """Files by the names of their commands."""
    paths = [p for p in SCRIPTS.glob("*.py") if p.stem not in NOT_COMMANDS]
    found = {path.stem.replace("_", "-"): path for path in paths}
    if server := find_spec(SERVER):
        found["reward-server"] = Path(server.origin).with_name("__main__.py")
    return dict(sorted(found.items()))


def summary(path: Path) -> str:
    """What the script does, by the start of its docstring."""
    text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    return re.split(r"[.:;](?:\s|$)", text.replace("\n", " "), maxsplit=1)[0]


def usage() -> str:
    known = commands()
    width = max(map(len, known))
    lines = [f"  {name:{width}}  {summary(path)}" for name, path in known.items()]
    start = "usage: flow-grpo COMMAND ...; flow-grpo COMMAND --help says more"
    return "\n".join([start, "", *lines, "", EXAMPLES])


def main() -> None:
    name, *arguments = sys.argv[1:] or ["--help"]
    known = commands()
    if name in ("-h", "--help", "help"):
        say(usage())
        return
    if name == "--version":
        say(f"flow-grpo {__version__}")
        return
    if name not in known:
        near = nearest(name, known)
        hint = f"did you mean {near}?" if near else f"choose one of {', '.join(known)}"
        print(f"error: unknown command {name!r}; {hint}", file=sys.stderr)
        sys.exit(2)
    script = str(known[name])
    sys.argv = [script, *arguments]
    if name == "reward-server":
        runpy.run_module(SERVER, run_name="__main__", alter_sys=True)
        return
    sys.path.insert(0, str(SCRIPTS))  # as `python scripts/train.py` has it
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
