"""Settings of verl for language models and VLMs.

Read from github.com/volcengine/verl at b178a3c, verl/trainer/config/_generated_ppo_trainer.yaml.
`COMMON` are those that its diffusion trainers share: mm_grpo.py.
"""

from collections.abc import Mapping
from typing import Any

from flow_grpo.config.migration.counterparts import (
    GPUS,
    NODES,
    VLM,
    Project,
    Settings,
    critic_of,
    datasets_of,
    derived,
    modules_of,
    none,
    ratio,
    to,
    trackers_of,
    value_of,
)

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
KL = "algorithm.kl_ctrl"
IN_RUN = "checkpoints are saved in the run directory, logdir/run_name"
NO_RAY = "each process samples and trains on its own GPU; Ray is not used"
KL_ESTIMATORS = {
    "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3",
}  # fmt: skip

COMMON = {
    "data.train_files": derived("dataset"),
    "data.val_files": derived("eval_dataset"),
    "data.train_max_samples": none("all rows are used; provide a smaller file", -1),
    "data.val_batch_size": none("limits memory only; set by the trainer"),
    "data.shuffle": none("each pass over the data is shuffled", True),
    "data.seed": to("seed"),
    f"{MODEL}.path": to("pretrained.model"),
    f"{MODEL}.trust_remote_code": none("remote code is never executed", False),
    f"{MODEL}.enable_gradient_checkpointing": to("train.gradient_checkpointing"),
    f"{MODEL}.lora_rank": derived("train.lora_rank"),
    f"{MODEL}.lora_alpha": derived("train.lora_alpha"),
    f"{MODEL}.lora_adapter_path": to("train.lora_path"),
    f"{MODEL}.target_modules": derived("train.lora_target_modules"),
    f"{ACTOR}.optim.lr": to("train.learning_rate"),
    f"{ACTOR}.optim.betas": derived("train.adam_beta2"),
    f"{ACTOR}.optim.weight_decay": to("train.adam_weight_decay"),
    f"{ACTOR}.optim.lr_warmup_steps": derived("train.lr_warmup_steps"),
    f"{ACTOR}.optim.lr_warmup_steps_ratio": none(
        "set train.lr_warmup_steps to the ratio times the number of updates", 0, 0.0
    ),
    f"{ACTOR}.optim.min_lr_ratio": to("train.lr_min_ratio"),
    f"{ACTOR}.optim.lr_scheduler_type": to(
        "train.lr_scheduler", {"constant": "constant", "cosine": "cosine"}
    ),
    f"{ACTOR}.grad_clip": to("train.max_grad_norm"),
    f"{ACTOR}.ppo_epochs": to("train.num_inner_epochs"),
    f"{ACTOR}.fsdp_config.optimizer_offload": to("train.offload_optimizer"),
    f"{ACTOR}.fsdp_config.dtype": to("mixed_precision", {"bfloat16": "bf16", "float16": "fp16"}),
    "trainer.total_training_steps": to("num_epochs"),
    "trainer.project_name": to("project_name"),
    "trainer.experiment_name": to("run_name"),
    "trainer.logger": derived("log_with"),
    "trainer.log_val_generations": to("log_images"),
    "trainer.nnodes": to(NODES),
    "trainer.n_gpus_per_node": derived(GPUS),
    "trainer.save_freq": derived("save_freq"),
    "trainer.test_freq": derived("eval_freq"),
    "trainer.max_actor_ckpt_to_keep": to("num_checkpoint_limit"),
    "trainer.resume_mode": to("resume", {"auto": "auto", "disable": "none", "resume_path": {}}),
    "trainer.resume_from_path": derived("resume"),
    "trainer.val_before_train": to("eval_before_training"),
    "trainer.val_only": none("use flow-grpo evaluate", False),
    "trainer.default_local_dir": none(IN_RUN),
}
COMMON_GROUPS = {
    "*.profiler.*": "see docs/performance.md",
    "global_profiler.*": "see docs/performance.md",
    "actor_rollout_ref.ref.*": "the reference policy uses the policy's settings",
    f"{ACTOR}.fsdp_config.*": "configure FSDP2 in scripts/accelerate_configs/fsdp2.yaml",
    f"{ACTOR}.checkpoint.*": IN_RUN,
    f"{ACTOR}.*micro_batch*": "limits memory only; set by the trainer",
    f"{ACTOR}.*shuffle*": "training uses the batches of the rollout",
    f"{ACTOR}.strategy": "the accelerate config selects DDP, DeepSpeed or FSDP2",
    f"{ACTOR}.*": "no counterpart",
    f"{MODEL}.*": "set by transformers and diffusers when loading the model",
    f"{ROLLOUT}.*": "generation does not use a server",
    "actor_rollout_ref.*": NO_RAY,
    "data.*": "see docs/data.md",
    "reward_model.*": "see docs/judges.md and docs/reward_server.md",
    "reward_manager.*": "reward_fn sets the weight of each reward",
    "reward.*": "see docs/judges.md and docs/reward_server.md",
    "custom_reward_function.*": "use custom_rewards; the function's signature differs",
    "algorithm.rollout_correction.*": "see train.importance_cap",
    "trainer.*": NO_RAY,
    "transfer_queue.*": NO_RAY,
    "ray_kwargs.*": NO_RAY,
    "skip.*": NO_RAY,
}
KEYS = {
    **COMMON,
    "data.prompt_key": to("input_key"),
    "data.image_key": to("image_key"),
    "data.video_key": to("video_key"),
    "data.max_prompt_length": to("max_prompt_length"),
    "data.max_response_length": to("sample.max_new_tokens"),
    "data.train_batch_size": to("sample.questions_per_epoch"),
    "data.train_max_samples": derived("max_samples"),
    "data.val_max_samples": derived("eval_questions"),
    "data.filter_overlong_prompts": to("filter_overlong_prompts"),
    "data.truncation": none("prompts are never truncated", "error"),
    "algorithm.adv_estimator": to(
        "train.advantage",
        {
            "gae": "gae",
            "grpo": "grpo",
            "reinforce_plus_plus": "reinforce_pp",
            "reinforce_plus_plus_baseline": {
                "train.advantage": "grpo",
                "train.advantage_scale": "batch",
            },
            "remax": "remax",
            "rloo": "rloo",
        },
    ),
    "algorithm.gamma": to("train.discount"),
    "algorithm.lam": to("train.gae_decay"),
    "algorithm.norm_adv_by_std_in_grpo": to("train.advantage_scale", {True: {}, False: "none"}),
    "algorithm.use_kl_in_reward": derived("train.kl_in"),
    "algorithm.kl_penalty": derived("train.kl"),
    "algorithm.kl_ctrl.kl_coef": derived("train.beta"),
    "algorithm.kl_ctrl.type": derived("train.kl_target"),
    "algorithm.kl_ctrl.horizon": derived("train.kl_horizon"),
    "algorithm.kl_ctrl.target_kl": derived("train.kl_target"),
    f"{ACTOR}.ppo_mini_batch_size": derived("train.updates_per_epoch"),
    f"{ACTOR}.ppo_max_token_len_per_gpu": to("train.tokens_per_batch"),
    f"{ACTOR}.use_dynamic_bsz": none("batches have train.tokens_per_batch tokens", True),
    f"{ACTOR}.clip_ratio": derived("train.clip_low"),
    f"{ACTOR}.clip_ratio_low": to("train.clip_low"),
    f"{ACTOR}.clip_ratio_high": to("train.clip_high"),
    f"{ACTOR}.clip_ratio_c": to("train.dual_clip"),
    f"{ACTOR}.freeze_vision_tower": to("train.freeze_vision"),
    f"{ACTOR}.policy_loss.loss_mode": to(
        "train.loss", {"vanilla": "clip", "gspo": "gspo", "cispo": "cispo"}
    ),
    f"{ACTOR}.loss_agg_mode": to(
        "train.aggregation",
        {
            "token-mean": "token",
            "seq-mean-token-mean": "sequence",
            "seq-mean-token-sum-norm": "constant",
        },
    ),
    f"{ACTOR}.entropy_coeff": none("an entropy bonus is not supported", 0, 0.0),
    f"{ACTOR}.use_kl_loss": derived("train.kl_in"),
    f"{ACTOR}.kl_loss_coef": derived("train.beta"),
    f"{ACTOR}.kl_loss_type": derived("train.kl"),
    f"{ROLLOUT}.n": to("sample.group_size"),
    f"{ROLLOUT}.temperature": to("sample.temperature"),
    f"{ROLLOUT}.top_p": none("unsupported: rollouts sample the policy without truncation", 1, 1.0),
    f"{ROLLOUT}.top_k": none("unsupported: rollouts sample the policy without truncation", -1),
    f"{ROLLOUT}.name": to("sample.engine", {"vllm": "vllm", "hf": "transformers"}),
    f"{ROLLOUT}.gpu_memory_utilization": derived("sample.vllm_memory"),
    f"{ROLLOUT}.tensor_model_parallel_size": derived("sample.vllm_tensor_parallel"),
    f"{ROLLOUT}.multi_turn.enable": none("use environment=FILE:CLASS", False),
    f"{ROLLOUT}.multi_turn.max_assistant_turns": none("with an environment, use sample.max_turns"),
    f"{ROLLOUT}.multi_turn.max_tool_response_length": none(
        "with an environment, use sample.max_observation_tokens"
    ),
    "critic.model.path": derived("train.critic"),
    "critic.optim.lr": derived("train.critic_learning_rate"),
    "critic.cliprange_value": to("train.value_clip"),
    "trainer.critic_warmup": derived("train.critic_warmup"),
    "trainer.total_epochs": none(
        "num_epochs counts rollouts: set it to epochs * rows / sample.questions_per_epoch"
    ),
}
GROUPS = {
    **COMMON_GROUPS,
    "critic.*": "the critic uses the policy's settings",
    "algorithm.*": "no counterpart",
}
DEFAULTS = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "algorithm.adv_estimator": "gae",
    f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ACTOR}.clip_ratio_low": 0.2,
    f"{ACTOR}.clip_ratio_high": 0.2,
    f"{ACTOR}.clip_ratio_c": 3.0,
    f"{ACTOR}.loss_agg_mode": "token-mean",
    f"{ACTOR}.freeze_vision_tower": False,
    f"{ACTOR}.use_kl_loss": False,
    f"{ACTOR}.kl_loss_coef": 0.001,
    f"{ACTOR}.kl_loss_type": "low_var_kl",
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_penalty": "kl",
    f"{MODEL}.enable_gradient_checkpointing": True,
    f"{MODEL}.lora_rank": 0,
    f"{ACTOR}.optim.lr": 1e-6,
    f"{ACTOR}.optim.weight_decay": 0.01,
    f"{ACTOR}.fsdp_config.dtype": "bfloat16",
    f"{ROLLOUT}.n": 1,
    "trainer.test_freq": -1,
    "trainer.save_freq": -1,
    "trainer.resume_mode": "auto",
    "trainer.n_gpus_per_node": 8,
}


def derive_common(given: Mapping[str, Any]) -> Settings:
    """Compute our settings that depend on several of verl's together, for all of its trainers."""
    ours = datasets_of(given.get("data.train_files"), given.get("data.val_files"))
    if "trainer.logger" in given:
        ours["log_with"] = trackers_of(given["trainer.logger"])
    for theirs, name in {
        "trainer.test_freq": "eval_freq",
        "trainer.save_freq": "save_freq",
    }.items():
        ours[name] = max(0, int(value_of(given, theirs, -1)))  # -1 is never
    ours[GPUS] = int(
        value_of(given, "trainer.n_gpus_per_node", 8) * value_of(given, "trainer.nnodes", 1)
    )
    rank = value_of(given, f"{MODEL}.lora_rank")
    ours["use_lora"] = rank > 0
    if rank:
        ours |= {"train.lora_rank": int(rank), **modules_of(given.get(f"{MODEL}.target_modules"))}
        if f"{MODEL}.lora_alpha" in given:
            ours["train.lora_alpha"] = given[f"{MODEL}.lora_alpha"]
    if betas := given.get(f"{ACTOR}.optim.betas"):
        ours |= {"train.adam_beta1": betas[0], "train.adam_beta2": betas[1]}
    if (steps := value_of(given, f"{ACTOR}.optim.lr_warmup_steps", -1)) >= 0:
        ours["train.lr_warmup_steps"] = int(steps)
    if given.get("trainer.resume_mode") == "resume_path" and "trainer.resume_from_path" in given:
        ours["resume"] = given["trainer.resume_from_path"]
    return ours


def derive(given: Mapping[str, Any]) -> Settings:
    """Compute our settings that depend on several of verl's settings together."""
    ours = derive_common(given)
    if updates := ratio(given, ["data.train_batch_size"], [f"{ACTOR}.ppo_mini_batch_size"]):
        ours["train.updates_per_epoch"] = updates
    if f"{ACTOR}.clip_ratio" in given:
        ours |= dict.fromkeys(("train.clip_low", "train.clip_high"), given[f"{ACTOR}.clip_ratio"])
    if given[f"{ACTOR}.use_kl_loss"]:
        kind, beta, place = f"{ACTOR}.kl_loss_type", f"{ACTOR}.kl_loss_coef", "loss"
    else:
        kind, beta, place = "algorithm.kl_penalty", "algorithm.kl_ctrl.kl_coef", "reward"
    ours["train.beta"] = 0.0
    if place == "loss" or given["algorithm.use_kl_in_reward"]:
        estimator = KL_ESTIMATORS.get(str(given[kind]).rstrip("+"), "k3")
        ours |= {"train.beta": given[beta], "train.kl": estimator, "train.kl_in": place}
    # the weight of a KL in the loss is constant
    if ours["train.beta"] and place == "reward" and given.get(f"{KL}.type") == "adaptive":
        ours["train.kl_target"] = value_of(given, f"{KL}.target_kl", 0.1)
        ours["train.kl_horizon"] = value_of(given, f"{KL}.horizon", 10_000)
    if ours["use_lora"]:
        ours["train.freeze_vision"] = True
    if (rows := value_of(given, "data.train_max_samples", -1)) > 0:
        ours["max_samples"] = int(rows)
    if (rows := value_of(given, "data.val_max_samples", -1)) > 0:
        ours["eval_questions"] = int(rows)
    if given["algorithm.adv_estimator"] == "gae":
        ours |= critic_of(given.get("critic.model.path"), given.get(f"{MODEL}.path"))
        for theirs, name in CRITIC.items():
            if theirs in given:
                ours[name] = given[theirs]
    if given.get(f"{ROLLOUT}.name") == "vllm":
        for theirs, name in VLLM.items():
            if theirs in given:
                ours[name] = given[theirs]
    return ours


CRITIC = {
    "critic.optim.lr": "train.critic_learning_rate",
    "trainer.critic_warmup": "train.critic_warmup",
}
VLLM = {
    f"{ROLLOUT}.gpu_memory_utilization": "sample.vllm_memory",
    f"{ROLLOUT}.tensor_model_parallel_size": "sample.vllm_tensor_parallel",
}
VERL = Project(
    name="verl",
    source="volcengine/verl@b178a3c verl/trainer/config/_generated_ppo_trainer.yaml",
    trainer=VLM,
    keys=KEYS,
    groups=GROUPS,
    defaults=DEFAULTS,
    derive=derive,
    programs=("verl.trainer.main_ppo",),
    page="verl.md",
)
