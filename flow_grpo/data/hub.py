"""Download models and datasets from the Hugging Face Hub."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from flow_grpo.data.rows import (
    BATCH_ROWS,
    READERS,
    RowLayout,
    Split,
    T,
    import_or_hint,
    select_columns,
)
from flow_grpo.errors import UserError, first_line
from flow_grpo.hub_access import DEFAULT_REVISION, check_hub_access, hub_error_message
from flow_grpo.modelscope_hub import download_modelscope_dataset, is_modelscope, local_model


def is_hub_name(source: str) -> bool:
    """Return whether a name has the form owner/name and is not a mistyped local path.

    Names on ModelScope are recognised by their prefix.
    """
    path = Path(source)
    if is_modelscope(source):
        return True
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", source) or path.suffix in READERS:
        return False
    return not os.path.exists(path) and not os.path.exists(path.parent)


def download_revision(model: str, revision: str) -> str:
    """Download a revision of a diffusion pipeline and return its directory.

    The default revision is not downloaded here, except from ModelScope: `model` is returned
    unchanged.

    Raises:
        UserError: If `model` is a local directory, or the revision cannot be downloaded.
    """
    if is_modelscope(model):
        return local_model(model, revision)
    if revision == DEFAULT_REVISION:
        return model
    if Path(model).exists():
        raise UserError(
            f"is incompatible with the local directory {model}",
            field="pretrained.revision",
            value=revision,
            hint=f"reset it to {DEFAULT_REVISION!r}",
        )
    from diffusers import DiffusionPipeline  # slow import

    check_hub_access("pretrained.model", model, revision=revision, file="model_index.json")
    try:
        return str(DiffusionPipeline.download(model, revision=revision, use_safetensors=True))
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot be loaded at pretrained.revision={revision!r}: "
            f"{first_line(error.__cause__ or error)}",
            field="pretrained.model",
            value=model,
        ) from error


def check_hub_dataset(source: str, field: str = "dataset") -> tuple[str, str]:
    """Return name and revision of a hub dataset after checking that it can be accessed.

    Args:
        source: "owner/name" or "owner/name@revision".
        field: Setting that names it.
    """
    name, _, revision = source.removesuffix("@train").partition("@")
    check_hub_access(
        field, name, kind="dataset", revision=revision or DEFAULT_REVISION, file="README.md"
    )
    return name, revision or DEFAULT_REVISION


def download_dataset(source: str, patterns: Sequence[str], field: str = "dataset") -> Path:
    """Download a dataset and return its directory in the hub's cache.

    Args:
        source: "owner/name" or "owner/name@revision"; EasyR1's "owner/name@train" is accepted too.
        patterns: Globs of the files to download.
        field: Setting that names it.
    """
    if is_modelscope(source):
        return Path(download_modelscope_dataset(source, field, patterns))
    from huggingface_hub import snapshot_download

    name, revision = check_hub_dataset(source, field)
    try:
        found = snapshot_download(
            name, repo_type="dataset", revision=revision, allow_patterns=list(patterns)
        )
    except Exception as error:  # many types: no network, unknown dataset, access denied
        if message := hub_error_message(error, field, name, kind="dataset"):
            raise UserError(message) from error
        at = f" --revision {revision}" if revision != DEFAULT_REVISION else ""
        folder = Path(name).name
        raise UserError(
            f"is not a local path and cannot be downloaded from the hub ({first_line(error)})",
            field=field,
            value=source,
            hint=f"on a machine with network access run hf download {name} --repo-type dataset{at} "
            f"--local-dir {folder} and set --config.{field}={folder}",
        ) from error
    return Path(found)


def read_hub(name: str, split: Split, layout: RowLayout[T]) -> list[T] | None:
    """Read a split with the `datasets` package, or return None if the dataset has no such split.

    "validation" stands in for "test", and a dataset with a single split is used for training.
    """
    datasets = import_or_hint(
        "datasets", f"dataset={name!r} is not a local path; as a hub name it needs datasets"
    )
    check_hub_dataset(name)
    try:
        splits = datasets.load_dataset(name)
    except Exception as error:  # many types: no network, unknown dataset, several configurations
        if message := hub_error_message(error, "dataset", name, kind="dataset"):
            raise UserError(message) from error
        raise UserError(
            f"is not a local path and cannot be loaded from the hub: {first_line(error)}",
            field="dataset",
            value=name,
            hint="save the columns you need as train.parquet in a directory",
        ) from error
    if split == "train":
        wanted = list(splits) if len(splits) == 1 else ["train"]
    else:
        wanted = ["test", "validation"] if "train" in splits else []
    chosen = next((each for each in wanted if each in splits), None)
    if chosen is None:
        if split == "test":
            return None
        raise UserError(f'has no split "train", only {", ".join(splits)}', field=name)
    part, where = splits[chosen], f"{name} ({chosen})"
    columns = select_columns(part.features.arrow_schema, layout, where)
    tables = part.select_columns(columns).with_format("arrow").iter(batch_size=BATCH_ROWS)
    rows = (row for table in tables for row in table.to_pylist())
    return [
        layout.parse(layout.from_arrow(row), Path(), f"{where} row {number}")
        for number, row in enumerate(rows, 1)
    ]
