"""Score a model and checkpoints of it on a prompt set.

    python scripts/evaluate.py --config config/grpo.py:tiny_ocr --out eval/base
    python scripts/evaluate.py --checkpoint logs/RUN/checkpoints/checkpoint-24 --out eval/trained
    python scripts/evaluate.py --checkpoint base,logs/A,logs/B --out eval/compared

Model, prompts, rewards, sizes and steps come from the config; without --config, from that of the
first run that --checkpoint names. Every prompt has a noise of its
own, so batch size and number of processes do not change the result, and checkpoints are compared
on the same noise. Writes results.json, results.md, grid.png (of videos the middle frames), and
the pictures with their scores to samples/.
"""

import sys
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict

from flow_grpo.config import command_line
from flow_grpo.config.overrides import values_of
from flow_grpo.draw.fields import DRAW
from flow_grpo.draw.saved import check_eval_fields

CHECKPOINT = flags.DEFINE_multi_string(
    "checkpoint",
    [],
    "A run (its newest checkpoint), a checkpoint (its EMA) or a folder in one; base: the model as "
    "it is, or with train.lora_path. Several, with commas or the flag repeated, are held against "
    "the first.",
)
PICTURES = flags.DEFINE_integer(
    "pictures",
    None,
    "How many to save of each checkpoint; if not given all, of videos log_images.",
    lower_bound=0,
)
COMMON = (
    *("pretrained.model", "train.lora_path", "dataset", "dataset_column", "eval_prompts"),
    *("eval_reward_fn", "reward_fn", "sample.eval_num_steps", "sample.eval_guidance_scale"),
    *("sample.guidance_scale", "sample.test_batch_size", "resolution", "frames", "seed"),
    "mixed_precision",
)
VLM = (
    "evaluate.py is for diffusion models; scripts/train_vlm.py evaluates a VLM on its test set "
    "before the first epoch (epoch 0 of metrics.jsonl): run it with --config.num_epochs=1, and for "
    "a checkpoint with --config.pretrained.model=FOLDER, a folder that scripts/export.py wrote"
)
OUT = flags.DEFINE_string("out", None, "New folder for what is written.", required=True)


def main(config: ConfigDict) -> None:
    check_eval_fields(sys.argv, config)
    from flow_grpo.draw.compare import evaluate_all  # here: help and mistakes should not wait

    lora = next(reversed(values_of(sys.argv, "config.train.lora_path")), "")
    out = Path(OUT.value)
    evaluate_all(config, CHECKPOINT.value, out, pictures=PICTURES.value, lora_given=lora)


if __name__ == "__main__":
    first_run = command_line.config_of_first(sys.argv, "checkpoint")
    command_line.run(main, DRAW, common=COMMON, other_trade=VLM, default=first_run)
