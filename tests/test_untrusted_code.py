"""Code in a model directory is never executed, whichever loader finds it."""

import json
import shutil
from pathlib import Path

import pytest
import small_vlm
import torch
from malicious_files import write_model_with_code, write_pipeline_with_code
from small_clip import clip_folder, error_message  # noqa: F401, a fixture
from transformers import CLIPModel
from untrained import small

from flow_grpo.config.saved_config import load_run_config
from flow_grpo.diffusion.export import export
from flow_grpo.diffusion.fields import DIFFUSION_SPEC
from flow_grpo.diffusion.models import check_model, load_adapter
from flow_grpo.diffusion.models.inputs import Size
from flow_grpo.rewards.loading import load_network, load_tokenizer
from flow_grpo.rewards.scorers.clip import Aesthetic, ClipScore
from flow_grpo.training.export import ExportSource
from flow_grpo.vlm import export as vlm_export
from flow_grpo.vlm.fields import VLM_SPEC
from flow_grpo.vlm.models import load_model, load_processors

CPU = torch.device("cpu")
# files, and the auto class in them that refers to the code; a known tokenizer needs none
CONFIG = {"config.json": "AutoConfig"}
TOKENIZER = {"tokenizer_config.json": "AutoTokenizer", **CONFIG}
PROCESSOR = {"preprocessor_config.json": "AutoImageProcessor"}


def plant_code(folder: Path, trace: Path, planted: dict[str, str]) -> Path:
    """Add code to a model directory, and references to it in some of its files."""
    for file, kind in planted.items():
        write_model_with_code(folder, trace, file, kind)
    return folder


@pytest.fixture
def trace(tmp_path, monkeypatch):
    """A directory that exists once the code was executed; prompts for consent are accepted."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    monkeypatch.syspath_prepend(tmp_path / "hf")
    yield tmp_path / "executed"
    assert not (tmp_path / "executed").exists()


VLM_LOADERS = {
    "model": (CONFIG, lambda model: load_model(model, CPU, torch.float32)),
    "tokenizer": (TOKENIZER, load_processors),
    "images": (PROCESSOR, load_processors),
    "export": (
        CONFIG,
        lambda model: vlm_export.export(ExportSource(Path("no")), model, Path("no")),
    ),
}


@pytest.mark.parametrize("loader", VLM_LOADERS)
def test_a_vision_language_model_is_rejected(tmp_path, trace, loader):
    planted, load = VLM_LOADERS[loader]
    folder = plant_code(small_vlm.save(tmp_path / "model"), trace, planted)
    message = error_message(load, str(folder))
    assert message.startswith(f"pretrained.model='{folder}' ")
    assert "code" in message


REWARDS = {
    "network": (CONFIG, lambda m: load_network(CLIPModel, m, dtype=torch.float32, kind="a CLIP")),
    "tokenizer": (TOKENIZER, lambda m: load_tokenizer(m, option="model", tokens=1)),
    "scorer": (CONFIG, lambda m: ClipScore(model=m)),
}


@pytest.mark.parametrize("loader", REWARDS)
def test_a_reward_model_is_rejected(folder, tmp_path, trace, loader):
    planted, load = REWARDS[loader]
    model = plant_code(shutil.copytree(folder, tmp_path / "clip"), trace, planted)
    message = error_message(load, str(model))
    assert f"model='{model}' " in message
    assert "code" in message


@pytest.mark.parametrize("scorer", [ClipScore, Aesthetic])
def test_an_image_processor_of_a_known_class_is_loaded_without_the_code(
    folder, tmp_path, trace, scorer
):
    model = plant_code(shutil.copytree(folder, tmp_path / "clip"), trace, PROCESSOR)
    if scorer is ClipScore:
        assert ClipScore(model=str(model)).image_processor.crop_size
    else:
        assert "head" in error_message(Aesthetic, model=str(model), head=str(tmp_path))


PARTS = {
    "a file next to it": ("text_encoder", "planted", "Planted"),
    "transformers' AutoModel": ("text_encoder", "transformers", "AutoModel"),
    "transformers' AutoTokenizer": ("tokenizer", "transformers", "AutoTokenizer"),
    "a processor": ("tokenizer", "transformers", "CLIPProcessor"),
    "diffusers' AutoModel": ("transformer", "diffusers", "AutoModel"),
    "another pipeline": ("text_encoder", "diffusers", "DiffusionPipeline"),
    "a custom pipeline": ("_class_name", "planted", "Planted"),
}


@pytest.mark.parametrize("planted", PARTS.values(), ids=PARTS)
def test_a_pipeline_with_a_custom_component_is_rejected_before_loading(
    tiny_sd3, tmp_path, trace, planted
):
    folder = write_pipeline_with_code(
        shutil.copytree(tiny_sd3, tmp_path / "model"), trace, *planted
    )
    for load in (load_adapter, lambda model: check_model(model, Size(64, 64), {}, 2)):
        message = error_message(load, str(folder))
        assert planted[-1] in message
        assert message.startswith(f"pretrained.model='{folder}' ")


@pytest.mark.parametrize(
    ("family", "part"), [("flux2", "tokenizer"), ("qwen_image_21", "processor")]
)
def test_only_the_tokenizer_of_a_processor_is_loaded_by_a_known_class(
    tmp_path, trace, family, part
):
    folder = tmp_path / "model"
    small.build(family).save_pretrained(folder)
    (folder / part / "preprocessor_config.json").write_text('{"image_processor_type": "Planted"}')
    for file in ("tokenizer_config.json", "preprocessor_config.json"):
        write_model_with_code(folder, trace, f"{part}/{file}", "AutoTokenizer")
    assert len(load_adapter(str(folder)).encode(["a cat"], None)) == 1


@pytest.mark.parametrize("kind", [("planted", "Planted"), ("diffusers", "AutoModel")])
def test_an_export_rejects_a_custom_transformer_class(tiny_sd3, tmp_path, trace, kind):
    folder = shutil.copytree(tiny_sd3, tmp_path / "model")
    write_model_with_code(folder, trace, "transformer/config.json", "AutoModel")
    write_pipeline_with_code(folder, trace, "transformer", *kind)
    message = error_message(export, ExportSource(tmp_path), str(folder), tmp_path / "out")
    assert message.startswith(str(folder))
    assert "model_index.json" in message


@pytest.mark.parametrize(
    ("field", "spec"),
    [
        ("rewards", DIFFUSION_SPEC),
        ("models", DIFFUSION_SPEC),
        ("algorithms", DIFFUSION_SPEC),
        ("losses", VLM_SPEC),
    ],
)
def test_the_config_of_a_run_cannot_name_code_in_its_directory(tmp_path, trace, field, spec):
    run = tmp_path / "run"
    run.mkdir()
    (run / "sent.py").write_text(f"from pathlib import Path\nPath({str(trace)!r}).mkdir()\nX = 1\n")
    named = {"pretrained": {}, f"custom_{field}": {"mine": f"{run}/sent.py:X"}}
    (run / "config.json").write_text(json.dumps(named))
    assert "sent.py" in error_message(load_run_config, run, spec)
