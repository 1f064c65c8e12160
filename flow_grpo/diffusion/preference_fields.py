"""Settings of offline training on images: section `preferences` of a diffusion run."""

from dataclasses import dataclass

from flow_grpo.config.settings import setting

DENSITIES = ("logit_normal", "uniform")


@dataclass(frozen=True)
class PreferenceConfig:
    """Dataset of images to train on, instead of rollout samples or in addition to them."""

    data: str = setting(
        "",
        "Dataset of preference pairs, rated images or demonstrations: a directory, file or hub "
        "name; see docs/preferences.md. Requires algorithm=dpo, ipo, kto or sft.",
    )
    unlike_sizes: bool = setting(
        False,
        "Accept pairs of images with different sizes, although resizing and cropping then change "
        "one of them more than the other.",
    )
    share: float = setting(
        1.0,
        "Fraction of the trained images that come from preferences.data. 1 trains offline, without "
        "rollouts; below 1, the rest of each update are rollout samples.",
        above=0,
        at_most=1,
    )
    per_epoch: int = setting(
        0,
        "Pairs (dpo, ipo) or images (kto, sft) per epoch; 0 uses as many as fill whole updates, "
        "and the next epoch starts with the remaining ones. Requires share=1.",
        at_least=0,
    )
    density: str = setting(
        "logit_normal",
        "Distribution of the noise levels over the model's training schedule: "
        '"logit_normal" (SD3) or "uniform". With share below 1, the levels are those of the '
        "rollout.",
        choices=DENSITIES,
    )
