"""Score a model and its checkpoints on a prompt set.

    python scripts/evaluate.py --config config/grpo.py:tiny_ocr --out eval/base
    python scripts/evaluate.py --checkpoint logs/RUN/checkpoints/checkpoint-24 --out eval/trained
    python scripts/evaluate.py --checkpoint base,logs/A,logs/B --out eval/compared

Model, prompts, rewards, resolution and steps come from the config; without --config, from that of
the first run given to --checkpoint. The noise is seeded per prompt, so the batch size and the
number of processes do not change the result, and all checkpoints start from the same noise. Writes
results.json, results.md, grid.png (middle frames of videos), and the images with their scores to
samples/.
"""

import sys
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict

from flow_grpo.config import command_line
from flow_grpo.config.overrides import option_values
from flow_grpo.diffusion.config_loading import check_eval_fields
from flow_grpo.diffusion.fields import DIFFUSION_SPEC

CHECKPOINT = flags.DEFINE_multi_string(
    "checkpoint",
    [],
    "A run (its newest checkpoint), a checkpoint (its EMA weights) or a directory in one; a LoRA, "
    "a transformer or a diffusers pipeline, as a path or hub id; base: the base model, with "
    "train.lora_path if set. Several, separated by commas or by repeating the flag, are compared "
    "with the first.",
)
NUM_IMAGES = flags.DEFINE_integer(
    "pictures",
    None,
    "Number of images to save per checkpoint. Default: all images, log_images videos.",
    lower_bound=0,
)
COMMON = (
    "pretrained.model",
    "train.lora_path",
    "dataset",
    "eval_dataset",
    "dataset_column",
    "eval_prompts",
    "eval_reward_fn",
    "reward_fn",
    "sample.eval_num_steps",
    "sample.eval_guidance_scale",
    "sample.guidance_scale",
    "sample.test_batch_size",
    "resolution",
    "eval_resolution",
    "frames",
    "seed",
    "mixed_precision",
)
VLM = (
    "evaluate.py is for diffusion models; scripts/train_vlm.py evaluates a VLM on its test set "
    "before the first epoch (epoch 0 of metrics.jsonl): run it with --config.num_epochs=1, and for "
    "a checkpoint with --config.pretrained.model=DIR, a directory written by scripts/export.py"
)
OUT = flags.DEFINE_string("out", None, "New directory for the results.", required=True)


def main(config: ConfigDict) -> None:
    """Evaluate the checkpoints of --checkpoint and write the results to --out."""
    check_eval_fields(sys.argv, config)
    # imported here so that --help and user errors do not wait for torch
    from flow_grpo.diffusion.checkpoint_evaluation import evaluate_checkpoints

    evaluate_checkpoints(
        config,
        CHECKPOINT.value,
        Path(OUT.value),
        num_images=NUM_IMAGES.value,
        lora_override=next(reversed(option_values(sys.argv, "config.train.lora_path")), ""),
    )


if __name__ == "__main__":
    first_run = command_line.config_of_first_run(sys.argv, "checkpoint")
    command_line.run_with_config(
        main, DIFFUSION_SPEC, common=COMMON, wrong_trainer_message=VLM, default=first_run
    )
