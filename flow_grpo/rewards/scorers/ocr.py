"""OCR reward: how much of the prompt's text in double quotes can be read in the image.

The readers at the end run in worker processes, so this module does not import torch.
"""

import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from PIL import Image

from flow_grpo.errors import UserError
from flow_grpo.rewards.failure import Failed, NotApplicable, describe_error
from flow_grpo.rewards.option_checks import check_choice
from flow_grpo.rewards.protocol import MetadataRows
from flow_grpo.rewards.workers.pool import PooledScorer, WorkerPool

RawImage = tuple[int, int, bytes]  # width, height, RGB bytes
Reader = Callable[[RawImage], str]

# Engine: the packages it needs, and the extra of flow_grpo that installs them.
ENGINES = {
    "rapidocr": (("rapidocr", "onnxruntime", "Levenshtein"), "ocr"),
    "paddleocr": (("paddleocr", "Levenshtein"), "paddleocr"),
}
MODES = ("auto", "full", "line")
MAX_DEFAULT_WORKERS = 16

# "x"  “x” and ”x”  „x“  «x» and »x«
_QUOTED = re.compile(r'"([^"]*)"|[“”]([^“”]*)[“”]|„([^„“”"]*)[“”"]|«([^«»]*)»|»([^«»]*)«')


def quoted_text(prompt: str) -> str | None:
    """Return the text of `prompt` in double quotes, joined by spaces, or None if there is none."""
    parts = ("".join(groups).strip() for groups in _QUOTED.findall(prompt))
    return " ".join(part for part in parts if part) or None


def missing_quotes_reason(prompt: str) -> str | None:
    """Return why a prompt has no target text, or None if it has one."""
    return None if quoted_text(prompt) else "it has no text in double quotes to compare with"


def ocr_score(read: str, target: str) -> float:
    """Return 1 - min(edit distance, len(target)) / len(target), ignoring case and whitespace.

    The score is 1 if the text that was read contains the target.
    """
    from Levenshtein import distance  # optional: prompts can be checked without it

    read, target = _normalize_text(read), _normalize_text(target)
    if not target:
        raise ValueError("the target text is empty")
    if target in read:
        return 1.0
    return 1.0 - min(distance(read, target), len(target)) / len(target)


def _normalize_text(text: str) -> str:
    return "".join(text.lower().split())


@dataclass(kw_only=True, eq=False)
class OcrScorer(PooledScorer):
    """Compares the text that OCR reads in images with the quoted text of their prompts."""

    engine: str = "rapidocr"  # its wheel contains its weights; or "paddleocr"
    workers: int | None = None  # single-threaded processes; None: `default_workers`
    mode: str = "auto"  # "full" detects and reads text, "line" reads the image as one line
    det_model_dir: str | None = None  # local models of paddleocr; None: it downloads them
    rec_model_dir: str | None = None
    timeout: float = 60.0  # seconds per image

    concurrent_calls = 2  # while one waits for its last image, the next keeps the pool busy

    def __post_init__(self) -> None:
        """Check the options and create the pool of OCR workers."""
        check_choice("engine", self.engine, ENGINES)
        check_choice("mode", self.mode, MODES)
        if self.workers is not None and self.workers < 1:
            raise UserError("must be at least 1, or None", field="workers", value=self.workers)
        if self.timeout <= 0:
            raise UserError("must be more than 0 seconds", field="timeout", value=self.timeout)
        _require_packages(self.engine)
        options = {"mode": self.mode, **self._model_dirs()}
        factory = f"flow_grpo.rewards.scorers.ocr:{self.engine}_reader"
        workers = self.workers or default_workers()
        self.pool = WorkerPool(factory, options, workers=workers, timeout=self.timeout)

    def __call__(
        self, images: list[Image.Image], prompts: list[str], metadata: MetadataRows | None = None
    ) -> list[float]:
        """Return the OCR score of each image; `Failed` where it could not be read."""
        if len(images) != len(prompts):
            raise ValueError(f"{len(images)} images but {len(prompts)} prompts")
        targets = [quoted_text(prompt) for prompt in prompts]
        return [_score(r, t) for r, t in zip(self._read(images), targets, strict=True)]

    def _read(self, images: list[Image.Image]) -> list[str | Failed]:
        """Return the text that OCR reads in each image, or `Failed`."""
        readings = [_to_raw_image(image) for image in images]
        valid = [i for i, image in enumerate(readings) if not isinstance(image, Failed)]
        for i, reading in zip(valid, self.pool.map([readings[i] for i in valid]), strict=True):
            readings[i] = reading
        return readings

    def _model_dirs(self) -> dict[str, str]:
        """Return the configured PaddleOCR directories by option; reject invalid ones."""
        options = {"det_model_dir": self.det_model_dir, "rec_model_dir": self.rec_model_dir}
        model_dirs = {name: path for name, path in options.items() if path is not None}
        for name, path in model_dirs.items():
            if self.engine != "paddleocr":
                rule = f"is incompatible with engine={self.engine!r}"
                raise UserError(rule, field=name, value=path, hint="set engine='paddleocr'")
            if not (Path(path) / "inference.yml").is_file():
                rule = "is not a PaddleOCR model: it has no inference.yml"
                raise UserError(rule, field=name, value=path)
        return model_dirs

    def skip_reason(self, prompt: str, metadata: dict[str, Any]) -> str | None:
        return missing_quotes_reason(prompt)


def default_workers() -> int:
    """Return the usable CPU cores per rank of this machine, from 1 to `MAX_DEFAULT_WORKERS`."""
    has_affinity = hasattr(os, "sched_getaffinity")  # Linux only
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(MAX_DEFAULT_WORKERS, cores // ranks))


def _score(reading: str | Failed, target: str | None) -> float:
    if target is None:
        return NotApplicable()
    return reading if isinstance(reading, Failed) else ocr_score(reading, target)


def _to_raw_image(image: Image.Image) -> RawImage | Failed:
    """Return (width, height, RGB bytes) of an image, or `Failed` if it cannot be decoded."""
    # PIL decodes lazily, and each format raises its own errors
    try:
        pixels = image.convert("RGB")
        return pixels.width, pixels.height, pixels.tobytes()
    except Exception as error:
        return Failed(describe_error(error))


def _require_packages(engine: str) -> None:
    """Raise a UserError if a package of the OCR engine is not installed."""
    packages, extra = ENGINES[engine]
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise UserError(
            f"needs {', '.join(missing)}",
            field="engine",
            value=engine,
            hint=f"pip install flow_grpo[{extra}]",
        )


def is_one_line(width: int, height: int, mode: str) -> bool:
    """Return whether to skip detection and recognize the whole image as one line of text.

    The tiny model generates 32 x 96 signs that are one line of text: detection adds nothing there
    and takes ten times as long as recognition.
    """
    if mode == "auto":
        return height <= 64 and width >= 2 * height
    return mode == "line"


def rapidocr_reader(mode: str) -> Reader:
    """Build RapidOCR in a worker; return a function from a raw image to its text."""
    import cv2
    from rapidocr import RapidOCR

    cv2.setNumThreads(1)
    ocr = RapidOCR(
        params={
            "Global.log_level": "critical",
            "Global.use_cls": False,
            "EngineConfig.onnxruntime.intra_op_num_threads": 1,
            "EngineConfig.onnxruntime.inter_op_num_threads": 1,
            # By default images are upscaled to 736 pixels first: twice the time at 512 x 512.
            "Det.limit_side_len": 128,
            # The last number is the minimum width; the default of 320 more than doubles the time
            # of a 32 x 96 sign without reading it better.
            "Rec.rec_img_shape": [3, 48, 48],
        }
    )

    def read(image: RawImage) -> str:
        width, height, _ = image
        result = ocr(_to_bgr(image), use_det=not is_one_line(width, height, mode))
        return "".join(result.txts or ())

    # Models are loaded on first use; one that cannot be loaded should fail now, not per image.
    black = _to_bgr((96, 32, bytes(96 * 32 * 3)))
    ocr(black, use_det=False)
    if mode != "line":
        ocr(black, use_det=True)
    return read


def paddleocr_reader(
    mode: str, det_model_dir: str | None = None, rec_model_dir: str | None = None
) -> Reader:
    """Build PaddleOCR in a worker; return a function from a raw image to its text."""
    # PaddleX otherwise checks at import whether its model hosts can be reached.
    if det_model_dir and rec_model_dir:
        os.environ.setdefault("PADDLE_PDX_DISABLE_MODEL_SOURCE_CHECK", "True")
    import cv2
    import paddleocr

    logging.disable(logging.WARNING)
    cv2.setNumThreads(1)
    runtime = _paddle_runtime(rec_model_dir)
    pipeline = line_reader = None
    if mode != "line":
        pipeline = paddleocr.PaddleOCR(
            text_detection_model_dir=det_model_dir,
            text_detection_model_name=_model_name(det_model_dir),
            text_recognition_model_dir=rec_model_dir,
            text_recognition_model_name=_model_name(rec_model_dir),
            text_rec_score_thresh=0.5,  # as RapidOCR
            use_doc_orientation_classify=False,
            use_doc_unwarping=False,
            use_textline_orientation=False,
            **runtime,
        )
    if mode != "full":
        line_reader = paddleocr.TextRecognition(
            model_dir=rec_model_dir, model_name=_model_name(rec_model_dir), **runtime
        )

    def read(image: RawImage) -> str:
        """Return the text in a raw image, all lines concatenated."""
        width, height, _ = image
        pixels = _to_bgr(image)
        if is_one_line(width, height, mode):
            return "".join(result["rec_text"] for result in line_reader.predict(pixels))
        return "".join(text for page in pipeline.predict(pixels) for text in page["rec_texts"])

    return read


def _paddle_runtime(model_dir: str | None) -> dict[str, Any]:
    """Return PaddleOCR's arguments that select its inference engine, on one CPU thread.

    It is onnxruntime for an ONNX model, or if paddlepaddle is not installed.
    """
    onnx_model = model_dir is not None and (Path(model_dir) / "inference.onnx").exists()
    if onnx_model or find_spec("paddle") is None:
        threads = {"intra_op_num_threads": 1, "inter_op_num_threads": 1}
        return {"device": "cpu", "engine": "onnxruntime", "engine_config": threads}
    return {"device": "cpu", "cpu_threads": 1}


def _model_name(model_dir: str | None) -> str | None:
    """Return the model name in a model directory, which PaddleOCR requires besides the path."""
    if model_dir is None:
        return None
    import yaml

    text = (Path(model_dir) / "inference.yml").read_text(encoding="utf-8")
    return yaml.safe_load(text)["Global"]["model_name"]


def _to_bgr(image: RawImage) -> Any:
    """Return a raw image as an array (H, W, 3) of BGR bytes."""
    import numpy as np

    width, height, rgb = image
    pixels = np.frombuffer(rgb, np.uint8).reshape(height, width, 3)
    return np.ascontiguousarray(pixels[:, :, ::-1])
