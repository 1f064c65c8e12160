"""Define the config section `draw` of rewards that draw responses (drawn.py)."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from flow_grpo.config.paths import resolve_path
from flow_grpo.config.settings import check_settings, setting
from flow_grpo.errors import UserError, did_you_mean
from flow_grpo.rewards.drawn_names import PREFIX, image_reward_of

SECTION = "draw"


@dataclass(frozen=True)
class DrawSettings:
    """Section `draw`: the diffusion model that draws responses for the rewards drawn:NAME."""

    model: str = setting(
        "",
        "Text-to-image model that draws responses for the rewards drawn:NAME, such as drawn:ocr: "
        "directory or hub id of a diffusers pipeline. See docs/vlm/prompt_enhancer.md.",
    )
    lora: str = setting(
        "",
        "LoRA or run directory of scripts/train.py to load into draw.model; empty for none.",
        requires="draw.model",
    )
    prompt_key: str = setting(
        "",
        "Column with the prompt that images are scored against; empty for the question.",
    )
    images: int = setting(
        1,
        "Images per response, each from different noise; their scores are averaged.",
        at_least=1,
        at_most=256,
    )
    num_steps: int = setting(20, "Sampling steps per image.", at_least=1, at_most=1000)
    guidance_scale: float = setting(4.5, "Guidance scale; 1 or less for none.", at_least=0)
    height: int = setting(512, "Height of the images in pixels.", at_least=8, at_most=2**14)
    width: int = setting(512, "Width of the images in pixels.", at_least=8, at_most=2**14)
    max_sequence_length: int = setting(
        256, "Maximum number of tokens of a prompt.", at_least=1, at_most=2**14
    )
    batch_size: int = setting(16, "Images generated at the same time.", at_least=1, at_most=2**14)
    seed: int = setting(
        0,
        "Seed of the noise, combined with the question and the index of the image.",
        at_least=0,
        at_most=2**64 - 1,
    )
    dtype: str = setting(
        "float32",
        "Dtype of the diffusion model.",
        choices=("float32", "bfloat16", "float16"),
    )
    device: str = setting(
        "", 'Device of the diffusion model, such as "cuda:1"; empty for that of the run.'
    )
    offload: bool = setting(
        False,
        "Move the diffusion model to CPU memory while the language model trains, if both share "
        "a GPU.",
    )


def draw_settings(name: str, draw: DrawSettings | None, options: Mapping[str, Any]) -> DrawSettings:
    """Return the settings of a reward: the section `draw` with the reward's own options.

    Raises:
        UserError: For an unknown option, an invalid value or a missing model.
    """
    draw = draw or DrawSettings()
    known = [each.name for each in fields(DrawSettings)]
    if unknown := [option for option in options if option not in known]:
        raise UserError(
            f"is unknown; {PREFIX}NAME takes the settings of the section {SECTION}",
            field=f"reward_options.{name}.{unknown[0]}",
            hint=did_you_mean(unknown[0], known)
            or f"options of the image reward belong to reward_options.{image_reward_of(name)}",
        )
    for option, value in options.items():
        kind = type(getattr(draw, option))
        accepted = (int, float) if kind is float else kind
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            raise UserError(
                f"must be of type {kind.__name__}",
                field=f"reward_options.{name}.{option}",
                value=value,
            )
    settings = replace(draw, **options)
    paths = {"model": resolve_path(settings.model), "lora": resolve_path(settings.lora)}
    settings = replace(settings, **paths)
    check_settings(SECTION, settings)
    if not settings.model:
        raise UserError(
            f"is missing, and {name} draws with it",
            field=f"{SECTION}.model",
            hint="set it to a text-to-image model, e.g. --config.draw.model=assets/tiny-sd3",
        )
    return settings
