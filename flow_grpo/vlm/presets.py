"""Named presets: --config config/vlm.py:tiny_vlm; without a name all fields at their defaults."""

from collections.abc import Callable

from ml_collections import ConfigDict

from flow_grpo.errors import UserError, with_nearest
from flow_grpo.run.places import find_files
from flow_grpo.vlm import fields

# EasyR1's for questions with pictures, in the words of its format prompt
THINK_AND_BOX = (
    "{question} You FIRST think about the reasoning process as an internal monologue and then "
    "provide the final answer. The reasoning process MUST BE enclosed within <think> </think> "
    "tags. The final answer MUST BE put in \\boxed{}."
)


def tiny_vlm() -> ConfigDict:
    """The small model that ships with the repo learns to answer what it sees."""
    config = fields.get_config()
    config.pretrained.model = "assets/tiny-vlm"
    config.dataset = "dataset/shapes_qa"
    config.eval_questions = 128
    config.reward_fn = ConfigDict({"math_answer": 0.9, "answer_format": 0.1})
    config.use_lora = False
    config.num_epochs, config.eval_freq, config.save_freq = 12, 4, 4
    config.sample.questions_per_epoch, config.sample.group_size = 16, 8
    config.sample.max_new_tokens = 40
    config.train.learning_rate = 1e-4
    config.train.adam_weight_decay = 0.0
    return config


PRESETS: dict[str, Callable[[], ConfigDict]] = {p.__name__: p for p in (tiny_vlm,)}


def get_config(name: str = "") -> ConfigDict:
    if name and name not in PRESETS:
        message = f"unknown preset {name!r}; config/vlm.py has {', '.join(PRESETS)}"
        raise UserError(with_nearest(message, name, PRESETS))
    config = PRESETS[name]() if name else fields.get_config()
    find_files(config)
    return config
