"""Render runs as one self-contained HTML page: their data as JSON, with scripts and styles."""

import base64
import hashlib
import html
import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from flow_grpo.atomic_io import write_text_atomic
from flow_grpo.errors import UserError, first_line
from flow_grpo.report import health
from flow_grpo.report.run_reader import (
    MAX_METRIC,
    RunData,
    SampleRecord,
    read_runs,
    read_sample_records,
)
from flow_grpo.report.thumbnails import encode_thumbnails
from flow_grpo.rewards import TOTAL
from flow_grpo.untrusted_files import is_inside

logger = logging.getLogger("flow_grpo")

REPORT_FILE = "report.html"
SCRIPTS = ("dom.js", "curves.js", "head.js", "samples.js", "main.js")
MAX_IMAGE_BYTES = 10_000_000  # of all runs together; the rest of the page is small
BYTE_SHARES = {"eval": 2 / 3, "train": 1 / 3}
MAX_EPOCHS = {"eval": 40, "train": 20}  # with images; shrinking one takes 20 to 40 ms
MAX_SAMPLES = 64  # per epoch
MAX_RESPONSE_LENGTH = 4000  # characters; samples.jsonl has the full text


def write_report(folders: list[Path], out: Path) -> None:
    """Write the report of one or more run directories to the file `out`.

    Raises:
        UserError: If the file cannot be written.
    """
    if out.is_dir():
        raise UserError("is a directory", field=out, hint="pass a file with --out")
    page = render_page(build_report_data(folders))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        # names of directories may be invalid UTF-8
        write_text_atomic(out, page.encode(errors="replace").decode())
    except OSError as error:
        raise UserError(
            f"cannot write {out}: {error.strerror}", hint="choose another file with --out"
        ) from error


def write_final_report(folder: Path, check: Callable[[], None]) -> None:
    """Write the report of a run that ends; errors are logged, as they must not change how it ends.

    Args:
        folder: Run directory.
        check: Raises if the directory no longer belongs to the run.
    """
    if not (folder / "metrics.jsonl").is_file():
        return
    try:
        check()
        write_report([folder], folder / REPORT_FILE)
    except Exception as error:
        logger.warning("cannot write the report: %s", first_line(error))


def build_report_data(folders: list[Path]) -> dict[str, Any]:
    """Return all data of the page."""
    runs = read_runs(folders)
    made = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    return {"made": made, "runs": [describe(run, MAX_IMAGE_BYTES / len(runs)) for run in runs]}


def describe(run: RunData, budget: float) -> dict[str, Any]:
    """Return the data of one run; its images take at most `budget` bytes."""
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
        **{kind: _build_samples(run, kind, budget * share) for kind, share in BYTE_SHARES.items()},
    }


def _build_samples(run: RunData, kind: str, budget: float) -> dict[str, Any]:
    """Return the samples of some epochs as JSON values; `of` there is the number of all epochs.

    Prompts and source images, which many samples share, are indices into `texts` and `sources`.

    Args:
        run: Data of the run.
        kind: "train" or "eval".
        budget: Maximum size of the images, in bytes.
    """
    records = {e: read_sample_records(path, MAX_SAMPLES) for e, path in run.samples[kind].items()}
    records = {epoch: rows for epoch, rows in records.items() if rows}
    files = {epoch: _image_files(rows) for epoch, rows in records.items()}
    paths = {
        epoch: [_path_in_run(path, run.folder) for path in own] for epoch, own in files.items()
    }
    thumbnails = encode_thumbnails(paths, budget, MAX_EPOCHS[kind], _best_epoch(run, records))
    texts: dict[str, int] = {}
    sources: dict[str, int] = {}
    samples = []
    for epoch, encoded in thumbnails.items():
        found = dict(zip(files[epoch], encoded, strict=True))
        samples.append([_build_sample(each, found, texts, sources) for each in records[epoch]])
    return {
        "of": len(records),
        "epochs": list(thumbnails),
        "samples": samples,
        "texts": list(texts),
        "sources": list(sources),
    }


def _image_files(records: list[SampleRecord]) -> list[Path]:
    """Return the distinct files of images and sound; samples of a group share their sources."""
    paths = (path for each in records for path in (each.image, each.audio, *each.sources) if path)
    return list(dict.fromkeys(paths))


def _path_in_run(path: Path, run: Path) -> Path | None:
    """Return `path` if it is in the run directory; else log a warning and return None."""
    if is_inside(run, path):
        return path
    logger.warning("%s is not shown: it links out of the run directory", path)
    return None


def _best_epoch(run: RunData, among: dict[int, Any]) -> list[int]:
    """Return [epoch], the one in `among` with the highest evaluation reward; [] if none has one."""
    name = f"eval/{TOTAL}"
    scored = [row for row in run.rows if row.get(name) is not None and row.get("epoch") in among]
    return [max(scored, key=lambda row: row[name])["epoch"]] if scored else []


def _build_sample(
    record: SampleRecord,
    encoded: dict[Path, str | None],
    texts: dict[str, int],
    sources: dict[str, int],
) -> dict[str, Any]:
    """Return the data of one sample; new prompts and sources are added to `texts`, `sources`."""
    images = [encoded[path] for path in record.sources if encoded[path]]
    sample = {
        "prompt": texts.setdefault(record.prompt, len(texts)),
        "scores": {name: _rounded(value) for name, value in record.scores.items()},
        "image": record.image and encoded[record.image],
        "audio": record.audio and encoded[record.audio],
        "sources": [sources.setdefault(each, len(sources)) for each in images] or None,
        "answer": record.answer and truncate(record.answer),
        "truth": record.truth and truncate(record.truth),
        "advantage": _rounded(record.advantage),
        "group": record.group,
    }
    return {name: value for name, value in sample.items() if value is not None}


def truncate(text: str) -> str:
    return text if len(text) <= MAX_RESPONSE_LENGTH else f"{text[:MAX_RESPONSE_LENGTH]}…"


def _rounded(value: float | None) -> float | None:
    """Return six significant digits, or None for missing and non-finite values."""
    known = isinstance(value, int | float) and abs(value) <= MAX_METRIC
    return float(f"{value:.6g}") if known else None


def render_page(data: dict[str, Any], version: str = "") -> str:
    """Return the HTML page; with a `version` it polls its server for newer data."""
    here = files("flow_grpo.report")
    style = (here / "page.css").read_text("utf-8")
    script = "\n".join((here / "scripts" / name).read_text("utf-8") for name in SCRIPTS)
    content = {
        "POLICY": content_security_policy(style, script, live=bool(version)),
        "TITLE": html.escape(", ".join(run["name"] for run in data["runs"])),
        "STYLE": style,
        "SCRIPT": script,
        "VERSION": version,
        "DATA": to_compact_json(data).replace("<", "\\u003c"),  # no tag can end the script block
    }
    return fill_template("page.html", content)


def fill_template(name: str, content: dict[str, str]) -> str:
    """Return the template flow_grpo/report/NAME with each @@KEY@@ replaced by its content."""
    template = (files("flow_grpo.report") / name).read_text("utf-8")
    # in one pass, as a prompt may contain a placeholder
    first, *parts = template.split("@@")
    return first + "".join(content[part] if i % 2 == 0 else part for i, part in enumerate(parts))


def to_compact_json(data: dict[str, Any]) -> str:
    return json.dumps(data, separators=(",", ":"))


def content_security_policy(style: str, script: str, *, live: bool) -> str:
    """Return a policy that allows the page's own script, and requests to its server if live."""
    rules = {
        "default-src": "'none'",
        "img-src": "data:",
        "media-src": "data:",
        "style-src": _csp_hash(style),
        "script-src": _csp_hash(script),
        **({"connect-src": "'self'"} if live else {}),
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _csp_hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
