"""Every field of a run that trains a model that draws, its default and why it is there; those of an
algorithm are in its file under flow_grpo/draw/algorithms. Presets change them:
flow_grpo/draw/presets.py."""

from dataclasses import dataclass, make_dataclass
from functools import cache
from typing import Any, get_args

from ml_collections import ConfigDict

from flow_grpo.advantages import ESTIMATORS
from flow_grpo.config import fields as shared
from flow_grpo.config.settings import same_as, section, setting
from flow_grpo.config.trade import Trade
from flow_grpo.draw.algorithms import ALGORITHMS
from flow_grpo.draw.models.base import GuidanceGradient
from flow_grpo.rewards import REWARDS, option_names
from flow_grpo.sde import KINDS, SOLVERS


@dataclass(frozen=True)
class DrawModel(shared.ModelFields):
    model: str = setting(
        "stabilityai/stable-diffusion-3.5-medium", "A diffusers pipeline folder or a hub id."
    )


@dataclass(frozen=True)
class DrawSample:
    num_steps: int = setting(10, "Few steps are enough to learn from; evaluation uses more.")
    eval_num_steps: int = setting(40, "Steps of evaluations.", at_least=1)
    guidance_scale: float = setting(
        4.5,
        "1.0 samples without guidance, at half the cost. Some models count otherwise: "
        "docs/models.md.",
        at_least=0,
    )
    eval_guidance_scale: float | None = setting(
        None, "The guidance of evaluations; not set means that of training.", at_least=0
    )
    train_batch_size: int = setting(
        8, "Images per process that are sampled together; see test_batch_size."
    )
    test_batch_size: int = setting(
        8,
        "Images per process that are sampled together in evaluations; as many as in training are "
        "compiled once.",
        at_least=1,
    )
    num_image_per_prompt: int = setting(
        16, "Group size. An advantage compares a sample with its group, so small groups are noisy."
    )
    num_batches_per_epoch: int = setting(
        8,
        "With train_batch_size, num_image_per_prompt and the number of processes: how many groups "
        "an epoch has. Few groups are the usual reason why a reward does not rise.",
    )
    sde_type: str = setting(
        "flow",
        '"flow", "dance" or "cps": how noise is added, see docs/algorithm.md.',
        choices=[kind for kind in KINDS if kind != "ode"],
    )
    noise_level: float = setting(0.7, "Too little explores nothing, too much draws noise.", above=0)
    global_std: bool = setting(
        True,
        "Divide advantages by the standard deviation of all rewards (True) or of the group's: the "
        "group's blows up the differences of prompts on which all samples are alike.",
    )
    merge_lora: bool = setting(
        False,
        "Take steps without noise with LoRA added to the weights, in half precision rounded up or "
        "down at random: faster where sde_window_size leaves many of them, for memory of the "
        "weights twice.",
    )
    same_latent: bool = setting(
        False, "Samples of a group start from the same noise and differ only by the steps' noise."
    )
    sde_window_size: int = setting(
        0,
        "Noise and training on this many consecutive steps only; 0 means all steps but the last. "
        "Fewer steps train faster.",
    )
    sde_window_range: tuple = setting(
        (0, 5), "The start of the window is drawn so that it lies within [first, last)."
    )
    sde_window_per: str = setting(
        "epoch",
        'Draw the window per "epoch", or per "batch" that is sampled: more steps are trained in '
        "an epoch, and which ones depends on the batch size.",
        choices=("epoch", "batch"),
    )
    solver: str = setting(
        "euler",
        '"euler", or "dpm2" of second order: better pictures in few steps, where steps add no '
        "noise.",
        choices=SOLVERS,
    )
    async_depth: int = setting(
        0,
        "1: an epoch is sampled while the rewards of the one before are computed, by weights that "
        "are an epoch old. For rewards that take as long as sampling.",
        at_least=0,
        at_most=1,
    )


@dataclass(frozen=True)
class DrawTrain(shared.TrainFields):
    batch_size: int = setting(
        8,
        "Divides sample.train_batch_size. Equal keeps the batches of sampling, and with them an "
        "on-policy ratio of exactly 1; smaller saves memory, if compile=False.",
    )
    gradient_accumulation_steps: int = setting(
        4, "Micro-batches per update, each over all its time steps."
    )
    advantage: str = setting(
        "grpo",
        '"grpo", "dr_grpo" (no division), "rloo", "reinforce_pp", "remax" (less the reward of a '
        'sample without noise), "gdpo" or "pairwise" (share of wins over the others of the group).',
        choices=ESTIMATORS,
    )
    cfg: bool = setting(
        True, "Train the guided velocity, as it was sampled. False goes with guidance_scale=1 only."
    )
    guidance_gradient: str = setting(
        "both",
        '"both" halves of guidance have a gradient, as the policy that sampled has it. '
        '"conditional" takes the unconditional half as a constant: biased, for less time and '
        "memory.",
        choices=get_args(GuidanceGradient),
    )
    timestep_fraction: float = setting(
        1.0, "Without a window: train the first of the steps, up to this share."
    )
    beta: float = same_as("grpo.beta")
    kl_type: str = same_as("grpo.kl_type")
    adv_clip_max: float = same_as("grpo.adv_clip_max")
    clip_range: float = same_as("grpo.clip_range")
    clip_range_low: float | None = same_as("grpo.clip_range_low")
    clip_range_high: float | None = same_as("grpo.clip_range_high")


@dataclass(frozen=True)
class DrawFields(shared.SharedFields):
    """All but the algorithms."""

    pretrained: DrawModel = section(DrawModel)
    resolution: int = setting(512, "Pixels of a square, where height and width are 0.")
    height: int = setting(0, "Pixels; where set, it comes before resolution.")
    width: int = setting(0, "Pixels; where set, it comes before resolution.")
    frames: int = setting(1, "Frames of a video; 1 is a picture.", at_least=1)
    max_sequence_length: int = setting(
        128,
        "Tokens of the T5 encoder. Long prompts need more, attention pays for each.",
        at_least=1,
    )
    prompt_cache: str = setting(
        "", "Folder for text embeddings, which runs can share. Empty: they are kept in memory only."
    )
    offload_idle: bool = setting(
        False,
        "Text encoders and VAE wait in the CPU's memory while they are not used. Moving them takes "
        "time; the encoders move once an epoch, and only if it has new prompts.",
    )
    compile: bool = setting(
        True,
        "Compile the transformer's blocks and the VAE with torch.compile; on a GPU, where weights "
        "are not shared out (ZeRO-3, FSDP). It takes a minute or two at the start, and sampling "
        "then needs the memory of training.",
    )
    cuda_graphs: bool = setting(
        True,
        "Replay the transformer's forward and backward pass as CUDA graphs, which spares the host "
        "their thousands of launches; for LoRA, on one GPU or in DDP, without gradient "
        "checkpointing.",
    )
    use_lora: bool = setting(
        True,
        "False trains the whole transformer, and with a KL keeps its first weights in float32 too.",
    )
    dataset: str = setting(
        "dataset/ocr",
        "A folder with train and test files (.txt, .jsonl, .csv, .parquet), one such file, or the "
        'name of a Hugging Face dataset; several with their shares: "path/a:0.7,path/b:0.3".',
    )
    dataset_column: str = setting(
        "prompt",
        "Where the prompts are, in files with columns. Rewards get the others as metadata.",
    )
    prompt_fn: str = setting(
        "auto",
        '"text" reads train.txt, "metadata" train_metadata.jsonl, "auto" whichever file is there.',
    )
    eval_prompts: int = setting(
        0, "Test prompts to evaluate on, from the start of the file; 0 means all.", at_least=0
    )
    reward_fn: dict = setting(
        {"jpeg_compressibility": 1.0},
        "Rewards and their weights. On the command line: --config.reward_fn=\"{'ocr': 1.0}\"",
    )
    reward_servers: dict = shared.servers(REWARDS)
    sample: DrawSample = section(DrawSample)
    train: DrawTrain = section(DrawTrain)

    @property
    def own(self) -> Any:
        """The settings of the algorithm that is used."""
        return getattr(self, self.algorithm)


def settings() -> type:
    """All fields, with a section for each algorithm that there is now."""
    return _with_algorithms(tuple((name, each.Settings) for name, each in ALGORITHMS.items()))


@cache
def _with_algorithms(sections: tuple[tuple[str, type], ...]) -> type:
    chosen = setting(
        "grpo",
        "What turns rewards into a loss; docs/algorithms.md compares them. Each has a section of "
        "its own name.",
        choices=[name for name, _ in sections],
    )
    parts = [(name, each, section(each)) for name, each in sections]
    own = [("algorithm", str, chosen), *parts]
    return make_dataclass("Settings", own, bases=(DrawFields,), frozen=True)


DRAW = Trade(
    settings=settings,
    source=__name__,
    example="config/grpo.py:tiny_ocr",
    rewards=REWARDS,
    option_names=option_names,
)


def get_config() -> ConfigDict:
    return DRAW.get_config()
