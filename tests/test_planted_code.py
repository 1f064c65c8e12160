"""A model's folder may bring Python code; whichever loader finds it, none of it runs."""

import json
import shutil
from pathlib import Path

import pytest
import small_vlm
import torch
from planted import plant_code, plant_part
from small_clip import clip_folder, refusal  # noqa: F401, a fixture
from transformers import CLIPModel
from untrained import small

from flow_grpo.answer import export as answers_export
from flow_grpo.answer.fields import ANSWER
from flow_grpo.answer.models import load_model, load_processors
from flow_grpo.config.saved import config_of_run
from flow_grpo.draw.export import export
from flow_grpo.draw.fields import DRAW
from flow_grpo.draw.models import check_model, load_adapter
from flow_grpo.draw.models.inputs import Size
from flow_grpo.rewards.loading import load_network, load_tokenizer
from flow_grpo.rewards.scorers.clip import Aesthetic, ClipScore
from flow_grpo.run.export import Source

CPU = torch.device("cpu")
# files and what they say is in the code; of a known model, a tokenizer needs none
CONFIG = {"config.json": "AutoConfig"}
TOKENIZER = {"tokenizer_config.json": "AutoTokenizer", **CONFIG}
PROCESSOR = {"preprocessor_config.json": "AutoImageProcessor"}


def plant(folder: Path, trace: Path, planted: dict[str, str]) -> Path:
    for file, kind in planted.items():
        plant_code(folder, trace, file, kind)
    return folder


@pytest.fixture
def trace(tmp_path, monkeypatch):
    """A folder that is there once the code ran; who asks whether it may is told yes."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    monkeypatch.syspath_prepend(tmp_path / "hf")
    yield tmp_path / "executed"
    assert not (tmp_path / "executed").exists()


ANSWERS = {
    "model": (CONFIG, lambda model: load_model(model, CPU, torch.float32)),
    "tokenizer": (TOKENIZER, load_processors),
    "pictures": (PROCESSOR, load_processors),
    "export": (CONFIG, lambda model: answers_export.export(Source(Path("no")), model, Path("no"))),
}


@pytest.mark.parametrize("loader", ANSWERS)
def test_a_vision_language_model_is_refused(tmp_path, trace, loader):
    planted, load = ANSWERS[loader]
    folder = plant(small_vlm.save(tmp_path / "model"), trace, planted)
    message = refusal(load, str(folder))
    assert message.startswith(
        f"pretrained.model='{folder}' brings Python code of its own, which is"
    )


REWARDS = {
    "network": (CONFIG, lambda m: load_network(CLIPModel, m, dtype=torch.float32, kind="a CLIP")),
    "tokenizer": (TOKENIZER, lambda m: load_tokenizer(m, option="model", tokens=1)),
    "scorer": (CONFIG, lambda m: ClipScore(model=m)),
}


@pytest.mark.parametrize("loader", REWARDS)
def test_a_model_of_a_reward_is_refused(folder, tmp_path, trace, loader):
    planted, load = REWARDS[loader]
    own = plant(shutil.copytree(folder, tmp_path / "clip"), trace, planted)
    assert f"model='{own}' brings Python code of its own, which is" in refusal(load, str(own))


@pytest.mark.parametrize("scorer", [ClipScore, Aesthetic])
def test_an_image_processor_of_a_known_class_is_loaded_without_the_code(
    folder, tmp_path, trace, scorer
):
    own = plant(shutil.copytree(folder, tmp_path / "clip"), trace, PROCESSOR)
    if scorer is ClipScore:
        assert ClipScore(model=str(own)).image_processor.crop_size
    else:
        assert "head" in refusal(Aesthetic, model=str(own), head=str(tmp_path))


PARTS = {
    "a file beside it": ("text_encoder", "planted", "Planted"),
    "transformers' AutoModel": ("text_encoder", "transformers", "AutoModel"),
    "transformers' AutoTokenizer": ("tokenizer", "transformers", "AutoTokenizer"),
    "a processor": ("tokenizer", "transformers", "CLIPProcessor"),
    "diffusers' AutoModel": ("transformer", "diffusers", "AutoModel"),
    "another pipeline": ("text_encoder", "diffusers", "DiffusionPipeline"),
    "a pipeline of its own": ("_class_name", "planted", "Planted"),
}


@pytest.mark.parametrize("planted", PARTS.values(), ids=PARTS)
def test_a_pipeline_with_a_part_of_its_own_is_refused_before_any_is_loaded(
    tiny_sd3, tmp_path, trace, planted
):
    folder = plant_part(shutil.copytree(tiny_sd3, tmp_path / "model"), trace, *planted)
    for load in (load_adapter, lambda model: check_model(model, Size(64, 64), {}, 2)):
        message = refusal(load, str(folder))
        assert planted[-1] in message
        assert message.startswith(str(folder))


@pytest.mark.parametrize(
    ("family", "part"), [("flux2", "tokenizer"), ("qwen_image_21", "processor")]
)
def test_of_a_processor_the_tokenizer_alone_is_loaded_and_by_no_class_of_its_own(
    tmp_path, trace, family, part
):
    folder = tmp_path / "model"
    small.build(family).save_pretrained(folder)
    (folder / part / "preprocessor_config.json").write_text('{"image_processor_type": "Planted"}')
    for file in ("tokenizer_config.json", "preprocessor_config.json"):
        plant_code(folder, trace, f"{part}/{file}", "AutoTokenizer")
    assert len(load_adapter(str(folder)).encode(["a cat"], None)) == 1


@pytest.mark.parametrize("kind", [("planted", "Planted"), ("diffusers", "AutoModel")])
def test_an_export_loads_no_transformer_of_its_own_class(tiny_sd3, tmp_path, trace, kind):
    folder = shutil.copytree(tiny_sd3, tmp_path / "model")
    plant_code(folder, trace, "transformer/config.json", "AutoModel")
    plant_part(folder, trace, "transformer", *kind)
    message = refusal(export, Source(tmp_path), str(folder), tmp_path / "out")
    assert "has no transformer of diffusers' in its model_index.json" in message


@pytest.mark.parametrize(
    ("field", "trade"),
    [("rewards", DRAW), ("models", DRAW), ("algorithms", DRAW), ("losses", ANSWER)],
)
def test_a_runs_config_names_no_code_in_its_own_folder(tmp_path, trace, field, trade):
    run = tmp_path / "run"
    run.mkdir()
    (run / "sent.py").write_text(f"from pathlib import Path\nPath({str(trace)!r}).mkdir()\nX = 1\n")
    named = {"pretrained": {}, f"custom_{field}": {"mine": f"{run}/sent.py:X"}}
    (run / "config.json").write_text(json.dumps(named))
    assert "sent.py, and code in the folder of a run is not run" in refusal(
        config_of_run, run, trade
    )
