"""Compositional prompts: the right things, in the right number, colours and places.

The rules are GenEval's, over what a detector finds; no mmdet is needed.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from PIL import Image

from flow_grpo.errors import UserError
from flow_grpo.rewards.geneval.rules import TAGS, judge, parse_task

DETECTORS = {
    "mask2former": "flow_grpo.rewards.geneval.mask2former:Mask2Former",
    "shapes": "flow_grpo.rewards.geneval.shapes:Shapes",
}
SCORES = ("graded", "strict")


class GenEval:
    """Scores pictures against what the metadata of their prompts asks for.

    detector: "mask2former" finds things of COCO's classes, "shapes" flat coloured shapes. All other
        options are the detector's.
    score: "graded" gives part of the credit for part of what was asked for, "strict" all or
        nothing, as the benchmark counts.
    """

    def __init__(
        self, *, detector: str = "mask2former", score: str = "graded", **options: Any
    ) -> None:
        if detector not in DETECTORS:
            raise UserError(f"detector={detector!r} must be one of {', '.join(DETECTORS)}")
        if score not in SCORES:
            raise UserError(f"score={score!r} must be one of {', '.join(SCORES)}")
        module, name = DETECTORS[detector].split(":")
        self.detector = getattr(import_module(module), name)(**options)
        self.strict = score == "strict"

    def __call__(
        self,
        images: Sequence[Image.Image],
        prompts: Sequence[str],
        metadata: Sequence[dict[str, Any]],
    ) -> tuple[list[float], dict[str, list[float]]]:
        """Besides the score: whether all rules hold, also for each of GenEval's tags apart."""
        tasks = [parse_task(each) for each in metadata]
        asked = [i for i, task in enumerate(tasks) if task is not None]
        found = self.detector([images[i] for i in asked], [tasks[i] for i in asked])
        nothing = float("nan")
        scores = [nothing] * len(images)
        extras = {name: [nothing] * len(images) for name in ("strict", *TAGS)}
        for i, detections in zip(asked, found, strict=True):
            verdict = judge(tasks[i], detections)
            scores[i] = float(verdict.strict) if self.strict else verdict.graded
            extras["strict"][i] = float(verdict.strict)
            if tasks[i].tag in TAGS:
                extras[tasks[i].tag][i] = float(verdict.strict)
        return scores, extras

    def rest(self) -> None:
        """Called when the scores of an epoch are in."""
        if hasattr(self.detector, "rest"):
            self.detector.rest()
