"""Optimisations of a diffusion model, applied in order by `apply_optimizations`."""

import logging
from collections.abc import Iterable

import torch
from peft.tuners import lora
from torch import Tensor, nn
from torch.nn import functional as F

from flow_grpo.perf.compile_utils import compile_or_eager
from flow_grpo.perf.cuda_graphs import CudaGraphForward
from flow_grpo.perf.gelu import replace_gelu
from flow_grpo.perf.inductor import configure_inductor
from flow_grpo.perf.library_patches import make_attention_gradients_contiguous
from flow_grpo.perf.lora import fold_lora, is_plain_lora
from flow_grpo.perf.shared_projection import SharedProjection

logger = logging.getLogger("flow_grpo")
# Layers of a block that take the same input: {name of their parent: groups of layer names}.
SharedInputGroups = dict[str, tuple[tuple[str, ...], ...]]


def apply_optimizations(
    transformer: nn.Module,
    blocks: Iterable[nn.Module],
    shared_inputs: SharedInputGroups,
    decoder: nn.Module | None,
    *,
    cudnn_attention: bool,
    fold: bool,
    compiled: bool,
    graphs: bool,
) -> None:
    """Apply the requested optimisations, effective from the next call.

    Call it once, after LoRA was attached and the weights have their final precision. The order
    matters: each step relies on those before it.

    Args:
        transformer: The model that predicts velocities.
        blocks: Its transformer blocks, compiled one by one; equal blocks share compiled code.
        shared_inputs: Layers of a block whose LoRA projections are computed together.
        decoder: The VAE decoder, or None if compiling it does not pay.
        cudnn_attention: Whether cuDNN attention gives correct gradients for this model as it is.
        fold: Fold LoRA into float32 weights where that saves work.
        compiled: Compile blocks and decoder with `torch.compile`.
        graphs: Capture forward and backward passes as CUDA graphs.
    """
    # process-wide, and before the compiler sees the attention calls
    if not make_attention_gradients_contiguous(transformer) and not cudnn_attention:
        torch.backends.cuda.enable_cudnn_sdp(False)
    active = []
    if fold:  # first: a folded layer has no LoRA projection left to share
        fold_lora(transformer)
    if compiled:
        active += configure_inductor()
        replace_gelu(transformer)  # layers have their final class before a block is compiled
        for block in blocks:
            for parent, groups in shared_inputs.items():
                for names in groups:
                    share_lora_input(getattr(block, parent), names)
            compile_block(block)
        if decoder is not None:
            decoder.compile(dynamic=False)
    if graphs:  # last: captures the transformer as it is by now
        transformer.forward = CudaGraphForward(transformer)
        active.append("CUDA graphs")
    if active:
        logger.info("%-21s %s", "optimisations", ", ".join(active))


def compile_block(block: nn.Module) -> None:
    """Compile a transformer block as one graph.

    Hooks of the block itself stay outside the graph: FSDP2 gathers and frees the block's weights in
    them, which the compiler cannot trace. For the same reason torchtitan compiles its blocks before
    it shards them (`parallelize_llama` in torchtitan/models/llama3/infra/parallelize.py).
    """
    if block._forward_pre_hooks or block._forward_hooks:
        block.forward = compile_or_eager(block.forward, dynamic=False, fullgraph=True)
    else:
        block.compile(fullgraph=True, dynamic=False)


class SharedInputLoraLinear(lora.Linear):
    """LoRA layer that shares one down projection with its siblings, which have the same input."""

    shared_projection: SharedProjection

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output for `x`, (..., in_features), in the base layer's dtype."""
        out = self.base_layer(x)
        if self.disable_adapters:
            return out
        (name,) = self.active_adapters

        def down(x: Tensor) -> tuple[Tensor, ...]:
            layers = self.shared_projection.layers
            weight = torch.cat([sibling.lora_A[name].weight for sibling in layers])
            return F.linear(x.to(weight.dtype), weight).split([s.r[name] for s in layers], -1)

        up = self.lora_B[name](self.shared_projection.take(self, x, down))
        return (out + up * self.scaling[name]).to(out.dtype)


def share_lora_input(parent: nn.Module, names: tuple[str, ...]) -> None:
    """Compute the LoRA down projections of these children of `parent` as one product."""
    layers = [getattr(parent, name, None) for name in names]
    if all(
        type(x) is lora.Linear and is_plain_lora(x) and len(x.active_adapters) == 1 for x in layers
    ):
        shared_projection = SharedProjection(layers)
        for layer in layers:
            layer.__class__ = SharedInputLoraLinear
            layer.shared_projection = shared_projection
