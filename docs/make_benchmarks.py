"""Write the tables between `<!-- table NAME -->` and `<!-- end -->` from docs/benchmarks/*.jsonl.

    python docs/make_benchmarks.py

Tables: `speed` (SD3.5-medium and Flow-GRPO), `fp8`, `caps` and `small` (torch's memory capped),
`models`, `offline` (DPO on given pairs), `vlm3b` and `vlm7b` (with TRL), `vlm_profile`, and
`scaling` and `vlm_scaling`, which are computed from measurements on one GPU
(flow_grpo/training/scaling.py).
tests/docs/test_docs.py checks that the pages are up to date.
"""

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from flow_grpo.diffusion import presets as diffusion
from flow_grpo.diffusion import workload as diffusion_workload
from flow_grpo.diffusion.config_checks import check_config
from flow_grpo.report.console import markdown_table
from flow_grpo.training.measurements import newest, read_measurements
from flow_grpo.training.scaling import Cluster, estimate_epoch
from flow_grpo.vlm import presets as vlm
from flow_grpo.vlm import workload as vlm_workload
from flow_grpo.vlm.config_checks import check_config as check_vlm_config

HERE = Path(__file__).parent
PAGES = (
    "performance.md",
    "memory.md",
    "model_benchmarks.md",
    "preferences.md",
    "scaling.md",
    "vlm/performance.md",
)
PLACE = re.compile(r"(<!-- table (\w+) -->\n).*?(?=<!-- end -->)", re.S)
NAMES = {
    "sd3.5-medium": "SD3.5-medium",
    "flux.1-dev": "FLUX.1-dev, 12B",
    "qwen-image": "Qwen-Image, 20B",
    "z-image": "Z-Image, 6B",
    "flux.1-kontext-dev": "FLUX.1-Kontext, 12B, one source",
    "flux.2-4b-klein": "FLUX.2-klein, 4B",
    "flux.2-9b-klein": "FLUX.2-klein, 9B",
    "qwen-image-edit": "Qwen-Image-Edit, 20B, one source",
    "wan2.2-5b": "Wan 2.2, 5B",
    "wan2.2-a14b": "Wan 2.2, A14B",
    "wan2.1-1.3b": "Wan 2.1, 1.3B",
    "wan2.1-14b": "Wan 2.1, 14B",
    "ltx-2.3": "LTX-2.3, 19B, with sound",
}
EMBEDDED_GUIDANCE = ("flux.1-dev", "flux.1-kontext-dev")  # one forward pass at any scale
# Rows of the VLM tables: label, command, whether sampling is shown, whether it compares with TRL
VLM = "python scripts/benchmark_vlm.py --shape qwen2.5-vl-"
TRL = "python tests/gpu/benchmark_trl.py"
CHECKPOINTING = "--gradient_checkpointing"
ROWS_3B = (
    ("TRL GRPOTrainer", TRL, True, False),
    ("8 responses per micro-batch (`--budget 5000`)", f"{VLM}3b --budget 5000", True, True),
    (
        "the same, compiled, with `--flex`",
        f"{VLM}3b --budget 5000 --compile --flex --profile",
        True,
        True,
    ),
    ("24 responses per micro-batch (default, 16,384 tokens)", f"{VLM}3b", False, False),
    ("8 responses, checkpointing", f"{VLM}3b --budget 5000 {CHECKPOINTING}", False, False),
    ("all weights (float32, Adam), checkpointing", f"{VLM}3b --full {CHECKPOINTING}", True, False),
)
ROWS_7B = (
    ("TRL GRPOTrainer", f"PYTHONPATH=.:scripts {TRL} --shape qwen2.5-vl-7b", True, False),
    ("LoRA on bf16, 8 responses per micro-batch", f"{VLM}7b --budget 5000", True, True),
    (
        "the same, compiled, with `--flex`",
        f"{VLM}7b --budget 5000 --compile --flex --profile",
        True,
        True,
    ),
    (
        "LoRA on NF4 (QLoRA), compiled, with `--flex`",
        f"{VLM}7b --base_precision nf4 --budget 5000 --compile --flex",
        True,
        True,
    ),
)
# Simulated epochs: numbers of GPUs, columns, and sizes of the test sets of ocr_full, geometry3k
SIMULATED = (1, 8, 16, 32, 64, 128, 256, 512)
SCALING_HEAD = ["GPUs", "samples per epoch", "per GPU and update"]
SCALING_HEAD += ["sampling", "training", "slowest GPU", "communication", "checkpoint", "evaluation"]
SCALING_HEAD += ["epoch, s", "samples/s", "efficiency"]
OCR_TESTS, GEOMETRY_TESTS = 1000, 601
Line = dict[str, Any]


def read(name: str) -> list[Line]:
    """Return the lines of one file, oldest first."""
    path = HERE / "benchmarks" / f"{name}_h200.jsonl"
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def seconds(found: Line) -> str:
    """Format a median with its range, if there is one."""
    median, least, most = (f"{found[key]:.4f}" for key in ("median", "min", "max"))
    return median if least == most else f"{median} ({least} to {most})"


def speed_table() -> str:
    """Compare the newest bf16 and FP8 lines with the Flow-GRPO times of the same call."""
    timed = [line for line in read("sd3") if "times_as_fast" in line]
    ours = [
        next(x for x in reversed(timed) if x["settings"].get("base_precision") == precision)
        for precision in ("bf16", "fp8")
    ]
    theirs = ours[0]["flow_grpo"]
    columns = [theirs, *ours]
    rows = [
        ["", "Flow-GRPO", "this trainer, bf16", "this trainer, FP8 base weights"],
        ["sampling with VAE, s per image", *(seconds(c["sampling_s_per_image"]) for c in columns)],
        [
            "trained step with KL, s per sample",
            *(seconds(c["trained_step_s_per_sample"]) for c in columns),
        ],
        [
            "full sample (10 steps sampled, 9 trained), s",
            *(seconds(c["full_s_per_sample"]) for c in columns),
        ],
        ["peak GPU memory, GiB", *(f"{c['peak_gib']:.1f}" for c in columns)],
        ["speedup", "1", *(f"{line['times_as_fast']:.2f}x" for line in ours)],
    ]
    return markdown_table(rows)


def low_bits_row(line: Line) -> list[str]:
    s = line["settings"]
    return [
        NAMES[s["model"]],
        str(s["batch"]),
        f"{s['steps']}, {s['trained_steps']}",
        f"{line['peak_gib']:.1f} GiB",
        f"{line['full_s_per_sample']['median']:.3f} s",
    ]


def newest_by_model(lines: list[Line]) -> list[Line]:
    return list({(x["settings"]["model"], x["settings"].get("compile")): x for x in lines}.values())


def fp8_table() -> str:
    """Full samples with FP8 base weights at 512 px, the newest line of each model."""
    lines = [
        line
        for line in read("low_bits")
        if line["settings"]["base_precision"] == "fp8"
        and line["settings"]["size"] == "512x512"
        and not line["settings"].get("memory_gib")
        and line["settings"]["model"] != "sd3.5-medium"  # newer in the speed table
    ]
    head = ["model", "batch", "steps, trained", "peak", "full sample"]
    return markdown_table([head, *(low_bits_row(line) for line in newest_by_model(lines))])


def caps_table() -> str:
    """SD3.5-medium with torch's memory capped."""
    rows = [["torch capped at", "gradient checkpointing", "batch", "peak"]]
    for line in read("memory"):
        s = line["settings"]
        checkpointing = "yes" if s["gradient_checkpointing"] else "no"
        cap = f"{s['memory_gib']:.0f} GiB"
        rows.append([cap, checkpointing, str(s["batch"]), f"{line['peak_gib']:.1f} GiB"])
    return markdown_table(rows)


def small_table() -> str:
    """Quantized models with full-size text encoders, torch's memory capped."""
    lines = [line for line in read("low_bits") if line["settings"].get("memory_gib")]
    head = ["torch capped at", "model", "base, encoders", "compiled", "batch", "steps, trained"]
    rows = [[*head, "peak", "full sample"]]
    for line in sorted(newest_by_model(lines), key=lambda x: x["settings"]["memory_gib"]):
        s = line["settings"]
        name, *rest = low_bits_row(line)
        compiled = "yes" if s["compile"] else "no"
        bits = f"{s['base_precision']}, {s['encoder_precision']}"
        rows.append([f"{s['memory_gib']:.0f} GiB", name, bits, compiled, *rest])
    return markdown_table(rows)


def passes_per_step(settings: Line) -> int:
    return 2 if settings["guidance"] > 1 and settings["model"] not in EMBEDDED_GUIDANCE else 1


def models_table() -> str:
    """Time and memory of every model. Of two epochs, the one that did not compile."""
    head = ["model", "size", "steps, passes per step", "batch", "checkpointing"]
    times = ["sampling, s per sample", "trained step, s per sample"]
    rows = [[*head, *times, "sampling, training relative to matmul", "GiB"]]
    lines = {line["settings"]["model"]: line for line in read("models")}
    for model, name in NAMES.items():
        if model not in lines:
            continue
        line, s = lines[model], lines[model]["settings"]
        width, height, *frames = s["size"].split("x")
        size = f"{frames[0]} frames of {height} x {width}" if frames else f"{height} px"
        shares = (line["sampling_tflops_share"], line["training_tflops_share"])
        sampling, step = (
            found["min" if found["max"] > 2 * found["min"] else "median"]
            for found in (line["sampling_s_per_image"], line["trained_step_s_per_sample"])
        )
        rows.append(
            [
                name,
                size,
                f"{s['steps']}, {passes_per_step(s)}",
                str(s["batch"]),
                "yes" if s["gradient_checkpointing"] else "no",
                f"{sampling:.2f}",
                f"{step:.3f}" if step < 1 else f"{step:.2f}",
                ", ".join(f"{100 * share:.0f} %" for share in shares),
                f"{line['peak_gib']:.1f}",
            ]
        )
    return markdown_table(rows)


def offline_table() -> str:
    """Offline DPO of SD3.5-medium and the plain diffusers loop of the same call."""
    rows = [["", "images per batch", "pairs/s", "TFLOP/s relative to a bf16 matmul", "peak GiB"]]
    for line in read("offline_dpo"):
        precision = "FP8 base weights" if "base_precision=fp8" in line["command"] else "bf16"
        columns = {f"this trainer, {precision}": line, "plain diffusers loop": line.get("plain")}
        for name, found in columns.items():
            if found:
                rate, share = found["pairs_per_s"]["median"], 100 * found["share"]
                row = [str(line["train_batch"]), f"{rate:.1f}", f"{share:.0f} %"]
                rows.append([name, *row, f"{found['peak_gib']:.1f}"])
    return markdown_table(rows)


def vlm_table(rows: tuple[tuple[str, str, bool, bool], ...]) -> str:
    """Time and memory per response, from the newest line of each command."""
    newest = {line["command"]: line for line in read("vlm")}
    trl = newest[rows[0][1]]

    def cells(line: Line, phase: str, compared: bool) -> list[str]:
        own, reference = line[f"{phase}_s_per_answer"], trl[f"{phase}_s_per_answer"]
        speedup = f", {reference / own:.1f}x" if compared else ""
        return [f"{own:.4f}{speedup}", f"{line[f'{phase}_gib']:.1f}"]

    table = [["", "sampling, s per response", "GiB", "training, s per response", "GiB"]]
    for label, command, sampled, compared in rows:
        sampling = cells(newest[command], "sampling", compared) if sampled else ["", ""]
        table.append([label, *sampling, *cells(newest[command], "training", compared)])
    return markdown_table(table)


def vlm_profile_table() -> str:
    """Return milliseconds of GPU time by kernel class, from the newest profile of each shape."""
    newest = {line["shape"]: line["profile"] for line in read("vlm") if "profile" in line}
    columns = {
        f"{shape.removeprefix('qwen2.5-vl-').upper()}, {phase}": found["milliseconds"]
        for shape, phases in newest.items()
        for phase, found in phases.items()
    }
    classes = dict.fromkeys(name for found in columns.values() for name in found)
    rows = [["", *columns]]
    for name in classes:
        rows.append([name, *(f"{found.get(name, 0):,.0f}" for found in columns.values())])
    return markdown_table(rows)


def scaling_table() -> str:
    """Simulate general_ocr_sd3; above 64 GPUs, the epoch grows with the GPUs."""
    rows = [SCALING_HEAD]
    for gpus in SIMULATED:
        config = check_config(diffusion.get_config(f"general_ocr_sd3_{min(gpus, 64)}gpu"))
        rows.append(scaling_row(diffusion_workload, config, gpus, OCR_TESTS))
    return markdown_table(rows)


def vlm_scaling_table() -> str:
    """Simulate full fine-tuning of Qwen2.5-VL-3B with sharded weights and groups of 8."""
    config = vlm.get_config("qwen2_5_vl_3b_geometry3k")
    config.sample.group_size = 8
    config = check_vlm_config(config)
    rows = [SCALING_HEAD]
    for gpus in SIMULATED:
        rows.append(scaling_row(vlm_workload, config, gpus, GEOMETRY_TESTS, sharded=True))
    return markdown_table(rows)


def scaling_row(
    package: ModuleType, config: Any, gpus: int, tests: int, *, sharded: bool = False
) -> list[str]:
    """Return the estimated seconds of an epoch on this number of GPUs, by phase."""
    plan = package.plan_run(config, gpus)
    line = newest(read_measurements(), config)
    work = package.build_workload(config, plan, line, tests=tests, sharded=sharded)
    found = estimate_epoch(work, Cluster(gpus))
    parts = [found.phases[name] for name in SCALING_HEAD[3:9]]
    return [
        str(gpus),
        f"{plan.samples:,}",
        f"{plan.samples // gpus // plan.updates_per_pass}",
        *(f"{seconds:.2f}" for seconds in (*parts, found.total)),
        f"{found.samples_per_second:.1f}",
        f"{found.efficiency:.0%}",
    ]


TABLES = {
    "speed": speed_table,
    "fp8": fp8_table,
    "caps": caps_table,
    "small": small_table,
    "models": models_table,
    "offline": offline_table,
    "scaling": scaling_table,
    "vlm_scaling": vlm_scaling_table,
    "vlm_profile": vlm_profile_table,
    "vlm3b": lambda: vlm_table(ROWS_3B),
    "vlm7b": lambda: vlm_table(ROWS_7B),
}


def page(text: str) -> str:
    """Return the page with regenerated tables."""
    return PLACE.sub(lambda place: f"{place[1]}\n{TABLES[place[2]]()}\n\n", text)


if __name__ == "__main__":
    for name in PAGES:
        path = HERE / name
        path.write_text(page(path.read_text("utf-8")), "utf-8")
