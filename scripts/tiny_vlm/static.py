"""Forward pass of the model with static shapes.

transformers calls attention once per image and loops over the rows to compute positions, which is
too slow for batches of 2048. Here all images have the same size and rows have one of two layouts,
with or without an image. Modules and weights are those of the model.
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
from tiny_vlm.images import COLUMNS, MERGE, PATCHES, ROWS, TOKENS
from tiny_vlm.texts import IMAGE

IMAGE_COLUMNS = slice(FIRST_IMAGE_COLUMN, FIRST_IMAGE_COLUMN + TOKENS)


def vision_block(block: nn.Module, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply a vision block to hidden (images, PATCHES, width); each image attends to itself."""
    n, length, width = hidden.shape
    heads = block.attn.num_heads
    qkv = block.attn.qkv(block.norm1(hidden)).view(n, length, 3, heads, width // heads)
    query, key, value = qkv.permute(2, 0, 3, 1, 4)
    query, key = (_rotated(x.float(), cos, sin).to(value.dtype) for x in (query, key))
    mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2)
    hidden = hidden + block.attn.proj(mixed.reshape(n, length, width))
    return hidden + block.mlp(block.norm2(hidden))


def text_block(layer: nn.Module, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply a text layer; padding comes last, so causal attention needs no mask."""
    return layer(hidden, attention_mask=None, position_embeddings=(cos, sin))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


class StaticForward:
    """Log-probabilities of target responses for batches of a fixed length."""

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
        self.position_indices, self.position_weights = get_vision_interpolation_indices_and_weights(
            grid,
            num_grid_per_side=vision.num_grid_per_side,
            mode=vision.interpolation_mode,
            align_corners=vision.interpolation_align_corners,
            spatial_merge_size=MERGE,
        )
        positions = get_vision_position_ids(grid, MERGE)
        self.vision_rotary = vision.rotary_pos_emb(torch.zeros((), device=device), positions)
        # row 0: text only; row 1: with an image
        ids = torch.zeros(2, length, dtype=torch.long, device=device)
        ids[1, IMAGE_COLUMNS] = IMAGE
        positions, _ = model.model.get_rope_index(
            ids, mm_token_type_ids=(ids == IMAGE).int(), image_grid_thw=grid
        )
        self.text_rotary = text.rotary_emb(torch.zeros((), device=device), positions)

    def encode_images(self, patches: Tensor) -> tuple[Tensor, Tensor]:
        """Return image embeddings for the first two text layers, (images, TOKENS, width) each."""
        vision = self.model.model.visual
        count = len(patches) // PATCHES
        embed = vision.patch_embed.proj
        hidden = F.linear(patches, embed.weight.flatten(1), embed.bias).view(count, PATCHES, -1)
        position = vision.pos_embed(self.position_indices) * self.position_weights[..., None]
        hidden = hidden + position.sum(1)
        for i, block in enumerate(vision.blocks):
            hidden = self.vision_block(block, hidden, *self.vision_rotary)
            if i == vision.deepstack_visual_indexes[0]:
                deep = vision.deepstack_merger_list[0](hidden.flatten(0, 1))
        merged = vision.merger(hidden.flatten(0, 1))
        return merged.view(count, TOKENS, -1), deep.view(count, TOKENS, -1)

    def hidden(self, batch: Batch) -> Tensor:
        """Return hidden states (N, length, width) after the final norm."""
        text = self.model.model.language_model
        hidden = text.embed_tokens(batch.ids)
        # rows without an image come first
        images, deep = (
            F.pad(x.to(hidden.dtype), (0, 0, 0, 0, batch.num_sums, 0))
            for x in self.encode_images(batch.patches)
        )
        before, after = hidden[:, : IMAGE_COLUMNS.start], hidden[:, IMAGE_COLUMNS.stop :]
        middle = torch.where(batch.has_image[:, None, None], images, hidden[:, IMAGE_COLUMNS])
        hidden = torch.cat([before, middle, after], 1)
        cos, sin = (x[batch.has_image.long()] for x in self.text_rotary)
        for i, layer in enumerate(text.layers):
            hidden = self.text_block(layer, hidden, cos, sin)
            if i == 0:
                hidden = hidden + F.pad(deep, (0, 0, before.shape[1], after.shape[1]))
        return text.norm(hidden)

    def answer_log_probs(self, batch: Batch) -> Tensor:
        """Return the log-probability of each answer token, (N, answer length)."""
        hidden = self.hidden(batch)
        columns = batch.columns[..., None].expand(-1, -1, hidden.shape[-1])
        logits = self.model.lm_head(hidden.gather(1, columns)).float()
        return logits.log_softmax(-1).gather(2, batch.answers[..., None])[..., 0]
