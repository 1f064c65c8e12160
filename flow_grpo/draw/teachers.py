"""LoRA of other runs beside the one that is trained: read and checked before the model loads, then
copies of the trained weights that can stand in for them."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model_state_dict
from safetensors import SafetensorError, safe_open

from flow_grpo.draw.models.experts import check_places, joined, parts_of, places_of_model
from flow_grpo.draw.models.lora_files import TRANSFORMER, LoraFile, read_lora
from flow_grpo.draw.policy import Policy
from flow_grpo.errors import UserError
from flow_grpo.run.adapters import compare_layers
from flow_grpo.run.policy import ADAPTER
from flow_grpo.run.snapshot import Snapshot

# of a LoraConfig: what scales its product, and how large it is
LAYOUT = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora")
# By path, then by the folder of each transformer (`parts_of`); None: the model without LoRA.
Files = dict[str, dict[str, LoraFile] | None]


def read_teachers(fields: Mapping[str, str], train: Any, model: str) -> Files:
    """The LoRA that each field names, if it is one of this model and like the one of the run."""
    if not fields:
        return {}
    places, files = places_of_model(model), {}
    own = {place: {"r": train.lora_rank, "lora_alpha": train.lora_alpha} for place in places}
    if train.lora_path:
        check_places(train.lora_path, places)
        own = {place: _layout(read_lora(Path(train.lora_path, place))) for place in places}
    layers = {place: _layers(Path(model, place or TRANSFORMER)) for place in places}
    for field, path in fields.items():
        try:
            files[path] = None
            if path:
                check_places(path, places)
                files[path] = {place: read_lora(Path(path, place), field) for place in places}
                for place, file in files[path].items():
                    _check(file, own[place], layers[place])
        except UserError as error:
            named = "" if field in str(error) else f"{field}={path!r}: "
            raise UserError(f"{named}{error}") from error
    return files


def _layout(file: LoraFile) -> dict[str, Any]:
    rank = next((t.shape[0] for name, t in file.tensors.items() if ".lora_A." in name), 0)
    given = file.settings or {"r": rank, "lora_alpha": rank}
    return {name: given[name] for name in LAYOUT if given.get(name)}


def _layers(folder: Path) -> dict[str, list[int]]:
    """The shapes of a transformer's weights, by the headers of its files; none of a hub id."""
    shapes = {}
    with suppress(OSError, SafetensorError):  # which is told when the model loads
        for path in folder.glob("*.safetensors"):
            with safe_open(path, "pt") as opened:
                names = list(opened.keys())
                shapes |= {name: opened.get_slice(name).get_shape() for name in names}
    return shapes


def _check(file: LoraFile, own: dict[str, Any], layers: dict[str, list[int]]) -> None:
    tensors = file.of(TRANSFORMER)
    if len(tensors) < len(file.tensors):
        raise UserError(f"it has more than a LoRA of the {TRANSFORMER}; name one that has not")
    for name, tensor in tensors.items() if layers else ():
        layer, _, side = name.removesuffix(".weight").rpartition(".lora_")
        axis = {"B": 0, "A": 1}.get(side)
        shape = layers.get(f"{layer}.weight", [0, 0])
        if axis is not None and tensor.shape[axis] != shape[axis]:
            raise UserError(f"it is of another model, with another layer {layer}")
    if (found := _layout(file)) != own:
        raise UserError(
            f"it has {_told(found)}, and this run's LoRA {_told(own)}; set train.lora_rank and "
            "train.lora_alpha, or name another"
        )


def _told(layout: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in layout.items())


def add_teachers(policy: Policy, files: Files, start: Sequence[str]) -> None:
    """Put `files` beside the policy's weights, which become the mean of those in `start`."""
    if not files:
        return
    parts = {place: part for place, part, _ in parts_of(policy.transformer)}
    layers = joined(
        policy.transformer, {p: get_peft_model_state_dict(part) for p, part in parts.items()}
    )
    for path, own in files.items():
        tensors = {name: torch.zeros_like(weight) for name, weight in layers.items()}
        if own is not None:
            by_place = {place: file.of(TRANSFORMER) for place, file in own.items()}
            tensors = joined(policy.transformer, by_place)
            try:
                compare_layers(tensors, layers)
            except ValueError as error:
                raise UserError(f"{path} does not fit what this run trains: {error}") from error
        policy.loras[path] = teacher = Snapshot(policy.trained(), path)
        for name, copy in zip(teacher.names, teacher.copy, strict=True):
            copy.copy_(tensors[name.replace(f".{ADAPTER}.", ".")])
    if start:
        average([policy.loras[path] for path in start])


@torch.no_grad()
def average(teachers: list[Snapshot]) -> None:
    """Make the weights the mean of what teachers add to each layer, B A, as near as LoRA of their
    rank comes to it: the first of its singular values."""
    weights = [dict(zip(t.names, t.copy, strict=True)) for t in teachers]
    parameters = dict(zip(teachers[0].names, teachers[0].parameters, strict=True))
    for name, a in parameters.items():
        if ".lora_A." not in name:
            continue
        b = parameters[name.replace(".lora_A.", ".lora_B.")]
        all_a = torch.cat([w[name] for w in weights]).double()
        all_b = torch.cat([w[name.replace(".lora_A.", ".lora_B.")] for w in weights], 1).double()
        left, small_b = torch.linalg.qr(all_b / len(teachers))
        right, small_a = torch.linalg.qr(all_a.T)
        u, s, v = torch.linalg.svd(small_b @ small_a.T)
        count = min(len(a), len(s))
        root = s[:count].sqrt()
        a.zero_()[:count].copy_(root[:, None] * (v[:count] @ right.T))
        b.zero_()[:, :count].copy_(left @ u[:, :count] * root)
