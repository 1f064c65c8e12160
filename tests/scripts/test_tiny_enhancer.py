"""The small prompt enhancer, its data, and the script that trains it in turns with tiny-sd3."""

import json
import random
from collections import Counter

import fork_server
import pytest
import torch
from make_sign_requests import REQUESTS, make_rows
from pretrain_tiny_enhancer import IGNORED, REWRITES, build_tokenizer, make_batch
from PIL import Image
from runner import ROOT, environment, run_script
from tiny.words import split_words
from two_players import OcrOfRequest, generate

MODEL = ROOT / "assets/tiny-enhancer"
CONFIGS = """
from flow_grpo.diffusion.presets import get_config as diffusion_preset
from flow_grpo.vlm.presets import get_config as preset


def get_config(name):
    if name == "diffusion":
        config = diffusion_preset("tiny_awm")
        config.sample.num_steps = 2
        config.sample.num_batches_per_epoch = 1
        config.awm.times = 1
        return config
    config = preset("tiny_enhancer")
    config.log_images = 0
    config.draw.num_steps = 2
    config.sample.questions_per_epoch = 2
    config.sample.group_size = 4
    return config
"""


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


def test_each_round_continues_with_both_models_of_the_one_before(tmp_path, monkeypatch):
    monkeypatch.setenv(fork_server.INTERPRETER, fork_server.interpreter(environment()))
    data, logs, configs = tmp_path / "data", tmp_path / "logs", tmp_path / "small.py"
    data.mkdir()
    configs.write_text(CONFIGS)
    for split in ("train", "test"):
        lines = (ROOT / f"dataset/sign_requests/{split}.jsonl").read_text().splitlines()
        (data / f"{split}.jsonl").write_text("\n".join(lines[:4]))
    command = ["scripts/two_players.py", f"--data={data}", f"--logdir={logs}", "--seeds=7"]
    command += [f"--enhancer-config={configs}:enhancer", f"--diffusion-config={configs}:diffusion"]
    command += ["--rounds=2", "--enhancer-epochs=1", "--diffusion-epochs=1"]
    command += [f"--out={tmp_path / 'table'}"]
    done = run_script(*command)
    assert done.returncode == 0, done.stderr
    first, second = (
        {
            part: json.loads((logs / f"seed7-round{number}-{part}/config.json").read_text())
            for part in ("enhancer", "diffusion")
        }
        for number in (1, 2)
    )
    print(first, second, done.stdout)
