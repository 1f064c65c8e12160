"""Measured times of models at their published size, and how they apply to a config; no torch.

docs/benchmarks/*.jsonl has one line per measurement of `scripts/benchmark.py` or
`scripts/benchmark_vlm.py`; its files ship with the package. A line applies to a config with the
same model, size and training settings. Times scale with the number of sampling steps and of trained
steps; everything else must agree.
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from flow_grpo.config.fields import UNQUANTIZED
from flow_grpo.config.paths import ROOT
from flow_grpo.errors import UserError, first_line

BENCHMARKS = ROOT / "docs/benchmarks"
CHECKPOINTING = "--gradient_checkpointing"
VLM_SLOTS = 64  # responses generated at the same time, unless a line has `answers`
# names of the models in the benchmarks
SHAPES = {
    "stabilityai/stable-diffusion-3.5-medium": "sd3.5-medium",
    "black-forest-labs/FLUX.1-dev": "flux.1-dev",
    "black-forest-labs/FLUX.1-Kontext-dev": "flux.1-kontext-dev",
    "black-forest-labs/FLUX.2-klein-4B": "flux.2-4b-klein",
    "Qwen/Qwen-Image": "qwen-image",
    "Qwen/Qwen-Image-Edit": "qwen-image-edit",
    "Tongyi-MAI/Z-Image-Turbo": "z-image",
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": "wan2.1-1.3b",
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": "wan2.1-14b",
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": "wan2.2-a14b",
    "dg845/LTX-2.3-Diffusers": "ltx-2.3",
    "Qwen/Qwen2.5-VL-3B-Instruct": "qwen2.5-vl-3b",
    "Qwen/Qwen2.5-VL-7B-Instruct": "qwen2.5-vl-7b",
    "Qwen/Qwen2.5-VL-72B-Instruct": "qwen2.5-vl-72b",
    "meta-llama/Meta-Llama-3-70B-Instruct": "llama-3-70b",
    "Qwen/Qwen3-VL-4B-Instruct": "qwen3-vl-4b",
    "Qwen/Qwen3-VL-8B-Instruct": "qwen3-vl-8b",
}
# GiB of the text encoders in bf16, from their parameter counts; benchmarks use one layer of them
ENCODERS = {
    "sd3.5-medium": 10.4,
    "flux.1-dev": 9,
    "qwen-image": 15,
    "wan2.1-1.3b": 11,
    "wan2.1-14b": 11,
}


class Parameters(NamedTuple):
    """Numbers of parameters of a published model."""

    all: int  # of the transformer, or of a VLM with its vision tower
    lora_per_rank: int  # of a LoRA of rank 1 on the default layers, without the vision tower


# Counted by tests/training/test_measurements.py for the architectures of scripts/untrained.
PARAMETERS = {
    "sd3.5-medium": Parameters(2_243_171_520, 586_752),
    "flux.1-dev": Parameters(11_901_408_320, 2_801_664),
    "flux.1-kontext-dev": Parameters(11_901_408_320, 2_801_664),
    "flux.2-4b-klein": Parameters(3_875_544_576, 1_505_280),
    "qwen-image": Parameters(20_430_401_088, 6_635_520),
    "qwen-image-edit": Parameters(20_430_401_088, 6_635_520),
    "z-image": Parameters(6_154_908_736, 2_480_640),
    "wan2.1-1.3b": Parameters(1_418_996_800, 737_280),
    "wan2.1-14b": Parameters(14_288_491_584, 3_276_800),
    "ltx-2.3": Parameters(18_988_838_144, 9_633_792),
    "qwen2.5-vl-3b": Parameters(3_754_622_976, 1_870_848),
    "qwen2.5-vl-7b": Parameters(8_292_166_656, 2_523_136),
    "qwen2.5-vl-72b": Parameters(73_410_777_344, 13_158_400),
    "llama-3-70b": Parameters(70_553_706_496, 12_943_360),
    "qwen3-vl-4b": Parameters(4_437_815_808, 2_064_384),
    "qwen3-vl-8b": Parameters(8_767_123_696, 2_727_936),
}
Line = dict[str, Any]


def shape_of(model: str) -> str:
    """Return the name of a model in the benchmarks; the model itself if it has none."""
    return SHAPES.get(model, model)


def read_measurements(folder: Path = BENCHMARKS) -> list[Line]:
    """Return all lines of a directory with their file names, the newest of a file last."""
    return [line for path in sorted(folder.glob("*.jsonl")) for line in read_lines(path)]


def read_lines(path: Path) -> list[Line]:
    """Return the lines of a file of measurements.

    Raises:
        UserError: If the file cannot be read, or a line is not a JSON object.
    """
    try:
        rows = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise UserError(f"cannot be read: {first_line(error)}", field=path) from error
    lines = []
    for number, row in enumerate(rows, 1):
        try:
            line = json.loads(row)
        except (ValueError, RecursionError):
            line = None
        if not isinstance(line, dict):
            raise UserError(
                "is not a JSON object",
                field=f"{path}:{number}",
                hint="pass the file that `flow-grpo benchmark --out FILE` writes",
            )
        lines.append(line | {"file": path.name})
    return lines


def fits(line: Line, config: Any) -> bool:
    """Return whether a measurement applies to `config`, up to the number of steps."""
    shape, precision = shape_of(config.pretrained.model), config.pretrained.base_precision
    is_half = config.mixed_precision != "no"  # bf16 and fp16 are equally fast
    if line.get("shape", shape) != shape:
        return False
    if "shape" in line:
        options = {
            "--full": not config.use_lora,
            CHECKPOINTING: config.train.gradient_checkpointing,
            "--compile": config.compile,
            "--flex": config.flex_attention,
            "--lengths": False,  # of sampling only, or of longer rows
            "benchmark_trl": False,  # another trainer
        }
        return (
            is_half  # as benchmark_vlm.py
            and config.train.critic != "separate"  # has no measurement
            and line.get("base_precision", UNQUANTIZED) == precision
            and all((option in line["command"]) == on for option, on in options.items())
        )
    if "full_s_per_sample" not in line or "note" in line or not hasattr(config, "grpo"):
        return False
    found = line["settings"]
    frames = f"x{config.frames}" if config.frames > 1 else ""
    size = f"{config.width or config.resolution}x{config.height or config.resolution}{frames}"
    guided = config.sample.guidance_scale > 1
    wanted = {
        "model": shape,
        "size": size,
        "weights": f"LoRA r {config.train.lora_rank}" if config.use_lora else "all",
        "compile": config.compile,
        "memory_gib": None,
        "gradient_checkpointing": config.train.gradient_checkpointing,
    }
    return (
        wanted.items() <= found.items()
        and found.get("algorithm", "grpo") == config.algorithm
        and found.get("base_precision", UNQUANTIZED) == precision
        and (found.get("precision", "bf16") != "no") == is_half
        and not found.get("merge_lora")  # of earlier versions
        and not found.get("sharded")
        and found.get("keep_gradients", False) == config.train.keep_gradients
        and (found["guidance"] > 1) == guided
        and (not guided or found.get("guidance_gradient") == "both")
        and (found["beta"] > 0) == (config.grpo.beta > 0)
    )


def newest(lines: list[Line], config: Any) -> Line | None:
    """Return the newest measurement that applies to `config`, if there is one.

    Raises:
        UserError: If a line lacks a field of a measurement, or a number is not positive.
    """
    found = []
    for line in lines:
        try:
            if fits(line, config):
                _check_numbers(line)
                found.append((str(line["date"]), line))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"has a line that is not a measurement ({type(error).__name__}: {error})",
                field=line["file"],
            ) from error
    # of the same day, the last one
    return sorted(found, key=lambda pair: pair[0])[-1][1] if found else None


def _check_numbers(line: Line) -> None:
    """Raise an error unless a line has the device and positive numbers that a plan needs."""
    if "shape" in line:
        names = ("sampling_s_per_answer", "training_s_per_answer", "sampling_tokens_per_s")
        numbers = [line[name] for name in (*names, "prompt_tokens")]
    else:
        names = ("sampling_s_per_image", "trained_step_s_per_sample")
        numbers = [line[name]["median"] for name in names]
        numbers += [line["settings"][name] for name in ("steps", "batch")]
    for number in (*numbers, peak_gib(line)):
        if not 0 < number < math.inf:
            raise ValueError(f"{number} is not a positive number")
    if not isinstance(line["device"], str):
        raise TypeError("no name of the device")


def sample_seconds(line: Line, config: Any, trained_steps: int) -> tuple[float, float]:
    """Return the seconds to generate one sample of `config` and to train on it in one pass."""
    if "shape" in line:
        return line["sampling_s_per_answer"], line["training_s_per_answer"]
    step = line["sampling_s_per_image"]["median"] / line["settings"]["steps"]
    trained = line["trained_step_s_per_sample"]["median"] * trained_steps
    return step * config.sample.num_steps, trained


def peak_gib(line: Line) -> float:
    """Return the largest measured memory of a process, in GiB."""
    return max(value for name, value in line.items() if name.endswith("_gib"))


def describe_measurement(line: Line, batch_size: int) -> str:
    """Return the source of a measurement, and its batch size next to that of the plan.

    Args:
        line: The measurement.
        batch_size: Samples that the plan generates together.
    """
    where = f"{line['file']}, {line['date']}, {line['device']}"
    if "shape" in line:
        response = line["sampling_tokens_per_s"] * line["sampling_s_per_answer"]
        slots = line.get("answers", VLM_SLOTS)
        tokens = f"{line['prompt_tokens']} prompt and {response:.0f} response tokens"
        return f"{where}: {tokens}, {slots} at a time; the plan has {batch_size}"
    return f"{where}: batch {line['settings']['batch']}; the plan has {batch_size}"


def describe_memory(line: Line, model: str) -> str:
    """Return the memory of a process: the measured peak, and what it leaves out."""
    encoders = ENCODERS.get(shape_of(model), 0)
    own = f", and {encoders} GiB for the text encoders" if encoders else ""
    return (
        f"{peak_gib(line):.1f} GiB for sampling and training, measured on one GPU{own}; no reward"
    )
