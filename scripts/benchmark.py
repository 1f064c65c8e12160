"""Measure the speed and memory of sampling and training, using the trainer's own loop.

    python scripts/benchmark.py                              # SD3.5-medium's shape, random weights
    python scripts/benchmark.py --model assets/tiny-sd3 --config.height=32 --config.width=96
    python scripts/benchmark.py --config.compile=False --config.sample.guidance_scale=1
    python scripts/benchmark.py --config config/grpo.py:tiny_ocr
    python scripts/benchmark.py --against PATH      # compare with a clone of Flow-GRPO
    python scripts/benchmark.py --reward_s=2 --config.sample.async_depth=1

Epochs are sampled and trained exactly as in `scripts/train.py`, with a reward that takes
`--reward_s` seconds per batch (0 by default). The first epoch is warm-up and is not counted. Prints
one JSON line with the median, minimum and maximum over the epochs, and a readable table on stderr.
Any diffusers pipeline directory works; the small models also run on the CPU.
"""

import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import benchmark_utils as bench
import numpy as np
import torch
from absl import flags
from accelerate import Accelerator
from kernel_profile import profile_call
from ml_collections import ConfigDict
from train import (
    SampledBatch,
    collect_rewards,
    sample_current_epoch,
    sample_next_epoch,
    train_epoch,
)
from untrained.encoders import check_full_encoder
from untrained.full import FULL, build

from flow_grpo.config import command_line
from flow_grpo.diffusion.builders import build_adapter, image_size, training_memory_options
from flow_grpo.diffusion.fields import DIFFUSION_SPEC, DiffusionConfig
from flow_grpo.diffusion.models import ModelAdapter, find_adapter, resolve_adapter
from flow_grpo.diffusion.models.sd3 import SD3Adapter
from flow_grpo.diffusion.session import Session, build_algorithm, build_session
from flow_grpo.errors import UserError, nearest
from flow_grpo.perf.inductor import count_persistent_kernels
from flow_grpo.training.builder import DTYPES, suggest_on_oom
from flow_grpo.training.distributed import is_sharded
from flow_grpo.training.metrics import peak_memory_gb

MODEL = flags.DEFINE_string(
    "model",
    "",
    "Replaces the config's model: a pipeline directory (images are limited to its native "
    f"resolution), or random weights with the architecture of {', '.join(FULL)}.",
)
EPOCHS = flags.DEFINE_integer("epochs", 3, "Number of timed epochs.", lower_bound=1)
FULL_ENCODERS = flags.DEFINE_bool(
    "whole_encoders", False, "Build the random text encoders at full depth, which takes memory."
)
MEMORY = flags.DEFINE_float("memory_gib", 0, "Limit on the GPU memory in GiB; 0: no limit.")
REWARD = flags.DEFINE_float("reward_s", 0, "Seconds that the reward takes per batch.", 0)
AGAINST = flags.DEFINE_string(
    "against", "", "A clone of Flow-GRPO, whose SD3 functions are timed on the same GPU."
)
REFERENCE_MODEL = "sd3.5-medium"  # what reference_loops.py builds with random weights
PROFILE = flags.DEFINE_bool(
    "profile", False, "Also record one epoch: GPU time by kernel class (needs a GPU)."
)
OUT = flags.DEFINE_string("out", "", "Also append the JSON line to this file.")


def main(config: ConfigDict) -> Session:
    """Time sampling and training, print the result as JSON and append it to --out."""
    if MODEL.value:
        select_model(config)
    check_flags(config)
    config.custom_rewards = ConfigDict({"timed": "benchmark_utils:TimedReward"})
    config.reward_fn = config.eval_reward_fn = ConfigDict({"timed": 1.0})
    config.reward_options = ConfigDict({"timed": {"seconds": REWARD.value}})
    with tempfile.TemporaryDirectory() as logdir:
        config.logdir, config.run_name, config.resume, config.log_with = logdir, "run", "none", ""
        reference = benchmark_clone(config) if AGAINST.value else {}
        # the last epoch also samples ahead
        config.num_epochs = 2 + EPOCHS.value + PROFILE.value
        session = build_session(config, load=load)
        try:
            with suggest_on_oom(training_memory_options(session.config, session.plan)):
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


def select_model(config: ConfigDict) -> None:
    """Set the model of --model, and a resolution that it supports."""
    config.pretrained.model = MODEL.value
    if MODEL.value not in FULL:
        if not Path(MODEL.value).exists() and (near := nearest(MODEL.value, FULL)):
            raise UserError(
                "is unknown", field="--model", value=MODEL.value, hint=f"did you mean {near}?"
            )
        find_adapter(MODEL.value)
        native = bench.native_resolution(MODEL.value)
        if native and not (config.height and config.width):
            config.resolution = min(config.resolution, native)


def check_flags(config: ConfigDict) -> None:
    """Reject flags that are incompatible with this machine or the config."""
    on_gpu = torch.cuda.is_available() and config.device != "cpu"
    if AGAINST.value:
        check_clone(Path(AGAINST.value), config)
    if config.pretrained.model in FULL and not on_gpu:
        raise UserError(
            "needs a GPU",
            field="--model",
            value=config.pretrained.model,
            hint="use a small model on the CPU: --model assets/tiny-sd3",
        )
    if MEMORY.value and not on_gpu:
        raise UserError(
            "needs a GPU", field="--memory_gib", value=MEMORY.value, hint="omit it on the CPU"
        )
    if PROFILE.value and not on_gpu:
        raise UserError("needs a GPU", field="--profile", value=True, hint="omit it on the CPU")
    if FULL_ENCODERS.value:
        check_full_encoder(config.pretrained.model)
    if OUT.value:
        check_output_file(Path(OUT.value))


def check_output_file(path: Path) -> None:
    """Reject an output path that cannot be written, before measuring and without creating it."""
    path = path.absolute()
    existing = next(each for each in (path, *path.parents) if each.exists())
    if existing.is_dir() == (existing == path) or not os.access(existing, os.W_OK):
        raise UserError(
            f"cannot be written because of {existing}",
            field="--out",
            value=OUT.value,
            hint="choose another file",
        )


def check_clone(clone: Path, config: ConfigDict) -> None:
    """Reject an `--against` that is no clone of Flow-GRPO, and settings it cannot run with."""

    def reject(rule: str, hint: str = "") -> UserError:
        return UserError(rule, field="--against", value=str(clone), hint=hint)

    model = config.pretrained.model
    is_sd3 = model == REFERENCE_MODEL if model in FULL else find_adapter(model) is SD3Adapter
    if not is_sd3:
        raise reject(f"supports SD3 only, not {model}", "omit it")
    if not clone.is_dir():
        url = "https://github.com/yifan123/flow_grpo"
        raise reject("is not a directory", f"git clone {url} {clone}")
    if FULL_ENCODERS.value:
        raise reject("uses text encoders of one layer", "omit --whole_encoders")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise reject("supports one process only", "start it without a launcher")
    if not config.use_lora or config.train.batch_size != config.sample.train_batch_size:
        raise reject("requires use_lora=True and train.batch_size=sample.train_batch_size")
    try:
        bench.load_reference_functions(clone)
    except (OSError, ImportError, KeyError, SyntaxError) as error:
        raise reject(f"is not a clone of Flow-GRPO with SD3: {error!r}") from error


def benchmark_clone(config: ConfigDict) -> dict[str, Any]:
    """Return the fields of the JSON line for Flow-GRPO's own functions, those of --against.

    They run in a separate process, which frees its GPU memory on exit.

    Raises:
        UserError: If that process fails.
    """
    request = json.loads(config.to_json_best_effort())
    request |= {
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
            input=json.dumps(request),
            stdout=subprocess.DEVNULL,
            text=True,
            check=False,
        )
        if done.returncode:
            raise UserError("failed; see above", field="--against", value=AGAINST.value)
        return json.loads(result.read_text("utf-8"))


def load(config: DiffusionConfig, accelerator: Accelerator) -> ModelAdapter:
    """Load the configured model, or build it with random weights if it is one of `FULL`.

    The limit of --memory_gib applies from the end of loading.
    """
    if config.pretrained.model not in FULL:
        limit_memory(accelerator.device)
        return build_adapter(config, accelerator)
    device, dtype = accelerator.device, DTYPES[config.mixed_precision]
    pipeline = build(config.pretrained.model, device, dtype, whole_encoders=FULL_ENCODERS.value)
    adapter = resolve_adapter(type(pipeline).__name__, pipeline.config)(
        pipeline,
        device=device,
        dtype=dtype,
        max_sequence_length=config.max_sequence_length,
        offload_idle=config.offload_idle,
        source_size=image_size(config),
        base_precision=config.pretrained.base_precision,
        encoder_precision=config.pretrained.encoder_precision,
    )
    # Unlike weights from a file, which are moved one by one, random weights are created on the GPU
    # in full precision; that must not count as peak memory.
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    limit_memory(device)
    return adapter


def limit_memory(device: torch.device) -> None:
    if MEMORY.value:
        total = torch.cuda.get_device_properties(device).total_memory / 2**30
        torch.cuda.set_per_process_memory_fraction(min(1.0, MEMORY.value / total))


def measure(session: Session) -> dict[str, Any]:
    """Run the warm-up and timed epochs and return the fields of the JSON line."""
    config, plan, device = session.config, session.plan, session.accelerator.device
    epochs, ahead = [], None
    for epoch in range(1 + EPOCHS.value):
        metrics, ahead = run_epoch(session, epoch, ahead)
        epochs.append(metrics)
    profiled = {}
    if PROFILE.value:
        call = partial(run_epoch, session, len(epochs), ahead)
        profiled = {"profile": profile_call(device, call)}
    warm_up, timed = epochs[0], epochs[1:]
    count = plan.samples // plan.num_processes  # samples per rank
    seconds = {
        "sampling_s_per_image": [e["sample_s"] / count for e in timed],
        "trained_step_s_per_sample": [e["train_s"] / count / plan.trained_steps for e in timed],
        "full_s_per_sample": [(e["sample_s"] + e["train_s"]) / count for e in timed],
    }
    epoch_s = statistics.median(e["sample_s"] + e["train_s"] for e in timed)
    best = {
        "sampling": min(seconds["sampling_s_per_image"]),
        "training": min(seconds["trained_step_s_per_sample"]),
    }
    rates = {f"{kind}_tflops": tflop / best[kind] for kind, tflop in count_tflop(session).items()}
    ceiling = bench.matmul_tflops(device, DTYPES[config.mixed_precision])
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": command(),
        **bench.describe_hardware(device),
        "settings": settings(session),
        **{name: bench.spread(values) for name, values in seconds.items()},
        "peak_gib": round(peak_memory_gb(device), 1),
        "warm_up_s": round(max(0.0, warm_up["sample_s"] + warm_up["train_s"] - epoch_s), 1),
        "epoch_s": round(epoch_s, 2),
        "matmul_tflops": bench.rounded(ceiling),
        **{name: bench.rounded(rate) for name, rate in rates.items()},
        **{f"{name}_share": bench.rounded(rate / ceiling) for name, rate in rates.items()},
        "persistent_kernels": count_persistent_kernels(),  # 0: not compiled for a GPU
        "ratio_dev_max": max(e.get("train/first_update_ratio_dev", 0.0) for e in epochs),
        **profiled,
    }


def command() -> str:
    """Return the command line without paths of this machine."""
    local = [OUT.value, f"--out={OUT.value}", "--out"] if OUT.value else []
    words = [word for word in sys.argv if word not in local]
    if AGAINST.value:
        words = [word.replace(AGAINST.value, "CLONE") for word in words]
    return shlex.join(["python", *words])


def run_epoch(
    session: Session, epoch: int, samples: list[SampledBatch] | None
) -> tuple[dict[str, float], list[SampledBatch] | None]:
    """Run one epoch.

    Returns:
        Its metrics with the seconds of sampling and training, and the samples of the next epoch if
        they are generated ahead (`sample.async_depth`).
    """
    device = session.accelerator.device
    start = bench.synchronized_time(device)
    samples = samples or sample_current_epoch(session, epoch)
    ahead = sample_next_epoch(session, epoch + 1)
    collect_rewards(session, epoch, samples)
    sampled = bench.synchronized_time(device)
    samples[0].images = None  # free their memory
    session.snapshot_behaviour_weights()
    advantages = np.random.default_rng(0).standard_normal(session.plan.samples)
    metrics = train_epoch(session, epoch, samples, advantages)
    done = bench.synchronized_time(device)
    if session.accelerator.is_main_process:
        title = f"epoch {epoch} of {EPOCHS.value}" if epoch else "warm-up"
        print(f"{title}: {done - start:.1f} s", file=sys.stderr)
    return {**metrics, "sample_s": sampled - start, "train_s": done - sampled}, ahead


def count_tflop(session: Session) -> dict[str, float]:
    """Return the TFLOP of one sampled image and of one trained step.

    Counts what the algorithm requires, not what an implementation executes. Empty if the forward
    pass of the model cannot be counted.
    """
    config, adapter = session.config, session.adapter
    denoiser = session.policy.denoiser
    dynamics = denoiser.dynamics
    texts = denoiser.encode(session.prompts[:1])
    forward = bench.forward_tflop(adapter, image_size(config), texts.select(texts.positive))
    if forward is None:
        return {}
    passes = denoiser.passes_per_velocity
    reference = passes if session.algorithm.needs_reference else 0
    backward = 1 if config.use_lora else 2  # activation gradients, and weight gradients
    if dynamics.guidance_gradient == "both":
        backward *= passes
    sampling = len(dynamics.schedule) * passes * forward
    if session.rollout_gradients is not None:
        # computed while sampling; the KL needs a second backward pass
        steps = session.plan.trained_steps
        kept = reference + backward * (2 if reference else 1)
        return {"sampling": sampling + steps * kept * forward, "training": 0.0}
    return {"sampling": sampling, "training": (passes + reference + backward) * forward}


def settings(session: Session) -> dict[str, Any]:
    """Return the settings that determine the speed, for the JSON line."""
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
        "sharded": is_sharded(session.accelerator),
        "compile": session.adapter.compiled,
        "cuda_graphs": session.adapter.uses_cuda_graphs,
        "gradient_checkpointing": config.train.gradient_checkpointing,
        "keep_gradients": config.train.keep_gradients,
        "memory_gib": MEMORY.value or None,
        "whole_encoders": FULL_ENCODERS.value,
        "reward_s": REWARD.value,
        "async_depth": config.sample.async_depth,
    }


if __name__ == "__main__":
    default = str(Path(__file__).parents[1] / "config/grpo.py:benchmark_sd3")
    vlm = "benchmark.py is for diffusion models; use scripts/benchmark_vlm.py for a VLM"
    command_line.run_with_config(main, DIFFUSION_SPEC, wrong_trainer_message=vlm, default=default)
