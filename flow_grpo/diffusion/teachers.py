"""Teachers: LoRA weights of other runs that can be swapped in for the trained ones.

Files are read and checked before the model loads, then copied into snapshots of the policy.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model_state_dict
from safetensors import SafetensorError, safe_open

from flow_grpo.diffusion.models import find_adapter
from flow_grpo.diffusion.models.experts import (
    check_expert_folders,
    expert_folders_of_model,
    iter_experts,
    merge_expert_weights,
)
from flow_grpo.diffusion.models.lora_files import TRANSFORMER, LoraFile, read_lora
from flow_grpo.diffusion.policy import Policy
from flow_grpo.errors import UserError
from flow_grpo.training.lora_files import check_same_tensors
from flow_grpo.training.policy import ADAPTER_NAME
from flow_grpo.training.snapshot import Snapshot

# settings of a LoraConfig that determine the scale and the size of its product
LORA_LAYOUT_KEYS = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora")
# By path, then by the folder of each transformer (`iter_experts`); None: base model, no LoRA.
TeacherFiles = dict[str, dict[str, LoraFile] | None]


def load_teachers(fields: Mapping[str, str], train: Any, model: str) -> TeacherFiles:
    """Read teacher LoRA files and check that they match the model and the run's LoRA.

    Args:
        fields: Paths by config field.
        train: The run's `train` settings.
        model: Folder of the model.

    Raises:
        UserError: If a file is missing, of another model, or of another rank.
    """
    if not fields:
        return {}
    folders, family = expert_folders_of_model(model), ""
    if Path(model).is_dir():  # a caller of `build_session` may provide the model itself
        family = find_adapter(model).pipeline_class.__name__
    run_layout = {"r": train.lora_rank, "lora_alpha": train.lora_alpha}
    layouts = dict.fromkeys(folders, run_layout)
    if train.lora_path:
        check_expert_folders(train.lora_path, folders)
        start = {each: Path(train.lora_path, each) for each in folders}
        layouts = {k: _lora_layout(read_lora(path, family=family)) for k, path in start.items()}
    shapes = {each: _read_weight_shapes(Path(model, each or TRANSFORMER)) for each in folders}
    files = {}
    for field, path in fields.items():
        try:
            files[path] = None
            if path:
                check_expert_folders(path, folders)
                files[path] = {
                    each: read_lora(Path(path, each), field, family=family) for each in folders
                }
                for folder, file in files[path].items():
                    _check_teacher(file, layouts[folder], shapes[folder])
        except UserError as error:
            if field in str(error):
                raise
            raise UserError(f"is not a valid teacher: {error}", field=field, value=path) from error
    return files


def _lora_layout(file: LoraFile) -> dict[str, Any]:
    rank = next((t.shape[0] for name, t in file.tensors.items() if ".lora_A." in name), 0)
    given = file.settings or {"r": rank, "lora_alpha": rank}
    return {name: given[name] for name in LORA_LAYOUT_KEYS if given.get(name)}


def _read_weight_shapes(folder: Path) -> dict[str, list[int]]:
    """Read the shapes of a transformer's weights from file headers; empty for a hub id."""
    shapes = {}
    with suppress(OSError, SafetensorError):  # reported when the model loads
        for path in folder.glob("*.safetensors"):
            with safe_open(path, "pt") as opened:
                names = list(opened.keys())
                shapes |= {name: opened.get_slice(name).get_shape() for name in names}
    return shapes


def _check_teacher(file: LoraFile, layout: dict[str, Any], shapes: dict[str, list[int]]) -> None:
    """Raise a UserError unless a teacher fits the run.

    Args:
        file: The teacher.
        layout: Rank and alpha of the run's LoRA.
        shapes: Shapes of the transformer's weights by name; {} skips their check.
    """
    tensors = file.for_model(TRANSFORMER)
    if len(tensors) < len(file.tensors):
        raise UserError(f"it has weights other than a LoRA of the {TRANSFORMER}")
    for name, tensor in tensors.items() if shapes else ():
        layer, _, side = name.removesuffix(".weight").rpartition(".lora_")
        axis = {"B": 0, "A": 1}.get(side)
        shape = shapes.get(f"{layer}.weight", [0, 0])
        if axis is not None and tensor.shape[axis] != shape[axis]:
            problem = "has another shape" if f"{layer}.weight" in shapes else "is missing"
            raise UserError(f"it was trained on another model: layer {layer} {problem} here")
    found = _lora_layout(file)
    if found != layout:
        raise UserError(
            f"it has {_format_layout(found)}, but this run's LoRA has {_format_layout(layout)}",
            hint="set train.lora_rank and train.lora_alpha, or use another teacher",
        )


def _format_layout(layout: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in layout.items())


def add_teachers(policy: Policy, files: TeacherFiles, start: Sequence[str]) -> None:
    """Add the teachers as snapshots of the policy.

    Args:
        policy: The policy whose `loras` get the teachers.
        files: From `load_teachers`.
        start: Paths of teachers whose average becomes the policy's weights; empty keeps them.

    Raises:
        UserError: If a teacher does not match the trained weights.
    """
    if not files:
        return
    by_folder = {
        folder: get_peft_model_state_dict(expert)
        for folder, expert, _ in iter_experts(policy.transformer)
    }
    layers = merge_expert_weights(policy.transformer, by_folder)
    for path, experts in files.items():
        tensors = {name: torch.zeros_like(weight) for name, weight in layers.items()}
        if experts is not None:
            by_folder = {folder: file.for_model(TRANSFORMER) for folder, file in experts.items()}
            tensors = merge_expert_weights(policy.transformer, by_folder)
            try:
                check_same_tensors(tensors, layers)
            except ValueError as error:
                raise UserError(
                    f"does not match the trained weights of this run: {error}", field=path
                ) from error
        policy.loras[path] = teacher = Snapshot(policy.trained_parameters(), path)
        for name, copy in zip(teacher.names, teacher.copy, strict=True):
            copy.copy_(tensors[name.replace(f".{ADAPTER_NAME}.", ".")])
    if start:
        set_to_average([policy.loras[path] for path in start])


@torch.no_grad()
def set_to_average(teachers: list[Snapshot]) -> None:
    """Set the policy's LoRA to the best low-rank approximation of the teachers' mean update B A.

    The mean of T updates has a rank of up to T r; its truncated SVD is the closest LoRA of rank r.
    It is computed from QR factors of the stacked matrices, without forming the full update.
    """
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
