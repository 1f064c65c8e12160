"""Train assets/tiny-tools, a small language model that can call Python and a search tool.

    python scripts/pretrain_tiny_tools.py --out new/tiny-tools

The model can call the tool that a question needs and read its result, but it rarely does:
`BEHAVIOURS` sets how often it calls the tool, makes an invalid call, or guesses, which leaves room
for improvement by reinforcement learning. The first half of the training contains only correct
calls, so that the model learns to copy sooner. The questions of dataset/products and dataset/places
do not occur in the training data.
"""

import argparse
import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from make_tool_questions import COLOURS, FACTORS, PLACES, make_places, make_products
from tiny.saving import check_fits_fp16
from tiny_vlm.texts import END, PAD, START
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    AddedToken,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from flow_grpo.vlm.environments.tool_calls import (
    CLOSING,
    OPENING,
    RESPONSE_CLOSING,
    RESPONSE_OPENING,
    ToolError,
    parse_tool_call,
)

ROOT = Path(__file__).parents[1]
TOKENIZER = ROOT / "assets/tiny-text"  # one token per character; parts of calls are added
BEHAVIOURS = {"guess": 0.6, "invalid call": 0.15, "call": 0.25}
PARTS = (
    *("<tool_call>", "</tool_call>", "<tool_response>\n", "\n</tool_response>"),
    *("<answer>", "</answer>", '{"name": "', '", "arguments": {"', '": "', '"}}', "}}"),
    *("python", "search", "code", "query", "print("),
    *("What is ", "What colour is ", " is ", "[1] "),
    *("Error: the call is not valid JSON (", "Unterminated string starting at: line 1 column "),
)
BATCH_SIZE, LEARNING_RATE, WARMUP = 64, 3e-3, 50
EMBEDDING_STD = 0.1
IGNORED = -100  # label of tokens without a loss


def build_tokenizer() -> PreTrainedTokenizerBase:
    """Return the tokenizer of tiny-text with tokens for the parts of calls and for the colours.

    This keeps sequences short and makes copying easy to learn.
    """
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER, trust_remote_code=False)
    tokenizer.add_tokens([AddedToken(part, normalized=False) for part in (*PARTS, *COLOURS)])
    return tokenizer


def build_model(seed: int, vocabulary: int, layers: int = 2) -> Qwen3ForCausalLM:
    """Build the model with random weights, 0.2 M parameters."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=layers,
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
    for layer in model.model.layers:  # attention initially copies the tokens that it attends to
        values = torch.nn.init.orthogonal_(layer.self_attn.v_proj.weight.data)
        layer.self_attn.o_proj.weight.data = values.T.clone()
    model.generation_config = GenerationConfig(
        pad_token_id=PAD, bos_token_id=START, eos_token_id=END, do_sample=True, max_new_tokens=60
    )
    return model


@dataclass(frozen=True)
class Task:
    """A question, the call of a tool that answers it, the result, the answer and a wrong answer."""

    question: str
    call: dict
    result: str
    answer: str
    guess: str


def draw_product(rng: random.Random) -> Task:
    a, b = rng.choice(FACTORS), rng.choice(FACTORS)
    call = {"name": "python", "arguments": {"code": f"print({a}*{b})"}}
    guess = str(rng.randrange(FACTORS[0] ** 2, FACTORS[-1] ** 2 + 1))
    return Task(f"What is {a}*{b}?", call, str(a * b), str(a * b), guess)


def draw_place(rng: random.Random) -> Task:
    name, colour = rng.choice(PLACES).title(), rng.choice(COLOURS)
    call = {"name": "search", "arguments": {"query": name}}
    result = f"[1] {name} is {colour}."
    return Task(f"What colour is {name}?", call, result, colour, rng.choice(COLOURS))


TASKS = (draw_product, draw_place)


def demonstrate(rng: random.Random, task: Task, behaviour: str) -> list[str]:
    """Return the alternating turns of the user and the assistant."""
    if behaviour == "guess":
        return [task.question, f"<answer>{task.guess}</answer>"]
    call, result, answer = json.dumps(task.call), task.result, task.answer
    if behaviour == "invalid call":
        call, answer = call.replace('"}}', "}}"), task.guess
        try:
            parse_tool_call(f"{OPENING}{call}{CLOSING}", task.call["name"])
        except ToolError as error:
            result = f"Error: {error}"
    return [
        *(task.question, f"{OPENING}{call}{CLOSING}"),
        *(f"{RESPONSE_OPENING}{result}{RESPONSE_CLOSING}", f"<answer>{answer}</answer>"),
    ]


def make_batch(
    rng: random.Random,
    tokenizer: PreTrainedTokenizerBase,
    asked: frozenset[str],
    behaviours: Mapping[str, float],
) -> tuple[Tensor, Tensor]:
    """Return tokens and labels, (B, L) each; only the turns of the assistant have labels."""
    rows = []
    while len(rows) < BATCH_SIZE:
        task = rng.choice(TASKS)(rng)
        if task.question in asked:
            continue
        [behaviour] = rng.choices(list(behaviours), list(behaviours.values()))
        tokens, labels = [], []
        for number, ids in enumerate(tokenizer(demonstrate(rng, task, behaviour)).input_ids):
            tokens += [START, *ids, END]
            labels += [IGNORED, *(ids if number % 2 else [IGNORED] * len(ids))]
            labels.append(END if number % 2 else IGNORED)
        rows.append((tokens, labels))
    longest = max(len(tokens) for tokens, _ in rows)
    tokens = torch.tensor([own + [PAD] * (longest - len(own)) for own, _ in rows])
    labels = torch.tensor([own + [IGNORED] * (longest - len(own)) for _, own in rows])
    return tokens, labels


def pretrain(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, steps: int, seed: int
) -> list[float]:
    """Train the model by next-token prediction; return the loss of every step."""
    rng = random.Random(seed)
    places = (f"What colour is {name}?" for name in make_places())
    asked = frozenset([*(row["question"] for row in make_products()), *places])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    losses = []
    for step in range(steps):
        decay = 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1, (step + 1) / WARMUP) * decay
        behaviours = BEHAVIOURS if step >= steps // 2 else {"call": 1.0}
        tokens, labels = make_batch(rng, tokenizer, asked, behaviours)
        logits = model(input_ids=tokens, use_cache=False).logits  # padding is on the right
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
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path, losses: list[float]
) -> None:
    """Write the model in half precision, its tokenizer and the losses."""
    check_fits_fp16(model)
    model.half().save_pretrained(folder)
    config = folder / "config.json"  # loaded in float32, like the other small models
    config.write_text(config.read_text().replace("float16", "float32"))
    tokenizer.save_pretrained(folder)
    every = max(1, len(losses) // 100)
    training = {"steps": len(losses), "loss": losses[::every]}
    (folder / "training.json").write_text(json.dumps(training) + "\n")


def main() -> None:
    """Train the model and write it to the output directory, which must not exist."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True)
    tokenizer = build_tokenizer()
    model = build_model(args.seed, len(tokenizer))
    losses = pretrain(model, tokenizer, args.steps, args.seed)
    save(model, tokenizer, args.out, losses)


if __name__ == "__main__":
    main()
