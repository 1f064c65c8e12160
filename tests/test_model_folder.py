"""A model folder that is damaged or not whole ends in one line that names the file."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from planted import plant
from policies import policy_of
from safetensors.torch import load_file, save_file

from flow_grpo.draw import export
from flow_grpo.draw.models import load_adapter
from flow_grpo.errors import UserError
from flow_grpo.run.export import Source

WEIGHTS = ["text_encoder/model.safetensors", "transformer/diffusion_pytorch_model.safetensors"]
CONFIGS = ["transformer/config.json", "text_encoder_3/config.json", "model_index.json"]
TOKENIZERS = ["tokenizer/tokenizer.json", "tokenizer_2/tokenizer_config.json"]


@pytest.fixture
def folder(tiny_sd3, tmp_path) -> Path:
    return shutil.copytree(tiny_sd3, tmp_path / "model")


def refused(folder: Path, capsys) -> str:
    with pytest.raises(UserError) as error:
        load_adapter(str(folder))
    assert "\n" not in str(error.value)
    assert "An error occurred" not in capsys.readouterr().err  # of diffusers' own
    return str(error.value)


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
    """transformers would make up an empty one."""
    (folder / "tokenizer/tokenizer.json").rename(folder / "tokenizer/merges.txt")
    assert "tokenizer has no vocab.json or tokenizer.json" in refused(folder, capsys)


@pytest.mark.parametrize(
    ("part", "message"), [("text_encoder", "not a multiple of"), ("transformer", "")]
)
def test_a_config_that_does_not_fit_the_weights(folder, capsys, part, message):
    path = folder / part / "config.json"
    path.write_text(path.read_text().replace('"num_attention_heads": ', '"num_attention_heads": 1'))
    told = refused(folder, capsys)
    assert "cannot load pretrained.model=" in told
    assert message in told


@pytest.mark.parametrize(
    ("part", "kind"), [("transformer", "SD3Transformer2DModel"), ("vae", "AutoencoderKL")]
)
def test_weights_that_are_not_all_there(folder, capsys, part, kind):
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
    """transformers would go on with random values, and diffusers does not ask it for a report."""
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
def test_a_size_of_0_is_a_mistake_of_the_model(folder, capsys, file, field):
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: 0}))
    assert str(folder) in refused(folder, capsys)


@pytest.mark.parametrize("kind", [torch.int8, torch.int64, torch.bool])
@pytest.mark.parametrize("part", ["transformer", "text_encoder", "vae"])
def test_weights_stored_as_integers_are_rejected(folder, capsys, part, kind):
    """A loader would cast them, whatever the scale that they were quantized with."""
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
    assert f"{field} of its config is NaN" in refused(folder, capsys)


@pytest.mark.parametrize("shift", [0, -1])
def test_noise_levels_must_decrease(folder, shift):
    path = folder / "scheduler/scheduler_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"shift": shift}))
    with pytest.raises(UserError, match="noise level"):
        load_adapter(str(folder)).schedule(4, 32, 32)


def poison(path: Path, value: float) -> str:
    """The name of a tensor of the file, whose last value it is now."""
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
    assert f"{name} contains NaN or infinite values" in refused(folder, capsys)
    policy_of(load_adapter(str(tiny_sd3), max_sequence_length=8), rank=2).save(tmp_path)
    with pytest.raises(UserError, match=f"{part}.*{re.escape(name)} contains NaN or infinite"):
        export.export(Source(tmp_path / "lora"), str(folder), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_fifo_is_rejected_and_not_read(folder, tmp_path, capsys):
    path = folder / WEIGHTS[1]
    path.unlink()
    os.mkfifo(path)
    assert f"{path} is not a regular file" in refused(folder, capsys)
    with pytest.raises(UserError, match="is not a regular file"):
        export.export(Source(tmp_path), str(folder), tmp_path / "out")


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
        plant(folder / part / name, tmp_path / "executed", zipped=False)
        assert "safetensors" in refused(folder, capsys)
        torch.save({}, folder / part / name)
        assert "safetensors" in refused(folder, capsys)
        weights.write_bytes(kept)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("index", "told"),
    [
        ('{"_class_name": ["a", "b"]}', "is a ['a', 'b']; pretrained.model must be one of"),
        ('{"_class_name": {}}', "is a {}; pretrained.model must be one of"),
        ("[" * 100_000, "cannot load pretrained.model="),
        ("[1]", "cannot load pretrained.model="),
        ('{"_class_name": "StableDiffusion3Pipeline", "vae": ["transformers"]}', "cannot load"),
    ],
    ids=["list", "dict", "deep", "no object", "half a part"],
)
def test_an_odd_index_is_told(tmp_path, capsys, index, told):
    (tmp_path / "model_index.json").write_text(index)
    assert told in refused(tmp_path, capsys)
    with pytest.raises(UserError):
        export._read_index(tmp_path)
