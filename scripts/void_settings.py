"""Which settings make others void: all pairs of them, tried on a tiny random model in float64.

    python scripts/void_settings.py [--log pairs.txt] [grpo nft ...]

For each algorithm, each setting and each pair of settings that differ from the base below, two
short epochs of scripts/train.py are run and the weights they end with compared. A setting B is void
beside A if it moves the weights alone and not beside A; where even `reward_fn` is, nothing is
learned. What is right all the same stands in RIGHT, with the reason; all else is a mistake that
the config should refuse in one line. Exits with 1 if there is any.
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

from flow_grpo.config.mistakes import Parser
from flow_grpo.draw.algorithms import ALGORITHMS
from flow_grpo.draw.check import check_gradient
from flow_grpo.draw.fields import get_config
from flow_grpo.draw.models.base import ModelAdapter
from flow_grpo.draw.models.sd3 import SD3Adapter
from flow_grpo.draw.session import build_session
from flow_grpo.errors import UserError
from flow_grpo.run.resume import Start

SAME = 1e-7  # of how far the weights moved: float64 rounds at 1e-12 of it
PROMPTS = [f"prompt number {i}" for i in range(6)]
Fields = dict[str, Any]
Weights = np.ndarray | str  # where it was refused, by this message

BASE: Fields = {
    "device": "cpu",
    "run_name": "void",
    "num_epochs": 2,
    "eval_freq": 0,
    "resolution": 16,
    "max_sequence_length": 4,
    "reward_fn": {"light": 1.0, "contrast": 0.5},
    "custom_rewards": {
        "light": "void_settings:light",
        "contrast": "void_settings:contrast",
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
# what another size of the base, or a short run, asks of an algorithm
OWN_BASE: dict[str, Fields] = {
    "grpo": {"clip_range": 0.1},
    "grpo_guard": {"clip_range": 0.1},
    "dppo": {"delta": 0.1},
    "mix": {"clip_range": 0.1, "window_size": 2, "every": 1},
    "dgpo": {"times": 2, "old_after": 0},
    "dpo": {"times": 2},
    "sft": {"times": 2},
    "rwr": {"times": 2},
    "nft": {"times": 2},
    "awm": {"times": 2},
    "ram": {"times": 2},
    "leap": {"times": 2},
}
TRIED: dict[str, list[Any]] = {
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
    "train.advantage": ["dr_grpo", "rloo", "reinforce_pp", "remax", "gdpo", "pairwise"],
    "train.keep_best_worst": [1],
    "train.guidance_gradient": ["conditional"],
    "train.timestep_fraction": [0.5],
    "train.lora_rank": [3],
    "train.lora_alpha": [8],
    "anchors.norm_guard": [100.0],
    "anchors.reset_epochs": [1],
    "anchors.diversity": [True],
}
# what a setting needs beside it: a window of (0, 5) does not fit into four steps
NEEDS: dict[str, Fields] = {
    "sample.sde_window_size": {"sample.sde_window_range": (0, 3)},
    "train.lr_min_ratio": {"train.lr_scheduler": "cosine"},
    "sample.explore_steps": {"train.keep_best_worst": 1},
}
# of algorithms, where twice the default says too little
OWN_TRIED: dict[str, list[Any]] = {
    "times": [3],
    "kl_target": [1e-9],
    "adv_clip_max": [0.3],
    "clip_range": [1e-7],
    "clip_range_low": [1e-7],
    "clip_range_high": [1e-7],
    "delta": [1e-12],
    "old_rate": [0.2],
    "old_start": [1],
    "old_most": [0.0],
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
# The same code for all algorithms, before or after theirs: pairs with these are tried with one.
ONE = "grpo"
PLAIN = (
    *("seed", "resolution", "height", "width", "max_sequence_length"),
    *("train.lr_scheduler", "train.lr_warmup_steps", "train.lr_min_ratio"),
    *("train.learning_rate", "train.adam_beta1", "train.adam_beta2", "train.adam_weight_decay"),
    *("train.adam_epsilon", "train.max_grad_norm", "train.lora_rank", "train.lora_alpha"),
)
# what no run of two epochs in one process on a CPU can tell, or what has no part in training
NOT_TRIED = {
    "where a run lies, what it writes and when": """run_name logdir resume resume_changed
        num_epochs save_freq state_freq num_checkpoint_limit log_images log_with project_name""",
    "evaluation": """eval_freq eval_prompts eval_reward_fn sample.eval_num_steps
        sample.eval_guidance_scale sample.eval_precision sample.test_batch_size train.ema
        train.ema_decay
        train.ema_update_interval""",
    "speed and memory": """prompt_cache offload_idle compile cuda_graphs sample.merge_lora
        train.gradient_checkpointing train.keep_gradients train.offload_optimizer
        train.use_8bit_adam mixed_precision pretrained.base_precision
        pretrained.encoder_precision allow_tf32 device distributed_timeout""",
    "which model, prompts and rewards": """pretrained.model pretrained.revision frames dataset
        dataset_column image_column metadata_columns prompt_fn custom_rewards custom_models
        custom_algorithms reward_options reward_servers reward_retries reward_timeout
        max_failed_fraction train.lora_path sample.guidance_scale_2""",
    "refused but for guidance_scale=1, where it says what is the case": "train.cfg",
    "names of fields of grpo, which are tried there": """train.beta train.kl_type
        train.adv_clip_max train.clip_range train.clip_range_low train.clip_range_high""",
    "the algorithm": "algorithm",
    "needs pictures or rewards of its own": "anchors.data anchors.data_weight anchors.kl_gate",
    "as reset_epochs": "anchors.reset_kl",
    "acts on non-finite gradients alone": "train.max_skipped_updates",
}
# the loop as it is, but for what comes after training
NOT_RUN = {
    "run_evaluation": lambda session, epoch: {},
    "write_training_samples": lambda *args: None,
    "finish_epoch": lambda *args: None,
}
# (what is void, beside what, why that is right); None is the base
RIGHT = [
    ("train.lora_*", "use_lora=False", "presets set them for LoRA, and here is none"),
    ("sample.global_std=False", "sample.train_batch_size=4", "one group is the whole batch"),
    ("train.advantage=reinforce_pp", "sample.train_batch_size=4", "one group is the whole batch"),
    *(
        (f"*.{own}=*", beside, "one update an epoch: no ratio but 1, and no KL in the first")
        for own in ("kl_target", "ratio", "clip_range*", "delta")
        for beside in ("sample.train_batch_size=4", "train.gradient_accumulation_steps=2")
    ),
    ("*.clip_range*", "*.clip_range*", "the sides are as the range is, or no ratio met the other"),
    ("*.clip_range_low=*", "train.timestep_fraction=0.5", "no ratio falls below 1 in these runs"),
    ("*.clip_range_low=*", "mix.ratio=trajectory", "no ratio falls below 1 in these runs"),
    ("dgpo.clip_range=*", "use_lora=False", "weights move so far that either range is left"),
    ("*.old_*", "*.old_start=1", "two epochs are no more than its start"),
    ("dgpo.old_*", "dgpo.old_after=200", "two epochs end before they sample, and no clip is met"),
    *(
        ("dgpo.old_*", beside, "after one update the old weights are a copy of the others")
        for beside in ("sample.train_batch_size=4", "train.gradient_accumulation_steps=2")
    ),
    ("d*po.skip_first=1", "d*po.skip_last=1", "by chance the same noise levels in both epochs"),
    ("*.adv_clip_max=*", "train.advantage=*", "advantages that are not divided are below it here"),
    ("train.max_grad_norm=*", "train.advantage=*", "gradients are below it here"),
    ("dpo.beta=*", "use_lora=False", "margins of hundreds, and gradients cut to one norm"),
    ("*.ratio=trajectory", "*window_size=1", "a trajectory of one noisy step is that step"),
    ("mix.shift=2", "mix.every=2", "in two epochs the window stays, or makes a whole round"),
    ("mix.every=2", "mix.shift=2", "in two epochs the window stays, or makes a whole round"),
    ("*.kl_type=gaussian", "sample.sde_type=cps", "cps has no dt that could be left out"),
    ("*.sde_window_per=batch", "*.sde_window_size=1", "by chance the same windows in both epochs"),
    ("sample.solver=dpm2", "None", "four steps have too few in a row without noise"),
    ("sample.solver=dpm2", "train.timestep*", "four steps have too few in a row without noise"),
    ("*.train_guidance=1.0", "sample.guidance_scale=1.0", "it is that of the rollout"),
    ("dpo.kl_type=*", "None", "a KL that has no weight is logged all the same"),
    ("sample.*", "dpo.kl_type=*", "a KL that has no weight is logged all the same"),
]


def light(images: list, prompts: list, metadata: list) -> list[float]:
    return [float(np.asarray(image).mean()) / 255 for image in images]


def contrast(images: list, prompts: list, metadata: list) -> list[float]:
    return [float(np.asarray(image).std()) / 255 for image in images]


light.score_pixels = lambda pixels, prompts: pixels.flatten(1).mean(1)
contrast.score_pixels = lambda pixels, prompts: pixels.flatten(1).std(1)


class Setting(NamedTuple):
    name: str
    value: Any

    def __str__(self) -> str:
        return f"{self.name}={self.value}"

    def __hash__(self) -> int:
        return hash(str(self))

    @property
    def fields(self) -> Fields:
        return {self.name: self.value, **NEEDS.get(self.name, {})}


def settings_of(algorithm: str) -> Iterator[Setting]:
    """Each that can matter to it, with values other than the base's."""
    for name, values in TRIED.items():
        yield from (Setting(name, value) for value in values)
    for each in fields(ALGORITHMS[algorithm].Settings):
        values = [v for v in each.metadata["choices"] if v != each.default]
        if isinstance(each.default, bool):
            values = [not each.default]
        values = values or OWN_TRIED.get(each.name) or [2 * each.default or type(each.default)(1)]
        yield from (Setting(f"{algorithm}.{each.name}", value) for value in values)


def reason_why_right(void: Setting, beside: Setting | None) -> str:
    for a, b, reason in RIGHT:
        if fnmatch(str(void), a) and fnmatch(str(beside), b):
            return reason
    return ""


class Trials:
    """Short runs of one process, which share a model and what was found."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.adapters = folder, {}
        for split in ("train", "test"):
            (folder / f"{split}.txt").write_text("\n".join(PROMPTS), encoding="utf-8")

    def run(self, algorithm: str, changed: Fields) -> Weights:
        """How far each weight moved."""
        config = get_config()
        config.algorithm, config.dataset, config.logdir = algorithm, str(self.folder), "logs"
        own = {f"{algorithm}.{name}": v for name, v in OWN_BASE.get(algorithm, {}).items()}
        for name, value in {**BASE, **own, **changed}.items():
            section, _, key = name.rpartition(".")
            value = ConfigDict(value) if isinstance(value, dict) else value
            (config[section] if section else config)[key] = value
        start = Start(self.folder / "void", checkpoint=None, is_new=True)
        try:
            session = build_session(config, self.load, lambda *args: (start, None))
        except UserError as error:
            return str(error)
        before = _flat(session.policy.parameters())
        session.progress.epoch = 0  # no evaluation first
        try:
            with patch.multiple(loop, **NOT_RUN):
                loop.train(session)
        finally:
            session.close()
        return _flat(session.policy.parameters()) - before

    def load(self, config: ConfigDict, accelerator: Any) -> ModelAdapter:
        length = config.max_sequence_length
        check_gradient(config, SD3Adapter)
        if length not in self.adapters:
            # diffusers' RMSNorm is in float32
            pipeline = small.build("sd3", layers=1, qk_norm=None)
            adapter = SD3Adapter(pipeline, dtype=torch.float64, max_sequence_length=length)
            adapter.encode_ahead(["", *PROMPTS])
            self.adapters[length] = adapter
        shared = self.adapters[length]
        adapter = copy.copy(shared)
        adapter.transformer = copy.deepcopy(shared.transformer)
        return adapter


def _flat(parameters: Any) -> np.ndarray:
    return torch.cat([p.detach().flatten() for p in parameters]).numpy().copy()


@dataclass
class Counts:
    """Runs of one setting and of two that an algorithm had, those refused, and what was found."""

    singles: int = 0
    pairs: int = 0
    refused: int = 0
    right: int = 0
    wrong: int = 0


def try_all(
    trials: Trials, algorithm: str, settings: Iterable[Setting], say: Callable[[str], None]
) -> Counts:
    counts, base = Counts(), trials.run(algorithm, {})
    assert not isinstance(base, str), base

    def found(void: Setting, beside: Setting | None = None) -> None:
        reason = reason_why_right(void, beside)
        kind = "right" if reason else "wrong"
        setattr(counts, kind, getattr(counts, kind) + 1)
        say(f"{algorithm}: {void} is void {f'beside {beside}' if beside else 'alone'}: {reason}")

    singles: dict[Setting, Weights] = {}
    for setting in settings:
        counts.singles += 1
        singles[setting] = weights = trials.run(algorithm, setting.fields)
        if isinstance(weights, str):
            counts.refused += 1
            say(f"{algorithm}: {setting} is refused: {weights}")
        elif same(weights, base):
            found(setting)
    together = [
        (a, b)
        for a, b in combinations(singles, 2)
        if a.name != b.name and (algorithm == ONE or not {a.name, b.name} & set(PLAIN))
    ]
    for a, b in tqdm(together, algorithm):
        counts.pairs += 1
        weights = trials.run(algorithm, {**a.fields, **b.fields})
        if isinstance(weights, str):
            counts.refused += 1
            continue
        for void, beside in ((a, b), (b, a)):
            alone, other = singles[void], singles[beside]
            lives = isinstance(alone, str) or not same(alone, base)
            if lives and not isinstance(other, str) and same(weights, other):
                found(void, beside)
    return counts


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and np.linalg.norm(a - b) <= SAME * np.linalg.norm(b)


def main() -> int:
    parser = Parser(description=__doc__.splitlines()[0])
    alone = [name for name in ALGORITHMS if name != "opd"]  # whose teachers are files
    parser.add_argument("algorithms", nargs="*", default=alone, metavar="ALGORITHM")
    parser.add_argument("--log", type=Path, help="a file for what is found, beside the console")
    options = parser.parse_args()
    torch.set_num_threads(1)  # tensors are small
    logging.disable(logging.WARNING)
    rows = [("algorithm", *(each.name for each in fields(Counts)))]

    def say(line: str) -> None:
        tqdm.write(line)
        if options.log:
            with options.log.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    with tempfile.TemporaryDirectory() as folder:
        trials = Trials(Path(folder))
        for name in options.algorithms:
            rows.append((name, *vars(try_all(trials, name, settings_of(name), say)).values()))
            say(f"{name}: done")
    for row in rows:
        say(("{:<12}" + "{:>9}" * (len(row) - 1)).format(*row))
    return 1 if any(row[-1] for row in rows[1:]) else 0


if __name__ == "__main__":
    sys.exit(main())
