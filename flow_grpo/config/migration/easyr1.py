"""Settings of EasyR1.

Read from github.com/hiyouga/EasyR1 at b44b311: verl/trainer/config.py and the config.py of
verl/workers (actor, critic, reward, rollout); the defaults are those of examples/config.yaml,
which its scripts use. Advantages, losses and KL: verl/trainer/core_algos.py, lines 76 to 86 and 455
to 600.
"""

from collections.abc import Mapping
from typing import Any

from flow_grpo.config.migration.counterparts import (
    GPUS,
    NODES,
    SHARDED,
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

MEMORY = "limits memory only; see sample.batch_size and train.tokens_per_batch"
IN_RUN = "checkpoints are saved in the run directory, logdir/run_name"
KL_ESTIMATORS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
MODEL = "worker.actor.model"
ACTOR = "worker.actor"
ROLLOUT = "worker.rollout"
VLLM = {
    f"{ROLLOUT}.gpu_memory_utilization": "sample.vllm_memory",
    f"{ROLLOUT}.tensor_parallel_size": "sample.vllm_tensor_parallel",
}
# Formats of the repository, examples/format_prompt: where the answer stands.
BOXED = (
    "{question}\nThink first, between <think> and </think>. Then give the final answer in "
    "\\boxed{}."
)
# Weights in examples/reward_function/math.py and r1v.py.
FORMAT_WEIGHTS = {"math.py": 0.1, "r1v.py": 0.5}
REWARD_NAMES = {"overall": "avg", "accuracy": "math_answer", "format": "answer_format"}
CLIPPING = {"low": "train.clip_low", "high": "train.clip_high", "dual": "train.dual_clip"}

KEYS = {
    "data.train_files": derived("dataset"),
    "data.val_files": derived("eval_dataset"),
    "data.prompt_key": to("input_key"),
    "data.answer_key": to("answer_key"),
    "data.image_key": to("image_key"),
    "data.video_key": to("video_key"),
    "data.video_fps": to("video_fps"),
    "data.image_dir": to("image_dir"),
    "data.max_prompt_length": to("max_prompt_length"),
    "data.max_response_length": to("sample.max_new_tokens"),
    "data.rollout_batch_size": to("sample.questions_per_epoch"),
    "data.mini_rollout_batch_size": none("sample.refills=N samples replacement groups"),
    "data.val_batch_size": none(MEMORY),
    "data.format_prompt": derived("question_format"),
    "data.override_chat_template": to("chat_template"),
    "data.shuffle": none("each pass over the data is shuffled", True),
    "data.seed": to("seed"),
    "data.min_pixels": to("min_pixels"),
    "data.max_pixels": to("max_pixels"),
    "data.filter_overlong_prompts": to("filter_overlong_prompts"),
    "data.filter_overlong_prompts_workers": none("overlong prompts are filtered as they are drawn"),
    "algorithm.adv_estimator": to(
        "train.advantage",
        {
            "gae": "gae",
            "grpo": {"train.advantage": "grpo", "train.advantage_scale": "group"},
            "grpo_passk": {"train.advantage": "grpo_passk", "train.advantage_scale": "group"},
            "reinforce_plus_plus": "reinforce_pp",
            "remax": "remax",
            "rloo": "rloo",
        },
    ),
    "algorithm.gamma": to("train.discount"),
    "algorithm.lam": to("train.gae_decay"),
    "algorithm.disable_kl": derived("train.beta"),
    "algorithm.use_kl_loss": derived("train.kl_in"),
    "algorithm.kl_penalty": derived("train.kl"),
    "algorithm.kl_coef": derived("train.beta"),
    "algorithm.kl_type": derived("train.kl_target"),
    "algorithm.kl_horizon": derived("train.kl_horizon"),
    "algorithm.kl_target": derived("train.kl_target"),
    "algorithm.online_filtering": derived("sample.refills"),
    "algorithm.filter_key": derived("sample.filter_reward"),
    "algorithm.filter_low": derived("sample.filter_low"),
    "algorithm.filter_high": derived("sample.filter_high"),
    f"{ACTOR}.global_batch_size": derived("train.updates_per_epoch"),
    f"{ACTOR}.ulysses_size": to("train.sequence_parallel"),
    f"{ACTOR}.max_grad_norm": to("train.max_grad_norm"),
    f"{ACTOR}.clip_ratio_low": derived("train.clip_low"),
    f"{ACTOR}.clip_ratio_high": derived("train.clip_high"),
    f"{ACTOR}.clip_ratio_dual": derived("train.dual_clip"),
    f"{ACTOR}.loss_avg_mode": to("train.aggregation", {"token": "token", "seq": "sequence"}),
    f"{ACTOR}.loss_type": to(
        "train.loss",
        {
            "default": "clip",
            "gspo": "gspo",
            "gspo_token": "gspo",
            "cispo": "cispo",
            "sapo": "sapo",
        },
    ),
    f"{ACTOR}.ppo_epochs": to("train.num_inner_epochs"),
    f"{ACTOR}.padding_free": none("sequences are packed", True),
    f"{ACTOR}.dynamic_batching": none("batches have train.tokens_per_batch tokens", True),
    f"{ACTOR}.use_torch_compile": none("see cuda_graphs, for rollouts", True),
    f"{ACTOR}.tau_positive": derived("train.tau_positive"),
    f"{ACTOR}.tau_negative": derived("train.tau_negative"),
    f"{MODEL}.model_path": to("pretrained.model"),
    f"{MODEL}.tokenizer_path": none("the model's own tokenizer is used"),
    f"{MODEL}.override_config": none("the model's own config is used"),
    f"{MODEL}.enable_gradient_checkpointing": to("train.gradient_checkpointing"),
    f"{MODEL}.trust_remote_code": none("remote code is never executed", False),
    f"{MODEL}.freeze_vision_tower": derived("train.freeze_vision"),
    f"{MODEL}.lora.rank": derived("train.lora_rank"),
    f"{MODEL}.lora.alpha": derived("train.lora_alpha"),
    f"{MODEL}.lora.target_modules": derived("train.lora_target_modules"),
    f"{MODEL}.lora.exclude_modules": none(
        "train.freeze_vision=True excludes the vision tower", ".*visual.*"
    ),
    f"{ACTOR}.optim.lr": to("train.learning_rate"),
    f"{ACTOR}.optim.betas": derived("train.adam_beta2"),
    f"{ACTOR}.optim.weight_decay": to("train.adam_weight_decay"),
    f"{ACTOR}.optim.strategy": to(
        "train.optimizer", {"adamw": "adamw", "adamw_bf16": "adamw_bf16"}
    ),
    f"{ACTOR}.optim.lr_warmup_steps": to("train.lr_warmup_steps"),
    f"{ACTOR}.optim.lr_warmup_ratio": none(
        "set train.lr_warmup_steps to the ratio times the number of updates", 0, 0.0
    ),
    f"{ACTOR}.optim.min_lr_ratio": to("train.lr_min_ratio"),
    f"{ACTOR}.optim.lr_scheduler_type": to(
        "train.lr_scheduler", {"constant": "constant", "cosine": "cosine"}
    ),
    f"{ACTOR}.fsdp.enable_full_shard": to(SHARDED),
    f"{ACTOR}.fsdp.torch_dtype": none("mixed_precision=bf16 is the counterpart"),
    f"{ACTOR}.fsdp.mp_param_dtype": to("mixed_precision", {"bf16": "bf16", "fp16": "fp16"}),
    f"{ACTOR}.offload.offload_optimizer": to("train.offload_optimizer"),
    f"{ACTOR}.offload.offload_params": none("sampling uses the training weights", False, True),
    f"{ROLLOUT}.n": to("sample.group_size"),
    f"{ROLLOUT}.temperature": to("sample.temperature"),
    f"{ROLLOUT}.top_p": none("unsupported: rollouts sample the policy without truncation", 1.0),
    f"{ROLLOUT}.top_k": none("unsupported: rollouts sample the policy without truncation", -1),
    f"{ROLLOUT}.name": to("sample.engine", {"vllm": "vllm"}),
    f"{ROLLOUT}.gpu_memory_utilization": derived("sample.vllm_memory"),
    f"{ROLLOUT}.tensor_parallel_size": derived("sample.vllm_tensor_parallel"),
    f"{ROLLOUT}.limit_images": none("images per prompt are not limited", 0),
    "worker.reward.reward_function": derived("reward_fn"),
    "worker.critic.model.model_path": derived("train.critic"),
    "worker.critic.optim.lr": to("train.critic_learning_rate"),
    "worker.critic.cliprange_value": to("train.value_clip"),
    "trainer.max_steps": to("num_epochs"),
    "trainer.total_epochs": none(
        "num_epochs counts rollouts: set it to epochs * rows / sample.questions_per_epoch"
    ),
    "trainer.project_name": to("project_name"),
    "trainer.experiment_name": to("run_name"),
    "trainer.logger": derived("log_with"),
    "trainer.nnodes": to(NODES),
    "trainer.n_gpus_per_node": derived(GPUS),
    "trainer.max_try_make_batch": derived("sample.refills"),
    "trainer.critic_warmup": to("train.critic_warmup"),
    "trainer.val_freq": derived("eval_freq"),
    "trainer.val_before_train": to("eval_before_training"),
    "trainer.val_only": none("use flow-grpo evaluate", False),
    "trainer.val_generations_to_log": to("log_images"),
    "trainer.save_freq": derived("save_freq"),
    "trainer.save_limit": derived("num_checkpoint_limit"),
    "trainer.save_model_only": none("state_freq sets how often a resumable state is saved", False),
    "trainer.save_checkpoint_path": none(IN_RUN),
    "trainer.load_checkpoint_path": to("resume"),
    "trainer.find_last_checkpoint": to("resume", {True: "auto", False: "none"}),
    "trainer.ray_timeline": none("Ray is not used"),
}
GROUPS = {
    f"{ACTOR}.micro_batch_size_*": MEMORY,
    f"{ACTOR}.strategy": "the accelerate config selects DDP, DeepSpeed or FSDP2",
    f"{ACTOR}.fsdp.*": "configure FSDP2 in scripts/accelerate_configs/fsdp2.yaml",
    f"{ROLLOUT}.val_override_config*": "evaluation is greedy; flow-grpo evaluate --n samples",
    f"{ROLLOUT}.*": "see sample.engine and the sample.vllm_* settings",
    "worker.ref.*": "the reference policy uses the policy's settings",
    "worker.critic.*": "the critic uses the policy's settings",
    "worker.reward.*": "see reward_options",
    "worker.hybrid_engine": "one process per GPU samples and trains",
    "config": "the YAML file is read if it exists",
}
DEFAULTS = {  # examples/config.yaml
    "data.train_files": "hiyouga/math12k@train",
    "data.prompt_key": "problem",
    "data.answer_key": "answer",
    "data.max_prompt_length": 2048,
    "data.max_response_length": 2048,
    "data.rollout_batch_size": 512,
    "data.format_prompt": "./examples/format_prompt/math.jinja",
    "data.seed": 1,
    "data.min_pixels": 262144,
    "data.max_pixels": 4194304,
    "data.filter_overlong_prompts": True,
    "algorithm.adv_estimator": "grpo",
    "algorithm.disable_kl": False,
    "algorithm.use_kl_loss": True,
    "algorithm.kl_penalty": "low_var_kl",
    "algorithm.kl_coef": 1e-2,
    f"{ACTOR}.global_batch_size": 128,
    f"{ACTOR}.clip_ratio_low": 0.2,
    f"{ACTOR}.clip_ratio_high": 0.3,
    f"{ACTOR}.clip_ratio_dual": 3.0,
    f"{ACTOR}.loss_avg_mode": "token",
    f"{MODEL}.model_path": "Qwen/Qwen2.5-7B-Instruct",
    f"{MODEL}.enable_gradient_checkpointing": True,
    f"{MODEL}.freeze_vision_tower": False,
    f"{MODEL}.lora.rank": 0,
    f"{ACTOR}.optim.lr": 1e-6,
    f"{ACTOR}.optim.weight_decay": 1e-2,
    f"{ACTOR}.fsdp.enable_full_shard": True,
    f"{ACTOR}.fsdp.mp_param_dtype": "bf16",
    f"{ACTOR}.offload.offload_optimizer": True,
    f"{ROLLOUT}.n": 5,
    "worker.reward.reward_function": "./examples/reward_function/math.py:compute_score",
    "trainer.project_name": "easy_r1",
    "trainer.experiment_name": "qwen2_5_7b_math_grpo",
    "trainer.logger": ("file", "wandb"),
    "trainer.val_freq": 5,
    "trainer.save_freq": 5,
    "trainer.save_limit": 3,
    "trainer.find_last_checkpoint": True,
    "trainer.n_gpus_per_node": 8,
}


def derive(given: Mapping[str, Any]) -> Settings:
    """Compute our settings that depend on several of EasyR1's settings together."""
    ours = _derive_update(given)
    ours |= datasets_of(given["data.train_files"], given.get("data.val_files"))
    ours["log_with"] = trackers_of(given["trainer.logger"])
    for theirs, name in {"trainer.val_freq": "eval_freq", "trainer.save_freq": "save_freq"}.items():
        ours[name] = max(0, int(value_of(given, theirs)))  # -1 is never
    ours["num_checkpoint_limit"] = max(0, int(value_of(given, "trainer.save_limit")))
    ours[GPUS] = int(
        value_of(given, "trainer.n_gpus_per_node") * value_of(given, "trainer.nnodes", 1)
    )
    file = str(given["worker.reward.reward_function"]).partition(":")[0].rpartition("/")[2]
    if file in FORMAT_WEIGHTS:
        weight = FORMAT_WEIGHTS[file]
        ours["reward_fn"] = {"math_answer": 1 - weight, "answer_format": weight}
    if str(given["data.format_prompt"]).endswith("math.jinja"):
        ours["question_format"] = BOXED
        ours["reward_options"] = {"answer_format": {"boxed": True}}
    if given["algorithm.adv_estimator"] == "gae":
        ours |= critic_of(given.get("worker.critic.model.model_path"), given[f"{MODEL}.model_path"])
    return ours


def _derive_update(given: Mapping[str, Any]) -> Settings:
    """Return the settings of the loss, updates, LoRA, Adam and vLLM."""
    ours = _derive_loss(given)
    updates = ratio(given, ["data.rollout_batch_size"], [f"{ACTOR}.global_batch_size"])
    if updates:
        ours["train.updates_per_epoch"] = updates
    rank = value_of(given, f"{MODEL}.lora.rank")
    ours["use_lora"] = rank > 0
    ours["train.freeze_vision"] = rank > 0 or bool(given[f"{MODEL}.freeze_vision_tower"])
    if rank:
        alpha = given.get(f"{MODEL}.lora.alpha", 64)
        ours |= {"train.lora_rank": int(rank), "train.lora_alpha": alpha}
        ours |= modules_of(given.get(f"{MODEL}.lora.target_modules"))
    if betas := given.get(f"{ACTOR}.optim.betas"):
        ours |= {"train.adam_beta1": betas[0], "train.adam_beta2": betas[1]}
    if given.get(f"{ROLLOUT}.name") == "vllm":  # without it, our engine needs neither
        for theirs, name in VLLM.items():
            if theirs in given:
                ours[name] = given[theirs]
    if given.get("algorithm.online_filtering"):
        ours["sample.refills"] = int(value_of(given, "trainer.max_try_make_batch", 20))
        key = given.get("algorithm.filter_key", "overall")
        ours["sample.filter_reward"] = REWARD_NAMES.get(key, key)
        for bound in ("filter_low", "filter_high"):
            if f"algorithm.{bound}" in given:
                ours[f"sample.{bound}"] = given[f"algorithm.{bound}"]
    return ours


def _derive_loss(given: Mapping[str, Any]) -> Settings:
    """Return the settings of the policy loss that its type reads, and of the KL penalty."""
    ours: Settings = {}
    loss = given.get(f"{ACTOR}.loss_type")
    unread = {"sapo": ("low", "high", "dual"), "cispo": ("dual",)}.get(loss, ())
    for end, name in CLIPPING.items():
        if end not in unread and f"{ACTOR}.clip_ratio_{end}" in given:
            ours[name] = given[f"{ACTOR}.clip_ratio_{end}"]
    if loss == "sapo":
        for name in ("tau_positive", "tau_negative"):
            if f"{ACTOR}.{name}" in given:
                ours[f"train.{name}"] = given[f"{ACTOR}.{name}"]
    if given["algorithm.disable_kl"]:
        return {**ours, "train.beta": 0.0}
    ours["train.beta"] = given["algorithm.kl_coef"]
    ours["train.kl"] = KL_ESTIMATORS.get(given["algorithm.kl_penalty"], "k3")
    ours["train.kl_in"] = "loss" if given["algorithm.use_kl_loss"] else "reward"
    # the weight of a KL in the loss is constant: verl/trainer/ray_trainer.py, lines 634 to 640
    if given.get("algorithm.kl_type") == "adaptive" and not given["algorithm.use_kl_loss"]:
        ours["train.kl_target"] = value_of(given, "algorithm.kl_target", 0.1)
        ours["train.kl_horizon"] = value_of(given, "algorithm.kl_horizon", 10_000.0)
    return ours


EASYR1 = Project(
    name="EasyR1",
    source="hiyouga/EasyR1@b44b311 verl/trainer/config.py, verl/workers/*/config.py",
    trainer=VLM,
    keys=KEYS,
    groups=GROUPS,
    defaults=DEFAULTS,
    derive=derive,
    programs=("verl.trainer.main",),
    page="easyr1.md",
)
