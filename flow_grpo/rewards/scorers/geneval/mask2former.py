"""Finds the things of COCO's 80 classes, and names their colours, as GenEval does it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from transformers import Mask2FormerForUniversalSegmentation, Mask2FormerImageProcessorPil

from flow_grpo.errors import UserError
from flow_grpo.rewards.loading import FrozenModel, explained, load_network
from flow_grpo.rewards.scorers.clip import ClipScore
from flow_grpo.rewards.scorers.geneval.rules import COLOURS, Detection, Task, own_name

TEMPLATES = ("a photo of a {} {}", "a photo of a {}-colored {}", "a photo of a {} object")
GROUND = (0x99, 0x99, 0x99)  # takes the place of what is not the thing


@dataclass(kw_only=True, eq=False)
class Mask2Former(FrozenModel):
    """Mask2Former, and CLIP for colours."""

    clip: str
    threshold: float
    counting_threshold: float  # where things are counted, doubtful ones would be too many
    most: int = 16  # things of a class

    def load(self) -> nn.Module:
        network = load_network(
            Mask2FormerForUniversalSegmentation,
            self.model,
            dtype=self.torch_dtype,
            kind="a Mask2Former",
        )
        with explained("model", self.model, "an image processor"):
            self.processor = Mask2FormerImageProcessorPil.from_pretrained(self.model)
        labels = network.config.id2label
        self.names = {number: own_name(label) for number, label in labels.items()}
        self.texts: dict[str, torch.Tensor] = {}
        self.colours = ClipScore(
            model=self.clip,
            dtype=self.dtype,
            device=self.device,
            batch_size=self.batch_size,
            offload=self.offload,
        )
        return network

    def rest(self) -> None:
        super().rest()
        self.colours.rest()

    def check(self, task: Task) -> None:
        """Raise a UserError for a class or colour that is never found."""
        classes = set(self.names.values())
        for wanted in task.wanted:
            if wanted.name not in classes:
                raise UserError(f"class {wanted.name!r} is not one that {self.model} knows")
            if wanted.colour not in (None, *COLOURS):
                raise UserError(f"color {wanted.colour!r} must be one of {', '.join(COLOURS)}")

    @torch.inference_mode()
    def __call__(
        self, images: Sequence[Image.Image], tasks: Sequence[Task]
    ) -> list[list[Detection]]:
        self.network.to(self.device)
        self.colours.network.to(self.device)
        parts = self.parts(len(images))
        return [found for part in parts for found in self._detect(images[part], tasks[part])]

    def _detect(
        self, images: Sequence[Image.Image], tasks: Sequence[Task]
    ) -> list[list[Detection]]:
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
            self._coloured(image, self._best(segmented, task), task)
            for image, segmented, task in zip(images, segments, tasks, strict=True)
        ]

    def _best(self, segmented: dict, task: Task) -> list[Detection]:
        least = self.counting_threshold if task.tag == "counting" else self.threshold
        found: dict[str, list[Detection]] = {}
        for number, info in enumerate(segmented["segments_info"]):
            if info["score"] <= least:
                continue
            mask = segmented["segmentation"][number].bool().cpu().numpy()
            name = self.names[info["label_id"]]
            found.setdefault(name, []).append(Detection(name, info["score"], _box(mask), mask=mask))
        return [d for each in found.values() for d in sorted(each, key=_doubt)[: self.most]]

    def _coloured(self, image: Image.Image, found: list[Detection], task: Task) -> list[Detection]:
        return [
            replace(d, colour=self._colour(image, d)) if d.name in task.coloured else d
            for d in found
        ]

    def _colour(self, image: Image.Image, thing: Detection) -> str:
        if thing.name not in self.texts:
            self.texts[thing.name] = self._embed(thing.name)
        texts = self.texts[thing.name].to(self.device)
        [seen] = self.colours.embed_pictures([cut_out(image, thing)])
        return COLOURS[int((texts @ seen).argmax())]

    def _embed(self, name: str) -> torch.Tensor:
        """(colours, width): what a thing of each colour is described by."""
        prompts = [t.format(colour, name) for colour in COLOURS for t in TEMPLATES]
        texts = self.colours.embed_texts(prompts).unflatten(0, (len(COLOURS), len(TEMPLATES)))
        return F.normalize(texts.mean(dim=1), dim=-1)


def cut_out(image: Image.Image, thing: Detection) -> Image.Image:
    """The thing alone, on grey."""
    pixels = np.where(thing.mask[..., None], np.asarray(image), np.uint8(GROUND))
    left, top, right, bottom = (int(number) for number in thing.box)
    return Image.fromarray(pixels[top:bottom, left:right])


def _box(mask: np.ndarray) -> tuple[int, int, int, int]:
    rows, columns = (np.flatnonzero(mask.any(axis=axis)) for axis in (1, 0))
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


def _doubt(detection: Detection) -> float:
    return -detection.score
