"""Settings of the diffusion trainers built on verl.

MM-GRPO: github.com/leibniz-csi/mm_grpo at 301f5c0, gerl/trainer/config/**.yaml. verl's own trainer
of pull request 5951: github.com/verl-project/verl at 2456339, examples/flowgrpo_trainer. Its
successor: github.com/verl-project/verl-omni at a1139ba,
verl_omni/trainer/config/_generated_diffusion_trainer.yaml. Batches count prompts
(gerl/workers/diffusers_fsdp_workers.py, lines 223 and 224). A list of rewards is weighted equally
(gerl/utils/reward_score/__init__.py, lines 53 to 61).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from flow_grpo.config.migration.counterparts import (
    DIFFUSION,
    Project,
    Settings,
    derived,
    none,
    parse_value,
    to,
    value_of,
)
from flow_grpo.config.migration.verl import (
    ACTOR,
    COMMON,
    COMMON_GROUPS,
    MODEL,
    ROLLOUT,
    derive_common,
)

REWARDS = {  # gerl/utils/reward_score/multi.py, lines 25 to 35
    "paddle-ocr": "ocr",
    "qwenvl-ocr-vllm": "qwenvl_ocr",
    "unified-reward-vllm": "unifiedreward",
    "pickscore": "pickscore",
    "qwenvl": "qwenvl",
    "qwenvl-vllm": "qwenvl",
    "aesthetic": "aesthetic",
    "jpeg-compressibility": "jpeg_compressibility",
    "jpeg-imcompressibility": "jpeg_incompressibility",
}
REWARD_FUNCTIONS = {"compute_score_ocr": "qwenvl_ocr"}  # verl: a judge reads the text
ALGORITHMS = {
    "flow_grpo": "grpo",
    "dance_grpo": {"algorithm": "grpo", "sample.sde_type": "dance"},
    "mix_grpo": "mix",
    "grpo_guard": "grpo_guard",
    "flow_dppo": "dppo",
    "diffusion_nft": "nft",
    "dpo": "dpo",
}
SDE_TYPES = {"sde": "flow", "cps": "cps", "dance_sde": "dance", "dance": "dance"}
NOISELESS = none("evaluation adds no noise", 0, 0.0)

KEYS = {
    **COMMON,
    "data.train_batch_size": derived("sample.num_batches_per_epoch"),
    "data.val_max_samples": derived("eval_prompts"),
    "data.max_prompt_length": to("max_sequence_length"),
    "data.prompt_key": to("dataset_column"),
    "data.truncation": none("prompts are truncated to max_sequence_length", "none", "error"),
    "data.data_source": none("prompt_fn=auto detects the format of the dataset"),
    "data.reward_fn": derived("reward_fn"),
    "reward.custom_reward_function.name": derived("reward_fn"),
    "algorithm.adv_estimator": to("train.advantage", {"flow_grpo": "grpo"}),
    "algorithm.norm_adv_by_std_in_grpo": to("train.advantage", {True: {}, False: "dr_grpo"}),
    "algorithm.global_std": to("sample.global_std"),
    "algorithm.timestep_fraction": to("train.timestep_fraction"),
    "algorithm.rollout_correction.bypass_mode": none(
        "the ratio before the first update is exactly 1", True, False
    ),
    f"{MODEL}.algorithm": to("algorithm", ALGORITHMS),
    f"{MODEL}.attn_backend": none("diffusers chooses the attention kernel"),
    f"{ACTOR}.policy_loss.loss_mode": to("algorithm", ALGORITHMS),
    f"{ACTOR}.diffusion_loss.loss_mode": to("algorithm", ALGORITHMS),
    f"{ACTOR}.diffusion_loss.clip_ratio": to("train.clip_range"),
    f"{ACTOR}.diffusion_loss.adv_clip_max": to("train.adv_clip_max"),
    f"{ACTOR}.diffusion_loss.dpo_beta": to("dpo.beta"),
    f"{ACTOR}.diffusion_loss.kl_mask_threshold": to("dppo.delta"),
    f"{ACTOR}.clip_ratio": to("train.clip_range"),
    f"{ACTOR}.clip_max": to("train.adv_clip_max"),
    f"{ACTOR}.use_kl_loss": derived("train.beta"),
    f"{ACTOR}.kl_loss_coef": derived("train.beta"),
    f"{ACTOR}.ppo_mini_batch_size": derived("train.gradient_accumulation_steps"),
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": derived("sample.train_batch_size"),
    f"{ACTOR}.fsdp_config.model_dtype": to(
        "mixed_precision", {"bfloat16": "bf16", "float16": "fp16", "fp32": {}}
    ),
    f"{ROLLOUT}.n": to("sample.num_image_per_prompt"),
    f"{ROLLOUT}.guidance_scale": to("sample.guidance_scale"),
    f"{ROLLOUT}.true_cfg_scale": to("sample.guidance_scale"),
    f"{ROLLOUT}.pipeline.guidance_scale": to("sample.guidance_scale"),
    f"{ROLLOUT}.pipeline.true_cfg_scale": to("sample.guidance_scale"),
    f"{ROLLOUT}.num_inference_steps": to("sample.num_steps"),
    f"{ROLLOUT}.pipeline.num_inference_steps": to("sample.num_steps"),
    f"{ROLLOUT}.val_kwargs.num_inference_steps": to("sample.eval_num_steps"),
    f"{ROLLOUT}.val_kwargs.pipeline.num_inference_steps": to("sample.eval_num_steps"),
    f"{ROLLOUT}.val_kwargs.pipeline.guidance_scale": to("sample.eval_guidance_scale"),
    f"{ROLLOUT}.val_kwargs.pipeline.true_cfg_scale": to("sample.eval_guidance_scale"),
    f"{ROLLOUT}.val_kwargs.noise_level": NOISELESS,
    f"{ROLLOUT}.val_kwargs.algo.noise_level": NOISELESS,
    f"{ROLLOUT}.val_kwargs.n": none("each test prompt is sampled once", 1),
    f"{ROLLOUT}.noise_level": to("sample.noise_level"),
    f"{ROLLOUT}.algo.noise_level": to("sample.noise_level"),
    f"{ROLLOUT}.sde_type": to("sample.sde_type", SDE_TYPES),
    f"{ROLLOUT}.algo.sde_type": to("sample.sde_type", SDE_TYPES),
    f"{ROLLOUT}.sde_window_size": derived("sample.sde_window_size"),
    f"{ROLLOUT}.algo.sde_window_size": derived("sample.sde_window_size"),
    f"{ROLLOUT}.sde_window_range": derived("sample.sde_window_range"),
    f"{ROLLOUT}.algo.sde_window_range": derived("sample.sde_window_range"),
    f"{ROLLOUT}.image_height": to("height"),
    f"{ROLLOUT}.image_width": to("width"),
    f"{ROLLOUT}.pipeline.height": to("height"),
    f"{ROLLOUT}.pipeline.width": to("width"),
    f"{ROLLOUT}.pipeline.num_frames": to("frames"),
    f"{ROLLOUT}.max_sequence_length": to("max_sequence_length"),
    f"{ROLLOUT}.pipeline.max_sequence_length": to("max_sequence_length"),
    f"{ROLLOUT}.with_reward": none("rewards are computed during the rollout", True),
    f"{ROLLOUT}.mode": none("sample.async_depth overlaps rollouts and training", "sync", "async"),
    f"{ROLLOUT}.name": none("sampling uses diffusers", "diffusers"),
    f"{ROLLOUT}.seed": to("seed"),
    f"{ROLLOUT}.dtype": to("mixed_precision", {"bfloat16": "bf16", "float16": "fp16"}),
    "actor_rollout_ref.async_strategy": none("sample.async_depth=1 is one step off policy"),
    "actor_rollout_ref.hybrid_engine": none("every GPU samples and trains", True),
    "trainer.total_epochs": none(
        "num_epochs counts rollouts: set it to epochs * prompts / groups per epoch"
    ),
}
GROUPS = {
    **COMMON_GROUPS,
    f"{ACTOR}.veomni_config.*": "there is no VeOmni engine",
    "algorithm.old_policy_*": "see the algorithm's section, such as nft.old_max_decay",
    "algorithm.*": "no counterpart",
    "distillation.*": "see on-policy distillation in docs/methods",
    "diffusion/model_engine": "the accelerate config selects DDP, DeepSpeed or FSDP2",
}
DEFAULTS = {
    f"{ROLLOUT}.n": 8,
    "trainer.n_gpus_per_node": 8,
    "trainer.test_freq": -1,
    "trainer.save_freq": -1,
    "trainer.resume_mode": "auto",
    f"{MODEL}.lora_rank": 32,
}


def derive(given: Mapping[str, Any]) -> Settings:
    """Compute our settings that depend on several of its settings together."""
    ours = {**derive_common(given), **_derive_batches(given), **_derive_rewards(given)}
    if f"{ACTOR}.use_kl_loss" in given or f"{ACTOR}.kl_loss_coef" in given:
        is_used = given.get(f"{ACTOR}.use_kl_loss", True)
        ours["train.beta"] = given.get(f"{ACTOR}.kl_loss_coef", 0.04) if is_used else 0.0
    if (rows := value_of(given, "data.val_max_samples", -1)) > 0:
        ours["eval_prompts"] = int(rows)
    for name in ("sde_window_size", "sde_window_range"):
        value = given.get(f"{ROLLOUT}.algo.{name}", given.get(f"{ROLLOUT}.{name}"))
        if value is not None:
            ours[f"sample.{name}"] = tuple(value) if isinstance(value, list | tuple) else value
    return ours


def _derive_batches(given: Mapping[str, Any]) -> Settings:
    """Return our batches: prompts per step become batches of images per GPU and epoch."""
    prompts, size = value_of(given, "data.train_batch_size"), value_of(given, f"{ROLLOUT}.n", 8)
    gpus = value_of(given, "trainer.n_gpus_per_node", 8) * value_of(given, "trainer.nnodes", 1)
    if not prompts or not gpus:
        return {}
    images = int(prompts * size / gpus)  # per GPU
    batch = math.gcd(images, int(value_of(given, f"{ACTOR}.ppo_micro_batch_size_per_gpu", 8))) or 1
    batches = images // batch
    mini = value_of(given, f"{ACTOR}.ppo_mini_batch_size") or prompts
    updates = max(1, round(prompts / mini))
    return {
        "sample.train_batch_size": batch,
        "train.batch_size": batch,
        "sample.num_batches_per_epoch": batches,
        "train.gradient_accumulation_steps": max(1, batches // updates),
    }


def weigh_equally(names: Sequence[str]) -> dict[str, float]:
    """Return `reward_fn` for a list of rewards, by MM-GRPO's names or ours."""
    return {REWARDS.get(name, name): 1 / len(names) for name in names}


def weigh_listed_rewards(arg: str) -> str:
    """Return --config.reward_fn with weights if it is a list of names, as in MM-GRPO."""
    option, _, text = arg.partition("=")
    if option not in ("--config.reward_fn", "--config.eval_reward_fn") or text[:1] != "[":
        return arg
    names = parse_value(text)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return arg
    return f"{option}={weigh_equally(names)}"


def _derive_rewards(given: Mapping[str, Any]) -> Settings:
    """Return `reward_fn`: equal weights for a list of rewards."""
    names = given.get("data.reward_fn") or []
    weights = weigh_equally([names] if isinstance(names, str) else names)
    function = given.get("reward.custom_reward_function.name")
    if not weights and function in REWARD_FUNCTIONS:
        weights = {REWARD_FUNCTIONS[function]: 1.0}
    return {"reward_fn": weights} if weights else {}


MM_GRPO = Project(
    name="MM-GRPO and verl-omni",
    source="leibniz-csi/mm_grpo@301f5c0 gerl/trainer/config; verl-project/verl-omni@a1139ba "
    "verl_omni/trainer/config/_generated_diffusion_trainer.yaml",
    trainer=DIFFUSION,
    keys=KEYS,
    groups=GROUPS,
    defaults=DEFAULTS,
    derive=derive,
    programs=(
        "gerl.trainer.main_flowgrpo",
        "verl.trainer.main_flowgrpo",
        "verl_omni.trainer.main_diffusion",
    ),
    page="mm_grpo.md",
)
