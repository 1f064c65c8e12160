"""Preference pairs of signs for the small model."""

import json
import sys
from pathlib import Path

import make_sign_pairs
import numpy as np
import pytest
from PIL import Image

from flow_grpo.data.preferences import load_preferences
from flow_grpo.rewards.scorers.ocr import quoted_text


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    out = tmp_path / "pairs"
    arguments = ["make_sign_pairs.py", f"--out={out}", "--pairs=12", "--held-out=4"]
    monkeypatch.setattr(sys, "argv", arguments)
    make_sign_pairs.main()
    return out


def sharpness(file: Path) -> float:
    """Return the largest difference of neighbouring pixels in a row."""
    pixels = np.asarray(Image.open(file), dtype=float)
    return np.abs(np.diff(pixels, axis=1)).max()


def test_the_chosen_sign_is_crisp_and_the_rejected_one_is_flawed(folder):
    found = load_preferences(folder)
    flaws = [pair.prompt.metadata["flaw"] for pair in found.pairs]
    assert flaws == ["blurred", "blurred", "pale", "misspelled"] * 3
    for pair, flaw in zip(found.pairs, flaws, strict=True):
        chosen, rejected = sharpness(pair.chosen), sharpness(pair.rejected)
        corners = [Image.open(file).getpixel((0, 0)) for file in (pair.chosen, pair.rejected)]
        assert flaw == "blurred" or corners[0] == corners[1]  # the same colours
        assert chosen > 40
        assert rejected > 40 if flaw == "misspelled" else rejected < chosen / 2


def test_splits_share_no_word_and_are_reproducible(folder, tmp_path):
    train, test = (load_preferences(folder, split).pairs for split in ("train", "test"))
    words = [{quoted_text(pair.prompt.prompt) for pair in part} for part in (train, test)]
    assert [len(part) for part in words] == [12, 4]
    assert not words[0] & words[1]
    make_sign_pairs.write_pairs(tmp_path / "again", 12, 4)
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    for row in rows:
        for name in ("chosen", "rejected"):
            assert (tmp_path / "again" / row[name]).read_bytes() == (
                folder / row[name]
            ).read_bytes()
