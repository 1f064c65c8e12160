"""Distributed helpers: shared errors, micro-batches, gathering of rows, sharded weights.

Call these functions on all processes, because most of them communicate.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from flow_grpo.errors import RewardOutage, UserError
from flow_grpo.training.plan import check_divides

Batch, Result = TypeVar("Batch"), TypeVar("Result")


@dataclass(frozen=True)
class Ranks:
    """The place of a process in the mesh of data x context ranks.

    The processes of a context group compute the same samples together, each a part of the tokens of
    every sample. Whatever is counted, drawn or split by process uses the data rank. A VLM trainer
    uses groups only for training and samples on every process.
    """

    data_rank: int
    data_size: int  # number of context groups
    context_rank: int = 0
    context_size: int = 1  # processes in a context group
    mesh: DeviceMesh | None = None  # data x ring (1) x ulysses; None without context parallelism

    @property
    def group(self) -> distributed.ProcessGroup:
        """The context group."""
        return self.mesh.get_group("ulysses")

    @property
    def is_leader(self) -> bool:
        """Whether this process counts for its context group: it scores and reports the samples."""
        return self.context_rank == 0

    def sum_over_context(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over the context group."""
        if self.mesh is not None:
            tensor = tensor.contiguous().clone()
            distributed.all_reduce(tensor, group=self.group)
        return tensor

    def copy_from_leader(self, tensor: Tensor) -> Tensor:
        """Return the tensor of the leader of the context group."""
        if self.mesh is not None:
            tensor = tensor.contiguous()
            distributed.broadcast(tensor, group_src=0, group=self.group)
        return tensor

    def gather_objects(self, own: Result) -> list[Result]:
        """Return the objects of all processes of the context group, in their order."""
        if self.mesh is None:
            return [own]
        objects = [None] * self.context_size
        distributed.all_gather_object(objects, own, group=self.group)
        return objects


def set_context_parallel(
    accelerator: Accelerator, size: int, field: str = "sample.context_parallel"
) -> None:
    """Divide the processes into context groups of `size` consecutive ones.

    Args:
        accelerator: Accelerator whose mesh is set.
        size: Number of processes per group.
        field: Setting that configures it.

    Raises:
        UserError: If `size` does not divide the number of processes, or for DeepSpeed.
    """
    processes = accelerator.num_processes
    check_divides(size, processes, field)
    if size == 1:
        return
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise UserError(
            "is incompatible with DeepSpeed",
            field=field,
            value=size,
            hint="use DDP or FSDP2",
        )
    mesh = init_device_mesh(
        accelerator.device.type,
        (processes // size, 1, size),  # "ring" and "ulysses" are the names that diffusers requires
        mesh_dim_names=("data", "ring", "ulysses"),
    )
    accelerator.context_mesh = mesh


def get_context_size(accelerator: Accelerator) -> int:
    """Return the number of processes that compute each sample together."""
    mesh = getattr(accelerator, "context_mesh", None)
    return 1 if mesh is None else mesh.size(2)


def get_ranks(accelerator: Accelerator) -> Ranks:
    """Return the place of this process in the mesh of data x context ranks."""
    mesh, size = getattr(accelerator, "context_mesh", None), get_context_size(accelerator)
    rank, processes = accelerator.process_index, accelerator.num_processes
    return Ranks(rank // size, processes // size, rank % size, size, mesh)


def raise_on_all_ranks(accelerator: Accelerator, call: Callable[[], Result]) -> Result:
    """Return `call()`; if it raises a UserError on any process, raise that error on all of them.

    Otherwise the processes without the error would wait for the one that ended.
    """
    result, own, shared = None, None, None
    try:
        result = call()
    except UserError as error:
        own = error
        kind = RewardOutage if isinstance(error, RewardOutage) else UserError  # sets the exit code
        shared = (kind, str(error))
    errors = [each for each in gather_object([shared]) if each is not None]
    if errors:
        kind, message = errors[0]
        error = kind(message)
        if message == str(own):
            vars(error).update(vars(own))  # field, value, rule and hint
        raise error from own
    return result


def call_on_main(accelerator: Accelerator, call: Callable[[], Result]) -> Result:
    """Call a function on the main process only and return its result on all processes."""
    return gather_object([call() if accelerator.is_main_process else None])[0]


def pad_micro_batches(
    accelerator: Accelerator, batches: Sequence[Batch]
) -> list[tuple[Batch, bool]]:
    """Return the micro-batches of an update, each with a flag: False for padding.

    If a backward pass needs all processes, those with fewer micro-batches repeat their first one,
    to be given zero weight.
    """
    counted = [(batch, True) for batch in batches]
    if not needs_equal_passes(accelerator):
        return counted
    most = max(gather_object([len(batches)]))
    return counted + [(batches[0], False)] * (most - len(batches))


def accumulate_gradients(
    accelerator: Accelerator,
    module: nn.Module,
    batches: Iterable[Batch],
    count: int,
    *,
    at_once: bool = False,
) -> Iterator[Batch]:
    """Yield the micro-batches of an update, for a forward and backward pass each.

    Gradients accumulate locally and are reduced with the last micro-batch.

    Args:
        module: The wrapped network.
        batches: Micro-batches.
        count: Number of micro-batches.
        at_once: Reduce after every micro-batch, if a full local gradient does not fit in memory.
    """
    for number, batch in enumerate(batches, 1):
        last = number == count
        accelerator.sync_gradients = last
        with nullcontext() if last or at_once else accelerator.no_sync(module):
            yield batch


def gather_rows(
    accelerator: Accelerator,
    index: Tensor,
    columns: dict[str, Tensor],
    *,
    on_main_only: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Gather rows of all processes on the CPU, sorted by index.

    Processes may have different numbers of rows, or none. Sorting makes sums over the rows
    independent of the number of processes. If processes of a context group have the same row, that
    of the first one counts.

    Args:
        index: Global index of each local row, (n,).
        columns: Tensors of shape (n, ...).
        on_main_only: Send the rows to the main process only; the others get no rows.

    Returns:
        The sorted index, (N,), and the gathered columns, (N, ...).
    """

    def gather(tensor: Tensor, fill: int) -> Tensor:
        tensor = tensor.to(accelerator.device)
        padded = accelerator.pad_across_processes(tensor, dim=0, pad_index=fill)
        if on_main_only and accelerator.num_processes > 1:
            return _gather_on_main(accelerator, padded).cpu()
        return accelerator.gather(padded).cpu()

    index = gather(index.long(), -1)  # an empty one may have been made with another dtype
    order = torch.argsort(index, stable=True)
    order = order[index[order] >= 0]
    if get_context_size(accelerator) > 1:
        order = order[index[order].diff(prepend=index.new_tensor([-1])) > 0]
    return index[order], {name: gather(rows, 0)[order] for name, rows in columns.items()}


def _gather_on_main(accelerator: Accelerator, rows: Tensor) -> Tensor:
    """Return the concatenated rows of all processes on the main process, no rows on the others."""
    rows, parts = rows.contiguous(), None
    if accelerator.is_main_process:
        parts = [torch.empty_like(rows) for _ in range(accelerator.num_processes)]
    torch.distributed.gather(rows, parts)
    return rows[:0] if parts is None else torch.cat(parts)


def gather_scores(
    accelerator: Accelerator, index: np.ndarray, batches: list[dict[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """Concatenate score columns over batches and processes, sorted by sample index.

    Args:
        index: Global index of each local sample, (n,), in the order of `batches`.
        batches: Scores by column for each local batch. A column may be missing from some batches
            or processes.

    Returns:
        Columns (N,), the same on all processes; NaN where a batch lacks the column.
    """
    own_names = dict.fromkeys(name for batch in batches for name in batch)
    names = dict.fromkeys(gather_object([*own_names]))
    lengths = [len(next(iter(batch.values()))) for batch in batches]
    columns = {
        name: np.concatenate(
            [np.zeros(0)]
            + [b.get(name, np.full(n, np.nan)) for b, n in zip(batches, lengths, strict=True)]
        )
        for name in names
    }
    rows = {name: torch.from_numpy(column) for name, column in columns.items()}
    _, gathered = gather_rows(accelerator, torch.from_numpy(index), rows)
    return {name: column.numpy() for name, column in gathered.items()}


def is_sharded(accelerator: Accelerator) -> bool:
    """Return whether weights are sharded (ZeRO-3, FSDP).

    Then a forward pass needs all processes, and each must run the same number of them.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return accelerator.state.deepspeed_plugin.zero_stage == 3
    return accelerator.distributed_type == DistributedType.FSDP


def compile_obstacle(accelerator: Accelerator, blocks: Iterable[nn.Module]) -> str:
    """Return why transformer blocks cannot be compiled with sharded weights, or "".

    A graph cannot contain the hooks that gather weights. Those of FSDP2 belong to the block, and
    run before and after its graph; ZeRO-3 adds hooks to every layer within the block.

    Args:
        accelerator: The accelerator that sharded the weights.
        blocks: The transformer blocks, after sharding.
    """
    if not is_sharded(accelerator):
        return ""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return "ZeRO-3 gathers the weights layer by layer (FSDP2 compiles)"
    if accelerator.state.fsdp_plugin.fsdp_version != 2:
        return "FSDP1 is not supported (set fsdp_version: 2)"
    layers = [layer for block in blocks for layer in block.modules() if layer is not block]
    if any(layer._forward_pre_hooks for layer in layers):
        return "FSDP2 shards layers within a block (set fsdp_transformer_layer_cls_to_wrap to it)"
    return ""


def is_fsdp2(accelerator: Accelerator) -> bool:
    """Return whether FSDP2 shards the weights."""
    if accelerator.distributed_type != DistributedType.FSDP:
        return False
    return accelerator.state.fsdp_plugin.fsdp_version == 2


def any_on_all_ranks(module: nn.Module, flags: list[bool]) -> list[bool]:
    """Return whether each flag is set on any process, if FSDP2 shards `module`; else `flags`."""
    if not hasattr(module, "set_reshard_after_forward"):
        return flags
    device = next(module.parameters()).device
    shared = torch.tensor(flags, dtype=torch.int32, device=device)
    distributed.all_reduce(shared, op=distributed.ReduceOp.MAX)
    return [bool(flag) for flag in shared.tolist()]


def local_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the local parts of tensors that FSDP2 may have sharded; gradients flow to them."""
    return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


def needs_equal_passes(accelerator: Accelerator) -> bool:
    """Return whether a backward pass needs all processes (DeepSpeed, FSDP).

    Then each process must run the same number of them.
    """
    return accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP)


def gather_parameters(
    parameters: Iterable[Tensor], *, fixed: bool = False
) -> AbstractContextManager:
    """Return a context in which parameters sharded by ZeRO-3 are gathered.

    Unless `fixed`, they may be changed within it, in the same way on all processes.
    """
    sharded = [p for p in parameters if hasattr(p, "ds_id")]
    if not sharded:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(sharded, modifier_rank=None if fixed else 0)


def register_external_weight(module: nn.Module, weight: Tensor) -> None:
    """Register with ZeRO-3 that `module` uses a weight of one of its layers in its own forward."""
    if hasattr(weight, "ds_id"):
        import deepspeed

        deepspeed.zero.register_external_parameter(module, weight)


def free_weights_after_forward(module: nn.Module) -> None:
    """Make FSDP2 free all gathered weights after each forward pass; other modules are unchanged.

    It would keep those of the root module until the next backward pass, and compute with them even
    if the sharded weights are replaced in between, e.g. by their moving average or the reference.
    """
    if hasattr(module, "set_reshard_after_forward"):
        module.set_reshard_after_forward(True)


def unsharded_class_name(module: nn.Module) -> str:
    """Return the name of a module's class, which FSDP2 replaces by a subclass with a prefix."""
    name = type(module).__name__
    return name.removeprefix("FSDP") if hasattr(module, "set_reshard_after_forward") else name


def to_full_tensor(tensor: Tensor) -> Tensor:
    """Return an unsharded copy of a tensor that FSDP2 may have sharded."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def to_host(tensor: Tensor, *, keep: bool = True) -> Tensor | None:
    """Return a copy in host memory of a tensor that FSDP2 may have sharded; None unless `keep`."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.to("cpu", copy=True) if keep else None


def local_shards(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the local parts of tensors; FSDP2 has no in-place foreach operations on DTensors."""
    tensors = [tensor.detach() for tensor in tensors]
    return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return `tensor` sharded like `like`, on its device."""
    if isinstance(like, DTensor):
        return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)
    return tensor.to(like.device)


@torch.no_grad()
def gather_state_dict(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return unsharded copies of the tensors on the CPU."""
    with gather_parameters(named.values(), fixed=True):
        return {name: to_full_tensor(parameter).cpu() for name, parameter in named.items()}


def copy_without_weights(module: nn.Module) -> nn.Module:
    """Return a copy of a module with empty weights, for `borrow_weights`.

    Call it before a distributed engine adds its hooks: without hooks, processes may call the copy
    different numbers of times.
    """
    weights = list(module.parameters())
    memo = {id(w): nn.Parameter(w.detach().new_empty(0), requires_grad=False) for w in weights}
    return copy.deepcopy(module, memo)


@contextmanager
def borrow_weights(empty_copy: nn.Module, module: nn.Module) -> Iterator[None]:
    """Fill a module of `copy_without_weights` with the gathered weights of `module` temporarily.

    The copy keeps its dtypes.
    """
    pairs = list(zip(empty_copy.parameters(), module.parameters(), strict=True))
    try:
        for empty, weight in pairs:  # one by one, to limit the memory for gathered weights
            with gather_parameters([weight], fixed=True):
                empty.data = to_full_tensor(weight).to(empty.device, empty.dtype)
        yield
    finally:
        for empty, _ in pairs:
            empty.data = empty.new_empty(0)
