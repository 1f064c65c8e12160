"""Settings of diffusion training, with their defaults, rules and help.

Those of the algorithms are in flow_grpo/diffusion/algorithms/settings.py. Presets override the
defaults: flow_grpo/diffusion/presets.py.
"""

from dataclasses import dataclass, make_dataclass
from functools import cache
from typing import Any

from ml_collections import ConfigDict

from flow_grpo.advantages import ESTIMATORS
from flow_grpo.config import fields as shared
from flow_grpo.config.settings import alias_of, section, setting
from flow_grpo.config.trainer_spec import TrainerSpec
from flow_grpo.diffusion.algorithms import ALGORITHMS
from flow_grpo.diffusion.algorithms.settings import MAX_GUIDANCE, SETTINGS, AnchorConfig
from flow_grpo.diffusion.preference_fields import PreferenceConfig
from flow_grpo.rewards import REWARDS, check_reward_fields, option_names

MAX_STEPS = 1000  # with more, noise levels coincide in half precision
MAX_SIDE_PIXELS = 2**14


@dataclass(frozen=True)
class DiffusionModelConfig(shared.ModelFields):
    """Section `pretrained` of a diffusion run."""

    model: str = setting(
        "stabilityai/stable-diffusion-3.5-medium", "Directory of a diffusers pipeline, or hub id."
    )
    encoder_precision: str = setting(
        shared.UNQUANTIZED,
        'Precision of the text encoders: "fp8" takes half their memory, "nf4" about a third. Both '
        "make prompt embeddings less exact, in training and evaluation.",
        choices=shared.BASE_PRECISIONS,
    )


@dataclass(frozen=True)
class DiffusionSampleConfig:
    """Section `sample`: rollouts and evaluations."""

    num_steps: int = setting(
        10,
        "Denoising steps of rollouts; training needs fewer than evaluation.",
        at_least=1,
        at_most=MAX_STEPS,
    )
    eval_num_steps: int = setting(
        40, "Denoising steps of evaluation.", at_least=1, at_most=MAX_STEPS
    )
    guidance_scale: float = setting(
        4.5,
        "Classifier-free guidance scale; 1 disables guidance and halves the cost. Some models "
        "define it differently: docs/models.md.",
        at_least=0,
        at_most=MAX_GUIDANCE,
    )
    eval_guidance_scale: float | None = setting(
        None,
        "Guidance scale of evaluation; unset uses guidance_scale.",
        at_least=0,
        at_most=MAX_GUIDANCE,
    )
    guidance_scale_2: float | None = setting(
        None,
        "Guidance scale of the second (low-noise) transformer of a model that has two, in training "
        "and evaluation; unset uses that of the first.",
        at_least=0,
        at_most=MAX_GUIDANCE,
    )
    eval_precision: str = setting(
        "base",
        'Frozen weights in evaluation: quantized as in pretrained.base_precision ("base"), or '
        'unquantized as users will run them ("bf16"), streamed layer by layer from CPU memory.',
        choices=("base", "bf16"),
    )
    train_batch_size: int = setting(
        8,
        "Images sampled together per process.",
        at_least=1,
        at_most=2**16,
    )
    test_batch_size: int = setting(
        8,
        "Images sampled together per process in evaluation. A value equal to train_batch_size "
        "avoids a second compilation.",
        at_least=1,
        at_most=2**16,
    )
    num_image_per_prompt: int = setting(
        16,
        "Images per prompt (the group size). Advantages are relative to the group, so small groups "
        "are noisy.",
        at_least=1,
        at_most=2**16,
    )
    num_batches_per_epoch: int = setting(
        8,
        "Batches sampled per process and epoch. With train_batch_size, num_image_per_prompt and "
        "the number of processes it gives the groups per epoch; too few groups are the usual "
        "reason for a reward that does not rise.",
        at_least=1,
        at_most=10**6,
    )
    context_parallel: int = setting(
        1,
        "Processes that compute each sample together, in rollouts, training and its evaluations: "
        "each holds a part of the tokens, for long videos (Ulysses attention). It must divide the "
        "number of processes, the attention heads and the tokens; docs/scaling.md.",
        at_least=1,
        at_most=1024,
        requires={"compile=False": "the compiler cannot trace the exchange in attention"},
    )
    sde_type: str = setting(
        "flow",
        'Form of the SDE step: "flow", "dance" or "cps"; see docs/theory.md.',
        choices=("flow", "dance", "cps"),
    )
    noise_level: float = setting(
        0.7,
        "Scale of the noise in stochastic steps: too little explores nothing, too much leaves "
        "noise in the images.",
        above=0,
        at_most=10,
    )
    global_std: bool = setting(
        True,
        "Divide advantages by the standard deviation of all rewards (True) or of the group "
        "(False), which magnifies small differences within uniform groups.",
    )
    same_latent: bool = setting(
        False,
        "Start all samples of a group from the same latent, so that only the noise of the steps "
        "differs.",
    )
    sde_window_size: int = setting(
        0,
        "Number of consecutive stochastic steps that are trained; 0 trains all but the last. Fewer "
        "steps train faster.",
        at_least=0,
        at_most=MAX_STEPS,
    )
    sde_window_range: tuple = setting(
        (0, 5),
        "Range of steps [first, last) that contains the randomly placed window.",
        at_least=0,
        at_most=MAX_STEPS,
    )
    sde_window_per: str = setting(
        "epoch",
        'Draw a window per "epoch", "group" or sampled "batch"; the latter two train more steps in '
        'an epoch. With "batch" the result depends on the batch size; "group" needs a batch size '
        "that divides the group size.",
        choices=("epoch", "group", "batch"),
    )
    solver: str = setting(
        "euler",
        'Solver of deterministic steps: "euler", or second-order "dpm2" for better images in few '
        "steps.",
        choices=("euler", "dpm2"),
    )
    explore_steps: int = setting(
        4,
        "Deterministic steps of the candidates that train.keep_best_worst selects from.",
        at_least=1,
        at_most=MAX_STEPS,
    )
    async_depth: int = setting(
        0,
        "1 samples an epoch while the rewards of the previous one are computed, with weights one "
        "epoch old; for rewards that take as long as sampling. 0 disables it.",
        at_least=0,
        at_most=1,
    )


@dataclass(frozen=True)
class DiffusionTrainConfig(shared.TrainFields):
    """Section `train` of a diffusion run."""

    batch_size: int = setting(
        8,
        "Images per micro-batch and process; must divide sample.train_batch_size. If equal, the "
        "on-policy ratio is exactly 1; a smaller value saves memory if compile=False.",
        at_least=1,
        at_most=2**16,
    )
    gradient_accumulation_steps: int = setting(
        4, "Micro-batches per update, each with all its trained steps.", at_least=1, at_most=10**6
    )
    advantage: str = setting(
        "grpo",
        'Advantage estimator: "grpo", "dr_grpo" (no division by the standard deviation), "rloo", '
        '"reinforce_pp", "remax" (baseline: a deterministic sample), "gdpo", "grpo_passk" (only '
        'the best sample, for pass@k) or "pairwise" (win rate within the group).',
        choices=ESTIMATORS,
    )
    keep_best_worst: int = setting(
        0,
        "If above 0, draw num_image_per_prompt candidates per prompt in sample.explore_steps "
        "steps, then resample this many of the best and of the worst with all steps and train on "
        "these.",
        at_least=0,
        at_most=2**15,
        excludes={
            "sample.same_latent": "it selects by the initial noise, which a group would share"
        },
    )
    keep_gradients: bool = setting(
        False,
        "Compute each sample's gradient during the rollout and weight it once its reward is known: "
        "the same update without a second forward pass. Requires LoRA, sample.train_batch_size=1 "
        "and one update per epoch; with a KL it saves no time.",
        requires={"use_lora=True": "it stores one gradient per sample"},
        excludes={
            "sample.async_depth": "an epoch would be sampled with older weights than it trains",
            "anchors.kl_gate": "the KL would need all rewards first",
        },
    )
    cfg: bool = setting(
        True,
        "Train the guided velocity, as sampled. False requires sample.guidance_scale=1.",
    )
    guidance_gradient: str = setting(
        "both",
        'Branches of guidance that are differentiated: "both", the gradient of the policy that '
        'sampled, or "conditional", which treats the unconditional branch as a constant: biased, '
        "but cheaper in time and memory.",
        choices=("both", "conditional"),
    )
    timestep_fraction: float = setting(
        1.0,
        "Fraction of the steps that are trained, from the first one on, if sde_window_size is 0.",
        above=0,
        at_most=1,
    )
    beta: float = alias_of("grpo.beta")
    kl_type: str = alias_of("grpo.kl_type")
    adv_clip_max: float = alias_of("grpo.adv_clip_max")
    clip_range: float = alias_of("grpo.clip_range")
    clip_range_low: float | None = alias_of("grpo.clip_range_low")
    clip_range_high: float | None = alias_of("grpo.clip_range_high")


@dataclass(frozen=True)
class DiffusionConfig(shared.SharedFields):
    """All settings except the sections of the algorithms."""

    pretrained: DiffusionModelConfig = section(DiffusionModelConfig)
    resolution: int = setting(
        512,
        "Side of a square image in pixels, if height and width are 0.",
        at_least=0,
        at_most=MAX_SIDE_PIXELS,
    )
    height: int = setting(
        0, "Height in pixels; overrides resolution.", at_least=0, at_most=MAX_SIDE_PIXELS
    )
    width: int = setting(
        0, "Width in pixels; overrides resolution.", at_least=0, at_most=MAX_SIDE_PIXELS
    )
    eval_resolution: int = setting(
        0,
        "Side of a square image in evaluation, if eval_height and eval_width are 0; 0 evaluates "
        "at the size of training.",
        at_least=0,
        at_most=MAX_SIDE_PIXELS,
    )
    eval_height: int = setting(
        0, "Height in evaluation; overrides eval_resolution.", at_least=0, at_most=MAX_SIDE_PIXELS
    )
    eval_width: int = setting(
        0, "Width in evaluation; overrides eval_resolution.", at_least=0, at_most=MAX_SIDE_PIXELS
    )
    frames: int = setting(1, "Frames of a video; 1 for images.", at_least=1, at_most=10**4)
    max_sequence_length: int = setting(
        128,
        "Maximum tokens of the T5 encoder; more support longer prompts and slow down attention.",
        at_least=1,
        at_most=2**15,
    )
    prompt_cache: str = setting(
        "", "Directory of cached text embeddings, shared by runs; empty caches in memory only."
    )
    offload_idle: bool = setting(
        False,
        "Keep the text encoders and the VAE in CPU memory while idle. Transfers take time; the "
        "encoders are moved once per epoch, if it has new prompts.",
    )
    compile: bool = setting(
        True,
        "Compile the transformer blocks and the VAE with torch.compile, on a GPU and without "
        "ZeRO-3. This takes a minute or two, and sampling then needs as much memory as training.",
    )
    cuda_graphs: bool = setting(
        True,
        "Capture the transformer's forward and backward pass in CUDA graphs, which avoids "
        "thousands of kernel launches; for LoRA on one GPU or with DDP, without gradient "
        "checkpointing or sample.context_parallel.",
    )
    use_lora: bool = setting(
        True,
        "Train LoRA. False trains all weights of the transformer; a KL then needs a float32 copy "
        "of the initial weights.",
    )
    dataset: str = setting(
        "dataset/ocr",
        "Directory with train and test files (.txt, .jsonl, .csv, .parquet), one such file, or the "
        'name of a Hugging Face dataset; a weighted mixture is "path/a:0.7,path/b:0.3".',
    )
    dataset_column: str = setting(
        "prompt",
        "Column of the prompts in tabular files; rewards receive the other columns as metadata.",
    )
    image_column: str = setting(
        "",
        'Column of the source images or video; empty uses "images", "image" or "video" if present, '
        'and "none" ignores them.',
    )
    eval_dataset_column: str | None = setting(
        None,
        "Column of the prompts in eval_dataset; unset uses dataset_column.",
        requires=shared.EVAL_SET,
    )
    eval_image_column: str | None = setting(
        None,
        "Column of the source images in eval_dataset; unset uses image_column.",
        requires=shared.EVAL_SET,
    )
    prompt_fn: str = setting(
        "auto",
        'Prompt files: "text" reads train.txt, "metadata" reads train_metadata.jsonl, "auto" '
        "detects which exists.",
    )
    eval_prompts: int = setting(
        0, "Number of test prompts to evaluate, from the start of the file; 0 uses all.", at_least=0
    )
    reward_fn: dict = setting(
        {"jpeg_compressibility": 1.0},
        "Rewards and their weights, on the command line --config.reward_fn=\"{'ocr': 1.0}\"",
    )
    reward_servers: dict = shared.reward_servers_setting(REWARDS)
    custom_algorithms: dict = setting(
        {}, 'Custom algorithms, selected by name in `algorithm`: {"mine": "path/to/file.py:Mine"}.'
    )
    sample: DiffusionSampleConfig = section(DiffusionSampleConfig)
    train: DiffusionTrainConfig = section(DiffusionTrainConfig)
    anchors: AnchorConfig = section(AnchorConfig)
    preferences: PreferenceConfig = section(PreferenceConfig)

    @property
    def is_offline(self) -> bool:
        """Whether only given images are trained, so that there are no rollouts."""
        return bool(self.preferences.data) and self.preferences.share == 1

    @property
    def algorithm_settings(self) -> Any:
        """Settings of the selected algorithm."""
        return getattr(self, self.algorithm)


def build_config_class() -> type:
    """Return the dataclass of all settings, with a section for each registered algorithm.

    The settings of built-in algorithms are known without importing them, which would import torch.
    """
    own = {name: SETTINGS.get(name) or ALGORITHMS[name].Settings for name in ALGORITHMS}
    return _add_algorithm_sections(tuple(own.items()))


@cache
def _add_algorithm_sections(sections: tuple[tuple[str, type], ...]) -> type:
    """Return the settings class with `algorithm` and one section per (name, settings class)."""
    chosen = setting(
        "grpo",
        "Training algorithm, configured in the section of the same name; docs/methods/README.md "
        "compares them.",
        choices=[name for name, _ in sections],
    )
    parts = [(name, each, section(each)) for name, each in sections]
    own = [("algorithm", str, chosen), *parts]
    return make_dataclass("Settings", own, bases=(DiffusionConfig,), frozen=True)


DIFFUSION_SPEC = TrainerSpec(
    settings=build_config_class,
    first=(
        "pretrained.model",
        "dataset",
        "reward_fn",
        "run_name",
        "num_epochs",
        "sample.num_image_per_prompt",
        "sample.num_steps",
        "resolution",
        "train.learning_rate",
        "mixed_precision",
    ),
    presets_module="flow_grpo.diffusion.presets",
    marker="model_index.json",
    example="config/grpo.py:tiny_ocr",
    rewards=REWARDS.paths,
    check_rewards=check_reward_fields,
    option_names=option_names,
    custom={
        "custom_algorithms": "flow_grpo.diffusion.plugins:register_algorithm",
        "custom_models": "flow_grpo.diffusion.models:register_model",
    },
    preflight_check="flow_grpo.diffusion.config_checks:preflight_check",
)


def get_config() -> ConfigDict:
    """Return a config with all settings at their defaults."""
    return DIFFUSION_SPEC.get_config()
