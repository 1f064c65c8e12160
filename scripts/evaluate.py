"""Score a model and its checkpoints on a prompt set or on questions.

    python scripts/evaluate.py --config config/grpo.py:tiny_ocr --out eval/base
    python scripts/evaluate.py --checkpoint logs/RUN/checkpoints/checkpoint-24 --out eval/trained
    python scripts/evaluate.py --checkpoint base,logs/A,logs/B --out eval/compared
    python scripts/evaluate.py --checkpoint base,logs/VLM --dataset dataset/sums --n 4 --out eval/n4

The config sets the model, prompts, rewards, resolution and steps, and whether it is a diffusion
model or a VLM. Without --config, the config of the first run in --checkpoint is used.

Diffusion models: the noise is seeded per prompt, so the batch size and the number of processes do
not change the result, and all checkpoints start from the same noise. Writes results.json,
results.md, grid.png (middle frames of videos), and the images with their scores to samples/.

VLMs and language models: greedy responses, or with --n several sampled ones, each with its own
random seed. Writes results.json, results.csv, results.md, samples.jsonl and report.html. Repeat an
interrupted command to resume it.
"""

import sys
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict

from flow_grpo.config import command_line
from flow_grpo.config.overrides import option_values
from flow_grpo.diffusion.config_loading import check_eval_fields
from flow_grpo.diffusion.fields import DIFFUSION_SPEC
from flow_grpo.errors import UserError
from flow_grpo.vlm.fields import VLM_SPEC

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
DATASETS = flags.DEFINE_multi_string(
    "dataset",
    [],
    "For VLMs: dataset to evaluate on, as a path or hub id: its test split, or all questions if it "
    "has none. May be repeated. Default: the test set of the config.",
)
RESPONSES = flags.DEFINE_integer(
    "n",
    None,
    "For VLMs: number of responses to sample per question, for avg@n, pass@n and maj@n. Default: "
    "one greedy response.",
    lower_bound=1,
)
flags.DEFINE_alias("num_responses", "n")  # torchrun parses --n as its own option
TEMPERATURE = flags.DEFINE_float(
    "temperature", None, "For VLMs, with --n: sampling temperature. Default: sample.temperature."
)
CORRECT = flags.DEFINE_string(
    "correct",
    "",
    "For VLMs, with --n: reward and threshold that determine correctness, such as "
    "math_answer:0.5. Default: the reward with the largest weight, threshold 1.",
)
COMMON = (
    "pretrained.model",
    "train.lora_path",
    "dataset",
    "eval_dataset",
    "eval_prompts",
    "eval_reward_fn",
    "reward_fn",
    "sample.eval_num_steps",
    "sample.eval_guidance_scale",
    "sample.guidance_scale",
    "sample.test_batch_size",
    "resolution",
    "eval_resolution",
    "seed",
)
VLM_COMMON = (
    "pretrained.model",
    "train.lora_path",
    "dataset",
    "eval_questions",
    "input_key",
    "answer_key",
    "question_format",
    "eval_reward_fn",
    "reward_fn",
    "sample.max_new_tokens",
    "sample.temperature",
    "sample.batch_size",
    "seed",
)
VLM_ONLY = {"dataset": DATASETS, "n": RESPONSES, "temperature": TEMPERATURE, "correct": CORRECT}
OUT = flags.DEFINE_string("out", None, "Directory for the results.", required=True)


def main(config: ConfigDict) -> None:
    """Evaluate the checkpoints of a diffusion model and write the results to --out."""
    command_line.reject_other_runs(sys.argv, "checkpoint", DIFFUSION_SPEC)
    for name, option in VLM_ONLY.items():
        if option.value:
            hint = f"use --config.dataset={option.value[0]}" if name == "dataset" else "omit it"
            raise UserError("is for VLMs", field=f"--{name}", value=option.value, hint=hint)
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


def evaluate_vlm(config: ConfigDict) -> None:
    """Evaluate the checkpoints of a VLM or language model and write the results to --out."""
    command_line.reject_other_runs(sys.argv, "checkpoint", VLM_SPEC)
    if NUM_IMAGES.value is not None:
        raise UserError("is for diffusion models", field="--pictures", value=NUM_IMAGES.value)
    from flow_grpo.vlm.checkpoint_evaluation import evaluate_responses

    evaluate_responses(
        config,
        CHECKPOINT.value,
        Path(OUT.value),
        datasets=DATASETS.value,
        limit=config.eval_questions if option_values(sys.argv, "config.eval_questions") else 0,
        n=RESPONSES.value,
        temperature=TEMPERATURE.value,
        correct=CORRECT.value,
    )


if __name__ == "__main__":
    first_run = command_line.config_of_first_run(sys.argv, "checkpoint")
    specs = DIFFUSION_SPEC, VLM_SPEC
    chosen = command_line.choose_trainer(sys.argv, specs, first_run)
    is_vlm = chosen is VLM_SPEC
    command_line.run_with_config(
        evaluate_vlm if is_vlm else main,
        chosen,
        common=VLM_COMMON if is_vlm else COMMON,
        default=first_run,
    )
