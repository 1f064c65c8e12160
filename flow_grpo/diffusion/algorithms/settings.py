"""Settings of the built-in algorithms: one dataclass per algorithm, a config section of its name.

This module does not import torch, so that configs are checked and `--help` is printed quickly.
A custom algorithm defines its dataclass in its own file, as the class attribute `Settings`.
"""

from dataclasses import dataclass
from typing import Literal

from flow_grpo.config.settings import alias_of, setting

KLType = Literal["flow_grpo", "gaussian", "velocity"]  # of flow_grpo.losses, which needs torch
KL_TYPES: tuple[KLType, ...] = ("flow_grpo", "gaussian", "velocity")
StepWeight = Literal["none", "guard", "tempflow"]
STEP_WEIGHTS: tuple[StepWeight, ...] = ("none", "guard", "tempflow")
MAX_GUIDANCE = 1000

KL_WEIGHT_HELP = "Weight of the KL to the reference policy (the initial weights)."
KL_TARGET_HELP = (
    "Target KL; 0 keeps the KL weight fixed. Once the KL has reached the target, the weight is "
    "doubled after an epoch with a KL above 1.5 times the target and halved after one below 1/1.5 "
    "of it."
)
ADV_CLIP_HELP = "Advantages are clipped to [-adv_clip_max, adv_clip_max]."
OLD_MAX_DECAY_HELP = "Upper bound of the decay of the old policy; 0 copies the weights every epoch."


@dataclass(frozen=True)
class AnchorConfig:
    """Regularization shared by the algorithms: section `anchors` of the config."""

    norm_guard: float = setting(
        0.0,
        "Weight of the penalty (|v| / |v_ref| - 1)^2 on velocities that are longer than the "
        "reference's, which oversharpen images. It needs a forward pass of the reference.",
        at_least=0,
    )
    data: str = setting(
        "",
        "Captioned images to train on in addition to the samples: a directory of images with "
        "captions in .txt files of the same name, or a directory, file or hub name as in `dataset` "
        "with an image in each row.",
    )
    data_weight: float = setting(1.0, "Weight of the flow-matching loss on anchors.data.", above=0)
    kl_gate: float = setting(
        0.0,
        "Fraction of the samples the KL applies to, with its whole weight; 0 applies it to all. "
        "Selected are the samples ranked highest by the rewards relative to their rank by the "
        "rewards of weight 0 in reward_fn.",
        from_0_below=1,
    )
    reset_kl: float = setting(
        0.0,
        "Reset the reference to the current policy when the KL exceeds this value; 0 disables it.",
        at_least=0,
    )
    reset_epochs: int = setting(
        0,
        "Reset the reference to the current policy every this many epochs; 0 disables it.",
        at_least=0,
    )
    diversity: bool = setting(
        False,
        "Multiply positive advantages by a sample's distance to its nearest neighbour in the "
        "group, divided by the group's mean distance.",
    )


@dataclass(frozen=True)
class TrajectorySettings:
    """Settings of the algorithms that train the stochastic steps of a rollout."""

    beta: float = setting(
        0.04,
        f"{KL_WEIGHT_HELP} 0 saves a forward pass; rewards that can be hacked need a KL.",
        at_least=0,
    )
    kl_type: KLType = setting(
        "flow_grpo",
        'Form of the KL: "flow_grpo" omits dt, "gaussian" is exact, "velocity" is the mean squared '
        "difference of the velocities.",
        choices=KL_TYPES,
    )
    kl_target: float = setting(0.0, KL_TARGET_HELP, at_least=0)
    adv_clip_max: float = setting(
        5.0, f"{ADV_CLIP_HELP} This bounds the effect of a single outlier.", above=0
    )
    ratio: Literal["step", "trajectory"] = setting(
        "step",
        'Importance ratio of each "step", or of the whole "trajectory", which is the product over '
        "its steps, so that the clip acts on whole samples. The latter costs one more forward pass "
        "per step.",
        choices=("step", "trajectory"),
    )
    step_weight: StepWeight = setting(
        "none",
        'Factor of the loss of a step: "guard" is 1/(-dt), "tempflow" is 2.25 times the standard '
        "deviation of its noise.",
        choices=STEP_WEIGHTS,
    )


@dataclass(frozen=True)
class ForwardSettings:
    """Settings of the algorithms that train noised samples (the forward process)."""

    times: int = setting(
        6,
        "Noise levels trained per sample, spread evenly over the levels of the rollout.",
        at_least=1,
    )
    skip_first: int = setting(
        0, "Number of the noisiest levels of the rollout that are not trained.", at_least=0
    )
    skip_last: int = setting(
        0,
        "Number of the least noisy levels of the rollout that are not trained; errors there say "
        "little about the image.",
        at_least=0,
    )
    noise_per: Literal["sample", "group"] = setting(
        "sample",
        'Draw noise and noise levels per "sample", or once per "group" (V-GRPO), so that losses '
        'within a group differ only by the samples. dgpo, dpo and ipo always use "group".',
        choices=("sample", "group"),
    )
    train_guidance: float | None = setting(
        None,
        "Guidance scale of the trained velocity; unset uses that of the rollout. Any other value "
        "trains a different policy from the one that sampled.",
        at_least=0,
        at_most=MAX_GUIDANCE,
    )
    kl_guidance: float | None = setting(
        None,
        "Guidance scale of the reference; unset uses that of the trained velocity. With any other "
        "value the KL and the margins of dpo are not 0 at the start.",
        at_least=0,
        at_most=MAX_GUIDANCE,
    )
    kl_beta: float = setting(0.0, f"{KL_WEIGHT_HELP} 0 saves a forward pass.", at_least=0)
    kl_type: KLType = setting(
        "velocity",
        'Form of the KL: "velocity" is the mean squared difference of the velocities; "flow_grpo" '
        '(omits dt) and "gaussian" (exact) compare the stochastic steps that both velocities give '
        "with sample.sde_type and sample.noise_level.",
        choices=KL_TYPES,
    )
    kl_target: float = setting(0.0, KL_TARGET_HELP, at_least=0)


@dataclass(frozen=True)
class AwmSettings(ForwardSettings):
    """Settings of `Awm`."""

    power: float = setting(
        0.25,
        "Exponent of the error; values below 1 give samples with a large error less weight.",
        above=0,
        at_most=1,
    )
    adv_clip_max: float = setting(
        5.0, f"{ADV_CLIP_HELP} A single success in 1,152 samples has an advantage of 32.", above=0
    )
    adv_scale: float = setting(5.0, "Advantages are divided by this value.", above=0)
    kl_beta: float = setting(0.001, KL_WEIGHT_HELP, at_least=0)
    old_beta: float = setting(
        1.0,
        "Weight of the mean squared difference from the old policy's velocity. Without it the "
        "model collapses.",
        at_least=0,
    )
    old_rate: float = setting(
        0.001,
        "The old policy is a moving average, updated once per epoch with the decay "
        "min(old_rate * updates, old_max_decay).",
        at_least=0,
    )
    old_max_decay: float = setting(0.3, OLD_MAX_DECAY_HELP, at_least=0, below=1)
    old_most: float = alias_of("old_max_decay")  # until November 2026


@dataclass(frozen=True)
class DgpoSettings(ForwardSettings):
    """Settings of `Dgpo`."""

    kl_beta: float = setting(0.02, f"{KL_WEIGHT_HELP} The default is for OCR.", at_least=0)
    beta: float = setting(
        100.0,
        "Inverse temperature of the group's preference; with larger values, a group that is "
        "already ranked correctly loses weight sooner.",
        above=0,
    )
    clip_range: float = setting(
        1e-2,
        "A sample has no gradient once its error differs from the old policy's by more than this "
        "value in the direction of its advantage.",
        above=0,
    )
    adv_clip_max: float = setting(
        5.0, f"{ADV_CLIP_HELP} A single success in 1,152 samples has an advantage of 32.", above=0
    )
    old_rate: float = setting(
        0.001,
        "The old policy, which the clip compares with, is a moving average, updated once per epoch "
        "with the decay min(old_rate * (updates - 1), old_max_decay).",
        at_least=0,
    )
    old_max_decay: float = setting(0.3, OLD_MAX_DECAY_HELP, at_least=0, below=1)
    old_most: float = alias_of("old_max_decay")  # until November 2026
    old_after: int = setting(
        200, "Number of updates after which the old policy generates the samples.", at_least=0
    )


@dataclass(frozen=True)
class DpoSettings(ForwardSettings):
    """Settings of `Dpo`."""

    beta: float = setting(
        2000.0,
        "Inverse temperature of the preference loss; larger values keep the policy closer to the "
        "reference.",
        above=0,
    )


@dataclass(frozen=True)
class DppoSettings(TrajectorySettings):
    """Settings of `Dppo`."""

    delta: float = setting(
        1e-5,
        "A step whose KL to the sampled step has reached this value is not pushed further away.",
        above=0,
    )


@dataclass(frozen=True)
class GrpoSettings(TrajectorySettings):
    """Settings of `Grpo`."""

    clip_range: float = setting(
        1e-4,
        "The ratio is clipped to [1 - clip_range, 1 + clip_range]. Log-probabilities are means "
        "over latent values, so ratios stay close to 1.",
        above=0,
    )
    clip_range_low: float | None = setting(
        None, "Clip range for ratios below 1; unset uses clip_range.", above=0
    )
    clip_range_high: float | None = setting(
        None, "Clip range for ratios above 1; unset uses clip_range.", above=0
    )

    @property
    def clip(self) -> tuple[float, float]:
        """Clip range below and above 1."""
        low, high = self.clip_range_low, self.clip_range_high
        return self.clip_range if low is None else low, self.clip_range if high is None else high


@dataclass(frozen=True)
class GuardSettings(GrpoSettings):
    """Settings of `GrpoGuard`."""

    clip_range: float = setting(
        2e-6, "Clip range of the ratio. The default is for OCR; use 4e-6 for PickScore.", above=0
    )
    beta: float = setting(
        0.0,
        f"{KL_WEIGHT_HELP} The default is 0, because the clip keeps the policy close.",
        at_least=0,
    )
    step_weight: StepWeight = setting(
        "guard",
        'Factor of the loss of a step: "guard" is 1/(-dt), which gives steps with little noise '
        "gradients as large as the others'.",
        choices=STEP_WEIGHTS,
    )


@dataclass(frozen=True)
class IpoSettings(ForwardSettings):
    """Settings of `Ipo`."""

    beta: float = setting(
        2000.0,
        "The target of the margin of log-likelihood ratios is 1 / (2 beta); larger values keep the "
        "policy closer to the reference.",
        above=0,
    )


@dataclass(frozen=True)
class KtoSettings(ForwardSettings):
    """Settings of `Kto`."""

    beta: float = setting(
        1000.0,
        "Scale of the implicit reward in the sigmoid, which saturates sooner with larger values; "
        "these keep the policy closer to the reference.",
        above=0,
    )
    like_weight: float = setting(1.0, "Weight of liked images.", above=0)
    dislike_weight: float = setting(
        1.0,
        "Weight of disliked images. If there are n times as many images of one kind, set the "
        "weight of the other kind n times as high.",
        above=0,
    )


@dataclass(frozen=True)
class LeapSettings(ForwardSettings):
    """Settings of `Leap`."""

    times: int = setting(
        2,
        "Number of leaps to the final image, each from one state of the rollout to a later one.",
        at_least=1,
    )
    discount: float = setting(
        0.3,
        "Factor of the gradient through the starting points of later leaps. 0 omits this gradient "
        "and saves a forward and a backward pass per later leap.",
        at_least=0,
        at_most=1,
    )


@dataclass(frozen=True)
class MixSettings(GrpoSettings):
    window_size: int = setting(4, "Number of stochastic steps; the paper uses 4 of 25.", at_least=1)
    shift: int = setting(1, "Number of steps by which the window moves.", at_least=1)
    every: int = setting(25, "Number of epochs between two moves of the window.", at_least=1)


@dataclass(frozen=True)
class NftSettings(ForwardSettings):
    """Settings of `Nft`."""

    times: int = setting(
        9, "Noise levels trained per sample, by default 9 of the 10 of the rollout.", at_least=1
    )
    beta: float = setting(
        1.0,
        "Distance of the implicit positive and negative policies from the old one; use 0.1 for OCR "
        "and for several rewards.",
        above=0,
    )
    adv_clip_max: float = setting(
        5.0,
        "Advantages in [-adv_clip_max, adv_clip_max] are mapped to optimality probabilities from 0 "
        "to 1.",
        above=0,
    )
    kl_beta: float = setting(1e-4, KL_WEIGHT_HELP, at_least=0)
    old_rate: float = setting(
        0.001,
        "The old policy is a moving average, updated once per epoch with the decay "
        "min(old_rate * (updates - old_start), old_max_decay).",
        at_least=0,
    )
    old_start: int = setting(
        0,
        "Number of updates before the decay starts to rise; the slow schedule uses 75.",
        at_least=0,
    )
    old_max_decay: float = setting(0.5, OLD_MAX_DECAY_HELP, at_least=0, below=1)
    old_most: float = alias_of("old_max_decay")  # until November 2026


@dataclass(frozen=True)
class OpdSettings:
    """Settings of `Opd`."""

    teachers: dict = setting(
        {}, 'LoRA directory of the teacher of each prompt set; "all" serves every prompt.'
    )
    start: str = setting(
        "merged",
        'Start from the mean of the teachers ("merged") or from the base model ("model").',
        choices=("merged", "model"),
    )
    distance: KLType = setting(
        "velocity",
        'Distance between a step and the teacher\'s step, with the options of kl_type; "velocity" '
        "weights all steps equally.",
        choices=KL_TYPES,
    )
    teacher_guidance: float | None = setting(
        None,
        "Guidance scale of the teachers; unset uses that of the rollout.",
        at_least=0,
        at_most=MAX_GUIDANCE,
    )
    anchor: str = setting(
        "", "LoRA directory to stay close to on all prompts; empty uses the base model."
    )
    anchor_beta: float = setting(
        0.0, "Weight of the distance to the anchor. 0 saves a forward pass.", at_least=0
    )


@dataclass(frozen=True)
class RamSettings(ForwardSettings):
    """Settings of `Ram`."""

    adv_clip_max: float = setting(
        5.0, f"{ADV_CLIP_HELP} A single success in 1,152 samples has an advantage of 32.", above=0
    )
    adv_scale: float = setting(
        5.0,
        "Advantages are divided by this value. Above adv_clip_max / kl_beta, the loss of every "
        "sample has a minimum, because a bad sample repels less strongly than the KL attracts.",
        above=0,
    )
    kl_beta: float = setting(
        1.0,
        f"{KL_WEIGHT_HELP} 1 is the paper's loss; lower values give the reward more weight.",
        at_least=0,
    )


@dataclass(frozen=True)
class RwrSettings(ForwardSettings):
    """Settings of `Rwr`."""

    temperature: float = setting(
        0.1,
        "Temperature of the softmax, in units of the reward; a low temperature selects only the "
        "best sample.",
        above=0,
    )


SETTINGS: dict[str, type] = {
    "awm": AwmSettings,
    "dgpo": DgpoSettings,
    "dpo": DpoSettings,
    "dppo": DppoSettings,
    "grpo": GrpoSettings,
    "grpo_guard": GuardSettings,
    "ipo": IpoSettings,
    "kto": KtoSettings,
    "leap": LeapSettings,
    "mix": MixSettings,
    "nft": NftSettings,
    "opd": OpdSettings,
    "ram": RamSettings,
    "rwr": RwrSettings,
    "sft": ForwardSettings,
}
