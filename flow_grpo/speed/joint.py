"""Attention of two kinds of tokens, joined before their norms: compiled, each norm is a kernel that
also joins them, and less is kept for the backward pass."""

import torch
from diffusers.models.attention_processor import Attention, JointAttnProcessor2_0
from diffusers.models.normalization import RMSNorm
from torch import Tensor, nn
from torch.nn import functional as F


class JoinedProcessor:
    """What `JointAttnProcessor2_0` computes, of layers whose norms are plain."""

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: None = None,
    ) -> tuple[Tensor, Tensor]:
        own, added = hidden_states, encoder_hidden_states
        query = self.joined(attn, attn.to_q(own), attn.add_q_proj(added))
        key = self.joined(attn, attn.to_k(own), attn.add_k_proj(added))
        value = self.joined(attn, attn.to_v(own), attn.add_v_proj(added))
        length = own.shape[1]
        query = self.normed(query, length, attn.norm_q, attn.norm_added_q)
        key = self.normed(key, length, attn.norm_k, attn.norm_added_k)
        heads = (x.transpose(1, 2) for x in (query, key, value))
        out = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        own, added = out[:, :length], out[:, length:]
        if not attn.context_pre_only:
            added = attn.to_add_out(added)
        return attn.to_out[1](attn.to_out[0](own)), added

    @staticmethod
    def joined(attn: Attention, own: Tensor, added: Tensor) -> Tensor:
        """(batch, tokens of both, heads, numbers of a head)."""
        return torch.cat([own, added], 1).unflatten(-1, (attn.heads, -1))

    @staticmethod
    def normed(x: Tensor, length: int, own: RMSNorm, added: RMSNorm) -> Tensor:
        """Each token by the norm of its kind, of which the first `length` are the layer's own."""
        counts = (length, x.shape[1] - length)
        weights = [norm.weight.expand(n, -1) for norm, n in zip((own, added), counts, strict=True)]
        weight = torch.cat(weights)[:, None]
        square = x.float().pow(2).mean(-1, keepdim=True)
        return (x * torch.rsqrt(square + own.eps)).to(weight.dtype) * weight


def join_before_norms(model: nn.Module) -> None:
    for attn in model.modules():
        if isinstance(attn, Attention) and type(attn.processor) is JointAttnProcessor2_0:
            norms = [attn.norm_q, attn.norm_added_q, attn.norm_k, attn.norm_added_k]
            if all(map(_is_plain, norms)) and len({norm.eps for norm in norms}) == 1:
                attn.set_processor(JoinedProcessor())


def _is_plain(norm: nn.Module | None) -> bool:
    return type(norm) is RMSNorm and norm.weight is not None and norm.bias is None
