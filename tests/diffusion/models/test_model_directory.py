"""Damaged or incomplete model directories are rejected by one line that names the file."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from malicious_files import write_malicious_pickle
from policies import make_policy
from safetensors.torch import load_file, save_file
from sessions import short_config
from user_errors import raises_user_error

from flow_grpo.diffusion import export
from flow_grpo.diffusion.models import load_adapter
from flow_grpo.diffusion.session import build_session
from flow_grpo.errors import UserError
from flow_grpo.training.export import ExportSource
from flow_grpo.training.lora_targets import FIELD

WEIGHTS = ["text_encoder/model.safetensors", "transformer/diffusion_pytorch_model.safetensors"]
CONFIGS = ["transformer/config.json", "text_encoder_3/config.json", "model_index.json"]
TOKENIZERS = ["tokenizer/tokenizer.json", "tokenizer_2/tokenizer_config.json"]


@pytest.fixture
def folder(tiny_sd3, tmp_path) -> Path:
    return shutil.copytree(tiny_sd3, tmp_path / "model")


def refused(folder: Path, capsys) -> str:
    with raises_user_error() as caught:
        load_adapter(str(folder))
    assert "An error occurred" not in capsys.readouterr().err  # logged by diffusers
    return str(caught.value)


@pytest.mark.parametrize("name", [*WEIGHTS, *CONFIGS, *TOKENIZERS])
def test_a_damaged_file_is_named(folder, capsys, name):
    path = folder / name
    good = path.read_bytes()
    for content in (good[: len(good) // 2], bytes(len(good)), b""):
        path.write_bytes(content)
        assert str(path) in refused(folder, capsys)
    path.unlink()
    message = refused(folder, capsys)
    assert path.name in message
    assert path.parent.name in message


def test_a_tokenizer_needs_all_files_of_its_vocabulary(folder, capsys):
    """transformers would use an empty one."""
    (folder / "tokenizer/tokenizer.json").rename(folder / "tokenizer/merges.txt")
    message = refused(folder, capsys)
    assert "vocab.json" in message
    assert "tokenizer.json" in message
    assert "merges.txt" not in message


@pytest.mark.parametrize(
    ("part", "message"), [("text_encoder", "not a multiple of"), ("transformer", "")]
)
def test_a_config_that_contradicts_the_weights_is_rejected(folder, capsys, part, message):
    path = folder / part / "config.json"
    path.write_text(path.read_text().replace('"num_attention_heads": ', '"num_attention_heads": 1'))
    error = refused(folder, capsys)
    assert error.startswith(f"pretrained.model='{folder}'")
    assert message in error


@pytest.mark.parametrize(
    ("part", "kind"), [("transformer", "SD3Transformer2DModel"), ("vae", "AutoencoderKL")]
)
def test_missing_weights_are_rejected(folder, capsys, part, kind):
    [file] = (folder / part).glob("*.safetensors")
    weights = load_file(file)
    name = next(n for n in weights if n.endswith("weight"))
    del weights[name]
    save_file(weights, file, {"format": "pt"})
    assert f"{kind} has no {name}" in refused(folder, capsys)


def without_one(weights: dict) -> dict:
    return dict([*weights.items()][1:])


def with_prefix(weights: dict) -> dict:
    return {f"module.{name}": tensor for name, tensor in weights.items()}


@pytest.mark.parametrize("part", ["text_encoder", "text_encoder_2", "text_encoder_3"])
@pytest.mark.parametrize(("change", "named"), [(without_one, "1 missing"), (with_prefix, "module")])
def test_a_text_encoder_that_lacks_tensors_is_rejected(folder, capsys, part, change, named):
    """transformers would use random values, and diffusers does not request its report."""
    path = folder / part / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})
    message = refused(folder, capsys)
    assert str(path.parent) in message
    assert named in message


@pytest.mark.parametrize(
    ("file", "field"),
    [
        ("transformer/config.json", "patch_size"),
        ("text_encoder_3/config.json", "num_heads"),
        ("scheduler/scheduler_config.json", "num_train_timesteps"),
    ],
)
def test_a_size_of_0_in_a_config_is_rejected(folder, capsys, file, field):
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: 0}))
    assert str(folder) in refused(folder, capsys)


@pytest.mark.parametrize("kind", [torch.int8, torch.int64, torch.bool])
@pytest.mark.parametrize("part", ["transformer", "text_encoder", "vae"])
def test_weights_stored_as_integers_are_rejected(folder, capsys, part, kind):
    """A loader would cast them without the scale of their quantization."""
    [path] = (folder / part).glob("*.safetensors")
    weights = load_file(path)
    name = next(n for n in weights if n.endswith("weight"))
    save_file({**weights, name: weights[name].to(kind)}, path, metadata={"format": "pt"})
    message = refused(folder, capsys)
    assert str(path) in message
    assert name in message


@pytest.mark.parametrize(
    ("file", "field"),
    [("vae/config.json", "scaling_factor"), ("scheduler/scheduler_config.json", "shift")],
)
def test_a_config_with_nan_is_rejected(folder, capsys, file, field):
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: float("nan")}))
    message = refused(folder, capsys)
    assert "NaN" in message
    assert field in message


@pytest.mark.parametrize("shift", [0, -1])
def test_noise_levels_must_decrease(folder, shift):
    path = folder / "scheduler/scheduler_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"shift": shift}))
    with raises_user_error("sigmas", "scheduler_config.json"):
        load_adapter(str(folder)).schedule(4, 32, 32)


def poison(path: Path, value: float) -> str:
    """Set the last value of a tensor of the file and return the tensor's name."""
    weights = load_file(path)
    name = next(n for n, weight in weights.items() if weight.is_floating_point())
    weights[name].view(-1)[-1] = value
    save_file(weights, path, {"format": "pt"})
    return name


@pytest.mark.parametrize(
    ("part", "value"),
    [("transformer", float("nan")), ("text_encoder", float("inf")), ("vae", float("nan"))],
)
def test_weights_that_are_not_finite_are_neither_loaded_nor_exported(
    tiny_sd3, folder, tmp_path, capsys, part, value
):
    [file] = (folder / part).glob("*.safetensors")
    name = poison(file, value)
    assert name in refused(folder, capsys)
    make_policy(load_adapter(str(tiny_sd3), max_sequence_length=8), rank=2).save(tmp_path)
    with raises_user_error(part, name, "NaN"):
        export.export(ExportSource(tmp_path / "lora"), str(folder), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_fifo_is_rejected_and_not_read(folder, tmp_path, capsys):
    path = folder / WEIGHTS[1]
    path.unlink()
    os.mkfifo(path)
    assert str(path) in refused(folder, capsys)
    with raises_user_error(path, field="--model", value=str(folder)):
        export.export(ExportSource(tmp_path), str(folder), tmp_path / "out")


@pytest.mark.parametrize("field", ["attn_implementation", "_attn_implementation"])
def test_a_text_encoder_with_kernels_of_the_hub_is_rejected(folder, capsys, field):
    path = folder / "text_encoder_3/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: "someone/kernels"}))
    assert "text_encoder_3" in refused(folder, capsys)
    assert "someone/kernels" in refused(folder, capsys)


def test_pickled_weights_are_not_loaded(folder, capsys, tmp_path):
    for part, name in [
        ("text_encoder", "pytorch_model.bin"),
        ("transformer", "diffusion_pytorch_model.bin"),
    ]:
        [weights] = (folder / part).glob("*.safetensors")
        kept = weights.read_bytes()
        weights.unlink()
        write_malicious_pickle(folder / part / name, tmp_path / "executed", zipped=False)
        assert "safetensors" in refused(folder, capsys)
        torch.save({}, folder / part / name)
        assert "safetensors" in refused(folder, capsys)
        weights.write_bytes(kept)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("index", "shown"),
    [
        ('{"_class_name": ["a", "b"]}', "['a', 'b']"),
        ('{"_class_name": {}}', " {};"),
        ("[" * 100_000, ""),
        ("[1]", ""),
        ('{"_class_name": "StableDiffusion3Pipeline", "vae": ["transformers"]}', ""),
    ],
    ids=["list", "dict", "deep", "not an object", "incomplete component"],
)
def test_an_invalid_index_is_rejected(tmp_path, capsys, index, shown):
    (tmp_path / "model_index.json").write_text(index)
    message = refused(tmp_path, capsys)
    assert message.startswith(f"pretrained.model='{tmp_path}' ")
    assert shown in message
    with pytest.raises(UserError):
        export._read_index(tmp_path)


def test_full_weights_must_match_the_transformer(tiny_sd3, tmp_path):
    policy = make_policy(load_adapter(str(tiny_sd3)), use_lora=False)
    policy.save(tmp_path)
    folder = tmp_path / "transformer"
    [file] = folder.glob("*.safetensors")
    good = load_file(file)
    load_adapter(str(tiny_sd3)).load_weights(folder)
    some = next(iter(good))
    for changed, shown in [
        ({**good, "other": torch.zeros(1)}, "other"),
        ({name: t for name, t in good.items() if name != "proj_out.weight"}, "proj_out.weight"),
        ({**good, some: torch.zeros(1, 2)}, "shapes"),
    ]:
        save_file(changed, file)
        with raises_user_error(folder, shown):
            load_adapter(str(tiny_sd3)).load_weights(folder)


@pytest.mark.parametrize("name", ["attn.to_x", "conv"])
def test_lora_layers_are_checked_before_weights_are_read(folder, tmp_path, name):
    [file] = (folder / "transformer").glob("*.safetensors")
    file.unlink()
    fields = {"pretrained.model": str(folder), FIELD: name}
    with raises_user_error("to_out.0", "all-linear", field=FIELD, value=name):
        build_session(short_config(tmp_path / "logs", "run", **fields))
    assert not (tmp_path / "logs").exists()
