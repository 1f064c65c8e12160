"""The small VLM that zooms, its dataset and its training data."""

import json
import random
from collections import Counter

import pytest
import torch
from make_tool_questions import BOXES, NUM_TRAIN, draw_digits, write_digits
from PIL import Image, ImageChops
from pretrain_tiny_zoom import BEHAVIOURS, IMAGE_TEXT, build, demonstrate, make_batch
from runner import ROOT
from tiny_vlm.imitation import IGNORED
from transformers import AutoModelForImageTextToText, AutoProcessor

from flow_grpo.vlm.environments.image_zoom import ImageZoom
from flow_grpo.vlm.environments.tool_calls import RESPONSE_CLOSING, RESPONSE_OPENING

DIGITS, MODEL = ROOT / "dataset/digits", ROOT / "assets/tiny-zoom"


def questions(split: str) -> list[dict]:
    return [json.loads(line) for line in (DIGITS / f"{split}.jsonl").read_text().splitlines()]


def test_the_script_draws_the_same_questions(tmp_path):
    rows = write_digits(tmp_path)
    assert rows == questions("train") + questions("test")
    splits = rows[:NUM_TRAIN], rows[NUM_TRAIN:]
    train, test = ({name for row in split for name in row["images"]} for split in splits)
    assert not train & test
    for split in splits:
        answers = Counter(row["answer"] for row in split)
        assert len(answers) == 10
        assert max(answers.values()) - min(answers.values()) <= 1
    for name in train | test:
        assert not ImageChops.difference(
            Image.open(tmp_path / name), Image.open(DIGITS / name)
        ).getbbox()


def test_each_digit_lies_in_its_box():
    rng = random.Random(0)
    for _ in range(50):
        image = draw_digits(rng, rng.choices(range(10), k=4))
        for box in BOXES.values():
            assert len(image.crop(box).getcolors()) == 2
            image.paste(image.getpixel((0, 0)), box)
        assert len(image.getcolors()) == 1


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_demonstrated_crops_are_those_of_the_tool(behaviour):
    rng, environment = random.Random(1), ImageZoom()
    for _ in range(8):
        turns, images = demonstrate(rng, behaviour)
        [asked] = [corner for corner in BOXES if turns[0].endswith(f"digit is {corner}?")]
        environment.reset({"images": images[:1]})
        observation, _, done = environment.step(turns[1])
        assert done == (behaviour == "guess")
        if not done:
            text, [crop] = observation
            assert turns[2] == text.replace("<image>", IMAGE_TEXT)
            assert crop.tobytes() == images[1].tobytes()
            other = crop.tobytes() != images[0].crop(BOXES[asked]).tobytes()
            assert other == (behaviour == "other corner")


def test_only_the_responses_are_trained():
    _, processor = build(0)
    inputs, labels = make_batch(random.Random(0), processor, BEHAVIOURS)
    assert len(inputs["image_grid_thw"]) > len(labels)
    for row, own in zip(inputs["input_ids"], labels, strict=True):
        assert torch.equal(row[own != IGNORED], own[own != IGNORED])
        trained = processor.tokenizer.decode(own[own != IGNORED], skip_special_tokens=True)
        context = processor.tokenizer.decode(row[own == IGNORED], skip_special_tokens=True)
        assert trained.startswith(("<answer>", "<tool_call>"))
        assert trained.endswith("</answer>")
        assert context.startswith("Which digit is ")
        assert ("<tool_response>" in context) == ("<tool_call>" in trained)


def test_the_model_reads_crops_but_guesses_at_first():
    processor = AutoProcessor.from_pretrained(MODEL, trust_remote_code=False)
    model = AutoModelForImageTextToText.from_pretrained(MODEL, dtype=torch.float32)

    def respond(turns: list[str], images: list[Image.Image]) -> str:
        text = "".join(f"<|im_start|>{turn}<|im_end|>" for turn in turns) + "<|im_start|>"
        inputs = processor(text=text, images=images, return_tensors="pt")
        tokens = model.generate(**inputs, do_sample=False, max_new_tokens=40)
        return processor.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    rows, guessed, read = questions("test")[:32], 0, 0
    image_text = "<|vision_start|><|image_pad|><|vision_end|>"
    for row in rows:
        image = Image.open(DIGITS / row["images"][0])
        question, answer = image_text + row["question"], f"<answer>{row['answer']}</answer>"
        [corner] = [corner for corner in BOXES if corner in row["question"]]
        guess = respond([question], [image])
        assert guess.startswith("<answer>")
        guessed += guess == answer
        call = json.dumps({"name": "zoom", "arguments": {"box": BOXES[corner]}})
        turns = [
            *(question, f"<tool_call>{call}</tool_call>"),
            f"{RESPONSE_OPENING}{image_text}{RESPONSE_CLOSING}",
        ]
        read += respond(turns, [image, image.crop(BOXES[corner])]) == answer
    assert guessed < 10  # chance: 3
    assert read >= 30
    assert sum(path.stat().st_size for path in MODEL.iterdir()) < 2**21
