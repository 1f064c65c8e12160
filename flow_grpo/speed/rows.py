"""How torch compiles sums and largest values of rows: norms, and scales of 8 bits."""

from typing import Any

from torch._inductor.choices import InductorChoices
from torch._inductor.codegen.simd import SIMDKernel
from torch._inductor.codegen.triton import FixedTritonConfig, TritonKernel
from torch._inductor.dependencies import MemoryDep
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.virtualized import V

LONGEST = 8192  # row that is held at once
SHORT = 4096  # row that two warps hold; a longer one takes four
usual = InductorChoices.should_use_persistent_reduction
usual_settings = InductorChoices.triton_kernel_kwargs


def hold(features: Any, cooperative_reduction: bool) -> bool:
    """Whether a row is read once, and held. Beyond 1,024 numbers torch would read it twice, and
    compute again what it comes from."""
    columns = features.reduction_numel
    if _lies_along(features) and V.graph.sizevars.statically_known_leq(columns, LONGEST):
        return True
    return usual(features, cooperative_reduction)


def _lies_along(features: Any) -> bool:
    """Whether rows are read as they lie in memory. torch's hint for one sum is enough, as all are
    over the same rows; for a part of a tensor it gives none."""
    nodes = features.reduction_nodes()
    return ReductionHint.INNER in map(features.reduction_hint, nodes) or all(
        isinstance(read, MemoryDep) and read.stride1_for_last_dim(False)
        for node in nodes
        for read in node.read_writes.reads
    )


def with_few_warps(
    self: InductorChoices, kind: type, features: Any, args: list[Any], settings: dict[str, Any]
) -> dict[str, Any]:
    """Settings of a kernel, fixed where it holds rows: of eight warps to a row, which torch would
    take, each has little to do, and all wait for each other at every sum."""
    settings = usual_settings(self, kind, features, args, settings)
    rows, columns, sizes = features.numel, features.reduction_numel, V.graph.sizevars
    is_plain = settings.keys() <= {"features", "tiling_scores"} and args[0].keys() == {"x", "r0_"}
    is_large = sizes.statically_known_geq(columns, 1025) and sizes.statically_known_geq(rows, 1024)
    if not (is_plain and is_large and hold(features, False)):
        return settings
    warps = 2 if sizes.statically_known_leq(columns, SHORT) else 4
    fixed = FixedTritonConfig({"XBLOCK": 1, "num_warps": warps, "num_stages": 1})
    return settings | {"fixed_config": fixed}


def hold_whole_rows() -> None:
    """In all that this process compiles from now on: in every thread, as backward passes may be
    compiled in one of their own, which torch's settings do not reach."""
    InductorChoices.should_use_persistent_reduction = staticmethod(hold)
    InductorChoices.triton_kernel_kwargs = with_few_warps
    # torch 2.11 cannot compile all kernels that have one row and no place for more
    TritonKernel.want_no_x_dim = SIMDKernel.want_no_x_dim
