"""Models and data sets of the hub."""

from collections.abc import Sequence
from pathlib import Path

from flow_grpo.access import NEWEST, check_access, refusal
from flow_grpo.errors import UserError, first_line


def download_revision(model: str, revision: str) -> str:
    """The folder with this revision of a hub id; the newest is left to whoever loads it."""
    if revision == NEWEST:
        return model
    if Path(model).exists():
        raise UserError(
            f"pretrained.revision={revision!r} is for models of the hub, and {model} is a folder; "
            f"leave it at {NEWEST!r}"
        )
    from diffusers import DiffusionPipeline  # here: it takes seconds, as does the other

    check_access("pretrained.model", model, revision=revision, file="model_index.json")
    try:
        return str(DiffusionPipeline.download(model, revision=revision, use_safetensors=True))
    except (OSError, ValueError) as error:
        reason = first_line(error.__cause__ or error)
        raise UserError(
            f"cannot load pretrained.model={model!r} at pretrained.revision={revision!r}: {reason}"
        ) from error


def check_data(source: str) -> tuple[str, str]:
    """Name and revision of a data set, which the hub has and lets us read."""
    name, _, revision = source.removesuffix("@train").partition("@")
    check_access("dataset", name, kind="dataset", revision=revision or NEWEST, file="README.md")
    return name, revision or NEWEST


def download_data(source: str, patterns: Sequence[str]) -> Path:
    """The folder, in the hub's cache, with the files of a data set that match these patterns.

    `source` is owner/name or owner/name@revision; EasyR1's owner/name@train is the newest too.
    """
    from huggingface_hub import snapshot_download

    name, revision = check_data(source)
    try:
        found = snapshot_download(
            name, repo_type="dataset", revision=revision, allow_patterns=list(patterns)
        )
    except Exception as error:  # of many kinds: no network, no such set, not allowed
        if told := refusal(error, "dataset", name, kind="dataset"):
            raise UserError(told) from error
        at = f" --revision {revision}" if revision != NEWEST else ""
        place = Path(name).name
        raise UserError(
            f"dataset={source!r} is no folder or file here, and cannot be had from the hub under "
            f"that name ({first_line(error)}); fetch it where there is a network (hf download "
            f"{name} --repo-type dataset{at} --local-dir {place}) and give --config.dataset={place}"
        ) from error
    return Path(found)
