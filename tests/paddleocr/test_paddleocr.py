"""The paddleocr engine, with the weights of RapidOCR's wheel.

Its packages are incompatible with those of the other tests, so it runs in a separate environment
(see .ci/run).
"""

import sys
from pathlib import Path

import onnxruntime
import rapidocr
import yaml
from PIL import Image, ImageDraw

sys.path.append(str(Path(__file__).parents[1] / "support"))
from sign_images import WORDS, mono_bold, prompt, sign

from flow_grpo.rewards.scorers.ocr import OcrScorer


def write_paddle_models(folder: Path) -> dict[str, str]:
    """Convert RapidOCR's models to Paddle directories, and return the engine's options."""
    weights = Path(rapidocr.__file__).parent / "models"
    recogniser = weights / "PP-OCRv6_rec_small.onnx"
    characters = onnxruntime.InferenceSession(recogniser).get_modelmeta().custom_metadata_map
    decode = {"DecodeImage": {"channel_first": False, "img_mode": "BGR"}}
    normalise = {"mean": [0.5] * 3, "std": [0.5] * 3, "scale": "1./255.", "order": "hwc"}
    transforms = {
        "det": [
            decode,
            {"DetResizeForTest": None},
            {"NormalizeImage": normalise},
            {"ToCHWImage": None},
        ],
        "rec": [decode, {"RecResizeImg": {"image_shape": [3, 48, 320]}}],
    }
    decoders = {
        "det": {"name": "DBPostProcess"},
        "rec": {
            "name": "CTCLabelDecode",
            "character_dict": characters["character"].splitlines(),
        },
    }
    for kind in ("det", "rec"):
        (folder / kind).mkdir()
        model = (weights / f"PP-OCRv6_{kind}_small.onnx").read_bytes()
        (folder / kind / "inference.onnx").write_bytes(model)
        settings = {
            "Global": {"model_name": f"PP-OCRv6_small_{kind}"},
            "PreProcess": {"transform_ops": transforms[kind]},
            "PostProcess": decoders[kind],
        }
        (folder / kind / "inference.yml").write_text(yaml.safe_dump(settings))
    return {f"{kind}_model_dir": str(folder / kind) for kind in ("det", "rec")}


def test_paddleocr_reads_signs_and_large_images(tmp_path: Path) -> None:
    poster = Image.new("RGB", (512, 512), "white")
    ImageDraw.Draw(poster).text((60, 200), "Hello", font=mono_bold(90), fill="black")
    images = [*map(sign, WORDS), poster, Image.new("RGB", (96, 32))]
    prompts = [*map(prompt, WORDS), prompt("hello"), prompt("CAT")]
    with OcrScorer(engine="paddleocr", workers=1, **write_paddle_models(tmp_path)) as scorer:
        scores = scorer(images, prompts, [{}] * len(images))
    assert scores == [1.0] * (len(WORDS) + 1) + [0.0]
