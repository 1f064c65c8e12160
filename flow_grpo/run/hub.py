"""Models of the hub."""

from pathlib import Path

from diffusers import DiffusionPipeline

from flow_grpo.errors import UserError, first_line

NEWEST = "main"


def download_revision(model: str, revision: str) -> str:
    """The folder with this revision of a hub id; the newest is left to whoever loads it."""
    if revision == NEWEST:
        return model
    if Path(model).exists():
        raise UserError(
            f"pretrained.revision={revision!r} is for models of the hub, and {model} is a folder; "
            f"leave it at {NEWEST!r}"
        )
    try:
        return str(DiffusionPipeline.download(model, revision=revision, use_safetensors=True))
    except (OSError, ValueError) as error:
        reason = first_line(error.__cause__ or error)
        raise UserError(
            f"cannot load pretrained.model={model!r} at pretrained.revision={revision!r}: {reason}"
        ) from error
