"""Make docs/papers.md of docs/published.toml.

python docs/make_papers.py
"""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TASKS = ("general_ocr_sd3", "geneval_sd3", "pickscore_sd3", "clipscore_sd3")

PAGE = """\
# Papers and presets

Made of [published.toml](published.toml) by `python docs/make_papers.py`: change that file, not this
page. It has what the authors of each method ran, from the files of their repositories, and
`tests/test_published.py` holds each preset against it, field by field. What each method does is in
[algorithms.md](algorithms.md).

We have not run the presets of full-size models: their weights could not be had where this was
written. `*` stands for `general_ocr_sd3`, `geneval_sd3`, `pickscore_sd3` or `clipscore_sd3`.

| paper | arXiv | repository | presets |
|---|---|---|---|
{repos}

Papers of which we have a method or a setting, and no preset of a full-size model of its own:

| paper | arXiv | its settings | here | what differs here |
|---|---|---|---|---|
{others}

`sft` and `rwr` (`tiny_sft`, `tiny_rwr`) follow no single paper. The `tiny_*` presets are tuned to
the small model: a wider clip, a larger learning rate for the forward-process methods, three times
per sample, no KL. Their values and reasons are in `flow_grpo/draw/presets.py`.

Published results with Flow-GRPO's settings: OCR 0.59 -> 0.92, GenEval 0.63 -> 0.95, PickScore 21.7
-> 23.3.

## What several presets share

Names are those of the config. Some are worked out: `groups` (prompts of an epoch), `updates` (of
the weights in an epoch), `trained` (steps, or noise levels of a sample), `eval_guidance`,
`lora_targets`.

| entry | takes over | published | what differs here |
|---|---|---|---|
{shared}

## Presets

| preset | takes over | published | what differs here |
|---|---|---|---|
{presets}
"""


def load() -> dict[str, Any]:
    return tomllib.loads((HERE / "published.toml").read_text("utf-8"))


def resolved(data: dict[str, Any], entry: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The published values of an entry and what differs, those that it takes over included."""
    values, differs = {}, {}
    for name in entry.get("like", []):
        taken = resolved(data, data["shared"].get(name) or data["presets"][name])
        values |= taken[0]
        differs |= taken[1]
    own = {field: value for at in entry.get("at", {}).values() for field, value in at.items()}
    differs = {field: other for field, other in differs.items() if field not in own}
    differs |= entry.get("differs", {})
    return {f: v for f, v in (values | own).items() if f not in differs}, differs


def page(data: dict[str, Any]) -> str:
    used = {repo: list(dict.fromkeys(_presets(data, repo))) for repo in data["repos"]}
    repos = [
        f"| {r['paper']} | {r['arxiv']} | {name} at {r['commit'][:7]} | {', '.join(used[name])} |"
        for name, r in data["repos"].items()
    ]
    others = [
        f"| {o['paper']} | {o['arxiv']} | {o['settings']} | {o['preset']} | {o['differs']} |"
        for o in data["others"]
    ]
    return PAGE.format(
        repos="\n".join(repos),
        others="\n".join(others),
        shared="\n".join(_row(name, entry) for name, entry in data["shared"].items()),
        presets="\n".join(_row(f"`{name}`", entry) for name, entry in data["presets"].items()),
    )


def _presets(data: dict[str, Any], repo: str) -> Iterator[str]:
    for name, entry in data["presets"].items():
        if entry.get("repo") == repo:
            [task] = [t for t in TASKS if name.startswith(f"{t}_")] or [""]
            yield f"`*{name.removeprefix(task)}`" if task else f"`{name}`"


def _row(name: str, entry: dict[str, Any]) -> str:
    like = ", ".join(entry.get("like", []))
    published = [_place(entry, place, at) for place, at in entry.get("at", {}).items()]
    if "unpublished" in entry:
        published.insert(0, f"nothing; {entry['unpublished']}")
    differs = [_difference(field, d) for field, d in entry.get("differs", {}).items()]
    return f"| {name} | {like} | {'<br>'.join(published)} | {'<br>'.join(differs)} |"


def _place(entry: dict[str, Any], place: str, at: dict[str, Any]) -> str:
    commit = f" at {entry['commit'][:7]}" if "commit" in entry else ""
    where = place if place == "ours" else f"{entry['repo']}{commit}, {place}"
    return f"*{where}*: {', '.join(f'`{field}` {_shown(v)}' for field, v in at.items())}"


def _difference(field: str, differs: dict[str, Any]) -> str:
    ours = f", ours {_shown(differs['ours'])}" if "ours" in differs else ""
    return f"`{field}`: published {_shown(differs['published'])}{ours}. {differs['why']}"


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(v)}" for name, v in value.items())
    if isinstance(value, list):
        return f"({', '.join(map(_shown, value))})"
    return f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    (HERE / "papers.md").write_text(page(load()), "utf-8")
