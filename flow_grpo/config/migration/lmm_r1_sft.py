"""Options of the SFT of LMM-R1 and OpenRLHF.

Read from github.com/TideDra/lmm-r1 at 2e98315, openrlhf/cli/train_sft.py. Options that it
shares with the RL trainer are defined in lmm_r1.py. An epoch here is one update there.
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
from flow_grpo.config.migration.lmm_r1 import GROUPS, KEYS, derive_data, derive_run

SAME = str.split(
    "pretrain eval_dataset input_key max_samples micro_train_batch_size ring_attn_size "
    "apply_chat_template "
    "input_template adam_betas l2 max_norm lr_warmup_ratio aux_loss_coef seed lora_rank "
    "lora_alpha target_modules lora_dropout exclude_modules load_in_4bit bf16 "
    "gradient_checkpointing adam_offload zero_stage save_path max_ckpt_num load_checkpoint "
    "ckpt_path save_hf_ckpt use_wandb use_tensorboard wandb_project wandb_run_name local_rank"
)
LMM_R1_SFT = Project(
    name="LMM-R1 SFT (OpenRLHF)",
    source="TideDra/lmm-r1@2e98315 openrlhf/cli/train_sft.py:140-246",
    trainer=VLM,
    keys={
        **{name: KEYS[name] for name in SAME},
        "dataset": derived("dataset"),
        "dataset_probs": derived("dataset"),
        "dataset_split": none("the dataset's own train and test splits are used", "train"),
        "eval_split": none("the dataset's own train and test splits are used", "test", "train"),
        "train_split": none("the dataset's own train and test splits are used", "train"),
        "output_key": to("response_key"),
        "multiturn": to("response_turns", {True: "all", False: "last"}),
        "pretrain_mode": none("prompts are never trained", False),
        "tokenizer_chat_template": to("chat_template"),
        "learning_rate": to("train.learning_rate"),
        "lr_scheduler": to(
            "train.lr_scheduler", {"cosine_with_min_lr": "cosine", "constant": "constant"}
        ),
        "train_batch_size": to("sample.questions_per_epoch"),
        "max_epochs": none(
            "num_epochs counts updates: set it to epochs * rows / sample.questions_per_epoch"
        ),
        "max_len": to("sample.max_new_tokens"),
        "save_steps": derived("save_freq"),
        "eval_steps": derived("eval_freq"),
    },
    groups={**GROUPS, "ds_tensor_parallel_size": "tensor parallelism is not supported"},
    defaults={
        "train_batch_size": 128,
        "learning_rate": 5e-6,
        "adam_betas": (0.9, 0.95),
        "l2": 0.0,
        "max_len": 2048,
        "lr_scheduler": "cosine_with_min_lr",
        "input_key": "input",
        "zero_stage": 2,
        "lora_rank": 0,
    },
    derive=lambda given: derive(given),
    programs=("openrlhf.cli.train_sft",),
    page="lmm_r1_sft.md",
)


def derive(given: Mapping[str, Any]) -> Settings:
    """Compute our settings that depend on several options together."""
    low, high = given["adam_betas"]
    named = {"prompt_data": given.get("dataset"), "prompt_data_probs": given.get("dataset_probs")}
    ours: Settings = {
        "train.loss": "sft",
        "train.updates_per_epoch": 1,
        "train.adam_beta1": float(low),
        "train.adam_beta2": float(high),
        "use_lora": value_of(given, "lora_rank") > 0,
        **derive_data({**given, **named}),
        **derive_run(given),
    }
    for theirs, name in (("save_steps", "save_freq"), ("eval_steps", "eval_freq")):
        if (count := value_of(given, theirs)) > 0:
            ours[name] = int(count)
    if given.get("lr_scheduler") == "cosine_with_min_lr":
        ours["train.lr_min_ratio"] = 0.1  # line 102
    if ours["use_lora"]:
        ours |= {
            "train.lora_rank": given["lora_rank"],
            "train.lora_alpha": given.get("lora_alpha", 16),
            **modules_of(given.get("target_modules")),
        }
    return ours
