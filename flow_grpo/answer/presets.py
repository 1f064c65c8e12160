"""Named presets: --config config/vlm.py:tiny_vlm; without a name all fields at their defaults."""

from collections.abc import Callable

from ml_collections import ConfigDict

from flow_grpo.answer import fields
from flow_grpo.config.places import find_files
from flow_grpo.errors import UserError, with_nearest

THINK_AND_BOX = fields.THINK + "in \\boxed{}."


def tiny_vlm() -> ConfigDict:
    """The small model that ships with the repo learns to answer what it sees."""
    config = fields.get_config()
    config.pretrained.model = "assets/tiny-vlm"
    config.dataset = "dataset/shapes_qa"
    config.question_format = "{question}"  # all that it has learnt to read
    config.eval_questions = 128
    config.use_lora = False
    config.num_epochs, config.eval_freq, config.save_freq = 12, 4, 4
    config.sample.questions_per_epoch, config.sample.group_size = 16, 8
    config.sample.max_new_tokens = 40
    config.train.learning_rate = 1e-4
    config.train.adam_weight_decay = 0.0
    return config


def _full(model: str) -> ConfigDict:
    """A model of full size, all of its weights, as EasyR1 trains it on geometry3k: 512 questions
    with 5 answers each, four updates, ratios from .8 to 1.3, KL .01 in the loss, the vision tower
    trained too."""
    config = fields.get_config()
    config.pretrained.model = model
    config.mixed_precision = "bf16"
    config.use_lora = False
    config.dataset = "hiyouga/geometry3k"
    config.question_format = THINK_AND_BOX
    config.min_pixels, config.max_pixels = 512 * 512, 2048 * 2048
    config.max_prompt_length = 2048
    config.reward_options = ConfigDict({"answer_format": {"boxed": True}})
    config.num_epochs, config.eval_freq, config.save_freq = 60, 5, 5
    config.state_freq = 5  # its state is three models
    config.sample.questions_per_epoch, config.sample.group_size = 512, 5
    config.sample.max_new_tokens = 2048
    config.train.updates_per_epoch = 4
    config.train.freeze_vision = False
    config.train.recompute_old = True  # half precision rounds sampling and training differently
    config.train.gradient_checkpointing = True
    config.train.learning_rate = 1e-6
    config.train.clip_high, config.train.dual_clip = 0.3, 3.0
    config.train.beta = 0.01
    return config


def qwen2_5_vl_3b_geometry3k() -> ConfigDict:
    return _full("Qwen/Qwen2.5-VL-3B-Instruct")


def qwen2_5_vl_7b_geometry3k() -> ConfigDict:
    """On 80 GB with LoRA: all weights of 7 B, their gradients and moments take 112 GB."""
    return _lora(_full("Qwen/Qwen2.5-VL-7B-Instruct"))


def qwen3_vl_4b_geometry3k() -> ConfigDict:
    return _full("Qwen/Qwen3-VL-4B-Instruct")


def qwen3_vl_8b_geometry3k() -> ConfigDict:
    return _lora(_full("Qwen/Qwen3-VL-8B-Instruct"))


def qwen2_5_vl_3b_text_math() -> ConfigDict:
    """As in the first stage of LMM-R1: a model with eyes learns to reason on maths in words."""
    config = _full("Qwen/Qwen2.5-VL-3B-Instruct")
    config.dataset = "dataset/text_math"
    config.max_prompt_length = config.sample.max_new_tokens = 4096
    config.sample.questions_per_epoch, config.sample.group_size = 256, 16
    config.train.updates_per_epoch = 16
    config.train.freeze_vision = True  # no picture would train it
    config.train.learning_rate = 4e-7
    config.train.adam_beta2, config.train.adam_weight_decay = 0.95, 0.0
    config.train.advantage_scale = "batch"
    config.train.beta, config.train.kl, config.train.kl_in = 0.001, "k1", "reward"
    config.train.clip_high, config.train.dual_clip = 0.2, 0.0
    return config


def _lora(config: ConfigDict) -> ConfigDict:
    config.use_lora = True
    config.train.freeze_vision = True
    config.train.lora_rank, config.train.lora_alpha = 64, 64
    config.train.learning_rate = 1e-5
    return config


FULL = (
    *(qwen2_5_vl_3b_geometry3k, qwen2_5_vl_7b_geometry3k, qwen2_5_vl_3b_text_math),
    *(qwen3_vl_4b_geometry3k, qwen3_vl_8b_geometry3k),
)
PRESETS: dict[str, Callable[[], ConfigDict]] = {p.__name__: p for p in (tiny_vlm, *FULL)}


def get_config(name: str = "") -> ConfigDict:
    if name and name not in PRESETS:
        message = f"unknown preset {name!r}; config/vlm.py has {', '.join(PRESETS)}"
        raise UserError(with_nearest(message, name, PRESETS))
    config = PRESETS[name]() if name else fields.get_config()
    find_files(config)
    return config
