"""What an evaluation compares: the model as it is, and checkpoints of it."""

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from flow_grpo.draw.export import Source
from flow_grpo.draw.models import ModelAdapter
from flow_grpo.errors import UserError
from flow_grpo.run.checkpoint import weights_in
from flow_grpo.show.reading import short_names

BASE = "base"


@dataclass(frozen=True)
class Candidate:
    name: str  # short, and no other candidate's
    weights: Path | None  # None: the model as it is


def find_candidates(words: list[str]) -> list[Candidate]:
    """In the order of `words`: "base" or what `weights_in` takes; several may stand in one word,
    with commas between. Nothing means the base alone."""
    named = [name for word in words for name in _split(word) if name] or [BASE]
    found = [None if name == BASE else weights_in(Path(name)) for name in named]
    places = [weights and weights.resolve() for weights in found]
    for i, place in enumerate(places):
        if place in places[:i]:
            first = named[places.index(place)]
            also = f", as {first} does" if first != named[i] else " twice"
            raise UserError(f"--checkpoint names {place or BASE}{also}; leave one out")
    short = short_names([place for place in places if place])
    names = iter(f"checkpoint {name}" if name == BASE else name for name in short)
    return [Candidate(next(names) if weights else BASE, weights) for weights in found]


def _split(word: str) -> list[str]:
    """A folder may have a comma in its name."""
    return [word] if os.path.exists(word) else [part.strip() for part in word.split(",")]


class Exchange:
    """Puts the weights of candidates on one model, and takes them off again."""

    def __init__(self, adapter: ModelAdapter, candidates: list[Candidate]) -> None:
        self.adapter = adapter
        self.alone = len(candidates) == 1  # then nothing comes after it
        self._own: dict[str, Tensor] = {}  # the base's weights, once others took their place

    @contextmanager
    def applied(self, candidate: Candidate) -> Iterator[ModelAdapter]:
        """The adapter to sample with; the model is the base again afterwards, bit for bit."""
        if candidate.weights is None:
            yield self.adapter
            return
        adapter = copy.copy(self.adapter)  # LoRA may be on text encoders: embeddings of its own
        is_lora = Source(candidate.weights).is_lora
        if not (is_lora or self.alone or self._own):
            state = adapter.transformer.state_dict()
            self._own = {name: tensor.to("cpu", copy=True) for name, tensor in state.items()}
        try:
            adapter.load_weights(candidate.weights)
            yield adapter
        finally:
            if is_lora:
                self.adapter.pipeline.unload_lora_weights()
            elif not self.alone:
                self.adapter.transformer.load_state_dict(self._own)

    def check(self, candidates: list[Candidate]) -> None:
        """Load each once, so that one that does not fit is told before the first is scored."""
        for candidate in candidates if not self.alone else ():
            with self.applied(candidate):
                pass
