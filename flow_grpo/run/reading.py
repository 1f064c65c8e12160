"""What a run has written."""

from pathlib import Path
from typing import Any

from flow_grpo.errors import UserError
from flow_grpo.files import parse_json

LARGEST = 1e300  # what is larger, or infinite, no curve can show


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """A row per epoch; `run` is a run folder or a metrics.jsonl file."""
    path = run / "metrics.jsonl" if run.is_dir() else run
    if not path.is_file():
        raise UserError(f"no metrics at {path}: name a run folder or a metrics file")
    rows, lines = [], path.read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = parse_json(line, str(path))
            row |= {"epoch": int(row["epoch"])}
        except (UserError, ValueError, KeyError, TypeError, OverflowError) as error:
            if number < len(lines):  # the last one is cut where a run was killed
                raise UserError(
                    f"line {number} of {path} is no JSON with an epoch; mend or remove it"
                ) from error
            continue
        for name, value in row.items():
            if value is not None and not (isinstance(value, int | float) and abs(value) <= LARGEST):
                raise UserError(
                    f"line {number} of {path} has {name}={value!r:.40}, which is no number; mend "
                    "or remove it"
                )
        rows.append(row)
    return rows
