"""A trained checkpoint put into its model: a pipeline folder that diffusers loads by itself."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import diffusers
import torch
from diffusers import DiffusionPipeline, ModelMixin
from safetensors import SafetensorError

from flow_grpo import disk
from flow_grpo.draw.models.lora_files import Misfit, attach_lora, replace_weights
from flow_grpo.errors import UserError, first_line
from flow_grpo.files import read_json
from flow_grpo.run.checkpoint import PREFIX, damage_of_weights, weights_in

TRAINED = "transformer"  # the part of a pipeline that runs train
NAMES = ("lora", "transformer", "model")  # what weights are called in a checkpoint, if not averaged


@dataclass(frozen=True)
class Source:
    """The weights to export and what their place in a run says of them."""

    weights: Path  # a LoRA folder or a whole transformer

    @classmethod
    def find(cls, checkpoint: Path, *, raw: bool = False) -> "Source":
        """`checkpoint` is what `weights_in` takes; `raw` asks for weights that are not averaged."""
        weights = weights_in(checkpoint).resolve()  # "best" and "latest" are links
        plain = weights.with_name(weights.name.removeprefix("ema_"))
        if raw and plain != weights:
            if weights == checkpoint.resolve():
                raise UserError(f"{checkpoint} is averaged; name {plain.name} or leave out --raw")
            weights = plain
        if raw and not weights.is_dir():
            raise UserError(f"no {plain.name} in {weights.parent}; leave out --raw for the average")
        if damage := damage_of_weights(weights):
            raise UserError(f"{weights} is damaged: {damage}; take another checkpoint")
        return cls(weights)

    @property
    def is_lora(self) -> bool:
        return not (self.weights / "config.json").is_file()

    @property
    def averaged(self) -> bool | None:
        """None: a folder of another name, which does not tell."""
        name = self.weights.name
        return name.startswith("ema_") if name.removeprefix("ema_") in NAMES else None

    @property
    def step(self) -> int | None:
        step = self.weights.parent.name.removeprefix(PREFIX)
        return int(step) if step.isdigit() else None

    @property
    def run(self) -> Path | None:
        """RUN/checkpoints/checkpoint-8/lora lies in RUN."""
        if len(self.weights.parents) < 3:
            return None
        run = self.weights.parents[2]
        return run if (run / "config.json").is_file() and self.step is not None else None

    def trained_model(self) -> tuple[str, str]:
        """The model that the run started from, and its revision."""
        if self.run is None:
            raise UserError(f"name the model with --model: {self.weights} is not in a run")
        try:
            config = read_json(self.run / "config.json")["pretrained"]
            return str(config["model"]), str(config.get("revision", "main"))
        except (UserError, OSError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"name the model with --model: {self.run / 'config.json'} does not tell it"
            ) from error

    def __str__(self) -> str:
        """No more of the path than says which run and step."""
        return str(self.weights.relative_to(self.run.parent)) if self.run else self.weights.name


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
    if out.exists() or out.is_symlink():
        raise UserError(f"{out} already exists; choose another --out or remove it")
    folder = _pipeline_folder(model, revision)
    index = _read_index(folder)
    transformer = _merged(source, folder, getattr(diffusers, index[TRAINED][1]))
    transformer.to(dtype)
    for name, parameter in transformer.named_parameters():
        if not parameter.isfinite().all():
            raise UserError(f"{source.weights}: {name} is not finite in {_name(dtype)}")
    partial = out.with_name(f".partial-{out.name}")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _copy_parts(folder, index, partial)
        transformer.save_pretrained(partial / TRAINED)
        # the same but for the path it was loaded from
        shutil.copyfile(folder / TRAINED / "config.json", partial / TRAINED / "config.json")
        card = _model_card(source, model, out.name, dtype)
        (partial / "README.md").write_text(card, encoding="utf-8")
        disk.publish(partial, out)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {out}: {first_line(error)}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _pipeline_folder(model: str, revision: str) -> Path:
    """A folder as it is; a hub id from the cache, downloaded if it is not there."""
    if Path(model).is_dir():
        return Path(model)
    try:
        return Path(DiffusionPipeline.download(model, revision=revision))
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot load --model {model}: no such folder, and not on the hub "
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


def _merged(source: Source, folder: Path, kind: type[ModelMixin]) -> ModelMixin:
    """The transformer in float32, as plain layers."""
    part = folder / TRAINED
    try:
        transformer, report = kind.from_pretrained(
            part, dtype=torch.float32, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise UserError(f"cannot load {part} as {kind.__name__}: {first_line(error)}") from error
    made_up = {name for name, _ in transformer.named_parameters()} & set(report["missing_keys"])
    if made_up:
        raise UserError(f"{part} is not complete: it has no {min(made_up)}")
    try:
        if source.is_lora:
            attach_lora(transformer, source.weights)
            transformer.fuse_lora()
            transformer.unload_lora()
        else:
            replace_weights(transformer, source.weights)
    except Misfit as error:
        raise UserError(f"{error}; name the model it was trained from with --model") from error
    return transformer


def _copy_parts(folder: Path, index: dict, out: Path) -> None:
    """What the pipeline is made of, and no single-file copies of it that lie beside."""
    shutil.copyfile(folder / "model_index.json", out / "model_index.json")
    for licence in folder.glob("LICENSE*"):
        shutil.copyfile(licence, out / licence.name)
    for name in index:
        if name != TRAINED and (folder / name).is_dir():
            shutil.copytree(folder / name, out / name, copy_function=shutil.copyfile)


def _model_card(source: Source, model: str, name: str, dtype: torch.dtype) -> str:
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
pipeline_tag: text-to-image
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
