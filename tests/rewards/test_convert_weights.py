"""Conversion of pickled weights to safetensors."""

import hashlib

import pytest
import torch
from malicious_files import write_malicious_pickle
from safetensors import safe_open
from safetensors.torch import load_file
from user_errors import raises_user_error

from flow_grpo.rewards.convert_weights import convert_weights


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


def test_invalid_files_are_rejected(source, tmp_path):
    target = tmp_path / "new.safetensors"
    with raises_user_error("SHA-256", "0" * 64, field="source"):
        convert_weights(source, target, "0" * 64)
    with raises_user_error(field="source"):
        convert_weights(tmp_path / "model.pt", target)
    with raises_user_error(".safetensors", field="target"):
        convert_weights(source, tmp_path / "new.bin")
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
