"""OCR reward: how much of the text in the prompt's double quotes can be read in the picture.

The readers at the end run in worker processes: no torch here.
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
from flow_grpo.rewards.calling.pool import PooledScorer, WorkerPool
from flow_grpo.rewards.failure import Failed, NotAsked, describe
from flow_grpo.rewards.protocol import Rows

Picture = tuple[int, int, bytes]  # width, height, RGB bytes
Reader = Callable[[Picture], str]

# Engine: the packages it needs and the extra of ours that installs them.
ENGINES = {
    "rapidocr": (("rapidocr", "onnxruntime", "Levenshtein"), "ocr"),
    "paddleocr": (("paddleocr", "Levenshtein"), "paddleocr"),
}
MODES = ("auto", "full", "line")
MAX_DEFAULT_WORKERS = 16

# "x"  “x” and ”x”  „x“  «x» and »x«
_QUOTED = re.compile(r'"([^"]*)"|[“”]([^“”]*)[“”]|„([^„“”"]*)[“”"]|«([^«»]*)»|»([^«»]*)«')


def quoted_text(prompt: str) -> str | None:
    """The parts of `prompt` in double quotes, joined by spaces; None if they hold no text."""
    parts = ("".join(groups).strip() for groups in _QUOTED.findall(prompt))
    return " ".join(part for part in parts if part) or None


def without_quotes(prompt: str) -> str | None:
    """Why a prompt cannot be compared with what is read; None if it can."""
    return None if quoted_text(prompt) else "it has no text in double quotes to compare with"


def ocr_score(read: str, target: str) -> float:
    """1 - min(distance, len) / len on lower-cased, space-free text; 1 if `target` is contained."""
    # Not at the top, so that prompts can be checked and written without the extra.
    from Levenshtein import distance

    read, target = _normalise(read), _normalise(target)
    if not target:
        raise ValueError("the target text is empty")
    if target in read:
        return 1.0
    return 1.0 - min(distance(read, target), len(target)) / len(target)


def _normalise(text: str) -> str:
    return "".join(text.lower().split())


@dataclass(kw_only=True, eq=False)
class OcrScorer(PooledScorer):
    """Scores pictures against the quoted text of their prompts; NaN where that failed."""

    engine: str = "rapidocr"  # whose weights are in its wheel, or "paddleocr"
    workers: int | None = None  # one-thread processes; None: `default_workers`
    mode: str = "auto"  # "full" finds text and reads it, "line" reads the picture as one line
    det_model_dir: str | None = None  # local models of paddleocr, else it downloads its own
    rec_model_dir: str | None = None
    timeout: float = 60.0  # seconds for one picture

    concurrent_calls = 2  # while one waits for its last picture, the next keeps the pool busy

    def __post_init__(self) -> None:
        for name, value, known in (("engine", self.engine, ENGINES), ("mode", self.mode, MODES)):
            if value not in known:
                raise UserError(f"unknown OCR {name} {value!r}: it is one of {', '.join(known)}")
        if self.workers is not None and self.workers < 1:
            raise UserError(f"OCR workers is {self.workers}: it must be 1 or more, or None")
        if self.timeout <= 0:
            raise UserError(f"OCR timeout is {self.timeout} s: it must be more than 0")
        _require_packages(self.engine)
        options = {"mode": self.mode, **self._model_dirs()}
        factory = f"flow_grpo.rewards.scorers.ocr:{self.engine}_reader"
        workers = self.workers or default_workers()
        self.pool = WorkerPool(factory, options, workers=workers, timeout=self.timeout)

    def __call__(
        self, images: list[Image.Image], prompts: list[str], metadata: Rows | None = None
    ) -> list[float]:
        if len(images) != len(prompts):
            raise ValueError(f"{len(images)} images but {len(prompts)} prompts")
        targets = [quoted_text(prompt) for prompt in prompts]
        return [_score(r, t) for r, t in zip(self._read(images), targets, strict=True)]

    def _read(self, images: list[Image.Image]) -> list[str | Failed]:
        readings = [_picture(image) for image in images]
        whole = [i for i, picture in enumerate(readings) if not isinstance(picture, Failed)]
        for i, reading in zip(whole, self.pool.map([readings[i] for i in whole]), strict=True):
            readings[i] = reading
        return readings

    def _model_dirs(self) -> dict[str, str]:
        named = {"det_model_dir": self.det_model_dir, "rec_model_dir": self.rec_model_dir}
        given = {name: path for name, path in named.items() if path is not None}
        for name, path in given.items():
            if self.engine != "paddleocr":
                raise UserError(f"{name} is {path!r}, but only the engine paddleocr takes models")
            if not (Path(path) / "inference.yml").is_file():
                problem = "holds no inference.yml: it is not a PaddleOCR model"
                raise UserError(f"{name} {path!r} {problem}")
        return given

    def why_not(self, prompt: str, metadata: dict[str, Any]) -> str | None:
        return without_quotes(prompt)


def default_workers() -> int:
    """The cores this process may use, divided among the ranks that share the machine."""
    has_affinity = hasattr(os, "sched_getaffinity")  # Linux only
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(MAX_DEFAULT_WORKERS, cores // ranks))


def _score(reading: str | Failed, target: str | None) -> float:
    if target is None:
        return NotAsked()
    return reading if isinstance(reading, Failed) else ocr_score(reading, target)


def _picture(image: Image.Image) -> Picture | Failed:
    # PIL decodes when pixels are first asked for, and each format raises errors of its own.
    try:
        pixels = image.convert("RGB")
        return pixels.width, pixels.height, pixels.tobytes()
    except Exception as error:
        return Failed(describe(error))


def _require_packages(engine: str) -> None:
    packages, extra = ENGINES[engine]
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise UserError(
            f"the OCR engine {engine} needs {', '.join(missing)}: pip install flow_grpo[{extra}]"
        )


def is_one_line(width: int, height: int, mode: str) -> bool:
    """Whether to skip detection and recognise the whole picture as one line of text.

    The small model draws 32 x 96 signs that are one text band: there, detection finds nothing
    that the picture's edges do not tell, and takes ten times as long as recognition.
    """
    if mode == "auto":
        return height <= 64 and width >= 2 * height
    return mode == "line"


def rapidocr_reader(mode: str) -> Reader:
    import cv2
    from rapidocr import RapidOCR

    cv2.setNumThreads(1)
    ocr = RapidOCR(
        params={
            "Global.log_level": "critical",
            "Global.use_cls": False,
            "EngineConfig.onnxruntime.intra_op_num_threads": 1,
            "EngineConfig.onnxruntime.inter_op_num_threads": 1,
            # By default pictures are blown up to 736 pixels first: twice the time at 512 x 512.
            "Det.limit_side_len": 128,
            # The last number is the least width; the default of 320 more than doubles the time of
            # a 32 x 96 sign and reads it no better.
            "Rec.rec_img_shape": [3, 48, 48],
        }
    )

    def read(picture: Picture) -> str:
        width, height, _ = picture
        result = ocr(_bgr(picture), use_det=not is_one_line(width, height, mode))
        return "".join(result.txts or ())

    # Models load at first use; one that cannot be loaded should fail now, not picture by picture.
    black = _bgr((96, 32, bytes(96 * 32 * 3)))
    ocr(black, use_det=False)
    if mode != "line":
        ocr(black, use_det=True)
    return read


def paddleocr_reader(
    mode: str, det_model_dir: str | None = None, rec_model_dir: str | None = None
) -> Reader:
    # PaddleX otherwise asks its model hosts at import whether they can be reached.
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

    def read(picture: Picture) -> str:
        width, height, _ = picture
        if is_one_line(width, height, mode):
            return "".join(result["rec_text"] for result in line_reader.predict(_bgr(picture)))
        return "".join(
            text for page in pipeline.predict(_bgr(picture)) for text in page["rec_texts"]
        )

    return read


def _paddle_runtime(model_dir: str | None) -> dict[str, Any]:
    """paddlepaddle where it is installed and the model is not an ONNX file, else onnxruntime."""
    onnx_model = model_dir is not None and (Path(model_dir) / "inference.onnx").exists()
    if onnx_model or find_spec("paddle") is None:
        threads = {"intra_op_num_threads": 1, "inter_op_num_threads": 1}
        return {"device": "cpu", "engine": "onnxruntime", "engine_config": threads}
    return {"device": "cpu", "cpu_threads": 1}


def _model_name(model_dir: str | None) -> str | None:
    """PaddleOCR refuses a model directory unless it is also told the name written inside."""
    if model_dir is None:
        return None
    import yaml

    text = (Path(model_dir) / "inference.yml").read_text(encoding="utf-8")
    return yaml.safe_load(text)["Global"]["model_name"]


def _bgr(picture: Picture) -> Any:
    import numpy as np

    width, height, rgb = picture
    pixels = np.frombuffer(rgb, np.uint8).reshape(height, width, 3)
    return np.ascontiguousarray(pixels[:, :, ::-1])
