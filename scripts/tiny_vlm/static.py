"""The model's forward with fixed shapes.

transformers calls attention once per picture and loops over the rows for their positions: far too
slow for batches of 2048. Here all pictures have one size and rows come in two layouts, with and
without a picture. The modules and their weights are the model's own.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3VLForConditionalGeneration
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
)

from tiny_vlm.batches import FIRST_IMAGE_COLUMN, Batch
from tiny_vlm.pictures import COLUMNS, MERGE, PATCHES, ROWS, TOKENS
from tiny_vlm.texts import IMAGE

IMAGE_COLUMNS = slice(FIRST_IMAGE_COLUMN, FIRST_IMAGE_COLUMN + TOKENS)


def vision_block(block: nn.Module, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """hidden: (pictures, PATCHES, width); each picture attends to itself alone."""
    n, length, width = hidden.shape
    heads = block.attn.num_heads
    qkv = block.attn.qkv(block.norm1(hidden)).view(n, length, 3, heads, width // heads)
    query, key, value = qkv.permute(2, 0, 3, 1, 4)
    query, key = (_rotated(x.float(), cos, sin).to(value.dtype) for x in (query, key))
    mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2)
    hidden = hidden + block.attn.proj(mixed.reshape(n, length, width))
    return hidden + block.mlp(block.norm2(hidden))


def text_block(layer: nn.Module, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Padding comes last, so that plain causal attention never sees it."""
    return layer(hidden, attention_mask=None, position_embeddings=(cos, sin))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


class StaticForward:
    def __init__(
        self, model: Qwen3VLForConditionalGeneration, length: int, *, compiled: bool = False
    ) -> None:
        self.model = model
        self.vision_block: Callable = vision_block
        self.text_block: Callable = text_block
        if compiled:
            self.vision_block = torch.compile(vision_block, dynamic=False)
            self.text_block = torch.compile(text_block, dynamic=False)
        device = model.device
        vision, text = model.model.visual, model.model.language_model
        grid = torch.tensor([[1, ROWS, COLUMNS]], device=device)
        self.nearest, self.nearness = get_vision_interpolation_indices_and_weights(
            grid,
            num_grid_per_side=vision.num_grid_per_side,
            mode=vision.interpolation_mode,
            align_corners=vision.interpolation_align_corners,
            spatial_merge_size=MERGE,
        )
        places = get_vision_position_ids(grid, MERGE)
        self.vision_rotary = vision.rotary_pos_emb(torch.zeros((), device=device), places)
        # row 0: text alone; row 1: with a picture
        ids = torch.zeros(2, length, dtype=torch.long, device=device)
        ids[1, IMAGE_COLUMNS] = IMAGE
        positions, _ = model.model.get_rope_index(
            ids, mm_token_type_ids=(ids == IMAGE).int(), image_grid_thw=grid
        )
        self.text_rotary = text.rotary_emb(torch.zeros((), device=device), positions)

    def see(self, patches: Tensor) -> tuple[Tensor, Tensor]:
        """Picture tokens for the first layer and for the second, each (pictures, TOKENS, width)."""
        vision = self.model.model.visual
        count = len(patches) // PATCHES
        embed = vision.patch_embed.proj
        hidden = F.linear(patches, embed.weight.flatten(1), embed.bias).view(count, PATCHES, -1)
        hidden = hidden + (vision.pos_embed(self.nearest) * self.nearness[..., None]).sum(1)
        for i, block in enumerate(vision.blocks):
            hidden = self.vision_block(block, hidden, *self.vision_rotary)
            if i == vision.deepstack_visual_indexes[0]:
                deep = vision.deepstack_merger_list[0](hidden.flatten(0, 1))
        seen = vision.merger(hidden.flatten(0, 1))
        return seen.view(count, TOKENS, -1), deep.view(count, TOKENS, -1)

    def hidden(self, batch: Batch) -> Tensor:
        """(N, length, width), after the last norm."""
        text = self.model.model.language_model
        hidden = text.embed_tokens(batch.ids)
        # rows without a picture come first
        seen, deep = (
            F.pad(x.to(hidden.dtype), (0, 0, 0, 0, batch.num_sums, 0))
            for x in self.see(batch.patches)
        )
        before, after = hidden[:, : IMAGE_COLUMNS.start], hidden[:, IMAGE_COLUMNS.stop :]
        shown = torch.where(batch.has_picture[:, None, None], seen, hidden[:, IMAGE_COLUMNS])
        hidden = torch.cat([before, shown, after], 1)
        cos, sin = (x[batch.has_picture.long()] for x in self.text_rotary)
        for i, layer in enumerate(text.layers):
            hidden = self.text_block(layer, hidden, cos, sin)
            if i == 0:
                hidden = hidden + F.pad(deep, (0, 0, before.shape[1], after.shape[1]))
        return text.norm(hidden)

    def answer_log_probs(self, batch: Batch) -> Tensor:
        """Log-probability of each answer token (N, answer length)."""
        hidden = self.hidden(batch)
        columns = batch.columns[..., None].expand(-1, -1, hidden.shape[-1])
        logits = self.model.lm_head(hidden.gather(1, columns)).float()
        return logits.log_softmax(-1).gather(2, batch.answers[..., None])[..., 0]
