"""The small editing model: its data, its reward and its pretraining."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FluxKontextPipeline
from PIL import Image
from runner import ROOT
from tiny_edit import data, pretrain
from tiny_edit.data import draw_edits, source_images
from tiny_edit.edits import KINDS, WORDS, Scene, geneval_task, list_edits, recoloured, source_scenes
from tiny_edit.tables import TEXT_LENGTH, EditTables, tokenize

from flow_grpo.rewards.scorers.geneval import GenEval

DATA = ROOT / "dataset" / "edits"


def rows_of(folder: Path, split: str) -> list[dict]:
    lines = folder.joinpath(f"{split}_metadata.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_the_script_reproduces_the_shipped_edits(tmp_path, capsys):
    command = ["--out", str(tmp_path / "made")]
    data.main(command)
    for split in ("train", "test"):
        rows = rows_of(tmp_path / "made", split)
        assert rows == rows_of(DATA, split)
        for row in rows:
            made, shipped = (
                np.asarray(Image.open(folder / row["image"]), dtype=int)
                for folder in (tmp_path / "made", DATA)
            )
            assert made.shape == (32, 96, 3)
            assert np.abs(made - shipped).max() <= 1
    with pytest.raises(SystemExit):
        data.main(command)
    assert "already exists" in capsys.readouterr().err


def test_train_and_test_scenes_are_disjoint():
    train, test = source_scenes().values()
    assert not set(train) & set(test)
    assert {edit.source for edit, _ in draw_edits("test", 96, seed=1)} <= set(test)


@pytest.fixture(scope="module")
def edits() -> list:
    return draw_edits("test", 48, seed=5)


def scored(edits: list, scenes: list[Scene], **options) -> dict[str, np.ndarray]:
    """Score images of `scenes` as results of the edits."""
    results = [(replace(e, source=s), g) for (e, g), s in zip(edits, scenes, strict=True)]
    rows = [geneval_task(edit) for edit, _ in edits]
    reward = GenEval(detector="shapes", **options)
    scores, extras = reward(source_images(results), [""] * len(rows), rows)
    return {
        "score": np.array(scores),
        **{n: np.array(extras[n]) for n in ("strict", "asked", "kept")},
    }


def test_correct_results_score_1(edits):
    assert {edit.kind for edit, _ in edits} == set(KINDS)
    for part in scored(edits, [edit.target for edit, _ in edits]).values():
        assert (part == 1).all()


def test_an_unchanged_source_keeps_everything_and_fulfils_nothing(edits):
    parts = scored(edits, [edit.source for edit, _ in edits])
    assert (parts["kept"] == 1).all()
    assert (parts["asked"] == 0).all()
    assert (parts["strict"] == 0).all()
    assert (parts["score"] < 1).all()


def test_the_rest_of_the_scene_is_weighted_by_keep(edits):
    """A recoloured shape that was not to change is an error unless keep=0."""
    scenes = [
        next(s for s in recoloured(edit.target) if s[edit.cell] == edit.target[edit.cell])
        for edit, _ in edits
    ]
    ignored, half, whole = (scored(edits, scenes, keep=share) for share in (0, 0.5, 1))
    assert (ignored["score"] == 1).all()
    assert (half["asked"] == 1).all()
    assert (half["kept"] == 0).all()
    assert (half["strict"] == 0).all()
    assert (whole["score"] < 1).all()
    np.testing.assert_allclose(half["score"], (1 + whole["score"]) / 2)


@pytest.fixture(scope="module")
def pipeline() -> FluxKontextPipeline:
    return pretrain.build_pipeline(heads=1, seed=0)


@torch.no_grad()
def test_instructions_are_tokenized_as_the_pipeline_does(pipeline):
    texts = sorted({edit.text for scene in source_scenes()["test"] for edit in list_edits(scene)})
    assert {word for text in texts for word in text.split()} == set(WORDS)
    clip_ids, t5_ids = tokenize(pipeline, texts)
    assert (t5_ids == pipeline.tokenizer_2.eos_token_id).any(1).all()  # none is truncated
    assert (t5_ids != pipeline.tokenizer_2.unk_token_id).all()
    embeds, pooled, _ = pipeline.encode_prompt(texts, texts, max_sequence_length=TEXT_LENGTH)
    torch.testing.assert_close(pipeline.text_encoder_2(t5_ids)[0], embeds)
    torch.testing.assert_close(pipeline.text_encoder(clip_ids).pooler_output, pooled)


def test_a_fraction_of_the_targets_is_wrong(pipeline, monkeypatch):
    monkeypatch.setattr("tiny_edit.tables.GROUNDS", (1.0,))
    scene = source_scenes()["train"][0]
    for wrong in (0.0, 1.0):
        tables = EditTables(pipeline, list(list_edits(scene)), wrong)
        batch = tables.batch(64, torch.Generator().manual_seed(0))
        same = (batch.target == batch.source).all(2).all(1)
        assert same.any() == bool(wrong)
        assert not same.all()


@pytest.mark.slow
def test_pretraining_writes_a_pipeline_that_edits(tmp_path, capsys):
    folder = tmp_path / "model"
    pretrain.main(["--toy", "--out", str(folder)])
    done = json.loads(capsys.readouterr().out.splitlines()[-1])
    card = folder.joinpath("README.md").read_text()
    assert all(f"| {name} | {value:.2f} |" in card for name, value in done["scores"].items())
    assert str(folder) not in card
    assert folder.joinpath("samples.png").is_file()
    assert done["steps"] == 3
