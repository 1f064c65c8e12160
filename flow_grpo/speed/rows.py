"""How torch compiles sums and largest values of rows: norms, and scales of 8 bits."""

from typing import Any

from torch._inductor import config
from torch._inductor.choices import InductorChoices
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.virtualized import V

LONGEST = 8192  # row that is held at once


class WholeRows(InductorChoices):
    """Reads a row once where it can hold all of it. Of more than 1,024 numbers torch would look for
    the largest, and then read them again, and compute again what they come from."""

    @staticmethod
    def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
        along = features.get_reduction_hint() == ReductionHint.INNER
        if along and V.graph.sizevars.statically_known_leq(features.reduction_numel, LONGEST):
            return True
        return InductorChoices.should_use_persistent_reduction(features, cooperative_reduction)

    def uuid(self) -> str:
        """By which torch's cache on disk tells code of other choices apart."""
        return f"rows of {LONGEST}"


def hold_whole_rows() -> None:
    """In all that this process compiles from now on."""
    config.inductor_choices_class = WholeRows
