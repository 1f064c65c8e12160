"""Settings shared by both trainers.

`diffusion/fields.py` and `vlm/fields.py` add their own and override those that differ.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from flow_grpo.config.settings import section, setting

ADAMW, ADAMW_BF16 = "adamw", "adamw_bf16"  # values of train.optimizer
UNQUANTIZED = "bf16"  # frozen weights in the dtype of mixed_precision
BASE_PRECISIONS = (UNQUANTIZED, "fp8", "nf4")
EVAL_SET = "eval_dataset"  # which its column settings require


@dataclass(frozen=True)
class RunFields:
    """Settings of the run itself: directory, resuming, seed, epochs, checkpoints, logging."""

    run_name: str = setting(
        "", "Name of the run directory in `logdir`; empty uses the date and time."
    )
    logdir: str = setting("logs", "Directory that contains the run directories.")
    resume: str = setting(
        "none",
        '"auto" resumes the run of this name if it exists; the path of a run or checkpoint starts '
        'a new run from that state; "none" starts a new run.',
    )
    resume_changed: bool = setting(
        False,
        "Allow a resumed run to change its reward, dataset, model or algorithm, which is "
        "otherwise rejected as a forgotten option.",
    )
    seed: int = setting(
        42,
        "Random seed of prompts or questions, noise, windows, responses and LoRA weights; results "
        "do not depend on the number of processes.",
        at_least=0,
        at_most=2**64 - 1,  # the limit of torch
    )
    num_epochs: int = setting(
        100, "Total epochs of the run, including those before a resume.", at_least=1, at_most=10**6
    )
    eval_freq: int = setting(
        10,
        "Epochs between evaluations on the test set; 0 evaluates only before and after the run.",
        at_least=0,
    )
    eval_before_training: bool = setting(
        True,
        "Also evaluate before the first epoch: the baseline of the report, and a test of the "
        "evaluation's rewards before time is spent on training.",
    )
    save_freq: int = setting(
        10, "Epochs between checkpoints; the last epoch is always saved.", at_least=0
    )
    num_checkpoint_limit: int = setting(
        5, "Number of recent checkpoints to keep in addition to the best; 0 keeps all.", at_least=0
    )
    state_freq: int = setting(
        1,
        "Epochs between resumable states, of which the newest is kept: a killed run loses at most "
        "this many epochs. Use more for full fine-tuning, whose state is three times the model.",
        at_least=1,
    )
    distributed_timeout: int = setting(
        600,
        "Seconds without a response from another process until the run stops.",
        at_least=1,
        at_most=10**8,  # timeouts are 64-bit nanoseconds
    )
    log_images: int = setting(
        16,
        "Images or responses saved at each evaluation, from the test set and from training.",
        at_least=0,
        at_most=10**4,
    )
    log_with: str = setting(
        "",
        "Trackers, separated by commas: wandb, tensorboard, swanlab, trackio, mlflow. "
        "metrics.jsonl is always written. docs/metrics.md explains logging without a network.",
    )
    project_name: str = setting("flow_grpo", "Project name in the trackers.")
    mixed_precision: str = setting(
        "no",
        'Dtype of the frozen weights: "no" (float32), "bf16" or "fp16". LoRA weights stay in '
        "float32. In half precision the on-policy ratio can deviate from 1; "
        "train/first_update_ratio_dev logs by how much.",
        choices=("no", "bf16", "fp16"),
    )
    allow_tf32: bool = setting(
        False,
        "Use TF32 for float32 matrix products on the GPU: faster, but the on-policy ratio deviates "
        "from 1. No effect in half precision.",
    )
    device: str = setting(
        "auto",
        '"auto" uses a CUDA GPU if available; "cpu" uses none; "cuda" requires one, and "cuda:1" '
        "selects it by index.",
    )


def reward_servers_setting(rewards: Iterable[str]) -> Any:
    """Declare the setting `reward_servers`; by default each of `rewards` has an empty URL."""
    return setting(
        dict.fromkeys(rewards, ""),
        "Servers that score a reward instead of this process, separated by commas: "
        '"http://a:18085,http://b:18085".',
    )


@dataclass(frozen=True)
class RewardFields:
    """Settings of the rewards: weights, options, custom rewards, servers and failures."""

    reward_fn: dict = setting(
        {}, "Rewards and their weights, on the command line --config.reward_fn=\"{'ocr': 1.0}\""
    )
    eval_reward_fn: dict = setting({}, "Rewards and weights for evaluation; empty uses reward_fn.")
    second_reward: str = setting(
        "",
        "Additional reward that only evaluations compute, with weight 0; a health check warns if "
        "it falls while the trained rewards rise.",
    )
    custom_rewards: dict = setting({}, 'Custom rewards: {"mine": "my_pkg.my_module:my_reward"}.')
    reward_options: dict = setting(
        {},
        'Keyword arguments of reward classes: {"ocr": {"engine": "rapidocr"}}. All rewards accept '
        '"frames", the frames of a video to score: "first", "middle", "mean of N" or "clip".',
    )
    reward_servers: dict = reward_servers_setting(())
    reward_retries: int = setting(
        8,
        "Retries of a batch that could not be scored, after which its scores are missing.",
        at_least=0,
        at_most=1000,
    )
    reward_timeout: float = setting(
        300.0,
        "Seconds for all attempts to score a batch.",
        above=0,
        at_most=10**8,  # timeouts are 64-bit nanoseconds
    )
    max_failed_fraction: float = setting(
        0.2,
        "The run saves and stops if more than this fraction of the scores of an epoch is missing.",
        at_least=0,
        at_most=1,
    )

    def eval_weights(self, trained: dict[str, float] | None = None) -> dict[str, float]:
        """Return the weights of the evaluation rewards, by default the training rewards.

        Args:
            trained: Weights of the training rewards; None for `reward_fn`.
        """
        weights = self.eval_reward_fn or (self.reward_fn if trained is None else trained)
        return {**weights, **self.second_weight()}

    def second_weight(self) -> dict[str, float]:
        """Return `second_reward` with weight 0; empty if it is not set."""
        return {self.second_reward: 0.0} if self.second_reward else {}


@dataclass(frozen=True)
class ModelFields:
    """Section `pretrained`: which model to load, and in which precision."""

    model: str = setting("", "Model directory or hub id.")
    revision: str = setting(
        "main", 'Branch, tag or commit of a hub id; "main" for a local directory.'
    )
    base_precision: str = setting(
        UNQUANTIZED,
        'Precision of the frozen weights under LoRA: "fp8" takes half the memory on recent '
        'GPUs, "nf4" takes a quarter and is not faster, "bf16" keeps the dtype of mixed_precision. '
        "The saved LoRA applies to the unquantized model.",
        choices=BASE_PRECISIONS,
    )


@dataclass(frozen=True)
class TrainFields:
    """Section `train`, as far as it does not depend on the kind of model."""

    num_inner_epochs: int = setting(
        1,
        "Passes over the samples of an epoch; more than one is less on-policy.",
        at_least=1,
        at_most=1000,
    )
    gradient_checkpointing: bool = setting(
        False, "Recompute activations in the backward pass: slower, with much less memory."
    )
    use_8bit_adam: bool = setting(
        False,
        "Store Adam's moments in 8 bits (bitsandbytes, GPU only); useful for full fine-tuning.",
    )
    offload_optimizer: bool = setting(
        False,
        "Keep Adam's moments in CPU memory between updates: saves GPU memory for two transfers per "
        "update. DeepSpeed has its own offload.",
        excludes="train.use_8bit_adam",
    )
    learning_rate: float = setting(
        3e-4, "Peak learning rate of AdamW; see lr_scheduler.", above=0, at_most=1
    )
    lr_scheduler: str = setting(
        "constant",
        'Learning rate schedule over all updates of the run: "constant", "linear" decay to 0, or '
        '"cosine" decay to lr_min_ratio.',
        choices=("constant", "linear", "cosine"),
    )
    lr_warmup_steps: int = setting(
        0, "Number of warmup updates, in which the learning rate rises from 0.", at_least=0
    )
    lr_min_ratio: float = setting(
        0.0,
        "Final learning rate of the cosine schedule, as a fraction of learning_rate.",
        at_least=0,
        at_most=1,
    )
    adam_beta1: float = setting(0.9, "Decay rate of AdamW's first moment.", from_0_below=1)
    adam_beta2: float = setting(0.999, "Decay rate of AdamW's second moment.", from_0_below=1)
    adam_weight_decay: float = setting(1e-4, "Weight decay of AdamW.", at_least=0, at_most=10)
    adam_epsilon: float = setting(
        1e-8,
        "Epsilon of AdamW. Gradients can be as small as 1e-8 and would vanish under a larger one.",
        at_least=1e-30,  # anything less is 0 in float32, and 0 / 0 is NaN
        at_most=1,
    )
    max_grad_norm: float = setting(
        1.0, "Maximum gradient norm; larger gradients are scaled down.", above=0
    )
    max_skipped_updates: int = setting(
        10,
        "Updates with a non-finite gradient are skipped; after this many in a row the run stops. "
        "0 sets no limit.",
        at_least=0,
    )
    ema: bool = setting(
        True, "Also evaluate and save an exponential moving average (EMA) of the weights."
    )
    ema_decay: float = setting(0.9, "Decay of the EMA.", from_0_below=1)
    ema_update_interval: int = setting(
        8,
        "Updates between two EMA steps. At update n the decay is at most (1 + n) / (10 + n).",
        at_least=1,
    )
    lora_rank: int = setting(
        32,
        "Rank of LoRA, whose product is scaled by lora_alpha / lora_rank.",
        at_least=1,
        at_most=4096,
    )
    lora_alpha: int = setting(64, "Alpha of LoRA; see lora_rank.", above=0, at_most=10**5)
    lora_target_modules: str = setting(
        "",
        "Linear layers that get LoRA: names or their ends as in PEFT, separated by commas, such as "
        '"to_q,to_v", or "all-linear". Empty uses the default of the model family.',
        requires={"use_lora=True": "all weights are trained"},
        excludes={"train.lora_path": "a loaded LoRA has its own layers"},
    )
    lora_path: str = setting(
        "",
        "LoRA to start from, with its own rank and alpha; it is also the reference policy. A "
        "directory, a .safetensors file or a hub id.",
    )


@dataclass(frozen=True)
class SharedFields(RewardFields, RunFields):
    """Settings that do not depend on the kind of model."""

    pretrained: ModelFields = section(ModelFields)
    dataset: str = setting("", "Directory with train and test files, one such file, or a hub name.")
    eval_dataset: str = setting(
        "",
        "Dataset or mixture to evaluate on instead of the test split of dataset, in the same "
        "formats: its test split, or all rows if it has none.",
    )
    metadata_columns: str = setting(
        "",
        "Columns to pass to the rewards as metadata, separated by commas, even if they look like "
        "images, videos, audio or conversations, which are otherwise rejected if nothing reads "
        "them. Binary data in them is not loaded.",
    )
    custom_models: dict = setting(
        {},
        "Custom model families, by the class or model type in a model's files: "
        '{"MyPipeline": "path/to/file.py:MyAdapter"}.',
    )
    train: TrainFields = section(TrainFields)
