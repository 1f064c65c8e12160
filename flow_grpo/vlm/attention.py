"""The cache of a batch that is decoded, and attention to it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, Cache, DynamicCache

ONE_QUERY = "one_query"


class FixedCache(Cache):
    """Keys and values of every layer, in tensors that stay where they are. A step writes to column
    `place` and sees the first `columns` of the first `rows`."""

    def __init__(
        self, read: DynamicCache, rows: int, columns: int, dtype: torch.dtype | None
    ) -> None:
        """Room for `rows` as long as `columns`, shaped like those that were `read`. Norms with
        weights in float32 widen what autocast would narrow again for every token: `dtype` is what
        it narrows to, or None."""
        super().__init__(layers=[])
        self.held = [
            tuple(
                x.new_zeros(rows, x.shape[1], columns, x.shape[3], dtype=dtype)
                for x in (own.keys, own.values)
            )
            for own in read.layers
        ]
        self.place = torch.zeros(1, dtype=torch.long, device=self.held[0][0].device)
        self.dtype = self.held[0][0].dtype
        self.rows, self.columns = rows, columns

    def fill(self, read: DynamicCache, chosen: Tensor) -> None:
        """Row i with what was read for row `chosen[i]`."""
        for (keys, values), own in zip(self.held, read.layers, strict=True):
            keys[: len(chosen), :, : own.keys.shape[2]] = own.keys[chosen]
            values[: len(chosen), :, : own.keys.shape[2]] = own.values[chosen]
        self.place.fill_(read.layers[0].keys.shape[2])

    def keep(self, index: Tensor, columns: int) -> None:
        """These rows, in front."""
        for pair in self.held:
            for held in pair:
                held[: len(index), :, :columns] = held[index, :, :columns]

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any) -> tuple[Tensor, ...]:
        every = [held[: self.rows, :, : self.columns] for held in self.held[layer_idx]]
        for held, new in zip(every, (keys, values), strict=True):
            held.index_copy_(2, self.place, new.to(held.dtype))
        return tuple(every)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **settings: Any
) -> tuple[Tensor, None]:
    """Of one query per row. Heads that share keys are queries of one head, so that keys are read
    once and not copied for each of them."""
    rows, heads, _, width = query.shape
    shared = query.view(rows, key.shape[1], -1, width)
    mask = mask.expand(-1, -1, shared.shape[2], -1)
    out = scaled_dot_product_attention(shared, key, value, mask, scale=settings["scaling"])
    return out.reshape(rows, 1, heads, width), None


AttentionInterface.register(ONE_QUERY, _attend)


@contextmanager
def one_query(language_model: nn.Module) -> Iterator[None]:
    """Within, the model takes one token per row."""
    config = language_model.config
    usual = config._attn_implementation
    config._attn_implementation = ONE_QUERY
    try:
        yield
    finally:
        config._attn_implementation = usual
