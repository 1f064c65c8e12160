"""Write the training times in docs/tasks/*.md from the measurements in docs/benchmarks.

    python docs/make_tasks.py

A page names a preset, numbers of GPUs and epochs, and the config fields that its commands override:
<!-- hours PRESET gpus=1,8 epochs=500 height=480 eval_prompts=64 -->
Two names are not config fields: tests=5000, the number of test prompts of a dataset that is not in
the repository, and reward_gib=4, the GPU memory of the page's rewards. The text between that line
and <!-- end --> is generated.
"""

import json
import re
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from flow_grpo.diffusion import presets as diffusion
from flow_grpo.diffusion.session import build_algorithm
from flow_grpo.report.console import markdown_table
from flow_grpo.vlm import presets as vlm

HERE = Path(__file__).parent
PLACE = re.compile(
    r"(<!-- hours (\w+) gpus=([\d,]+) epochs=([\d,]+)((?: \w+=\d+)*) -->\n).*?(?=<!-- end -->)",
    re.S,
)
PLANNED = ("tests", "reward_gib")  # not config fields
CHECKPOINTING = "--gradient_checkpointing"
# names of the models in the benchmarks
SHAPES = {
    "stabilityai/stable-diffusion-3.5-medium": "sd3.5-medium",
    "black-forest-labs/FLUX.1-dev": "flux.1-dev",
    "Qwen/Qwen-Image": "qwen-image",
    "Tongyi-MAI/Z-Image-Turbo": "z-image",
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": "wan2.1-1.3b",
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": "wan2.1-14b",
    "Qwen/Qwen2.5-VL-3B-Instruct": "qwen2.5-vl-3b",
    "Qwen/Qwen2.5-VL-7B-Instruct": "qwen2.5-vl-7b",
}
# GiB of the text encoders in bf16, from their parameter counts; benchmarks use one layer of them
ENCODERS = {
    "sd3.5-medium": 10.4,
    "flux.1-dev": 9,
    "qwen-image": 15,
    "wan2.1-1.3b": 11,
    "wan2.1-14b": 11,
}
Line = dict[str, Any]


def measurements() -> list[Line]:
    """Return all lines of docs/benchmarks with their file names, the newest of a file last."""
    return [
        json.loads(line) | {"file": path.name}
        for path in sorted((HERE / "benchmarks").glob("*.jsonl"))
        for line in path.read_text("utf-8").splitlines()
    ]


def config_of(preset: str, gpus: int, fields: dict[str, int]) -> ConfigDict:
    if preset in vlm.PRESETS:
        config = vlm.get_config(preset)
    else:
        config = diffusion.get_config(f"{preset}_{gpus}gpu")
    config.update(fields)
    return config


def fits(line: Line, config: ConfigDict) -> bool:
    """Return whether a measurement applies to `config`, up to the number of steps."""
    shape = SHAPES[config.pretrained.model]
    if "shape" in line:
        options = {
            "--full": not config.use_lora,
            CHECKPOINTING: config.train.gradient_checkpointing,
        }
        same_options = all((option in line["command"]) == on for option, on in options.items())
        return line["shape"] == shape and same_options
    if "full_s_per_sample" not in line or "note" in line or "grpo" not in config:
        return False
    found = line["settings"]
    frames = f"x{config.frames}" if config.frames > 1 else ""
    size = f"{config.width or config.resolution}x{config.height or config.resolution}{frames}"
    guided = config.sample.guidance_scale > 1
    wanted = {
        "model": shape,
        "size": size,
        "weights": f"LoRA r {config.train.lora_rank}",
        "compile": True,
        "memory_gib": None,
        "gradient_checkpointing": config.train.gradient_checkpointing,
    }
    return (
        wanted.items() <= found.items()
        and found.get("algorithm", "grpo") == config.algorithm
        and found.get("base_precision", "bf16") == config.pretrained.base_precision
        and not found.get("merge_lora")  # of earlier versions
        and found.get("keep_gradients", False) == config.train.keep_gradients
        and (found["guidance"] > 1) == guided
        and (not guided or found.get("guidance_gradient") == "both")
        and (found["beta"] > 0) == (config.grpo.beta > 0)
    )


def newest(lines: list[Line], config: ConfigDict) -> Line | None:
    found = [line for line in lines if fits(line, config)]
    return sorted(found, key=lambda line: line["date"])[-1] if found else None


def sample_seconds(line: Line, config: ConfigDict) -> tuple[float, float]:
    """Return the seconds to generate one sample of `config` and to train on it."""
    if "shape" in line:
        return line["sampling_s_per_answer"], line["training_s_per_answer"]
    step = line["sampling_s_per_image"]["median"] / line["settings"]["steps"]
    trained = build_algorithm(config).losses_per_sample * config.train.num_inner_epochs
    return (
        step * config.sample.num_steps,
        line["trained_step_s_per_sample"]["median"] * trained,
    )


def epoch_seconds(line: Line, config: ConfigDict, gpus: int) -> float:
    sample = config.sample
    if "shape" in line:
        samples = sample.questions_per_epoch * sample.group_size / gpus
    else:
        samples = sample.train_batch_size * sample.num_batches_per_epoch  # per GPU
    return samples * sum(sample_seconds(line, config))


def count_tests(config: ConfigDict, tests: int | None = None) -> int:
    """Return the number of prompts of an evaluation.

    It is `tests`, or the number of lines of the dataset's test file, up to `eval_prompts` or
    `eval_questions`.
    """
    if tests is None:
        file = HERE.parent / config.dataset / "test.txt"
        if not file.is_file():
            raise ValueError(f"{config.dataset} is not in the repository; add tests=N to the page")
        tests = len(file.read_text("utf-8").splitlines())
    limit = config.get("eval_prompts") or config.get("eval_questions")
    return min(tests, limit) if limit else tests


def evaluation_seconds(line: Line, config: ConfigDict, gpus: int, tests: int) -> float:
    sampling, _ = sample_seconds(line, config)
    if "shape" not in line:
        sampling *= config.sample.eval_num_steps / config.sample.num_steps
    return tests * sampling / gpus


def duration(hours: float) -> str:
    """Format hours, from two days on also in days."""
    return f"{hours:.0f} h" + (f" ({hours / 24:.1f} days)" if hours >= 48 else "")


def hours(line: Line, config: ConfigDict, gpus: int, epochs: int, tests: int) -> float:
    """Return the hours of `epochs` with an evaluation before them and every `eval_freq`."""
    evaluations = 1 + epochs // config.eval_freq
    seconds = epochs * epoch_seconds(line, config, gpus)
    return (seconds + evaluations * evaluation_seconds(line, config, gpus, tests)) / 3600


def table(
    preset: str, gpus: list[int], epochs: list[int], fields: dict[str, int], lines: list[Line]
) -> str:
    planned = {name: fields[name] for name in PLANNED if name in fields}
    fields = {name: value for name, value in fields.items() if name not in PLANNED}
    configs = {number: config_of(preset, number, fields) for number in gpus}
    config = configs[gpus[0]]
    name = f"`{preset}`"
    if fields:
        name += " with " + ", ".join(f"`{field}={value}`" for field, value in fields.items())
    line = newest(lines, config)
    if line is None:
        return f"\n{name} was not measured.\n\n"
    options = "".join(f" --config.{field}={value}" for field, value in fields.items())
    sampling, training = sample_seconds(line, config)
    memory = max(value for name, value in line.items() if name.endswith("_gib"))
    tests = count_tests(config, planned.get("tests"))
    heads = ["H200s", "one epoch", f"evaluation of {tests:,} prompts"]
    heads += [f"{n:,} epochs" for n in epochs]
    rows = [heads]
    for number, config in configs.items():
        seconds = epoch_seconds(line, config, number)
        minutes = [s / 60 for s in (seconds, evaluation_seconds(line, config, number, tests))]
        runs = [hours(line, config, number, n, tests) for n in epochs]
        rows.append([str(number), *(f"{m:.1f} min" for m in minutes), *map(duration, runs)])
    return "\n".join(
        [
            "",
            f"{name} takes {sampling:.2f} s to generate a sample,",
            f"{training:.2f} s to train on it and {memory:.1f} GiB on one H200 with random weights",
            f"([{line['file']}](../benchmarks/{line['file']}), {line['date']}).",
            "",
            markdown_table(rows),
            "",
            *advice(preset, config, gpus[-1], line, options, planned.get("reward_gib", 0)),
            "\n",
        ]
    )


def advice(
    preset: str, config: ConfigDict, gpus: int, line: Line, options: str, reward_gib: int = 0
) -> list[str]:
    """Return the memory per GPU, the preset's number of epochs, and commands that measure both."""
    lines = [f"The preset runs {config.num_epochs:,} epochs (`--config.num_epochs`)."]
    if encoders := ENCODERS.get(SHAPES[config.pretrained.model]):
        peak, batch, own = line["peak_gib"], line["settings"]["batch"], config.sample
        size = f"at batch {batch}"
        if batch != own.train_batch_size:
            size += f" (the preset has {own.train_batch_size})"
        rewards = f", {reward_gib} GiB for the rewards" if reward_gib else ""
        total = peak + encoders + reward_gib
        lines += [
            f"**Each GPU needs {total:.1f} GiB** {size}: {peak} GiB for sampling and",
            f"training{rewards}, and {encoders} GiB for the text encoders, which",
            "`offload_idle=True` moves to the CPU during sampling.",
        ]
    if gpus == 1:
        return lines
    script, file, ending = "train.py", f"grpo.py:{preset}", f"{preset}_{gpus}gpu {gpus}"
    if preset in vlm.PRESETS:
        script, file, ending = "train_vlm.py", f"vlm.py:{preset}", f"config/vlm.py:{preset} {gpus}"
    return [
        *lines,
        f"`--dry_run` measures memory and time on the {gpus} GPUs, or on one GPU as an estimate",
        f"for {gpus} (`--world_size`):",
        "",
        f"    bash scripts/single_node/train_multi_gpu.sh {ending}{options} --dry_run",
        f"    python scripts/{script} --config config/{file}{options} --dry_run "
        f"--world_size={gpus}",
    ]


def page(text: str, lines: list[Line]) -> str:
    def replace(place: re.Match) -> str:
        start, preset, gpus, epochs, rest = place.groups()
        numbers = [[int(n) for n in each.split(",")] for each in (gpus, epochs)]
        fields = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", rest)}
        return start + table(preset, *numbers, fields, lines)

    return PLACE.sub(replace, text)


if __name__ == "__main__":
    known = measurements()
    for path in (HERE / "tasks").glob("*.md"):
        path.write_text(page(path.read_text("utf-8"), known), "utf-8")
