"""Compute the GPU memory of a VLM run without loading a model; see docs/vlm/scaling.md.

Every term follows from the model sizes and the settings. The total for training is up to 8 % below
the measurements in docs/benchmarks/vlm_h200.jsonl (tests/training/test_scaling.py).
"""

import math
from typing import NamedTuple

from flow_grpo.config.fields import ADAMW_BF16
from flow_grpo.training.measurements import PARAMETERS, shape_of
from flow_grpo.vlm.fields import VLLM, VlmConfig

HALF, FLOAT = 2, 4  # bytes
STATE_BYTES = {True: 8, False: 16}  # of a trained parameter; True for train.optimizer=adamw_bf16
FROZEN_BYTES = {"bf16": HALF, "fp8": 1.0, "nf4": 17 / 32}  # of a parameter of a linear layer
LOGIT_BYTES = 10  # logits and their softmax in float32, their gradient in half precision
CHUNK_LOGITS = 2**26  # as in network.py, which imports torch
GIB = 2**30


class Decoder(NamedTuple):
    """Sizes of a language model."""

    layers: int
    width: int
    inner: int  # of the MLP
    attention: int  # heads x head size
    key_values: int  # key heads x head size
    vocabulary: int
    tied: bool = False  # whether the head is the embedding

    @property
    def linear(self) -> int:
        """Number of parameters of the linear layers."""
        attention = 2 * self.width * (self.attention + self.key_values)
        return self.layers * (attention + 3 * self.width * self.inner)

    @property
    def embeddings(self) -> int:
        """Number of parameters of the embedding and the head."""
        return (2 - self.tied) * self.vocabulary * self.width

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values of a token."""
        return HALF * 2 * self.layers * self.key_values

    def layer_bytes(self, *, flex: bool) -> int:
        """Return the bytes that a layer stores per token for its backward pass.

        These are the inputs of two norms and seven linear layers, queries, keys, values and output
        of attention, and the gate, its activation and the other half of the MLP. With a dense mask,
        keys and values are repeated for all heads.
        """
        keys = self.key_values if flex else self.attention
        inputs = 7 * self.width + self.attention + self.inner
        return HALF * (inputs + 2 * self.attention + 2 * keys + 3 * self.inner)


DECODERS = {
    "qwen2.5-vl-3b": Decoder(36, 2048, 11008, 2048, 256, 151936, tied=True),
    "qwen2.5-vl-7b": Decoder(28, 3584, 18944, 3584, 512, 152064),
    "qwen2.5-vl-72b": Decoder(80, 8192, 29568, 8192, 1024, 152064),
    "qwen3-vl-4b": Decoder(36, 2560, 9728, 4096, 1024, 151936, tied=True),
    "qwen3-vl-8b": Decoder(36, 4096, 12288, 4096, 1024, 151936),
    "llama-3-70b": Decoder(80, 8192, 28672, 8192, 1024, 128256),
}


def plan_memory(config: VlmConfig, gpus: int, *, sharded: bool) -> dict[str, dict[str, float]]:
    """Return the GiB of training and of sampling on a process, by term; {} for unknown models.

    Args:
        config: Settings of the run.
        gpus: Number of processes.
        sharded: Whether weights, gradients and moments are sharded (FSDP2, ZeRO-3).
    """
    shape, train = shape_of(config.pretrained.model), config.train
    decoder, known = DECODERS.get(shape), PARAMETERS.get(shape)
    if decoder is None or known is None or train.lora_target_modules or train.lora_path:
        return {}
    shards = gpus if sharded else 1
    tower = known.all - decoder.linear - decoder.embeddings
    state_bytes = STATE_BYTES[train.optimizer == ADAMW_BF16]
    if config.use_lora:
        linear = FROZEN_BYTES[config.pretrained.base_precision] * decoder.linear
        lora = known.lora_per_rank * train.lora_rank * state_bytes
        state = {
            "frozen weights": (linear + HALF * (known.all - decoder.linear)) / shards,
            "LoRA with gradients and moments": lora / shards,
        }
    else:
        frozen = tower if train.freeze_vision else 0
        trained = state_bytes * (known.all - frozen)
        state = {"weights, gradients and moments": (trained + HALF * frozen) / shards}
        if train.beta:
            state["reference policy"] = HALF * known.all
    if gpus > 1 and not sharded:
        trained = known.lora_per_rank * train.lora_rank if config.use_lora else known.all - frozen
        state["gradient buckets of DDP"] = trained * state_bytes / 4
    training = {**state, **_activations(config, decoder)}
    sampling = dict(state)
    if config.sample.engine != VLLM:
        sampling |= _sampling(config, decoder, known.all, sharded=sharded)
    plans = {"training": training, "sampling": sampling}
    return {name: {k: v / GIB for k, v in terms.items()} for name, terms in plans.items()}


def _activations(config: VlmConfig, decoder: Decoder) -> dict[str, float]:
    """Return the bytes of activations and logits of a micro-batch."""
    train = config.train
    tokens = math.ceil(train.tokens_per_batch / train.sequence_parallel)
    layer = tokens * decoder.layer_bytes(flex=config.flex_attention)
    size, logits = f"{tokens:,} tokens", {"logits": float(LOGIT_BYTES * CHUNK_LOGITS)}
    if not train.gradient_checkpointing:
        return {f"activations of {size}": decoder.layers * layer, **logits}
    is_half = config.use_lora or train.optimizer == ADAMW_BF16
    kept = tokens * decoder.layers * decoder.width * (HALF if is_half else FLOAT)
    return {f"inputs of all layers for {size}": kept, "activations of one layer": layer, **logits}


def _sampling(
    config: VlmConfig, decoder: Decoder, parameters: int, *, sharded: bool
) -> dict[str, float]:
    """Return the bytes that only the built-in engine uses."""
    sample = config.sample
    longest = sample.max_new_tokens + config.max_prompt_length
    cache = sample.batch_size * longest * decoder.cache_bytes
    found = {f"KV cache of {sample.batch_size} x {longest:,} tokens": float(cache)}
    if sharded:
        found["gathered weights"] = HALF * parameters
    elif config.use_lora and config.pretrained.base_precision == "bf16":
        found["weights merged with LoRA"] = HALF * decoder.linear
    elif not config.use_lora and config.train.optimizer != ADAMW_BF16:
        found["weights in half precision"] = HALF * decoder.linear
    return found


def describe_plan(config: VlmConfig, gpus: int, *, sharded: bool) -> dict[str, str]:
    """Return the memory lines of a plan, as text by label."""
    rows = {}
    for phase, terms in plan_memory(config, gpus, sharded=sharded).items():
        parts = " + ".join(f"{gib:.1f} of {name}" for name, gib in terms.items())
        rows[f"memory of {phase}"] = f"{sum(terms.values()):.1f} GiB per GPU = {parts}; computed"
    return rows
