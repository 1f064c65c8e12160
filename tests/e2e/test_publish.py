"""scripts/publish.py writes weights, figures and a model card that the hub and libraries load."""

import json
import shutil
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers import DiffusionPipeline
from huggingface_hub import ModelCard
from peft import PeftModel
from PIL import Image
from publish import write
from runner import ROOT, Runner
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from user_errors import raises_user_error

from flow_grpo.diffusion.models.kohya import from_kohya
from flow_grpo.training.publish import PublishOptions
from flow_grpo.vlm import publish as vlm

LORA = "pytorch_lora_weights.safetensors"
SECRET = "hf_" + "aB3" * 10


def generate(model: Path, lora: Path | None = None) -> torch.Tensor:
    """Return two images of a pipeline, (2, C, H, W)."""
    pipeline = DiffusionPipeline.from_pretrained(model)
    pipeline.set_progress_bar_config(disable=True)
    if lora is not None:
        pipeline.load_lora_weights(lora)
    noise = torch.randn(2, 4, 8, 16, generator=torch.Generator().manual_seed(0))
    return pipeline(
        ["test prompt number 0", "test prompt number 1"],
        latents=noise,
        num_inference_steps=2,
        height=32,
        width=64,
        max_sequence_length=8,
        output_type="pt",
    ).images


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


@pytest.fixture(scope="module")
def lora_run(short_runs, tmp_path_factory) -> Path:
    """A run of two epochs, with a checkpoint of each."""
    train = Runner(tmp_path_factory.mktemp("private") / "logs", **short_runs)
    done = train(
        "--config.reward_fn={'jpeg_compressibility': 1.0}",
        num_epochs=2,
        train__learning_rate=0.05,
        train__lora_rank=4,
        train__lora_alpha=12,
        train__ema_update_interval=1,
        train__ema_decay=0.5,
        save_freq=1,
        eval_freq=1,
        project_name=SECRET,
    )
    assert done.returncode == 0, done.stderr
    return train.logdir / "run"


@pytest.fixture(scope="module")
def text_run(tmp_path_factory) -> Path:
    train = Runner(tmp_path_factory.mktemp("private") / "logs")
    done = train(
        script="scripts/train_vlm.py",
        config="config/vlm.py:tiny_text",
        use_lora=True,
        num_epochs=1,
        eval_freq=1,
        eval_questions=4,
        sample__questions_per_epoch=2,
        sample__group_size=2,
        sample__max_new_tokens=12,
    )
    assert done.returncode == 0, done.stderr
    return train.logdir / "run"


def publish(run: Path, out: Path, **options) -> Path:
    defaults = dict(
        bench=[], raw=False, merged=False, dtype=None, repo="", base_model="", license=""
    )
    write(Namespace(run=run, out=out, **{**defaults, "samples": 3, **options}))
    return out


@pytest.fixture(scope="module")
def published(lora_run, tmp_path_factory) -> Path:
    """Publication of the weights of the first epoch."""
    out = tmp_path_factory.mktemp("published") / "card"
    checkpoint = lora_run / "checkpoints/checkpoint-2"
    return publish(checkpoint, out, repo="me/card", base_model="them/base", license="apache-2.0")


def texts(folder: Path) -> str:
    """Return all text of a directory, with the metadata of its weights."""
    found = []
    for path in folder.rglob("*"):
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                found.append(json.dumps(file.metadata()))
        elif path.suffix in (".md", ".json", ".jsonl"):
            found.append(path.read_text("utf-8"))
    return "\n".join(found)


def test_the_lora_equals_that_of_the_checkpoint_and_loads_in_diffusers(
    published, lora_run, tiny_sd3
):
    weights = lora_run / "checkpoints/checkpoint-2/ema_lora"
    assert difference(generate(tiny_sd3, published), generate(tiny_sd3, weights)) == 0
    assert difference(generate(tiny_sd3, published), generate(tiny_sd3)) > 0.01


def test_the_file_for_comfyui_has_the_same_tensors_and_the_scale(published, lora_run):
    own = load_file(published / LORA)
    comfyui = load_file(published / "comfyui/card.safetensors")
    alphas = [value for name, value in comfyui.items() if name.endswith(".alpha")]
    assert len(alphas) == len(own) // 2
    assert all(value == 12 for value in alphas)
    restored, settings = from_kohya(comfyui, "StableDiffusion3Pipeline")
    assert {f"transformer.{name}" for name in restored} == own.keys()
    assert all(torch.equal(own[f"transformer.{name}"], restored[name]) for name in restored)
    assert (settings["r"], settings["lora_alpha"]) == (4, 12)


def test_the_header_has_what_the_user_gave_and_what_is_known(published):
    data = ModelCard.load(published / "README.md").data
    assert data.base_model == "them/base"
    assert data.base_model_relation == "adapter"
    assert (data.license, data.pipeline_tag, data.library_name) == (
        "apache-2.0",
        "text-to-image",
        "diffusers",
    )
    assert "lora" in data.tags


def test_the_card_shows_step_command_settings_and_figures(published):
    card = (published / "README.md").read_text("utf-8")
    assert "epoch 1 of 2 (update 2)" in card
    assert "python scripts/train.py --config=config/base.py" in card
    assert "| `train.lora_alpha` | `12` |" in card
    assert 'pipeline.load_lora_weights("me/card")' in card
    for name in ("curve.png", "before_after.png"):
        assert f"]({name})" in card
        with Image.open(published / name) as figure:
            assert figure.convert("L").getextrema()[0] < 100, "empty figure"
    epochs = [json.loads(line)["epoch"] for line in (published / "metrics.jsonl").open()]
    assert epochs == [0, 1]


def test_nothing_private_is_published(published, lora_run, tiny_sd3, prompt_folder):
    text = texts(published)
    for private in (lora_run, tiny_sd3.parent, prompt_folder.parent, ROOT, SECRET):
        assert str(private) not in text


def test_an_unknown_licence_is_not_guessed_and_the_upload_is_named(lora_run, tmp_path, capsys):
    data = ModelCard.load(publish(lora_run, tmp_path / "out") / "README.md").data
    assert data.license is None
    assert data.base_model is None
    assert f"hf upload USER/out {tmp_path / 'out'} ." in capsys.readouterr().out


def test_the_merged_pipeline_and_the_lora_load_from_one_directory(lora_run, tiny_sd3, tmp_path):
    out = publish(lora_run, tmp_path / "out", merged=True)
    merged = generate(out)
    assert difference(merged, generate(tiny_sd3, out)) <= 1e-4
    assert difference(merged, generate(tiny_sd3)) > 0.01
    assert not list(out.glob(".*"))


def test_weights_that_are_not_finite_are_rejected_and_nothing_is_written(lora_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(lora_run, run, symlinks=True)
    checkpoint = run / "checkpoints/checkpoint-4"
    file = checkpoint / "ema_lora" / LORA
    tensors = load_file(file)
    next(iter(tensors.values()))[0, 0] = torch.nan
    save_file(tensors, file)
    (checkpoint / "state/files.json").unlink()  # otherwise the checksum shows the damage
    with raises_user_error("NaN", file.name):
        publish(checkpoint, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_existing_directories_and_weights_outside_a_run_are_rejected(lora_run, tmp_path):
    (tmp_path / "out").mkdir()
    with raises_user_error(field=str(tmp_path / "out")):
        publish(lora_run, tmp_path / "out")
    shutil.copytree(lora_run / "checkpoints/checkpoint-4/lora", tmp_path / "lora")
    with raises_user_error(field=str(tmp_path / "lora")):
        publish(tmp_path / "lora", tmp_path / "new")


def test_a_language_model_is_published_as_an_adapter(text_run, tmp_path):
    out = publish(text_run, tmp_path / "out", base_model="them/text")
    card = ModelCard.load(out / "README.md")
    assert (card.data.library_name, card.data.pipeline_tag) == ("peft", "text-generation")
    assert "**Question 3**" in card.text
    assert "**Question 4**" not in card.text  # samples=3
    model = AutoModelForCausalLM.from_pretrained(ROOT / "assets/tiny-text")
    PeftModel.from_pretrained(model, out)
    checkpoint = next((text_run / "checkpoints").glob("checkpoint-2/lora/*.safetensors"))
    saved, own = load_file(out / checkpoint.name), load_file(checkpoint)
    assert saved.keys() == own.keys()
    assert all(torch.equal(saved[name], own[name]) for name in own)
    assert (
        json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"]
        == "them/text"
    )
    assert str(text_run.parent) not in texts(out)


def test_merging_a_complete_model_is_rejected(tmp_path):
    run = SimpleNamespace(source=SimpleNamespace(is_lora=False))
    with raises_user_error(field="--merged"):
        vlm.write_weights(run, PublishOptions(tmp_path / "out", merged=True), tmp_path)


def test_a_merged_language_model_loads_beside_its_adapter(text_run, tmp_path):
    out = publish(text_run, tmp_path / "out", merged=True)
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(out)(tokens).logits
        model = AutoModelForCausalLM.from_pretrained(ROOT / "assets/tiny-text")
        tuned = PeftModel.from_pretrained(model, out / "adapter")(tokens).logits
    assert torch.allclose(merged, tuned, atol=1e-4)
