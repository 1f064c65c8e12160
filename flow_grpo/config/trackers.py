"""What `log_with` may name."""

import importlib.util

from flow_grpo.errors import UserError, with_nearest

TRACKERS = {  # what helps where a tracker cannot start
    "wandb": "run `wandb login`, or set WANDB_MODE=offline",
    "tensorboard": "",
    "swanlab": "run `swanlab login`, or set SWANLAB_MODE=offline",
    "trackio": "TRACKIO_DIR must be a folder that can be written",
    "mlflow": "MLFLOW_TRACKING_URI must name a store that can be written, such as "
    "sqlite:///mlflow.db (pip install mlflow) or a server",
}


def parse_trackers(log_with: str) -> list[str]:
    """Names of trackers, separated by commas; raises where one cannot be used."""
    names = list(dict.fromkeys(name.strip() for name in log_with.split(",") if name.strip()))
    for name in names:
        if name not in TRACKERS:
            known = ", ".join(TRACKERS)
            message = f"log_with={log_with!r} must be some of {known}, or empty"
            raise UserError(with_nearest(message, name, TRACKERS))
        if importlib.util.find_spec(name) is None:  # accelerate would go on without a word
            raise UserError(f"log_with={log_with!r} needs: pip install {name}")
    return names
