"""Settings of VLM and language model training, with their defaults, rules and help.

Presets override the defaults: flow_grpo/vlm/presets.py.
"""

from copy import copy
from dataclasses import dataclass, fields, make_dataclass
from functools import cache

from ml_collections import ConfigDict

from flow_grpo.advantages import ESTIMATORS, SCALES
from flow_grpo.config import fields as shared
from flow_grpo.config.settings import section, setting
from flow_grpo.config.trainer_spec import TrainerSpec
from flow_grpo.rewards import REWARDS, TEXT_REWARDS, check_reward_fields, option_names
from flow_grpo.rewards.draw_settings import DrawSettings
from flow_grpo.vlm.losses import (
    AGGREGATIONS,
    BUILT_IN_LOSSES,
    GIVEN_LOSSES,
    KL_ESTIMATORS,
    LOSSES,
    UNCLIPPED_LOSSES,
)

THINK_PROMPT = "{question}\nThink first, between <think> and </think>. Then give the final answer "
GAE = "gae"  # advantage estimator of PPO
BRADLEY_TERRY = "bradley_terry"  # loss of reward models
# settings of the rollout and of policy losses, which losses on given responses and pairs ignore
ROLLOUT_SETTINGS = (
    "environment",
    *(f"sample.{name}" for name in ("group_size", "temperature", "refills")),
    *(
        f"train.{name}"
        for name in (
            *("recompute_old", "importance_cap", "clip_low", "clip_high", "dual_clip"),
            *("mask_truncated", "kl_target", "kl_horizon"),
            *("kl", "kl_in", "clamp_log_ratios", "advantage", "advantage_scale", "discount"),
            *("gae_decay", "value_weight", "value_clip", "critic", "critic_model"),
            *("critic_learning_rate", "critic_warmup"),
        )
    ),
)
HEAD, SEPARATE = "head", "separate"  # critics
CRITIC_LEARNING_RATE = 9e-6  # LMM-R1's (openrlhf/cli/train_ppo_ray.py)
ENVIRONMENT = "environment"  # name of the reward that the environment returns
TRANSFORMERS, VLLM, AUTO = "transformers", "vllm", "auto"  # rollout engines
WITHOUT_CLIP = {f"train.loss={'|'.join(UNCLIPPED_LOSSES)}": "it does not clip ratios"}
MAX_PIXELS = 2**26  # of an image, which takes 768 MiB in float32


@dataclass(frozen=True)
class VlmModelConfig(shared.ModelFields):
    """Section `pretrained` of a VLM run."""

    model: str = setting(
        "Qwen/Qwen2.5-VL-3B-Instruct",
        "Directory of a transformers model, or hub id: Qwen-VL, Qwen3.5, InternVL, or a "
        "text-only model with a chat template (Qwen, Llama, distilled R1). See docs/vlm/models.md.",
    )


@dataclass(frozen=True)
class VlmSampleConfig:
    """Section `sample`: epochs, responses and the engine."""

    questions_per_epoch: int = setting(
        64,
        "Distinct questions per epoch, over all processes, drawn without replacement: every "
        "question is used once before any is repeated.",
        at_least=1,
        at_most=10**6,
    )
    group_size: int = setting(
        8,
        "Responses per question (the group size), which advantages are relative to.",
        at_least=1,
        at_most=2**16,
    )
    batch_size: int = setting(
        128,
        "Responses sampled concurrently per process, in training and evaluation; a finished one is "
        "replaced by the next.",
        at_least=1,
        at_most=2**16,
    )
    max_new_tokens: int = setting(1024, "Maximum tokens of a response.", at_least=1, at_most=2**20)
    temperature: float = setting(
        1.0,
        "Sampling temperature, also applied to the logits in training. Evaluation is greedy.",
        at_least=0.01,  # logits divided by much less overflow
        at_most=100,
    )
    engine: str = setting(
        TRANSFORMERS,
        'Rollout engine: "transformers" uses the forward pass of training with a KV cache; "vllm" '
        "is meant for many long responses and samples from a slightly different policy "
        '(train.importance_cap); "auto" is vLLM if it is installed and supports the model, the '
        "data and the settings, otherwise transformers, and logs why.",
        choices=(TRANSFORMERS, VLLM, AUTO),
    )
    vllm_memory: float = setting(
        0.4,
        'For engine="vllm": fraction of the GPU memory for its weights and KV cache during '
        "rollouts, in addition to the trained model; released during training.",
        above=0,
        at_most=1,
        requires="sample.engine=vllm|auto",
    )
    vllm_tensor_parallel: int = setting(
        1,
        'For engine="vllm": number of processes of a node that share one tensor-parallel vLLM; for '
        "models that do not fit on one GPU.",
        at_least=1,
        at_most=1024,
        requires="sample.engine=vllm|auto",
    )
    max_turns: int = setting(
        4,
        "With an environment: maximum turns per episode; sample.max_new_tokens applies to each.",
        at_least=1,
        at_most=1000,
        requires="environment",
    )
    max_observation_tokens: int = setting(
        512,
        "With an environment: maximum tokens of an observation, including its images. An episode "
        "with a longer one ends without a reward.",
        at_least=1,
        at_most=2**20,
        requires="environment",
    )
    refills: int = setting(
        0,
        "Replace groups whose advantages are all 0 by groups of new questions, up to this many "
        "times per epoch (DAPO's dynamic sampling).",
        at_least=0,
        at_most=1000,
        excludes={"train.advantage=gae": "it has no groups without advantages"},
    )
    filter_reward: str = setting(
        "",
        'With refills: also replace groups whose mean of this reward, or of "avg", is not between '
        "filter_low and filter_high; groups that remain outside are not trained on.",
        requires="sample.refills",
    )
    filter_low: float = setting(
        0.01,
        "Exclusive lower bound of the mean of filter_reward within a group.",
        at_least=-(10**6),
        at_most=10**6,
        requires="sample.filter_reward",
    )
    filter_high: float = setting(
        0.99,
        "Exclusive upper bound of the mean of filter_reward within a group.",
        at_least=-(10**6),
        at_most=10**6,
        requires="sample.filter_reward",
    )


@dataclass(frozen=True)
class VlmTrainConfig(shared.TrainFields):
    """Section `train` of a VLM run."""

    updates_per_epoch: int = setting(2, "Optimizer updates per epoch.", at_least=1, at_most=10**6)
    tokens_per_batch: int = setting(
        16384,
        "Tokens per micro-batch, including padding. A prompt counts once for all its responses.",
        at_least=1,
        at_most=10**8,
    )
    sequence_parallel: int = setting(
        1,
        "Number of processes that jointly train on each micro-batch, for long responses: each "
        "holds a part of its tokens (Ulysses attention). It must divide the number of processes "
        "and the attention heads; docs/vlm/scaling.md.",
        at_least=1,
        at_most=1024,
        requires={"compile=False": "the compiler cannot trace the exchange in attention"},
        excludes={"train.critic=separate": "its layers are not divided"},
    )
    optimizer: str = setting(
        shared.ADAMW,
        'Optimizer: "adamw", with weights, gradients and moments in float32, or "adamw_bf16" for '
        "full fine-tuning, with all of them in bfloat16 and stochastic rounding: 8 instead of 16 "
        "bytes per parameter; docs/vlm/scaling.md.",
        choices=(shared.ADAMW, shared.ADAMW_BF16),
        requires={
            "use_lora=False": "LoRA weights are small and stay in float32",
            "mixed_precision=bf16": "the weights are in bfloat16",
        },
        excludes={
            "train.use_8bit_adam": "",
            "train.ema": "small updates of an average in bfloat16 would be lost",
            "train.advantage=gae": "the value head is in float32",
            "train.loss=bradley_terry": "the score head is in float32",
        },
    )
    freeze_vision: bool = setting(True, "Freeze the vision tower.")
    recompute_old: bool = setting(
        False,
        "Recompute the old log-probabilities by the training forward pass, so that the ratio of "
        "the first update is exactly 1; False reuses those of the rollout. Always done in half "
        "precision and with vLLM.",
    )
    importance_cap: float = setting(
        2.0,
        "Cap of the importance weights that correct for rollouts in half precision or by vLLM, "
        "whose policy differs slightly (truncated importance sampling; 2 in most papers); 0 "
        "disables them.",
        at_least=0,
    )
    loss: str = setting(
        "clip",
        'Policy loss: "clip" (PPO), "gspo" (one ratio per response), "cispo" (clipped importance '
        'weights, unclipped gradients), "sapo" (smooth gate), "drpo" (divergence regularizer) or '
        '"cppo" (trust region over the prefix). "sft", "dpo", "ipo" and "kto" train on given '
        'responses instead of a rollout; see docs/vlm/cold_start.md. "bradley_terry" trains a '
        "reward model from pairs.",
        choices=(*BUILT_IN_LOSSES, BRADLEY_TERRY),
    )
    center_scores: float = setting(
        0.0,
        'For loss="bradley_terry": weight of the squared sum of the scores of a pair, which keeps '
        "their mean near 0 (0.01 in arXiv 2312.09244); 0 leaves the mean undetermined.",
        at_least=0,
        requires="train.loss=bradley_terry",
    )
    clip_low: float | None = setting(
        None,
        "The ratio is clipped to [1 - clip_low, 1 + clip_high]. Unset, both are 0.2, or 3e-4 and "
        '4e-4 for loss="gspo".',
        at_least=0,
        at_most=1,
        excludes=WITHOUT_CLIP,
    )
    clip_high: float | None = setting(
        None,
        "The ratio is clipped to [1 - clip_low, 1 + clip_high]; DAPO uses 0.28 here.",
        at_least=0,
        excludes=WITHOUT_CLIP,
    )
    tau_positive: float = setting(
        1.0,
        "Temperature of the gate for positive advantages; a larger one decays faster.",
        above=0,
        at_most=1000,
        requires="train.loss=sapo",
    )
    tau_negative: float = setting(
        1.05,
        "Temperature of the gate for negative advantages.",
        above=0,
        at_most=1000,
        requires="train.loss=sapo",
    )
    drpo_epsilon: float = setting(
        12.5,
        "Threshold of the regularizer; a larger one regularizes less.",
        above=0,
        requires="train.loss=drpo",
    )
    cppo_delta: float = setting(
        0.2,
        "Maximum change of the probability of a token.",
        above=0,
        at_most=1,
        requires="train.loss=cppo",
    )
    cppo_min_weight: float = setting(
        0.8,
        "Weight of the last token of a response in the accumulated change; that of the first is 1.",
        above=0,
        at_most=1,
        requires="train.loss=cppo",
    )
    cppo_budget: float = setting(
        0.02,
        "Mean change of the probabilities of a prefix beyond which its tokens are not trained.",
        at_least=0,
        at_most=1,
        requires="train.loss=cppo",
    )
    dual_clip: float = setting(
        0.0,
        "Ratio that bounds the loss of negative advantages (3 in most papers); 0 disables it.",
        at_least=0,
        excludes={
            "train.loss=cispo": "its weights are already bounded by train.clip_high",
            **WITHOUT_CLIP,
        },
    )
    aggregation: str | None = setting(
        None,
        'Aggregation of the token losses: mean over all tokens of the update ("token"), over the '
        'tokens of a response and then over responses ("sequence"), or sum divided by a "constant" '
        '(Dr. GRPO). Unset, "token", or "sequence" for the losses "gspo" and "sapo".',
        choices=AGGREGATIONS,
    )
    beta: float | None = setting(
        None,
        "Weight of the KL to the reference policy; 0 needs no reference. For the losses "
        '"dpo", "ipo" and "kto", the scale of the log-ratios. Unset, 0.1 for these losses, else 0.',
        at_least=0,
    )
    desirable_weight: float = setting(
        1.0, "Weight of the loss of liked responses.", at_least=0, requires="train.loss=kto"
    )
    undesirable_weight: float = setting(
        1.0, "Weight of the loss of disliked responses.", at_least=0, requires="train.loss=kto"
    )
    kl: str | None = setting(
        None,
        'KL estimator: "k1" (log-ratio), "k2" (half its square) or "k3" (unbiased and '
        'non-negative). Unset, "k3" in the loss and "k1" in the reward. "k1" in the loss is '
        "rejected, because its expected gradient is 0.",
        choices=KL_ESTIMATORS,
    )
    kl_in: str = setting(
        "loss",
        'Add the KL to the "loss", or subtract it from the "reward" of each token.',
        choices=("loss", "reward"),
    )
    kl_target: float = setting(
        0.0,
        "Adapt train.beta after every epoch so that the KL approaches this value; 0 keeps it "
        "constant.",
        at_least=0,
        requires="train.beta",
    )
    kl_horizon: float = setting(
        10_000.0,
        "For kl_target: responses over which the weight changes by at most 20 %.",
        at_least=1,
        requires="train.kl_target",
    )
    mask_truncated: bool = setting(
        False,
        "Exclude responses truncated at sample.max_new_tokens from the loss; their rewards still "
        "count in the advantages of the group.",
    )
    clamp_log_ratios: bool = setting(
        True,
        "Clamp log-ratios to +-20 before exponentiation, and k3 to +-10, as EasyR1 and verl do: "
        "outlier tokens then have no gradient instead of an infinite one.",
    )
    advantage: str = setting(
        "grpo",
        'Advantage estimator: "grpo", "dr_grpo" (no division by the standard deviation), "rloo", '
        '"reinforce_pp", "remax" (baseline: the greedy response), "gdpo", "grpo_passk" (only the '
        'best response, for pass@k), "pairwise", or "gae" (PPO with a value head).',
        choices=(*ESTIMATORS, GAE),
    )
    advantage_scale: str = setting(
        "group",
        'Standard deviation that "grpo", "grpo_passk" and "pairwise" divide by: of the "group", of '
        'the "batch", or "none".',
        choices=SCALES,
    )
    discount: float = setting(
        1.0, 'For advantage="gae": discount factor per token.', at_least=0, at_most=1
    )
    gae_decay: float = setting(
        1.0,
        'For advantage="gae": lambda. Below 1, only about the last 1 / (1 - lambda) tokens receive '
        "the reward until the value head, which starts at 0, has learned.",
        at_least=0,
        at_most=1,
    )
    value_weight: float = setting(0.1, 'For advantage="gae": weight of the value loss.', at_least=0)
    value_clip: float = setting(0.2, 'For advantage="gae": clip range of the value loss.', above=0)
    critic: str = setting(
        HEAD,
        'For advantage="gae": the "head" is a linear layer on the last hidden states of the '
        'policy; "separate" is a model with its own weights, all of which are trained.',
        choices=(HEAD, SEPARATE),
        requires="train.advantage=gae",
    )
    critic_model: str = setting(
        "",
        "Directory or hub id of the model that the critic starts from, of the same family as the "
        "policy; empty for pretrained.model.",
        requires="train.critic=separate",
    )
    critic_learning_rate: float | None = setting(
        None,
        'For advantage="gae": learning rate of the critic, with the schedule of learning_rate. '
        f"Unset, {CRITIC_LEARNING_RATE:g} as in LMM-R1.",
        above=0,
        requires="train.advantage=gae",
    )
    critic_warmup: int = setting(
        0,
        'For advantage="gae": epochs at the start of the run that train only the critic.',
        at_least=0,
        requires="train.advantage=gae",
    )
    ema: bool = setting(
        False,
        "Also evaluate and save an exponential moving average (EMA) of the weights. Off by "
        "default: steps are small, and an average lags behind.",
    )
    learning_rate: float = setting(
        1e-5,
        "Peak learning rate of AdamW; see lr_scheduler.",
        above=0,
        at_most=1,
    )
    adam_weight_decay: float = setting(0.01, "Weight decay of AdamW.", at_least=0, at_most=10)


@dataclass(frozen=True)
class VlmConfig(shared.SharedFields):
    """All settings of a VLM run, except those of custom losses."""

    mixed_precision: str = setting(
        "no",
        'Dtype of the forward pass: "no" (float32) or "bf16". Trained weights stay in float32. '
        "answer/engine_dev logs the difference between the rollout and the policy.",
        choices=("no", "bf16"),
    )
    pretrained: VlmModelConfig = section(VlmModelConfig)
    min_pixels: int = setting(
        0,
        "Minimum pixels of an image; smaller ones are enlarged. 0 uses the value of the model's "
        "image processor. Qwen2.5-VL uses one token per 28 x 28 pixels.",
        at_least=0,
        at_most=MAX_PIXELS,
    )
    max_pixels: int = setting(
        0, "Maximum pixels of an image; see min_pixels.", at_least=0, at_most=MAX_PIXELS
    )
    video_fps: float = setting(
        2.0,
        "Frames per second sampled from a video; 0 always samples video_frames.",
        at_least=0,
        at_most=1000,
    )
    video_frames: int = setting(
        32,
        "Maximum frames of a video, evenly spaced; two consecutive frames share their tokens.",
        at_least=2,
        at_most=4096,
    )
    video_pixels: int = setting(
        768 * 28 * 28,
        "Maximum pixels of a video frame; see max_pixels.",
        at_least=28 * 28,
        at_most=MAX_PIXELS,
    )
    cuda_graphs: bool = setting(
        True,
        "Capture the decoding step in a CUDA graph, which avoids about a thousand kernel launches; "
        "the capture takes a second or two at the start of an epoch.",
    )
    compile: bool = setting(
        False,
        "Compile the decoder layers for training (GPU, bf16, weights not sharded): an update takes "
        "a fifth less time, and the first one about a minute more.",
        requires={"train.gradient_checkpointing=False": "compiled layers keep their activations"},
    )
    flex_attention: bool = setting(
        False,
        "Train with torch's flex attention (GPU, bf16), which skips pairs of packed responses that "
        "do not attend to each other and needs no padding; compiled once. For rows of many "
        "thousand tokens.",
    )
    use_lora: bool = setting(
        True,
        "Train LoRA. False trains all weights, in float32 with Adam: 16 bytes per parameter "
        "instead of 2 in bf16. A KL then also needs a frozen copy.",
    )
    dataset: str = setting(
        "dataset/shapes_qa",
        "Directory with train and test files (.jsonl, .parquet), one such file, or a Hugging Face "
        'name such as "hiyouga/geometry3k"; a weighted mixture is "path/a:0.7,path/b:0.3".',
    )
    input_key: str = setting(
        "",
        "Column of the question, or of a conversation that ends with it; empty uses message, "
        "question, problem or prompt, whichever exists.",
    )
    image_key: str = setting(
        "",
        'Column of the images of a question; empty uses images or image, "none" ignores images.',
    )
    video_key: str = setting(
        "",
        'Column of the videos of a question; empty uses videos or video, "none" ignores videos.',
    )
    image_dir: str = setting(
        "",
        "Directory that relative paths of images and videos start from, also those of "
        "eval_dataset; empty for the directory of each file.",
    )
    image_cache: str = setting(
        "",
        "Directory to which images inside data files (Parquet, data URLs) are written once, so "
        "that datasets may be larger than the memory; empty keeps them in memory.",
    )
    max_samples: int = setting(
        0, "Number of rows of each training set to use, from its start; 0 uses all.", at_least=0
    )
    answer_key: str = setting(
        "answer",
        "Column of the reference answer that rewards compare with; empty if no reward needs one.",
    )
    response_key: str = setting(
        "",
        "Column of the response; empty uses completion or response, or the assistant turn that "
        "ends the conversation.",
        requires=f"train.loss={'|'.join(GIVEN_LOSSES)}",
    )
    response_turns: str = setting(
        "last",
        'Assistant turns of a conversation that are trained: the "last", or "all", each with the '
        "turns before it as its prompt.",
        choices=("last", "all"),
        requires="train.loss=sft",
    )
    eval_input_key: str | None = setting(
        None,
        "Column of the question in eval_dataset; unset uses input_key.",
        requires=shared.EVAL_SET,
    )
    eval_image_key: str | None = setting(
        None,
        "Column of the images in eval_dataset; unset uses image_key.",
        requires=shared.EVAL_SET,
    )
    eval_video_key: str | None = setting(
        None,
        "Column of the videos in eval_dataset; unset uses video_key.",
        requires=shared.EVAL_SET,
    )
    eval_answer_key: str | None = setting(
        None,
        "Column of the reference answer in eval_dataset; unset uses answer_key.",
        requires=shared.EVAL_SET,
    )
    eval_questions: int = setting(
        0,
        "Number of test questions to evaluate, from the start of the file; 0 uses all.",
        at_least=0,
    )
    system_prompt: str = setting("", "System prompt of every conversation; empty for none.")
    chat_template: str = setting(
        "",
        "Chat template in place of the model's: a Jinja file, or the text of the template. "
        "Checkpoints contain it.",
    )
    special_tokens: str = setting(
        "escape",
        "Special tokens of the tokenizer, such as <|im_end|>, in questions, observations and "
        'system prompts of the data, where they could end a turn or stand for an image: "escape" '
        'encodes them as plain text, "reject" raises an error.',
        choices=("escape", "reject"),
    )
    question_format: str = setting(
        THINK_PROMPT + "between <answer> and </answer>.",
        "Prompt template with the placeholder {question}. It asks for the format that the rewards "
        "parse: change both together.",
    )
    max_prompt_length: int = setting(
        0,
        "Maximum tokens of a prompt, including its images. Longer prompts are rejected, never "
        "truncated; 0 uses the context length of the model.",
        at_least=0,
        at_most=2**24,
    )
    filter_overlong_prompts: bool = setting(
        False,
        "Skip questions whose prompts exceed max_prompt_length, and given responses of more than "
        "sample.max_new_tokens tokens, with a warning, instead of rejecting the dataset.",
    )
    reward_fn: dict = setting(
        {"math_answer": 0.9, "answer_format": 0.1},
        "Rewards and their weights; docs/vlm/rewards.md lists them.",
    )
    environment: str = setting(
        "",
        'Custom multi-turn environment, "path/to/file.py:Class" or "package.module:Class"; empty '
        "for single-turn responses. See docs/vlm/environments.md.",
    )
    environment_options: dict = setting(
        {}, "Keyword arguments of the environment class.", requires="environment"
    )
    environment_timeout: float = setting(
        30.0,
        "Timeout of an environment step in seconds; an episode that exceeds it ends without a "
        "reward.",
        above=0,
        at_most=10**8,  # timeouts are 64-bit nanoseconds
        requires="environment",
    )
    environment_workers: int = setting(
        1,
        "Environment worker processes per process of the run.",
        at_least=1,
        at_most=1024,
        requires="environment",
    )
    reward_servers: dict = shared.reward_servers_setting(TEXT_REWARDS)
    custom_losses: dict = setting(
        {}, 'Custom losses, selected by name in train.loss: {"mine": "path/to/file.py:Mine"}.'
    )
    draw: DrawSettings = section(DrawSettings)
    sample: VlmSampleConfig = section(VlmSampleConfig)
    train: VlmTrainConfig = section(VlmTrainConfig)


def settings() -> type:
    """Return the dataclass of all settings, including those of custom losses."""
    custom = tuple((name, LOSSES[name]) for name in LOSSES if name not in BUILT_IN_LOSSES)
    return _config_with_custom_losses(custom) if custom else VlmConfig


@cache
def _config_with_custom_losses(losses: tuple[tuple[str, type], ...]) -> type:
    """Return the settings class whose section `train` has the fields of custom losses.

    Args:
        losses: (name, class) of each custom loss.
    """
    known = {each.name: each for each in fields(VlmTrainConfig)}
    choices = (*BUILT_IN_LOSSES, BRADLEY_TERRY, *(name for name, _ in losses))
    own = {"loss": (str, setting("clip", known["loss"].metadata["help"], choices=choices))}
    added = [each for _, loss in losses for each in fields(loss) if each.name not in known]
    own |= {each.name: (each.type, copy(each)) for each in added}
    parts = [(name, *each) for name, each in own.items()]
    train = make_dataclass("Train", parts, bases=(VlmTrainConfig,), frozen=True)
    return make_dataclass(
        "Settings", [("train", train, section(train))], bases=(VlmConfig,), frozen=True
    )


VLM_SPEC = TrainerSpec(
    settings=settings,
    first=(
        "pretrained.model",
        "dataset",
        "reward_fn",
        "run_name",
        "num_epochs",
        "sample.group_size",
        "sample.max_new_tokens",
        "train.learning_rate",
        "mixed_precision",
    ),
    presets_module="flow_grpo.vlm.presets",
    marker="config.json",
    example="config/vlm.py:tiny_vlm",
    rewards=REWARDS.paths,
    check_rewards=check_reward_fields,
    option_names=option_names,
    custom={
        "custom_losses": "flow_grpo.vlm.plugins:register_loss",
        "custom_models": "flow_grpo.vlm.models:register_model",
    },
    preflight_check="flow_grpo.vlm.config_checks:preflight_check",
)


def get_config() -> ConfigDict:
    """Return a config with all settings at their defaults."""
    return VLM_SPEC.get_config()
