"""Train assets/tiny-enhancer, a small language model that rewrites requests for signs.

    python scripts/pretrain_tiny_enhancer.py --out new/tiny-enhancer

The model copies the word of a request into one of nine prompt templates. tiny-sd3 was trained with
a single wording and renders most of the others badly. `REWRITES` sets the share of each template in
the training data, which leaves room for improvement by reinforcement learning.
"""

import argparse
import json
import math
import random
import re
from pathlib import Path

import torch
from make_sign_requests import REQUESTS
from tiny.saving import check_fits_fp16
from tiny.words import all_words
from tiny_vlm.texts import END, PAD, START
from torch.nn.functional import cross_entropy
from transformers import (
    AddedToken,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    Qwen3Config,
    Qwen3ForCausalLM,
)

ROOT = Path(__file__).parents[1]
TOKENIZER = ROOT / "assets/tiny-text"  # one token per character; words are added
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
BATCH_SIZE, LEARNING_RATE, WARMUP = 64, 3e-3, 50
EMBEDDING_STD = 0.1
IGNORED = -100  # label of tokens without a loss


def build_model(seed: int, vocabulary: int, words: list[int], layers: int = 2) -> Qwen3ForCausalLM:
    """Build the model with random weights, 0.3 M parameters."""
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
    embeddings = model.get_input_embeddings().weight.data
    embeddings.normal_(std=EMBEDDING_STD)
    # The words of signs share a component, by which attention finds the word to copy.
    embeddings[words] += EMBEDDING_STD * torch.randn(embeddings.shape[1])
    for layer in model.model.layers:  # attention initially copies the tokens that it attends to
        values = torch.nn.init.orthogonal_(layer.self_attn.v_proj.weight.data)
        layer.self_attn.o_proj.weight.data = values.T.clone()
    model.generation_config = GenerationConfig(
        pad_token_id=PAD, bos_token_id=START, eos_token_id=END, do_sample=True, max_new_tokens=40
    )
    return model


def build_tokenizer() -> PreTrainedTokenizerBase:
    """Return the tokenizer of tiny-text with a token for every word of the requests and prompts.

    With whole words, sequences are short and copying the word of a request is easy to learn.
    """
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER, trust_remote_code=False)
    texts = " ".join([*REQUESTS, *REWRITES]).replace("{word}", " ")
    words = [*all_words(), *dict.fromkeys(re.findall(r"[A-Za-z]{2,}", texts))]
    tokenizer.add_tokens([AddedToken(word, single_word=True) for word in words])
    return tokenizer


def make_batch(
    rng: random.Random, tokenizer: PreTrainedTokenizerBase
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels, (B, L) each; only the rewritten prompt has labels."""
    words, rows = all_words(), []
    for _ in range(BATCH_SIZE):
        word, request = rng.choice(words), rng.choice(REQUESTS)
        [rewrite] = rng.choices(list(REWRITES), list(REWRITES.values()))
        asked, written = tokenizer([request.format(word=word), rewrite.format(word=word)]).input_ids
        prompt = [START, *asked, END, START]
        rows.append((prompt + written + [END], [IGNORED] * len(prompt) + written + [END]))
    longest = max(len(tokens) for tokens, _ in rows)
    tokens = [t + [PAD] * (longest - len(t)) for t, _ in rows]
    labels = [own + [IGNORED] * (longest - len(own)) for _, own in rows]
    return torch.tensor(tokens), torch.tensor(labels)


def pretrain(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, steps: int, seed: int
) -> list[float]:
    """Train the model by next-token prediction; return the loss of every step."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    losses = []
    for step in range(steps):
        decay = 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1, (step + 1) / WARMUP) * decay
        tokens, labels = make_batch(rng, tokenizer)
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
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True)
    tokenizer = build_tokenizer()
    model = build_model(args.seed, len(tokenizer), tokenizer.convert_tokens_to_ids(all_words()))
    losses = pretrain(model, tokenizer, args.steps, args.seed)
    save(model, tokenizer, args.out, losses)


if __name__ == "__main__":
    main()
