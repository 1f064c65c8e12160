"""Pictures with their scores on the disk, of training and of an evaluation, which also leaves
results.json, results.md and grid.png."""

import json
import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from flow_grpo import disk
from flow_grpo.data.prompts import Draw, Prompt
from flow_grpo.draw.evaluation import Candidate, Evaluation
from flow_grpo.draw.session import Session
from flow_grpo.draw.sources import sources_of
from flow_grpo.rewards import TOTAL
from flow_grpo.rewards.frames import to_pil
from flow_grpo.run.metrics import Scored
from flow_grpo.run.session import write_samples
from flow_grpo.run.trackers import save_samples
from flow_grpo.show.console import shown_rewards, table
from flow_grpo.show.grid import paired_grid, save_grid, score_text, source_columns, still


@dataclass(frozen=True)
class Difference:
    """How two means differ, over the prompts that both models were scored on."""

    mean: float
    standard_error: float  # NaN for fewer than two prompts
    prompts: int


def paired_difference(scores: np.ndarray, reference: np.ndarray) -> Difference:
    """How much higher `scores` are, prompt by prompt; NaN marks a score that failed.

    Prompts differ more from one another than models do on the same prompt: the spread of the
    differences says how certain the mean of them is, the spread of the scores does not.
    """
    both = np.isfinite(scores) & np.isfinite(reference)
    higher = scores[both] - reference[both]
    count = len(higher)
    return Difference(
        mean=float(higher.mean()) if count else math.nan,
        standard_error=float(higher.std(ddof=1) / math.sqrt(count)) if count > 1 else math.nan,
        prompts=count,
    )


NOTE = (
    "Difference to {first} ± the standard error of the paired difference (same prompts, same "
    "noise). Within two standard errors it may well be chance."
)
ONE = " A difference without ± is that of one prompt, which has no standard error."


@dataclass(frozen=True)
class CandidateScores:
    candidate: Candidate
    result: Evaluation

    @property
    def name(self) -> str:
        return self.candidate.name

    def difference(self, first: "CandidateScores") -> dict[str, Difference]:
        theirs = first.result.scores
        return {
            name: paired_difference(scores, theirs[name])
            for name, scores in self.result.scores.items()
            if name in theirs
        }

    def lines(self, row: int) -> list[str]:
        """The scores of a picture, as they stand under it."""
        names = columns(self.result)
        scores = self.result.scores
        return [f"{name} {score_text(float(scores[name][row]))}" for name in names]


def save_pictures(out: Path, scored: CandidateScores, prompts: list[Prompt], count: int) -> None:
    """Save them as a run does its samples."""
    folder, texts, result = (
        out / "samples" / scored.name,
        [p.prompt for p in prompts],
        scored.result,
    )
    if count:
        shown = result.shortened(count)
        save_samples(folder, shown.images, shown.sources, prompt=texts, **result.scores)


def columns(result: Evaluation) -> list[str]:
    return shown_rewards(result.scores)


def write(
    out: Path, settings: dict[str, Any], scored: list[CandidateScores], prompts: list[Prompt]
) -> None:
    """One candidate has its keys beside the settings, several are a list."""
    reports = [report(each, scored[0], prompts) for each in scored]
    if len(reports) == 1:
        content = {**settings, **reports[0]}
    else:
        named = zip(scored, reports, strict=True)
        content = {**settings, "checkpoints": [{"name": s.name, **r} for s, r in named]}
    disk.write_text(out / "results.json", json.dumps(content, indent=1) + "\n")
    disk.write_text(out / "results.md", f"{summary(scored)}\n")
    shown = [p.prompt for p in prompts[: len(scored[0].result.images)]]
    if not shown:
        return
    if len(scored) == 1 and not any(scored[0].result.sources):
        [only] = scored
        scores = [score_text(only.result.score(TOTAL, i)) for i in range(len(shown))]
        save_grid(out, only.result.images, shown, scores)
    else:
        comparison(scored, shown).save(out / "grid.png")


def comparison(scored: list[CandidateScores], shown: list[str]) -> Image.Image:
    """A column per candidate, a row for each of the prompts that are `shown`; what the pictures
    were made from stands first."""
    lines = {each.name: [each.lines(i) for i in range(len(shown))] for each in scored}
    pictures = {each.name: [still(image) for image in each.result.images] for each in scored}
    return paired_grid(source_columns(scored[0].result.sources) | pictures, shown, lines)


def report(
    scored: CandidateScores, first: CandidateScores, prompts: list[Prompt]
) -> dict[str, Any]:
    result = scored.result
    content: dict[str, Any] = {
        "weights": str(scored.candidate.weights or ""),
        "means": {name: finite(mean) for name, mean in result.means().items()},
        "failed": result.failed(),
        "scores": [
            {"prompt": p.prompt, **{k: result.score(k, i) for k in result.scores}}
            for i, p in enumerate(prompts)
        ],
    }
    if scored is first:
        return content
    differences = {
        name: {key: finite(value) for key, value in asdict(difference).items()}
        for name, difference in scored.difference(first).items()
    }
    return {**content, "difference": differences}


def console(scored: list[CandidateScores], prompts: int) -> str:
    """A line of one candidate, a table of several."""
    if len(scored) > 1:
        return summary(scored)
    means = scored[0].result.means().items()
    # of what a scorer returns besides, some is of other prompts
    told = [f"{name} {mean:.4f}" for name, mean in means if "/" not in name or not math.isnan(mean)]
    return "  ".join([f"{prompts} prompts", *told])


def summary(scored: list[CandidateScores]) -> str:
    """A table with a row per candidate; each is held against the first."""
    first, *others = scored
    names = columns(first.result)
    places = {name: decimals(first.result.means()[name]) for name in names}
    failed = any(each.result.failed() for each in scored)
    rows = [["checkpoint", *names, *(["failed"] if failed else [])]]
    for each in scored:
        differences = {} if each is first else each.difference(first)
        means = each.result.means()
        cells = [
            cell(means.get(name, math.nan), differences.get(name), places[name]) for name in names
        ]
        rows.append([each.name, *cells, *([str(each.result.failed())] if failed else [])])
    text = table(rows)
    note = NOTE.format(first=first.name) + (ONE if re.search(r"\([+-][\d.]+\)", text) else "")
    return f"{text}\n\n{note}" if others else text


def cell(mean: float, difference: Difference | None, places: int) -> str:
    text = "-" if math.isnan(mean) else f"{mean:.{places}f}"
    if difference is None or math.isnan(difference.mean):
        return text
    error = difference.standard_error
    spread = "" if math.isnan(error) else f" ± {error:.{places}f}"
    return f"{text} ({difference.mean:+.{places}f}{spread})"


def decimals(mean: float) -> int:
    """Four, and more for rewards whose values are small."""
    if math.isnan(mean) or mean == 0:
        return 4
    return min(8, max(4, 3 - math.floor(math.log10(abs(mean)))))


def finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def write_training_samples(
    session: Session,
    epoch: int,
    shown: list[tuple[Draw, Tensor]],
    scored: Scored,
    credit: np.ndarray,
) -> None:
    """The first of this process: at least one whole group, if the process drew one."""
    config, index = session.config, np.concatenate([draw.index for draw, _ in shown])
    count = max(config.log_images, session.plan.group_size) if config.log_images else 0
    prompts = [session.prompts[row] for draw, _ in shown for row in draw.row]
    write_samples(
        session,
        "train",
        epoch,
        to_pil(torch.cat([images for _, images in shown])[:count]),
        sources_of(prompts[:count], session.adapter),
        prompt=[prompt.prompt for prompt in prompts],
        **{name: values[index] for name, values in scored.rewards.items()},
        advantage=credit[index],
        group=scored.groups[index],
    )
