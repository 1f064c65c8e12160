"""LoRA files of PEFT and diffusers are loaded completely or rejected."""

import json
import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from malicious_files import write_malicious_pickle
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from policies import make_policy
from safetensors.torch import load_file, save_file
from untrained.small.sd3 import build as build_tiny_sd3
from user_errors import raises_user_error

from flow_grpo.diffusion.export import export
from flow_grpo.diffusion.models import load_adapter
from flow_grpo.diffusion.models.lora_files import attach_lora, read_lora
from flow_grpo.diffusion.models.sd3 import SD3Adapter
from flow_grpo.perf.quantization import QuantizedLinear
from flow_grpo.training.checkpoint import find_weights
from flow_grpo.training.export import ExportSource
from flow_grpo.training.lora_files import IncompatibleWeights

ATTENTION_TARGETS = SD3Adapter.lora_targets
PLAIN = {"r": 4, "lora_alpha": 12, "init_lora_weights": "gaussian"}


def trained_by_peft(model: Path, **settings) -> tuple[SD3Adapter, PeftModel]:
    """Train as Flow-GRPO does: a PeftModel around the transformer."""
    adapter = load_adapter(str(model), max_sequence_length=8)
    wrapped = get_peft_model(
        adapter.transformer, LoraConfig(target_modules=ATTENTION_TARGETS, **settings)
    )
    generator = torch.Generator().manual_seed(0)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return adapter, wrapped.eval()


def velocity(adapter, module=None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(2, *adapter.latent_shape(32, 32), generator=generator)
    with torch.no_grad():
        texts = adapter.encode(["a", "b"], ["", ""])
        return adapter.velocity(module or adapter.transformer, noise, 500.0, texts, 2.0)


def fresh(model: Path, **kwargs) -> SD3Adapter:
    return load_adapter(str(model), max_sequence_length=8, **kwargs)


@pytest.fixture(scope="module")
def theirs(tiny_sd3, tmp_path_factory) -> Path:
    """A run directory of Flow-GRPO with one checkpoint, and the velocity of its policy."""
    run = tmp_path_factory.mktemp("flow-grpo")
    adapter, wrapped = trained_by_peft(tiny_sd3, **PLAIN)
    wrapped.save_pretrained(run / "checkpoints/checkpoint-60/lora")
    torch.save(velocity(adapter, wrapped), run / "velocity.pt")
    return run


@pytest.fixture
def peft_folder(theirs, tmp_path) -> Path:
    """A copy that the test may modify."""
    return shutil.copytree(find_weights(theirs), tmp_path / "peft")


@pytest.fixture
def diffusers_folder(theirs, tiny_sd3, tmp_path) -> Path:
    policy = make_policy(fresh(tiny_sd3), lora_path=str(find_weights(theirs)))
    policy.save(tmp_path / "diffusers")
    return tmp_path / "diffusers/lora"


@pytest.mark.parametrize(
    "settings",
    [
        PLAIN,
        {**PLAIN, "rank_pattern": {"attn.to_q": 2}, "alpha_pattern": {"attn.to_k": 3}},
        {**PLAIN, "use_rslora": True, "lora_dropout": 0.5},
        {**PLAIN, "use_dora": True, "init_lora_weights": True},
        {**PLAIN, "layers_to_transform": [1], "layers_pattern": "transformer_blocks"},
    ],
    ids=["plain", "patterns", "rslora-dropout", "dora", "some-layers"],
)
def test_a_lora_of_peft_gives_the_same_velocity(tiny_sd3, tmp_path, settings):
    adapter, wrapped = trained_by_peft(tiny_sd3, **settings)
    wrapped.save_pretrained(tmp_path / "lora")
    expected = velocity(adapter, wrapped)
    loaded = fresh(tiny_sd3)
    base = velocity(loaded)
    loaded.load_weights(tmp_path / "lora")
    assert torch.equal(velocity(loaded), expected)
    assert (expected - base).abs().max() > 0.05

    policy = make_policy(fresh(tiny_sd3), rank=7, alpha=7, lora_path=str(tmp_path / "lora"))
    assert torch.equal(velocity(policy.adapter, policy.module), expected)
    start = [p.detach().clone() for p in policy.parameters()]
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.1)
    assert not torch.equal(velocity(policy.adapter, policy.module), expected)
    with policy.frozen_denoiser("reference") as reference:  # what training began with
        assert torch.equal(velocity(policy.adapter, reference.transformer), expected)
    with torch.no_grad():
        torch._foreach_copy_(policy.parameters(), start)
    names = {f"base_model.model.{n}" for n in get_peft_model_state_dict(policy.transformer)}
    assert names == set(load_file(tmp_path / "lora/adapter_model.safetensors"))
    assert len(policy.parameters()) == len(names)

    policy.save(tmp_path / "saved")  # what it saves, diffusers loads
    pipeline = StableDiffusion3Pipeline.from_pretrained(tiny_sd3)
    pipeline.load_lora_weights(tmp_path / "saved/lora")
    saved = SD3Adapter(pipeline, max_sequence_length=8)
    assert torch.equal(velocity(saved), expected)


def test_a_run_of_flow_grpo_can_be_evaluated_and_exported(theirs, tiny_sd3, tmp_path):
    expected = torch.load(theirs / "velocity.pt", weights_only=True)
    adapter = fresh(tiny_sd3)
    adapter.load_weights(find_weights(theirs))
    assert torch.equal(velocity(adapter), expected)
    export(ExportSource.find(theirs), str(tiny_sd3), tmp_path / "out")
    torch.testing.assert_close(velocity(fresh(tmp_path / "out")), expected, rtol=0, atol=1e-4)


def test_a_lora_keeps_its_precision_on_a_half_precision_model(theirs, diffusers_folder, tiny_sd3):
    saved = load_file(find_weights(theirs) / "adapter_model.safetensors")
    for folder in (find_weights(theirs), diffusers_folder):
        adapter = fresh(tiny_sd3, dtype=torch.bfloat16)
        adapter.load_weights(folder)
        for name, tensor in get_peft_model_state_dict(adapter.transformer).items():
            assert torch.equal(tensor, saved[f"base_model.model.{name}"])


def test_an_older_file_of_diffusers_without_settings_has_alpha_equal_to_rank(
    diffusers_folder, tiny_sd3
):
    [file] = diffusers_folder.iterdir()
    weights = load_file(file)
    save_file(weights, file)
    new, old = fresh(tiny_sd3), fresh(tiny_sd3)
    new.load_weights(diffusers_folder)
    layer = new.transformer.transformer_blocks[0].attn.to_q
    assert layer.scaling == {"default": 1.0}
    down_and_up = {"lora_A": "lora.down", "lora_B": "lora.up"}
    renamed = {
        name.replace(new_name, old_name): tensor
        for name, tensor in weights.items()
        for new_name, old_name in down_and_up.items()
        if new_name in name
    }
    save_file(renamed, file)
    old.load_weights(diffusers_folder)
    assert torch.equal(velocity(new), velocity(old))


def rename(old: str, new: str):
    return lambda weights: {name.replace(old, new): t for name, t in weights.items()}


def without_one(weights: dict) -> dict:
    return dict(list(weights.items())[1:])


def with_one_more(weights: dict) -> dict:
    name = next(iter(weights))
    return {**weights, name.replace("blocks.0", "blocks.9"): weights[name].clone()}


def wider(weights: dict) -> dict:
    name = next(n for n in weights if "lora_A" in n)
    return {**weights, name: torch.zeros(4, 99)}


@pytest.mark.parametrize("kind", ["peft_folder", "diffusers_folder"])
@pytest.mark.parametrize(
    ("change", "shown"),
    [
        (with_one_more, "transformer_blocks.9"),
        (without_one, "transformer_blocks"),
        (wider, "(4, 99)"),
        (rename("transformer_blocks", "blocks"), "tensors"),
        (rename("transformer_blocks", "_orig_mod.transformer_blocks"), "_orig_mod"),
    ],
    ids=["more", "fewer", "wider", "renamed", "compiled"],
)
def test_every_loader_rejects_an_incompatible_lora(
    request, tiny_sd3, tmp_path, kind, change, shown
):
    folder = request.getfixturevalue(kind)
    [file] = folder.glob("*.safetensors")
    settings = {} if kind == "peft_folder" else {"metadata": header_of(file)}
    save_file(change(load_file(file)), file, **settings)
    with raises_user_error(shown, field=str(file), kind=IncompatibleWeights):
        fresh(tiny_sd3).load_weights(folder)
    with raises_user_error(shown, field=str(file), kind=IncompatibleWeights):
        make_policy(fresh(tiny_sd3), lora_path=str(folder))
    with raises_user_error(file, shown, "--model"):
        export(ExportSource.find(folder), str(tiny_sd3), tmp_path / "out")


def not_finite(weights: dict) -> dict:
    weights[next(iter(weights))].view(-1)[0] = float("inf")
    return weights


@pytest.mark.parametrize("kind", ["peft_folder", "diffusers_folder"])
def test_every_loader_rejects_a_non_finite_lora(request, tiny_sd3, tmp_path, kind):
    folder = request.getfixturevalue(kind)
    [file] = folder.glob("*.safetensors")
    settings = {} if kind == "peft_folder" else {"metadata": header_of(file)}
    save_file(not_finite(load_file(file)), file, **settings)
    for load in (
        fresh(tiny_sd3).load_weights,
        lambda path: make_policy(fresh(tiny_sd3), lora_path=str(path)),
        lambda path: export(ExportSource.find(path), str(tiny_sd3), tmp_path / "out"),
    ):
        with raises_user_error("NaN"):
            load(folder)


def test_a_non_finite_transformer_is_rejected(tiny_sd3, tmp_path):
    folder = shutil.copytree(tiny_sd3 / "transformer", tmp_path / "transformer")
    [file] = folder.glob("*.safetensors")
    save_file(not_finite(load_file(file)), file)
    with raises_user_error("NaN"):
        fresh(tiny_sd3).load_weights(folder)
    file.unlink()
    os.mkfifo(file)
    with raises_user_error(file, "regular file"):
        fresh(tiny_sd3).load_weights(folder)


def test_dropout_of_a_lora_is_set_to_0_and_logged(tiny_sd3, tmp_path, caplog):
    _, wrapped = trained_by_peft(tiny_sd3, **PLAIN, lora_dropout=0.5)
    wrapped.save_pretrained(tmp_path / "lora")
    with caplog.at_level(logging.INFO, "flow_grpo"):
        policy = make_policy(fresh(tiny_sd3), lora_path=str(tmp_path / "lora"))
    assert "lora_dropout=0.5" in caplog.text
    assert policy.transformer.peft_config["default"].lora_dropout == 0
    expected = velocity(policy.adapter, policy.module)
    policy.module.train()
    assert torch.equal(velocity(policy.adapter, policy.module), expected)


def header_of(file: Path) -> dict:
    raw = file.read_bytes()
    return json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]


def test_incompatible_tensors_without_settings_are_rejected(diffusers_folder, tiny_sd3):
    [file] = diffusers_folder.iterdir()
    for change in (with_one_more, rename("transformer.", ""), rename("blocks.0", "blocks.7")):
        changed = diffusers_folder.with_name("changed.safetensors")
        save_file(change(load_file(file)), changed)
        with raises_user_error(field=str(changed), kind=IncompatibleWeights):
            fresh(tiny_sd3).load_lora(changed)


@pytest.mark.parametrize("other", [{"width": 64}, {"layers": 1}, {"layers": 3}])
def test_a_lora_of_another_model_is_rejected(theirs, other):
    with raises_user_error(kind=IncompatibleWeights):
        attach_lora(build_tiny_sd3(**other).transformer, find_weights(theirs))


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3'"),
        ({"modules_to_save": ["proj_out"]}, "modules_to_save=['proj_out']"),
        ({"bias": "all"}, "bias='all'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"megatron_config": {"a": 1}}, "megatron_config="),
        ({"use_something_new": True}, "use_something_new=True"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_anything_but_plain_lora_is_rejected(peft_folder, tiny_sd3, settings, shown):
    path = peft_folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with raises_user_error(path, shown):
        fresh(tiny_sd3).load_lora(peft_folder)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"r": 10**12}, str(10**12)),
        ({"lora_alpha": float("inf")}, "lora_alpha=inf"),
        ({"use_dora": "yes"}, "use_dora='yes'"),
        ({"target_modules": "*("}, "target_modules="),
        ({"modules_to_save": "proj_out"}, "modules_to_save='proj_out'"),
    ],
    ids=str,
)
def test_settings_are_checked_before_layers_are_made(peft_folder, settings, named):
    path = peft_folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with raises_user_error(named):
        read_lora(peft_folder)


def as_integers(weights: dict) -> dict:
    return {name: tensor.to(torch.int8) for name, tensor in weights.items()}


def twice(weights: dict) -> dict:
    return {**weights, **{n.removeprefix("base_model.model."): 5 * t for n, t in weights.items()}}


@pytest.mark.parametrize(("change", "named"), [(as_integers, "I8"), (twice, "base_model.model.")])
def test_integer_and_duplicate_tensors_are_rejected(peft_folder, change, named):
    file = peft_folder / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)
    with raises_user_error(named):
        read_lora(peft_folder)


def test_metadata_must_be_an_object(diffusers_folder):
    """Without it, diffusers assumes that alpha is the rank."""
    [file] = diffusers_folder.iterdir()
    save_file(load_file(file), file, {LORA_ADAPTER_METADATA_KEY: "[]"})
    with raises_user_error(LORA_ADAPTER_METADATA_KEY):
        read_lora(diffusers_folder)


@pytest.mark.parametrize("folder", ["diffusers_folder", "peft_folder"])
def test_a_directory_with_two_loras_is_rejected(folder, request):
    folder = request.getfixturevalue(folder)
    [file] = folder.glob("*.safetensors")
    shutil.copyfile(file, folder / "other.safetensors")
    with raises_user_error(file.name, "other.safetensors", field=str(folder)):
        read_lora(folder)
    assert read_lora(file).path == file


@pytest.mark.parametrize("name", ["adapter_model.bin", "pytorch_lora_weights.bin", "lora.pt"])
def test_a_pickle_is_never_opened(tiny_sd3, peft_folder, tmp_path, name):
    (peft_folder / "adapter_model.safetensors").unlink()
    write_malicious_pickle(peft_folder / name, tmp_path / "executed", zipped=False)
    for load in (
        fresh(tiny_sd3).load_lora,
        find_weights,
        lambda folder: make_policy(fresh(tiny_sd3), lora_path=str(folder)),
    ):
        with raises_user_error("pickle", "safetensors", field=str(peft_folder / name)):
            load(peft_folder)
    with raises_user_error(".safetensors", field=str(peft_folder / name)):
        fresh(tiny_sd3).load_lora(peft_folder / name)
    assert not (tmp_path / "executed").exists()


def test_unreadable_files_are_named(peft_folder, tiny_sd3, tmp_path):
    file, config = peft_folder / "adapter_model.safetensors", peft_folder / "adapter_config.json"
    weights, settings = file.read_bytes(), config.read_text()

    def assert_rejected(*shown: str, path: Path = peft_folder) -> None:
        with raises_user_error(*shown):
            fresh(tiny_sd3).load_lora(path)

    file.write_bytes(weights[:-9])
    assert_rejected(str(file))
    file.write_bytes(weights)
    for broken in (settings[:40], "[]", '{"r": "many"}', "{}"):
        config.write_text(broken)
        assert_rejected(str(peft_folder))
    config.unlink()
    assert_rejected(str(file), "adapter_config.json")
    shutil.copy(file, peft_folder / "a.safetensors")
    file.rename(peft_folder / "b.safetensors")
    assert_rejected(str(peft_folder), "(a.safetensors, b.safetensors)")
    for name in ("empty", "nothing"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        assert_rejected(str(tmp_path / name), path=tmp_path / name)


def test_a_lora_on_the_text_encoders_too(tiny_sd3, diffusers_folder, tmp_path):
    [file] = diffusers_folder.iterdir()
    pipeline = StableDiffusion3Pipeline.from_pretrained(tiny_sd3)
    encoder = pipeline.text_encoder
    encoder.add_adapter(LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    layers = get_peft_model_state_dict(encoder)
    both = {**load_file(file), **{f"text_encoder.{k}": v for k, v in layers.items()}}
    save_file(both, file)
    adapter = fresh(tiny_sd3)
    before = adapter.encode(["a"], None).inputs["embeds"]
    adapter.load_lora(diffusers_folder)
    assert not torch.equal(adapter.encode(["a"], None).inputs["embeds"], before)
    low = fresh(tiny_sd3, encoder_precision="nf4")
    low.load_lora(diffusers_folder)
    scales = [
        m.scale for m in low.pipeline.text_encoder.modules() if isinstance(m, QuantizedLinear)
    ]
    assert {scale.dtype for scale in scales} == {torch.bfloat16}  # diffusers casts the encoder
    with raises_user_error(file, str(len(layers)), "transformer"):
        export(ExportSource.find(diffusers_folder), str(tiny_sd3), tmp_path / "out")
    imports = {
        "text_encoder.megatron_config": {"a": 1},
        "text_encoder.megatron_core": "antigravity",
    }
    save_file(both, file, {LORA_ADAPTER_METADATA_KEY: json.dumps(imports)})
    with raises_user_error(file, "megatron_config"):
        fresh(tiny_sd3).load_lora(diffusers_folder)
    save_file(rename("q_proj", "x_proj")(both), file)
    with raises_user_error(kind=IncompatibleWeights):
        fresh(tiny_sd3).load_lora(diffusers_folder)
