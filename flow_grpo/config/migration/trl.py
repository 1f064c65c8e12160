"""Options of TRL's GRPO.

Read from github.com/huggingface/trl at f2cd577: trl/trainer/grpo_config.py (lines 418 to 1030),
trl/trainer/model_config.py, trl/scripts/utils.py (ScriptArguments), trl/scripts/grpo.py, and of
transformers' TrainingArguments the options that its examples use.
"""

from collections.abc import Mapping
from typing import Any

from flow_grpo.config.migration.counterparts import (
    VLM,
    Project,
    Settings,
    derived,
    modules_of,
    none,
    to,
    value_of,
)

SAMPLED = "unsupported: rollouts sample the policy without truncation"
NO_SERVER = "generation shares the GPU with training and does not use a server"
NO_ENTROPY = "an entropy bonus is not supported"
ADAPTIVE = "the reference is fixed"
LOADED_BY = "set by transformers when loading the model"
CAP = "see train.importance_cap"

KEYS = {
    "learning_rate": to("train.learning_rate"),
    "num_generations": to("sample.group_size"),
    "max_completion_length": to("sample.max_new_tokens"),
    "max_prompt_length": to("max_prompt_length"),
    "generation_batch_size": derived("sample.questions_per_epoch"),
    "steps_per_generation": derived("train.updates_per_epoch"),
    "per_device_train_batch_size": derived("sample.questions_per_epoch"),
    "gradient_accumulation_steps": derived("train.updates_per_epoch"),
    "temperature": to("sample.temperature"),
    "top_p": none(SAMPLED, 1, 1.0),
    "top_k": none(SAMPLED, 0, None),
    "min_p": none(SAMPLED),
    "repetition_penalty": none(SAMPLED, 1, 1.0),
    "use_vllm": to("sample.engine", {True: "vllm", False: "transformers"}),
    "vllm_mode": none(NO_SERVER, "colocate"),
    "vllm_gpu_memory_utilization": derived("sample.vllm_memory"),
    "vllm_tensor_parallel_size": derived("sample.vllm_tensor_parallel"),
    "beta": to("train.beta"),
    "num_iterations": to("train.num_inner_epochs"),
    "epsilon": derived("train.clip_low"),
    "epsilon_high": derived("train.clip_high"),
    "delta": derived("train.dual_clip"),
    "importance_sampling_level": to("train.loss", {"token": {}, "sequence": "gspo"}),
    "reward_funcs": derived("reward_fn"),
    "reward_weights": derived("reward_fn"),
    "multi_objective_aggregation": to(
        "train.advantage", {"sum_then_normalize": {}, "normalize_then_sum": "gdpo"}
    ),
    "scale_rewards": to(
        "train.advantage_scale",
        {"group": "group", True: "group", "batch": "batch", "none": "none", False: "none"},
    ),
    "loss_type": to(
        "train.aggregation",
        {
            "grpo": "sequence",
            "dapo": "token",
            "bnpo": "token",
            "dr_grpo": "constant",
            "cispo": {"train.loss": "cispo", "train.aggregation": "token"},
            "sapo": {"train.loss": "sapo", "train.aggregation": "sequence"},
        },
    ),
    "model_name_or_path": to("pretrained.model"),
    "model_revision": to("pretrained.revision"),
    "dtype": to("mixed_precision", {"bfloat16": "bf16", "float16": "fp16", "float32": "no"}),
    "bf16": to("mixed_precision", {True: "bf16", False: {}}),
    "fp16": to("mixed_precision", {True: "fp16", False: {}}),
    "use_peft": to("use_lora"),
    "lora_r": derived("train.lora_rank"),
    "lora_alpha": derived("train.lora_alpha"),
    "lora_dropout": none("LoRA dropout is not supported, so that the first ratio is 1", 0, 0.0),
    "lora_target_modules": derived("train.lora_target_modules"),
    "load_in_4bit": to("pretrained.base_precision", {True: "nf4", False: {}}),
    "load_in_8bit": to("pretrained.base_precision", {True: "fp8", False: {}}),
    "dataset_name": to("dataset"),
    "dataset_train_split": none("the dataset's own train and test splits are used", "train"),
    "dataset_test_split": none("the dataset's own train and test splits are used", "test"),
    "output_dir": to("run_name"),
    "run_name": none("output_dir is the counterpart of run_name here"),
    "seed": to("seed"),
    "max_steps": none("num_epochs counts rollouts: divide the updates by train.updates_per_epoch"),
    "num_train_epochs": none(
        "num_epochs counts rollouts: set it to epochs * rows / sample.questions_per_epoch"
    ),
    "save_steps": none("save_freq counts rollouts: divide by train.updates_per_epoch"),
    "eval_steps": none("eval_freq counts rollouts: divide by train.updates_per_epoch"),
    "save_total_limit": to("num_checkpoint_limit"),
    "resume_from_checkpoint": to("resume", {True: "auto", "True": "auto"}),
    "logging_steps": none("every epoch is logged"),
    "report_to": derived("log_with"),
    "gradient_checkpointing": to("train.gradient_checkpointing"),
    "max_grad_norm": to("train.max_grad_norm"),
    "weight_decay": to("train.adam_weight_decay"),
    "adam_beta1": to("train.adam_beta1"),
    "adam_beta2": to("train.adam_beta2"),
    "warmup_steps": to("train.lr_warmup_steps"),
    "lr_scheduler_type": to("train.lr_scheduler", {"constant": "constant", "cosine": "cosine"}),
    "log_completions": none("log_images sets the number of completions saved per evaluation", True),
    "num_completions_to_print": to("log_images"),
    "max_tool_calling_iterations": none("with an environment, use sample.max_turns"),
    "mask_truncated_completions": to("train.mask_truncated"),
    "sapo_temperature_pos": derived("train.tau_positive"),
    "sapo_temperature_neg": derived("train.tau_negative"),
    "remove_unused_columns": none("metadata_columns names the columns that rewards receive", False),
    "shuffle_dataset": none("each pass over the data is shuffled", True),
}
GROUPS = {
    "vllm_importance_sampling_*": CAP,
    "vllm_*": NO_SERVER,
    "entropy_*": NO_ENTROPY,
    "use_adaptive_entropy": NO_ENTROPY,
    "top_entropy_quantile": NO_ENTROPY,
    "vespo_*": "the VESPO loss is not supported",
    "sync_ref_model": ADAPTIVE,
    "ref_model_*": ADAPTIVE,
    "off_policy_mask_threshold": CAP,
    "use_bias_correction_kl": CAP,
    "lora_*": "see train.lora_rank and train.lora_alpha",
    "use_rslora": "train.lora_alpha sets the scale",
    "use_dora": "only LoRA is supported",
    "bnb_*": "see pretrained.base_precision",
    "use_bnb_*": "see pretrained.base_precision",
    "log_*": "log_images sets the number of completions saved per evaluation",
    "generation_kwargs": SAMPLED,
    "chat_template_kwargs": "the model's chat template is used",
    "cache_implementation": LOADED_BY,
    "use_transformers_*": "the default engine uses continuous batching",
    "transformers_continuous_batching_config": "the default engine uses continuous batching",
    "model_init_kwargs": LOADED_BY,
    "trust_remote_code": "remote code is never executed",
    "attn_implementation": LOADED_BY,
    "router_aux_loss_coef": "a load-balancing loss is not supported",
    "disable_dropout": "dropout is always disabled",
    "cast_lm_head_to_fp32": "log-probabilities are computed in float32",
    "num_generations_eval": "evaluation is greedy; flow-grpo evaluate --n samples",
    "ds3_gather_for_generation": "sharded layers are gathered one by one",
    "pad_to_multiple_of": "sequences are packed",
    "dataset_config": "hub datasets use their default configuration",
    "dataset_streaming": "datasets are loaded into memory",
    "ignore_bias_buffers": "set by accelerate",
    "reward_model_name_or_path": "use reward_fn={'reward_model': 1.0}; set reward_options",
}
DEFAULTS = {
    "learning_rate": 1e-6,
    "num_generations": 8,
    "max_completion_length": 512,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "epsilon": 0.2,
    "beta": 0.0,
    "loss_type": "dapo",
    "scale_rewards": "group",
    "gradient_checkpointing": True,
    "use_peft": False,
    "weight_decay": 0.0,
}
REWARDS = {  # trl/scripts/grpo.py: reward_funcs_registry
    "accuracy_reward": "math_answer",
    "reasoning_accuracy_reward": "math_answer",
    "think_format_reward": "answer_format",
    "get_soft_overlong_punishment": "overlong",
}


def derive(given: Mapping[str, Any]) -> Settings:
    """Compute our settings that depend on several options together, for one process."""
    ours = _derive_loss(given)
    accumulation = value_of(given, "gradient_accumulation_steps", 1)
    steps = value_of(given, "steps_per_generation", accumulation)
    responses = value_of(given, "generation_batch_size") or (
        value_of(given, "per_device_train_batch_size") * steps
    )
    ours["sample.questions_per_epoch"] = max(
        1, round(responses / value_of(given, "num_generations", 8))
    )
    ours["train.updates_per_epoch"] = max(1, round(steps / accumulation))
    names = given.get("reward_funcs") or []
    names = [names] if isinstance(names, str) else names
    if all(name in REWARDS for name in names) and names:
        weights = given.get("reward_weights") or [1.0] * len(names)
        pairs = zip(names, weights, strict=False)
        ours["reward_fn"] = {REWARDS[name]: weight for name, weight in pairs}
    if given["use_peft"]:
        ours |= {
            "train.lora_rank": given.get("lora_r", 16),
            "train.lora_alpha": given.get("lora_alpha", 32),
            **modules_of(given.get("lora_target_modules")),
        }
    if given.get("use_vllm"):
        for theirs, name in VLLM.items():
            if theirs in given:
                ours[name] = given[theirs]
    report = given.get("report_to")
    if report and report not in ("none", "all"):
        ours["log_with"] = report if isinstance(report, str) else ",".join(report)
    return ours


def _derive_loss(given: Mapping[str, Any]) -> Settings:
    """Return the settings of the policy loss that its type reads."""
    if given["loss_type"] == "sapo":
        temperatures = {"pos": "train.tau_positive", "neg": "train.tau_negative"}
        return {
            name: given[f"sapo_temperature_{end}"]
            for end, name in temperatures.items()
            if f"sapo_temperature_{end}" in given
        }
    low = given["epsilon"]
    ours: Settings = {"train.clip_low": low, "train.clip_high": given.get("epsilon_high") or low}
    if given.get("delta") and given["loss_type"] != "cispo":
        ours["train.dual_clip"] = given["delta"]
    return ours


VLLM = {
    "vllm_gpu_memory_utilization": "sample.vllm_memory",
    "vllm_tensor_parallel_size": "sample.vllm_tensor_parallel",
}
TRL = Project(
    name="TRL",
    source="huggingface/trl@f2cd577 trl/trainer/grpo_config.py:418-1030, model_config.py",
    trainer=VLM,
    keys=KEYS,
    groups=GROUPS,
    defaults=DEFAULTS,
    derive=derive,
    programs=("trl grpo", "trl/scripts/grpo.py", "trl.scripts.grpo"),
    page="trl.md",
)
