"""The small prompt enhancer, its data, and the script that trains it in turns with tiny-sd3."""

import random
from collections import Counter

import pytest
import torch
from make_sign_requests import REQUESTS, make_rows
from pretrain_tiny_enhancer import IGNORED, REWRITES, build_tokenizer, make_batch
from runner import ROOT
from tiny.words import split_words
from two_players import OcrOfRequest, generate

MODEL = ROOT / "assets/tiny-enhancer"


def test_only_the_rewritten_prompt_is_trained():
    tokenizer = build_tokenizer()
    tokens, labels = make_batch(random.Random(0), tokenizer)
    assert sum(REWRITES.values()) == pytest.approx(1)
    texts = Counter()
    for row, own in zip(tokens, labels, strict=True):
        assert torch.equal(row[own != IGNORED], own[own != IGNORED])
        request = tokenizer.decode(row[own == IGNORED], skip_special_tokens=True)
        prompt = tokenizer.decode(own[own != IGNORED], skip_special_tokens=True)
        words = {w for w in {*split_words()[0], *split_words()[1]} if f" {w} " in f" {request} "}
        found = [t for t in REWRITES if any(t.format(word=word) == prompt for word in words)]
        assert len(found) == 1, (request, prompt)
        texts[found[0]] += 1
    assert len(texts) == len(REWRITES)


def test_the_model_copies_held_out_words_into_other_wordings():
    words = split_words()[1][:32]
    prompts = generate(MODEL, [REQUESTS[0].format(word=word) for word in words])
    kept = [prompt for prompt, word in zip(prompts, words, strict=True) if word in prompt]
    assert len(kept) >= 30
    wanted = next(iter(REWRITES))
    assert wanted.format(word=words[0]) != prompts[0]  # there is something to learn
    assert sum(path.stat().st_size for path in MODEL.iterdir()) < 3 * 2**20


def test_requests_name_the_word_of_their_prompt():
    rows = list(make_rows("test", split_words()[1]))
    assert len(rows) == 96
    for row in rows:
        word = row["prompt"].split('"')[1]
        assert row["question"] in {request.format(word=word) for request in REQUESTS}


def test_rewritten_prompts_are_scored_against_the_request():
    scorer = OcrOfRequest.__new__(OcrOfRequest)  # without its workers
    assert scorer.skip_reason("sign DOG", {"target": 'a sign that says "DOG"'}) is None
    assert "quotes" in scorer.skip_reason('a sign that says "DOG"', {"target": "dog"})
    scorer._read = lambda images: ["D0G", "CAT"]
    rows = [{"target": '"DOG"'}, {"target": '"CAT"'}]
    assert scorer([None] * 2, ["x", "y"], rows) == pytest.approx([2 / 3, 1.0])
