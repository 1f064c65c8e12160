"""Measure the time and memory of GenEval's detector, at full size with random weights.

PYTHONPATH=.:tests/support python tests/gpu/benchmark_geneval.py
"""

import json
import tempfile
import time
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from small_clip import write_processor
from transformers import (
    CLIPConfig,
    CLIPModel,
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
    Mask2FormerImageProcessorPil,
    SwinConfig,
)

from flow_grpo.rewards.scorers.geneval.mask2former import Mask2FormerDetector
from flow_grpo.rewards.scorers.geneval.rules import COCO_CLASSES, Detection, parse_task

IMAGES, SIDE = 64, 512
SIZES = {  # input of the detector
    "384 x 384": {"height": 384, "width": 384},
    "800 x 800": {"shortest_edge": 800, "longest_edge": 1333},
}
VISION = dict(
    hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16
)
TEXT = dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12)


def save_detector(folder: Path, size: dict[str, int]) -> None:
    """Save a random detector with the shape of facebook/mask2former-swin-small-coco-instance."""
    stages = ["stage1", "stage2", "stage3", "stage4"]
    swin = SwinConfig(
        embed_dim=96, depths=[2, 2, 18, 2], num_heads=[3, 6, 12, 24], out_features=stages
    )
    labels = dict(enumerate(COCO_CLASSES))
    config = Mask2FormerConfig(
        backbone_config=swin, id2label=labels, label2id={name: i for i, name in labels.items()}
    )
    Mask2FormerForUniversalSegmentation(config).save_pretrained(folder)
    Mask2FormerImageProcessorPil(size=size).save_pretrained(folder)


def save_clip(folder: Path) -> None:
    """Save a random CLIP with the shape of openai/clip-vit-large-patch14 and a small vocabulary."""
    letters = write_processor(folder)
    sizes = {"size": {"shortest_edge": 224}, "crop_size": {"height": 224, "width": 224}}
    preprocessor = {"image_processor_type": "CLIPImageProcessor", **sizes}
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    config = CLIPConfig(
        text_config={**TEXT, "vocab_size": letters, "eos_token_id": letters - 1},
        vision_config={**VISION, "patch_size": 14},
        projection_dim=768,
    )
    CLIPModel(config).save_pretrained(folder)


def seconds(call) -> float:
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (IMAGES, SIDE, SIDE, 3), dtype=np.uint8)
    images = [Image.fromarray(pixels) for pixels in noise]
    task = parse_task({"tag": "single_object", "include": [{"class": "dog", "count": 1}]})
    mask = np.ones((SIDE, SIDE), dtype=bool)
    detection = Detection("dog", 1.0, (0, 0, SIDE, SIDE), mask=mask)
    with tempfile.TemporaryDirectory() as folder:
        save_clip(Path(folder, "clip"))
        for (size, values), dtype in product(SIZES.items(), ("float32", "bfloat16")):
            save_detector(Path(folder, "detector"), values)
            torch.cuda.reset_peak_memory_stats()
            found = Mask2FormerDetector(
                model=f"{folder}/detector",
                clip=f"{folder}/clip",
                threshold=0.3,
                counting_threshold=0.9,
                dtype=dtype,
                device=device,
                batch_size=16,
                offload=False,
            )
            detect = seconds(partial(found, images, [task] * IMAGES)) / IMAGES
            classify = seconds(partial(found._colour, images[0], detection))
            peak = torch.cuda.max_memory_allocated() / 2**30
            print(
                f"{size}, {dtype}: {detect * 1e3:.1f} ms per image, plus {classify * 1e3:.1f} ms "
                f"per object whose colour is classified, {peak:.2f} GiB",
                flush=True,
            )
            del found


if __name__ == "__main__":
    main()
