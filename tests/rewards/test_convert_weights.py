"""Conversion of pickled weights to safetensors."""

import functools
import hashlib

import pytest
import torch
from malicious_files import MaliciousObject, write_malicious_pickle
from runner import run_script
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_clip import clip_folder  # noqa: F401
from user_errors import raises_user_error

from flow_grpo.rewards.convert_weights import convert_weights
from flow_grpo.rewards.scorers.clip import ClipScore, HpsV2


@pytest.fixture
def source(tmp_path):
    """Return a file whose state dict has tied and non-contiguous tensors."""
    tied = torch.randn(3, 4)
    weights = {"a": tied, "b": tied, "c": torch.randn(4, 2).T.bfloat16()}
    torch.save({"state_dict": weights, "epoch": 3}, tmp_path / "model.pth")
    return tmp_path / "model.pth"


def test_names_and_values_are_unchanged_and_the_checksum_is_recorded(source, tmp_path):
    target = tmp_path / "new/model.safetensors"
    found, written = convert_weights(source, target)
    expected = torch.load(source, weights_only=True)["state_dict"]
    weights = load_file(target)
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(weights[name], value)
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (source, target)]
    assert [found, written] == digests
    with safe_open(target, "pt") as file:
        assert file.metadata()["source_sha256"] == found
    assert [path.name for path in target.parent.iterdir()] == ["model.safetensors"]
    assert convert_weights(source, tmp_path / "again.safetensors", found.upper())[1] == written


def test_code_in_a_pickle_is_not_executed(tmp_path):
    for zipped in (True, False):
        write_malicious_pickle(tmp_path / "bad.pth", tmp_path / "ran", zipped=zipped)
        with raises_user_error(field="source", value=str(tmp_path / "bad.pth")):
            convert_weights(tmp_path / "bad.pth", tmp_path / "new.safetensors")
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "new.safetensors").exists()


@pytest.mark.parametrize("modules", [False, True])
def test_code_in_the_pickle_of_a_module_is_not_executed(tmp_path, modules):
    layer = torch.nn.Linear(2, 2)
    layer.extra = MaliciousObject(tmp_path / "ran")
    torch.save(layer, tmp_path / "module.pth")
    with raises_user_error("mkdir" if modules else "Linear", field="source"):
        convert_weights(tmp_path / "module.pth", tmp_path / "new.safetensors", modules=modules)
    assert not (tmp_path / "ran").exists()


def test_a_whole_module_is_converted_without_its_classes(tmp_path):
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2, bias=False))
    module.function = functools.partial(print, "never called")
    torch.save(module, tmp_path / "module.pth")
    convert_weights(tmp_path / "module.pth", tmp_path / "new.safetensors", modules=True)
    weights = load_file(tmp_path / "new.safetensors")
    expected = module.state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    torch.save({"a": torch.zeros(2)}, tmp_path / "dict.pth")
    with raises_user_error("no state dict", field="source"):
        convert_weights(tmp_path / "dict.pth", tmp_path / "other.safetensors", modules=True)


def test_invalid_files_are_rejected(source, tmp_path):
    target = tmp_path / "new.safetensors"
    with raises_user_error("SHA-256", "0" * 64, field="source"):
        convert_weights(source, target, "0" * 64)
    with raises_user_error(field="source"):
        convert_weights(tmp_path / "model.pt", target)
    with raises_user_error(".safetensors", field="target"):
        convert_weights(source, tmp_path / "new.bin")
    (tmp_path / "file").touch()
    with raises_user_error(f"because of {tmp_path / 'file'}", field="target"):
        convert_weights(source, tmp_path / "file/new.safetensors")
    target.touch()
    with raises_user_error("exists", field="target", value=str(target)):
        convert_weights(source, target)
    target.unlink()
    content = source.read_bytes()
    for broken in (content[: len(content) // 2], b"", b"text"):
        source.write_bytes(broken)
        with raises_user_error(field="source"):
            convert_weights(source, target)
    for other in ({}, [torch.zeros(2)], {"a": 1}):
        torch.save(other, source)
        with raises_user_error(field="source"):
            convert_weights(source, target)
    assert not target.exists()


def test_errors_about_pickles_do_not_advise_to_execute_them(tmp_path):
    module, target = tmp_path / "module.pt", tmp_path / "new.safetensors"
    torch.save(torch.nn.Linear(2, 2), module)
    with raises_user_error(
        "torch.nn.modules.linear.Linear", "not executed", field="source"
    ) as error:
        convert_weights(module, target)
    assert "weights_only" not in str(error.value)  # torch advises to set it to False
    torch.save({"a": torch.ones(99)}, module)
    module.write_bytes(module.read_bytes()[:500])
    with raises_user_error("incomplete or damaged", field="source"):
        convert_weights(module, target)


def test_the_command_prints_the_checksums(source, tmp_path):
    target = tmp_path / "out.safetensors"
    done = run_script("scripts/rewards.py", "convert", source, target)
    assert done.returncode == 0, done.stderr
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (source, target)]
    assert done.stdout.split() == [digests[0], str(source), digests[1], str(target)]
    again = run_script("scripts/rewards.py", "convert", source, target, "--sha256", "0" * 64)
    assert again.returncode == 2
    assert again.stderr.count("\n") == 1


def test_damaged_weights_of_a_reward_are_reported_in_one_line(folder, tmp_path):
    """The file is truncated, of another model, or a pickle with code."""
    copy = tmp_path / "clip"
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    weights = copy / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with raises_user_error(field="model", value=str(copy)):
        ClipScore(model=str(copy))
    save_file({"other.weight": torch.ones(2)}, weights, {"format": "pt"})
    with raises_user_error("missing tensors", field="model", value=str(copy)):
        ClipScore(model=str(copy))
    trace = tmp_path / "ran"
    pickled = tmp_path / "HPS_v2.1_compressed.pt"
    write_malicious_pickle(pickled, trace, zipped=False)
    with raises_user_error("not executed", field="model", value=str(pickled)):
        HpsV2(model=str(pickled), processor=str(folder))
    torch.save({"a": torch.ones(2)}, pickled)
    with raises_user_error(field="model", value=str(pickled)):
        HpsV2(model=str(pickled), processor=str(folder))
    assert not trace.exists()
