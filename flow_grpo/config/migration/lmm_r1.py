"""Options of LMM-R1 and OpenRLHF.

Read from github.com/TideDra/lmm-r1 at f917f18, openrlhf/cli/train_ppo_ray.py: the options are at
lines 189 to 421. What they mean: openrlhf/trainer/ppo_utils/experience_maker.py, lines 462 to 545.
"""

import json
import os
from collections.abc import Mapping
from typing import Any

from flow_grpo.config.migration.counterparts import (
    GPUS,
    NODES,
    VLM,
    ZERO_STAGE,
    Project,
    Settings,
    critic_of,
    dataset_of,
    derived,
    modules_of,
    none,
    ratio,
    to,
    value_of,
)

NO_RAY = "policy, reference and sampling share one process per GPU; Ray is not used"
IN_RUN = "checkpoints are saved in the run directory, logdir/run_name"
MEMORY = "limits memory only; see sample.batch_size and train.tokens_per_batch"
LOADED_BY = "set by transformers and accelerate"
DEEPSPEED = "configure DeepSpeed in scripts/accelerate_configs/deepspeed_zero3.yaml"
PIXELS = {"min_pixels": 4 * 28 * 28, "max_pixels": 16384 * 28 * 28}  # lines 478 to 486

KEYS = {
    # model and data
    "pretrain": to("pretrained.model"),
    "prompt_data": derived("dataset"),
    "prompt_data_probs": derived("dataset"),
    "prompt_split": none("the dataset's own train and test splits are used", "train"),
    "eval_dataset": to("eval_dataset"),
    "eval_split": none("the dataset's own train and test splits are used", "test"),
    "input_key": to("input_key"),
    "label_key": to("answer_key"),
    "input_template": derived("question_format"),
    "apply_chat_template": none("the model's chat template is always applied", True, False),
    "max_samples": to("max_samples"),
    "processor_kwargs": derived("max_pixels"),
    "limit_mm_per_prompt": none("images per prompt are not limited"),
    "prompt_max_len": to("max_prompt_length"),
    "generate_max_len": to("sample.max_new_tokens"),
    "max_len": none("set prompt_max_len and generate_max_len instead"),
    # rollouts
    "rollout_batch_size": to("sample.questions_per_epoch"),
    "n_samples_per_prompt": to("sample.group_size"),
    "temperature": to("sample.temperature"),
    "top_p": none("unsupported: rollouts sample the policy without truncation", 1, 1.0),
    "micro_rollout_batch_size": none(MEMORY),
    "eval_temperature": none("evaluation is greedy; flow-grpo evaluate --n samples"),
    "eval_n_samples_per_prompt": none("evaluation is greedy; flow-grpo evaluate --n samples"),
    "vllm_num_engines": derived("sample.engine"),
    "vllm_tensor_parallel_size": derived("sample.vllm_tensor_parallel"),
    "vllm_gpu_memory_utilization": derived("sample.vllm_memory"),
    "custom_experience_filter": none("sample.refills=N replaces groups with zero advantages"),
    # updates
    "train_batch_size": derived("train.updates_per_epoch"),
    "micro_train_batch_size": none(MEMORY),
    "ring_attn_size": to("train.sequence_parallel"),
    "max_epochs": to("train.num_inner_epochs"),
    "max_global_steps": to("num_epochs"),
    "num_episodes": none(
        "num_epochs counts rollouts: set it to epochs * rows / sample.questions_per_epoch"
    ),
    "actor_learning_rate": to("train.learning_rate"),
    "critic_learning_rate": derived("train.critic_learning_rate"),
    "lr_warmup_ratio": none(
        "set train.lr_warmup_steps to the ratio times the number of updates", 0, 0.0
    ),
    "adam_betas": derived("train.adam_beta2"),
    "l2": to("train.adam_weight_decay"),
    "max_norm": to("train.max_grad_norm"),
    "eps_clip": derived("train.clip_low"),
    "value_clip": to("train.value_clip"),
    "gamma": to("train.discount"),
    "lambd": to("train.gae_decay"),
    "freezing_actor_steps": derived("train.critic_warmup"),
    "advantage_estimator": to(
        "train.advantage",
        {
            "gae": "gae",
            "reinforce": "reinforce_pp",
            "rloo": "rloo",
            # subtracts the mean of the group, then divides by the deviation of the batch
            "reinforce_baseline": {"train.advantage": "grpo", "train.advantage_scale": "batch"},
            "group_norm": {"train.advantage": "grpo", "train.advantage_scale": "group"},
            "dr_grpo": "dr_grpo",
        },
    ),
    "no_advantage_std_norm": to("train.advantage_scale", {True: "none", False: {}}),
    "normalize_reward": none(
        "reward_options={'reward_model': {'normalize': True}} standardises the scores",
        False,
    ),
    "reward_clip_range": none("rewards are not clipped"),
    "init_kl_coef": to("train.beta"),
    "kl_estimator": derived("train.kl"),
    "use_kl_loss": derived("train.kl_in"),
    "kl_target": to("train.kl_target"),
    "kl_horizon": derived("train.kl_horizon"),
    "aux_loss_coef": none("a load-balancing loss is not supported", 0, 0.0),
    "entropy_loss_coef": none("an entropy bonus is not supported", 0, 0.0),
    "ptx_coef": none("a pretraining loss is not supported"),
    "freeze_prefix": derived("train.freeze_vision"),
    "enable_ema": to("train.ema"),
    "ema_beta": to("train.ema_decay"),
    "seed": to("seed"),
    # LoRA and memory
    "lora_rank": derived("train.lora_rank"),
    "lora_alpha": derived("train.lora_alpha"),
    "target_modules": derived("train.lora_target_modules"),
    "lora_dropout": none("LoRA dropout is not supported, so that the first ratio is 1", 0, 0.0),
    "exclude_modules": none("train.freeze_vision=True excludes the vision tower"),
    "load_in_4bit": to("pretrained.base_precision", {True: "nf4", False: {}}),
    "bf16": to("mixed_precision", {True: "bf16", False: "no"}),
    "gradient_checkpointing": to("train.gradient_checkpointing"),
    "adam_offload": to("train.offload_optimizer"),
    "zero_stage": to(ZERO_STAGE),
    # rewards
    "remote_rm_url": none(
        "its math verifier is math_answer here; for others, set reward_servers={'mine': URL}"
    ),
    "reward_pretrain": none("use reward_fn={'reward_model': 1.0}; reward_options sets the model"),
    "critic_pretrain": derived("train.critic"),
    # run
    "save_path": derived("run_name"),
    "save_steps": to("save_freq"),
    "eval_steps": to("eval_freq"),
    "max_ckpt_num": to("num_checkpoint_limit"),
    "load_checkpoint": to("resume", {True: "auto", False: "none"}),
    "ckpt_path": none(IN_RUN),
    "save_hf_ckpt": none("checkpoints load with transformers", True),
    "use_wandb": derived("log_with"),
    "use_tensorboard": derived("log_with"),
    "wandb_project": to("project_name"),
    "wandb_run_name": derived("run_name"),
    "actor_num_nodes": to(NODES),
    "actor_num_gpus_per_node": derived(GPUS),
    "local_rank": none("the launcher sets it"),
}
GROUPS = {
    "ref_num_*": NO_RAY,
    "critic_num_*": NO_RAY,
    "reward_num_*": NO_RAY,
    "colocate_*": NO_RAY,
    "vllm_*": "generation shares the GPU and the weights with training",
    "deepspeed_enable_sleep": NO_RAY,
    "enable_prefix_caching": "the prefill of a prompt is shared within its group",
    "enforce_eager": "cuda_graphs=False disables CUDA graphs",
    "max_ckpt_mem": "num_checkpoint_limit bounds the number of checkpoints",
    "disable_ds_ckpt": "state_freq sets how often a resumable state is saved",
    "use_ds_universal_ckpt": "runs resume with any number of processes",
    "save_value_network": "a resumable state includes the critic",
    "store_extra_buffers": "sample.refills=N replaces groups with zero advantages",
    "value_head_prefix": "the value head has its own name",
    "logging_steps": "every epoch is logged",
    "wandb_*": "set wandb's environment variables",
    "flash_attn": LOADED_BY,
    "use_liger_kernel": LOADED_BY,
    "disable_fast_tokenizer": LOADED_BY,
    "actor_init_on_gpu": LOADED_BY,
    "use_ms": "models are loaded from the Hugging Face hub or a directory",
    "packing_samples": "sequences are always packed",
    "grad_accum_dtype": DEEPSPEED,
    "overlap_comm": DEEPSPEED,
    "zpg": DEEPSPEED,
    "deepcompile": DEEPSPEED,
    "gradient_checkpointing_use_reentrant": "activation checkpointing is not re-entrant",
    "full_determinism": "samples depend only on seed, epoch and index",
    "ring_head_stride": "sequences are exchanged between heads, not in a ring",
    "ref_reward_offload": "the reference is the model without LoRA, or sharded like the policy",
    "perf": "see docs/performance.md",
}
# Where they differ from ours, or decide together with another setting.
DEFAULTS = {
    "rollout_batch_size": 1024,
    "n_samples_per_prompt": 1,
    "train_batch_size": 128,
    "prompt_max_len": 1024,
    "generate_max_len": 1024,
    "actor_learning_rate": 1e-6,
    "adam_betas": (0.9, 0.95),
    "l2": 0.0,
    "eps_clip": 0.2,
    "init_kl_coef": 0.01,
    "kl_estimator": "k1",
    "advantage_estimator": "gae",
    "zero_stage": 2,
    "lora_rank": 0,
}


def derive(given: Mapping[str, Any]) -> Settings:
    """Compute our settings that depend on several options together."""
    low, high = given["adam_betas"]
    ours: Settings = {
        "train.adam_beta1": float(low),
        "train.adam_beta2": float(high),
        "train.clip_low": given["eps_clip"],
        "train.clip_high": given["eps_clip"],
        "train.kl": given["kl_estimator"],
        "train.kl_in": "loss" if given.get("use_kl_loss") else "reward",
        "train.freeze_vision": "visual" in str(given.get("freeze_prefix")),
        "use_lora": value_of(given, "lora_rank") > 0,
        **derive_data(given),
        **derive_run(given),
    }
    if updates := ratio(
        given, ["rollout_batch_size", "n_samples_per_prompt"], ["train_batch_size"]
    ):
        ours["train.updates_per_epoch"] = updates
    if ours["use_lora"]:
        ours |= {
            "train.lora_rank": given["lora_rank"],
            "train.lora_alpha": given.get("lora_alpha", 16),
        }
        ours |= modules_of(given.get("target_modules"))
    if given["advantage_estimator"] == "gae":
        warmup = max(0, int(value_of(given, "freezing_actor_steps", -1)))
        ours |= {"train.critic_warmup": warmup}
        ours |= critic_of(given.get("critic_pretrain"), given.get("pretrain"))
        if "critic_learning_rate" in given:
            ours["train.critic_learning_rate"] = given["critic_learning_rate"]
    if given.get("kl_target"):
        ours["train.kl_horizon"] = value_of(given, "kl_horizon", 10_000)
    if value_of(given, "vllm_num_engines") > 0:
        ours["sample.engine"] = "vllm"
        for theirs, name in {
            "vllm_tensor_parallel_size": "sample.vllm_tensor_parallel",
            "vllm_gpu_memory_utilization": "sample.vllm_memory",
        }.items():
            if theirs in given:
                ours[name] = given[theirs]
    return ours


def derive_data(given: Mapping[str, Any]) -> Settings:
    """Return the settings of the dataset mixture, question format and image sizes."""
    ours: Settings = {}
    sets = [each for each in str(given.get("prompt_data") or "").split(",") if each]
    shares = str(given.get("prompt_data_probs") or "").split(",")
    if len(sets) > 1:
        mixture = zip(sets, shares if len(shares) == len(sets) else ["1"] * len(sets), strict=True)
        ours["dataset"] = ",".join(f"{each}:{share}" for each, share in mixture)
    elif sets:
        ours["dataset"] = dataset_of(sets[0])
    if template := given.get("input_template"):
        ours["question_format"] = str(template).replace("{}", "{question}")
    if limits := given.get("processor_kwargs"):
        found = limits if isinstance(limits, Mapping) else json.loads(limits)
        ours |= {name: found.get(name, default) for name, default in PIXELS.items()}
    return ours


def derive_run(given: Mapping[str, Any]) -> Settings:
    """Return the run name and directory, the trackers and the number of GPUs."""
    ours: Settings = {}
    folder, name = os.path.split(str(given.get("save_path") or "").rstrip("/"))
    if name := given.get("wandb_run_name") or name:
        ours["run_name"] = name
    if folder:
        ours["logdir"] = folder
    trackers = [each for each in ("wandb", "tensorboard") if given.get(f"use_{each}")]
    if trackers:
        ours["log_with"] = ",".join(trackers)
    if gpus := value_of(given, "actor_num_gpus_per_node"):
        ours[GPUS] = int(gpus * value_of(given, "actor_num_nodes", 1))
    return ours


LMM_R1 = Project(
    name="LMM-R1 (OpenRLHF)",
    source="TideDra/lmm-r1@f917f18 openrlhf/cli/train_ppo_ray.py:189-421",
    trainer=VLM,
    keys=KEYS,
    groups=GROUPS,
    defaults=DEFAULTS,
    derive=derive,
    programs=("openrlhf.cli.train_ppo_ray",),
    page="lmm_r1.md",
)
