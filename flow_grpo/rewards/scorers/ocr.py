"""OCR reward: how much of the text in the prompt's double quotes can be read in the picture."""

import os
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from PIL import Image

from flow_grpo.errors import UserError
from flow_grpo.rewards.calling.pool import WorkerPool
from flow_grpo.rewards.failure import Failed, NotAsked, describe
from flow_grpo.rewards.scorers.ocr_engines import Picture

# Engine: the packages it needs and the extra of ours that installs them.
ENGINES = {
    "rapidocr": (("rapidocr", "onnxruntime", "Levenshtein"), "ocr"),
    "paddleocr": (("paddleocr", "Levenshtein"), "paddleocr"),
}
MODES = ("auto", "full", "line")
MAX_DEFAULT_WORKERS = 8

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


class OcrScorer:
    """Scores pictures against the quoted text of their prompts; NaN where that failed.

    engine: "rapidocr" (weights in its wheel) or "paddleocr" (`det_model_dir` and `rec_model_dir`
        name local models, else it downloads its own).
    workers: one-thread processes; None: the cores of this process, shared by the local ranks.
    mode: "full" finds text and reads it, "line" reads the whole picture as one line of text,
        "auto" picks per picture by its size.
    timeout: seconds for one picture.
    """

    concurrent_calls = 2  # while one waits for its last picture, the next keeps the pool busy

    def __init__(
        self,
        *,
        engine: str = "rapidocr",
        workers: int | None = None,
        mode: str = "auto",
        det_model_dir: str | None = None,
        rec_model_dir: str | None = None,
        timeout: float = 60.0,
    ) -> None:
        if engine not in ENGINES:
            raise UserError(f"unknown OCR engine {engine!r}: it is one of {', '.join(ENGINES)}")
        if mode not in MODES:
            raise UserError(f"unknown OCR mode {mode!r}: it is one of {', '.join(MODES)}")
        if workers is not None and workers < 1:
            raise UserError(f"OCR workers is {workers}: it must be 1 or more, or None")
        if timeout <= 0:
            raise UserError(f"OCR timeout is {timeout} s: it must be more than 0")
        _require_packages(engine)
        options = {"mode": mode, **_model_dirs(engine, det_model_dir, rec_model_dir)}
        factory = f"flow_grpo.rewards.scorers.ocr_engines:{engine}_reader"
        workers = default_workers() if workers is None else workers
        self.pool = WorkerPool(factory, options, workers=workers, timeout=timeout)

    def __call__(
        self,
        images: Sequence[Image.Image],
        prompts: Sequence[str],
        metadata: Sequence[dict[str, Any]] | None = None,
    ) -> list[float]:
        if len(images) != len(prompts):
            raise ValueError(f"{len(images)} images but {len(prompts)} prompts")
        targets = [quoted_text(prompt) for prompt in prompts]
        return [_score(r, t) for r, t in zip(self._read(images), targets, strict=True)]

    def _read(self, images: Sequence[Image.Image]) -> list[str | Failed]:
        readings = [_picture(image) for image in images]
        whole = [i for i, picture in enumerate(readings) if not isinstance(picture, Failed)]
        for i, reading in zip(whole, self.pool.map([readings[i] for i in whole]), strict=True):
            readings[i] = reading
        return readings

    def why_not(self, prompt: str, metadata: dict[str, Any]) -> str | None:
        return without_quotes(prompt)

    @property
    def trouble(self) -> str:
        return self.pool.trouble

    def close(self) -> None:
        self.pool.close()

    def __enter__(self) -> "OcrScorer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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


def _model_dirs(engine: str, det: str | None, rec: str | None) -> dict[str, str]:
    named = {"det_model_dir": det, "rec_model_dir": rec}
    given = {name: path for name, path in named.items() if path is not None}
    for name, path in given.items():
        if engine != "paddleocr":
            raise UserError(f"{name} is {path!r}, but only the engine paddleocr takes models")
        if not (Path(path) / "inference.yml").is_file():
            raise UserError(f"{name} {path!r} holds no inference.yml: it is not a PaddleOCR model")
    return given
