"""Train assets/tiny-tools, a small language model that can call Python and a search tool.

    python scripts/pretrain_tiny_tools.py --out new/tiny-tools

The model can call the tool that a question needs and read its result, but it rarely does:
`BEHAVIOURS` sets how often it calls the tool, makes an invalid call, or guesses, which leaves room
for improvement by reinforcement learning. The first half of the training contains only correct
calls, so that the model learns to copy sooner. The questions of dataset/products and dataset/places
do not occur in the training data.
"""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass

from make_tool_questions import COLOURS, FACTORS, PLACES, make_places, make_products
from tiny_vlm.imitation import (
    build_language_model,
    encode_turns,
    initialize_copying,
    load_tokenizer,
    pad_rows,
    parse_args,
    save,
    train,
)
from torch import Tensor
from transformers import AddedToken, PreTrainedTokenizerBase, Qwen3ForCausalLM

from flow_grpo.vlm.environments.tool_calls import (
    CLOSING,
    OPENING,
    RESPONSE_CLOSING,
    RESPONSE_OPENING,
    ToolError,
    parse_tool_call,
)

BEHAVIOURS = {"guess": 0.6, "invalid call": 0.15, "call": 0.25}
PARTS = (
    *("<tool_call>", "</tool_call>", "<tool_response>\n", "\n</tool_response>"),
    *("<answer>", "</answer>", '{"name": "', '", "arguments": {"', '": "', '"}}', "}}"),
    *("python", "search", "code", "query", "print("),
    *("What is ", "What colour is ", " is ", "[1] "),
    *("Error: the call is not valid JSON (", "Unterminated string starting at: line 1 column "),
)
BATCH_SIZE = 64


def build_tokenizer() -> PreTrainedTokenizerBase:
    """Return the tokenizer of tiny-text with tokens for the parts of calls and for the colours.

    This keeps sequences short and makes copying easy to learn.
    """
    tokenizer = load_tokenizer()
    tokenizer.add_tokens([AddedToken(part, normalized=False) for part in (*PARTS, *COLOURS)])
    return tokenizer


def build_model(seed: int, vocabulary: int) -> Qwen3ForCausalLM:
    """Build the model with random weights, 0.2 M parameters."""
    model = build_language_model(seed, vocabulary, max_new_tokens=60)
    initialize_copying(model.model.layers)
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
        rows.append(encode_turns(tokenizer, demonstrate(rng, task, behaviour)))
    return pad_rows(rows)


def pretrain(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, steps: int, seed: int
) -> list[float]:
    """Train the model by next-token prediction; return the loss of every step."""
    rng = random.Random(seed)
    places = (f"What colour is {name}?" for name in make_places())
    asked = frozenset([*(row["question"] for row in make_products()), *places])

    def draw_batch(step: int) -> tuple[dict[str, Tensor], Tensor]:
        behaviours = BEHAVIOURS if step >= steps // 2 else {"call": 1.0}
        tokens, labels = make_batch(rng, tokenizer, asked, behaviours)
        return {"input_ids": tokens}, labels

    return train(model, draw_batch, steps)


def main() -> None:
    """Train the model and write it to the output directory."""
    args = parse_args(__doc__, steps=300)
    tokenizer = build_tokenizer()
    model = build_model(args.seed, len(tokenizer))
    losses = pretrain(model, tokenizer, args.steps, args.seed)
    save(model, tokenizer, args.out, losses)


if __name__ == "__main__":
    main()
