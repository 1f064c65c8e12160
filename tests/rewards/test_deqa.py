"""DeQA-Score and Q-Align with remote code, which small model directories contain here."""

import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from small_deqa import MODELING, write_small_deqa
from user_errors import raises_user_error

from flow_grpo.rewards.scorers.deqa import DeQA, QAlign

IMAGES = [Image.new(mode, size, "white") for mode, size in (("RGB", (8, 8)), ("L", (3, 9)))]
IMAGES += [Image.new("RGB", (5, 5), "black"), Image.new("RGB", (5, 5), "#7f7f7f")]
RAW = [5.0, 5.0, 1.0, 1 + 4 * 127 / 255]


@pytest.fixture(scope="module", autouse=True)
def _module_cache(tmp_path_factory):
    """Transformers copies remote code to the user's cache and imports it from there."""
    cache = str(tmp_path_factory.mktemp("modules"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.path", [*sys.path])
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", cache)
        yield
        assert any(Path(cache).rglob("modeling_brightness.py"))


@pytest.fixture(scope="module")
def write(tmp_path_factory):
    return lambda modeling: write_small_deqa(tmp_path_factory.mktemp("deqa"), modeling)


@pytest.fixture(scope="module")
def folder(write):
    return write(MODELING)


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_the_score_is_the_raw_score_over_five(folder, batch_size):
    scorer = DeQA(model=folder, trust_remote_code=True, batch_size=batch_size)
    scores, extra = scorer(IMAGES, [""] * 4, [{}] * 4)
    assert extra == {"raw": pytest.approx(RAW, abs=4e-3)}  # half precision
    assert scores == pytest.approx([raw / 5 for raw in extra["raw"]], abs=1e-6)
    assert {type(s) for s in scores} == {float}


def test_the_network_is_frozen_and_in_half_precision(folder):
    network = DeQA(model=folder, trust_remote_code=True).network
    assert {p.dtype for p in network.parameters()} == {torch.float16}
    assert not any(p.requires_grad for p in network.parameters())
    assert not network.training


@pytest.mark.parametrize("options", [{}, {"trust_remote_code": False}, {"trust_remote_code": "no"}])
def test_remote_code_runs_only_with_trust_remote_code(write, tmp_path, options):
    trace = tmp_path / "ran"
    folder = write(f"open({str(trace)!r}, 'w').close()\n{MODELING}")
    with raises_user_error("trust_remote_code=True", field="model", value=folder):
        DeQA(model=folder, **options)
    assert not trace.exists()
    DeQA(model=folder, trust_remote_code=True)
    assert trace.exists()


def test_a_model_without_a_score_method_is_rejected(write):
    folder = write(MODELING.replace("def score", "def rate"))
    with raises_user_error("BrightnessForCausalLM", "`score`", field="model", value=folder):
        DeQA(model=folder, trust_remote_code=True)


def test_q_align_grades_the_task(write):
    """In this model, the grade for aesthetics is the inverse, so that the tasks differ."""
    invert = "bright = bright if task_ == 'quality' else 1 - bright"
    code = MODELING.replace("self, images)", "self, images, task_, input_)")
    code = code.replace(
        "return self", f"assert input_ == 'image'\n        {invert}\n        return self"
    )
    folder = write(code)
    options = {"model": folder, "trust_remote_code": True, "batch_size": 3}
    for task, expected in {"quality": RAW, "aesthetics": [6 - raw for raw in RAW]}.items():
        scores, extra = QAlign(task=task, **options)(IMAGES, [""] * 4, [{}] * 4)
        assert extra == {"raw": pytest.approx(expected, abs=4e-3)}
        assert scores == pytest.approx([raw / 5 for raw in extra["raw"]], abs=1e-6)
    with raises_user_error("quality, aesthetics", field="task", value="sharpness"):
        QAlign(task="sharpness", **options)


def test_remote_code_that_fails_is_reported(write):
    folder = write("import a_package_that_is_not_there\n" + MODELING)
    with raises_user_error("DeQA-Score", field="model", value=folder):
        DeQA(model=folder, trust_remote_code=True)
