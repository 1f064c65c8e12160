"""Every field of a run that trains a model that draws, its default and why it is there; those of an
algorithm are in its file under flow_grpo/draw/algorithms. Presets change them:
flow_grpo/draw/presets.py."""

import ast
import sys
from dataclasses import dataclass, fields, make_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from ml_collections import ConfigDict

from flow_grpo.advantages import ESTIMATORS
from flow_grpo.config import fields as shared
from flow_grpo.config.custom import check_class, check_defaults
from flow_grpo.config.settings import same_as, section, setting
from flow_grpo.config.trade import Trade
from flow_grpo.errors import UserError
from flow_grpo.rewards import REWARDS, check_fields, option_names

MOST_STEPS = 1000  # of a schedule; with more, half precision cannot tell noise levels apart
MOST_GUIDANCE = 1000
MOST_PIXELS = 2**14  # of a side


@dataclass(frozen=True)
class DrawModel(shared.ModelFields):
    model: str = setting(
        "stabilityai/stable-diffusion-3.5-medium", "A diffusers pipeline folder or a hub id."
    )
    encoder_precision: str = setting(
        shared.FULL,
        'Text encoders, as base_precision: "fp8" takes half their memory, "nf4" about a third. '
        "Prompts are then read less exactly, in training and in evaluation.",
        choices=shared.PRECISIONS,
    )


@dataclass(frozen=True)
class DrawSample:
    num_steps: int = setting(
        10,
        "Few steps are enough to learn from; evaluation uses more.",
        at_least=1,
        at_most=MOST_STEPS,
    )
    eval_num_steps: int = setting(40, "Steps of evaluations.", at_least=1, at_most=MOST_STEPS)
    guidance_scale: float = setting(
        4.5,
        "1.0 samples without guidance, at half the cost. Some models count otherwise: "
        "docs/models.md.",
        at_least=0,
        at_most=MOST_GUIDANCE,
    )
    eval_guidance_scale: float | None = setting(
        None,
        "The guidance of evaluations; not set means that of training.",
        at_least=0,
        at_most=MOST_GUIDANCE,
    )
    guidance_scale_2: float | None = setting(
        None,
        "The guidance of the second transformer, at little noise, of a model that has two, in "
        "training and evaluations; not set means that of the first.",
        at_least=0,
        at_most=MOST_GUIDANCE,
    )
    eval_precision: str = setting(
        "base",
        'Evaluate with the frozen weights as pretrained.base_precision has them ("base"), or as '
        'they were, for those who will use them so ("bf16"): the CPU keeps a copy and sends it '
        "layer by layer.",
        choices=("base", "bf16"),
    )
    train_batch_size: int = setting(
        8,
        "Images per process that are sampled together; see test_batch_size.",
        at_least=1,
        at_most=2**16,
    )
    test_batch_size: int = setting(
        8,
        "Images per process that are sampled together in evaluations; as many as in training are "
        "compiled once.",
        at_least=1,
        at_most=2**16,
    )
    num_image_per_prompt: int = setting(
        16,
        "Group size. An advantage compares a sample with its group, so small groups are noisy.",
        at_least=1,
        at_most=2**16,
    )
    num_batches_per_epoch: int = setting(
        8,
        "With train_batch_size, num_image_per_prompt and the number of processes: how many groups "
        "an epoch has. Few groups are the usual reason why a reward does not rise.",
        at_least=1,
        at_most=10**6,
    )
    sde_type: str = setting(
        "flow",
        '"flow", "dance" or "cps": how noise is added, see docs/algorithm.md.',
        choices=("flow", "dance", "cps"),
    )
    noise_level: float = setting(
        0.7, "Too little explores nothing, too much draws noise.", above=0, at_most=10
    )
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
        at_least=0,
        at_most=MOST_STEPS,
    )
    sde_window_range: tuple = setting(
        (0, 5),
        "The start of the window is drawn so that it lies within [first, last).",
        at_least=0,
        at_most=MOST_STEPS,
    )
    sde_window_per: str = setting(
        "epoch",
        'Draw the window per "epoch", per "group", or per "batch" that is sampled: more steps are '
        'trained in an epoch. "batch" makes the result depend on the batch size, "group" needs one '
        "that divides the group.",
        choices=("epoch", "group", "batch"),
    )
    solver: str = setting(
        "euler",
        '"euler", or "dpm2" of second order: better pictures in few steps, where steps add no '
        "noise.",
        choices=("euler", "dpm2"),
    )
    explore_steps: int = setting(
        4,
        "Steps, without noise, of samples from which train.keep_best_worst chooses.",
        at_least=1,
        at_most=MOST_STEPS,
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
        at_least=1,
        at_most=2**16,
    )
    gradient_accumulation_steps: int = setting(
        4, "Micro-batches per update, each over all its time steps.", at_least=1, at_most=10**6
    )
    advantage: str = setting(
        "grpo",
        '"grpo", "dr_grpo" (no division), "rloo", "reinforce_pp", "remax" (less the reward of a '
        'sample without noise), "gdpo" or "pairwise" (share of wins over the others of the group).',
        choices=ESTIMATORS,
    )
    keep_best_worst: int = setting(
        0,
        "Where above 0: draw num_image_per_prompt samples of each prompt by few steps, and only "
        "so many of the best and as many of the worst again, with all steps, to train on them.",
        at_least=0,
        at_most=2**15,
    )
    keep_gradients: bool = setting(
        False,
        "Take each sample's gradient while it is drawn, and weigh it when its reward is known: the "
        "same update without a second forward pass. For models of which one picture fills the GPU "
        "(sample.train_batch_size=1), LoRA and one update an epoch; with a KL it saves no time.",
    )
    cfg: bool = setting(
        True, "Train the guided velocity, as it was sampled. False goes with guidance_scale=1 only."
    )
    guidance_gradient: str = setting(
        "both",
        '"both" halves of guidance have a gradient, as the policy that sampled has it. '
        '"conditional" takes the unconditional half as a constant: biased, for less time and '
        "memory.",
        choices=("both", "conditional"),
    )
    timestep_fraction: float = setting(
        1.0, "Without a window: train the first of the steps, up to this share.", above=0, at_most=1
    )
    beta: float = same_as("grpo.beta")
    kl_type: str = same_as("grpo.kl_type")
    adv_clip_max: float = same_as("grpo.adv_clip_max")
    clip_range: float = same_as("grpo.clip_range")
    clip_range_low: float | None = same_as("grpo.clip_range_low")
    clip_range_high: float | None = same_as("grpo.clip_range_high")


@dataclass(frozen=True)
class DrawAnchors:
    norm_guard: float = setting(
        0.0,
        "Weight of (|v| / |v_ref| - 1)^2 wherever a velocity is longer than the reference's: "
        "pictures get harsh as velocities grow. It takes the reference's forward pass.",
        at_least=0,
    )
    data: str = setting(
        "",
        "Pictures with captions to train on beside the samples: a folder of pictures, each with "
        "its caption in a .txt file of the same name, or what `dataset` takes, with a picture in "
        "each row.",
    )
    data_weight: float = setting(
        1.0, "Weight of the flow-matching loss on the pictures of anchors.data.", above=0
    )
    kl_gate: float = setting(
        0.0,
        "Where set, the KL holds this share of the samples alone, with all its weight: those that "
        "the rewards rank furthest above where rewards of weight 0 in reward_fn rank them.",
        from_0_below=1,
    )
    reset_kl: float = setting(
        0.0, "Where set: the reference becomes the policy once the KL is above this.", at_least=0
    )
    reset_epochs: int = setting(
        0, "Where set: the reference becomes the policy after so many epochs.", at_least=0
    )
    diversity: bool = setting(
        False,
        "Multiply advantages above 0 by how far a picture is from the one of its group that is "
        "most like it, over the group's mean of that.",
    )


@dataclass(frozen=True)
class DrawFields(shared.SharedFields):
    """All but the algorithms."""

    pretrained: DrawModel = section(DrawModel)
    resolution: int = setting(
        512, "Pixels of a square, where height and width are 0.", at_least=0, at_most=MOST_PIXELS
    )
    height: int = setting(
        0, "Pixels; where set, it comes before resolution.", at_least=0, at_most=MOST_PIXELS
    )
    width: int = setting(
        0, "Pixels; where set, it comes before resolution.", at_least=0, at_most=MOST_PIXELS
    )
    frames: int = setting(1, "Frames of a video; 1 is a picture.", at_least=1, at_most=10**4)
    max_sequence_length: int = setting(
        128,
        "Tokens of the T5 encoder. Long prompts need more, attention pays for each.",
        at_least=1,
        at_most=2**15,
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
    image_column: str = setting(
        "",
        'Where the pictures are that a model starts from. Empty: "images" or "image", where there '
        'is one; "none": pictures are left out.',
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
    custom_algorithms: dict = setting(
        {}, 'Methods of your own: {"mine": "path/to/file.py:Mine"}; algorithm="mine" then uses it.'
    )
    sample: DrawSample = section(DrawSample)
    train: DrawTrain = section(DrawTrain)
    anchors: DrawAnchors = section(DrawAnchors)

    @property
    def own(self) -> Any:
        """The settings of the algorithm that is used."""
        return getattr(self, self.algorithm)


def settings() -> type:
    """All fields, with a section for each algorithm that there is now."""
    found = sys.modules.get(f"{__package__}.algorithms")  # they need torch, and a config does not
    own = {n: a.Settings for n, a in found.ALGORITHMS.items()} if found else _read_settings()
    return _with_algorithms(tuple(own.items()))


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


def take_algorithm(field: str, name: str, found: Any) -> None:
    """Add a method of the user's own."""
    from flow_grpo.draw.algorithms import ALGORITHMS, OURS, Algorithm

    if name in {*OURS, "algorithm", *(each.name for each in fields(DrawFields)), *dir(DrawFields)}:
        raise UserError(f"{field} has the name of a field or a method of ours; choose another")
    check_class(field, found, Algorithm, name=name)
    check_defaults(field, getattr(found, "Settings", None))
    ALGORITHMS[name] = found


@cache
def _read_settings() -> dict[str, type]:
    """The settings of all algorithms, made of the lines in their files: to import those takes
    torch. A class has its `name` and `Settings` in lines of its own."""
    folder = Path(__file__).parent
    files = [folder.parent / "losses.py", *sorted((folder / "algorithms").glob("*.py"))]
    lines = {}  # what stands in those files under a name
    for node in (node for file in files for node in ast.parse(file.read_text("utf-8")).body):
        if isinstance(node, ast.ClassDef):
            lines[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            lines[ast.unparse(target)] = node
    made = {"dataclass": dataclass, "setting": setting, "Literal": Literal, "__name__": __name__}

    def make(name: str) -> None:
        """Once, after what it is made of."""
        if node := lines.pop(name, None):
            for each in [each.id for each in ast.walk(node) if isinstance(each, ast.Name)]:
                make(each)
            exec(compile(ast.Module([node], []), __file__, "exec"), made)

    found = {}
    for node in [node for node in lines.values() if isinstance(node, ast.ClassDef)]:
        own = {ast.unparse(e.targets[0]): e.value for e in node.body if isinstance(e, ast.Assign)}
        if {"name", "Settings"} <= own.keys():
            make(own["Settings"].id)
            found[ast.literal_eval(own["name"])] = made[own["Settings"].id]
    return found


DRAW = Trade(
    settings=settings,
    first=(
        *("pretrained.model", "dataset", "reward_fn", "run_name", "num_epochs"),
        *("sample.num_image_per_prompt", "sample.num_steps", "resolution"),
        *("train.learning_rate", "mixed_precision"),
    ),
    presets_in="flow_grpo.draw.presets",
    marker="model_index.json",
    example="config/grpo.py:tiny_ocr",
    rewards=REWARDS,
    check_rewards=check_fields,
    option_names=option_names,
    custom={
        "custom_algorithms": f"{__name__}:take_algorithm",
        "custom_models": "flow_grpo.draw.models:take_model",
    },
    check_early="flow_grpo.draw.check:check_early",
)


def get_config() -> ConfigDict:
    return DRAW.get_config()
