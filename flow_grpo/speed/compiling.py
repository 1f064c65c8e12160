"""How torch.compile is told to treat a model's blocks."""

import warnings

import torch
from torch._functorch import config as functorch_config

# Share of a compiled block's activations that stay for its backward pass. Below 1 torch computes
# norms and the like again, at .75 also attention, which costs time.
ACTIVATIONS_KEPT = 0.95
HARMLESS = (
    "Dynamo detected a call to a `functools.lru_cache`",
    "TensorFloat32",
    "Torchinductor does not support code generation for complex operators",
)


def settle_compiler() -> None:
    # several kinds of blocks; with and without gradients, LoRA and evaluation's batch size
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    # it would cut each block in two, to send gradients of half a block sooner
    torch._dynamo.config.optimize_ddp = False
    functorch_config.activation_memory_budget = ACTIVATIONS_KEPT
    # torch's cache on disk would give back code for another choice
    if not torch.backends.cuda.cudnn_sdp_enabled():
        torch.compiler.config.cache_key_tag = "without cuDNN's attention"
    for harmless in HARMLESS:
        warnings.filterwarnings("ignore", message=harmless, category=UserWarning)
