"""Names in Flow-GRPO's configs that are others here, or gone, which docs/migrating.md says more of;
and those of TRL and EasyR1 for fields of models that answer: docs/vlm.md."""

from collections.abc import Collection, Container, Mapping
from typing import Any

RENAMED = {  # its field: ours
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
GONE = {  # its field: what to do instead
    "debug": "leave it out; --debug shows the traceback of a mistake",
    "diffusion_loss": "leave it out; --config.algorithm=sft trains a flow-matching loss",
    "per_prompt_stat_tracking": "leave it out: advantages always compare samples of one prompt",
    "prompt_fn_kwargs": "leave it out: prompts come from the files that dataset names",
    "sample.deterministic": (
        "leave it out: steps outside sample.sde_window_size have no noise, nor has any step of "
        "algorithm=nft or awm"
    ),
    "sample.kl_reward": "leave it out: train.beta weighs the KL, in the loss",
    "sample.sample_time_per_prompt": "leave it out and multiply sample.num_image_per_prompt by it",
    "train.ref_update_step": (
        "leave it out: --config.anchors.reset_epochs=20 sets the reference to the policy every 20 "
        "epochs, and samples are always the policy's"
    ),
    "train.sft": (
        "leave it out: --config.anchors.data=FOLDER trains on images of yours beside the samples, "
        "with the weight anchors.data_weight; --config.algorithm=sft on the best of each group"
    ),
    "train.sft_batch_size": "leave it out: train.batch_size is that of every algorithm",
    "train.timestep_shift": "leave it out: the shift is that of the model's own scheduler",
}
OF_ANSWERS = {  # TRL's, EasyR1's, verl's and LMM-R1's, without their sections: ours
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
REWARDS = {  # ours, and its options
    "video_ocr": ("ocr", {"frames": "mean of 4"}),
    "image_similarity": ("keep_source", {"model": "openai/clip-vit-large-patch14"}),
}
TOLD = "{}={} has a name of Flow-GRPO's"
NONE: Mapping[str, Any] = {}
PRESETS = {
    "general_ocr_wan2_1": "wan_ocr",
    "pickscore_qwenimage": "pickscore_qwen_image",
}


def hint(field: str, known: Container[str] = (), chosen: Mapping[str, Any] = NONE) -> str:
    """What to write instead of a field of Flow-GRPO's, or of another's that is `known` here by its
    own name; nothing where it is none. `chosen` are fields that have a value already."""
    if (ours := RENAMED.get(field)) in chosen:
        return f"leave it out: it is {ours} here, which is {chosen[ours]!r}"
    if field in RENAMED:
        return f"it is {RENAMED[field]} here"
    ours = OF_ANSWERS.get(field.rpartition(".")[2])
    return f"it is {ours} here" if ours in known else GONE.get(field, "")


def ours(field: str, value: Any, own: Container[str] = ()) -> dict[str, Any] | None:
    """What to write in the place of a field of Flow-GRPO's, or of a value: fields and their values,
    none where it is gone; None for all that is not Flow-GRPO's. `own` are rewards of the user's."""
    if field in GONE:
        return {}
    if field in RENAMED:
        return {RENAMED[field]: value}
    if field == "prompt_fn" and isinstance(value, str) and value in PROMPT_FNS:
        return {field: PROMPT_FNS[value]}
    if field not in ("reward_fn", "eval_reward_fn") or not isinstance(value, Mapping):
        return None
    old = {name: REWARDS[name] for name in value if name in REWARDS and name not in own}
    weights = {old[name][0] if name in old else name: weight for name, weight in value.items()}
    return {field: weights, "reward_options": dict(old.values())} if old else None


def among(
    given: Mapping[str, Any], known: Collection[str], chosen: Container[str] = ()
) -> dict[str, dict[str, Any]]:
    """All that is Flow-GRPO's among these fields, with what to write in its place; `known` are
    those that there are here, `chosen` those of them that have a value already."""
    named = (given.get(name) for name in ("custom_rewards", "reward_servers"))
    own = [n for each in named if isinstance(each, Mapping) for n, place in each.items() if place]
    new = {
        name: {} if RENAMED.get(name) in chosen else ours(name, value, own)
        for name, value in given.items()
    }
    valued = ("prompt_fn", "reward_fn", "eval_reward_fn")
    return {
        name: each
        for name, each in new.items()
        if each is not None and (name in valued or name not in known) and {*each} <= {*known}
    }
