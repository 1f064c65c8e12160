"""Build and train small models on generated conversations by next-token prediction."""

import argparse
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tiny_vlm.model import save_fp16
from tiny_vlm.texts import END, PAD, START

TOKENIZER = Path(__file__).parents[2] / "assets/tiny-text"  # one token per character
LEARNING_RATE, WARMUP = 3e-3, 50
EMBEDDING_STD = 0.1
IGNORED = -100  # label of tokens without a loss


def parse_args(description: str, steps: int) -> argparse.Namespace:
    """Parse the command line and create the output directory, which must not exist."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True)
    return args


def load_tokenizer() -> PreTrainedTokenizerBase:
    """Return the tokenizer of tiny-text, to which a script adds its words or parts of calls."""
    return AutoTokenizer.from_pretrained(TOKENIZER, trust_remote_code=False)


def build_language_model(seed: int, vocabulary: int, max_new_tokens: int) -> Qwen3ForCausalLM:
    """Build a language model with random weights; also set the seed of torch."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=START,
        eos_token_id=END,
    )
    model = Qwen3ForCausalLM(config)
    model.get_input_embeddings().weight.data.normal_(std=EMBEDDING_STD)
    model.generation_config = GenerationConfig(
        pad_token_id=PAD,
        bos_token_id=START,
        eos_token_id=END,
        do_sample=True,
        max_new_tokens=max_new_tokens,
    )
    return model


def initialize_copying(layers: Iterable[nn.Module]) -> None:
    """Initialize attention such that it copies the tokens that it attends to."""
    for layer in layers:
        values = nn.init.orthogonal_(layer.self_attn.v_proj.weight.data)
        layer.self_attn.o_proj.weight.data = values.T.clone()


def encode_turns(
    tokenizer: PreTrainedTokenizerBase, turns: list[str]
) -> tuple[list[int], list[int]]:
    """Return tokens and labels of alternating turns of the user and the assistant.

    Only the turns of the assistant have labels.
    """
    tokens, labels = [], []
    for number, ids in enumerate(tokenizer(turns).input_ids):
        tokens += [START, *ids, END]
        labels += [IGNORED, *([*ids, END] if number % 2 else [IGNORED] * (len(ids) + 1))]
    return tokens, labels


def pad_rows(rows: list[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    """Return tokens and labels of all rows, (B, L) each; padding is on the right."""
    longest = max(len(tokens) for tokens, _ in rows)
    tokens = [own + [PAD] * (longest - len(own)) for own, _ in rows]
    labels = [own + [IGNORED] * (longest - len(own)) for _, own in rows]
    return torch.tensor(tokens), torch.tensor(labels)


def train(
    model: PreTrainedModel,
    draw_batch: Callable[[int], tuple[dict[str, Tensor], Tensor]],
    steps: int,
) -> list[float]:
    """Train the model by next-token prediction; return the loss of every step.

    Args:
        model: The model.
        draw_batch: Returns the model's inputs and the labels, (B, L), of a step.
        steps: Number of steps.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    losses = []
    for step in range(steps):
        decay = 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1, (step + 1) / WARMUP) * decay
        inputs, labels = draw_batch(step)
        logits = model(**inputs, use_cache=False).logits
        loss = cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(round(loss.item(), 4))
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}: loss {losses[-1]:.4f}", flush=True)
    return losses


def save(
    model: PreTrainedModel,
    processor: PreTrainedTokenizerBase | ProcessorMixin,
    folder: Path,
    losses: list[float],
) -> None:
    """Write the model in half precision, its tokenizer or processor, and the losses."""
    save_fp16(model, processor, folder)
    every = max(1, len(losses) // 100)
    training = {"steps": len(losses), "loss": losses[::every]}
    (folder / "training.json").write_text(json.dumps(training) + "\n")
