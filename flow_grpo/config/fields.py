"""The fields that every run has, whatever it trains: draw/fields.py and answer/fields.py add their
own, and redefine those that mean something else there."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from flow_grpo.config.settings import section, setting

FULL = "bf16"  # frozen weights as mixed_precision says
PRECISIONS = (FULL, "fp8", "nf4")  # of frozen weights


@dataclass(frozen=True)
class RunFields:
    run_name: str = setting("", "Folder under `logdir`; empty takes the date and time.")
    logdir: str = setting("logs", "Folder of all runs.")
    resume: str = setting(
        "none",
        '"auto" goes on with the run of this name where it was stopped, if there is one; a path '
        '(of a run or a checkpoint) starts a new run from that state; "none" starts a new run.',
    )
    resume_changed: bool = setting(
        False,
        "Go on with another reward, data set, model or method than the run had. For those who "
        "change its goal on purpose: it is refused otherwise, as a flag that was forgotten.",
    )
    seed: int = setting(
        42,
        "All that is drawn at random follows from it, for any number of processes: prompts or "
        "questions, noise, windows, answers and LoRA weights.",
        at_least=0,
        at_most=2**64 - 1,  # torch takes no more
    )
    num_epochs: int = setting(
        100, "Epochs of the whole run, those before a resume included.", at_least=1, at_most=10**6
    )
    eval_freq: int = setting(
        10,
        "Epochs between evaluations on the test prompts; 0 evaluates before and after the run "
        "only.",
        at_least=0,
    )
    save_freq: int = setting(
        10, "Epochs between checkpoints; the last epoch is always saved.", at_least=0
    )
    num_checkpoint_limit: int = setting(
        5, "Newest checkpoints to keep, besides the best; 0 keeps all.", at_least=0
    )
    state_freq: int = setting(
        1,
        "Epochs between states to resume from, of which the newest is kept: a run that is killed "
        "loses at most this many. Larger for full fine-tuning, whose state is three models.",
        at_least=1,
    )
    distributed_timeout: int = setting(
        600,
        "Seconds after which processes give up on one that does not answer any more.",
        at_least=1,
        at_most=10**8,  # what waits counts nanoseconds in 64 bits
    )
    log_images: int = setting(
        16,
        "Pictures or answers written with each evaluation, of the test prompts and of training.",
        at_least=0,
        at_most=10**4,
    )
    log_with: str = setting(
        "",
        '"", or some of wandb, tensorboard, swanlab, trackio and mlflow, as in '
        '"wandb,tensorboard". metrics.jsonl is always written. docs/metrics.md says how to log '
        "without a network.",
    )
    project_name: str = setting("flow_grpo", "What trackers file the run under.")
    mixed_precision: str = setting(
        "no",
        '"no", "bf16" or "fp16": the dtype of the frozen weights. LoRA weights stay in float32. '
        "Half precision can move the on-policy ratio off 1; train/first_update_ratio_dev shows it.",
        choices=("no", "bf16", "fp16"),
    )
    allow_tf32: bool = setting(
        False,
        "Let a GPU round the inputs of float32 products to 10 bits (TF32): faster, and the "
        "on-policy ratio moves off 1. Nothing changes in half precision.",
    )
    device: str = setting(
        "auto",
        '"auto" takes a CUDA GPU where there is one; "cpu" never does; "cuda" has to have one, and '
        '"cuda:1" takes that one.',
    )


def servers(rewards: Iterable[str]) -> Any:
    """The field reward_servers, where these are the rewards that there are."""
    reason = (
        'Reward servers, "http://a:18085,http://b:18085", that score a reward instead of this '
        "process."
    )
    return setting(dict.fromkeys(rewards, ""), reason)


@dataclass(frozen=True)
class RewardFields:
    reward_fn: dict = setting(
        {}, "Rewards and their weights. On the command line: --config.reward_fn=\"{'ocr': 1.0}\""
    )
    eval_reward_fn: dict = setting({}, "Rewards of the evaluation; empty means the same.")
    custom_rewards: dict = setting(
        {}, 'Names for rewards of your own: {"mine": "my_pkg.my_module:my_reward"}'
    )
    reward_options: dict = setting(
        {},
        'Keyword arguments of rewards that are classes: {"ocr": {"engine": "rapidocr"}}. All take '
        '"frames", what they see of a video: "first", "middle", "mean of N" or "clip".',
    )
    reward_servers: dict = servers(())
    reward_retries: int = setting(
        8,
        "How often a batch that could not be scored is tried again; then its scores are missing.",
        at_least=0,
        at_most=1000,
    )
    reward_timeout: float = setting(
        300.0,
        "Seconds for all attempts to score a batch together.",
        above=0,
        at_most=10**8,  # what waits counts nanoseconds in 64 bits
    )
    max_failed_fraction: float = setting(
        0.2,
        "The run saves and stops when more than this share of an epoch's scores are missing.",
        at_least=0,
        at_most=1,
    )


@dataclass(frozen=True)
class ModelFields:
    model: str = setting("", "A folder or a hub id.")
    revision: str = setting(
        "main", 'Branch, tag or commit of a hub id. A folder has none: leave it at "main".'
    )
    base_precision: str = setting(
        FULL,
        'Frozen weights under LoRA: "fp8" takes half the memory and is for new GPUs, "nf4" takes a '
        'quarter and is no faster; "bf16" leaves them as mixed_precision says. The saved LoRA '
        "is for the model as it was.",
        choices=PRECISIONS,
    )


@dataclass(frozen=True)
class TrainFields:
    num_inner_epochs: int = setting(
        1, "Passes over an epoch's samples. More reuse, less on-policy.", at_least=1, at_most=1000
    )
    gradient_checkpointing: bool = setting(
        False, "Recompute activations in the backward pass: more time, far less memory."
    )
    use_8bit_adam: bool = setting(
        False,
        "Adam's two moments in 8 bits (bitsandbytes, GPU only): worth it for full fine-tuning.",
    )
    offload_optimizer: bool = setting(
        False,
        "Adam's moments wait on the CPU between updates: less GPU memory, for two copies of them "
        "an update. DeepSpeed has an offload of its own.",
    )
    learning_rate: float = setting(
        3e-4, "AdamW's, at its highest: see lr_scheduler.", above=0, at_most=1
    )
    lr_scheduler: str = setting(
        "constant",
        'The learning rate stays as it is ("constant"), or falls over all updates of the run: in a '
        'straight line to 0 ("linear") or as a "cosine", see lr_min_ratio.',
        choices=("constant", "linear", "cosine"),
    )
    lr_warmup_steps: int = setting(
        0, "Updates at the start in which the learning rate rises from 0.", at_least=0
    )
    lr_min_ratio: float = setting(
        0.0, "Share of learning_rate that a cosine ends with.", at_least=0, at_most=1
    )
    adam_beta1: float = setting(0.9, "AdamW's decay of the first moment.", from_0_below=1)
    adam_beta2: float = setting(0.999, "AdamW's decay of the second moment.", from_0_below=1)
    adam_weight_decay: float = setting(1e-4, "AdamW's weight decay.", at_least=0, at_most=10)
    adam_epsilon: float = setting(
        1e-8,
        "Gradients here can be as small as 1e-8: a larger epsilon would swallow them.",
        at_least=1e-30,  # less is 0 in float32, and 0 / 0 is not a number
        at_most=1,
    )
    max_grad_norm: float = setting(
        1.0, "Gradients of a larger norm are scaled down to it.", above=0
    )
    max_skipped_updates: int = setting(
        10,
        "An update with a NaN or infinite gradient is skipped; after this many in a row the run "
        "stops. 0: no limit.",
        at_least=0,
    )
    ema: bool = setting(
        True, "Evaluate and save a moving average of the weights beside the weights themselves."
    )
    ema_decay: float = setting(0.9, "How much the moving average keeps in a step.", from_0_below=1)
    ema_update_interval: int = setting(
        8,
        "Updates between two steps of the average. At update n its decay is at most "
        "(1 + n) / (10 + n).",
        at_least=1,
    )
    lora_rank: int = setting(
        32,
        "LoRA adds alpha / rank times the product of its two matrices.",
        at_least=1,
        at_most=4096,
    )
    lora_alpha: int = setting(64, "The alpha of LoRA, see lora_rank.", above=0, at_most=10**5)
    lora_path: str = setting(
        "", "Start from this LoRA, which is what a KL is to then; it brings its own rank and alpha."
    )


@dataclass(frozen=True)
class SharedFields(RewardFields, RunFields):
    """The settings of a run, as far as they do not depend on what it trains."""

    pretrained: ModelFields = section(ModelFields)
    dataset: str = setting("", "A folder with train and test files, one such file, or a hub name.")
    metadata_columns: str = setting(
        "",
        "Columns to treat as metadata for the rewards even if they look like images, videos, audio "
        'or conversations, which are rejected if nothing reads them: "reference,mask_path". '
        "Binary data in them is not loaded.",
    )
    custom_models: dict = setting(
        {},
        "Model families of your own, by what a model's files call them: "
        '{"MyPipeline": "path/to/file.py:MyAdapter"}',
    )
    train: TrainFields = section(TrainFields)
