"""Detects objects of COCO's 80 classes and classifies their colors, as GenEval does."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from transformers import Mask2FormerForUniversalSegmentation, Mask2FormerImageProcessorPil

from flow_grpo.errors import UserError
from flow_grpo.rewards.frozen_model import FrozenModel
from flow_grpo.rewards.loading import explain_load_errors, load_network
from flow_grpo.rewards.option_checks import check_choice
from flow_grpo.rewards.scorers.clip import ClipScore
from flow_grpo.rewards.scorers.geneval.rules import COLOURS, Detection, Task, canonical_class_name

TEMPLATES = ("a photo of a {} {}", "a photo of a {}-colored {}", "a photo of a {} object")
BACKGROUND = (0x99, 0x99, 0x99)  # grey, in place of pixels outside the object's mask


@dataclass(kw_only=True, eq=False)
class Mask2FormerDetector(FrozenModel):
    """Mask2Former for objects, and zero-shot CLIP for their colors."""

    clip: str
    threshold: float
    counting_threshold: float  # higher, since false positives change the count
    max_per_class: int = 16  # objects with the highest scores

    def load(self) -> nn.Module:
        """Load Mask2Former with its image processor, and the CLIP of the colors."""
        network = load_network(
            Mask2FormerForUniversalSegmentation,
            self.model,
            dtype=self.torch_dtype,
            kind="a Mask2Former",
        )
        with explain_load_errors("model", self.model, "an image processor"):
            self.processor = Mask2FormerImageProcessorPil.from_pretrained(self.model)
        labels = network.config.id2label
        self.names = {number: canonical_class_name(label) for number, label in labels.items()}
        self.colour_embeddings: dict[str, torch.Tensor] = {}
        self.colour_model = ClipScore(
            model=self.clip,
            dtype=self.dtype,
            device=self.device,
            batch_size=self.batch_size,
            offload=self.offload,
        )
        return network

    def release_memory(self) -> None:
        super().release_memory()
        self.colour_model.release_memory()

    def check(self, task: Task) -> None:
        """Raise `UserError` for a class or color that is never detected."""
        classes = set(self.names.values())
        for required in task.required_objects:
            if required.name not in classes:
                raise UserError(
                    f"is not a class of {self.model}", field="class", value=required.name
                )
            if required.colour is not None:
                check_choice("color", required.colour, COLOURS)

    @torch.inference_mode()
    def __call__(
        self, images: Sequence[Image.Image], tasks: Sequence[Task]
    ) -> list[list[Detection]]:
        """Return the detections in each image; colors only for the classes that its task needs."""
        self.network.to(self.device)
        self.colour_model.network.to(self.device)
        parts = self.batch_slices(len(images))
        return [found for part in parts for found in self._detect(images[part], tasks[part])]

    def _detect(
        self, images: Sequence[Image.Image], tasks: Sequence[Task]
    ) -> list[list[Detection]]:
        """Return the detections in each image of one batch."""
        images = [image.convert("RGB") for image in images]
        inputs = self.processor(images=images, return_tensors="pt")
        outputs = self.network(
            pixel_values=inputs["pixel_values"].to(self.device, self.torch_dtype),
            pixel_mask=inputs["pixel_mask"].to(self.device),
        )
        segments = self.processor.post_process_instance_segmentation(
            outputs,
            threshold=self.threshold,
            target_sizes=[(image.height, image.width) for image in images],
            return_binary_maps=True,
        )
        return [
            self._add_colours(image, self._top_detections(segmented, task), task)
            for image, segmented, task in zip(images, segments, tasks, strict=True)
        ]

    def _top_detections(self, segmented: dict, task: Task) -> list[Detection]:
        """Return up to `max_per_class` detections of each class above the threshold.

        Args:
            segmented: Output of the image processor for one image.
            task: What the image should show; counting tasks have their own threshold.
        """
        threshold = self.counting_threshold if task.tag == "counting" else self.threshold
        found: dict[str, list[Detection]] = {}
        for number, info in enumerate(segmented["segments_info"]):
            if info["score"] <= threshold:
                continue
            mask = segmented["segmentation"][number].bool().cpu().numpy()
            name = self.names[info["label_id"]]
            found.setdefault(name, []).append(
                Detection(name, info["score"], _bounding_box(mask), mask=mask)
            )
        top: list[Detection] = []
        for detections in found.values():
            top += sorted(detections, key=lambda d: -d.score)[: self.max_per_class]
        return top

    def _add_colours(
        self, image: Image.Image, found: list[Detection], task: Task
    ) -> list[Detection]:
        """Return the detections, with a color for those whose class has one in the task."""
        return [
            replace(d, colour=self._colour(image, d)) if d.name in task.colour_classes else d
            for d in found
        ]

    def _colour(self, image: Image.Image, detection: Detection) -> str:
        """Return the color of an object: the one whose text is closest to its crop in CLIP."""
        name = detection.name
        if name not in self.colour_embeddings:
            self.colour_embeddings[name] = self._embed_colours(name)
        texts = self.colour_embeddings[name].to(self.device)
        [crop] = self.colour_model.embed_pil_images([crop_object(image, detection)])
        return COLOURS[int((texts @ crop).argmax())]

    def _embed_colours(self, name: str) -> torch.Tensor:
        """Return unit text embeddings (colors, width) of an object in each color."""
        prompts = [t.format(colour, name) for colour in COLOURS for t in TEMPLATES]
        texts = self.colour_model.embed_texts(prompts).unflatten(0, (len(COLOURS), len(TEMPLATES)))
        return F.normalize(texts.mean(dim=1), dim=-1)


def crop_object(image: Image.Image, detection: Detection) -> Image.Image:
    """Crop an image to the box of an object, with everything outside its mask in grey."""
    pixels = np.where(detection.mask[..., None], np.asarray(image), np.uint8(BACKGROUND))
    left, top, right, bottom = (int(number) for number in detection.box)
    return Image.fromarray(pixels[top:bottom, left:right])


def _bounding_box(mask: np.ndarray) -> tuple[int, int, int, int]:
    rows = np.flatnonzero(mask.any(axis=1))
    columns = np.flatnonzero(mask.any(axis=0))
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1
