"""ddpo-pytorch's config file, which has presets of Stable Diffusion 1.5; it answers with ours."""

from flow_grpo.errors import UserError

REWARDS = {
    "compressibility": "jpeg_compressibility",
    "incompressibility": "jpeg_incompressibility",
    "aesthetic": "aesthetic",
    "prompt_image_alignment": "viescore",
}


def get_config(name: str = "compressibility") -> None:
    """Raise an error that names our command."""
    reward = REWARDS.get(name, "aesthetic")
    raise UserError(
        "is ddpo-pytorch's, for Stable Diffusion 1.5",
        field="config/dgx.py",
        hint=f"run python scripts/train.py --config config/grpo.py:pickscore_sd3_1gpu "
        f"--config.reward_fn=\"{{'{reward}': 1.0}}\"",
    )
