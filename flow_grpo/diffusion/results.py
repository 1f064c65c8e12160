"""Write images with their scores, and results.json, results.md and grid.png of an evaluation."""

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

from flow_grpo import atomic_io
from flow_grpo.audio import Audio
from flow_grpo.data.epoch_batches import SampleBatch
from flow_grpo.data.prompts import Prompt
from flow_grpo.diffusion.evaluation import EvaluationResult
from flow_grpo.diffusion.session import Session
from flow_grpo.diffusion.source_images import load_source_images
from flow_grpo.report.console import displayed_rewards, format_table
from flow_grpo.report.grid import (
    comparison_grid,
    format_score,
    middle_frame,
    save_image_grid,
    source_image_columns,
)
from flow_grpo.report.score_table import (
    PairedDifference,
    finite_or_none,
    num_decimals,
    paired_difference,
)
from flow_grpo.rewards import TOTAL
from flow_grpo.rewards.frames import as_videos, to_pil
from flow_grpo.training.candidates import Candidate
from flow_grpo.training.metrics import ScoredSamples
from flow_grpo.training.session import write_samples
from flow_grpo.training.trackers import save_samples

DIFFERENCE_NOTE = (
    "Difference from {first} ± the standard error of the paired difference (same prompts, same "
    "noise). Within two standard errors it may well be chance."
)
SINGLE_PROMPT_NOTE = " A difference without ± is that of one prompt, which has no standard error."


@dataclass(frozen=True)
class CandidateScores:
    """An evaluated candidate."""

    candidate: Candidate
    result: EvaluationResult

    @property
    def name(self) -> str:
        return self.candidate.name

    def differences_from(self, first: "CandidateScores") -> dict[str, PairedDifference]:
        """Return the paired difference from `first` for each reward that both have."""
        reference = first.result.scores
        return {
            name: paired_difference(scores, reference[name])
            for name, scores in self.result.scores.items()
            if name in reference
        }

    def score_lines(self, row: int) -> list[str]:
        """Return the caption lines of an image: its scores."""
        scores = self.result.scores
        names = displayed_rewards(scores)
        return [f"{name} {format_score(float(scores[name][row]))}" for name in names]


def save_images(out: Path, scored: CandidateScores, prompts: list[Prompt], count: int) -> None:
    """Save the first `count` images in the format of a run's samples."""
    if count:
        shown = scored.result.with_max_images(count)
        folder, texts = out / "samples" / scored.name, [p.prompt for p in prompts]
        save_samples(folder, shown.images, shown.sources, prompt=texts, **shown.scores)


def write_results(
    out: Path, settings: dict[str, Any], scored: list[CandidateScores], prompts: list[Prompt]
) -> None:
    """Write results.json, results.md and grid.png.

    In results.json a single candidate is merged with the settings; several are a list.
    """
    reports = [candidate_report(each, scored[0], prompts) for each in scored]
    if len(reports) == 1:
        content = {**settings, **reports[0]}
    else:
        named = zip(scored, reports, strict=True)
        content = {**settings, "checkpoints": [{"name": s.name, **r} for s, r in named]}
    atomic_io.write_text_atomic(out / "results.json", json.dumps(content, indent=1) + "\n")
    atomic_io.write_text_atomic(out / "results.md", f"{summary_table(scored)}\n")
    shown = [p.prompt for p in prompts[: len(scored[0].result.images)]]
    if not shown:
        return
    if len(scored) == 1 and not any(scored[0].result.sources):
        [only] = scored
        scores = [format_score(only.result.score(TOTAL, i)) for i in range(len(shown))]
        save_image_grid(out, only.result.images, shown, scores)
    else:
        candidate_grid(scored, shown).save(out / "grid.png")


def candidate_grid(scored: list[CandidateScores], shown: list[str]) -> Image.Image:
    """Draw a row per prompt and a column per candidate, source images first."""
    lines = {each.name: [each.score_lines(i) for i in range(len(shown))] for each in scored}
    images = {each.name: [middle_frame(image) for image in each.result.images] for each in scored}
    return comparison_grid(source_image_columns(scored[0].result.sources) | images, shown, lines)


def candidate_report(
    scored: CandidateScores, first: CandidateScores, prompts: list[Prompt]
) -> dict[str, Any]:
    """Return a candidate's entry in results.json; `first` is the candidate it is compared with."""
    result = scored.result
    content: dict[str, Any] = {
        "weights": str(scored.candidate.weights or ""),
        "means": {name: finite_or_none(mean) for name, mean in result.means().items()},
        "failed": result.num_failed(),
        "scores": [
            {"prompt": p.prompt, **{k: result.score(k, i) for k in result.scores}}
            for i, p in enumerate(prompts)
        ],
    }
    if scored is first:
        return content
    differences = {
        name: {key: finite_or_none(value) for key, value in asdict(difference).items()}
        for name, difference in scored.differences_from(first).items()
    }
    return {**content, "difference": differences}


def console_summary(scored: list[CandidateScores], prompts: int) -> str:
    """Return one line for a single candidate, a table for several."""
    if len(scored) > 1:
        return summary_table(scored)
    means = scored[0].result.means().items()
    # extra columns of a scorer may not apply to these prompts
    means_text = [
        f"{name} {mean:.4f}" for name, mean in means if "/" not in name or not math.isnan(mean)
    ]
    return "  ".join([f"{prompts} prompts", *means_text])


def summary_table(scored: list[CandidateScores]) -> str:
    """Return a table with a row per candidate, each compared with the first."""
    first, *others = scored
    names = displayed_rewards(first.result.scores)
    precision = {name: num_decimals(first.result.means()[name]) for name in names}
    failed = any(each.result.num_failed() for each in scored)
    rows = [["checkpoint", *names] + (["failed"] if failed else [])]
    for each in scored:
        differences = {} if each is first else each.differences_from(first)
        means = each.result.means()
        cells = [
            format_cell(means.get(name, math.nan), differences.get(name), precision[name])
            for name in names
        ]
        if failed:
            cells.append(str(each.result.num_failed()))
        rows.append([each.name, *cells])
    text = format_table(rows)
    if not others:
        return text
    note = DIFFERENCE_NOTE.format(first=first.name)
    if re.search(r"\([+-][\d.]+\)", text):
        note += SINGLE_PROMPT_NOTE
    return f"{text}\n\n{note}"


def format_cell(mean: float, difference: PairedDifference | None, precision: int) -> str:
    """Format as `mean (+difference ± error)`; parts that are NaN are left out."""
    text = "-" if math.isnan(mean) else f"{mean:.{precision}f}"
    if difference is None or math.isnan(difference.mean):
        return text
    error = difference.standard_error
    spread = "" if math.isnan(error) else f" ± {error:.{precision}f}"
    return f"{text} ({difference.mean:+.{precision}f}{spread})"


def write_training_samples(
    session: Session,
    epoch: int,
    shown: list[tuple[SampleBatch, Tensor, list[Audio] | None]],
    scored: ScoredSamples,
    credit: np.ndarray,
    log_images: int,
) -> None:
    """Write the first samples of the main process: at least one whole group, if it has one.

    Call it on all processes; only the main process converts images.

    Args:
        session: The training session.
        epoch: Number in the name of the directory.
        shown: Sample indices, decoded images and sound of the main process's first batches.
        scored: Rewards of all samples of the epoch.
        credit: Advantage of all samples of the epoch, (N,).
        log_images: Number of samples; with 0, none is written.
    """
    if not session.accelerator.is_main_process:
        write_samples(session, "train", epoch, [])
        return
    index = np.concatenate([ids.index for ids, *_ in shown])
    count = max(log_images, session.plan.group_size) if log_images else 0
    prompts = [session.prompts[row] for ids, *_ in shown for row in ids.row]
    images = to_pil(torch.cat([images for _, images, _ in shown])[:count])
    audio = [sound for *_, sounds in shown for sound in sounds or ()][:count]
    write_samples(
        session,
        "train",
        epoch,
        as_videos(images, session.adapter.fps, audio),
        load_source_images(prompts[:count], session.adapter),
        prompt=[prompt.prompt for prompt in prompts],
        **{name: values[index] for name, values in scored.rewards.items()},
        advantage=credit[index],
        group=scored.groups[index],
    )
