"""Measure offline DPO in pairs per second, next to a plain loop of stock diffusers modules.

    python scripts/benchmark_offline.py --config.dpo.times=1      # SD3.5-medium's shape
    python scripts/benchmark_offline.py --model assets/tiny-sd3 --config.height=32 --config.width=96

Epochs of given pairs are trained exactly as in `scripts/train.py`. The pairs are random images,
whose latents and embeddings are encoded in the first epoch, which is warm-up and not counted. The
plain loop (`scripts/plain_dpo.py`) runs first, in a process of its own, with the same batches, LoRA
layers, noise levels per pair, precision and gradient checkpointing, and with latents and embeddings
on the GPU. Prints one JSON line, and a readable summary on stderr.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import benchmark as base
import benchmark_utils as bench
import numpy as np
from absl import flags
from ml_collections import ConfigDict
from PIL import Image
from train import train_epoch

from flow_grpo.config import command_line
from flow_grpo.diffusion.builders import image_size
from flow_grpo.diffusion.fields import DIFFUSION_SPEC
from flow_grpo.diffusion.session import Session, build_session
from flow_grpo.errors import UserError
from flow_grpo.training.builder import DTYPES
from flow_grpo.training.metrics import peak_memory_gb

PAIRS = flags.DEFINE_integer("pairs", 64, "Pairs per epoch.", lower_bound=1)
PLAIN = flags.DEFINE_bool("plain", True, "Also time the plain loop.")
REWARD = "timed"  # evaluates; never called here


def main(config: ConfigDict) -> Session:
    """Time the plain loop and the trainer, and print both."""
    if base.MODEL.value:
        base.select_model(config)
    else:
        config.pretrained.model = base.REFERENCE_MODEL
    base.check_flags(config)
    if config.algorithm not in ("dpo", "grpo"):  # grpo is the default of configs
        rule = "is not measured here"
        raise UserError(rule, field="algorithm", value=config.algorithm, hint="use dpo")
    config.algorithm = "dpo"
    config.custom_rewards = ConfigDict({REWARD: "benchmark_utils:TimedReward"})
    config.reward_fn = ConfigDict({REWARD: 1.0})
    with tempfile.TemporaryDirectory() as folder:
        config.logdir, config.run_name, config.resume, config.log_with = folder, "run", "none", ""
        config.num_epochs = 1 + base.EPOCHS.value
        width, height = config.width or config.resolution, config.height or config.resolution
        config.preferences.data = str(write_pairs(Path(folder), width, height, PAIRS.value))
        plain = time_plain_loop(config, Path(folder) / "plain.json") if PLAIN.value else {}
        session = build_session(config, load=base.load)
        try:
            result = measure(session)
        finally:
            session.close()
    if plain:
        speedup = result["pairs_per_s"]["median"] / plain["pairs_per_s"]["median"]
        plain |= share_of_ceiling(result, plain["pairs_per_s"]["max"])
        result |= {"plain": plain, "times_as_fast": bench.rounded(speedup)}
    if session.accelerator.is_main_process:
        print(describe(result), file=sys.stderr)
        print(json.dumps(result))
        if base.OUT.value:
            Path(base.OUT.value).parent.mkdir(parents=True, exist_ok=True)
            with Path(base.OUT.value).open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
    session.accelerator.end_training()
    return session


def write_pairs(folder: Path, width: int, height: int, count: int) -> Path:
    """Write pairs of random images and return their table."""
    rng, rows = np.random.default_rng(0), []
    for i in range(count):
        names = [f"{i}-{kind}.png" for kind in ("chosen", "rejected")]
        for name in names:
            small = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(small).resize((width, height)).save(folder / name)
        rows.append({"prompt": f"picture number {i}", "chosen": names[0], "rejected": names[1]})
    table = folder / "train.jsonl"
    table.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return table


def time_plain_loop(config: ConfigDict, result: Path) -> dict[str, Any]:
    """Return the measurements of `scripts/plain_dpo.py`, run in a separate process."""
    request = json.loads(config.to_json_best_effort())
    request |= {"pairs": PAIRS.value, "timed_epochs": base.EPOCHS.value}
    request |= {"random_model": config.pretrained.model in base.FULL}
    print("timing the plain loop", file=sys.stderr)
    script = str(Path(__file__).with_name("plain_dpo.py"))
    command = [sys.executable, script, str(result)]
    text = json.dumps(request)
    done = subprocess.run(command, input=text, stdout=subprocess.DEVNULL, text=True, check=False)
    if done.returncode:
        raise UserError("failed; see above", field="the plain loop", hint="or pass --noplain")
    return json.loads(result.read_text("utf-8"))


def measure(session: Session) -> dict[str, Any]:
    """Train the warm-up and the timed epochs and return the fields of the JSON line."""
    config, plan, device = session.config, session.plan, session.accelerator.device
    seconds = []
    for epoch in range(1 + base.EPOCHS.value):
        start = bench.synchronized_time(device)
        train_epoch(session, epoch, [], np.empty(0))
        seconds.append(bench.synchronized_time(device) - start)
        title = f"epoch {epoch} of {base.EPOCHS.value}" if epoch else "warm-up"
        print(f"{title}: {seconds[-1]:.1f} s", file=sys.stderr)
    pairs = plan.given_samples_per_epoch / 2
    size = image_size(config)
    return {
        "command": base.command(),
        **bench.describe_hardware(device),
        "model": config.pretrained.model,
        "size": f"{size.width}x{size.height}",
        "train_batch": plan.train_batch_size,
        "processes": plan.num_processes,
        "levels": plan.trained_steps,
        "weights": f"LoRA r {config.train.lora_rank}" if config.use_lora else "all",
        "precision": config.mixed_precision,
        "compile": session.adapter.compiled,
        "cuda_graphs": session.adapter.uses_cuda_graphs,
        "gradient_checkpointing": config.train.gradient_checkpointing,
        "pairs_per_s": bench.spread([pairs / each for each in seconds[1:]]),
        "warm_up_s": bench.rounded(seconds[0]),
        "peak_gib": round(peak_memory_gb(device), 1),
        **count_tflop(session),
    }


def count_tflop(session: Session) -> dict[str, float]:
    """Return the TFLOP of a pair, the ceiling and the achieved share; {} if they are unknown.

    Two images at each level: forward passes of the policy and the reference, and the gradient of
    activations, which LoRA needs. What checkpointing computes again is not counted.
    """
    config, adapter, device = session.config, session.adapter, session.accelerator.device
    texts = session.policy.denoiser.encode(session.prompts[:1])
    forward = bench.forward_tflop(adapter, image_size(config), texts.select(texts.positive))
    if forward is None:
        return {}
    passes = 3 if config.use_lora else 4
    ceiling = bench.matmul_tflops(device, DTYPES[config.mixed_precision])
    return {
        "tflop_per_pair": bench.rounded(2 * session.plan.trained_steps * passes * forward),
        "matmul_tflops": bench.rounded(ceiling),
    }


def share_of_ceiling(result: dict[str, Any], pairs_per_s: float) -> dict[str, float]:
    """Return the TFLOP/s of each process and their share of the ceiling, if it is known."""
    if "tflop_per_pair" not in result:
        return {}
    rate = result["tflop_per_pair"] * pairs_per_s / result["processes"]
    return {"tflops": bench.rounded(rate), "share": bench.rounded(rate / result["matmul_tflops"])}


def describe(result: dict[str, Any]) -> str:
    """Return the result as lines of text; add the share of the ceiling to it."""
    result |= share_of_ceiling(result, result["pairs_per_s"]["max"])
    lines = [f"{result['model']}, {result['size']}, {result['levels']} levels per pair, DPO"]
    for name, each in (("trainer", result), ("plain loop", result.get("plain"))):
        if each:
            rate, share = each["pairs_per_s"]["median"], each.get("share", 0.0)
            lines.append(
                f"{name:<12} {rate:.4g} pairs/s, {100 * share:.3g} % of a large matmul, "
                f"peak memory {each['peak_gib']} GiB"
            )
    if "times_as_fast" in result:
        lines.append(f"{result['times_as_fast']} times as fast")
    return "\n".join(lines)


if __name__ == "__main__":
    default = str(Path(__file__).parents[1] / "config/base.py")
    command_line.run_with_config(main, DIFFUSION_SPEC, default=default)
