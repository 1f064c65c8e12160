"""Settings of other trainers and of earlier versions, and what to write instead.

For Flow-GRPO see docs/migrating.md; for TRL, EasyR1, verl and LMM-R1 see docs/vlm/README.md.
"""

from collections.abc import Collection, Container, Mapping
from pathlib import Path
from typing import Any

from flow_grpo.errors import UserError

RENAMED_FIELDS = {  # Flow-GRPO's name: ours
    "save_dir": "logdir",
    "resume_from": "resume",
    "activation_checkpointing": "train.gradient_checkpointing",
    "fsdp_optimizer_offload": "train.offload_optimizer",
    "sample.batch_size": "sample.train_batch_size",
    "sample.mini_num_image_per_prompt": "sample.train_batch_size",
    "sample.train_num_steps": "sample.sde_window_size",
    "train.algorithm": "algorithm",
    "train.clip_range_lt": "train.clip_range_low",
    "train.clip_range_gt": "train.clip_range_high",
}
UNSUPPORTED_FIELDS = {  # Flow-GRPO's name: what to do instead
    "debug": "omit it; --debug shows the traceback of an error",
    "diffusion_loss": "omit it; --config.algorithm=sft trains a flow-matching loss",
    "per_prompt_stat_tracking": "omit it: advantages always compare samples of one prompt",
    "prompt_fn_kwargs": "omit it: prompts are read from the files of dataset",
    "sample.deterministic": (
        "omit it: steps outside sample.sde_window_size are deterministic, as are all steps of "
        "algorithm=nft or awm"
    ),
    "sample.kl_reward": "omit it: train.beta is the weight of the KL, in the loss",
    "sample.sample_time_per_prompt": "omit it and multiply sample.num_image_per_prompt by it",
    "train.ref_update_step": (
        "omit it: --config.anchors.reset_epochs=20 resets the reference to the policy every 20 "
        "epochs, and rollouts always use the policy"
    ),
    "train.sft": (
        "omit it: --config.anchors.data=FOLDER also trains on your images, with the weight "
        "anchors.data_weight; --config.algorithm=sft trains on the best sample of each group"
    ),
    "train.sft_batch_size": "omit it: train.batch_size applies to every algorithm",
    "train.timestep_shift": "omit it: the model's scheduler defines the shift",
}
VLM_FIELDS = {  # name in TRL, EasyR1, verl or LMM-R1, without its section: ours
    "lr": "train.learning_rate",
    "num_generations": "sample.group_size",
    "rollout_batch_size": "sample.questions_per_epoch",
    "max_completion_length": "sample.max_new_tokens",
    "max_response_length": "sample.max_new_tokens",
    "epsilon": "train.clip_low",
    "epsilon_high": "train.clip_high",
    "clip_ratio_low": "train.clip_low",
    "clip_ratio_high": "train.clip_high",
    "clip_ratio_dual": "train.dual_clip",
    "adv_estimator": "train.advantage",
    "kl_coef": "train.beta",
    "loss_avg_mode": "train.aggregation",
    "num_iterations": "train.num_inner_epochs",
    "freeze_vision_tower": "train.freeze_vision",
    "kl_penalty": "train.kl",
    "kl_estimator": "train.kl",
    "lam": "train.gae_decay",
    "lambd": "train.gae_decay",
    "gamma": "train.discount",
    "prompt_key": "input_key",
    "label_key": "answer_key",
    "critic_learning_rate": "train.critic_learning_rate",
    "critic_warmup": "train.critic_warmup",
    "freezing_actor_steps": "train.critic_warmup",
}
PROMPT_FNS = {"general_ocr": "text", "geneval": "metadata"}
RENAMED_REWARDS = {  # Flow-GRPO's name: ours, and its options
    "video_ocr": ("ocr", {"frames": "mean of 4"}),
    "image_similarity": ("keep_source", {"model": "openai/clip-vit-large-patch14"}),
}
OLD_NAME_MESSAGE = "{}={} uses a name of Flow-GRPO"
RENAMED_PRESETS = {
    "general_ocr_wan2_1": "wan_ocr",
    "pickscore_qwenimage": "pickscore_qwen_image",
}
# Settings of earlier versions that were removed, with the value that gives today's behaviour.
REMOVED_FIELDS: dict[str, Any] = {"sample.merge_lora": False}


def check_removed_fields(path: Path, saved: Mapping[str, Any], known: Container[str]) -> None:
    """Reject the config of an earlier version if a setting that was removed changed its result.

    Args:
        path: The config.json, for the message.
        saved: Its settings by their full names.
        known: Settings that exist here.
    """
    for name, today in REMOVED_FIELDS.items():
        if name not in known and saved.get(name, today) != today:
            raise UserError(
                f"has {name}={saved[name]!r}, a setting that was removed",
                field=path,
                hint=f"set it to {today!r} there to resume with today's behaviour",
            )


def field_hint(
    field: str, known: Container[str] = (), chosen: Mapping[str, Any] | None = None
) -> str:
    """Return what to write instead of a setting of another trainer or an earlier version, or "".

    Args:
        field: The unknown setting.
        known: Settings that exist here.
        chosen: Settings that already have a value.
    """
    if field in REMOVED_FIELDS:
        return f"omit it: it was removed; all runs behave as with {REMOVED_FIELDS[field]!r}"
    if chosen and (ours := RENAMED_FIELDS.get(field)) in chosen:
        return f"omit it: it is called {ours} here, which is {chosen[ours]!r}"
    if field in RENAMED_FIELDS:
        return f"it is called {RENAMED_FIELDS[field]} here"
    ours = VLM_FIELDS.get(field.rpartition(".")[2])
    return f"it is called {ours} here" if ours in known else UNSUPPORTED_FIELDS.get(field, "")


def translate_fields(
    given: Mapping[str, Any], known: Collection[str], chosen: Container[str] = ()
) -> dict[str, dict[str, Any]]:
    """Translate the settings of Flow-GRPO and of earlier versions in `given`.

    Args:
        given: Settings and their values.
        known: Settings that exist here.
        chosen: Those that already have a value, which a translation does not override.

    Returns:
        Our settings and values for each of them; empty for one that has to be omitted.
    """
    named = (given.get(name) for name in ("custom_rewards", "reward_servers"))
    custom = [
        n for each in named if isinstance(each, Mapping) for n, place in each.items() if place
    ]
    translations = {}
    for name, value in given.items():
        new = {} if RENAMED_FIELDS.get(name) in chosen else _translate_field(name, value, custom)
        is_foreign = name not in known or name in ("prompt_fn", "reward_fn", "eval_reward_fn")
        if is_foreign and new is not None and {*new} <= {*known}:
            translations[name] = new
    return translations


def _translate_field(field: str, value: Any, custom: Container[str]) -> dict[str, Any] | None:
    """Return our settings and values, or None; names of custom rewards are not translated."""
    if field in UNSUPPORTED_FIELDS or field in REMOVED_FIELDS:
        return {}
    if field in RENAMED_FIELDS:
        return {RENAMED_FIELDS[field]: value}
    if field == "prompt_fn" and isinstance(value, str) and value in PROMPT_FNS:
        return {field: PROMPT_FNS[value]}
    if field not in ("reward_fn", "eval_reward_fn") or not isinstance(value, Mapping):
        return None
    renamed = {n: RENAMED_REWARDS[n] for n in value if n in RENAMED_REWARDS and n not in custom}
    weights = {renamed[n][0] if n in renamed else n: weight for n, weight in value.items()}
    return {field: weights, "reward_options": dict(renamed.values())} if renamed else None
