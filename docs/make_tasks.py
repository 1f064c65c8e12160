"""Writes the hours of a run into docs/tasks/*.md, from what docs/benchmarks measured.

    python docs/make_tasks.py

A page names a preset, numbers of GPUs and epochs, and fields that differ from the preset, which the
page's commands set too:
<!-- hours PRESET gpus=1,8 epochs=500 height=480 eval_prompts=64 -->
Two more are not fields: tests=5000, the test prompts of a data set that is not in the repository,
and reward_gib=4, the GPU memory of the page's rewards.
What stands between that line and <!-- end --> is written here.
"""

import json
import re
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from flow_grpo.answer import presets as answer
from flow_grpo.draw import presets as draw
from flow_grpo.draw.session import build_algorithm

HERE = Path(__file__).parent
PLACE = re.compile(
    r"(<!-- hours (\w+) gpus=([\d,]+) epochs=([\d,]+)((?: \w+=\d+)*) -->\n).*?(?=<!-- end -->)",
    re.S,
)
PLANNED = ("tests", "reward_gib")  # beside fields of the config
CHECKPOINTING = "--gradient_checkpointing"
# what the benchmarks call the models
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
# GiB of text encoders in bf16, by their numbers of parameters; benchmarks have them a layer deep
ENCODERS = {
    "sd3.5-medium": 10.4,
    "flux.1-dev": 9,
    "qwen-image": 15,
    "wan2.1-1.3b": 11,
    "wan2.1-14b": 11,
}
Line = dict[str, Any]


def measurements() -> list[Line]:
    """All lines of docs/benchmarks, each with its file, the newest last."""
    return [
        json.loads(line) | {"file": path.name}
        for path in sorted((HERE / "benchmarks").glob("*.jsonl"))
        for line in path.read_text("utf-8").splitlines()
    ]


def config_of(preset: str, gpus: int, fields: dict[str, int]) -> ConfigDict:
    is_answer = preset in answer.PRESETS
    config = answer.get_config(preset) if is_answer else draw.get_config(f"{preset}_{gpus}gpu")
    config.update(fields)
    return config


def fits(line: Line, config: ConfigDict) -> bool:
    """Whether this was the work of a sample of `config`, but for the number of steps."""
    shape = SHAPES[config.pretrained.model]
    if "shape" in line:
        options = {
            "--full": not config.use_lora,
            CHECKPOINTING: config.train.gradient_checkpointing,
        }
        asked = all((option in line["command"]) == on for option, on in options.items())
        return line["shape"] == shape and asked
    if "full_s_per_sample" not in line or "note" in line or "grpo" not in config:
        return False
    found = line["settings"]
    frames = f"x{config.frames}" if config.frames > 1 else ""
    size = f"{config.width or config.resolution}x{config.height or config.resolution}{frames}"
    guided = config.sample.guidance_scale > 1
    wanted = {
        **{"model": shape, "size": size, "weights": f"LoRA r {config.train.lora_rank}"},
        **{"compile": True, "merge_lora": False, "memory_gib": None},
        "gradient_checkpointing": config.train.gradient_checkpointing,
    }
    return (
        wanted.items() <= found.items()
        and found.get("algorithm", "grpo") == config.algorithm
        and found.get("base_precision", "bf16") == config.pretrained.base_precision
        and found.get("keep_gradients", False) == config.train.keep_gradients
        and (found["guidance"] > 1) == guided
        and (not guided or found.get("guidance_gradient") == "both")
        and (found["beta"] > 0) == (config.grpo.beta > 0)
    )


def newest(lines: list[Line], config: ConfigDict) -> Line | None:
    found = [line for line in lines if fits(line, config)]
    return sorted(found, key=lambda line: line["date"])[-1] if found else None


def sample_seconds(line: Line, config: ConfigDict) -> tuple[float, float]:
    """To draw a sample of the config, or an answer, and to train it."""
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
        samples = sample.train_batch_size * sample.num_batches_per_epoch  # of one GPU
    return samples * sum(sample_seconds(line, config))


def count_tests(config: ConfigDict, tests: int | None = None) -> int:
    """Return the number of test prompts of an evaluation: `tests`, or the lines of the data set's
    test file in the repository, up to `eval_prompts` or `eval_questions`."""
    if tests is None:
        file = HERE.parent / config.dataset / "test.txt"
        if not file.is_file():
            raise ValueError(f"{config.dataset} is not in the repository; add tests=N to the page")
        tests = len(file.read_text("utf-8").splitlines())
    limit = config.get("eval_prompts") or config.get("eval_questions")
    return min(tests, limit) if limit else tests


def evaluation_seconds(line: Line, config: ConfigDict, gpus: int, tests: int) -> float:
    drawing, _ = sample_seconds(line, config)
    if "shape" not in line:
        drawing *= config.sample.eval_num_steps / config.sample.num_steps
    return tests * drawing / gpus


def hours(line: Line, config: ConfigDict, gpus: int, epochs: int, tests: int) -> float:
    """The time of that many epochs, with an evaluation before them and one every `eval_freq`."""
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
    name = " ".join([f"`{preset}`", *(f"`{field}={value}`" for field, value in fields.items())])
    line = newest(lines, config)
    if line is None:
        return f"\n{name}: not measured.\n\n"
    options = "".join(f" --config.{field}={value}" for field, value in fields.items())
    drawing, training = sample_seconds(line, config)
    memory = max(value for name, value in line.items() if name.endswith("_gib"))
    tests = count_tests(config, planned.get("tests"))
    heads = ["H200s", "an epoch", f"a test on {tests:,}", *(f"{n:,} epochs" for n in epochs)]
    rows = [heads, ["---"] * len(heads)]
    for number, config in configs.items():
        seconds = epoch_seconds(line, config, number)
        minutes = [s / 60 for s in (seconds, evaluation_seconds(line, config, number, tests))]
        runs = [hours(line, config, number, n, tests) for n in epochs]
        rows.append(
            [str(number), *(f"{m:.1f} min" for m in minutes), *(f"{h:.0f} h" for h in runs)]
        )
    return "\n".join(
        [
            "",
            f"{name}: {drawing:.2f} s to sample and {training:.2f} s to train, in {memory:.1f} "
            "GiB, on one H200",
            f"([{line['file']}](../benchmarks/{line['file']}), {line['date']}, random weights).",
            "",
            *(f"| {' | '.join(row)} |" for row in rows),
            "",
            *advice(preset, config, gpus[-1], line, options, planned.get("reward_gib", 0)),
            "\n",
        ]
    )


def advice(
    preset: str, config: ConfigDict, gpus: int, line: Line, options: str, reward_gib: int = 0
) -> list[str]:
    """The memory of a card in all, how long the preset would run, and how to ask for both."""
    lines = [f"The preset runs {config.num_epochs:,} epochs; `--config.num_epochs` changes that."]
    if encoders := ENCODERS.get(SHAPES[config.pretrained.model]):
        peak, batch, own = line["peak_gib"], line["settings"]["batch"], config.sample
        size = f"at batch {batch}"
        if batch != own.train_batch_size:
            size += f", where the preset has {own.train_batch_size}"
        rewards = f", {reward_gib} GiB of rewards" if reward_gib else ""
        total = peak + encoders + reward_gib
        lines += [
            f"**A card needs {total:.1f} GiB**, {size}: {peak} GiB{rewards}, and {encoders} GiB",
            "of text encoders, which `offload_idle=True` keeps off it while pictures are drawn.",
        ]
    if gpus == 1:
        return lines
    script, file, ending = "train.py", f"grpo.py:{preset}", f"{preset}_{gpus}gpu {gpus}"
    if preset in answer.PRESETS:
        script, file, ending = "train_vlm.py", f"vlm.py:{preset}", f"config/vlm.py:{preset} {gpus}"
    return [
        *lines,
        f"`--dry_run` tells memory and hours on the {gpus} GPUs; or beforehand on one of them,",
        f"planned for {gpus} (`--world_size`):",
        "",
        f"    bash scripts/single_node/train_multi_gpu.sh {ending}{options} --dry_run",
        f"    python scripts/{script} --config config/{file}{options} --dry_run "
        f"--world_size={gpus}",
    ]


def page(text: str, lines: list[Line]) -> str:
    def made(place: re.Match) -> str:
        start, preset, gpus, epochs, rest = place.groups()
        numbers = [[int(n) for n in each.split(",")] for each in (gpus, epochs)]
        fields = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", rest)}
        return start + table(preset, *numbers, fields, lines)

    return PLACE.sub(made, text)


if __name__ == "__main__":
    known = measurements()
    for path in (HERE / "tasks").glob("*.md"):
        path.write_text(page(path.read_text("utf-8"), known), "utf-8")
