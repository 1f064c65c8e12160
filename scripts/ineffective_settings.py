"""Find settings that have no effect in combination with others, by trying all pairs.

    python scripts/ineffective_settings.py [--log pairs.txt] [grpo nft ...]

For each algorithm, each setting and each pair of settings that differ from BASE, this runs two
short epochs of scripts/train.py on a tiny random model in float64 and compares the final weights. A
setting is ineffective with another if it changes the weights on its own but not with the other; if
even `reward_fn` is, nothing is learned. EXPECTED_INEFFECTIVE lists the legitimate cases with the
reason; every other one should be rejected by the config. Exits with 1 if there is any.
"""

import copy
import logging
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from fnmatch import fnmatch
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import train as loop
from ml_collections import ConfigDict
from tqdm import tqdm
from untrained import small

from flow_grpo.config.error_reporting import ScriptParser
from flow_grpo.diffusion.algorithms import ALGORITHMS
from flow_grpo.diffusion.config_checks import check_guidance_gradient
from flow_grpo.diffusion.fields import DiffusionConfig, get_config
from flow_grpo.diffusion.models.base import ModelAdapter
from flow_grpo.diffusion.models.sd3 import SD3Adapter
from flow_grpo.diffusion.session import build_session
from flow_grpo.errors import UserError
from flow_grpo.training.resume import RunStart

TOLERANCE = 1e-7  # relative to the weight update; float64 rounding is 1e-12 of it
PROMPTS = [f"prompt number {i}" for i in range(6)]
Fields = dict[str, Any]
Update = np.ndarray | str  # the weight update, or the message with which the run was rejected

BASE: Fields = {
    "device": "cpu",
    "run_name": "void",
    "num_epochs": 2,
    "eval_freq": 0,
    "resolution": 16,
    "max_sequence_length": 4,
    "reward_fn": {"light": 1.0, "contrast": 0.5},
    "custom_rewards": {
        "light": "ineffective_settings:light",
        "contrast": "ineffective_settings:contrast",
    },
    "sample.num_steps": 4,
    "sample.guidance_scale": 2.0,
    "sample.train_batch_size": 8,
    "sample.num_image_per_prompt": 4,
    "sample.num_batches_per_epoch": 1,
    "train.batch_size": 4,
    "train.gradient_accumulation_steps": 1,
    "train.learning_rate": 1e-2,
    "train.lora_rank": 2,
    "train.lora_alpha": 4,
}
# settings of algorithms for the small model and the short run
ALGORITHM_BASE: dict[str, Fields] = {
    "grpo": {"clip_range": 0.1},
    "grpo_guard": {"clip_range": 0.1},
    "dppo": {"delta": 0.1},
    "mix": {"clip_range": 0.1, "window_size": 2, "every": 1},
    "dgpo": {"times": 2, "old_after": 0},
    "dpo": {"times": 2},
    "ipo": {"times": 2},
    "kto": {"times": 2},
    "sft": {"times": 2},
    "rwr": {"times": 2},
    "nft": {"times": 2},
    "awm": {"times": 2},
    "ram": {"times": 2},
    "leap": {"times": 2},
}
TRIED_VALUES: dict[str, list[Any]] = {
    "seed": [7],
    "resolution": [24],
    "height": [32],
    "width": [32],
    "max_sequence_length": [8],
    "use_lora": [False],
    "reward_fn": [{"light": 1.0, "contrast": -0.5}],
    "sample.num_steps": [5],
    "sample.guidance_scale": [1.0],
    "sample.train_batch_size": [4],
    "sample.num_image_per_prompt": [2],
    "sample.num_batches_per_epoch": [2],
    "sample.sde_type": ["dance", "cps"],
    "sample.noise_level": [0.5],
    "sample.global_std": [False],
    "sample.same_latent": [True],
    "sample.sde_window_size": [1],
    "sample.sde_window_range": [(1, 3)],
    "sample.sde_window_per": ["group", "batch"],
    "sample.solver": ["dpm2"],
    "sample.async_depth": [1],
    "sample.explore_steps": [2],
    "train.batch_size": [2],
    "train.gradient_accumulation_steps": [2],
    "train.num_inner_epochs": [2],
    "train.learning_rate": [3e-3],
    "train.lr_scheduler": ["linear", "cosine"],
    "train.lr_warmup_steps": [1],
    "train.lr_min_ratio": [0.5],
    "train.adam_beta1": [0.5],
    "train.adam_beta2": [0.9],
    "train.adam_weight_decay": [0.1],
    "train.adam_epsilon": [1e-3],
    "train.max_grad_norm": [1e-3],
    "train.advantage": [
        "dr_grpo",
        "rloo",
        "reinforce_pp",
        "remax",
        "gdpo",
        "grpo_passk",
        "pairwise",
    ],
    "train.keep_best_worst": [1],
    "train.guidance_gradient": ["conditional"],
    "train.timestep_fraction": [0.5],
    "train.lora_rank": [3],
    "train.lora_alpha": [8],
    "train.lora_target_modules": ["attn.to_q"],
    "anchors.norm_guard": [100.0],
    "anchors.reset_epochs": [1],
    "anchors.diversity": [True],
}
# settings that another one requires: a window of (0, 5) does not fit into four steps
NEEDS: dict[str, Fields] = {
    "sample.sde_window_size": {"sample.sde_window_range": (0, 3)},
    "train.lr_min_ratio": {"train.lr_scheduler": "cosine"},
    "sample.explore_steps": {"train.keep_best_worst": 1},
}
# settings of algorithms for which twice the default is not a useful value
ALGORITHM_TRIED_VALUES: dict[str, list[Any]] = {
    "times": [3],
    "kl_target": [1e-9],
    "adv_clip_max": [0.3],
    "clip_range": [1e-7],
    "clip_range_low": [1e-7],
    "clip_range_high": [1e-7],
    "delta": [1e-12],
    "old_rate": [0.2],
    "old_start": [1],
    "old_max_decay": [0.0],
    "old_after": [200],
    "skip_first": [1],
    "skip_last": [1],
    "train_guidance": [1.0],
    "kl_guidance": [3.0],
    "window_size": [1],
    "shift": [2],
    "every": [2],
    "power": [0.5],
    "teachers": [{"all": "lora"}],
    "teacher_guidance": [1.0],
}
# Handled by the same code for all algorithms: pairs with these are tried with one of them.
DEFAULT_ALGORITHM = "grpo"
SHARED_FIELDS = {
    "seed",
    "resolution",
    "height",
    "width",
    "max_sequence_length",
    "train.lr_scheduler",
    "train.lr_warmup_steps",
    "train.lr_min_ratio",
    "train.learning_rate",
    "train.adam_beta1",
    "train.adam_beta2",
    "train.adam_weight_decay",
    "train.adam_epsilon",
    "train.max_grad_norm",
    "train.lora_rank",
    "train.lora_alpha",
    "train.lora_target_modules",
}
# fields that do not affect training, or cannot in two epochs in one process on a CPU
UNTRIED_FIELDS = {
    "where a run is stored, what it writes and when": """run_name logdir resume resume_changed
        num_epochs save_freq state_freq num_checkpoint_limit log_images log_with project_name""",
    "evaluation": """eval_freq eval_prompts eval_reward_fn second_reward eval_dataset
        eval_dataset_column
        eval_image_column eval_resolution eval_height eval_width eval_before_training
        sample.eval_num_steps
        sample.eval_guidance_scale sample.eval_precision sample.test_batch_size train.ema
        train.ema_decay
        train.ema_update_interval""",
    "speed and memory": """sample.context_parallel prompt_cache offload_idle compile cuda_graphs
        train.gradient_checkpointing train.keep_gradients train.offload_optimizer
        train.use_8bit_adam mixed_precision pretrained.base_precision
        pretrained.encoder_precision allow_tf32 device distributed_timeout""",
    "which model, prompts and rewards": """pretrained.model pretrained.revision frames dataset
        dataset_column image_column metadata_columns prompt_fn custom_rewards custom_models
        custom_algorithms reward_options reward_servers reward_retries reward_timeout
        max_failed_fraction train.lora_path sample.guidance_scale_2""",
    "rejected unless guidance_scale=1, where it is redundant": "train.cfg",
    "aliases of fields that are tried": """train.beta train.kl_type train.adv_clip_max
        train.clip_range train.clip_range_low train.clip_range_high""",
    "the algorithm": "algorithm",
    "needs images or rewards": """anchors.data anchors.data_weight anchors.kl_gate
        preferences.data preferences.share preferences.per_epoch preferences.density
        preferences.unlike_sizes""",
    "equivalent to reset_epochs": "anchors.reset_kl",
    "acts only on non-finite gradients": "train.max_skipped_updates",
}
# functions of the training loop that are replaced: evaluation, samples, checkpoints
NOT_RUN = {
    "run_evaluation": lambda session, epoch: {},
    "write_training_samples": lambda *args: None,
    "finish_epoch": lambda *args: None,
}
# (ineffective setting, with which other, reason); None is the base
EXPECTED_INEFFECTIVE = [
    ("train.lora_*", "use_lora=False", "presets set them for LoRA, which is off"),
    ("sample.global_std=False", "sample.train_batch_size=4", "the batch is a single group"),
    ("train.advantage=reinforce_pp", "sample.train_batch_size=4", "the batch is a single group"),
    *(
        (f"*.{field}=*", other, "one update per epoch: all ratios are 1, the first KL is 0")
        for field in ("kl_target", "ratio", "clip_range*", "delta")
        for other in ("sample.train_batch_size=4", "train.gradient_accumulation_steps=2")
    ),
    ("*.clip_range*", "*.clip_range*", "the values are equal, or no ratio reaches the other side"),
    ("*.clip_range_low=*", "train.timestep_fraction=0.5", "no ratio falls below 1 in these runs"),
    ("*.clip_range_low=*", "mix.ratio=trajectory", "no ratio falls below 1 in these runs"),
    ("dgpo.clip_range=*", "use_lora=False", "the weights move beyond either range"),
    ("*.old_*", "*.old_start=1", "two epochs do not go beyond its start"),
    ("dgpo.old_*", "dgpo.old_after=200", "not sampled from within two epochs, and nothing clips"),
    *(
        ("dgpo.old_*", other, "after one update the old weights equal the current ones")
        for other in ("sample.train_batch_size=4", "train.gradient_accumulation_steps=2")
    ),
    ("d*po.skip_first=1", "d*po.skip_last=1", "both epochs happen to draw the same noise levels"),
    ("*.adv_clip_max=*", "train.advantage=*", "unnormalized advantages are below it here"),
    ("train.max_grad_norm=*", "train.advantage=*", "gradients are below it here"),
    ("dpo.beta=*", "use_lora=False", "margins are in the hundreds, gradients clipped to one norm"),
    ("*.ratio=trajectory", "*window_size=1", "a trajectory of one SDE step is that step"),
    ("mix.shift=2", "mix.every=2", "in two epochs the window stays, or goes once around"),
    ("mix.every=2", "mix.shift=2", "in two epochs the window stays, or goes once around"),
    ("*.kl_type=gaussian", "sample.sde_type=cps", "cps has no dt to leave out"),
    ("*.sde_window_per=batch", "*.sde_window_size=1", "both epochs happen to draw equal windows"),
    ("sample.solver=dpm2", "None", "four steps have too few consecutive ODE steps"),
    ("sample.solver=dpm2", "train.timestep*", "four steps have too few consecutive ODE steps"),
    ("*.train_guidance=1.0", "sample.guidance_scale=1.0", "equal to the rollout's"),
    ("dpo.kl_type=*", "None", "a KL without weight is only logged"),
    ("sample.*", "dpo.kl_type=*", "a KL without weight is only logged"),
]


def light(images: list, prompts: list, metadata: list) -> list[float]:
    return [float(np.asarray(image).mean()) / 255 for image in images]


def contrast(images: list, prompts: list, metadata: list) -> list[float]:
    return [float(np.asarray(image).std()) / 255 for image in images]


light.score_pixels = lambda pixels, prompts: pixels.flatten(1).mean(1)
contrast.score_pixels = lambda pixels, prompts: pixels.flatten(1).std(1)


class Setting(NamedTuple):
    """A changed setting: its full name and value."""

    name: str
    value: Any

    def __str__(self) -> str:
        return f"{self.name}={self.value}"

    def __hash__(self) -> int:
        return hash(str(self))

    @property
    def fields(self) -> Fields:
        return {self.name: self.value, **NEEDS.get(self.name, {})}


def settings_to_try(algorithm: str) -> Iterator[Setting]:
    """Yield the settings that can affect an algorithm, with values that differ from the base."""
    for name, values in TRIED_VALUES.items():
        yield from (Setting(name, value) for value in values)
    for each in fields(ALGORITHMS[algorithm].Settings):
        if "alias_of" in each.metadata:
            continue
        values = [v for v in each.metadata["choices"] if v != each.default]
        if isinstance(each.default, bool):
            values = [not each.default]
        if not values:
            values = ALGORITHM_TRIED_VALUES.get(each.name)
        if not values:
            values = [2 * each.default or type(each.default)(1)]
        yield from (Setting(f"{algorithm}.{each.name}", value) for value in values)


def expected_reason(ineffective: Setting, other: Setting | None) -> str:
    """Return the reason in EXPECTED_INEFFECTIVE why a setting has no effect, or "".

    Args:
        ineffective: The setting.
        other: The setting that it has no effect with; None if it has none on its own.
    """
    for a, b, reason in EXPECTED_INEFFECTIVE:
        if fnmatch(str(ineffective), a) and fnmatch(str(other), b):
            return reason
    return ""


class Trials:
    """Short runs in this process that share the model."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.adapters = folder, {}
        for split in ("train", "test"):
            (folder / f"{split}.txt").write_text("\n".join(PROMPTS), encoding="utf-8")

    def run(self, algorithm: str, changed: Fields) -> Update:
        """Return the weight update of a short run, or the error that rejected its config."""
        config = get_config()
        config.algorithm = algorithm
        config.dataset = str(self.folder)
        config.logdir = "logs"
        base = {f"{algorithm}.{name}": v for name, v in ALGORITHM_BASE.get(algorithm, {}).items()}
        for name, value in {**BASE, **base, **changed}.items():
            section, _, key = name.rpartition(".")
            value = ConfigDict(value) if isinstance(value, dict) else value
            (config[section] if section else config)[key] = value
        start = RunStart(self.folder / "void", checkpoint=None, is_new=True)
        try:
            session = build_session(config, self.load, lambda *args: (start, None))
        except UserError as error:
            return str(error)
        before = _flat(session.policy.parameters())
        session.progress.epoch = 0  # skips the evaluation before the first epoch
        try:
            with patch.multiple(loop, **NOT_RUN):
                loop.train(session)
        finally:
            session.close()
        return _flat(session.policy.parameters()) - before

    def load(self, config: DiffusionConfig, accelerator: Any) -> ModelAdapter:
        """Return the shared model with its own copy of the transformer."""
        length = config.max_sequence_length
        check_guidance_gradient(config, SD3Adapter)
        if length not in self.adapters:
            # no qk_norm: diffusers' RMSNorm computes in float32
            pipeline = small.build("sd3", layers=1, qk_norm=None)
            adapter = SD3Adapter(pipeline, dtype=torch.float64, max_sequence_length=length)
            adapter.precompute_embeddings(["", *PROMPTS])
            self.adapters[length] = adapter
        shared = self.adapters[length]
        adapter = copy.copy(shared)
        adapter.transformer = copy.deepcopy(shared.transformer)
        return adapter


def _flat(parameters: Any) -> np.ndarray:
    return torch.cat([p.detach().flatten() for p in parameters]).numpy().copy()


@dataclass
class Counts:
    """Runs of one setting and of pairs, rejected runs, and ineffective settings by verdict."""

    singles: int = 0
    pairs: int = 0
    rejected: int = 0
    expected: int = 0
    unexpected: int = 0


def try_all_pairs(
    trials: Trials, algorithm: str, settings: Iterable[Setting], log: Callable[[str], None]
) -> Counts:
    """Try each setting and each pair with one algorithm, and log the ineffective ones."""
    counts, base = Counts(), trials.run(algorithm, {})
    assert not isinstance(base, str), base

    def report(ineffective: Setting, other: Setting | None = None) -> None:
        """Log and count an ineffective setting."""
        reason = expected_reason(ineffective, other)
        if reason:
            counts.expected += 1
        else:
            counts.unexpected += 1
        context = f" with {other}" if other else ""
        log(f"{algorithm}: {ineffective} has no effect{context}: {reason or 'UNEXPECTED'}")

    singles: dict[Setting, Update] = {}
    for setting in settings:
        counts.singles += 1
        singles[setting] = update = trials.run(algorithm, setting.fields)
        if isinstance(update, str):
            counts.rejected += 1
            log(f"{algorithm}: {setting} is rejected: {update}")
        elif updates_equal(update, base):
            report(setting)
    pairs = [
        (a, b)
        for a, b in combinations(singles, 2)
        if a.name != b.name
        and (algorithm == DEFAULT_ALGORITHM or not {a.name, b.name} & SHARED_FIELDS)
    ]
    for a, b in tqdm(pairs, algorithm):
        counts.pairs += 1
        update = trials.run(algorithm, {**a.fields, **b.fields})
        if isinstance(update, str):
            counts.rejected += 1
            continue
        for setting, other in ((a, b), (b, a)):
            single, without = singles[setting], singles[other]
            is_effective = isinstance(single, str) or not updates_equal(single, base)
            if is_effective and not isinstance(without, str) and updates_equal(update, without):
                report(setting, other)
    return counts


def updates_equal(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and np.linalg.norm(a - b) <= TOLERANCE * np.linalg.norm(b)


def main() -> int:
    """Try all algorithms and log the counts; return 1 if anything is unexpected."""
    parser = ScriptParser(description=__doc__.splitlines()[0])
    names = [name for name in ALGORITHMS if name != "opd"]  # opd needs teacher files
    parser.add_argument("algorithms", nargs="*", default=names, metavar="ALGORITHM")
    parser.add_argument("--log", type=Path, help="also append the output to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)  # tensors are small
    logging.disable(logging.WARNING)
    rows = [("algorithm", *(each.name for each in fields(Counts)))]

    def log(line: str) -> None:
        """Print a line, and append it to --log."""
        tqdm.write(line)
        if options.log:
            with options.log.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    with tempfile.TemporaryDirectory() as folder:
        trials = Trials(Path(folder))
        for name in options.algorithms:
            counts = try_all_pairs(trials, name, settings_to_try(name), log)
            rows.append((name, *vars(counts).values()))
            log(f"{name}: done")
    for row in rows:
        log(("{:<12}" + "{:>11}" * (len(row) - 1)).format(*row))
    return 1 if any(row[-1] for row in rows[1:]) else 0


if __name__ == "__main__":
    sys.exit(main())
