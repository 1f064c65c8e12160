"""Pretraining of the small vision-language model at toy length on the CPU."""

import contextlib
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from runner import ROOT
from safetensors import safe_open
from tiny_vlm.batches import TokenTables
from tiny_vlm.measure import draw_questions, generate_responses
from tiny_vlm.model import build_model, build_processor
from tiny_vlm.pretrain import main, parse_args
from tiny_vlm.static import StaticForward
from tiny_vlm.texts import (
    ANSWER_SHARES,
    ONE_COLOUR,
    ONE_SHAPE,
    SUM,
    TEMPLATES,
    TWO_SHAPES,
    answer_text,
    final_answer,
)
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("tiny_vlm") / "model"
    with contextlib.redirect_stdout(io.StringIO()) as output:
        main(["--toy", "--out", str(folder)])
    return folder, json.loads(output.getvalue().splitlines()[-1])


def processed_questions(count: int, processor) -> dict:
    """Return the model inputs of `draw_questions(count, seed=3)`."""
    rows = draw_questions(count, seed=3)
    texts = []
    for row in rows:
        image = [{"type": "image"}] if row.image else []
        message = {"role": "user", "content": [*image, {"type": "text", "text": row.text}]}
        texts.append(processor.apply_chat_template([message], add_generation_prompt=True))
    images = [row.image for row in rows if row.image]
    return processor(
        text=texts, images=images, padding=True, padding_side="right", return_tensors="pt"
    )


def test_the_static_forward_pass_matches_transformers():
    torch.manual_seed(0)
    model = build_model(text_layers=2, vision_layers=3).eval()
    for parameter in model.parameters():  # biases are initialized to 0, which hides errors
        torch.nn.init.normal_(parameter, std=0.1)
    tables = TokenTables(torch.device("cpu"))
    drawn = tables.draw(11, torch.Generator().manual_seed(3))
    batch = tables.assemble(drawn, torch.zeros(11, tables.answer_length, dtype=torch.long))
    inputs = processed_questions(11, build_processor())
    length = inputs["input_ids"].shape[1]
    mask = inputs["attention_mask"].bool()
    assert torch.equal(batch.ids[:, :length][mask], inputs["input_ids"][mask])
    torch.testing.assert_close(batch.patches, inputs["pixel_values"])
    with torch.no_grad():
        wanted = model(**inputs).logits
        got = model.lm_head(StaticForward(model, tables.length).hidden(batch))[:, :length]
    torch.testing.assert_close(got[mask], wanted[mask], rtol=1e-4, atol=1e-4)


def test_target_responses_are_wrong_in_the_configured_fractions():
    tables = TokenTables(torch.device("cpu"))
    processor = build_processor()
    batch = tables.batch(4000, torch.Generator().manual_seed(0))
    texts = processor.tokenizer.batch_decode(batch.answers, skip_special_tokens=True)
    sums = [final_answer(text) is not None for text in texts[: batch.num_sums]]
    wanted = ANSWER_SHARES[3][0] + ANSWER_SHARES[3][1]
    assert sum(sums) / len(sums) == pytest.approx(wanted, abs=0.06)
    assert "<think>" in texts[-1] or "=" in texts[-1]


def test_answers_match_the_images():
    """If the answer is not 0, the image has pixels of the requested colour."""
    rows = [row for row in draw_questions(300, seed=1) if row.text.startswith("How many green")]
    assert len(rows) > 10
    for row in rows:
        pixels = torch.tensor(np.array(row.image).reshape(-1, 3))
        red, green, blue = pixels.unbind(1)
        has_green = bool(((green > 180) & (red < 100) & (blue < 100)).any())
        assert row.first + row.second <= 4
        if row.answer != "0":
            assert has_green
    assert {row.answer for row in draw_questions(300, seed=1) if row.image} == set("01234")


def test_final_answers_are_parsed():
    assert final_answer(answer_text(3, 4)) == "7"
    assert [final_answer(answer_text(3, 4, variant)) for variant in (1, 2, 3)] == ["3", None, None]
    assert len({template.text for template in TEMPLATES}) == len(TEMPLATES) == 127


@pytest.mark.slow
def test_stock_transformers_loads_the_model(made):
    folder, figures = made
    model = AutoModelForImageTextToText.from_pretrained(folder)
    processor = AutoProcessor.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert not list(folder.glob("*.py"))
    text = 'How many red circles?  <think> "7/8" </think>\n'
    assert processor.tokenizer.decode(processor.tokenizer(text).input_ids) == text
    assert len(generate_responses(model, processor, draw_questions(6, seed=2))) == 6
    assert figures["out"] == str(folder)
    assert 0 <= figures["greedy"] <= figures["pass_at_8"] + 1


@pytest.mark.slow
def test_the_directory_is_small_in_half_precision_and_has_a_card(made):
    folder, figures = made
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert {file.get_tensor(key).dtype for key in file.keys()} == {torch.float16}  # noqa: SIM118
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 8 * 2**20
    card = folder.joinpath("README.md").read_text()
    assert f"| greedy: correct, in correct tags | {figures['greedy']:.3f} |" in card
    shipped = (ROOT / "assets/tiny-vlm/README.md").read_text()
    for start, end in (("![samples]", "## Recipe"), ("## Limitations", "\0")):
        part = card[card.index(start) :].partition(end)[0]
        assert part in shipped
    assert str(folder) not in card
    assert folder.joinpath("samples.png").is_file()
    assert json.loads(folder.joinpath("training.json").read_text())[-1]["step"] == 2


def test_the_shipped_language_model_is_that_of_the_vlm():
    llm = AutoModelForCausalLM.from_pretrained(ROOT / "assets/tiny-text")
    vlm = AutoModelForImageTextToText.from_pretrained(ROOT / "assets/tiny-vlm")
    tokens = torch.arange(8, 48)[None]
    with torch.no_grad():
        text_logits, vlm_logits = (model(input_ids=tokens).logits for model in (llm, vlm))
    assert torch.allclose(text_logits, vlm_logits, atol=1e-4)


@pytest.mark.slow
def test_the_shipped_model_perceives_well_and_responds_badly():
    """Greedy decoding solves one kind of question; of eight samples one is correct for each."""
    folder = ROOT / "assets" / "tiny-vlm"
    model = AutoModelForImageTextToText.from_pretrained(folder)
    processor = AutoProcessor.from_pretrained(folder)
    rows = draw_questions(20, seed=5)
    texts = generate_responses(model, processor, rows)
    right = {task: set() for task in range(4)}
    for text, row in zip(texts, rows, strict=True):
        right[row.task].add(final_answer(text) == row.answer)
    assert right[ONE_COLOUR] == {True}
    assert right[ONE_SHAPE] == right[SUM] == {False}
    assert False in right[TWO_SHAPES]  # correct if the second addend is 0
    assert all(f"{row.first}+{row.second}" in text for text, row in zip(texts, rows, strict=True))
    torch.manual_seed(0)
    eight = [row for row in rows[::4] for _ in range(8)]
    sampled = generate_responses(model, processor, eight, sample=True)
    hits = [final_answer(text) == row.answer for text, row in zip(sampled, eight, strict=True)]
    assert sum(any(hits[i : i + 8]) for i in range(0, 40, 8)) >= 4
    assert sum(path.stat().st_size for path in folder.iterdir()) < 8 * 2**20


def test_an_existing_directory_is_not_overwritten(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse_args(["--toy", "--out", str(tmp_path)])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{tmp_path} already exists" in line
