"""Loading of language models and LoRA: weights are used unchanged or rejected."""

import json
import logging
import os
import shutil
from pathlib import Path

import pytest
import small_vlm
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from flow_grpo.data.questions import Question
from flow_grpo.errors import UserError
from flow_grpo.training.export import ExportSource
from flow_grpo.vlm.export import export
from flow_grpo.vlm.lora import attach_lora, merge_lora
from flow_grpo.vlm.models import find_family, load_model, load_processors
from flow_grpo.vlm.packing import Response, pack_responses
from flow_grpo.vlm.policy import VlmPolicy
from flow_grpo.weight_checks import check_finite, check_regular_files, is_finite

CPU = torch.device("cpu")
QUERY = "model.language_model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Save a model whose head is tied to the embedding."""
    return small_vlm.save(tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    """Return a copy to modify."""
    return shutil.copytree(saved, tmp_path / "model")


def change_weights(folder: Path, change, name: str = "model.safetensors") -> Path:
    weights = load_file(folder / name)
    save_file(change(weights), folder / name, metadata={"format": "pt"})
    return folder


def load(folder: Path) -> torch.nn.Module:
    return load_model(str(folder), CPU, torch.float32)


def rejected(call, *arguments) -> str:
    with pytest.raises(UserError) as error:
        call(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


# --- models --------------------------------------------------------------------------------------


def without(name: str):
    return lambda weights: {n: w for n, w in weights.items() if n != name}


def with_tensor(name: str, tensor: torch.Tensor):
    return lambda weights: {**weights, name: tensor}


def prefixed(prefix: str):
    return lambda weights: {prefix + name: tensor for name, tensor in weights.items()}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (without(f"{QUERY}.weight"), ["1 missing", f"{QUERY}.weight"]),
        (with_tensor(f"{QUERY}.weight", torch.zeros(3, 3)), ["1 mismatched", f"{QUERY}.weight"]),
        (with_tensor("score.weight", torch.zeros(3)), ["1 unexpected", "score.weight"]),
        (prefixed("module."), ["missing", "unexpected", "'module.'", "DistributedDataParallel"]),
        (prefixed("_orig_mod."), ["missing", "'_orig_mod.'"]),
        (lambda weights: {"a": torch.zeros(1)}, ["missing", "unexpected"]),
    ],
    ids=["missing", "mismatched", "unexpected", "module", "compiled", "other"],
)
def test_missing_mismatched_and_unexpected_tensors_are_rejected(folder, capfd, change, named):
    message = rejected(load, change_weights(folder, change))
    assert message.startswith(f"pretrained.model={str(folder)!r}")
    for each in named:
        assert each in message
    assert "LOAD REPORT" not in capfd.readouterr().err  # as transformers logs it


@pytest.mark.parametrize("kind", [torch.int8, torch.int64, torch.bool, torch.complex64])
def test_weights_that_are_not_floating_point_are_rejected(folder, adapter, kind):
    """Loaders would cast quantized values and ignore their scale."""

    def change(weights: dict) -> dict:
        name = next(n for n in weights if n.endswith("weight") and weights[n].ndim == 2)
        return {**weights, name: weights[name].to(kind)}

    change_weights(folder, change)
    change_weights(adapter, change, "adapter_model.safetensors")
    assert "model.safetensors" in rejected(load, folder)
    assert "must be floating point" in rejected(attach_lora, small_vlm.build(), adapter)


def test_a_tensor_in_two_shards_is_rejected(folder):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for file, part in zip(files, (weights, {f"{QUERY}.weight": torch.zeros(32, 32)}), strict=True):
        save_file(part, folder / file, metadata={"format": "pt"})
    weight_map = dict.fromkeys(weights, files[0]) | {f"{QUERY}.bias": files[1]}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert f"{QUERY}.weight" in rejected(load, folder)


def change_config(folder: Path, part: str, **values) -> Path:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    (config[part] if part else config).update(values)
    path.write_text(json.dumps(config))
    return folder


ROPE = {"rope_type": "default", "rope_theta": 0.0, "mrope_section": [2, 1, 1]}


@pytest.mark.parametrize(
    ("part", "field", "value", "named"),
    [
        ("text_config", "num_attention_heads", 0, "division"),
        ("", "tie_word_embeddings", None, "tie_word_embeddings"),
        ("", "text_config", [], "text_config"),
        ("text_config", "rms_norm_eps", "1e-6", "rms_norm_eps"),
        ("text_config", "rms_norm_eps", float("nan"), "rms_norm_eps"),
        ("text_config", "rope_parameters", ROPE, "inv_freq"),
    ],
)
def test_an_invalid_config_is_rejected(folder, part, field, value, named):
    assert named in rejected(load, change_config(folder, part, **{field: value}))


def test_a_tied_head_may_be_missing_or_saved(saved, folder):
    weights = load_file(saved / "model.safetensors")
    assert "lm_head.weight" not in weights
    embedding = weights["model.language_model.embed_tokens.weight"]
    assert torch.equal(load(saved).lm_head.weight, embedding)
    change_weights(folder, with_tensor("lm_head.weight", embedding.clone()))
    assert torch.equal(load(folder).lm_head.weight, embedding)


def test_a_model_directory_with_an_adapter_is_rejected(folder):
    """transformers would also load the adapter."""
    VlmPolicy(small_vlm.build(), processors=[], rank=2).save(folder.parent)
    shutil.copytree(folder.parent / "lora", folder, dirs_exist_ok=True)
    assert "train.lora_path" in rejected(load, folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_single_nonfinite_value_is_detected(monkeypatch, dtype, value):
    monkeypatch.setattr("flow_grpo.weight_checks.CHUNK", 4)
    tensor = torch.arange(15.0, dtype=dtype).reshape(3, 5)
    assert is_finite(tensor)
    assert is_finite(tensor.t())
    tensor[2, 3] = value
    assert not is_finite(tensor)
    assert not is_finite(tensor.t())


def test_empty_integer_and_meta_tensors_are_finite():
    for tensor in (torch.empty(0), torch.empty(0, 4), torch.arange(3), torch.tensor([True])):
        assert is_finite(tensor)
    assert is_finite(torch.zeros(3, device="meta"))
    assert is_finite(torch.ones(3).to(torch.float8_e4m3fn))
    assert not is_finite(torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn))
    with pytest.raises(UserError, match=r"here\b.* b .*NaN.*float16"):
        check_finite("here", [("a", torch.zeros(1)), ("b", torch.full((2,), 1e6).half())])


def with_nonfinite_value(name: str, value: float = float("nan")):
    def change(weights: dict) -> dict:
        weights[name].view(-1)[-1] = value
        return weights

    return change


def test_a_nonfinite_model_is_rejected_in_training_and_export(folder, tmp_path):
    change_weights(folder, with_nonfinite_value(f"{QUERY}.weight"))
    assert f"{QUERY}.weight" in rejected(load, folder)
    message = rejected(export, ExportSource(folder), str(folder), tmp_path / "out")
    assert f"{QUERY}.weight" in message
    assert not (tmp_path / "out").exists()


# --- LoRA ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    policy = VlmPolicy(small_vlm.build(), processors=[], rank=4, alpha=6)
    generator = torch.Generator().manual_seed(0)
    for parameter in policy.parameters():
        parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    policy.save(folder := tmp_path_factory.mktemp("trained"))
    return folder / "lora"


@pytest.fixture
def adapter(trained, tmp_path) -> Path:
    """Return a copy to modify."""
    return shutil.copytree(trained, tmp_path / "lora")


def change_settings(adapter: Path, **settings) -> Path:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return adapter


def every_other(weights: dict) -> dict:
    return dict([*weights.items()][::2])


def renamed(old: str, new: str):
    return lambda weights: {name.replace(old, new): tensor for name, tensor in weights.items()}


def with_wrong_shape(weights: dict) -> dict:
    name = next(n for n in weights if "lora_A" in n)
    return {**weights, name: torch.zeros(4, 99)}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (renamed("language_model", "decoder"), ["28 missing", "28 unexpected", "decoder"]),
        (every_other, ["14 missing"]),
        (renamed("layers.0", "layers.7"), ["14 missing", "14 unexpected", "layers.7"]),
        (with_wrong_shape, ["1 mismatched"]),
        (with_tensor("base_model.model.lm_head.lora_A.weight", torch.zeros(2)), ["1 unexpected"]),
        (lambda weights: with_nonfinite_value(next(iter(weights)))(weights), ["NaN", "lora_A"]),
    ],
    ids=["names", "missing", "layers", "shape", "unexpected", "nan"],
)
def test_a_lora_that_does_not_fit_the_model_is_rejected(saved, adapter, tmp_path, change, named):
    change_weights(adapter, change, "adapter_model.safetensors")
    for load_lora in (
        lambda: VlmPolicy(small_vlm.build(), processors=[], lora_path=str(adapter)),
        lambda: export(ExportSource(adapter), str(saved), tmp_path / "out"),
    ):
        message = rejected(load_lora)
        assert str(adapter) in message
        for each in named:
            assert each in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "settings",
    [
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": "pissa_niter_4"},
        {"init_lora_weights": "olora"},
        {"init_lora_weights": "corda"},
        {"init_lora_weights": "loftq"},
        {"peft_type": "IA3"},
        {"bias": "all"},
        {"modules_to_save": ["lm_head"]},
        {"target_parameters": ["experts.gate_up_proj"]},
        {"target_modules": ["no_such_layer"]},
    ],
    ids=lambda settings: "-".join(f"{k}={v}" for k, v in settings.items()),
)
def test_an_adapter_other_than_plain_lora_is_rejected_without_changing_the_model(adapter, settings):
    change_settings(adapter, **settings)
    model = small_vlm.build()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    [value] = settings.values()
    assert str(value).strip("[]'") in rejected(attach_lora, model, adapter)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name])


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"r": 10**12}, str(10**12)),
        ({"r": 4.0}, "4.0"),
        ({"rank_pattern": {"q_proj": 10**12}}, str(10**12)),
        ({"rank_pattern": [4]}, "rank_pattern"),
        ({"lora_alpha": float("nan")}, "lora_alpha=nan"),
        ({"lora_alpha": 1e39}, "lora_alpha=1e+39"),
        ({"alpha_pattern": {"q_proj": "8"}}, "'8'"),
        ({"use_rslora": "false"}, "use_rslora='false'"),
        ({"target_modules": "*("}, "target_modules='*('"),
        ({"modules_to_save": "lm_head"}, "modules_to_save='lm_head'"),
    ],
    ids=str,
)
def test_lora_settings_are_checked_before_layers_are_created(adapter, settings, named):
    model = small_vlm.build()
    assert named in rejected(attach_lora, model, change_settings(adapter, **settings))
    assert not hasattr(model, "peft_config")


def test_a_lora_that_overflows_in_float32_is_rejected(adapter, saved, tmp_path):
    def double(weights: dict) -> dict:
        name = next(iter(weights))
        return {**weights, name: torch.full_like(weights[name], 1e300, dtype=torch.float64)}

    def large(weights: dict) -> dict:  # finite, but not after merging
        return {name: torch.full_like(tensor, 1e30) for name, tensor in weights.items()}

    change_weights(adapter, double, "adapter_model.safetensors")
    assert "infinite" in rejected(attach_lora, small_vlm.build(), adapter)
    change_weights(adapter, large, "adapter_model.safetensors")
    assert "merged" in rejected(export, ExportSource(adapter), str(saved), tmp_path / "out")


def test_a_file_with_another_name_than_the_adapter_is_rejected(adapter):
    """Otherwise the adapter in the same directory would be loaded."""
    save_file({"a": torch.zeros(1)}, adapter / "other.safetensors")
    assert "other.safetensors" in rejected(
        attach_lora, small_vlm.build(), adapter / "other.safetensors"
    )


def test_a_lora_keeps_its_precision_and_merges_like_peft(trained):
    tensors = load_file(trained / "adapter_model.safetensors")
    model = small_vlm.build().to(torch.bfloat16)
    attach_lora(model, trained)
    loaded = {n.replace(".default.", "."): p for n, p in model.named_parameters() if "lora_" in n}
    assert loaded.keys() == {name.removeprefix("base_model.model.") for name in tensors}
    for name, weight in loaded.items():
        assert torch.equal(weight, tensors[f"base_model.model.{name}"])
    ours = small_vlm.build()
    attach_lora(ours, trained)
    theirs = PeftModel.from_pretrained(small_vlm.build(), trained).merge_and_unload().state_dict()
    ours = merge_lora(ours).state_dict()
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=0, atol=1e-6)


def test_export_merges_lora_like_peft(saved, trained, tmp_path):
    export(ExportSource(trained), str(saved), tmp_path / "out")
    exported = load(tmp_path / "out").state_dict()
    merged = PeftModel.from_pretrained(small_vlm.build(), trained).merge_and_unload().state_dict()
    for name, weight in merged.items():
        torch.testing.assert_close(exported[name], weight, rtol=0, atol=1e-6)


def test_dropout_is_disabled_in_training(adapter, tmp_path, caplog):
    """Dropout of the adapter and of the model, also with activation checkpointing."""
    change_settings(adapter, lora_dropout=0.5)
    model = small_vlm.build()
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    with caplog.at_level(logging.INFO, "flow_grpo"):
        policy = VlmPolicy(
            model, processors=[], lora_path=str(adapter), gradient_checkpointing=True
        )
    assert "lora_dropout=0.5" in caplog.text
    policy.save(tmp_path)
    settings = json.loads((tmp_path / "lora/adapter_config.json").read_text())
    assert settings["lora_dropout"] == 0
    calls = []
    attention = policy.model.get_submodule(QUERY.removesuffix(".q_proj"))
    attention.register_forward_hook(lambda *_: calls.append(1))
    prompt = small_vlm.encoder(model).encode(Question("1+2?", ()))
    batch = pack_responses(
        [Response(0, prompt, torch.tensor([40, 41, small_vlm.EOS]))], small_vlm.PAD
    )
    old = policy.forward_tokens_no_grad(batch)["log_probs"]
    calls.clear()
    new = policy.forward_tokens(batch)["log_probs"]
    assert torch.equal(old, new)
    new.sum().backward()
    assert len(calls) == 2  # recomputed in the backward pass


# --- files and configs ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_fifo_in_a_model_directory_is_rejected_without_reading(folder, name):
    (folder / name).unlink()
    os.mkfifo(folder / name)
    for call in (load, lambda path: find_family(str(path)), lambda p: load_processors(str(p))):
        message = rejected(call, folder)
        assert str(folder / name) in message
        assert "not a regular file" in message


def test_a_fifo_as_lora_is_rejected_without_reading(adapter):
    (adapter / "adapter_model.safetensors").unlink()
    os.mkfifo(adapter / "adapter_model.safetensors")
    assert "adapter_model.safetensors" in rejected(attach_lora, small_vlm.build(), adapter)


def test_links_to_regular_files_are_followed(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs/1").write_text("")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/weights").symlink_to(tmp_path / "blobs/1")
    (tmp_path / "model/lost").symlink_to(tmp_path / "blobs/2")
    for source in (tmp_path / "model", tmp_path / "model/weights", "owner/name", "a" * 999):
        check_regular_files("model", source)
    assert "/dev/zero" in rejected(check_regular_files, "model", "/dev/zero")


@pytest.mark.parametrize("part", ["", "text_config", "vision_config"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attn_implementation", "kernels-community/flash-attn2"),
        ("_attn_implementation", "kernels-community/flash-attn2"),
        ("attn_implementation", "flash_attention_2"),
        ("experts_implementation", "someone/experts"),
    ],
)
def test_a_config_that_selects_other_kernels_is_rejected(folder, part, field, value):
    change_config(folder, part, **{field: value})
    for call in (load, lambda path: find_family(str(path))):
        message = rejected(call, folder)
        assert value in message
        assert field.removeprefix("_") in message


@pytest.mark.parametrize("value", ["eager", "sdpa"])
def test_built_in_attention_may_be_selected(folder, value):
    change_config(folder, "", attn_implementation=value)
    assert load(folder).config._attn_implementation == value
