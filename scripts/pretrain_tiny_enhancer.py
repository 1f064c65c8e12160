"""Train assets/tiny-enhancer, a small language model that rewrites requests for signs.

    python scripts/pretrain_tiny_enhancer.py --out new/tiny-enhancer

The model copies the word of a request into one of nine prompt templates. tiny-sd3 was trained with
a single wording and renders most of the others badly. `REWRITES` sets the share of each template in
the training data, which leaves room for improvement by reinforcement learning.
"""

import random
import re

import torch
from make_sign_requests import REQUESTS
from tiny.words import all_words
from tiny_vlm.imitation import (
    EMBEDDING_STD,
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

REWRITES = {  # share of each prompt; the first is the wording that tiny-sd3 was trained with
    'a sign that says "{word}"': 0.06,
    'a sign says "{word}"': 0.08,
    'sign that says "{word}"': 0.08,
    "a sign that says {word}": 0.10,
    'a crisp sign that says "{word}"': 0.10,
    'a sign that reads "{word}"': 0.10,
    "a crisp photo of a sign, {word}": 0.13,
    "the word {word} on a wooden board": 0.15,
    "sign {word}, crisp, detailed": 0.20,
}
BATCH_SIZE = 64


def build_model(seed: int, vocabulary: int, words: list[int]) -> Qwen3ForCausalLM:
    """Build the model with random weights, 0.3 M parameters."""
    model = build_language_model(seed, vocabulary, max_new_tokens=40)
    # The words of signs share a component, by which attention finds the word to copy.
    embeddings = model.get_input_embeddings().weight.data
    embeddings[words] += EMBEDDING_STD * torch.randn(embeddings.shape[1])
    initialize_copying(model.model.layers)
    return model


def build_tokenizer() -> PreTrainedTokenizerBase:
    """Return the tokenizer of tiny-text with a token for every word of the requests and prompts.

    With whole words, sequences are short and copying the word of a request is easy to learn.
    """
    tokenizer = load_tokenizer()
    texts = " ".join([*REQUESTS, *REWRITES]).replace("{word}", " ")
    words = [*all_words(), *dict.fromkeys(re.findall(r"[A-Za-z]{2,}", texts))]
    tokenizer.add_tokens([AddedToken(word, single_word=True) for word in words])
    return tokenizer


def make_batch(rng: random.Random, tokenizer: PreTrainedTokenizerBase) -> tuple[Tensor, Tensor]:
    """Return tokens and labels, (B, L) each; only the rewritten prompt has labels."""
    words, rows = all_words(), []
    for _ in range(BATCH_SIZE):
        word, request = rng.choice(words), rng.choice(REQUESTS)
        [rewrite] = rng.choices(list(REWRITES), list(REWRITES.values()))
        rows.append(encode_turns(tokenizer, [request.format(word=word), rewrite.format(word=word)]))
    return pad_rows(rows)


def pretrain(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, steps: int, seed: int
) -> list[float]:
    """Train the model by next-token prediction; return the loss of every step."""
    rng = random.Random(seed)

    def draw_batch(_: int) -> tuple[dict[str, Tensor], Tensor]:
        tokens, labels = make_batch(rng, tokenizer)
        return {"input_ids": tokens}, labels

    return train(model, draw_batch, steps)


def main() -> None:
    """Train the model and write it to the output directory."""
    args = parse_args(__doc__, steps=500)
    tokenizer = build_tokenizer()
    model = build_model(args.seed, len(tokenizer), tokenizer.convert_tokens_to_ids(all_words()))
    losses = pretrain(model, tokenizer, args.steps, args.seed)
    save(model, tokenizer, args.out, losses)


if __name__ == "__main__":
    main()
