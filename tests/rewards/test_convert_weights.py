"""Conversion of pickled weights to safetensors, and the errors of files that cannot be loaded."""

import hashlib
import os
import pickle
from pathlib import Path

import pytest
import torch
from runner import run_script
from safetensors.torch import load_file, save_file
from small_clip import clip_folder  # noqa: F401
from user_errors import raises_user_error

from flow_grpo.rewards.convert import convert_weights
from flow_grpo.rewards.scorers.clip import ClipScore, HpsV2

WEIGHTS = {"a.weight": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
WEIGHTS["shared"] = WEIGHTS["a.weight"].T  # the same memory, not contiguous


class Code:
    """Creates a file when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


def save(content, path: Path, **options) -> Path:
    torch.save(content, path, **options)
    return path


@pytest.mark.parametrize("nested", [(), ("state_dict",), ("model", "state_dict")])
@pytest.mark.parametrize("zipped", [True, False])
def test_tensors_are_equal_and_checksums_right(tmp_path, nested, zipped):
    content = dict(WEIGHTS)
    for key in nested:
        content = {key: content, "epoch": 3}
    source = save(content, tmp_path / "in.pt", _use_new_zipfile_serialization=zipped)
    target = tmp_path / "out.safetensors"
    done = convert_weights(source, target)
    loaded = load_file(target)
    assert loaded.keys() == WEIGHTS.keys()
    for name, value in WEIGHTS.items():
        assert loaded[name].dtype == value.dtype
        assert torch.equal(loaded[name], value)
    assert (done.tensors, done.parameters) == (3, 16)
    assert done.left_out == ["epoch"] * len(nested)
    assert done.source_sha256 == hashlib.sha256(source.read_bytes()).hexdigest()
    assert done.target_sha256 == hashlib.sha256(target.read_bytes()).hexdigest()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_invalid_files_are_reported_in_one_line_and_nothing_is_executed(tmp_path):
    trace, out = tmp_path / "ran", tmp_path / "out.safetensors"
    with_code = save({"a": Code(trace)}, tmp_path / "code.pt")
    with raises_user_error("not executed", "posix.mkdir", field="IN", value=str(with_code)):
        convert_weights(with_code, out)
    module = save(torch.nn.Linear(2, 2), tmp_path / "module.pt")
    with raises_user_error("torch.nn.modules.linear.Linear", field="IN") as error:
        convert_weights(module, out)
    assert "weights_only" not in str(error.value)  # torch advises to set it to False
    whole = save(WEIGHTS, tmp_path / "whole.pt").read_bytes()
    truncated = tmp_path / "truncated.pt"
    truncated.write_bytes(whole[: len(whole) // 2])
    with raises_user_error("incomplete or damaged", field="IN"):
        convert_weights(truncated, out)
    with raises_user_error("no state dict", field="IN"):
        convert_weights(save({"epoch": 1}, tmp_path / "none.pt"), out)
    with raises_user_error("NaN"):
        convert_weights(save({"a": torch.tensor([float("nan")])}, tmp_path / "nan.pt"), out)
    assert not trace.exists()
    assert not out.exists()


def test_the_target_is_a_new_safetensors_file(tmp_path):
    source = save(WEIGHTS, tmp_path / "in.pt")
    (tmp_path / "old.safetensors").write_text("kept")
    for name in ("out.bin", "old.safetensors", "no/out.safetensors"):
        with raises_user_error(field="OUT", value=str(tmp_path / name)):
            convert_weights(source, tmp_path / name)
    assert (tmp_path / "old.safetensors").read_text() == "kept"
    with raises_user_error(field="IN", value=str(tmp_path)):
        convert_weights(tmp_path, tmp_path / "x.safetensors")


def test_the_command_prints_the_checksums(tmp_path):
    source = save({"state_dict": WEIGHTS, "step": 7}, tmp_path / "in.pt")
    target = tmp_path / "out.safetensors"
    done = run_script("scripts/rewards.py", "convert", source, target)
    assert done.returncode == 0, done.stderr
    first, second, counts, rest = done.stdout.splitlines()
    assert first == f"{hashlib.sha256(source.read_bytes()).hexdigest()}  {source}"
    assert second == f"{hashlib.sha256(target.read_bytes()).hexdigest()}  {target}"
    assert (counts, rest.endswith(": step")) == ("3 tensors with 16 values", True)


def test_damaged_weights_of_a_reward_are_reported_in_one_line(folder, tmp_path):
    """Truncated, of another model, or a pickle with code, in a folder or a single file."""
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
    pickled.write_bytes(pickle.dumps({"a": Code(trace)}))
    with raises_user_error("not executed", field="model", value=str(pickled)):
        HpsV2(model=str(pickled), processor=str(folder))
    save({"a": torch.ones(2)}, pickled)
    with raises_user_error(field="model", value=str(pickled)):
        HpsV2(model=str(pickled), processor=str(folder))
    assert not trace.exists()
