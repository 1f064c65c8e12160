"""How torch compiles sums and largest values of rows: norms, and scales of 8 bits."""

from typing import Any

from torch._inductor.choices import InductorChoices
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.virtualized import V

LONGEST = 8192  # row that is held at once
usual = InductorChoices.should_use_persistent_reduction


def hold(features: Any, cooperative_reduction: bool) -> bool:
    """Whether a row is read once, and held. Beyond 1,024 numbers torch would read it twice, and
    compute again what it comes from."""
    hints = {features.reduction_hint(node) for node in features.reduction_nodes()}
    # one that lies along a row is enough, whatever else the kernel does: all are over the same rows
    along, columns = ReductionHint.INNER in hints, features.reduction_numel
    if along and V.graph.sizevars.statically_known_leq(columns, LONGEST):
        return True
    return usual(features, cooperative_reduction)


def hold_whole_rows() -> None:
    """In all that this process compiles from now on: in every thread, as backward passes may be
    compiled in one of their own, which torch's settings do not reach."""
    InductorChoices.should_use_persistent_reduction = staticmethod(hold)
