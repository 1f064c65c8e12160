"""Every field of a run that trains a model that answers, its default and why it is there. Presets
change them: flow_grpo/answer/presets.py."""

from ml_collections import ConfigDict

from flow_grpo.draw.fields import reward_fields, run_fields, update_fields, weight_fields
from flow_grpo.rewards import ANSWER_REWARDS

EXAMPLE = "config/vlm.py:tiny_vlm"
THINK = "{question}\nThink first, between <think> and </think>. Then give the final answer "


def get_config() -> ConfigDict:
    config = ConfigDict()

    run_fields(config)
    # All questions, answers and LoRA weights follow from it, for any number of processes.
    config.seed = 42
    # Answers written with each evaluation, to test questions and to those of training.
    config.log_images = 16
    # "no" or "bf16": the dtype of the forward pass. What is trained stays in float32. How far the
    # policy then is from what sampled: answer/engine_dev.
    config.mixed_precision = "no"

    # --- the model ---------------------------------------------------------------------------
    config.pretrained = ConfigDict()
    # A folder of transformers or a hub id: Qwen2-VL, Qwen2.5-VL or Qwen3-VL.
    config.pretrained.model = "Qwen/Qwen2.5-VL-3B-Instruct"
    # Branch, tag or commit of a hub id. A folder has none: leave it at "main".
    config.pretrained.revision = "main"
    # Pixels of a picture at least and at most, which is resized where it has fewer or more; 0 is
    # what the model's own image processor says. A picture of Qwen2.5-VL has a token for each
    # 28 x 28 pixels.
    config.min_pixels = 0
    config.max_pixels = 0
    # On a GPU, replay each step of sampling as a CUDA graph, which spares the host a thousand
    # launches. A step is recorded in a second or two at the start of an epoch.
    config.cuda_graphs = True
    # False trains the whole model and keeps a frozen copy for the KL: three times the memory.
    config.use_lora = True

    # --- questions and rewards ---------------------------------------------------------------
    # A folder with train and test files (.jsonl, .parquet), one such file, or a Hugging Face name
    # like "hiyouga/geometry3k": docs/vlm.md.
    config.dataset = "dataset/shapes_qa"
    # Test questions to evaluate on, from the start of the file; 0 means all.
    config.eval_questions = 0
    # Told to the model before each question; empty for none.
    config.system_prompt = ""
    # What the model is asked, with the question in the place of {question}. It asks for what the
    # rewards below read: change them together.
    config.question_format = THINK + "between <answer> and </answer>."
    # Tokens of a prompt, its pictures included. A longer one is refused, never cut; 0 is what the
    # model's positions leave for it.
    config.max_prompt_length = 0
    reward_fields(config)
    # Of answers: docs/rewards.md.
    config.reward_fn = ConfigDict({"math_answer": 0.9, "answer_format": 0.1})
    config.reward_servers = ConfigDict({name: "" for name in ANSWER_REWARDS})

    # --- sampling ----------------------------------------------------------------------------
    config.sample = sample = ConfigDict()
    # Distinct questions of an epoch, over all processes.
    sample.questions_per_epoch = 64
    # Answers to each. An advantage compares an answer with its group.
    sample.group_size = 8
    # Answers that a process samples together, and questions that it evaluates together.
    sample.batch_size = 128
    # An answer is cut off there.
    sample.max_new_tokens = 1024
    # By which scores of tokens are divided, in sampling and in training. Evaluation is greedy.
    sample.temperature = 1.0
    # What samples: "transformers" is the forward that trains, with a cache; "vllm" is faster on
    # long answers, and what it samples is not quite the policy (train.importance_cap).
    sample.engine = "transformers"
    # Of engine="vllm": the share of a GPU's memory that it may fill with weights and cache while it
    # samples, beside what is trained. While the weights are trained it has none.
    sample.vllm_memory = 0.4
    # Where all answers to a question get the same reward there is nothing to learn: draw another
    # question instead, up to this many times an epoch (DAPO's dynamic sampling).
    sample.refills = 0

    # --- training ----------------------------------------------------------------------------
    config.train = train = ConfigDict()
    # Updates that the samples of an epoch are divided into.
    train.updates_per_epoch = 2
    # Passes over an epoch's samples. More reuse, less on-policy.
    train.num_inner_epochs = 1
    # Tokens of a micro-batch, padding included. A prompt counts once for its answers in there.
    train.tokens_per_batch = 16384
    # Leave the vision tower as it is.
    train.freeze_vision = True
    # The policy that sampled, for the ratio: computed again before the first update (True), so that
    # the ratio is exactly 1 there, or as sampling found it, which costs nothing. In half precision
    # and with vLLM it is always computed again.
    train.recompute_old = False
    # In half precision and with vLLM, what samples is not quite the policy: a token is weighted by
    # how much likelier the policy makes it, up to this bound (2 in most papers); 0 is no weights.
    train.importance_cap = 2.0
    # "clip" (PPO's), "gspo" (one ratio for an answer) or "cispo" (weights are clipped, not
    # gradients).
    train.loss = "clip"
    # The ratio is held within 1 - clip_low and 1 + clip_high; DAPO raises the upper end to .28.
    train.clip_low = 0.2
    train.clip_high = 0.2
    # The loss of a negative advantage is held at this ratio, 3 in most papers; 0 is no bound.
    train.dual_clip = 0.0
    # Mean over "token"s of an update, over tokens and then answers ("sequence"), or a sum over
    # tokens divided by a "constant" (Dr. GRPO), so that length has no part in it.
    train.aggregation = "token"
    # Weight of the KL to the reference; 0 needs no reference.
    train.beta = 0.0
    # "k1", "k2" or "k3", and whether it is part of the "loss" or of the "reward", where it is k1
    # in all papers. In the loss, k1 has no use: its gradient is 0 on average.
    train.kl = "k3"
    train.kl_in = "loss"
    # "grpo", "dr_grpo" (no division), "rloo", "reinforce_pp", "remax" (less the reward of a greedy
    # answer), "gdpo", "pairwise", or "gae": PPO with a value head.
    train.advantage = "grpo"
    # What grpo divides by: standard deviation of the "group" or the "batch", or "none".
    train.advantage_scale = "group"
    # Of advantage="gae": discount and decay per token, weight of the values' loss, and how far a
    # value may move in an epoch.
    train.discount = 1.0
    train.gae_decay = 0.95
    train.value_weight = 0.1
    train.value_clip = 0.2
    update_fields(train)
    weight_fields(train)
    # Unlike for pictures: steps are small already, and an average lags.
    train.ema = False
    # Usual for language models, and of their size.
    train.learning_rate = 1e-5
    train.adam_weight_decay = 0.01
    return config


# whose comments are the reasons of fields
PARTS = (run_fields, reward_fields, get_config, update_fields, weight_fields)
