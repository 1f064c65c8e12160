"""Export a trained checkpoint as a standalone diffusers pipeline directory."""

import shutil
from pathlib import Path

import diffusers
import torch
from diffusers import DiffusionPipeline, ModelMixin
from safetensors import SafetensorError

from flow_grpo.diffusion.models import ADAPTERS
from flow_grpo.diffusion.models.experts import SECOND_TRANSFORMER, check_expert_folders
from flow_grpo.diffusion.models.lora_files import attach_lora, load_full_weights
from flow_grpo.errors import UserError, first_line
from flow_grpo.hub_access import check_hub_access, hub_error_message
from flow_grpo.training.export import (
    ExportSource,
    reject_existing,
    reject_nonfinite,
    write_folder_atomically,
)
from flow_grpo.training.lora_files import IncompatibleWeights
from flow_grpo.untrusted_files import read_json
from flow_grpo.weight_checks import check_files_finite, check_finite, check_regular_files

TRAINED_COMPONENT = "transformer"  # pipeline component that runs train


def export(
    source: ExportSource,
    model: str,
    out: Path,
    dtype: torch.dtype = torch.float32,
    revision: str = "main",
) -> None:
    """Write `model` with the weights of `source` atomically to the new directory `out`.

    The transformer is merged in float32 and stored as `dtype`; other components are copied.

    Args:
        source: Checkpoint to export.
        model: Directory or hub id of the base model.
        out: Directory to create.
        dtype: Dtype of the stored transformer.
        revision: Revision of a hub id.
    """
    reject_existing(out)
    base = _pipeline_folder(model, revision)
    index = _read_index(base)
    weight_folders = {TRAINED_COMPONENT: source.weights}
    if (index.get(SECOND_TRANSFORMER) or [None])[0]:
        weight_folders[SECOND_TRANSFORMER] = source.weights / SECOND_TRANSFORMER
    check_expert_folders(source.weights, [*weight_folders])
    merged = {
        part: _load_merged_transformer(source, base, part, index, weights)
        for part, weights in weight_folders.items()
    }
    for part, transformer in merged.items():
        transformer.to(dtype)
        reject_nonfinite(weight_folders[part], transformer, dtype)

    def fill(folder: Path) -> None:
        """Write all components, the merged transformers and a model card."""
        _copy_components(base, index, folder, set(merged))
        for part, transformer in merged.items():
            transformer.save_pretrained(folder / part)
            # save_pretrained would record the path it was loaded from
            shutil.copyfile(base / part / "config.json", folder / part / "config.json")
        card = _model_card(source, model, out.name, dtype, _pipeline_tag(index))
        (folder / "README.md").write_text(card, encoding="utf-8")

    write_folder_atomically(out, fill)


def _pipeline_folder(model: str, revision: str) -> Path:
    """Return the directory of the base model; a hub id is downloaded if it is not cached."""
    if Path(model).is_dir():
        check_regular_files("--model", model)
        return Path(model)
    check_hub_access("--model", model, revision=revision, file="model_index.json")
    try:
        return Path(DiffusionPipeline.download(model, revision=revision))
    except (OSError, ValueError) as error:
        if message := hub_error_message(error, "--model", model):
            raise UserError(message) from error
        raise UserError(
            f"is neither a directory nor a hub id ({first_line(error.__cause__ or error)})",
            field="--model",
            value=model,
        ) from error


def _read_index(folder: Path) -> dict:
    """Return the content of model_index.json; reject directories that are no diffusers pipeline."""
    path = folder / "model_index.json"
    if not path.is_file():
        raise UserError(f"is not a diffusers pipeline: it has no {path.name}", field=folder)
    try:
        index = read_json(path)
        library, name = index[TRAINED_COMPONENT]
        known = library == "diffusers" and issubclass(getattr(diffusers, name), ModelMixin)
    except OSError as error:
        raise UserError(f"cannot be read: {first_line(error)}", field=path) from error
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError):
        known = False
    if not known:
        raise UserError(
            f"lists no component {TRAINED_COMPONENT!r} that is a diffusers model", field=path
        )
    return index


def _load_merged_transformer(
    source: ExportSource, folder: Path, name: str, index: dict, weights: Path
) -> ModelMixin:
    """Load a transformer in float32 and merge the checkpoint's weights into it."""
    part, kind = folder / name, getattr(diffusers, index[name][1])
    try:
        transformer, report = kind.from_pretrained(
            part, dtype=torch.float32, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        rule = f"cannot be loaded as {kind.__name__}: {first_line(error)}"
        raise UserError(rule, field=part) from error
    missing = {name for name, _ in transformer.named_parameters()} & set(report["missing_keys"])
    if missing:
        raise UserError(f"is incomplete: it has no {min(missing)}", field=part)
    check_finite(str(part), transformer.state_dict().items())
    try:
        if source.is_lora:
            attach_lora(transformer, weights, family=index["_class_name"])
            transformer.fuse_lora()
            transformer.unload_lora()
        else:
            load_full_weights(transformer, weights)
    except IncompatibleWeights as error:
        raise UserError(str(error), hint="set --model to the model it was trained from") from error
    return transformer


def _copy_components(folder: Path, index: dict, out: Path, exclude: set[str]) -> None:
    """Copy the components in model_index.json, without single-file checkpoints next to them."""
    shutil.copyfile(folder / "model_index.json", out / "model_index.json")
    for licence in folder.glob("LICENSE*"):
        shutil.copyfile(licence, out / licence.name)
    for name in index:
        if name not in exclude and (folder / name).is_dir():
            check_files_finite(folder / name)
            shutil.copytree(folder / name, out / name, copy_function=shutil.copyfile)


def _pipeline_tag(index: dict) -> str:
    """Return the task name that the hub uses."""
    family = ADAPTERS.get(index.get("_class_name"))
    return "image-to-image" if family and family.num_source_images[-1] else "text-to-image"


def _model_card(source: ExportSource, model: str, name: str, dtype: torch.dtype, task: str) -> str:
    """Return the README.md of an exported model."""
    facts = [] if source.step is None else [f"step {source.step}"]
    if source.is_ema is not None:
        facts.append("moving average (EMA)" if source.is_ema else "not averaged")
    facts.append(f"stored in {str(dtype).removeprefix('torch.')}")
    what = "a LoRA merged (in float32) into" if source.is_lora else "trained weights in place of"
    # only a hub id can be linked; a local path is private
    base = model.rstrip("/")
    front = f"base_model: {base}\n" if not Path(base).exists() else ""
    shown = Path(base).name if Path(base).is_absolute() else base
    return f"""---
library_name: diffusers
pipeline_tag: {task}
{front}---

# {name}

`{shown}` with {what} its transformer, by flow_grpo's `scripts/export.py`.

- checkpoint: `{source}`
- weights: {", ".join(facts)}

All other components are unchanged copies of the base model's, and its licence applies.

```python
from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained("{name}")
```
"""
