"""Curve and samples of a run before and after training, for its model card."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from flow_grpo.errors import UserError
from flow_grpo.images import read_image
from flow_grpo.report.chart import Line, Panel, draw_panels
from flow_grpo.report.console import displayed_rewards
from flow_grpo.report.grid import comparison_grid, format_score, source_image_columns
from flow_grpo.report.run_reader import Record, RunData, SampleRecord, read_sample_records
from flow_grpo.rewards import TOTAL
from flow_grpo.untrusted_files import is_inside

MAX_PANELS = 4
MAX_EDGE = 384  # pixels of an image in the figure
STILL_SUFFIX = ".png"  # of the middle frame of a video


@dataclass(frozen=True)
class SamplePairs:
    """The same test prompts before training and with the published weights."""

    before_epoch: int
    after_epoch: int
    published_epoch: int
    before: list[SampleRecord]
    after: list[SampleRecord]

    @property
    def headings(self) -> tuple[str, str]:
        """Return the names of the two columns."""
        start = "before training" if self.before_epoch == 0 else f"epoch {self.before_epoch}"
        published = " (published)" if self.after_epoch == self.published_epoch else ""
        return start, f"epoch {self.after_epoch}{published}"


def pair_samples(run: RunData, epoch: int, count: int) -> SamplePairs | None:
    """Return the first `count` prompts of the first and the last evaluation up to `epoch`.

    None if the run has not two evaluations with samples of the same prompts.
    """
    folders = {number: path for number, path in run.samples["eval"].items() if number <= epoch}
    if len(folders) < 2:
        return None
    first, last = min(folders), max(folders)
    tables = [read_sample_records(folders[number], count) for number in (first, last)]
    pairs = [pair for pair in zip(*tables, strict=False) if pair[0].prompt == pair[1].prompt]
    if not pairs:
        return None
    before, after = ([pair[side] for pair in pairs] for side in (0, 1))
    return SamplePairs(first, last, epoch, before, after)


def draw_samples(run: RunData, pairs: SamplePairs) -> Image.Image | None:
    """Return a figure with a row per prompt; None if no image can be read."""
    columns: dict[str, list[Image.Image | None]] = {}
    sources = [[_read_small(run, path) for path in record.sources] for record in pairs.before]
    columns |= source_image_columns([[image for image in own if image] for own in sources])
    scores: dict[str, list[list[str]]] = {}
    for heading, records in zip(pairs.headings, (pairs.before, pairs.after), strict=True):
        columns[heading] = [_read_small(run, record.image) for record in records]
        scores[heading] = [_score_lines(record) for record in records]
    if not any(image for images in columns.values() for image in images):
        return None
    return comparison_grid(columns, [record.prompt for record in pairs.before], scores)


def _score_lines(record: SampleRecord) -> list[str]:
    names = displayed_rewards(record.scores)
    return [f"{name} {format_score(record.scores[name])}" for name in names]


def still_of(path: Path) -> Path:
    """Return an image file, or the middle frame that is saved next to a video."""
    still = path.with_suffix(STILL_SUFFIX)
    return still if still.is_file() else path


def _read_small(run: RunData, path: Path | None) -> Image.Image | None:
    """Return an image of the run in at most `MAX_EDGE` pixels; None if it cannot be read."""
    if path is None or not is_inside(run.folder, still_of(path)):
        return None
    try:
        image = read_image(still_of(path)).convert("RGB")
    except (UserError, OSError):
        return None
    image.thumbnail((MAX_EDGE, MAX_EDGE), Image.Resampling.LANCZOS)
    return image


def draw_curves(rows: list[Record], rewards: Iterable[str], epoch: int) -> Image.Image | None:
    """Return a panel per reward, of training and evaluation; None without any.

    Args:
        rows: Metrics of the run.
        rewards: Names of its rewards.
        epoch: The published one, which is marked.
    """
    panels = []
    for reward in displayed_rewards(rewards):
        lines = [
            Line(label, curve)
            for label, kind in (("training", "reward"), ("evaluation", "eval"))
            if (curve := read_curve(rows, f"{kind}/{reward}"))
        ]
        if lines:
            panels.append(Panel(reward, lines))
    panels.sort(key=lambda panel: panel.title != TOTAL)  # the total first
    return draw_panels(panels[:MAX_PANELS], x="epoch", mark=epoch) if panels else None


def read_curve(rows: list[Record], name: str) -> list[tuple[float, float]]:
    """Return epochs and values of a metric where it has one."""
    return [(row["epoch"], row[name]) for row in rows if row.get(name) is not None]
