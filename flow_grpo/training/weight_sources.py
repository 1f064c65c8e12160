"""Find weights by a path or a hub id: of a run, a LoRA, a model or a pipeline."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flow_grpo.errors import UserError, did_you_mean_file, first_line
from flow_grpo.hub_access import (
    cached_repos,
    check_hub_access,
    hub_error_message,
    is_offline,
    split_hub_id,
)
from flow_grpo.training.checkpoint import find_weights
from flow_grpo.untrusted_files import PICKLE_PATTERNS
from flow_grpo.weight_checks import check_regular_files

PIPELINE_INDEX = "model_index.json"
# Pictures, training states and the like are not downloaded.
WEIGHT_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
SECOND_TRANSFORMER = "transformer_2"  # subdirectory of weights for a model with two transformers


def locate_weights(source: str, field: str = "--checkpoint") -> Path:
    """Return the local path of weights; those on the hub are downloaded if they are not cached.

    Args:
        source: A run directory (its newest intact checkpoint), a checkpoint or a directory of
            weights in one (EMA weights are preferred), the directory of a LoRA, of a model or of a
            diffusers pipeline, the .safetensors file of a LoRA, or a hub id of one of these.
        field: Option that names it, for messages.

    Raises:
        UserError: If there are no weights, or they are damaged or pickled.
    """
    path = download_weights(source, field) if split_hub_id(source) else Path(source)
    if not os.path.exists(path):  # False if the name is too long
        raise UserError(
            "does not exist",
            field=field,
            value=source,
            hint=did_you_mean_file(source) or "pass a path or a hub id (owner/name)",
        )
    check_regular_files(field, path)
    if path.is_file():
        if path.suffix != ".safetensors":
            raise UserError(
                "must be a .safetensors file, because unpickling can execute code",
                field=field,
                value=source,
            )
        return path
    return path if (path / PIPELINE_INDEX).is_file() else find_weights(path)


def download_weights(source: str, field: str) -> Path:
    """Return the local path of weights on the hub, downloaded unless they are cached.

    Args:
        source: A hub id: owner/name, or owner/name/file.safetensors for one file.
        field: Option that names it, for messages.
    """
    name, file = split_hub_id(source)
    with explain_hub_errors(source, field):
        if not file and PIPELINE_INDEX in list_hub_files(name, field):
            from diffusers import DiffusionPipeline  # slow import

            return Path(DiffusionPipeline.download(name, use_safetensors=True))
        return _download_files(name, file, field)


def download_lora(source: str, field: str) -> Path:
    """Return the local path of a LoRA on the hub, like `download_weights`; reject full models."""
    name, file = split_hub_id(source)
    with explain_hub_errors(source, field):
        files = [] if file else list_hub_files(name, field)
        for marker in (PIPELINE_INDEX, "config.json"):
            if marker in files and "adapter_config.json" not in files:
                raise UserError(
                    f"contains {marker}, so it is a full model, not a LoRA",
                    field=field,
                    value=source,
                    hint="pass the hub id of a LoRA",
                )
        return _download_files(name, file, field)


def _download_files(name: str, file: str, field: str) -> Path:
    """Return the local path of one file of a repository, or of all its weights and configs."""
    from huggingface_hub import hf_hub_download, snapshot_download

    if file:
        check_hub_access(field, name, file=file)
        return Path(hf_hub_download(name, file))
    ignored = ["*/*", *PICKLE_PATTERNS]
    found = snapshot_download(name, allow_patterns=WEIGHT_PATTERNS, ignore_patterns=ignored)
    if any(each.startswith(f"{SECOND_TRANSFORMER}/") for each in list_hub_files(name, field)):
        snapshot_download(name, allow_patterns=[f"{SECOND_TRANSFORMER}/*.safetensors"])
    return Path(found)


def list_hub_files(name: str, field: str) -> list[str]:
    """Return the files of a model repository: those in the cache, else all on the hub."""
    from huggingface_hub import list_repo_files, snapshot_download

    if name in cached_repos("model") or is_offline():
        folder = Path(snapshot_download(name, local_files_only=True))
        return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    check_hub_access(field, name, file="adapter_config.json")
    return list_repo_files(name)


@contextmanager
def explain_hub_errors(source: str, field: str) -> Iterator[None]:
    """Context manager that raises errors of the hub client as a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of httpx, requests or the hub client, by version
        if message := hub_error_message(error, field, split_hub_id(source)[0]):
            raise UserError(message) from error
        where = "in the cache, and HF_HUB_OFFLINE is set" if is_offline() else "on the hub"
        raise UserError(
            f"is neither a local path nor {where}: {first_line(error)}", field=field, value=source
        ) from error
