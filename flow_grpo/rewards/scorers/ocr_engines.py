"""Text readers that run inside the OCR worker processes: no torch here."""

import logging
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

Picture = tuple[int, int, bytes]  # width, height, RGB bytes
Reader = Callable[[Picture], str]


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
