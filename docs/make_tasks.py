"""Write the training times in docs/tasks/*.md from the measurements in docs/benchmarks.

    python docs/make_tasks.py

A page names a preset, numbers of GPUs and epochs, and the config fields that its commands override:
<!-- hours PRESET gpus=1,8 epochs=500 height=480 eval_prompts=64 -->
Two names are not config fields: tests=5000, the number of test prompts of a dataset that is not in
the repository, and reward_gib=4, the GPU memory of the page's rewards. The text between that line
and <!-- end --> is generated.
"""

import re
from pathlib import Path

from ml_collections import ConfigDict

from flow_grpo.diffusion import presets as diffusion
from flow_grpo.diffusion.plan import count_trained_steps
from flow_grpo.report.console import markdown_table
from flow_grpo.training import measurements
from flow_grpo.training.measurements import (
    ENCODERS,
    Line,
    newest,
    peak_gib,
    read_measurements,
    shape_of,
)
from flow_grpo.vlm import presets as vlm

HERE = Path(__file__).parent
PLACE = re.compile(
    r"(<!-- hours (\w+) gpus=([\d,]+) epochs=([\d,]+)((?: \w+=\d+)*) -->\n).*?(?=<!-- end -->)",
    re.S,
)
PLANNED = ("tests", "reward_gib")  # not config fields


def config_of(preset: str, gpus: int, fields: dict[str, int]) -> ConfigDict:
    if preset in vlm.PRESETS:
        config = vlm.get_config(preset)
    else:
        config = diffusion.get_config(f"{preset}_{gpus}gpu")
    config.update(fields)
    return config


def sample_seconds(line: Line, config: ConfigDict) -> tuple[float, float]:
    """Return the seconds to generate one sample of `config` and to train on it."""
    if "shape" in line:
        return measurements.sample_seconds(line, config, 1)
    sampling, training = measurements.sample_seconds(line, config, count_trained_steps(config))
    return sampling, training * config.train.num_inner_epochs


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
    memory = peak_gib(line)
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
    if encoders := ENCODERS.get(shape_of(config.pretrained.model)):
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
    known = read_measurements()
    for path in (HERE / "tasks").glob("*.md"):
        path.write_text(page(path.read_text("utf-8"), known), "utf-8")
