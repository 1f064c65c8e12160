"""A trained checkpoint put into its model: a pipeline folder that diffusers loads by itself."""

import shutil
from pathlib import Path

import diffusers
import torch
from diffusers import DiffusionPipeline, ModelMixin
from safetensors import SafetensorError

from flow_grpo.access import check_access, refusal
from flow_grpo.draw.models import ADAPTERS
from flow_grpo.draw.models.experts import SECOND, check_places
from flow_grpo.draw.models.lora_files import attach_lora, replace_weights
from flow_grpo.errors import UserError, first_line
from flow_grpo.files import read_json
from flow_grpo.run.adapters import Misfit
from flow_grpo.run.export import Source, refuse_existing, refuse_nonfinite, write_folder
from flow_grpo.weights import check_files_finite, check_finite, check_regular_files

TRAINED = "transformer"  # the part of a pipeline that runs train


def export(
    source: Source,
    model: str,
    out: Path,
    dtype: torch.dtype = torch.float32,
    revision: str = "main",
) -> None:
    """Write `model` with the weights of `source` to the new folder `out`, whole or not at all.

    The transformer is merged in float32 and stored as `dtype`; the other parts are copied.
    """
    refuse_existing(out)
    base = _pipeline_folder(model, revision)
    index = _read_index(base)
    places = {TRAINED: source.weights}
    if (index.get(SECOND) or [None])[0]:
        places[SECOND] = source.weights / SECOND
    check_places(source.weights, [*places])
    merged = {part: _merged(source, base, part, index, place) for part, place in places.items()}
    for part, transformer in merged.items():
        transformer.to(dtype)
        refuse_nonfinite(places[part], transformer, dtype)

    def fill(folder: Path) -> None:
        _copy_parts(base, index, folder, set(merged))
        for part, transformer in merged.items():
            transformer.save_pretrained(folder / part)
            # the same but for the path it was loaded from
            shutil.copyfile(base / part / "config.json", folder / part / "config.json")
        card = _model_card(source, model, out.name, dtype, _task(index))
        (folder / "README.md").write_text(card, encoding="utf-8")

    write_folder(out, fill)


def _pipeline_folder(model: str, revision: str) -> Path:
    """A folder as it is; a hub id from the cache, downloaded if it is not there."""
    if Path(model).is_dir():
        check_regular_files("--model", model)
        return Path(model)
    check_access("--model", model, revision=revision, file="model_index.json")
    try:
        return Path(DiffusionPipeline.download(model, revision=revision))
    except (OSError, ValueError) as error:
        raise UserError(
            refusal(error, "--model", model)
            or f"cannot load --model {model}: no such folder, and not on the hub "
            f"({first_line(error.__cause__ or error)})"
        ) from error


def _read_index(folder: Path) -> dict:
    path = folder / "model_index.json"
    if not path.is_file():
        raise UserError(f"{folder} is not a diffusers pipeline folder: it has no {path.name}")
    try:
        index = read_json(path)
        library, name = index[TRAINED]
        known = library == "diffusers" and issubclass(getattr(diffusers, name), ModelMixin)
    except OSError as error:
        raise UserError(f"cannot read {path}: {first_line(error)}") from error
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError):
        known = False
    if not known:
        raise UserError(f"{folder} has no {TRAINED} of diffusers' in its {path.name}")
    return index


def _merged(source: Source, folder: Path, name: str, index: dict, weights: Path) -> ModelMixin:
    """The transformer of this name in float32, with these weights, as plain layers."""
    part, kind = folder / name, getattr(diffusers, index[name][1])
    try:
        transformer, report = kind.from_pretrained(
            part, dtype=torch.float32, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise UserError(f"cannot load {part} as {kind.__name__}: {first_line(error)}") from error
    made_up = {name for name, _ in transformer.named_parameters()} & set(report["missing_keys"])
    if made_up:
        raise UserError(f"{part} is not complete: it has no {min(made_up)}")
    check_finite(str(part), transformer.state_dict().items())
    try:
        if source.is_lora:
            attach_lora(transformer, weights)
            transformer.fuse_lora()
            transformer.unload_lora()
        else:
            replace_weights(transformer, weights)
    except Misfit as error:
        raise UserError(f"{error}; name the model it was trained from with --model") from error
    return transformer


def _copy_parts(folder: Path, index: dict, out: Path, but: set[str]) -> None:
    """What the pipeline is made of, and no single-file copies of it that lie beside."""
    shutil.copyfile(folder / "model_index.json", out / "model_index.json")
    for licence in folder.glob("LICENSE*"):
        shutil.copyfile(licence, out / licence.name)
    for name in index:
        if name not in but and (folder / name).is_dir():
            check_files_finite(folder / name)
            shutil.copytree(folder / name, out / name, copy_function=shutil.copyfile)


def _task(index: dict) -> str:
    """As the hub calls it."""
    family = ADAPTERS.get(index.get("_class_name"))
    return "image-to-image" if family and family.sources[-1] else "text-to-image"


def _model_card(source: Source, model: str, name: str, dtype: torch.dtype, task: str) -> str:
    facts = [] if source.step is None else [f"step {source.step}"]
    if source.averaged is not None:
        facts.append("moving average (EMA)" if source.averaged else "not averaged")
    facts.append(f"stored in {_name(dtype)}")
    what = "a LoRA merged (in float32) into" if source.is_lora else "trained weights in place of"
    # only an id on the hub can be linked, and a path is nobody else's business
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

All other parts are the model's own, unchanged, and its licence applies.

```python
from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained("{name}")
```
"""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
