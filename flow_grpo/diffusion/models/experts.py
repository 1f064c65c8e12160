"""Models with a transformer for high and one for low noise levels, such as Wan 2.2 A14B."""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline, ModelMixin
from peft import LoraConfig
from torch import Tensor, nn

from flow_grpo.errors import UserError
from flow_grpo.perf.transfer import to_device
from flow_grpo.training.distributed import any_on_all_ranks, local_parts

# Name of the low-noise transformer in a pipeline, and of its directory within that of the first.
SECOND_TRANSFORMER = "transformer_2"


class Experts(ModelMixin):
    """Dispatch each sample to one of two transformers by its timestep.

    `transformer` handles timesteps from `boundary` on, `transformer_2` those below; a batch may
    contain both. Each has its own LoRA.

    With FSDP2, a forward pass needs all processes. Processes may have samples for different
    transformers, so each process also runs those that only others need, with one sample whose
    output is discarded.
    """

    _supports_gradient_checkpointing = True

    def __init__(self, transformer: ModelMixin, transformer_2: ModelMixin, boundary: float) -> None:
        super().__init__()
        self.transformer, self.transformer_2, self.boundary = transformer, transformer_2, boundary
        self._repeated_blocks = transformer._repeated_blocks
        self._no_split_modules = transformer._no_split_modules
        self._offload: _WeightOffload | None = None

    @property
    def config(self) -> dict:
        """Config of the high-noise transformer."""
        return self.transformer.config

    def add_adapter(self, lora: LoraConfig, adapter_name: str = "default") -> None:
        for part in self.children():
            part.add_adapter(deepcopy(lora), adapter_name=adapter_name)

    def offload_unused(self, device: torch.device) -> None:
        """Keep the frozen weights of a transformer on `device` only while it is used."""
        self._offload = _WeightOffload(list(self.children()), device)

    def restore_offloaded(self) -> None:
        """Move all weights to the device, to change, load or shard them; undo `offload_unused`."""
        if self._offload is not None:
            self._offload.place([True, True])
            self._offload = None

    def forward(self, timestep: Tensor, **inputs: Tensor | bool | None) -> tuple[Tensor]:
        """Run each sample through the transformer for its timestep, (B,).

        Other arguments and the output as in the transformer.
        """
        early = (timestep >= self.boundary).cpu()
        inputs = {"timestep": timestep, **inputs}
        rows = [each.nonzero().flatten() for each in (early, ~early)]
        used = any_on_all_ranks(self, [len(index) > 0 for index in rows])
        if self._offload is not None:
            self._offload.place(used)
        outputs, unused = [], torch.zeros(())
        for part, index, is_used in zip(self.children(), rows, used, strict=True):
            if is_used:
                # the first sample if only other processes have samples for this transformer
                own = _select_rows(inputs, index if len(index) else torch.tensor([0]))
                (out,) = part(**own)
                if len(index):
                    outputs.append(out)
                else:
                    unused = unused + 0 * out.sum()
            elif torch.is_grad_enabled():
                # Give it a gradient of 0: otherwise DDP would wait for it, and the state of the
                # optimizer would depend on how samples are distributed.
                trained = [p for p in part.parameters() if p.requires_grad]
                unused = unused + 0 * sum(each.sum() for each in local_parts(trained))
        out = outputs[0]
        if len(outputs) > 1:
            out = torch.cat(outputs)[to_device(torch.cat(rows), out.device).argsort()]
        if torch.is_grad_enabled():
            out = out + unused.to(out)
            if self._offload is not None:
                out = self._offload.keep_until_backward(out)
        return (out,)


def _select_rows(
    inputs: Mapping[str, Tensor | bool | None], index: Tensor
) -> dict[str, Tensor | bool | None]:
    """Return the samples at `index`, a CPU tensor; if these are all, return the inputs."""
    if len(index) == len(inputs["timestep"]):
        return dict(inputs)
    index = to_device(index, inputs["timestep"].device)
    return {k: v[index] if isinstance(v, Tensor) else v for k, v in inputs.items()}


class _WeightOffload:
    """Frozen weights of several modules in host memory; those in use are copied to the device.

    While a module is not used, its weights are empty tensors on the device. Frozen weights do not
    change, so they are never copied back.
    """

    def __init__(self, parts: list[nn.Module], device: torch.device) -> None:
        self.device, self.resident = device, [False] * len(parts)
        self.weights = [[p for p in part.parameters() if p.numel()] for part in parts]
        self.host = [[self._to_host(weight) for weight in each] for each in self.weights]
        for each in self.weights:
            for weight in each:
                weight.data = weight.data.new_empty(0, device=device)
        self._graphs: weakref.WeakSet[_Graph] = weakref.WeakSet()

    def _to_host(self, weight: Tensor) -> Tensor:
        copy = torch.empty_like(weight, device="cpu", pin_memory=self.device.type == "cuda")
        return copy.copy_(weight.detach())

    def place(self, used: Sequence[bool]) -> None:
        """Copy the weights of the used modules to the device and free those of the others.

        Those of modules that a pending backward pass needs are kept.
        """
        needed = [u or any(g.used[i] for g in self._graphs) for i, u in enumerate(used)]
        for i, weights in enumerate(self.weights):  # first free, then copy
            if self.resident[i] and not needed[i]:
                for weight in weights:
                    weight.data = weight.data.new_empty(0)
        for i, weights in enumerate(self.weights):
            if needed[i] and not self.resident[i]:
                for weight, host in zip(weights, self.host[i], strict=True):
                    weight.data = host.to(self.device, non_blocking=True, copy=True)
        self.resident = needed

    def keep_until_backward(self, out: Tensor) -> Tensor:
        """Keep the weights that are resident now until the backward pass of `out`."""
        graph = _Graph(tuple(self.resident))
        self._graphs.add(graph)
        return _EndOfGraph.apply(out, graph, self._graphs)


@dataclass(eq=False)
class _Graph:
    """A forward pass with gradients."""

    used: tuple[bool, ...]  # the modules whose weights its backward pass needs


class _EndOfGraph(torch.autograd.Function):
    """Identity that forgets a `_Graph` when its backward pass starts or is abandoned."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, graph: _Graph, graphs: weakref.WeakSet) -> Tensor:
        ctx.graph, ctx.graphs = graph, graphs
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.graphs.discard(ctx.graph)
        return gradient, None, None


def iter_experts(
    transformer: nn.Module, weights: dict[str, Tensor] | None = None
) -> Iterator[tuple[str, nn.Module, dict[str, Tensor]]]:
    """Yield each transformer with its subdirectory in a weight directory and its own weights.

    Args:
        transformer: A transformer or `Experts`.
        weights: State dict of `transformer`; the names that are yielded are those of the part.
    """
    if not isinstance(transformer, Experts):
        yield "", transformer, weights or {}
        return
    for name, part in transformer.named_children():
        own = {k: v for k, v in (weights or {}).items() if k.startswith(f"{name}.")}
        yield _subfolder(name), part, {k.removeprefix(f"{name}."): v for k, v in own.items()}


def _subfolder(name: str) -> str:
    return SECOND_TRANSFORMER if name == SECOND_TRANSFORMER else ""


def merge_expert_weights(
    transformer: nn.Module, weights: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Merge the weights of each subdirectory into one state dict of `transformer`."""
    if not isinstance(transformer, Experts):
        return dict(weights[""])
    return {
        f"{name}.{key}": tensor
        for name, _ in transformer.named_children()
        for key, tensor in weights.get(_subfolder(name), {}).items()
    }


def expert_folders(pipeline: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the subdirectories of `iter_experts` for a model with this pipeline config."""
    return ("",) if pipeline.get("boundary_ratio") is None else ("", SECOND_TRANSFORMER)


def expert_folders_of_model(model: str) -> tuple[str, ...]:
    """Return the subdirectories of `iter_experts` for a pipeline directory or hub id."""
    try:
        return expert_folders(DiffusionPipeline.load_config(model))
    except (OSError, ValueError):  # reported when the model is loaded
        return ("",)


def check_expert_folders(folder: str | Path, places: Sequence[str]) -> None:
    """Reject weights for a different number of transformers than the model has.

    Args:
        folder: LoRA or full weights, as for `ModelAdapter.load_weights`. A directory that does not
            exist is accepted: the loader reports it.
        places: Subdirectories of `iter_experts` for the model.
    """
    has_second = Path(folder, SECOND_TRANSFORMER).is_dir()
    if has_second and SECOND_TRANSFORMER not in places:
        raise UserError(
            f"has weights for a {SECOND_TRANSFORMER}, which this model does not have",
            field=folder,
            hint="use weights that were trained from this model",
        )
    if SECOND_TRANSFORMER in places and not has_second and Path(folder).exists():
        raise UserError(
            f"has no directory {SECOND_TRANSFORMER}, but this model has two transformers",
            field=folder,
            hint="use a directory with the weights of both",
        )
