"""Named presets: --config config/grpo.py:general_ocr_sd3_8gpu

A preset of a full-size model takes the number of GPUs from its name (_1gpu, _4gpu, _8gpu,
_32gpu, any that divides), or without one from the launcher. Its settings are those that were
published: docs/published.toml has each value with its source, and what differs here with the
reason.
"""

import os
import re
from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict

from flow_grpo.config import old_names
from flow_grpo.config.overrides import planned_processes
from flow_grpo.config.places import find_files
from flow_grpo.config.presets import LIKE, Fields, apply, models_of, resolve
from flow_grpo.draw.fields import get_config as base_config
from flow_grpo.errors import UserError, nearest

# What a preset may have beside fields: arguments of `per_gpu_batches`, for evaluations too or not,
# and fields for one case.
ALL_BATCHES, BATCHES, GPU, CPU = "all batches", "batches", "with a GPU", "without a GPU"
OCR, GENEVAL, PREFERENCE = "for OCR", "for GenEval", "for PickScore and CLIPScore"
CASES: dict[str, Callable[[ConfigDict], bool]] = {
    GPU: lambda _: _has_gpu(),
    CPU: lambda _: not _has_gpu(),
    OCR: lambda config: "ocr" in config.reward_fn,
    GENEVAL: lambda config: "geneval" in config.reward_fn,
    PREFERENCE: lambda config: not {"ocr", "geneval"} & {*config.reward_fn},
}
DEVICES = [f"/dev/{name}" for name in ("nvidiactl", "nvmap", "kfd", "dxg")]  # one has every GPU
# The log-probability is a mean over 1,536 numbers, not 65,536 as at 512 px: it moves further.
TINY_CLIP = 1e-3
# What docs/results has of awm and dgpo was measured without a cut of their advantages.
UNCUT = 1e3


def _has_gpu() -> bool:
    if not any(map(os.path.exists, DEVICES)):
        return False  # which needs no torch to tell
    import torch

    return torch.cuda.is_available()


def _tiny_forward(algorithm: str, rate: float = 1e-3, epochs: int = 9, **own: Any) -> Fields:
    """Three noise levels of each sample, drawn without noise; no leash to the first weights."""
    return {
        LIKE: "tiny_ocr",
        "algorithm": algorithm,
        "num_epochs": epochs,
        "eval_freq": 1,
        "sample": {"sde_window_size": 0},
        "train": {"learning_rate": rate},
        algorithm: {"times": 3, "kl_beta": 0.0, **own},
    }


TINY: dict[str, Fields] = {
    # The small model that ships with the repo learns to draw signs that OCR can read.
    "tiny_ocr": {
        "pretrained": {"model": "assets/tiny-sd3"},
        "height": 32,
        "width": 96,
        "max_sequence_length": 8,  # it was trained to ignore how many T5 tokens there are
        "log_images": 24,
        "dataset": "dataset/ocr",
        "reward_fn": {"ocr": 1.0},
        "compile": False,  # it would take about as long as the training itself
        # Guidance would double the cost, and what it mends here RL mends too.
        "sample": {"eval_num_steps": 10, "test_batch_size": 32, "guidance_scale": 1.0},
        "train": {"clip_range": TINY_CLIP, "beta": 0.0, "ema_update_interval": 1},
        GPU: {
            "num_epochs": 30,
            "eval_freq": 3,
            # 1e-3 learns in three epochs and then hacks the reward: all signs dark on pale, torn.
            "train": {"learning_rate": 3e-4},
            BATCHES: {"groups": 32, "group_size": 16, "max_batch": 256},
        },
        # Twice the step, and an end to it before anything can be hacked. About 15 s per epoch on
        # two slow cores, a quarter of it training: three noisy steps, not nine.
        CPU: {
            "num_epochs": 6,
            "eval_freq": 2,
            "sample": {"num_steps": 8, "sde_window_size": 3},
            "train": {"learning_rate": 6e-4},
            BATCHES: {"groups": 16, "group_size": 12, "max_batch": 48},
        },
    },
    "tiny_grpo_guard": {
        LIKE: "tiny_ocr",
        "algorithm": "grpo_guard",
        "grpo_guard": {"beta": 0.0, "clip_range": TINY_CLIP / 50},  # as 2e-6 is of 1e-4
        "sample": {"global_std": False},
    },
    "tiny_dppo": {LIKE: "tiny_ocr", "algorithm": "dppo", "dppo": {"beta": 0.0, "delta": 1e-4}},
    "tiny_mix": {
        LIKE: "tiny_ocr",
        "algorithm": "mix",
        "mix": {"beta": 0.0, "clip_range": TINY_CLIP, "window_size": 3, "every": 2},
        "sample": {"sde_window_size": 0, "same_latent": True},
    },
    # TempFlow-GRPO: a group is one picture up to a step of its own, where its samples branch.
    "tiny_tempflow": {
        LIKE: "tiny_ocr",
        "grpo": {"step_weight": "tempflow"},
        "sample": {
            **{"same_latent": True, "global_std": False},
            **{"sde_window_size": 1, "sde_window_per": "group"},
        },
        GPU: {
            "sample": {"sde_window_range": (0, 9)},
            BATCHES: {"groups": 32, "group_size": 16, "max_batch": 16},
        },
        CPU: {
            "sample": {"sde_window_range": (0, 7)},
            BATCHES: {"groups": 16, "group_size": 12, "max_batch": 12},
        },
    },
    "tiny_nft": _tiny_forward("nft", rate=3e-4, beta=0.1, old_most=0.0),
    # What the quickstart takes: of all methods it learns the fastest here. It has learnt all in
    # four epochs; twice as long, and all signs are dark, or all are pale. The weights of an epoch
    # ago hold it well enough, and weakly: an old_beta of 1.0 needs three times as long.
    "tiny_awm": {
        **_tiny_forward("awm", epochs=4, old_beta=0.1, old_most=0.0, adv_clip_max=UNCUT),
        # Two epochs of 10 s on two slow cores; two updates an epoch leave some seeds at .92.
        CPU: {
            "num_epochs": 2,
            "eval_freq": 0,
            "sample": {"num_steps": 6, "solver": "dpm2"},
            "awm": {"times": 2},
            BATCHES: {"groups": 16, "group_size": 8, "max_batch": 32, "updates": 4},
        },
    },
    # Thrice as long as is good for it: what scripts/hacking.py cures.
    "tiny_hacked": {
        LIKE: "tiny_awm",
        "log_images": 96,  # all that are evaluated
        GPU: {"num_epochs": 12, "eval_freq": 4},
        CPU: {"num_epochs": 8, "eval_freq": 4},
    },
    "tiny_ram": _tiny_forward("ram", kl_beta=0.05),
    "tiny_dgpo": _tiny_forward("dgpo", adv_clip_max=UNCUT, old_most=0.0),
    "tiny_dpo": _tiny_forward("dpo"),
    "tiny_sft": _tiny_forward("sft"),
    "tiny_rwr": _tiny_forward("rwr"),
    # The second task: scenes with the right shapes, numbers, colours and places.
    "tiny_geneval": {
        LIKE: "tiny_nft",
        "dataset": "dataset/scenes",
        "reward_fn": {"geneval": 1.0},
        "reward_options": {"geneval": {"detector": "shapes"}},
        "train": {"learning_rate": 5e-4},
        # Without a leash all grounds turn pale within 30 epochs, and one seed of three falls to
        # .69.
        "nft": {"kl_beta": 0.3},
        GPU: {"num_epochs": 36, "eval_freq": 3},
        CPU: {"num_epochs": 16, "eval_freq": 4},
    },
    # The small model that edits: does as it is told, and leaves the rest as it was.
    # AWM at the rate of tiny_awm forgets what it can: from .74 to .56 in two epochs.
    "tiny_edit": {
        LIKE: "tiny_nft",
        "pretrained": {"model": "assets/tiny-edit"},
        "max_sequence_length": 12,  # as it was trained
        "dataset": "dataset/edits",
        "reward_fn": {"geneval": 1.0},
        # The graded score is at .93 from the start, which leaves little to tell samples apart.
        "reward_options": {"geneval": {"detector": "shapes", "score": "strict"}},
        "train": {"learning_rate": 6e-4},
        GPU: {"num_epochs": 36, "eval_freq": 4},
        # About 24 s an epoch on two cores.
        CPU: {
            "num_epochs": 18,
            "eval_freq": 6,
            "sample": {"num_steps": 6, "solver": "dpm2"},
            "nft": {"times": 2},
            BATCHES: {"groups": 16, "group_size": 8, "max_batch": 32},
        },
    },
    # Signs and scenes in one run; each prompt asks for the reward that fits it.
    "tiny_mixed": {
        LIKE: "tiny_geneval",
        "dataset": "dataset/ocr:0.5,dataset/scenes:0.5",
        "reward_fn": {"ocr": 1.0, "geneval": 1.0},
        "nft": {"kl_beta": 0.1},
    },
}

LONG: Fields = {"num_epochs": 1000, "eval_freq": 30, "save_freq": 30}
FAMILIES: dict[str, Fields] = {
    # What is known to work for SD3.5-medium at 512 px: 48 groups of 24, two updates an epoch.
    "_sd3": {
        **LONG,
        "mixed_precision": "fp16",
        ALL_BATCHES: {"groups": 48, "group_size": 24, "max_batch": 9},
    },
    # In bf16, without a leash to the first weights, as published for models above SD3's size.
    "_large": {
        **LONG,
        "mixed_precision": "bf16",
        "max_sequence_length": 512,
        "train": {"beta": 0.0, "lora_rank": 64, "lora_alpha": 128},
    },
    # 48 groups of 24, six steps, which FLUX.1-dev needs no more of to show what it will draw.
    "_flux": {
        LIKE: "_large",
        "pretrained": {"model": "black-forest-labs/FLUX.1-dev"},
        "max_sequence_length": 128,
        # its guidance is embedded, and costs no second pass
        "sample": {"num_steps": 6, "eval_num_steps": 28, "guidance_scale": 3.5, "noise_level": 0.9},
        ALL_BATCHES: {"groups": 48, "group_size": 24, "max_batch": 3},
    },
    "_qwen_image": {
        LIKE: "_large",
        "pretrained": {"model": "Qwen/Qwen-Image"},
        "sample": {
            **{"num_steps": 10, "eval_num_steps": 50, "guidance_scale": 4.0, "noise_level": 1.2},
            **{"sde_window_size": 2, "sde_window_range": (0, 5)},
        },
        "train": {"gradient_checkpointing": True, "ema": False},
        ALL_BATCHES: {"groups": 32, "group_size": 16, "max_batch": 4},
    },
    "_kontext": {
        LIKE: "_flux",
        "pretrained": {"model": "black-forest-labs/FLUX.1-Kontext-dev"},
        "sample": {"guidance_scale": 2.5},
        ALL_BATCHES: {"groups": 48, "group_size": 21, "max_batch": 3},
    },
    "_qwen_image_edit": {
        LIKE: "_qwen_image",
        "pretrained": {"model": "Qwen/Qwen-Image-Edit"},
        "sample": {"noise_level": 1.0, "sde_window_size": 0},
    },
    # Z-Image-Turbo as Flow-Factory trains it: one noisy step, the second, third or fourth. Its
    # guidance counts from 0.
    "_z_image": {
        LIKE: "_large",
        "pretrained": {"model": "Tongyi-MAI/Z-Image-Turbo"},
        "sample": {
            **{"num_steps": 6, "eval_num_steps": 10, "guidance_scale": 0.0},
            **{"sde_window_size": 1, "sde_window_range": (1, 4)},
        },
        "train": {"advantage": "gdpo"},
        ALL_BATCHES: {"groups": 48, "group_size": 16, "max_batch": 6},
    },
    # Distilled models at their own steps, by the sampler that most were distilled with: cps at
    # noise 1 goes to (1 - sigma) x0 and draws all noise anew. The clip is that of all cps.
    "_few": {
        LIKE: "_large",
        "sample": {
            **{"num_steps": 4, "eval_num_steps": 4, "guidance_scale": 1.0},
            **{"sde_type": "cps", "noise_level": 1.0},
        },
        "train": {"clip_range": 1e-5},
        ALL_BATCHES: {"groups": 48, "group_size": 16, "max_batch": 4},
    },
    "_wan": {
        LIKE: "_large",
        "pretrained": {"model": "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"},
        "height": 240,
        "width": 416,
        "frames": 33,
        "sample": {"num_steps": 20, "eval_num_steps": 50, "global_std": False},
        "train": {
            **{"learning_rate": 1e-4, "clip_range": 1e-3, "beta": 0.004},
            **{"lora_rank": 32, "lora_alpha": 64, "gradient_checkpointing": True},
        },
        ALL_BATCHES: {"groups": 16, "group_size": 4, "max_batch": 2},
    },
    # As Flow-Factory trains them: short clips, one noisy step, the second, third or fourth.
    "_wan22_a14b": {
        LIKE: "_large",
        "pretrained": {"model": "Wan-AI/Wan2.2-T2V-A14B-Diffusers"},
        "height": 480,
        "width": 480,
        "frames": 5,
        "reward_options": {"pickscore": {"frames": "mean of 5"}},
        "sample": {
            **{"num_steps": 10, "eval_num_steps": 28, "noise_level": 0.9},
            **{"guidance_scale": 4.0, "guidance_scale_2": 3.0},
            **{"sde_window_size": 1, "sde_window_range": (1, 4)},
        },
        "train": {"learning_rate": 1e-4, "advantage": "gdpo", "gradient_checkpointing": True},
        ALL_BATCHES: {"groups": 48, "group_size": 16, "max_batch": 2},
    },
    "_wan_i2v": {
        LIKE: "_wan22_a14b",
        "pretrained": {"model": "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers"},
        "height": 240,
        "width": 240,
        "sample": {"guidance_scale": 5.0, "guidance_scale_2": None},
    },
    "_wan_14b": {LIKE: "_wan", "pretrained": {"model": "Wan-AI/Wan2.1-T2V-14B-Diffusers"}},
}


def _task(family: str, reward: str, dataset: str, **more: Any) -> Fields:
    return {LIKE: family, "reward_fn": {reward: 1.0}, "dataset": f"dataset/{dataset}", **more}


def _counting(family: str, kept: float) -> Fields:
    """`kept`: the weight of what an edit has to leave as it was: Flow-GRPO's image_similarity."""
    rewards = {"geneval": 1 - kept, "keep_source": kept}
    options = {"keep_source": {"model": "openai/clip-vit-large-patch14"}}
    return {
        **{LIKE: family, "reward_fn": rewards, "reward_options": options},
        **{"dataset": "dataset/counting_edit", "prompt_fn": "metadata"},
    }


def _few(model: str, **more: Any) -> Fields:
    return _task("_few", "pickscore", "pickscore", pretrained={"model": model}, **more)


SD3: dict[str, Fields] = {
    "general_ocr_sd3": _task("_sd3", "ocr", "ocr_full"),
    "geneval_sd3": _task("_sd3", "geneval", "geneval", prompt_fn="metadata"),
    # A preference model is hacked later than OCR, and a strong leash keeps it from improving.
    "pickscore_sd3": _task("_sd3", "pickscore", "pickscore", train={"beta": 0.01}),
    "clipscore_sd3": _task(
        *("_sd3", "clipscore", "pickscore"), train={"beta": 0.02}, sample={"same_latent": True}
    ),
}
LARGE: dict[str, Fields] = {
    "general_ocr_flux": _task("_flux", "ocr", "ocr_full"),
    "pickscore_flux": _task("_flux", "pickscore", "pickscore"),
    "general_ocr_qwen_image": _task("_qwen_image", "ocr", "ocr_full"),
    "pickscore_qwen_image": _task("_qwen_image", "pickscore", "pickscore"),
    # Edits that change how many things there are, and keep the rest.
    "counting_flux_kontext": _counting("_kontext", 0.5),
    "counting_qwen_image_edit": _counting("_qwen_image_edit", 0.2),
    "counting_qwen_image_edit_fast": {
        LIKE: "counting_qwen_image_edit",
        "sample": {"noise_level": 1.5, "sde_window_size": 4},
    },
    "pickscore_z_image": _task("_z_image", "pickscore", "pickscore"),
    "pickscore_sd3_turbo": _few("stabilityai/stable-diffusion-3.5-large-turbo"),
    "pickscore_flux_schnell": _few("black-forest-labs/FLUX.1-schnell", max_sequence_length=256),
    "pickscore_flux2_klein": _few("black-forest-labs/FLUX.2-klein-4B"),
    "pickscore_z_image_turbo": _few(
        "Tongyi-MAI/Z-Image-Turbo",
        sample={"num_steps": 8, "eval_num_steps": 8, "guidance_scale": 0.0},
    ),
    "wan_ocr": _task("_wan", "ocr", "ocr_full"),
    "wan_pickscore": _task("_wan", "pickscore", "pickscore"),
    "pickscore_wan22_a14b": _task("_wan22_a14b", "pickscore", "pickscore"),
    "pickscore_wan_i2v": _task("_wan_i2v", "pickscore", "sharegpt4o_image_mini"),
    "wan_14b_ocr": _task("_wan_14b", "ocr", "ocr_full"),
}

FAST_BATCHES: Fields = {BATCHES: {"groups": 64, "group_size": 18, "max_batch": 9}}
NFT_BATCHES: Fields = {BATCHES: {"groups": 48, "group_size": 24, "max_batch": 9, "updates": 1}}
DGPO_BATCHES: Fields = {BATCHES: {"groups": 8, "group_size": 16, "max_batch": 12, "updates": 1}}
# The weights learn what guidance would add.
UNGUIDED: Fields = {"solver": "dpm2", "same_latent": False, "guidance_scale": 1.0}
# What can be made of a preset of SD3: other methods, fewer trained steps. Where nothing was
# published for CLIPScore, it takes PickScore's.
VARIANTS: dict[str, Fields] = {
    # Noise and training on two steps only, after which a group goes separate ways.
    "fast": {
        **FAST_BATCHES,
        "sample": {
            **{"same_latent": True, "noise_level": 0.8},
            **{"sde_window_size": 2, "sde_window_range": (0, 7)},
        },
        "train": {"clip_range": 1e-5, "beta": 0.0},
    },
    # Flow-GRPO-Fast without guidance, and so at a quarter of the cost.
    "fast_nocfg": {
        PREFERENCE: FAST_BATCHES,
        "sample": {
            **{"same_latent": False, "guidance_scale": 1.0, "sde_type": "cps", "noise_level": 0.8},
            **{"sde_window_size": 3, "sde_window_range": (0, 5)},
        },
        "train": {"clip_range": 1e-5, "beta": 0.0},
    },
    "guard": {
        "algorithm": "grpo_guard",
        "grpo_guard": {"clip_range": 2e-6},
        PREFERENCE: {"grpo_guard": {"clip_range": 4e-6}},
        "sample": {"global_std": False, "same_latent": False},
        "train": {"learning_rate": 1e-4},
    },
    "mix": {
        "algorithm": "mix",
        "mix": {"beta": 0.0},
        "sample": {"num_steps": 25, "same_latent": True},
    },
    "nft": {
        "algorithm": "nft",
        OCR: {"nft": {"beta": 0.1, "old_rate": 0.0075, "old_start": 75, "old_most": 0.999}},
        GENEVAL: NFT_BATCHES,
        PREFERENCE: NFT_BATCHES,
        "sample": UNGUIDED,
        "train": {"ema_update_interval": 1},
    },
    "awm": {
        "algorithm": "awm",
        "awm": {"kl_beta": 0.001, "skip_first": 1, "skip_last": 2},
        BATCHES: {"groups": 72, "group_size": 24, "max_batch": 9, "updates": 1},
        OCR: {"awm": {"kl_beta": 0.003}},
        PREFERENCE: {
            "awm": {"kl_beta": 0.0001, "skip_first": 0},
            BATCHES: {"groups": 24, "group_size": 24, "max_batch": 9, "updates": 1},
        },
        "sample": {**UNGUIDED, "num_steps": 14},
        "train": {"ema_decay": 0.99, "ema_update_interval": 1},
    },
    # Guided rollouts, and training without guidance, which is the authors' choice.
    "dgpo": {
        "algorithm": "dgpo",
        "mixed_precision": "bf16",
        "dgpo": {"train_guidance": 1.0, "times": 4, "skip_last": 3, "old_after": 200},
        "sample": {"solver": "dpm2", "same_latent": False, "eval_num_steps": 14},
        "train": {"lora_rank": 64, "lora_alpha": 128},
        OCR: DGPO_BATCHES,
        GENEVAL: {
            "dgpo": {"skip_last": 5, "old_after": 500},
            "sample": {"global_std": False},
            **DGPO_BATCHES,
        },
        PREFERENCE: {
            "dgpo": {"beta": 10.0, "kl_beta": 0.001, "clip_range": 5e-2},
            BATCHES: {"groups": 8, "group_size": 24, "max_batch": 12, "updates": 1},
        },
    },
    # Guidance of the reference alone: without it, it would hold back what replaces guidance.
    "dgpo_nocfg": {
        LIKE: "dgpo",
        "dgpo": {"kl_guidance": 4.5, "clip_range": 1e-3},
        "sample": {"guidance_scale": 1.0, "eval_num_steps": 10},
    },
}


def _varied(preset: str, variant: str) -> Fields:
    fields = VARIANTS[variant]
    return {**fields, LIKE: f"{preset}_{fields[LIKE]}" if LIKE in fields else preset}


def _benchmark(family: str, model: str, batch: int, batches: int = 2, **more: Any) -> Fields:
    """What docs/performance.md and docs/models.md time: random weights, which
    scripts/benchmark.py makes up, and as many samples as `batches` hold, in two updates."""
    sample = {"num_image_per_prompt": batch, "train_batch_size": batch, **more.pop("sample", {})}
    return {
        LIKE: family,
        "pretrained": {"model": model},
        GPU: {"mixed_precision": "bf16"},
        CPU: {"mixed_precision": "no"},
        "dataset": "dataset/ocr",
        "sample": {"num_batches_per_epoch": batches, **sample},
        "train": {"batch_size": batch, "gradient_accumulation_steps": batches // 2},
        **more,
    }


BENCHMARKS: dict[str, Fields] = {
    "benchmark_sd3": _benchmark("_sd3", "sd3.5-medium", 9, 4),
    # with as many tokens as when it was timed
    "benchmark_flux": _benchmark("_flux", "flux.1-dev", 4, max_sequence_length=512),
    "benchmark_qwen_image": _benchmark("_qwen_image", "qwen-image", 4),
    # with as many steps as when it was timed
    "benchmark_z_image": _benchmark(
        *("_z_image", "z-image", 6),
        sample={"num_steps": 8, "sde_window_size": 2, "sde_window_range": (0, 4)},
    ),
    # with a picture to start from, of the size that is drawn
    "benchmark_flux_kontext": _benchmark(
        "_kontext", "flux.1-kontext-dev", 4, max_sequence_length=512, dataset="dataset/edits"
    ),
    "benchmark_qwen_image_edit": _benchmark(
        *("_qwen_image_edit", "qwen-image-edit", 4),
        dataset="dataset/edits",
        sample={"sde_window_size": 2},
    ),
    "benchmark_flux2_klein": _benchmark("_few", "flux.2-4b-klein", 4),
    "benchmark_wan": _benchmark("_wan", "wan2.1-1.3b", 1),
    "benchmark_wan_14b": _benchmark("_wan_14b", "wan2.1-14b", 1),
    "benchmark_wan22_5b": _benchmark("_wan", "wan2.2-5b", 1),
    "benchmark_wan22_a14b": _benchmark("_wan22_a14b", "wan2.2-a14b", 1),
}

PRESETS: dict[str, Fields] = {
    **{**TINY, **SD3, **LARGE},
    **{f"{p}_{v}": _varied(p, v) for p in SD3 for v in VARIANTS},
    **BENCHMARKS,
}
MODELS = models_of(FAMILIES, PRESETS)


def check_preset(name: str) -> None:
    preset, gpus = _parts(name)
    ending = f"_{gpus}gpu" if gpus else ""
    if preset in old_names.PRESETS:
        raise UserError(f"unknown preset {name!r}; it is {old_names.PRESETS[preset]}{ending} here")
    if preset not in PRESETS and (near := nearest(preset, PRESETS)):
        raise UserError(f"unknown preset {name!r}; did you mean {near}{ending}?")
    if not preset:
        raise UserError(f"name a preset: config/grpo.py:NAME; there are {', '.join(PRESETS)}")
    if preset not in PRESETS:
        raise UserError(f"unknown preset {name!r}; config/grpo.py has {', '.join(PRESETS)}")
    launched = planned_processes()
    if gpus is not None and launched is not None and int(gpus) != launched:
        raise UserError(
            f"preset {name!r} is for {gpus} GPUs but {launched} processes were planned; leave "
            f"out the suffix _{gpus}gpu, or start {gpus}"
        )


def _parts(name: str) -> tuple[str, str | None]:
    """What it is called, and for how many GPUs."""
    return re.fullmatch(r"(?s)(.*?)(?:_([1-9]\d{0,5})gpu)?", str(name)).groups()


def get_config(name: str = "") -> ConfigDict:
    check_preset(name)
    preset, gpus = _parts(name)
    config = _resolve(preset, planned_processes() or int(gpus or 1))
    find_files(config)
    return config


def _resolve(preset: str, gpus: int) -> ConfigDict:
    def batches(config: ConfigDict, numbers: dict[str, int]) -> None:
        per_gpu_batches(config, gpus=gpus, **numbers)

    def all_batches(config: ConfigDict, numbers: dict[str, int]) -> None:
        batches(config, numbers)
        config.sample.test_batch_size = config.sample.train_batch_size

    def in_case(case: str) -> Callable[[ConfigDict, Fields], None]:
        return lambda config, fields: CASES[case](config) and apply(fields, config, special)

    special = {
        "algorithm": _set_algorithm,
        BATCHES: batches,
        ALL_BATCHES: all_batches,
        **{case: in_case(case) for case in CASES},
    }
    return resolve(preset, {**FAMILIES, **PRESETS}, base_config(), special)


def _set_algorithm(config: ConfigDict, name: str) -> None:
    """The fields of grpo go back to their defaults: they would have no effect."""
    config.algorithm = name
    config.grpo.update(base_config().grpo.to_dict())


def per_gpu_batches(
    config: ConfigDict, *, gpus: int, groups: int, group_size: int, max_batch: int, updates: int = 2
) -> None:
    """Set the batch numbers of `config` for an epoch of `groups` x `group_size` samples.

    Per GPU: the largest batch up to `max_batch` that leaves whole batches, and as many of them
    for each of the `updates` of an epoch. The result is the same epoch on any number of GPUs.
    """
    samples = groups * group_size
    if samples % (gpus * updates):
        raise UserError(
            f"{groups} groups x {group_size} images = {samples} samples do not divide over "
            f"{gpus} GPUs x {updates} updates per epoch; use a number of GPUs that does"
        )
    per_update = samples // (gpus * updates)
    batch = max(b for b in range(1, max_batch + 1) if per_update % b == 0)
    config.sample.num_image_per_prompt = group_size
    config.sample.train_batch_size = config.train.batch_size = batch
    config.sample.num_batches_per_epoch = per_update * updates // batch
    config.train.gradient_accumulation_steps = per_update // batch
