"""GenEval (arXiv 2310.11513): does an image show the right objects, counts, colors and positions?

The rules are applied to the output of a detector from transformers; mmdet is not needed.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from PIL import Image

from flow_grpo.errors import UserError
from flow_grpo.rewards.failure import NotApplicable
from flow_grpo.rewards.option_checks import check_choice
from flow_grpo.rewards.protocol import MetadataRows, Scorer, ScorerOutput
from flow_grpo.rewards.scorers.geneval.rules import TAGS, GenEvalVerdict, evaluate_task, parse_task

# detector: the module it imports, and the package that has it
DETECTOR_PACKAGES = {"mask2former": ("scipy", "scipy"), "shapes": ("cv2", "opencv-python-headless")}
SCORE_MODES = ("graded", "strict")


@dataclass(kw_only=True, eq=False)
class GenEval(Scorer):
    """Checks images against the objects that the metadata of their prompts requires."""

    detector: str = "mask2former"  # detects COCO's classes; "shapes": flat colored shapes
    score: str = "graded"  # with partial credit; "strict": 0 or 1, as in the benchmark
    keep: float = 0.5  # weight in the score of an edit of what should be preserved
    model: str = "facebook/mask2former-swin-small-coco-instance"
    clip: str = "openai/clip-vit-large-patch14"  # classifies the colors of detected objects
    threshold: float = 0.3  # minimum detection score
    counting_threshold: float = 0.9  # minimum detection score in counting tasks
    dtype: str = "float32"
    device: str = "cpu"
    batch_size: int = 16
    offload: bool | str = False

    def __post_init__(self) -> None:
        """Check the options and build the detector."""
        options = dict(vars(self))
        check_choice("detector", options.pop("detector"), DETECTOR_PACKAGES)
        check_choice("score", options.pop("score"), SCORE_MODES)
        keep = options.pop("keep")
        if not isinstance(keep, int | float) or not 0 <= keep <= 1:
            raise UserError("must be a number from 0 to 1", field="keep", value=keep)
        module, package = DETECTOR_PACKAGES[self.detector]
        if find_spec(module) is None:
            raise UserError(
                f"needs {package}",
                field="detector",
                value=self.detector,
                hint=f"pip install {package}",
            )
        # imported here because each has its own dependencies
        if self.detector == "shapes":
            from flow_grpo.rewards.scorers.geneval.shapes import ShapeDetector

            self.object_detector = ShapeDetector()
        else:
            from flow_grpo.rewards.scorers.geneval.mask2former import Mask2FormerDetector

            self.object_detector = Mask2FormerDetector(**options)

    def __call__(
        self, images: list[Image.Image], prompts: list[str], metadata: MetadataRows
    ) -> ScorerOutput:
        """Score N images.

        Returns:
            Scores, and extra values (0 or 1): "strict", whether all rules hold; the same by
            GenEval's tags; and for edits "asked" and "kept", whether the requested objects and
            those to preserve are right.
        """
        tasks = [parse_task(each) for each in metadata]
        rows = [i for i, task in enumerate(tasks) if task is not None]
        found = self.object_detector([images[i] for i in rows], [tasks[i] for i in rows])
        scores = [NotApplicable()] * len(images)
        extras = {
            name: [NotApplicable()] * len(images) for name in ("strict", "asked", "kept", *TAGS)
        }
        for i, detections in zip(rows, found, strict=True):
            task = tasks[i]
            verdict = evaluate_task(task, detections)
            if task.keep:
                kept = evaluate_task(task.keep, detections)
                extras["asked"][i] = float(verdict.strict)
                extras["kept"][i] = float(kept.strict)
                verdict = GenEvalVerdict(
                    verdict.strict and kept.strict,
                    (1 - self.keep) * verdict.graded + self.keep * kept.graded,
                )
            scores[i] = float(verdict.strict) if self.score == "strict" else verdict.graded
            extras["strict"][i] = float(verdict.strict)
            if task.tag in TAGS:
                extras[task.tag][i] = float(verdict.strict)
        return scores, extras

    def skip_reason(self, prompt: str, metadata: dict[str, Any]) -> str | None:
        """Return None for prompts with GenEval metadata; raise `UserError` if it is invalid."""
        task = parse_task({"prompt": prompt, **metadata})
        if task is None:
            return 'its metadata has no "include"'
        self.object_detector.check(task)
        return None

    def release_memory(self) -> None:
        self.object_detector.release_memory()
