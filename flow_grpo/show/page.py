"""From runs to the page: what it shows, as JSON, in one file that asks for nothing else."""

import base64
import hashlib
import html
import json
import logging
import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from flow_grpo.errors import UserError, first_line
from flow_grpo.files import lies_in
from flow_grpo.rewards import TOTAL
from flow_grpo.show import health
from flow_grpo.show.reading import LARGEST, RunFolder, Shot, read_runs, read_shots
from flow_grpo.show.thumbnails import fit

logger = logging.getLogger("flow_grpo")

FILE = "report.html"
SCRIPTS = ("dom.js", "curves.js", "head.js", "samples.js", "main.js")
PICTURE_BYTES = 10_000_000  # of all runs together; other things take little
SHARES = {"eval": 2 / 3, "train": 1 / 3}
EPOCHS = {"eval": 40, "train": 20}  # with pictures, at most: it takes 20 to 40 ms to shrink one
MOST_SAMPLES = 64  # of an epoch
LONGEST_ANSWER = 4000  # letters; samples.jsonl has all of it


def write_page(folders: list[Path], out: Path) -> None:
    if out.is_dir():
        raise UserError(f"cannot write {out}: it is a folder; name a file with --out")
    page = render(build(folders))
    partial = out.with_name(f".{out.name}.{uuid.uuid4().hex}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(page, encoding="utf-8", errors="replace")
        os.replace(partial, out)  # whole, also for somebody who looks at it now
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}; name another with --out") from error
    finally:
        with suppress(OSError):
            partial.unlink()


def write_at_end(folder: Path, check: Callable[[], None]) -> None:
    """The report of a run that ends or was stopped: whatever is wrong, the run ends as it would
    have without a report. `check` raises if the folder is not the run's any more."""
    if not (folder / "metrics.jsonl").is_file():
        return
    try:
        check()
        write_page([folder], folder / FILE)
    except Exception as error:
        logger.warning("no report was written: %s", first_line(error))


def build(folders: list[Path]) -> dict[str, Any]:
    """All that the page shows."""
    runs = read_runs(folders)
    made = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    return {"made": made, "runs": [describe(run, PICTURE_BYTES / len(runs)) for run in runs]}


def describe(run: RunFolder, budget: float) -> dict[str, Any]:
    names = dict.fromkeys(name for row in run.rows for name in row)
    findings, passed, not_applicable = health.summarize(run.rows)
    return {
        "name": run.name,
        "config": run.config,
        "epochs": [row.get("epoch") for row in run.rows],
        "metrics": {
            name: [_rounded(row.get(name)) for row in run.rows] for name in names if "/" in name
        },
        "health": {
            "passed": passed,
            "not_applicable": not_applicable,
            "findings": [asdict(finding) for finding in findings],
        },
        **{kind: _samples(run, kind, budget * share) for kind, share in SHARES.items()},
    }


def _samples(run: RunFolder, kind: str, budget: float) -> dict[str, Any]:
    """Samples of some epochs; "of" counts all epochs, `texts` and `sources` have what many samples
    share."""
    shots = {epoch: read_shots(path, MOST_SAMPLES) for epoch, path in run.shots[kind].items()}
    shots = {epoch: shown for epoch, shown in shots.items() if shown}
    files = {epoch: _files(shown) for epoch, shown in shots.items()}
    paths = {epoch: [_own(path, run.folder) for path in own] for epoch, own in files.items()}
    pictures = fit(paths, budget, EPOCHS[kind], _best(run, shots))
    texts: dict[str, int] = {}
    sources: dict[str, int] = {}
    samples = []
    for epoch, encoded in pictures.items():
        found = dict(zip(files[epoch], encoded, strict=True))
        samples.append([_sample(shot, found, texts, sources) for shot in shots[epoch]])
    return {
        "of": len(shots),
        "epochs": list(pictures),
        "samples": samples,
        "texts": list(texts),
        "sources": list(sources),
    }


def _files(shots: list[Shot]) -> list[Path]:
    """Each once: the samples of a group are made from one source."""
    every = (path for shot in shots for path in (shot.picture, *shot.sources) if path)
    return list(dict.fromkeys(every))


def _own(path: Path, run: Path) -> Path | None:
    if lies_in(run, path):
        return path
    logger.warning("%s is not shown: it is a link that leads out of the run", path)
    return None


def _best(run: RunFolder, among: dict[int, Any]) -> list[int]:
    """The epoch with the highest held-out reward, if it is among these."""
    name = f"eval/{TOTAL}"
    scored = [row for row in run.rows if row.get(name) is not None and row.get("epoch") in among]
    return [max(scored, key=lambda row: row[name])["epoch"]] if scored else []


def _sample(
    shot: Shot, encoded: dict[Path, str | None], texts: dict[str, int], sources: dict[str, int]
) -> dict[str, Any]:
    made_from = [encoded[path] for path in shot.sources if encoded[path]]
    sample = {
        "prompt": texts.setdefault(shot.prompt, len(texts)),
        "scores": {name: _rounded(value) for name, value in shot.scores.items()},
        "picture": shot.picture and encoded[shot.picture],
        "sources": [sources.setdefault(each, len(sources)) for each in made_from] or None,
        "answer": shot.answer and shortened(shot.answer),
        "truth": shot.truth and shortened(shot.truth),
        "advantage": _rounded(shot.advantage),
        "group": shot.group,
    }
    return {name: value for name, value in sample.items() if value is not None}


def shortened(text: str) -> str:
    return text if len(text) <= LONGEST_ANSWER else f"{text[:LONGEST_ANSWER]}…"


def _rounded(value: float | None) -> float | None:
    """To what can be seen; JSON has no NaN."""
    known = isinstance(value, int | float) and abs(value) <= LARGEST
    return float(f"{value:.6g}") if known else None


def render(data: dict[str, Any], version: str = "") -> str:
    """`version`: of a page that asks its server for newer data."""
    here = files("flow_grpo.show")
    style = (here / "page.css").read_text("utf-8")
    script = "\n".join((here / "scripts" / name).read_text("utf-8") for name in SCRIPTS)
    content = {
        "POLICY": _policy(style, script, live=bool(version)),
        "TITLE": html.escape(", ".join(run["name"] for run in data["runs"])),
        "STYLE": style,
        "SCRIPT": script,
        "VERSION": version,
        "DATA": as_json(data).replace("<", "\\u003c"),  # no tag can end the block
    }
    # in one pass, as a prompt may read like a mark
    first, *parts = (here / "page.html").read_text("utf-8").split("@@")
    return first + "".join(content[part] if i % 2 == 0 else part for i, part in enumerate(parts))


def as_json(data: dict[str, Any]) -> str:
    return json.dumps(data, separators=(",", ":"))


def _policy(style: str, script: str, *, live: bool) -> str:
    """Nothing runs but the page's own script, and no address is asked, but the server's if live."""
    rules = {
        "default-src": "'none'",
        "img-src": "data:",
        "style-src": _hash(style),
        "script-src": _hash(script),
        **({"connect-src": "'self'"} if live else {}),
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
