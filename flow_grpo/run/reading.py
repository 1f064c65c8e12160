"""What a run has written."""

import json
from pathlib import Path
from typing import Any

from flow_grpo.errors import UserError


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """A row per epoch; `run` is a run folder or a metrics.jsonl file."""
    path = run / "metrics.jsonl" if run.is_dir() else run
    if not path.is_file():
        raise UserError(f"no metrics at {path}: name a run folder or a metrics file")
    rows, lines = [], path.read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            rows.append(row | {"epoch": int(row["epoch"])})
        except (ValueError, KeyError, TypeError) as error:
            if number < len(lines):  # the last one is cut where a run was killed
                raise UserError(
                    f"line {number} of {path} is no JSON with an epoch; mend or remove it"
                ) from error
    return rows
