"""Settings of training on given images: section `preferences` of a diffusion run."""

from dataclasses import dataclass

from flow_grpo.config.settings import setting

DENSITIES = ("logit_normal", "uniform")


@dataclass(frozen=True)
class PreferenceConfig:
    """Given images to train on, instead of samples or in addition to them."""

    data: str = setting(
        "",
        "Preference pairs, rated images or demonstrations to train on: a directory, file or hub "
        "name; see docs/preferences.md. For algorithm=dpo, ipo, kto and sft.",
    )
    unlike_sizes: bool = setting(
        False,
        "Accept pairs of images with different sizes: resizing then loses more of one of them.",
    )
    share: float = setting(
        1.0,
        "Fraction of the trained images that are given ones. 1 trains on given images only, "
        "without any rollout; below 1, the rest of each update are samples.",
        above=0,
        at_most=1,
    )
    per_epoch: int = setting(
        0,
        "Pairs (dpo, ipo) or images (kto, sft) per epoch; 0 uses as many as fill whole updates, "
        "and the remaining ones come first in the next epoch. Needs share=1.",
        at_least=0,
    )
    density: str = setting(
        "logit_normal",
        "Distribution of the noise levels over the model's training schedule: "
        '"logit_normal" (SD3) or "uniform". With share below 1, the levels are those of the '
        "rollout.",
        choices=DENSITIES,
    )
