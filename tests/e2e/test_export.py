"""scripts/export.py writes a checkpoint as a pipeline that does not require flow_grpo."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline, SD3Transformer2DModel
from policies import make_policy
from runner import Runner, run_script
from safetensors.torch import load_file, save_file
from untrained.small.sd3 import build as build_tiny_sd3

from flow_grpo.diffusion.export import export
from flow_grpo.diffusion.models import load_adapter
from flow_grpo.errors import UserError
from flow_grpo.training.export import ExportSource


@pytest.fixture(scope="module")
def lora_run(short_runs, tmp_path_factory) -> Path:
    train = Runner(tmp_path_factory.mktemp("logs"), **short_runs)
    done = train(
        num_epochs=2,  # with two updates each
        train__learning_rate=0.05,
        train__lora_rank=4,
        train__lora_alpha=12,
        train__ema_update_interval=1,
        train__ema_decay=0.5,
        save_freq=0,
        eval_freq=0,
    )
    assert done.returncode == 0, done.stderr
    return train.logdir / "run"


@pytest.fixture(scope="module")
def full_checkpoint(tiny_sd3, tmp_path_factory) -> Path:
    """Checkpoint of full fine-tuning with clearly changed weights."""
    folder = tmp_path_factory.mktemp("full") / "checkpoint-4"
    policy = make_policy(load_adapter(str(tiny_sd3)), use_lora=False)
    generator = torch.Generator().manual_seed(0)
    for prefix in ("ema_", ""):
        for parameter in policy.parameters():
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
        policy.save(folder, prefix)
    return folder


@pytest.fixture(scope="module")
def exported(lora_run, tmp_path_factory) -> Path:
    """Pipeline exported by the script, with the base model of the run's config."""
    out = tmp_path_factory.mktemp("exported") / "new" / "pipeline"
    done = run_script("scripts/export.py", "--checkpoint", lora_run, "--out", out)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert str(out) in done.stdout
    return out


def load(folder: Path, **kwargs) -> DiffusionPipeline:
    pipeline = DiffusionPipeline.from_pretrained(folder, **kwargs)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def generate(pipeline: DiffusionPipeline) -> torch.Tensor:
    noise = torch.randn(2, 4, 8, 16, generator=torch.Generator().manual_seed(0))
    return pipeline(
        [f"test prompt number {i}" for i in range(2)],
        latents=noise.to(pipeline.transformer.dtype),
        num_inference_steps=3,
        guidance_scale=4.5,
        height=32,
        width=64,
        max_sequence_length=8,
        output_type="pt",
    ).images.float()


def generate_with_lora(model: Path, weights: Path) -> torch.Tensor:
    pipeline = load(model)
    pipeline.load_lora_weights(weights)
    return generate(pipeline)


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


def files(folder: Path) -> dict[str, bytes]:
    found = [p for p in folder.rglob("*") if p.is_file()]
    return {str(p.relative_to(folder)): p.read_bytes() for p in found}


def test_the_exported_pipeline_matches_the_base_model_with_lora(exported, lora_run, tiny_sd3):
    images = generate(load(exported))
    checkpoint = lora_run / "checkpoints/checkpoint-4"
    averaged = generate_with_lora(tiny_sd3, checkpoint / "ema_lora")
    assert difference(images, averaged) <= 1e-4
    assert difference(images, generate(load(tiny_sd3))) > 0.05
    assert difference(images, generate_with_lora(tiny_sd3, checkpoint / "lora")) > 0.01


def test_raw_exports_the_weights_that_are_not_averaged(lora_run, tiny_sd3, tmp_path):
    checkpoint = lora_run / "checkpoints/latest"
    source = ExportSource.find(checkpoint, raw=True)
    export(source, str(tiny_sd3), tmp_path / "raw")
    images = generate(load(tmp_path / "raw"))
    assert difference(images, generate_with_lora(tiny_sd3, checkpoint / "lora")) <= 1e-4
    assert difference(images, generate_with_lora(tiny_sd3, checkpoint / "ema_lora")) > 0.01
    assert "not averaged" in (tmp_path / "raw/README.md").read_text()
    assert ExportSource.find(checkpoint / "lora") == source
    with pytest.raises(UserError, match=r"ema_lora .*--raw"):
        ExportSource.find(checkpoint / "ema_lora", raw=True)


def test_the_export_is_a_standard_pipeline_directory_with_a_model_card(exported, tiny_sd3):
    base, out = files(tiny_sd3), files(exported)
    assert set(out) == {*base, "README.md"}
    changed = {name for name in base if out[name] != base[name]}
    assert changed == {"transformer/diffusion_pytorch_model.safetensors"}
    assert [p.name for p in exported.parent.iterdir()] == ["pipeline"]

    before = load_file(tiny_sd3 / "transformer/diffusion_pytorch_model.safetensors")
    after = load_file(exported / "transformer/diffusion_pytorch_model.safetensors")
    assert {k: v.shape for k, v in after.items()} == {k: v.shape for k, v in before.items()}
    trained = {name for name in before if not torch.equal(before[name], after[name])}
    assert trained
    assert all("attn." in name and name.endswith(".weight") for name in trained)

    card = (exported / "README.md").read_text()
    for fact in ("`tiny-sd3`", "`run/checkpoints/checkpoint-4/ema_lora`", "step 4", "EMA"):
        assert fact in card
    assert str(tiny_sd3.parent) not in card


def test_diffusers_loads_the_export_without_peft(exported):
    code = (
        "import sys; sys.modules['peft'] = None\n"
        "from diffusers import DiffusionPipeline\n"
        f"pipeline = DiffusionPipeline.from_pretrained({str(exported)!r})\n"
        "assert not any('lora' in name for name in pipeline.transformer.state_dict())\n"
        "assert not any(name.startswith('flow_grpo') for name in sys.modules)\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_half_precision_weights_are_merged_in_float32_and_rounded_once(
    exported, lora_run, tiny_sd3, tmp_path
):
    out = tmp_path / "half"
    export(ExportSource.find(lora_run), str(tiny_sd3), out, torch.bfloat16)
    full = load_file(exported / "transformer/diffusion_pytorch_model.safetensors")
    half = load_file(out / "transformer/diffusion_pytorch_model.safetensors")
    assert all(torch.equal(half[name], full[name].bfloat16()) for name in full)
    assert "bfloat16" in (out / "README.md").read_text()
    pipeline = load(out, dtype=torch.bfloat16)
    assert difference(generate(pipeline), generate(load(exported))) < 0.1


@pytest.mark.parametrize("name", ["ema_transformer", "transformer"])
def test_a_fully_finetuned_transformer_replaces_that_of_the_base_model(
    full_checkpoint, tiny_sd3, tmp_path, name
):
    export(
        ExportSource.find(full_checkpoint, raw=name == "transformer"),
        str(tiny_sd3),
        tmp_path / "out",
    )
    expected = load(tiny_sd3)
    base = generate(expected)
    expected.transformer = SD3Transformer2DModel.from_pretrained(full_checkpoint / name)
    images = generate(load(tmp_path / "out"))
    assert torch.equal(images, generate(expected))
    assert difference(images, base) > 0.05
    assert set(files(tmp_path / "out")) == {*files(tiny_sd3), "README.md"}


@pytest.mark.parametrize(
    "other",
    [{"width": 64}, {"layers": 1}, {"layers": 3}],
    ids=["wider", "fewer-layers", "more-layers"],
)
@pytest.mark.parametrize("kind", ["lora_run", "full_checkpoint"])
def test_weights_of_another_model_are_rejected(request, kind, other, tmp_path):
    build_tiny_sd3(**other).save_pretrained(tmp_path / "other")
    source = ExportSource.find(request.getfixturevalue(kind))
    with pytest.raises(UserError, match="--model"):
        export(source, str(tmp_path / "other"), tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["other"]


def test_a_transformer_with_more_or_fewer_weights_is_rejected(full_checkpoint, tiny_sd3, tmp_path):
    build_tiny_sd3(qk_norm=None).save_pretrained(tmp_path / "fewer")
    with pytest.raises(UserError, match="--model"):
        export(ExportSource.find(full_checkpoint), str(tmp_path / "fewer"), tmp_path / "out")
    damaged = tmp_path / "damaged"
    shutil.copytree(full_checkpoint / "transformer", damaged)
    [file] = damaged.glob("*.safetensors")
    weights = load_file(file)
    del weights["proj_out.weight"]
    save_file(weights, file)
    with pytest.raises(UserError, match=r"proj_out\.weight.*--model"):
        export(ExportSource.find(damaged), str(tiny_sd3), tmp_path / "out")


def test_invalid_arguments_are_one_line_errors(lora_run, tiny_sd3, tmp_path):
    build_tiny_sd3(width=64).save_pretrained(tmp_path / "other")
    command = ["--checkpoint", lora_run, "--model", tmp_path / "other", "--out", tmp_path / "out"]
    done = run_script("scripts/export.py", *command)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert "--model" in done.stderr

    (tmp_path / "empty").mkdir()
    shutil.copytree(lora_run / "checkpoints/checkpoint-4/ema_lora", tmp_path / "moved")
    [file] = (tmp_path / "moved").glob("*.safetensors")
    with pytest.raises(UserError, match="nothing "):
        ExportSource.find(tmp_path / "nothing")
    with pytest.raises(UserError, match="--model"):
        ExportSource.find(tmp_path / "moved").trained_model()
    state = ExportSource.find(lora_run / "checkpoints/checkpoint-4/state")
    with pytest.raises(UserError, match="has more than one LoRA"):
        export(state, str(tiny_sd3), tmp_path / "out")
    moved = ExportSource.find(tmp_path / "moved")
    for model, message in [
        (tmp_path / "nothing", "--model=.*nothing"),
        (tmp_path / "empty", "empty is not a diffusers pipeline: it has no model_index.json"),
    ]:
        with pytest.raises(UserError, match=message):
            export(moved, str(model), tmp_path / "out")
    with pytest.raises(UserError, match="already exists"):
        export(moved, str(tiny_sd3), tmp_path / "empty")

    weights = load_file(file)
    name = next(iter(weights))
    save_file({**weights, name: torch.full_like(weights[name], torch.nan)}, file)
    with pytest.raises(UserError, match=rf"NaN.*{name}|{name}.*NaN"):
        export(moved, str(tiny_sd3), tmp_path / "out")
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(UserError, match=rf"{file.name} cannot be read"):
        export(moved, str(tiny_sd3), tmp_path / "out")
    assert {p.name for p in tmp_path.iterdir()} == {"other", "empty", "moved"}


def test_a_failed_export_leaves_nothing(lora_run, tiny_sd3, tmp_path, monkeypatch):
    def full_disk(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr(SD3Transformer2DModel, "save_pretrained", full_disk)
    with pytest.raises(UserError, match=r"cannot write .*No space left"):
        export(ExportSource.find(lora_run), str(tiny_sd3), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
