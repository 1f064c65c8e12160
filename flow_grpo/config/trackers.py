"""Experiment trackers that `log_with` can select."""

import importlib.util

from flow_grpo.errors import UserError, did_you_mean

TRACKER_HINTS = {  # what to do if a tracker cannot start
    "wandb": "run `wandb login`, or set WANDB_MODE=offline",
    "tensorboard": "",
    "swanlab": "run `swanlab login`, or set SWANLAB_MODE=offline",
    "trackio": "set TRACKIO_DIR to a writable directory",
    "mlflow": "set MLFLOW_TRACKING_URI to a writable store, such as sqlite:///mlflow.db "
    "(pip install mlflow) or a server",
}


def parse_trackers(log_with: str) -> list[str]:
    """Return the trackers in a comma-separated list.

    Raises:
        UserError: If one is unknown or not installed.
    """
    names = list(dict.fromkeys(name.strip() for name in log_with.split(",") if name.strip()))
    for name in names:
        if name not in TRACKER_HINTS:
            raise UserError(
                f"must be empty or a list of {', '.join(TRACKER_HINTS)}",
                field="log_with",
                value=log_with,
                hint=did_you_mean(name, TRACKER_HINTS),
            )
        if importlib.util.find_spec(name) is None:  # accelerate would silently skip it
            raise UserError(f"needs: pip install {name}", field="log_with", value=log_with)
    return names
