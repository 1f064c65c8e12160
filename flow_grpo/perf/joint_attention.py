"""Joint attention of image and text tokens that concatenates them before the QK norms.

The compiler then fuses each norm with the concatenation into one kernel, and fewer activations are
saved for the backward pass.
"""

import torch
from diffusers.models.attention_processor import Attention, JointAttnProcessor2_0
from diffusers.models.normalization import RMSNorm
from torch import Tensor, nn
from torch.nn import functional as F


class FusedJointAttnProcessor:
    """Equivalent of diffusers' `JointAttnProcessor2_0` for layers with plain RMS norms."""

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs of both streams, in the shapes of their inputs.

        Args:
            attn: The attention layer.
            hidden_states: Image tokens, (B, N, D).
            encoder_hidden_states: Text tokens, (B, L, D).
            attention_mask: Not supported.
        """
        own, added = hidden_states, encoder_hidden_states
        query = self.concat_heads(attn, attn.to_q(own), attn.add_q_proj(added))
        key = self.concat_heads(attn, attn.to_k(own), attn.add_k_proj(added))
        value = self.concat_heads(attn, attn.to_v(own), attn.add_v_proj(added))
        length = own.shape[1]
        query = self.rms_norm(query, length, attn.norm_q, attn.norm_added_q)
        key = self.rms_norm(key, length, attn.norm_k, attn.norm_added_k)
        heads = (x.transpose(1, 2) for x in (query, key, value))
        out = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        own, added = out[:, :length], out[:, length:]
        if not attn.context_pre_only:
            added = attn.to_add_out(added)
        return attn.to_out[1](attn.to_out[0](own)), added

    @staticmethod
    def concat_heads(attn: Attention, own: Tensor, added: Tensor) -> Tensor:
        """Concatenate tokens, image first, and split heads: (B, L, heads, head_dim)."""
        return torch.cat([own, added], 1).unflatten(-1, (attn.heads, -1))

    @staticmethod
    def rms_norm(x: Tensor, length: int, own: RMSNorm, added: RMSNorm) -> Tensor:
        """Apply the norm `own` to the first `length` tokens of `x` and `added` to the others."""
        others = x.shape[1] - length
        weights = [own.weight.expand(length, -1), added.weight.expand(others, -1)]
        weight = torch.cat(weights).unsqueeze(1)  # (L, 1, head_dim)
        square = x.float().pow(2).mean(-1, keepdim=True)
        return (x * torch.rsqrt(square + own.eps)).to(weight.dtype) * weight


def fuse_joint_attention_norms(model: nn.Module) -> None:
    """Use `FusedJointAttnProcessor` in all attention layers that it supports."""
    for attn in model.modules():
        if isinstance(attn, Attention) and type(attn.processor) is JointAttnProcessor2_0:
            norms = [attn.norm_q, attn.norm_added_q, attn.norm_k, attn.norm_added_k]
            if all(map(_is_plain, norms)) and len({norm.eps for norm in norms}) == 1:
                attn.set_processor(FusedJointAttnProcessor())


def _is_plain(norm: nn.Module | None) -> bool:
    return type(norm) is RMSNorm and norm.weight is not None and norm.bias is None
