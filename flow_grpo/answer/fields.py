"""Every field of a run that trains a model that answers, its default and why it is there. Presets
change them: flow_grpo/answer/presets.py."""

from dataclasses import dataclass, field, fields, make_dataclass
from functools import cache
from typing import Any

from ml_collections import ConfigDict

from flow_grpo.advantages import ESTIMATORS, SCALES
from flow_grpo.answer.losses import AGGREGATIONS, DIVERGENCES, KINDS, OWN
from flow_grpo.config import fields as shared
from flow_grpo.config.custom import check_class, check_defaults
from flow_grpo.config.settings import section, setting
from flow_grpo.config.trade import Trade
from flow_grpo.errors import UserError
from flow_grpo.rewards import ANSWER_REWARDS, REWARDS, check_fields, option_names

THINK = "{question}\nThink first, between <think> and </think>. Then give the final answer "
GAE = "gae"  # the estimator that is PPO's
CRITIC_LEARNING_RATE = 9e-6  # LMM-R1's (openrlhf/cli/train_ppo_ray.py)
ENVIRONMENT = "environment"  # the reward that is the environment's own
VLLM = "vllm"
MOST_PIXELS = 2**26  # of an image: as float32 it takes 768 MiB


@dataclass(frozen=True)
class AnswerModelFields(shared.ModelFields):
    model: str = setting(
        "Qwen/Qwen2.5-VL-3B-Instruct",
        "A folder of transformers or a hub id: Qwen2-VL, Qwen2.5-VL, Qwen3-VL, or a language model "
        "with a chat template (Qwen, Llama, distilled R1).",
    )


@dataclass(frozen=True)
class AnswerSample:
    questions_per_epoch: int = setting(
        64,
        "Distinct questions of an epoch, over all processes, drawn without replacement: every "
        "question is used once before any is used again.",
        at_least=1,
        at_most=10**6,
    )
    group_size: int = setting(
        8,
        "Answers to each question. An advantage compares an answer with its group.",
        at_least=1,
        at_most=2**16,
    )
    batch_size: int = setting(
        128,
        "Answers that a process samples together, and questions that it evaluates together. When "
        "one has ended, the next begins in its place.",
        at_least=1,
        at_most=2**16,
    )
    max_new_tokens: int = setting(1024, "An answer is cut off there.", at_least=1, at_most=2**20)
    temperature: float = setting(
        1.0,
        "What scores of tokens are divided by, in sampling and in training. Evaluation is greedy.",
        at_least=0.01,  # scores divided by much less overflow
        at_most=100,
    )
    engine: str = setting(
        "transformers",
        'What samples: "transformers" is the forward that trains, with a cache; "vllm" is faster '
        "on long answers, and what it samples is not quite the policy (train.importance_cap).",
        choices=("transformers", VLLM),
    )
    vllm_memory: float = setting(
        0.4,
        'For engine="vllm": the share of a GPU\'s memory that it may fill with weights and cache '
        "while it samples, beside what is trained. While the weights are trained it has none.",
        above=0,
        at_most=1,
    )
    vllm_tensor_parallel: int = setting(
        1,
        'For engine="vllm": so many processes of a node share one vLLM, each with a part of every '
        "weight on its GPU and the answers of all to sample. For models beyond one GPU's memory.",
        at_least=1,
        at_most=1024,
    )
    max_turns: int = setting(
        4,
        "With an environment: answers of an episode at most. sample.max_new_tokens is of each.",
        at_least=1,
        at_most=1000,
    )
    max_observation_tokens: int = setting(
        512,
        "With an environment: tokens of an observation at most, its pictures included. An episode "
        "with a longer one ends without a reward.",
        at_least=1,
        at_most=2**20,
    )
    refills: int = setting(
        0,
        "Where no answer to a question has an advantage there is nothing to learn: draw another "
        "question instead, up to this many times an epoch (DAPO's dynamic sampling).",
        at_least=0,
        at_most=1000,
    )


@dataclass(frozen=True)
class AnswerTrain(shared.TrainFields):
    updates_per_epoch: int = setting(
        2, "Updates that the samples of an epoch are divided into.", at_least=1, at_most=10**6
    )
    tokens_per_batch: int = setting(
        16384,
        "Tokens of a micro-batch, padding included. A prompt counts once for its answers in there.",
        at_least=1,
        at_most=10**8,
    )
    freeze_vision: bool = setting(True, "Leave the vision tower as it is.")
    recompute_old: bool = setting(
        False,
        "The policy that sampled, for the ratio: computed again before the first update (True), so "
        "that the ratio is exactly 1 there, or as sampling found it, which costs nothing. In half "
        "precision and with vLLM it is always computed again.",
    )
    importance_cap: float = setting(
        2.0,
        "In half precision and with vLLM, what samples is not quite the policy: the policy loss of "
        "a token is weighted by how much likelier the policy makes it, up to this bound (2 in most "
        "papers); 0 is no weights.",
        at_least=0,
    )
    loss: str = setting(
        "clip",
        '"clip" (PPO\'s), "gspo" (one ratio for an answer) or "cispo" (weights are clipped, not '
        "gradients).",
        choices=KINDS,
    )
    clip_low: float | None = setting(
        None,
        "The ratio is held within 1 - clip_low and 1 + clip_high; unset, 0.2 and 0.2, or 3e-4 and "
        '4e-4 for loss="gspo".',
        at_least=0,
        at_most=1,
    )
    clip_high: float | None = setting(
        None,
        "The ratio is held within 1 - clip_low and 1 + clip_high; DAPO raises this end to 0.28.",
        at_least=0,
    )
    dual_clip: float = setting(
        0.0,
        "The loss of a negative advantage is held at this ratio, 3 in most papers; 0 is no bound.",
        at_least=0,
    )
    aggregation: str | None = setting(
        None,
        'Mean over "token"s of an update, over tokens and then answers ("sequence"), or a sum over '
        'tokens divided by a "constant" (Dr. GRPO), so that length has no part in it. Unset, '
        '"token", or "sequence" for loss="gspo".',
        choices=AGGREGATIONS,
    )
    beta: float = setting(
        0.0, "Weight of the KL to the reference; 0 needs no reference.", at_least=0
    )
    kl: str | None = setting(
        None,
        'Estimator of the KL: "k1" (log-ratio), "k2" (half its square) or "k3" (unbiased and never '
        'negative). Unset, "k3" in the loss and "k1" in the reward, whose gradients are right; k1 '
        "in the loss is rejected: its mean gradient is 0.",
        choices=DIVERGENCES,
    )
    kl_in: str = setting(
        "loss",
        'Whether the KL is part of the "loss" or subtracted from the "reward" of each token.',
        choices=("loss", "reward"),
    )
    clamp_log_ratios: bool = setting(
        True,
        "Clamp log-ratios to +-20 before they are exponentiated, and k3 to +-10, as EasyR1 and "
        "verl do: a token that is far off then has no gradient instead of an infinite one.",
    )
    advantage: str = setting(
        "grpo",
        '"grpo", "dr_grpo" (no division), "rloo", "reinforce_pp", "remax" (less the reward of a '
        'greedy answer), "gdpo", "pairwise", or "gae": PPO with a value head.',
        choices=(*ESTIMATORS, GAE),
    )
    advantage_scale: str = setting(
        "group",
        'What grpo divides by: standard deviation of the "group" or the "batch", or "none".',
        choices=SCALES,
    )
    discount: float = setting(
        1.0, 'For advantage="gae": discount per token.', at_least=0, at_most=1
    )
    gae_decay: float = setting(
        1.0,
        'For advantage="gae": decay per token (lambda). Below 1 only the last 1 / (1 - lambda) '
        "tokens see the reward while the value head, which starts at 0, predicts nothing.",
        at_least=0,
        at_most=1,
    )
    value_weight: float = setting(
        0.1, 'For advantage="gae": weight of the values\' loss.', at_least=0
    )
    value_clip: float = setting(
        0.2, 'For advantage="gae": how far a value may move in an epoch.', above=0
    )
    critic_learning_rate: float | None = setting(
        None,
        'For advantage="gae": learning rate of the value head, with the schedule of learning_rate. '
        f"Unset, {CRITIC_LEARNING_RATE:g} as in LMM-R1.",
        above=0,
    )
    critic_warmup: int = setting(
        0,
        'For advantage="gae": epochs at the start of a run in which the value head alone is '
        "trained.",
        at_least=0,
    )
    ema: bool = setting(
        False,
        "Evaluate and save a moving average of the weights too. Unlike for pictures: steps are "
        "small already, and an average lags.",
    )
    learning_rate: float = setting(
        1e-5,
        "AdamW's, at its highest (see lr_scheduler); of a size that is usual for language models.",
        above=0,
        at_most=1,
    )
    adam_weight_decay: float = setting(
        0.01, "AdamW's, usual for language models.", at_least=0, at_most=10
    )


@dataclass(frozen=True)
class AnswerFields(shared.SharedFields):
    mixed_precision: str = setting(
        "no",
        '"no" or "bf16": the dtype of the forward pass. What is trained stays in float32. How far '
        "the policy then is from what sampled: answer/engine_dev.",
        choices=("no", "bf16"),
    )
    pretrained: AnswerModelFields = section(AnswerModelFields)
    min_pixels: int = setting(
        0,
        "Pixels of a picture at least, which is resized where it has fewer; 0 is what the model's "
        "own image processor says. A picture of Qwen2.5-VL has a token for each 28 x 28 pixels.",
        at_least=0,
        at_most=MOST_PIXELS,
    )
    max_pixels: int = setting(
        0, "Pixels of a picture at most, see min_pixels.", at_least=0, at_most=MOST_PIXELS
    )
    video_fps: float = setting(
        2.0,
        "Frames that are shown of each second of a video; 0 shows video_frames of any video.",
        at_least=0,
        at_most=1000,
    )
    video_frames: int = setting(
        32,
        "Frames of a video at most, evenly over all of it; two share their tokens.",
        at_least=2,
        at_most=4096,
    )
    video_pixels: int = setting(
        768 * 28 * 28,
        "Pixels of a video's frame at most, see max_pixels.",
        at_least=28 * 28,
        at_most=MOST_PIXELS,
    )
    cuda_graphs: bool = setting(
        True,
        "On a GPU, replay each step of sampling as a CUDA graph, which spares the host a thousand "
        "launches. A step is recorded in a second or two at the start of an epoch.",
    )
    flex_attention: bool = setting(
        False,
        "On a GPU in bf16, train with torch's flex attention, which skips pairs of answers that "
        "share a row and never see each other; compiled once. For rows of many thousand tokens.",
    )
    use_lora: bool = setting(
        True,
        "False trains the whole model and keeps a frozen copy for the KL: three times the memory.",
    )
    dataset: str = setting(
        "dataset/shapes_qa",
        "A folder with train and test files (.jsonl, .parquet), one such file, or a Hugging Face "
        'name like "hiyouga/geometry3k"; several with their shares: "path/a:0.7,path/b:0.3".',
    )
    input_key: str = setting(
        "",
        "The column with the question, or with a chat that ends with it; empty: message, question "
        "or problem, whichever a row has.",
    )
    image_key: str = setting(
        "",
        'The column with the images of a question; empty: images or image; "none": images are not '
        "used.",
    )
    video_key: str = setting(
        "",
        'The column with the videos of a question; empty: videos or video; "none": videos are not '
        "used.",
    )
    answer_key: str = setting(
        "answer",
        "The column with the truth that rewards check against; empty: there is none, and no reward "
        "needs it.",
    )
    eval_questions: int = setting(
        0, "Test questions to evaluate on, from the start of the file; 0 means all.", at_least=0
    )
    system_prompt: str = setting("", "Told to the model before each question; empty for none.")
    special_tokens: str = setting(
        "escape",
        "What happens to the tokenizer's special tokens, such as <|im_end|>, in questions, system "
        'prompts of rows and observations: "escape" encodes them as plain text, "reject" is an '
        "error. As control tokens they could end a turn or stand for an image.",
        choices=("escape", "reject"),
    )
    question_format: str = setting(
        THINK + "between <answer> and </answer>.",
        "What the model is asked, with the question in the place of {question}. It asks for what "
        "the rewards read: change them together.",
    )
    max_prompt_length: int = setting(
        0,
        "Tokens of a prompt, its pictures included. A longer one is refused, never cut; 0 is what "
        "the model's positions leave for it.",
        at_least=0,
        at_most=2**24,
    )
    filter_overlong_prompts: bool = setting(
        False,
        "Leave out questions whose prompts are longer than max_prompt_length, and tell how many, "
        "instead of refusing them.",
    )
    reward_fn: dict = setting(
        {"math_answer": 0.9, "answer_format": 0.1},
        "Rewards of answers and their weights: docs/rewards.md.",
    )
    environment: str = setting(
        "",
        'A class of yours that answers the model for several turns, "path/to/file.py:Class" or '
        '"package.module:Class"; empty: each question has one answer. docs/vlm.md.',
    )
    environment_options: dict = setting({}, "Keyword arguments of the environment's class.")
    environment_timeout: float = setting(
        30.0,
        "Seconds that a step of an environment may take. An episode in which one takes longer ends "
        "without a reward.",
        above=0,
        at_most=10**8,  # what waits counts nanoseconds in 64 bits
    )
    environment_workers: int = setting(
        1,
        "Processes that environments are played in, for each process of the run.",
        at_least=1,
        at_most=1024,
    )
    reward_servers: dict = shared.servers(ANSWER_REWARDS)
    custom_losses: dict = setting(
        {}, 'Losses of your own: {"mine": "path/to/file.py:Mine"}; train.loss="mine" then uses it.'
    )
    sample: AnswerSample = section(AnswerSample)
    train: AnswerTrain = section(AnswerTrain)


def settings() -> type:
    """All fields, with those of losses of the user's own."""
    return _with_losses(tuple(OWN.items())) if OWN else AnswerFields


@cache
def _with_losses(losses: tuple[tuple[str, type], ...]) -> type:
    known = {each.name: each for each in fields(AnswerTrain)}
    choices = (*KINDS, *(name for name, _ in losses))
    own = {"loss": (str, setting("clip", known["loss"].metadata["reason"], choices=choices))}
    for _, loss in losses:
        for each in (each for each in fields(loss) if each.name not in known):
            default = {"default": each.default, "default_factory": each.default_factory}
            own[each.name] = (each.type, field(**default, metadata=each.metadata))
    parts = [(name, *each) for name, each in own.items()]
    train = make_dataclass("Train", parts, bases=(AnswerTrain,), frozen=True)
    return make_dataclass(
        "Settings", [("train", train, section(train))], bases=(AnswerFields,), frozen=True
    )


def take_loss(where: str, name: str, found: Any) -> None:
    """Add a loss of the user's own."""
    from flow_grpo.answer.losses.base import AnswerLoss  # here: the fields need no torch

    if name in KINDS:
        raise UserError(f"{where} has the name of a loss of ours; choose another")
    check_class(where, found, AnswerLoss)
    check_defaults(where, found, [each.name for each in fields(AnswerTrain)])
    OWN[name] = found


ANSWER = Trade(
    settings=settings,
    first=(
        *("pretrained.model", "dataset", "reward_fn", "run_name", "num_epochs"),
        *("sample.group_size", "sample.max_new_tokens"),
        *("train.learning_rate", "mixed_precision"),
    ),
    presets_in="flow_grpo.answer.presets",
    marker="config.json",
    example="config/vlm.py:tiny_vlm",
    rewards=REWARDS,
    check_rewards=check_fields,
    option_names=option_names,
    custom={
        "custom_losses": f"{__name__}:take_loss",
        "custom_models": "flow_grpo.answer.models:take_model",
    },
    check_early="flow_grpo.answer.plan:check_early",
)


def get_config() -> ConfigDict:
    return ANSWER.get_config()
