"""Options of TRL's SFT, DPO and KTO.

Read from github.com/huggingface/trl at f2cd577: trl/trainer/sft_config.py (lines 143 to 302),
dpo_config.py (150 to 336) and kto_config.py (115 to 241); the options of models and datasets are
those of trl.py. An epoch here is one update there.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from flow_grpo.config.migration.counterparts import (
    VLM,
    Counterpart,
    Project,
    Settings,
    derived,
    modules_of,
    none,
    to,
    value_of,
)
from flow_grpo.config.migration.trl import ADAPTIVE, GROUPS, KEYS

PACKED = "sequences are packed"
OTHER_LOSS = "only the losses sft, dpo (sigmoid), ipo and kto are supported"
LENGTHS = "longer rows are rejected, or dropped with filter_overlong_prompts, never truncated"
# Options of models, datasets and the optimizer, which mean the same as in GRPO.
SAME = str.split(
    "learning_rate model_name_or_path model_revision dtype bf16 fp16 use_peft lora_r "
    "lora_alpha lora_dropout lora_target_modules load_in_4bit load_in_8bit dataset_name "
    "dataset_train_split dataset_test_split output_dir run_name seed save_total_limit "
    "resume_from_checkpoint logging_steps report_to gradient_checkpointing max_grad_norm "
    "weight_decay adam_beta1 adam_beta2 warmup_steps lr_scheduler_type"
)
COMMON: dict[str, Counterpart] = {
    **{name: KEYS[name] for name in SAME},
    "per_device_train_batch_size": derived("sample.questions_per_epoch"),
    "gradient_accumulation_steps": derived("sample.questions_per_epoch"),
    "max_steps": derived("num_epochs"),
    "num_train_epochs": none(
        "num_epochs counts updates: set it to epochs * rows / sample.questions_per_epoch"
    ),
    "save_steps": derived("save_freq"),
    "eval_steps": derived("eval_freq"),
    "max_length": to("sample.max_new_tokens"),
}
REFERENCE = {
    "beta": to("train.beta"),
    "precompute_ref_log_probs": none("the reference is computed once per epoch", False),
}
SFT_KEYS = {
    **COMMON,
    "truncation_mode": none(LENGTHS),
    "dataset_text_field": none("set input_key and response_key", "text"),
    "chat_template_path": to("chat_template"),
    "completion_only_loss": none("prompts are never trained", True, None),
    "assistant_only_loss": to("response_turns", {True: "all", False: "last"}),
    "packing": none(PACKED, True),
    "padding_free": none(PACKED, True),
    "shuffle_dataset": none("each pass over the data is shuffled", True),
    "loss_type": none(OTHER_LOSS, "nll", "chunked_nll", None),
}
DPO_KEYS = {
    **COMMON,
    **REFERENCE,
    "truncation_mode": none(LENGTHS),
    "padding_free": none(PACKED, True),
    "loss_type": to("train.loss", {"sigmoid": "dpo", "ipo": "ipo"}),
    "label_smoothing": none("label smoothing is not supported", 0, 0.0),
    "use_weighting": none("WPO's weights are not supported", False),
    "f_divergence_type": none("only the reverse KL is supported", "reverse_kl"),
}
KTO_KEYS = {
    **COMMON,
    **REFERENCE,
    "loss_type": to("train.loss", {"kto": "kto"}),
    "desirable_weight": to("train.desirable_weight"),
    "undesirable_weight": to("train.undesirable_weight"),
}
OFFLINE_GROUPS = {
    **GROUPS,
    "packing_strategy": PACKED,
    "eval_packing": PACKED,
    "dataset_*": "see the settings of columns, docs/vlm/cold_start.md",
    "eos_token": "a response ends with the stop token of the chat template",
    "pad_token": PACKED,
    "activation_offloading": "see train.gradient_checkpointing",
    "precompute_ref_batch_size": "the reference is computed once per epoch",
    "loss_weights": OTHER_LOSS,
    "ld_alpha": OTHER_LOSS,
    "f_alpha_divergence_coef": "only the reverse KL is supported",
    "discopop_tau": OTHER_LOSS,
    "train_sampling_strategy": "each pass over the data is shuffled",
    "eval_strategy": "set eval_freq",
    "ref_model_*": ADAPTIVE,
    "push_to_hub": "use flow-grpo publish",
}
DEFAULTS = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "max_length": 1024,
    "gradient_checkpointing": True,
    "use_peft": False,
    "weight_decay": 0.0,
}


def derive(given: Mapping[str, Any], loss: str) -> Settings:
    """Compute our settings that depend on several options together, for one process."""
    rows = value_of(given, "per_device_train_batch_size", 8)
    ours: Settings = {
        "sample.questions_per_epoch": max(
            1, round(rows * value_of(given, "gradient_accumulation_steps", 1))
        ),
        "train.updates_per_epoch": 1,
    }
    if loss == "sft":
        ours["train.loss"] = loss
    for theirs, name in (
        ("max_steps", "num_epochs"),
        ("save_steps", "save_freq"),
        ("eval_steps", "eval_freq"),
    ):
        if (count := value_of(given, theirs)) >= 1:  # a fraction is one of the whole run
            ours[name] = int(count)
    if given.get("use_peft"):
        ours |= {
            "train.lora_rank": given.get("lora_r", 16),
            "train.lora_alpha": given.get("lora_alpha", 32),
            **modules_of(given.get("lora_target_modules")),
        }
    report = given.get("report_to")
    if report and report not in ("none", "all"):
        ours["log_with"] = report if isinstance(report, str) else ",".join(report)
    return ours


def _project(
    loss: str,
    keys: Mapping[str, Counterpart],
    defaults: Mapping[str, Any],
    scripts: tuple[str, ...],
) -> Project:
    """Return the table of one of the three trainers."""
    compute: Callable[[Mapping[str, Any]], Settings] = partial(derive, loss=loss)
    named = (f"trl {loss}", f"trl.scripts.{loss}", f"trl/scripts/{loss}.py")
    return Project(
        name=f"TRL {loss.upper()}",
        source=f"huggingface/trl@f2cd577 trl/trainer/{loss}_config.py, model_config.py",
        trainer=VLM,
        keys=keys,
        groups=OFFLINE_GROUPS,
        defaults={**DEFAULTS, **defaults},
        derive=compute,
        programs=(*named, *(f"examples/scripts/{name}.py" for name in scripts)),
        page=f"trl_{loss}.md",
    )


TRL_SFT = _project("sft", SFT_KEYS, {"learning_rate": 2e-5}, ("sft", "sft_vlm"))
TRL_DPO = _project(
    "dpo",
    DPO_KEYS,
    {"learning_rate": 1e-6, "loss_type": "sigmoid", "beta": 0.1},
    ("dpo", "dpo_vlm"),
)
TRL_KTO = _project(
    "kto", KTO_KEYS, {"learning_rate": 1e-6, "loss_type": "kto", "beta": 0.1}, ("kto",)
)
