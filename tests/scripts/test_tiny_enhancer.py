"""The small prompt enhancer, its data, and the script that trains it in turns with tiny-sd3."""

import json
import random
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import fork_server
import pytest
import torch
from make_sign_requests import REQUESTS, make_rows
from PIL import Image
from pretrain_tiny_enhancer import REWRITES, build_tokenizer, make_batch
from runner import ROOT, environment, run_script
from tiny.words import split_words
from tiny_vlm.imitation import IGNORED
from two_players import (
    COMBINATIONS,
    OcrOfRequest,
    check_same_settings,
    drawing_settings,
    generate,
    is_finished,
    load_requests,
    parse_args,
    read_rows,
    trained_config,
)
from user_errors import raises_user_error

from flow_grpo.data.questions import Question
from flow_grpo.training.checkpoint import find_weights
from flow_grpo.untrusted_files import read_json
from flow_grpo.vlm.config_checks import check_config
from flow_grpo.vlm.presets import get_config

MODEL = ROOT / "assets/tiny-enhancer"
CONFIGS = """
from flow_grpo.diffusion.presets import get_config as diffusion_preset
from flow_grpo.vlm.presets import get_config as preset


def get_config(name):
    if name == "diffusion":
        config = diffusion_preset("tiny_awm")
        config.sample.num_steps = 2
        config.sample.num_batches_per_epoch = 1
        config.sample.train_batch_size = config.train.batch_size = 16  # two groups of 8
        config.awm.times = 1
        config.reward_options = {"request": {"workers": 1}}
        return config
    config = preset("tiny_enhancer")
    config.log_images = 0
    config.reward_fn = {"drawn:jpeg_incompressibility": 1.0}  # needs no OCR workers
    config.draw.num_steps = 2
    config.sample.questions_per_epoch = 2
    config.sample.group_size = 4
    config.question_format = "please: {question}"
    config.system_prompt = "sign"
    return config
"""

INVALID = """
from flow_grpo.vlm.presets import get_config as preset


def get_config(name):
    config = preset("tiny_enhancer")
    config.use_lora = name == "lora"
    if name == "text":
        config.reward_fn = {"prompt_length": 1.0}
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
    config = check_config(get_config("tiny_enhancer"))
    prompts = generate(config, [Question(REQUESTS[0].format(word=word)) for word in words])
    kept = [prompt for prompt, word in zip(prompts, words, strict=True) if word in prompt]
    assert len(kept) >= 30
    wanted = next(iter(REWRITES))
    assert wanted.format(word=words[0]) != prompts[0]  # there is something to learn
    assert sum(path.stat().st_size for path in MODEL.iterdir()) < 3 * 2**20


def test_requests_are_rewritten_with_the_prompt_of_the_training():
    """With another format and system prompt, the same chat as a request that has them itself."""
    config = replace(check_config(get_config("tiny_enhancer")), question_format="{question} sign")
    words = split_words()[1][:4]
    plain = replace(config, question_format="{question}")
    formatted = generate(config, [Question(word) for word in words])
    assert formatted == generate(plain, [Question(f"{word} sign") for word in words])
    assert formatted != generate(plain, [Question(word) for word in words])
    system = generate(replace(plain, system_prompt="a board"), [Question(word) for word in words])
    assert system == generate(plain, [Question(word, system="a board") for word in words])
    short = replace(plain, sample=replace(plain.sample, max_new_tokens=1))
    assert max(map(len, generate(short, [Question(word) for word in words]))) < 12


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
        (data / f"{split}.jsonl").write_text("\n".join(lines[:2]))
    command = ["scripts/two_players.py", f"--data={data}", f"--logdir={logs}", "--seeds=7"]
    command += [f"--enhancer-config={configs}:enhancer", f"--diffusion-config={configs}:diffusion"]
    command += ["--rounds=2", "--enhancer-epochs=1", "--diffusion-epochs=1"]
    done = run_script(*command, f"--out={tmp_path / 'table'}")
    assert done.returncode == 0, done.stderr

    enhancers, diffusions = (
        [read_json(logs / f"seed7-round{n}-{name}/config.json") for n in (1, 2)]
        for name in ("enhancer", "diffusion")
    )
    models, loras = (
        [str(find_weights(logs / f"seed7-round{n}-{name}")) for n in (1, 2)]
        for name in ("enhancer", "diffusion")
    )
    assert [each["pretrained"]["model"] for each in enhancers] == [
        "assets/tiny-enhancer",
        models[0],
    ]
    assert [each["draw"]["lora"] for each in enhancers] == ["", loras[0]]
    assert [each["train"]["lora_path"] for each in diffusions] == ["", loras[0]]
    assert [each["seed"] for each in enhancers] == [each["seed"] for each in diffusions]
    assert diffusions[0]["seed"] == 7 != diffusions[1]["seed"]
    rows = read_rows(data / "train.jsonl")
    for number, (model, each) in enumerate(zip(models, diffusions, strict=True), 1):
        written = read_rows(Path(each["dataset"], "train.jsonl"))
        assert [row["target"] for row in written] == [row["prompt"] for row in rows]
        config = trained_config(logs / f"seed7-round{number}-enhancer", Path(model))
        prompts = generate(config, load_requests(config, data, "train"))
        assert [row["prompt"] for row in written] == prompts

    evaluations = [
        read_json(logs / f"seed7-round2/eval-{name}/evaluation.json")
        for name in ("frozen", "trained")
    ]
    assert [each["settings"]["draw.lora"] for each in evaluations] == ["", loras[1]]
    recorded = [each["draw_loras"]["drawn:jpeg_incompressibility"] for each in evaluations]
    assert [each["weights"] for each in recorded] == ["", loras[1]]
    for each in evaluations:
        assert [own["weights"] for own in each["checkpoints"].values()] == ["", models[1]]
        assert each["datasets"] == evaluations[0]["datasets"]
    assert (tmp_path / "table.md").read_text().count("\n| ") == 1 + len(COMBINATIONS)
    assert Image.open(tmp_path / "table.png").width > len(COMBINATIONS) * 192


def test_invalid_arguments_and_changed_settings_are_rejected(tmp_path, monkeypatch):
    def main(*words: str):
        options = [f"--logdir={tmp_path / 'logs'}", f"--out={tmp_path / 'out'}", *words]
        monkeypatch.setattr(sys, "argv", ["two_players.py", *options])
        args = parse_args()
        args.logdir.mkdir(exist_ok=True)
        check_same_settings(args)

    with raises_user_error("--rounds"):
        main("--rounds=0")
    with raises_user_error("--data", "train.jsonl"):
        main("--data=dataset/ocr")
    Image.new("RGB", (8, 8)).save(tmp_path / "1.png")
    for row, text in (({"prompt": "DOG", "images": ["1.png"]}, "images"), ({}, "prompt")):
        for split in ("train", "test"):
            (tmp_path / f"{split}.jsonl").write_text(json.dumps({"question": "DOG", **row}))
        with raises_user_error(text, field=f"{tmp_path / 'train.jsonl'}:1"):
            main(f"--data={tmp_path}")
    configs = tmp_path / "invalid.py"
    configs.write_text(INVALID)
    with raises_user_error("--enhancer-config", "use_lora"):
        main(f"--enhancer-config={configs}:lora")
    with raises_user_error("--enhancer-config", "drawn:NAME"):
        main(f"--enhancer-config={configs}:text")
    (tmp_path / "logs/seed1-round1-enhancer").mkdir(parents=True)
    with raises_user_error("--logdir", "settings.json"):
        main()
    (tmp_path / "logs/seed1-round1-enhancer").rmdir()
    main("--rounds=1", "--diffusion-epochs=3")
    main("--rounds=3", "--seeds=5")
    with raises_user_error("--diffusion-epochs", "3"):
        main("--diffusion-epochs=4")


def test_pictures_have_the_settings_of_the_reward_that_draws():
    config = get_config("tiny_enhancer").to_dict()
    config["eval_reward_fn"] = {"prompt_length": 1.0, "drawn:ocr": 1.0}
    config["reward_options"] = {"drawn:ocr": {"num_steps": 3}}
    drawn = drawing_settings(config, lora="weights")
    assert (drawn.num_steps, drawn.width, drawn.lora) == (3, 96, "weights")


def test_an_interrupted_run_is_not_finished(tmp_path):
    assert not is_finished(tmp_path, 1)
    (tmp_path / "metrics.jsonl").write_text('{"epoch": 0}\n{"epoch": 1}\n')
    assert is_finished(tmp_path, 1)
    assert not is_finished(tmp_path, 2)
