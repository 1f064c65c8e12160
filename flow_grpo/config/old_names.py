"""Names in Flow-GRPO's configs that are others here, or gone, which docs/migrating.md says more of;
and those of TRL and EasyR1 for fields of models that answer: docs/vlm.md."""

from collections.abc import Container
from typing import Any

from flow_grpo.errors import UserError

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
        "leave it out: the reference is always the model that the run started from"
    ),
    "train.sft": "leave it out: --config.algorithm=sft trains on the best sample of each group",
    "train.sft_batch_size": "leave it out: train.batch_size is that of every algorithm",
    "train.timestep_shift": "leave it out: the shift is that of the model's own scheduler",
}
OF_ANSWERS = {  # TRL's and EasyR1's, without their sections: ours
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
    "lam": "train.gae_decay",
    "gamma": "train.discount",
}
PROMPT_FNS = {"general_ocr": "text", "geneval": "metadata"}
REWARDS = {"video_ocr": ("ocr", "{'ocr': {'frames': 'mean of 4'}}")}  # ours, and its options
PRESETS = {
    "general_ocr_wan2_1": "wan_ocr",
    "pickscore_qwenimage": "pickscore_qwen_image",
}


def hint(field: str, known: Container[str] = ()) -> str:
    """What to write instead of a field of Flow-GRPO's, or of another's that is `known` here by its
    own name; nothing where it is none."""
    if field in RENAMED:
        return f"it is {RENAMED[field]} here"
    ours = OF_ANSWERS.get(field.rpartition(".")[2])
    return f"it is {ours} here" if ours in known else GONE.get(field, "")


def check_values(settings: Any) -> None:
    """Refuse Flow-GRPO's values of fields that have other values here under the same name."""
    if settings.prompt_fn in PROMPT_FNS:
        raise UserError(
            f"prompt_fn={settings.prompt_fn!r} is Flow-GRPO's name; set "
            f"--config.prompt_fn={PROMPT_FNS[settings.prompt_fn]}"
        )
    own = {*settings.custom_rewards, *(n for n, url in settings.reward_servers.items() if url)}
    for field in ("reward_fn", "eval_reward_fn"):
        for name in getattr(settings, field):
            if name in REWARDS and name not in own:
                ours, options = REWARDS[name]
                raise UserError(
                    f"{field}: {name!r} is Flow-GRPO's name; use {ours!r}, with "
                    f'--config.reward_options="{options}"'
                )
