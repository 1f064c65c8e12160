"""Write docs/migrating/*.md: settings of other trainers, and the command lines of their READMEs.

python docs/make_migrating.py
"""

import textwrap
from pathlib import Path

from flow_grpo.config.migration import PROJECTS
from flow_grpo.config.migration.counterparts import DIFFUSION, LAUNCH, Counterpart, Project
from flow_grpo.config.migration.readme_commands import (
    README_COMMANDS,
    RUNS,
    TRANSLATED,
    ReadmeCommand,
)
from flow_grpo.report.console import markdown_table

HERE = Path(__file__).parent / "migrating"
INTRO = """# Settings of {name}

    flow-grpo migrate COMMAND            # or SCRIPT.sh, or CONFIG.yaml

{what}

"Computed" means that the value depends on several settings, or that one setting becomes several.

{source}

| {name} | here |
|---|---|
"""
WHAT = (
    "This prints the equivalent command for `scripts/{script}` and lists the settings without a "
    "counterpart; nothing is executed. For settings that are not given, it sets the defaults of "
    "{name} where they differ from those here. If you pass an option of this table to "
    "`scripts/{script}` itself, the error names the equivalent."
)
WITHOUT = """
## Without counterpart

| {name} | instead |
|---|---|
"""
README_INTRO = """# Command lines of other READMEs

Every command line in the READMEs of other trainers, and its equivalent here. "Runs as typed": the
same line works. "Translated": `flow-grpo migrate LINE` prints the equivalent command and the
settings without a counterpart. Otherwise the table gives a replacement. Every line is tested
(`tests/scripts/test_migrate.py`).
"""


def settings_page(project: Project) -> str:
    """Return the page with the settings of a trainer."""
    mapped = {key: each for key, each in project.keys.items() if each.setting}
    absent = {key: each.note for key, each in project.keys.items() if not each.setting}
    script = "train.py" if project.trainer == DIFFUSION else "train_vlm.py"
    what = textwrap.fill(WHAT.format(name=project.name, script=script), 100)
    source = textwrap.fill(f"Source: {project.source}.", 100)
    text = INTRO.format(name=project.name, what=what, source=source)
    text += "".join(f"| `{key}` | {describe(each)} |\n" for key, each in mapped.items())
    text += WITHOUT.format(name=project.name)
    rows = {**absent, **project.groups}
    return text + "".join(f"| `{key}` | {_cell(note)} |\n" for key, note in rows.items())


def describe(found: Counterpart) -> str:
    """Return our setting, with the values that have another name."""
    name = "launcher option" if found.setting in LAUNCH else f"`{found.setting}`"
    if found.derived:
        return f"{name}, computed"
    renamed = []
    for theirs, ours in (found.values or {}).items():
        if isinstance(ours, dict) and ours:
            shown = " ".join(f"{key}={value}" for key, value in ours.items())
            renamed.append(f"`{theirs}` becomes `{shown}`")
        elif not isinstance(ours, dict) and ours != theirs:
            renamed.append(f"`{theirs}` becomes `{ours}`")
    return f"{name}: {', '.join(dict.fromkeys(renamed))}" if renamed else name


def readmes_page() -> str:
    """Return the page with the command lines of all READMEs."""
    text = README_INTRO
    for name in dict.fromkeys(each.project for each in README_COMMANDS):
        rows = [
            [f"`{_cell(each.line)}`", _answer(each)]
            for each in README_COMMANDS
            if each.project == name
        ]
        text += f"\n## {name}\n\n{markdown_table([['command line', 'here'], *rows])}\n"
    return text


def _answer(each: ReadmeCommand) -> str:
    if each.kind == RUNS:
        return "runs as typed"
    return "translated" if each.kind == TRANSLATED else _cell(each.answer)


def _cell(text: str) -> str:
    """Return text for a cell of a table; patterns such as critic.* are not emphasis."""
    return text.replace("|", "\\|")


def pages() -> dict[Path, str]:
    """Return the text of every generated page."""
    named = [project for project in PROJECTS if project.page]
    return {
        **{HERE / project.page: settings_page(project) for project in named},
        HERE / "readmes.md": readmes_page(),
    }


if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    for path, text in pages().items():
        path.write_text(text, "utf-8")
