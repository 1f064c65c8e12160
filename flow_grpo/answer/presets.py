"""Named presets: --config config/vlm.py:tiny_vlm; without a name all fields at their defaults."""

from ml_collections import ConfigDict

from flow_grpo.answer import fields
from flow_grpo.config.places import find_files
from flow_grpo.config.presets import LIKE, Fields, models_of, resolve
from flow_grpo.errors import UserError, with_nearest

# A model of full size, all of its weights, as EasyR1 trains it on geometry3k: 512 questions with 5
# answers each, four updates, ratios from .8 to 1.3, KL .01 in the loss, the vision tower trained
# too.
GEOMETRY3K: Fields = {
    "mixed_precision": "bf16",
    "use_lora": False,
    "dataset": "hiyouga/geometry3k",
    "question_format": fields.THINK + "in \\boxed{}.",
    "min_pixels": 512 * 512,
    "max_pixels": 2048 * 2048,
    "max_prompt_length": 2048,
    "reward_options": {"answer_format": {"boxed": True}},
    "num_epochs": 60,
    "eval_freq": 5,
    "save_freq": 5,
    "state_freq": 5,  # its state is three models
    "sample": {"questions_per_epoch": 512, "group_size": 5, "max_new_tokens": 2048},
    "train": {
        "updates_per_epoch": 4,
        "freeze_vision": False,
        "recompute_old": True,  # half precision rounds sampling and training differently
        "gradient_checkpointing": True,
        "learning_rate": 1e-6,
        **{"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 3.0, "aggregation": "token"},
        **{"beta": 0.01, "kl": "k3"},
    },
}
# On 80 GB: all weights of 7 B, their gradients and moments take 112 GB.
LORA: Fields = {
    LIKE: "_geometry3k",
    "use_lora": True,
    "train": {"freeze_vision": True, "lora_rank": 64, "lora_alpha": 64, "learning_rate": 1e-5},
}
FULL: dict[str, Fields] = {
    "qwen2_5_vl_3b_geometry3k": {
        LIKE: "_geometry3k",
        "pretrained": {"model": "Qwen/Qwen2.5-VL-3B-Instruct"},
    },
    "qwen2_5_vl_7b_geometry3k": {**LORA, "pretrained": {"model": "Qwen/Qwen2.5-VL-7B-Instruct"}},
    # As in the first stage of LMM-R1: a model with eyes learns to reason on maths in words.
    "qwen2_5_vl_3b_text_math": {
        LIKE: "qwen2_5_vl_3b_geometry3k",
        "dataset": "dataset/text_math",
        "max_prompt_length": 4096,
        "sample": {"questions_per_epoch": 256, "group_size": 16, "max_new_tokens": 4096},
        "train": {
            "updates_per_epoch": 16,
            "freeze_vision": True,  # no picture would train it
            **{"learning_rate": 4e-7, "adam_beta2": 0.95, "adam_weight_decay": 0.0},
            **{"advantage_scale": "batch", "beta": 0.001, "kl": "k1", "kl_in": "reward"},
            **{"clip_high": 0.2, "dual_clip": 0.0},
            # 3 % of all updates, then down to a tenth
            **{"lr_scheduler": "cosine", "lr_warmup_steps": 29, "lr_min_ratio": 0.1},
        },
    },
    "qwen3_vl_4b_geometry3k": {
        LIKE: "_geometry3k",
        "pretrained": {"model": "Qwen/Qwen3-VL-4B-Instruct"},
    },
    "qwen3_vl_8b_geometry3k": {**LORA, "pretrained": {"model": "Qwen/Qwen3-VL-8B-Instruct"}},
}
PRESETS: dict[str, Fields] = {
    # The small model that ships with the repo learns to answer what it sees.
    "tiny_vlm": {
        "pretrained": {"model": "assets/tiny-vlm"},
        "dataset": "dataset/shapes_qa",
        "question_format": "{question}",  # all that it has learnt to read
        "eval_questions": 128,
        "use_lora": False,
        "num_epochs": 12,
        "eval_freq": 4,
        "save_freq": 4,
        "sample": {"questions_per_epoch": 16, "group_size": 8, "max_new_tokens": 40},
        "train": {"learning_rate": 1e-4, "adam_weight_decay": 0.0},
    },
    # Its language model without eyes learns to answer sums in the right form.
    "tiny_text": {
        LIKE: "tiny_vlm",
        "pretrained": {"model": "assets/tiny-text"},
        "dataset": "dataset/sums",
        "eval_questions": 0,
        "num_epochs": 8,
    },
    **FULL,
}
MODELS = models_of(PRESETS)


def check_preset(name: str) -> None:
    if name and name not in PRESETS:
        message = f"unknown preset {name!r}; config/vlm.py has {', '.join(PRESETS)}"
        raise UserError(with_nearest(message, name, PRESETS))


def get_config(name: str = "") -> ConfigDict:
    check_preset(name)
    config = fields.get_config()
    if name:
        resolve(name, {"_geometry3k": GEOMETRY3K, **PRESETS}, config)
    find_files(config)
    return config
