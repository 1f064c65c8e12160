"""Plan a run for any number of GPUs: batches, time, communication and memory, without a GPU.

    flow-grpo plan --config config/grpo.py:general_ocr_sd3 --world_size=64
    flow-grpo plan --config config/vlm.py:qwen2_5_vl_3b_geometry3k --world_size=32 --sharded
    flow-grpo plan --config config/grpo.py:general_ocr_sd3 --world_size=64 --reward_s=4

The times of one GPU are measured (docs/benchmarks; --measured adds your own), and those of several
are computed from them (docs/scaling.md). Nothing is loaded, downloaded or written. If samples and
processes do not divide, the error names the nearest numbers that do. To measure a run on your
machine, use --dry_run of `flow-grpo train` instead.
"""

import math
import os
import re
import sys
from pathlib import Path

from absl import flags

from flow_grpo.config import command_line
from flow_grpo.config.error_reporting import exit_on_user_error, print_text
from flow_grpo.config.overrides import option_values
from flow_grpo.diffusion import workload as diffusion
from flow_grpo.diffusion.config_checks import check_config
from flow_grpo.diffusion.fields import DIFFUSION_SPEC
from flow_grpo.diffusion.video_memory import describe_video_memory, video_model
from flow_grpo.errors import UserError
from flow_grpo.training.measurements import (
    describe_measurement,
    describe_memory,
    newest,
    read_lines,
    read_measurements,
)
from flow_grpo.training.plan import count_processes
from flow_grpo.training.scaling import (
    DISK_BANDWIDTH,
    GPUS_PER_NODE,
    NETWORK_BANDWIDTH,
    Cluster,
    estimate_rows,
)
from flow_grpo.training.time_estimate import pluralize
from flow_grpo.vlm import workload as vlm
from flow_grpo.vlm.config_checks import check_config as check_vlm_config
from flow_grpo.vlm.fields import VLM_SPEC
from flow_grpo.vlm.memory_plan import describe_plan

WORLD_SIZE = flags.DEFINE_integer(
    "world_size", None, "Number of GPUs. Default: that of the preset's name, or 1.", lower_bound=1
)
PER_NODE = flags.DEFINE_integer("gpus_per_node", GPUS_PER_NODE, "GPUs per node.", lower_bound=1)
NETWORK = flags.DEFINE_float(
    "network_gbit", NETWORK_BANDWIDTH * 8 / 1e9, "Gbit/s of a node, each direction.", 1e-3
)
DISK = flags.DEFINE_float(
    "disk_gb_s", DISK_BANDWIDTH / 1e9, "Speed of writing checkpoints in GB/s.", 1e-3
)
SHARDED = flags.DEFINE_bool(
    "sharded", False, "Weights are sharded (FSDP2, ZeRO-3). Default: DDP, ZeRO-1 or 2."
)
REWARD = flags.DEFINE_float("reward_s", 0, "Seconds that the rewards take per batch.", 0, 1e6)
MEASURED = flags.DEFINE_string(
    "measured", "", "File of `flow-grpo benchmark --out FILE`, instead of the included lines."
)
COMMON = ("num_epochs", "eval_freq", "state_freq", "use_lora", "train.lora_rank")
UNMEASURED = "not estimated: no measurement has these settings; "
MEASURE = "run flow-grpo benchmark --config ... --out FILE and pass --measured FILE, or "


def plan(*, is_vlm: bool) -> str:
    """Return the plan of the config on the command line, one line per subject."""
    package, check = (vlm, check_vlm_config) if is_vlm else (diffusion, check_config)
    for flag in (NETWORK, DISK, REWARD):
        if not math.isfinite(flag.value):
            raise UserError("must be finite", field=f"--{flag.name}", value=flag.value)
    config, gpus = check(flags.FLAGS.config), WORLD_SIZE.value or count_processes()
    batches = package.plan_run(config, gpus)
    tests = package.count_tests(config, batches)
    lines = read_lines(Path(MEASURED.value)) if MEASURED.value else read_measurements()
    context = 1 if is_vlm else config.sample.context_parallel
    line = newest(lines, config) if context == 1 else None
    cluster = Cluster(gpus, PER_NODE.value, NETWORK.value * 1e9 / 8, DISK.value * 1e9)
    rows = {
        f"samples per {'GPU' if context == 1 else 'group'}": f"{batches.samples * context // gpus} "
        "per epoch, on "
        f"{pluralize(cluster.nodes, 'node')} of up to {PER_NODE.value} GPUs"
    }
    if context > 1:
        rows["time"] = "not estimated with sample.context_parallel; use --dry_run"
    elif line is None:
        rows["time and memory"] = UNMEASURED + MEASURE * (not is_vlm) + "use --dry_run"
    else:
        work = package.build_workload(
            config,
            batches,
            line,
            tests=tests,
            reward_seconds=REWARD.value,
            sharded=SHARDED.value,
        )
        size = batches.batch_size if is_vlm else batches.sample_batch_size
        rows["measured"] = describe_measurement(line, size)
        rows |= estimate_rows(work, cluster, batches.updates)
        memory = describe_memory(line, config.pretrained.model)
        rows["memory per GPU"] = memory + (" (not sharded)" if SHARDED.value else "")
        if not tests:
            name = "eval_questions" if is_vlm else "eval_prompts"
            rows["evaluation"] = f"unknown size of the test set; set --config.{name}=N"
    if not is_vlm and line is None and (model := video_model(config)):
        rows |= describe_video_memory(config, model)
    if is_vlm:
        rows |= describe_plan(config, gpus, sharded=SHARDED.value)
    return "\n".join([batches.describe(), *(f"{name:<21} {text}" for name, text in rows.items())])


def main() -> None:
    """Parse the command line and print the plan."""
    named = re.findall(r"_(\d{1,6})gpu$", next(reversed(option_values(sys.argv, "config")), ""))
    [*_, size] = ["1", *named, *option_values(sys.argv, "world_size")]
    if size.isdecimal() and int(size):  # absl rejects other values
        os.environ["WORLD_SIZE"] = size  # as of a launcher: presets choose their batches by it
        os.environ.pop("LOCAL_WORLD_SIZE", None)
    spec = command_line.choose_trainer(sys.argv, (DIFFUSION_SPEC, VLM_SPEC))
    command_line.parse_command_line(spec, common=COMMON, needs_files=False)
    text = exit_on_user_error(lambda: plan(is_vlm=spec is VLM_SPEC), debug=flags.FLAGS.debug)
    print_text(text)


if __name__ == "__main__":
    main()
