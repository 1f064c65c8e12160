"""Named presets: --config config/vlm.py:tiny_vlm; without a name, all defaults."""

from ml_collections import ConfigDict

from flow_grpo.config.paths import resolve_config_paths
from flow_grpo.config.presets import (
    PARENT_KEY,
    FieldValues,
    check_preset_exists,
    preset_models,
    resolve_preset,
)
from flow_grpo.vlm import fields

# Full fine-tuning as EasyR1 does on geometry3k: 512 questions with 5 responses each, four updates,
# ratios clipped to [0.8, 1.3], a KL of 0.01 in the loss, the vision tower trained as well.
GEOMETRY3K: FieldValues = {
    "mixed_precision": "bf16",
    "use_lora": False,
    "dataset": "hiyouga/geometry3k",
    "question_format": fields.THINK_PROMPT + "in \\boxed{}.",
    "min_pixels": 512 * 512,
    "max_pixels": 2048 * 2048,
    "max_prompt_length": 2048,
    "reward_options": {"answer_format": {"boxed": True}},
    "num_epochs": 60,
    "eval_freq": 5,
    "save_freq": 5,
    "state_freq": 5,  # the state is three times the model
    "sample": {"questions_per_epoch": 512, "group_size": 5, "max_new_tokens": 2048},
    "train": {
        "updates_per_epoch": 4,
        "freeze_vision": False,
        "recompute_old": True,  # rollouts and training round differently in half precision
        "gradient_checkpointing": True,
        "learning_rate": 1e-6,
        "clip_low": 0.2,
        "clip_high": 0.3,
        "dual_clip": 3.0,
        "aggregation": "token",
        "beta": 0.01,
        "kl": "k3",
    },
}
# For 80 GB: weights, gradients and moments of 7 B parameters would take 112 GB.
LORA: FieldValues = {
    PARENT_KEY: "_geometry3k",
    "use_lora": True,
    "train": {"freeze_vision": True, "lora_rank": 64, "lora_alpha": 64, "learning_rate": 1e-5},
}
FULL: dict[str, FieldValues] = {
    "qwen2_5_vl_3b_geometry3k": {
        PARENT_KEY: "_geometry3k",
        "pretrained": {"model": "Qwen/Qwen2.5-VL-3B-Instruct"},
    },
    "qwen2_5_vl_7b_geometry3k": {**LORA, "pretrained": {"model": "Qwen/Qwen2.5-VL-7B-Instruct"}},
    # As in the first stage of LMM-R1: a VLM learns to reason on text-only mathematics.
    "qwen2_5_vl_3b_text_math": {
        PARENT_KEY: "qwen2_5_vl_3b_geometry3k",
        "dataset": "dataset/text_math",
        "max_prompt_length": 4096,
        "sample": {"questions_per_epoch": 256, "group_size": 16, "max_new_tokens": 4096},
        "train": {
            "updates_per_epoch": 16,
            "freeze_vision": True,  # without images it has no gradient
            "learning_rate": 4e-7,
            "adam_beta2": 0.95,
            "adam_weight_decay": 0.0,
            "advantage_scale": "batch",
            "beta": 0.001,
            "kl": "k1",
            "kl_in": "reward",
            "clip_high": 0.2,
            "dual_clip": 0.0,
            "lr_scheduler": "cosine",
            "lr_warmup_steps": 29,  # 3 % of all updates
            "lr_min_ratio": 0.1,
        },
    },
    # LMM-R1's first quick start: RLOO on the 8,000 harder problems of MATH.
    "qwen2_5_vl_3b_rloo_math": {
        PARENT_KEY: "qwen2_5_vl_3b_text_math",
        "question_format": fields.THINK_PROMPT + "between <answer> and </answer>.",
        "reward_fn": {"math_answer": 1.0, "answer_format": 0.5},
        "reward_options": {"answer_format": {"boxed": False}},
        "max_prompt_length": 1024,
        "sample": {"max_new_tokens": 3000},
        "train": {
            "updates_per_epoch": 32,
            "learning_rate": 1e-6,
            "advantage": "rloo",
            "advantage_scale": "group",
            "aggregation": "sequence",
            "beta": 0.0,
            "lr_warmup_steps": 58,
        },
    },
    # EasyR1's tutorial: all weights of the 7B model, on eight GPUs with sharded weights.
    "qwen2_5_vl_7b_geometry3k_full": {
        PARENT_KEY: "_geometry3k",
        "pretrained": {"model": "Qwen/Qwen2.5-VL-7B-Instruct"},
    },
    # EasyR1's reproduction of R1-V: counting objects in CLEVR's images.
    "qwen2_5_vl_3b_clevr": {
        PARENT_KEY: "qwen2_5_vl_3b_geometry3k",
        "dataset": "BUAADreamer/clevr_count_70k",
        "question_format": fields.THINK_PROMPT + "between <answer> and </answer>.",
        "reward_fn": {"math_answer": 0.5, "answer_format": 0.5},
        "reward_options": {"answer_format": {"boxed": False}},
    },
    # EasyR1's default: text-only mathematics.
    "qwen2_5_7b_math12k": {
        PARENT_KEY: "_geometry3k",
        "pretrained": {"model": "Qwen/Qwen2.5-7B-Instruct"},
        "dataset": "hiyouga/math12k",
        "min_pixels": 0,
        "max_pixels": 0,
        "train": {"freeze_vision": True},  # it has no vision tower
    },
    "qwen3_vl_4b_geometry3k": {
        PARENT_KEY: "_geometry3k",
        "pretrained": {"model": "Qwen/Qwen3-VL-4B-Instruct"},
    },
    "qwen3_vl_8b_geometry3k": {**LORA, "pretrained": {"model": "Qwen/Qwen3-VL-8B-Instruct"}},
}
PRESETS: dict[str, FieldValues] = {
    # The small VLM in the repository learns to answer questions about images.
    "tiny_vlm": {
        "pretrained": {"model": "assets/tiny-vlm"},
        "dataset": "dataset/shapes_qa",
        "question_format": "{question}",  # the only format it was trained on
        "eval_questions": 128,
        "use_lora": False,
        "num_epochs": 12,
        "eval_freq": 4,
        "save_freq": 4,
        "sample": {"questions_per_epoch": 16, "group_size": 8, "max_new_tokens": 40},
        "train": {"learning_rate": 1e-4, "adam_weight_decay": 0.0},
    },
    # The small text-only model learns to answer sums in the right format.
    "tiny_text": {
        PARENT_KEY: "tiny_vlm",
        "pretrained": {"model": "assets/tiny-text"},
        "dataset": "dataset/sums",
        "eval_questions": 0,
        "num_epochs": 8,
    },
    # A small language model learns which prompts the frozen tiny-sd3 renders best.
    "tiny_enhancer": {
        PARENT_KEY: "tiny_text",
        "pretrained": {"model": "assets/tiny-enhancer"},
        "dataset": "dataset/sign_requests",
        "answer_key": "",  # the reward reads the word from the column `prompt`
        "reward_fn": {"drawn:ocr": 1.0},
        "num_epochs": 8,
        "eval_freq": 4,
        "save_freq": 4,
        "log_images": 24,
        "draw": {
            "model": "assets/tiny-sd3",
            "prompt_key": "prompt",
            "num_steps": 8,
            "guidance_scale": 1.0,
            "height": 32,
            "width": 96,
            "max_sequence_length": 8,  # it was trained to ignore the number of T5 tokens
            "batch_size": 32,
        },
        "sample": {"questions_per_epoch": 16, "group_size": 8, "max_new_tokens": 40},
        "train": {"learning_rate": 1e-3},
    },
    # A small language model learns to call a Python tool for products.
    "tiny_python": {
        PARENT_KEY: "tiny_text",
        "pretrained": {"model": "assets/tiny-tools"},
        "dataset": "dataset/products",
        "environment": "flow_grpo.vlm.environments.python_sandbox:PythonSandbox",
        "environment_options": {"timeout": 5.0, "max_characters": 100},
        "reward_fn": {"math_answer": 1.0},
        "num_epochs": 4,
        "eval_freq": 2,
        "sample": {"max_new_tokens": 40, "max_turns": 2, "max_observation_tokens": 130},
        "train": {"learning_rate": 4e-4},
    },
    # The same model learns to call a search tool for the colours of invented places.
    "tiny_search": {
        PARENT_KEY: "tiny_python",
        "dataset": "dataset/places",
        "environment": "flow_grpo.vlm.environments.local_search:LocalSearch",
        "environment_options": {
            "corpus": "dataset/places/corpus.jsonl",
            "results": 1,
            "max_characters": 100,
        },
    },
    # A small VLM learns to zoom in on digits that it cannot read otherwise.
    "tiny_zoom": {
        PARENT_KEY: "tiny_python",
        "pretrained": {"model": "assets/tiny-zoom"},
        "dataset": "dataset/digits",
        "environment": "flow_grpo.vlm.environments.image_zoom:ImageZoom",
        "environment_options": {"units": "pixels"},
    },
    # The small text-only model copies given responses: one pass over 200, without a rollout.
    "tiny_text_sft": {
        PARENT_KEY: "tiny_text",
        "dataset": "dataset/sum_responses",
        "eval_dataset": "dataset/sums",
        "num_epochs": 2,
        "eval_freq": 1,
        "save_freq": 0,
        "sample": {"questions_per_epoch": 100},
        "train": {"loss": "sft", "updates_per_epoch": 10},
    },
    "tiny_text_dpo": {PARENT_KEY: "tiny_text_sft", "train": {"loss": "dpo"}},
    "tiny_text_kto": {PARENT_KEY: "tiny_text_sft", "train": {"loss": "kto"}},
    **FULL,
}
MODELS = preset_models(PRESETS)


def get_config(name: str = "") -> ConfigDict:
    """Return the config of a preset, or all defaults without a name."""
    config = fields.get_config()
    if name:
        check_preset_exists(name, PRESETS)
        resolve_preset(name, {"_geometry3k": GEOMETRY3K, **PRESETS}, config)
    resolve_config_paths(config)
    return config
