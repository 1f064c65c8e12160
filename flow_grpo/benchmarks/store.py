"""The output directory of a running benchmark, from which it can be resumed.

    OUT/benchmark.json                        settings that all scores in it share
    OUT/candidates/NAME/candidate.json        name and order, weights and their checksum
    OUT/candidates/NAME/scores/00003.json     scores of batch 3, written when the batch is scored
    OUT/candidates/NAME/images/00012-1.png    image 1 of prompt 12

A batch has the same samples on any number of processes and after any interruption, so that results
do not depend on them. A batch is done once nothing in it failed; the others are scored again by
the next start of the same command.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flow_grpo.atomic_io import write_text_atomic
from flow_grpo.benchmarks.results import score_from_json, score_to_json
from flow_grpo.errors import UserError
from flow_grpo.untrusted_files import read_json

SETTINGS_FILE, CANDIDATE_FILE = "benchmark.json", "candidate.json"
WEIGHT_PATTERNS = ("*.safetensors", "*.json")


@dataclass(frozen=True)
class Batches:
    """Division of the samples of a benchmark into batches.

    Samples are numbered by prompt and then by number within the prompt.
    """

    prompts: int
    samples: int  # per prompt
    size: int  # of a batch

    def __len__(self) -> int:
        return math.ceil(self.prompts * self.samples / self.size)

    def __getitem__(self, number: int) -> list[tuple[int, int]]:
        """Return prompt and number of each sample of a batch."""
        first = number * self.size
        last = min(first + self.size, self.prompts * self.samples)
        return [divmod(index, self.samples) for index in range(first, last)]


@dataclass
class BatchRecord:
    """Scores of a batch by scorer, in the order of its samples."""

    scores: dict[str, list[float]]
    errors: dict[str, str] = field(default_factory=dict)  # last error of scorers that failed

    @property
    def is_done(self) -> bool:
        return not any(math.isnan(v) for values in self.scores.values() for v in values)

    def failed(self) -> list[str]:
        """Return the scorers that scored no sample of the batch."""
        return [name for name, values in self.scores.items() if all(map(math.isnan, values))]


@contextmanager
def explain_write_errors(out: Path) -> Iterator[None]:
    """Context manager that raises errors of the file system, such as a full disk, as UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot be written: {error.strerror or error}", field="--out", value=str(out)
        ) from error


def reject_other_content(out: Path) -> None:
    """Raise a UserError if a new output directory has files, apart from the lock of a command."""
    files = (
        (each for each in out.iterdir() if not each.name.startswith(".")) if out.is_dir() else ()
    )
    if out.is_file() or any(files):
        raise UserError(
            "already exists and is not of this benchmark",
            field="--out",
            value=str(out),
            hint="choose another --out",
        )


class BenchmarkStore:
    """The output directory of a benchmark."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def open(self, settings: dict[str, Any]) -> bool:
        """Create the directory, or check that it was created with the same settings.

        Returns:
            Whether it existed.

        Raises:
            UserError: If it belongs to something else, or has other settings.
        """
        settings = json.loads(json.dumps(settings))
        file = self.out / SETTINGS_FILE
        if file.is_file():
            found = read_json(file)
            found = found if isinstance(found, dict) else {}
            changed = [n for n in {**found, **settings} if found.get(n) != settings.get(n)]
            if changed:
                name = changed[0]
                raise UserError(
                    f"was started with {name}={found.get(name)!r}, not {settings.get(name)!r}",
                    field="--out",
                    value=str(self.out),
                    hint="choose another --out, or repeat the command with its settings",
                )
            return True
        reject_other_content(self.out)
        with explain_write_errors(self.out):
            self.out.mkdir(parents=True, exist_ok=True)
            write_text_atomic(file, json.dumps(settings, indent=1) + "\n")
        return False

    def candidates(self) -> list[str]:
        """Return the names of the candidates in the directory, in the order of their results."""
        files = (self.out / "candidates").glob(f"*/{CANDIDATE_FILE}")
        numbered = sorted((read_json(file)["order"], read_json(file)["name"]) for file in files)
        return [name for _, name in numbered]

    def candidate(self, name: str) -> "CandidateStore":
        return CandidateStore(self.out / "candidates" / name.replace("/", "--"), name)

    def add_candidate(self, name: str, weights: str, sha256: str) -> None:
        """Create the directory of a candidate, or check that it has the scores of these weights."""
        folder, order = self.candidate(name).folder, len(self.candidates())
        identity = {"name": name, "order": order, "weights": weights, "sha256": sha256}
        file = folder / CANDIDATE_FILE
        if not file.is_file():
            with explain_write_errors(self.out):
                for name in ("scores", "images"):
                    (folder / name).mkdir(parents=True, exist_ok=True)
                write_text_atomic(file, json.dumps(identity, indent=1) + "\n")
            return
        found = read_json(file)
        if found.get("sha256") != sha256:
            raise UserError(
                f"has scores of other weights under the name {name!r} "
                f"({found.get('weights') or 'the base model'})",
                field="--out",
                value=str(self.out),
                hint="choose another --out",
            )


class CandidateStore:
    """The directory of one candidate."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name

    def identity(self) -> tuple[str, str]:
        """Return the path and the checksum of the weights."""
        found = read_json(self.folder / CANDIDATE_FILE)
        return found["weights"], found["sha256"]

    def image_path(self, prompt: int, number: int) -> Path:
        return self.folder / "images" / f"{prompt:05d}-{number}.png"

    def write(self, batch: int, record: BatchRecord) -> None:
        """Write the scores of a batch atomically."""
        content = {
            "scores": {n: list(map(score_to_json, v)) for n, v in record.scores.items()},
            "errors": record.errors,
        }
        write_text_atomic(self._path(batch), json.dumps(content) + "\n")

    def read(self, batch: int, size: int) -> BatchRecord | None:
        """Return the scores of a batch, or None if they are missing or damaged."""
        try:
            content = read_json(self._path(batch))
            scores = {n: list(map(score_from_json, v)) for n, v in content["scores"].items()}
        except (OSError, UserError, KeyError, TypeError, ValueError, AttributeError):
            return None
        if any(len(values) != size for values in scores.values()):
            return None
        return BatchRecord(scores, content.get("errors", {}))

    def pending(self, batches: Batches) -> list[int]:
        """Return the batches that are not done."""
        found = ((i, self.read(i, len(batches[i]))) for i in range(len(batches)))
        return [i for i, record in found if record is None or not record.is_done]

    def is_complete(self, batches: Batches) -> bool:
        """Return whether every batch was scored; single scores may have failed."""
        return all(self.read(i, len(batches[i])) is not None for i in range(len(batches)))

    def scores(self, batches: Batches) -> dict[str, np.ndarray]:
        """Return all scores, (prompts, samples) by scorer; NaN where there is none."""
        shape = (batches.prompts, batches.samples)
        found: dict[str, np.ndarray] = {}
        for batch in range(len(batches)):
            record = self.read(batch, len(batches[batch]))
            for name, values in record.scores.items() if record else ():
                column = found.setdefault(name, np.full(shape, np.nan))
                for (prompt, number), value in zip(batches[batch], values, strict=True):
                    column[prompt, number] = value
        return found

    def _path(self, batch: int) -> Path:
        return self.folder / "scores" / f"{batch:05d}.json"


def write_geneval_layout(
    store: CandidateStore, folder: Path, rows: list[dict[str, Any]], samples: int
) -> None:
    """Arrange the images as GenEval's evaluation/evaluate_images.py reads them.

    FOLDER/00012/metadata.jsonl and FOLDER/00012/samples/0001.png (djghosh13/geneval, README.md).
    Images are hard links, which take no space.

    Args:
        store: The candidate.
        folder: Directory to write to.
        rows: Metadata of each prompt, a line of evaluation_metadata.jsonl.
        samples: Images per prompt.
    """
    for prompt, row in enumerate(rows):
        own = folder / f"{prompt:05d}"
        (own / "samples").mkdir(parents=True, exist_ok=True)
        write_text_atomic(own / "metadata.jsonl", json.dumps(row) + "\n")
        for number in range(samples):
            image, link = store.image_path(prompt, number), own / f"samples/{number:04d}.png"
            if image.is_file() and not link.exists():
                link.hardlink_to(image)


def weights_checksum(weights: Path | None) -> str:
    """Return a SHA-256 of the files of a candidate's weights; "" for the base model."""
    if weights is None:
        return ""
    total = hashlib.sha256()
    files = {p for pattern in WEIGHT_PATTERNS for p in weights.rglob(pattern)}
    for path in sorted(files) or [weights]:
        with path.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        total.update(f"{path.relative_to(weights)} {digest}\n".encode())
    return total.hexdigest()


def subset(count: int, limit: int | None) -> list[int]:
    """Return the rows of a subset, spread evenly over all rows; lists are often sorted by tag."""
    if limit is None or limit >= count:
        return list(range(count))
    return [row * count // limit for row in range(limit)]
