"""Hooks into private parts of torch's compiler; nothing else in the project imports them.

torch gives no stability promise for what is used here, so every hook is applied by a function that
looks up the symbols it needs, checks that they have the expected shape, and otherwise warns once
and leaves torch as it is: the run then uses plain `torch.compile`, slower but correct.
`configure_inductor` applies all hooks and returns the names of those that are active.

**Persistent reductions.** A norm, or the row scale of an FP8 quantization, reduces over the rows of
a (rows, columns) tensor. Inductor reads rows of more than 1,024 elements twice: once to reduce them
and once to apply the result, and recomputes whatever was fused into the read. A persistent
reduction keeps the whole row in registers and reads it once. We raise the limit to
`MAX_PERSISTENT_ROW` for rows that are contiguous in memory.

**Fewer warps.** Inductor assigns eight warps to such a row. Each then holds few elements, and all
of them synchronise at every reduction. Two warps (four for long rows) are faster: without this hook
SD3.5-medium in FP8 takes 1 to 2 % more time on an H200.

The choices are patched on the class rather than set with `config.inductor_choices_class`: backward
graphs may be compiled in another thread, and the config of the main thread does not reach it.
"""

import hashlib
import inspect
import logging
import re
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger("flow_grpo")

MAX_PERSISTENT_ROW = 8192  # elements
MAX_TWO_WARP_ROW = 4096  # elements; longer rows get four warps
# Share of a compiled block's activations that is kept for its backward pass. Below 1 torch
# recomputes cheap operations such as norms; at 0.75 also attention, which costs time.
ACTIVATION_MEMORY_BUDGET = 0.88
# Custom operators and the functions that the compiler replaces them by. Their gradients are still
# the registered ones.
DECOMPOSITIONS: dict[Any, Callable] = {}
# Decorators of persistent kernels; `limit_reduction_warps` gives them a fixed configuration.
PERSISTENT_KERNEL = re.compile(r"@triton_heuristics\.(?:persistent_reduction|fixed_config)\(")
IGNORED_WARNINGS = (
    "Dynamo detected a call to a `functools.lru_cache`",
    "TensorFloat32",
    "Torchinductor does not support code generation for complex operators",
)


class HookUnavailable(Exception):
    """A private symbol of torch is missing or has changed."""


# Raised when a private symbol is missing or has changed.
CHANGED = (ImportError, AttributeError, TypeError, KeyError, IndexError, HookUnavailable)


def configure_inductor() -> list[str]:
    """Apply all hooks to everything that this process compiles from now on.

    Returns:
        The names of the hooks that are active.
    """
    hooks = {
        "recompile limit": allow_recompilations,
        "activation budget": set_activation_budget,
        "persistent reductions": enable_persistent_reductions,
        "few warps": limit_reduction_warps,
        "decompositions": register_decompositions,
        "compile cache tag": tag_compile_cache,
    }
    for message in IGNORED_WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=UserWarning)
    return [name for name, hook in hooks.items() if apply_hook(name, hook)]


def apply_hook(name: str, hook: Callable[[], None]) -> bool:
    """Apply `hook`; if torch does not have what it needs, warn once and return False."""
    try:
        hook()
    except CHANGED as error:
        _warn_once(name, f"{type(error).__name__}: {error}")
        return False
    return True


@cache
def _warn_once(name: str, reason: str) -> None:
    """Warn that an optimisation is not applied and why; once per name and reason."""
    logger.warning(
        "torch %s does not support the optimisation %r (%s); using plain torch.compile without it",
        torch.__version__,
        name,
        reason,
    )


def _check_parameters(function: Callable, *expected: str) -> None:
    """Raise if the parameters of `function` are not those that the hook was written for."""
    found = tuple(inspect.signature(function).parameters)
    if found != expected:
        raise HookUnavailable(f"{function.__qualname__} takes {found}, expected {expected}")


def _check_setting(config: Any, name: str) -> None:
    if not hasattr(config, name):
        raise HookUnavailable(f"{config.__name__} has no setting {name}")


def allow_recompilations() -> None:
    """Raise Dynamo's limits to a graph per kind of block, gradient mode, LoRA state and batch size.

    Also disable the splitting of graphs for DDP: it would cut each block in two to send half of its
    gradients earlier, and it does not support higher-order operators.
    """
    from torch._dynamo import config

    _check_setting(config, "recompile_limit")
    _check_setting(config, "optimize_ddp")
    config.recompile_limit = max(64, config.recompile_limit)
    config.optimize_ddp = False


def set_activation_budget() -> None:
    """Let compiled blocks recompute activations that exceed `ACTIVATION_MEMORY_BUDGET`."""
    from torch._functorch import config

    _check_setting(config, "activation_memory_budget")
    config.activation_memory_budget = ACTIVATION_MEMORY_BUDGET


def keep_backward_buffers() -> None:
    """Let a compiled backward pass run twice: it may not reuse its saved tensors as scratch."""
    from torch._functorch import config

    _check_setting(config, "donated_buffer")
    config.donated_buffer = False


def register_decompositions() -> None:
    """Show the compiler what our operators compute, so that it fuses with their neighbours."""
    from torch._inductor.decomposition import decompositions, fast_random_decomps
    from torch._inductor.lowering import needs_realized_inputs

    if not hasattr(fast_random_decomps, "cache_clear"):
        raise HookUnavailable("fast_random_decomps is not cached")
    decompositions.update(DECOMPOSITIONS)
    fast_random_decomps.cache_clear()  # a copy made when anything was compiled first
    # Without this, an input of several FP8 products is quantized once for each of them.
    needs_realized_inputs.add(torch.ops.aten._scaled_mm.default)


def tag_compile_cache() -> None:
    """Key torch's cache on disk by what it does not see: this package's files and cuDNN attention.

    The cache is keyed by the graph alone, so it would return code that was generated with other
    decompositions or other reduction choices.
    """
    _check_setting(torch.compiler.config, "cache_key_tag")
    files = sorted(Path(__file__).parent.glob("*.py"))
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    torch.compiler.config.cache_key_tag = f"{digest[:16]}, cuDNN attention: {cudnn}"


@cache
def _default_choices() -> tuple[Callable, Callable]:
    """Return inductor's own choices of persistent reductions and kernel options.

    They are cached at the first call, before the hooks replace them.
    """
    from torch._inductor.choices import InductorChoices

    persistent = InductorChoices.should_use_persistent_reduction
    kernel_options = InductorChoices.triton_kernel_kwargs
    _check_parameters(persistent, "features", "cooperative_reduction")
    _check_parameters(kernel_options, "self", "kernel_cls", "features", "groups", "kernel_kwargs")
    return persistent, kernel_options


def enable_persistent_reductions() -> None:
    """Make inductor keep contiguous rows of up to `MAX_PERSISTENT_ROW` elements in registers.

    Such rows are then read from memory only once.
    """
    from torch._inductor.choices import InductorChoices
    from torch._inductor.codegen.simd import SIMDKernel
    from torch._inductor.codegen.triton import TritonKernel
    from torch._inductor.dependencies import MemoryDep
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.virtualized import V

    _default_choices()
    for owner, name in (
        (MemoryDep, "stride1_for_last_dim"),
        (ReductionHint, "INNER"),
        (SIMDKernel, "want_no_x_dim"),
        (TritonKernel, "want_no_x_dim"),
        (V, "graph"),
    ):
        if not hasattr(type(owner) if owner is V else owner, name):
            raise HookUnavailable(f"{owner} has no {name}")
    InductorChoices.should_use_persistent_reduction = staticmethod(use_persistent_reduction)
    # torch 2.11 fails to compile some kernels without a row dimension
    TritonKernel.want_no_x_dim = SIMDKernel.want_no_x_dim


def use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
    """Return whether a kernel keeps its row in registers; replaces inductor's choice."""
    from torch._inductor.virtualized import V

    try:
        if _reads_contiguous_rows(features) and V.graph.sizevars.statically_known_leq(
            features.reduction_numel, MAX_PERSISTENT_ROW
        ):
            return True
    except CHANGED as error:
        _warn_once("persistent reductions", f"{type(error).__name__}: {error}")
    return _default_choices()[0](features, cooperative_reduction)


def _reads_contiguous_rows(features: Any) -> bool:
    """Return whether rows are read along memory.

    Inductor's hint for one reduction suffices, since all of them run over the same rows; it gives
    none for a slice of a tensor, whose reads are inspected instead.
    """
    from torch._inductor.dependencies import MemoryDep
    from torch._inductor.runtime.hints import ReductionHint

    nodes = features.reduction_nodes()
    return ReductionHint.INNER in map(features.reduction_hint, nodes) or all(
        isinstance(read, MemoryDep) and read.stride1_for_last_dim(False)
        for node in nodes
        for read in node.read_writes.reads
    )


def limit_reduction_warps() -> None:
    """Compile large persistent reductions with two or four warps instead of eight."""
    from torch._inductor.choices import InductorChoices
    from torch._inductor.codegen.triton import FixedTritonConfig

    _default_choices()
    _check_parameters(FixedTritonConfig, "config")
    if InductorChoices.should_use_persistent_reduction is not use_persistent_reduction:
        raise HookUnavailable("persistent reductions are not enabled")
    InductorChoices.triton_kernel_kwargs = limited_kernel_options


def limited_kernel_options(
    self: Any, kernel_cls: type, features: Any, groups: Any, kernel_kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the options of a Triton kernel, with a fixed configuration for large reductions."""
    from torch._inductor.codegen.triton import FixedTritonConfig
    from torch._inductor.virtualized import V

    options = _default_choices()[1](self, kernel_cls, features, groups, kernel_kwargs)
    try:
        rows, columns, sizes = features.numel, features.reduction_numel, V.graph.sizevars
        is_plain = options.keys() <= {"features", "tiling_scores"}
        is_row_reduction = groups[0].keys() == {"x", "r0_"}
        is_large = sizes.statically_known_geq(columns, 1025)
        is_large = is_large and sizes.statically_known_geq(rows, 1024)
        is_two_warp_row = sizes.statically_known_leq(columns, MAX_TWO_WARP_ROW)
    except CHANGED as error:
        _warn_once("few warps", f"{type(error).__name__}: {error}")
        return options
    if not (is_plain and is_row_reduction and is_large):
        return options
    if not use_persistent_reduction(features, False):
        return options
    warps = 2 if is_two_warp_row else 4
    fixed = FixedTritonConfig({"XBLOCK": 1, "num_warps": warps, "num_stages": 1})
    return options | {"fixed_config": fixed}


def count_persistent_kernels() -> int | None:
    """Return how many generated Triton kernels are persistent reductions, or None if unknown."""
    try:
        from torch._inductor.codecache import PyCodeCache

        files = {module.__file__ for module in PyCodeCache.modules}
        sources = [Path(file).read_text("utf-8") for file in files]
    except (*CHANGED, OSError):
        return None
    return sum(len(PERSISTENT_KERNEL.findall(source)) for source in sources)


def has_triton() -> bool:
    """Return whether Triton is installed and supports the GPU."""
    try:
        from torch.utils._triton import has_triton as torch_has_triton
    except ImportError:
        return False
    return torch_has_triton()


def compiler_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that a compiled function raises if it cannot be compiled."""
    try:
        from torch._dynamo.exc import TorchDynamoException
    except ImportError:
        return (RuntimeError,)
    return (TorchDynamoException,)
