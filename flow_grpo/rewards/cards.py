"""Cards of the built-in rewards: what each scores, its model, licence, size and speed.

`cards.toml` is the only place that states them. `flow-grpo rewards` and the tables of the
documentation are generated from it, and it selects the example pairs of `flow-grpo rewards check`.
"""

import re
import tomllib
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from flow_grpo.errors import UserError, did_you_mean
from flow_grpo.hub_access import cached_repos

TABLE = Path(__file__).with_name("cards.toml")
IN_CACHE, MISSING_WEIGHTS, NO_WEIGHTS = "in cache", "missing", "-"


@dataclass(frozen=True)
class RewardCard:
    """Description of a built-in reward; texts are Markdown.

    Args:
        name: Name in the registry.
        score: What it scores, and in italics the additional values that it logs.
        range: Typical range of its scores.
        runs: Where it is computed: "in process", "worker processes", "vLLM or SGLang" and so on.
        pairs: Example pairs that `flow-grpo rewards check` scores, a key of `EXAMPLES` in
            example_pairs.py.
        model: Its model, if it has one.
        weights: Hub repositories that the default options load, the model first.
        parameters: Number of parameters of the default model, such as "428 M".
        licence: Licence of code and weights, as their authors state it.
        options: Options of a reward for responses; those of the others are in docs/rewards.md.
        gpu_memory_gib: Measured peak of the GPU memory, in GiB on an H200; None if not measured.
        images_per_s: Measured throughput on an H200, in images or videos; None if not measured.
        measured: Conditions of the measurement.
    """

    name: str
    score: str
    range: str
    runs: str
    pairs: str
    model: str = ""
    weights: tuple[str, ...] = ()
    parameters: str = ""
    licence: str = ""
    options: str = ""
    gpu_memory_gib: float | None = None
    images_per_s: float | None = None
    measured: str = ""

    def weights_state(self) -> str:
        """Return whether the hub cache has the default weights: "in cache", "missing" or "-"."""
        if not self.weights:
            return NO_WEIGHTS
        return MISSING_WEIGHTS if self.missing_weights() else IN_CACHE

    def missing_weights(self) -> list[str]:
        """Return the repositories of the default weights that the hub cache does not have."""
        cached = cached_repos("model")
        return [name for name in self.weights if name not in cached]


@cache
def reward_cards() -> dict[str, RewardCard]:
    """Return the cards by name, in the order of the file.

    Raises:
        ValueError: A card has an unknown field or lacks a required one.
    """
    known = {each.name for each in fields(RewardCard)}
    cards = {}
    for name, entry in tomllib.loads(TABLE.read_text("utf-8")).items():
        if unknown := entry.keys() - known:
            raise ValueError(f"{TABLE.name}: [{name}] has the unknown field {min(unknown)}")
        values: dict[str, Any] = {"name": name, **entry}
        values["weights"] = tuple(values.get("weights", ()))
        try:
            cards[name] = RewardCard(**values)
        except TypeError as error:
            raise ValueError(f"{TABLE.name}: [{name}]: {error}") from error
    return cards


def get_card(name: str) -> RewardCard:
    """Return the card of a built-in reward; raise a UserError for another name."""
    cards = reward_cards()
    if name not in cards:
        raise UserError(
            f"is not a built-in reward; choose from {', '.join(cards)}",
            field="reward",
            value=name,
            hint=did_you_mean(name, cards),
        )
    return cards[name]


def plain_text(markdown: str) -> str:
    """Return a text of a card without links, emphasis and code marks, for a terminal."""
    without_links = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", markdown)
    return re.sub(r"[`*]", "", without_links)
