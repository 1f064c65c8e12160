"""Time and memory of sampling and of training, taken on the trainer's own loop.

    python scripts/benchmark.py                              # SD3.5-medium's shape, random weights
    python scripts/benchmark.py --model assets/tiny-sd3 --config.height=32 --config.width=96
    python scripts/benchmark.py --config.compile=False --config.sample.guidance_scale=1
    python scripts/benchmark.py --config config/grpo.py:tiny_ocr
    python scripts/benchmark.py --against PATH      # beside Flow-GRPO's own functions, of a clone
    python scripts/benchmark.py --reward_s=2 --config.sample.async_depth=1

Epochs are sampled and trained as `scripts/train.py` does it, with a reward that takes no time, or
`--reward_s` for each batch; the first one, in which all warms up, is not counted. Prints one JSON
line: medians over the epochs, with the least and the most beside them, and on stderr a table for
people. Any pipeline folder will do, the small one also on the CPU.
"""

import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import measuring as bench
import numpy as np
import torch
from absl import flags
from accelerate import Accelerator
from ml_collections import ConfigDict
from train import SampledBatch, collect_rewards, sample_ahead, sample_behind, train_epoch
from untrained.encoders import check_whole
from untrained.full import FULL, build

from flow_grpo.config import command_line
from flow_grpo.draw.fields import DRAW
from flow_grpo.draw.models import ModelAdapter, family_of, find_adapter
from flow_grpo.draw.models.sd3 import SD3Adapter
from flow_grpo.draw.plan import lighter_training
from flow_grpo.draw.session import (
    Session,
    build_adapter,
    build_algorithm,
    build_session,
    image_size,
)
from flow_grpo.errors import UserError, nearest
from flow_grpo.run.building import DTYPES, advice_when_short
from flow_grpo.run.metrics import peak_memory_gb

MODEL = flags.DEFINE_string(
    "model",
    "",
    "In place of the config's: a pipeline folder, with pictures at most of its own size, or random "
    f"weights of the shape of {', '.join(FULL)}.",
)
EPOCHS = flags.DEFINE_integer("epochs", 3, "How many to time.", lower_bound=1)
WHOLE = flags.DEFINE_bool(
    "whole_encoders", False, "Random text encoders of full depth too, which take memory."
)
MEMORY = flags.DEFINE_float("memory_gib", 0, "Use no more of the GPU's memory; 0: all of it.")
REWARD = flags.DEFINE_float("reward_s", 0, "Seconds that a batch waits for its reward.", 0)
AGAINST = flags.DEFINE_string(
    "against", "", "A clone of Flow-GRPO, whose SD3 is timed on the same GPU."
)
SAME = "sd3.5-medium"  # what reference_loops.py makes of random weights
OUT = flags.DEFINE_string("out", "", "Append the line to this file too.")


def main(config: ConfigDict) -> Session:
    if MODEL.value:
        config.pretrained.model = MODEL.value
    if MODEL.value and MODEL.value not in FULL:
        if not Path(MODEL.value).exists() and (near := nearest(MODEL.value, FULL)):
            raise UserError(f"unknown --model={MODEL.value}; did you mean {near}?")
        find_adapter(MODEL.value)
        own = bench.own_resolution(MODEL.value)
        if own and not (config.height and config.width):
            config.resolution = min(config.resolution, own)
    on_gpu = torch.cuda.is_available() and config.device != "cpu"
    if AGAINST.value:
        check_clone(Path(AGAINST.value), config)
    if config.pretrained.model in FULL and not on_gpu:
        full = config.pretrained.model
        raise UserError(f"{full} needs a GPU; name a small model: --model assets/tiny-sd3")
    if MEMORY.value and not on_gpu:
        raise UserError(f"--memory_gib={MEMORY.value} needs a GPU; leave it out")
    if WHOLE.value:
        check_whole(config.pretrained.model)
    if OUT.value:
        check_line_file(Path(OUT.value))
    config.custom_rewards = ConfigDict({"timed": "measuring:TimedReward"})
    config.reward_fn = config.eval_reward_fn = ConfigDict({"timed": 1.0})
    config.reward_options = ConfigDict({"timed": {"seconds": REWARD.value}})
    with tempfile.TemporaryDirectory() as logdir:
        config.logdir, config.run_name, config.resume, config.log_with = logdir, "run", "none", ""
        reference = time_clone(config) if AGAINST.value else {}
        config.num_epochs = 2 + EPOCHS.value  # the last one timed has one to sample ahead
        session = build_session(config, load=load)
        try:
            with advice_when_short(lighter_training(config, session.plan)):
                result = measure(session)
        finally:
            session.close()
    if reference:
        theirs, ours = (r["full_s_per_sample"]["median"] for r in (reference, result))
        result |= {"flow_grpo": reference, "times_as_fast": round(theirs / ours, 2)}
    if session.accelerator.is_main_process:
        line = json.dumps(result)
        print(bench.report(result), file=sys.stderr)
        print(line)
        if OUT.value:
            Path(OUT.value).parent.mkdir(parents=True, exist_ok=True)
            with Path(OUT.value).open("a", encoding="utf-8") as file:
                file.write(line + "\n")
    session.accelerator.end_training()
    return session


def check_line_file(path: Path) -> None:
    """Refuse a name that cannot work before anything is measured; nothing is made yet."""
    path = path.absolute()
    there = next(each for each in (path, *path.parents) if each.exists())
    if there.is_dir() == (there == path) or not os.access(there, os.W_OK):
        raise UserError(f"--out={OUT.value} cannot be written: {there} is in the way; name another")


def check_clone(clone: Path, config: ConfigDict) -> None:
    model = config.pretrained.model
    is_sd3 = model == SAME if model in FULL else find_adapter(model) is SD3Adapter
    if not is_sd3:
        raise UserError(f"--against times Flow-GRPO's SD3, not {model}; leave it out")
    if not clone.is_dir():
        get = f"git clone https://github.com/yifan123/flow_grpo {clone}"
        raise UserError(f"--against={clone} is no folder; {get}")
    if WHOLE.value:
        raise UserError("--against has text encoders a layer deep; leave --whole_encoders out")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("--against times one process; start it without a launcher")
    if not config.use_lora or config.train.batch_size != config.sample.train_batch_size:
        raise UserError(
            "--against needs use_lora=True and train.batch_size=sample.train_batch_size"
        )
    try:
        bench.find_functions(clone)
    except (OSError, ImportError, KeyError, SyntaxError) as error:
        raise UserError(
            f"--against={clone} is no clone of Flow-GRPO with SD3: {error!r}"
        ) from error


def time_clone(config: ConfigDict) -> dict[str, Any]:
    """In a process of its own, which leaves the GPU as it was."""
    plain = json.loads(config.to_json_best_effort())
    plain |= {
        "trained_steps": build_algorithm(config).losses_per_sample,
        "timed_epochs": EPOCHS.value,
        "random_model": config.pretrained.model in FULL,
    }
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        script = str(Path(__file__).with_name("reference_loops.py"))
        print("timing Flow-GRPO's functions", file=sys.stderr)
        done = subprocess.run(
            [sys.executable, script, AGAINST.value, str(result)],
            input=json.dumps(plain),
            stdout=subprocess.DEVNULL,
            text=True,
            check=False,
        )
        if done.returncode:
            raise UserError(f"Flow-GRPO's functions of {AGAINST.value} failed, see above")
        return json.loads(result.read_text("utf-8"))


def load(config: ConfigDict, accelerator: Accelerator) -> ModelAdapter:
    if config.pretrained.model not in FULL:
        limit_memory(accelerator.device)
        return build_adapter(config, accelerator)
    device, dtype = accelerator.device, DTYPES[config.mixed_precision]
    pipeline = build(config.pretrained.model, device, dtype, whole_encoders=WHOLE.value)
    adapter = family_of(type(pipeline).__name__, pipeline.config)(
        pipeline,
        device=device,
        dtype=dtype,
        max_sequence_length=config.max_sequence_length,
        offload_idle=config.offload_idle,
        source_size=image_size(config),
        base_precision=config.pretrained.base_precision,
        encoder_precision=config.pretrained.encoder_precision,
    )
    # random weights are made on the GPU, at full precision; those of a file go there one by one
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    limit_memory(device)
    return adapter


def limit_memory(device: torch.device) -> None:
    if MEMORY.value:
        total = torch.cuda.get_device_properties(device).total_memory / 2**30
        torch.cuda.set_per_process_memory_fraction(min(1.0, MEMORY.value / total))


def measure(session: Session) -> dict[str, Any]:
    config, plan, device = session.config, session.plan, session.accelerator.device
    epochs, ahead = [], None
    for epoch in range(1 + EPOCHS.value):
        metrics, ahead = run_epoch(session, epoch, ahead)
        epochs.append(metrics)
    warm_up, timed = epochs[0], epochs[1:]
    own = plan.samples // plan.num_processes
    seconds = {
        "sampling_s_per_image": [e["sample_s"] / own for e in timed],
        "trained_step_s_per_sample": [e["train_s"] / own / plan.trained_steps for e in timed],
        "full_s_per_sample": [(e["sample_s"] + e["train_s"]) / own for e in timed],
    }
    epoch_s = statistics.median(e["sample_s"] + e["train_s"] for e in timed)
    best = {
        "sampling": min(seconds["sampling_s_per_image"]),
        "training": min(seconds["trained_step_s_per_sample"]),
    }
    rates = {f"{kind}_tflops": work / best[kind] for kind, work in tflop(session).items()}
    ceiling = bench.matmul_tflops(device, DTYPES[config.mixed_precision])
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": command(),
        **bench.hardware(device),
        "settings": settings(session),
        **{name: bench.spread(values) for name, values in seconds.items()},
        "peak_gib": round(peak_memory_gb(device), 1),
        "warm_up_s": round(max(0.0, warm_up["sample_s"] + warm_up["train_s"] - epoch_s), 1),
        "epoch_s": round(epoch_s, 2),
        "matmul_tflops": bench.rounded(ceiling),
        **{name: bench.rounded(rate) for name, rate in rates.items()},
        **{f"{name}_share": bench.rounded(rate / ceiling) for name, rate in rates.items()},
        "ratio_dev_max": max(e.get("train/first_update_ratio_dev", 0.0) for e in epochs),
    }


def command() -> str:
    """As it was called, but for what is where on this machine."""
    where = [OUT.value, f"--out={OUT.value}", "--out"] if OUT.value else []
    words = [word for word in sys.argv if word not in where]
    if AGAINST.value:
        words = [word.replace(AGAINST.value, "CLONE") for word in words]
    return shlex.join(["python", *words])


def run_epoch(
    session: Session, epoch: int, samples: list[SampledBatch] | None
) -> tuple[dict[str, float], list[SampledBatch] | None]:
    """What it took, and the next epoch's samples where they are drawn ahead."""
    device = session.accelerator.device
    start = bench.now(device)
    samples = samples or sample_behind(session, epoch)
    ahead = sample_ahead(session, epoch + 1)
    collect_rewards(session, epoch, samples)
    sampled = bench.now(device)
    samples[0].images = None  # their memory
    session.remember_behaviour()
    credit = np.random.default_rng(0).standard_normal(session.plan.samples)
    metrics = train_epoch(session, epoch, samples, credit)
    done = bench.now(device)
    if session.accelerator.is_main_process:
        what = f"epoch {epoch} of {EPOCHS.value}" if epoch else "warm-up"
        print(f"{what}: {done - start:.1f} s", file=sys.stderr)
    return {**metrics, "sample_s": sampled - start, "train_s": done - sampled}, ahead


def tflop(session: Session) -> dict[str, float]:
    """What an image and a trained step have to compute, however it is done; nothing where that
    cannot be counted."""
    config, adapter = session.config, session.adapter
    denoiser = session.policy.denoiser
    dynamics = denoiser.dynamics
    texts = denoiser.encode(session.prompts[:1])
    forward = bench.forward_tflop(adapter, image_size(config), texts.of(texts.positive))
    if forward is None:
        return {}
    passes = denoiser.passes
    reference = passes if session.algorithm.needs_reference else 0
    backward = 1 if config.use_lora else 2  # gradients of the activations, and of the weights
    if dynamics.guidance_gradient == "both":
        backward *= passes
    sampling = len(dynamics.schedule) * passes * forward
    if session.gradients is not None:  # kept from sampling; the KL has a backward of its own
        steps = session.plan.trained_steps
        kept = reference + backward * (2 if reference else 1)
        return {"sampling": sampling + steps * kept * forward, "training": 0.0}
    return {"sampling": sampling, "training": (passes + reference + backward) * forward}


def settings(session: Session) -> dict[str, Any]:
    config, plan = session.config, session.plan
    height, width, frames = image_size(config)
    return {
        "model": config.pretrained.model,
        "size": f"{width}x{height}" + (f"x{frames}" if frames > 1 else ""),
        "batch": plan.sample_batch_size,
        "train_batch": plan.train_batch_size,
        "samples": plan.samples,
        "processes": plan.num_processes,
        "steps": config.sample.num_steps,
        "trained_steps": plan.trained_steps,
        "guidance": config.sample.guidance_scale,
        "guidance_gradient": config.train.guidance_gradient,
        "algorithm": config.algorithm,
        "beta": config.train.beta,
        "weights": f"LoRA r {config.train.lora_rank}" if config.use_lora else "all",
        "precision": config.mixed_precision,
        "base_precision": config.pretrained.base_precision,
        "encoder_precision": config.pretrained.encoder_precision,
        "compile": session.adapter.compiled,
        "cuda_graphs": session.adapter.replayed,
        "merge_lora": config.sample.merge_lora,
        "gradient_checkpointing": config.train.gradient_checkpointing,
        "keep_gradients": config.train.keep_gradients,
        "memory_gib": MEMORY.value or None,
        "whole_encoders": WHOLE.value,
        "reward_s": REWARD.value,
        "async_depth": config.sample.async_depth,
    }


if __name__ == "__main__":
    default = str(Path(__file__).parents[1] / "config/grpo.py:benchmark_sd3")
    vlm = "benchmark.py is for diffusion models; use scripts/benchmark_vlm.py for a VLM"
    command_line.run(main, DRAW, other_trade=vlm, default=default)
