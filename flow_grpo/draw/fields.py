"""Every field of a run, its default and why it is there; those of an algorithm are in its file
under flow_grpo/draw/algorithms. Presets change them: flow_grpo/draw/presets."""

from dataclasses import fields
from typing import get_args, get_type_hints

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from flow_grpo.draw.algorithms import ALGORITHMS
from flow_grpo.rewards import REWARDS

EXAMPLE = "config/grpo.py:tiny_ocr"
FLOW_GRPO_NAMES = (
    *("beta", "kl_type", "adv_clip_max"),
    *("clip_range", "clip_range_low", "clip_range_high"),
)


def get_config() -> ConfigDict:
    config = ConfigDict()

    run_fields(config)

    # --- the model ---------------------------------------------------------------------------
    config.pretrained = ConfigDict()
    # A diffusers pipeline folder or a hub id.
    config.pretrained.model = "stabilityai/stable-diffusion-3.5-medium"
    # Branch, tag or commit of a hub id. A folder has none: leave it at "main".
    config.pretrained.revision = "main"
    # Pixels. height and width, where set, come before resolution, which means a square.
    config.resolution = 512
    config.height = 0
    config.width = 0
    # Of a video; 1 is a picture.
    config.frames = 1
    # Tokens of the T5 encoder. Long prompts need more, attention pays for each.
    config.max_sequence_length = 128
    # Folder for text embeddings, which runs can share. Empty: they are kept in memory only.
    config.prompt_cache = ""
    # Text encoders and VAE wait in the CPU's memory while they are not used. Moving them takes
    # time; the encoders move once an epoch, and only if it has new prompts.
    config.offload_idle = False
    # Compile the transformer's blocks and the VAE with torch.compile; on a GPU, where weights are
    # not shared out (ZeRO-3, FSDP). It takes a minute or two at the start, and sampling then needs
    # the memory of training.
    config.compile = True
    # Replay the transformer's forward and backward pass as CUDA graphs, which spares the host their
    # thousands of launches; for LoRA, on one GPU or in DDP, without gradient checkpointing.
    config.cuda_graphs = True
    # False trains the whole transformer, and with a KL keeps its first weights in float32 too.
    config.use_lora = True

    # --- prompts and rewards -----------------------------------------------------------------
    # A folder with train and test files (.txt, .jsonl, .csv, .parquet), one such file, or the name
    # of a Hugging Face dataset; several with their shares: "path/a:0.7,path/b:0.3".
    config.dataset = "dataset/ocr"
    # Where the prompts are, in files with columns. Rewards get the others as metadata.
    config.dataset_column = "prompt"
    # "text" reads train.txt, "metadata" train_metadata.jsonl, "auto" whichever file is there.
    config.prompt_fn = "auto"
    # Test prompts to evaluate on, from the start of the file; 0 means all.
    config.eval_prompts = 0
    reward_fields(config)

    # --- sampling ----------------------------------------------------------------------------
    config.sample = sample = ConfigDict()
    # Few steps are enough to learn from; evaluation uses more.
    sample.num_steps = 10
    sample.eval_num_steps = 40
    # 1.0 samples without guidance, at half the cost. Some models count otherwise: docs/models.md.
    sample.guidance_scale = 4.5
    # That of evaluations; not set means the same.
    sample.eval_guidance_scale = placeholder(float)
    # Images per process that are sampled together, in training and in evaluation; as many in both
    # are compiled once.
    sample.train_batch_size = 8
    sample.test_batch_size = 8
    # Group size. An advantage compares a sample with its group, so small groups are noisy.
    sample.num_image_per_prompt = 16
    # With the two above and the number of processes: how many groups an epoch has. Few groups
    # are the usual reason why a reward does not rise.
    sample.num_batches_per_epoch = 8
    # "flow", "dance" or "cps": how noise is added, see docs/algorithm.md.
    sample.sde_type = "flow"
    # Too little explores nothing, too much draws noise.
    sample.noise_level = 0.7
    # Divide advantages by the standard deviation of all rewards (True) or of the group's: the
    # group's blows up the differences of prompts on which all samples are alike.
    sample.global_std = True
    # Take steps without noise with LoRA added to the weights, in half precision rounded up or down
    # at random: faster where sde_window_size leaves many of them, for memory of the weights twice.
    sample.merge_lora = False
    # Samples of a group start from the same noise and differ only by the steps' noise.
    sample.same_latent = False
    # Noise and training on this many consecutive steps only, their start drawn from the range
    # [first, last); 0 means all steps but the last. Fewer steps train faster.
    sample.sde_window_size = 0
    sample.sde_window_range = (0, 5)
    # Draw it per "epoch", or per "batch" that is sampled: more steps are trained in an epoch, and
    # which ones depends on the batch size.
    sample.sde_window_per = "epoch"
    # "euler", or "dpm2" of second order: better pictures in few steps, where steps add no noise.
    sample.solver = "euler"
    # 1: an epoch is sampled while the rewards of the one before are computed, by weights that are
    # an epoch old. For rewards that take as long as sampling.
    sample.async_depth = 0

    # --- training ----------------------------------------------------------------------------
    config.train = train = ConfigDict()
    # Divides sample.train_batch_size. Equal keeps the batches of sampling, and with them an
    # on-policy ratio of exactly 1; smaller saves memory, if compile=False.
    train.batch_size = 8
    # Micro-batches per update, each over all its time steps.
    train.gradient_accumulation_steps = 4
    # Passes over an epoch's samples. More reuse, less on-policy.
    train.num_inner_epochs = 1
    update_fields(train)
    # "grpo", "dr_grpo" (no division), "rloo", "reinforce_pp", "remax" (less the reward of a sample
    # without noise), "gdpo" or "pairwise" (share of wins over the others of the group).
    train.advantage = "grpo"
    # Train the guided velocity, as it was sampled. False goes with guidance_scale=1 only.
    train.cfg = True
    # "both" halves of guidance have a gradient, as the policy that sampled has it. "conditional"
    # takes the unconditional half as a constant: biased, for less time and memory.
    train.guidance_gradient = "both"
    # Without a window: train the first of the steps, up to this share.
    train.timestep_fraction = 1.0
    weight_fields(train)

    # --- the algorithm -----------------------------------------------------------------------
    # What turns rewards into a loss; docs/algorithms.md compares them. Each has a section of its
    # own name, whose fields and reasons are in flow_grpo/draw/algorithms/NAME.py.
    config.algorithm = "grpo"
    for name, algorithm in ALGORITHMS.items():
        config[name] = section(algorithm.Settings)
    # Flow-GRPO's names for fields of grpo: one value, two names.
    for name in FLOW_GRPO_NAMES:
        train[name] = config.grpo.get_ref(name)
    return config


def run_fields(config: ConfigDict) -> None:
    """Those of every run, whatever it trains."""
    # Folder under `logdir`; empty takes the date and time.
    config.run_name = ""
    # Folder of all runs.
    config.logdir = "logs"
    # "auto" goes on with the run of this name where it was stopped, if there is one; a path
    # (of a run or a checkpoint) starts a new run from that state; "none" starts a new run.
    config.resume = "none"
    # All prompts, noise, windows and LoRA weights follow from it, for any number of processes.
    config.seed = 42
    # Epochs of the whole run, those before a resume included.
    config.num_epochs = 100
    # Epochs between evaluations on the test prompts; 0 evaluates before and after the run only.
    config.eval_freq = 10
    # Epochs between checkpoints; the last epoch is always saved.
    config.save_freq = 10
    # Newest checkpoints to keep, besides the best; 0 keeps all.
    config.num_checkpoint_limit = 5
    # Epochs between states to resume from, of which the newest is kept: a run that is killed
    # loses at most this many. Larger for full fine-tuning, whose state is three models.
    config.state_freq = 1
    # Seconds after which processes give up on one that does not answer any more.
    config.distributed_timeout = 600
    # Pictures written with each evaluation, of the test prompts and of the training samples.
    config.log_images = 16
    # "", or some of wandb, tensorboard, swanlab, trackio and mlflow, as in "wandb,tensorboard".
    # metrics.jsonl is always written. docs/metrics.md says how to log without a network.
    config.log_with = ""
    # What trackers file the run under.
    config.project_name = "flow_grpo"
    # "no", "bf16" or "fp16": the dtype of the frozen weights. LoRA weights stay in float32.
    # Half precision moves the on-policy ratio off 1; train/first_update_ratio_dev shows it.
    config.mixed_precision = "no"
    # Let a GPU round the inputs of float32 products to 10 bits (TF32): faster, and the on-policy
    # ratio moves off 1. Nothing changes in half precision.
    config.allow_tf32 = False
    # "auto" takes a CUDA GPU where there is one; "cpu" never does.
    config.device = "auto"


def reward_fields(config: ConfigDict) -> None:
    # Rewards and their weights. On the command line: --config.reward_fn="{'ocr': 1.0}"
    config.reward_fn = ConfigDict({"jpeg_compressibility": 1.0})
    # Those of the evaluation; empty means the same.
    config.eval_reward_fn = ConfigDict()
    # Names for rewards of your own: {"mine": "my_pkg.my_module:my_reward"}
    config.custom_rewards = ConfigDict()
    # Keyword arguments of rewards that are classes: {"ocr": {"engine": "rapidocr"}}. All take
    # "frames", what they see of a video: "first", "middle", "mean of N" or "clip".
    config.reward_options = ConfigDict()
    # Reward servers, "http://a:18085,http://b:18085", that score a reward instead of this process.
    config.reward_servers = ConfigDict({name: "" for name in REWARDS})
    # What to do when a batch cannot be scored: try again this often, within so many seconds for
    # all attempts together; then its scores are missing.
    config.reward_retries = 8
    config.reward_timeout = 300.0
    # The run saves and stops when more than this share of an epoch's scores are missing.
    config.max_failed_fraction = 0.2


def update_fields(train: ConfigDict) -> None:
    # Recompute activations in the backward pass: more time, far less memory.
    train.gradient_checkpointing = False
    # Adam's two moments in 8 bits (bitsandbytes, GPU only): worth it for full fine-tuning.
    train.use_8bit_adam = False
    # Adam's moments wait on the CPU between updates: less GPU memory, for two copies of them an
    # update. DeepSpeed has an offload of its own.
    train.offload_optimizer = False
    # AdamW's. The learning rate stays as it is, from the first update to the last.
    train.learning_rate = 3e-4
    train.adam_beta1 = 0.9
    train.adam_beta2 = 0.999
    train.adam_weight_decay = 1e-4
    # Gradients here can be as small as 1e-8: a larger epsilon would swallow them.
    train.adam_epsilon = 1e-8
    # Gradients of a larger norm are scaled down to it.
    train.max_grad_norm = 1.0


def weight_fields(train: ConfigDict) -> None:
    # Evaluate and save a moving average of the weights beside the weights themselves.
    train.ema = True
    train.ema_decay = 0.9
    # Updates between two steps of the average. At update n its decay is at most (1 + n) / (10 + n).
    train.ema_update_interval = 8
    # LoRA adds alpha / rank times the product of its two matrices.
    train.lora_rank = 32
    train.lora_alpha = 64
    # Start from this LoRA, which is what a KL is to then; it brings its own rank and alpha.
    train.lora_path = ""


# whose comments are the reasons of fields
PARTS = (get_config, run_fields, reward_fields, update_fields, weight_fields)


def section(settings: type) -> ConfigDict:
    """The fields of an algorithm's settings, at their defaults."""
    kinds = get_type_hints(settings)
    section = ConfigDict()
    for each in fields(settings):
        optional = each.default is None
        section[each.name] = (
            placeholder(get_args(kinds[each.name])[0]) if optional else each.default
        )
    return section
