"""The commands of docs/first_hour.md work in order.

Training uses a quarter of the samples, and evaluations have fewer steps; test_notebook.py runs the
same example with all of them.
"""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from runner import ROOT, run_script

from flow_grpo.config.command import list_commands
from flow_grpo.diffusion.fields import get_config

PAGE = (ROOT / "docs/first_hour.md").read_text("utf-8")
RUN_HERE = ("flow-grpo", "python")  # other commands install packages or start a server
SMALLER_BATCHES = ("--config.sample.train_batch_size=8", "--config.train.batch_size=8")


def write_files(folder: Path) -> None:
    """Write the code blocks that start with a file name."""
    blocks = re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", PAGE, re.M | re.S)
    assert len(blocks) == PAGE.count("```python")
    for name, text in blocks:
        (folder / name).write_text(text)


def shell_commands() -> list[list[str]]:
    lines = re.findall(r"^\$ (.*)$", PAGE, re.M)
    return [words for line in lines if (words := shlex.split(line))[0] in RUN_HERE]


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess:
    program, *arguments = words
    if program == "flow-grpo" and arguments != ["--help"]:
        arguments[0] = str(list_commands()[arguments[0]])
    elif program == "flow-grpo":
        arguments = [str(ROOT / "flow_grpo/config/command.py"), *arguments]
    if "--config.run_name=shapes" in arguments:
        arguments += SMALLER_BATCHES
    if "my_config.py" in arguments:
        arguments += ["--config.sample.eval_num_steps=3"]
    return run_script(*arguments, cwd=folder)


@pytest.mark.slow
def test_each_command_of_the_page_works(tmp_path):
    write_files(tmp_path)
    for words in shell_commands():
        done = run(words, tmp_path)
        assert done.returncode == 0, (words, done.stdout[-2000:], done.stderr[-2000:])
        last = done.stdout.splitlines()[-1:]
        if last and last[0].startswith(("wrote", "finished")):
            assert last[0] in PAGE
    for name in ("eval/shapes/grid.png", "logs/shapes/curve.png", "logs/shapes/pictures.png"):
        assert (tmp_path / name).stat().st_size > 1000
    assert list(tmp_path.glob("logs/shapes/**/events.out.tfevents.*"))


def test_the_migration_guide_has_the_current_defaults():
    guide = (ROOT / "docs/migrating.md").read_text("utf-8")
    table = guide.partition("**Defaults**")[2].partition("**Renamed:**")[0]
    rows = re.findall(r"^\| (`.*`) \| `.*` \| `(.*)` \|$", table, re.M)
    assert len(rows) == 11
    for names, value in rows:
        for name in re.findall(r"`([\w.]+)`", names):
            field = get_config()
            for part in name.split("."):
                field = field[part]
            assert repr(field).replace("'", '"') == value, name
