"""Compute the GPU memory of a VLM run without loading a model; see docs/vlm/scaling.md.

Every term follows from the model sizes and the settings. The total for training is up to 8 % below
the measurements in docs/benchmarks/vlm_h200.jsonl (tests/training/test_scaling.py).
"""

import math
from typing import NamedTuple

from flow_grpo.config.fields import ADAMW_BF16
from flow_grpo.training.measurements import PARAMETERS, shape_of
from flow_grpo.vlm.fields import SEPARATE, VLLM, VlmConfig

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

    @property
    def layer_bytes(self) -> int:
        """Bytes that a layer stores per token for its backward pass.

        These are the inputs of two norms and seven linear layers, queries, keys, values and output
        of attention, and the gate, its activation and the other half of the MLP. Keys and values
        are repeated for all heads.
        """
        inputs = 7 * self.width + self.attention + self.inner
        return HALF * (inputs + 4 * self.attention + 3 * self.inner)


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
    critic_shape = shape_of(train.critic_model or config.pretrained.model)
    unknown = not (DECODERS.keys() & PARAMETERS.keys()) >= {shape, critic_shape}
    if unknown or train.lora_target_modules or train.lora_path:
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
    training, sampling = _activations(config, decoder), {}
    if config.sample.engine != VLLM:
        sampling = _sampling(config, decoder, known.all, sharded=sharded)
    if train.critic == SEPARATE:
        critic = DECODERS[critic_shape]
        trained, frozen = critic_parameters(critic, PARAMETERS[critic_shape].all)
        if not train.freeze_vision:
            trained, frozen = trained + frozen, 0
        weights = STATE_BYTES[False] * trained + HALF * frozen
        state["critic's weights, gradients and moments"] = weights / shards
        if gpus > 1 and not sharded:
            state["critic's gradient buckets of DDP"] = FLOAT * trained
        training |= {f"critic's {k}": v for k, v in _kept(config, critic, FLOAT).items()}
        if sharded and sampling:
            sampling["critic's gathered weights"] = HALF * (trained + frozen)
    training, sampling = {**state, **training}, {**state, **sampling}
    plans = {"training": training, "sampling": sampling}
    return {name: {k: v / GIB for k, v in terms.items()} for name, terms in plans.items()}


def critic_parameters(decoder: Decoder, parameters: int) -> tuple[int, int]:
    """Return the numbers of parameters of a separate critic, without and in the vision tower.

    Args:
        decoder: Language model that the critic starts from.
        parameters: Number of parameters of that model, with its vision tower.
    """
    tower = parameters - decoder.linear - decoder.embeddings
    value_head = decoder.width + 1  # instead of the LM head; tied weights remain as embeddings
    return decoder.linear + decoder.vocabulary * decoder.width + value_head, tower


def _activations(config: VlmConfig, decoder: Decoder) -> dict[str, float]:
    """Return the bytes of activations and logits of a micro-batch."""
    train = config.train
    is_half = config.use_lora or train.optimizer == ADAMW_BF16
    found = _kept(config, decoder, HALF if is_half else FLOAT)
    if train.gradient_checkpointing:
        tokens = _count_tokens(config)
        found["activations of one layer"] = tokens * decoder.layer_bytes
    return {**found, "logits": float(LOGIT_BYTES * CHUNK_LOGITS)}


def _kept(config: VlmConfig, decoder: Decoder, size: int) -> dict[str, float]:
    """Return the bytes of the activations that all layers keep for the backward pass.

    Args:
        config: Settings of the run.
        decoder: Language model.
        size: Bytes of a number between two layers.
    """
    tokens = _count_tokens(config)
    if not config.train.gradient_checkpointing:
        layer = tokens * decoder.layer_bytes
        return {f"activations of {tokens:,} tokens": decoder.layers * layer}
    return {
        f"inputs of all layers for {tokens:,} tokens": tokens
        * decoder.layers
        * decoder.width
        * size
    }


def _count_tokens(config: VlmConfig) -> int:
    """Return the number of tokens of a micro-batch that a process computes."""
    return math.ceil(config.train.tokens_per_batch / config.train.sequence_parallel)


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
