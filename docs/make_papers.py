"""Write docs/papers.md from docs/published.toml.

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

This page lists the published settings of each method and the presets that implement them. It is
generated from [published.toml](published.toml) by `python docs/make_papers.py`. The values come
from the authors' repositories, and `tests/config/test_published_presets.py` compares each preset
with them field by field. The methods themselves are described in [methods](methods/README.md).

Full-size presets have not yet been validated on released checkpoints. `*` stands for
`general_ocr_sd3`, `geneval_sd3`, `pickscore_sd3` or `clipscore_sd3`.

| paper | arXiv | repository | presets |
|---|---|---|---|
{repos}

The following papers have a method or a setting here, but no full-size preset with their own
published settings:

| paper | arXiv | published settings | how to use it here | differences here |
|---|---|---|---|---|
{others}

`sft` and `rwr` (`tiny_sft`, `tiny_rwr`) do not follow a single paper. The `tiny_*` presets are
tuned for the small model: they use a wider clip range, a larger learning rate for the
forward-process methods, three noise levels per sample and no KL (`flow_grpo/diffusion/presets.py`).

Flow-GRPO reports these results with its settings: OCR 0.59 -> 0.92, GenEval 0.63 -> 0.95, PickScore
21.7 -> 23.3.

## Shared settings

Names are config fields or derived from them: `groups` (prompts per epoch), `updates` (optimizer
steps per epoch), `trained` (steps or noise levels per sample), `eval_guidance` and `lora_targets`.
An entry has all settings of the entries that it inherits from, except those that it sets itself.

| entry | inherits from | published settings | differences here |
|---|---|---|---|
{shared}

## Presets

| preset | inherits from | published settings | differences here |
|---|---|---|---|
{presets}
"""


def load() -> dict[str, Any]:
    return tomllib.loads((HERE / "published.toml").read_text("utf-8"))


def resolved(data: dict[str, Any], entry: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the published values of an entry and what differs, including inherited ones."""
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
        published.insert(0, f"no published settings; {entry['unpublished']}")
    differs = [_difference(field, d) for field, d in entry.get("differs", {}).items()]
    return f"| {name} | {like} | {'<br>'.join(published)} | {'<br>'.join(differs)} |"


def _place(entry: dict[str, Any], place: str, at: dict[str, Any]) -> str:
    commit = f" at {entry['commit'][:7]}" if "commit" in entry else ""
    where = "set here" if place == "ours" else f"{entry['repo']}{commit}, {place}"
    return f"*{where}*: {', '.join(f'`{field}` {_shown(v)}' for field, v in at.items())}"


def _difference(field: str, differs: dict[str, Any]) -> str:
    ours = f"; here: {_shown(differs['ours'])}" if "ours" in differs else ""
    return f"`{field}`. Published: {_shown(differs['published'])}{ours}. {differs['why']}"


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(v)}" for name, v in value.items())
    if isinstance(value, list):
        return f"({', '.join(map(_shown, value))})"
    return f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    (HERE / "papers.md").write_text(page(load()), "utf-8")
