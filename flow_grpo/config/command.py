"""The command `flow-grpo`: each of its commands is a script of scripts/.

Several processes: torchrun -m flow_grpo.config.command train --config ...
"""

import ast
import re
import runpy
import sys
from pathlib import Path

from flow_grpo.config.places import ROOT
from flow_grpo.errors import nearest

SCRIPTS = ROOT / "scripts"
# for work on the repo itself, or used by other scripts
NOT_COMMANDS = (
    *("health_figures", "make_shapes_qa", "mutants"),
    *("pretrain_tiny", "pretrain_tiny_vlm", "reference_loops", "runs", "void_settings"),
)


def commands() -> dict[str, Path]:
    paths = [p for p in sorted(SCRIPTS.glob("*.py")) if p.stem not in NOT_COMMANDS]
    return {path.stem.replace("_", "-"): path for path in paths}


def summary(path: Path) -> str:
    """What the script does, by the start of its docstring."""
    text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    return re.split(r"[.:;](?:\s|$)", text.replace("\n", " "), maxsplit=1)[0]


def usage() -> str:
    known = commands()
    width = max(map(len, known))
    lines = [f"  {name:{width}}  {summary(path)}" for name, path in known.items()]
    return "\n".join(
        ["usage: flow-grpo COMMAND ...", "", *lines, "", "flow-grpo COMMAND --help says more"]
    )


def main() -> None:
    name, *arguments = sys.argv[1:] or ["--help"]
    known = commands()
    if name in ("-h", "--help", "help"):
        print(usage())
        return
    if name not in known:
        near = nearest(name, known)
        hint = f"did you mean {near}?" if near else f"choose one of {', '.join(known)}"
        print(f"error: unknown command {name!r}; {hint}", file=sys.stderr)
        sys.exit(2)
    script = str(known[name])
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(SCRIPTS))  # as `python scripts/train.py` has it
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
