"""Compositional prompts: the right things, in the right number, colours and places.

The rules are GenEval's, over what a detector finds; no mmdet is needed.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from PIL import Image

from flow_grpo.errors import UserError
from flow_grpo.rewards.failure import NotAsked
from flow_grpo.rewards.protocol import Returned, Rows, Scorer
from flow_grpo.rewards.scorers.geneval.rules import TAGS, GenEvalVerdict, judge, parse_task

# each with the module it needs, and whose it is
NEEDS = {"mask2former": ("scipy", "scipy"), "shapes": ("cv2", "opencv-python-headless")}
SCORES = ("graded", "strict")


@dataclass(kw_only=True, eq=False)
class GenEval(Scorer):
    """Scores pictures against what the metadata of their prompts asks for."""

    detector: str = "mask2former"  # finds things of COCO's classes; "shapes": flat coloured shapes
    score: str = "graded"  # part of the credit for part of it; "strict": as the benchmark counts
    keep: float = 0.5  # of an edit's score, the share for what should stay as it was
    model: str = "facebook/mask2former-swin-small-coco-instance"
    clip: str = "openai/clip-vit-large-patch14"  # names the colours of what mask2former finds
    threshold: float = 0.3  # how sure it must be of a thing
    counting_threshold: float = 0.9  # and where things are counted
    dtype: str = "float32"
    device: str = "cpu"
    batch_size: int = 16
    offload: bool = False

    def __post_init__(self) -> None:
        options = dict(vars(self))
        for name, known in (("detector", NEEDS), ("score", SCORES)):
            if (value := options.pop(name)) not in known:
                raise UserError(f"{name}={value!r} must be one of {', '.join(known)}")
        keep = options.pop("keep")
        if not isinstance(keep, int | float) or not 0 <= keep <= 1:
            raise UserError(f"keep={keep!r} must be a number from 0 to 1")
        needed, package = NEEDS[self.detector]
        if find_spec(needed) is None:
            raise UserError(f"detector={self.detector!r} needs {package}: pip install {package}")
        # each brings packages of its own
        if self.detector == "shapes":
            from flow_grpo.rewards.scorers.geneval.shapes import Shapes

            self.finder = Shapes()
        else:
            from flow_grpo.rewards.scorers.geneval.mask2former import Mask2Former

            self.finder = Mask2Former(**options)

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: Rows) -> Returned:
        """Besides the score: whether all rules hold, also for each of GenEval's tags apart, and of
        edits for what was asked and for the rest."""
        tasks = [parse_task(each) for each in metadata]
        asked = [i for i, task in enumerate(tasks) if task is not None]
        found = self.finder([images[i] for i in asked], [tasks[i] for i in asked])
        scores = [NotAsked()] * len(images)
        extras = {name: [NotAsked()] * len(images) for name in ("strict", "asked", "kept", *TAGS)}
        for i, detections in zip(asked, found, strict=True):
            task, verdict = tasks[i], judge(tasks[i], detections)
            if task.keep:
                kept = judge(task.keep, detections)
                extras["asked"][i], extras["kept"][i] = float(verdict.strict), float(kept.strict)
                verdict = GenEvalVerdict(
                    verdict.strict and kept.strict,
                    (1 - self.keep) * verdict.graded + self.keep * kept.graded,
                )
            scores[i] = float(verdict.strict) if self.score == "strict" else verdict.graded
            extras["strict"][i] = float(verdict.strict)
            if task.tag in TAGS:
                extras[task.tag][i] = float(verdict.strict)
        return scores, extras

    def why_not(self, prompt: str, metadata: dict[str, Any]) -> str | None:
        """What is asked for must make sense, and be something that can be found."""
        task = parse_task({"prompt": prompt, **metadata})
        if task is None:
            return 'its metadata has no "include"'
        self.finder.check(task)
        return None

    def rest(self) -> None:
        self.finder.rest()
