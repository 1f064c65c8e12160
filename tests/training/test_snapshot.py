import logging

import pytest
import torch
from torch import nn

from flow_grpo.training.snapshot import Reference, Snapshot


def weights(seed: int = 0, more: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (3, 2), "b": (4,), **{f"c{i}": (2,) for i in range(more)}}
    return {n: nn.Parameter(torch.randn(s, generator=generator)) for n, s in shapes.items()}


def test_a_blend_keeps_a_fraction():
    """With fractions k_n and weights w_n = n, from 0: the sum of (1 - k_n) n times all later k."""
    weight = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    snapshot = Snapshot({"w": weight}, "old")
    keeps = [0.25, 0.0, 0.5, 0.9]
    expected = 0.0
    for n, keep in enumerate(keeps, 1):
        weight.data.fill_(float(n))
        snapshot.blend(keep)
        expected = keep * expected + (1 - keep) * n
        assert snapshot.copy[0].tolist() == pytest.approx([expected] * 2, rel=1e-12)
    # after the fraction of 0, from 2: .5 * 2 + .5 * 3 = 2.5, then .9 * 2.5 + .1 * 4
    assert expected == pytest.approx(2.65)
    assert weight.tolist() == [4.0, 4.0]


def test_a_fraction_of_0_is_an_exact_copy():
    own = weights()
    snapshot = Snapshot(own, "old")
    assert snapshot.is_current
    for parameter in own.values():
        parameter.data.mul_(1 / 3)
    snapshot.is_current = False
    snapshot.blend(0.5)
    assert not snapshot.is_current
    snapshot.blend(0)
    assert snapshot.is_current
    assert all(map(torch.equal, snapshot.copy, own.values()))
    own["a"].data.add_(1)
    assert not torch.equal(snapshot.copy[0], own["a"])


def test_the_copy_is_swapped_in_and_out():
    own = weights(more=40)
    first = [p.detach().clone() for p in own.values()]
    snapshot = Snapshot(own, "old")
    for parameter in own.values():
        parameter.data.add_(1 / 3)
    moved = [p.detach().clone() for p in own.values()]
    storage = [p.data_ptr() for p in own.values()]
    with snapshot.applied():
        assert all(map(torch.equal, own.values(), first))
    assert all(map(torch.equal, own.values(), moved))
    assert all(map(torch.equal, snapshot.copy, first))
    assert [p.data_ptr() for p in own.values()] == storage  # as optimizers know them


def test_the_copy_is_swapped_out_after_an_error():
    own = weights()
    first = [p.detach().clone() for p in own.values()]
    snapshot = Snapshot(own, "old")
    for parameter in own.values():
        parameter.data.neg_()
    with pytest.raises(KeyError), snapshot.applied():
        raise KeyError("inside")
    assert all(torch.equal(p, -f) for p, f in zip(own.values(), first, strict=True))
    assert all(map(torch.equal, snapshot.copy, first))


def test_a_copy_is_saved_and_loaded_bit_for_bit(tmp_path):
    own = weights()
    snapshot = Snapshot(own, "old")
    for parameter in own.values():
        parameter.data.mul_(1.1)
    snapshot.blend(0.3)
    snapshot.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["old.safetensors"]
    other = weights(seed=1)
    before = [p.detach().clone() for p in other.values()]
    loaded = Snapshot(other, "old")
    loaded.load(tmp_path)
    assert all(map(torch.equal, loaded.copy, snapshot.copy))
    assert all(map(torch.equal, other.values(), before))
    assert not loaded.is_current
    for parameter, copy in zip(other.values(), snapshot.copy, strict=True):
        parameter.data.copy_(copy)
    loaded.load(tmp_path)
    assert loaded.is_current


def test_without_a_saved_reference_the_initial_weights_are_used(tmp_path, caplog):
    own = weights()
    reference = Reference(own)
    own["a"].data.zero_()
    reference.load(tmp_path)
    assert torch.equal(reference.copy[0], weights()["a"])
    assert not caplog.messages


def test_a_missing_copy_starts_from_the_weights(tmp_path, caplog):
    own = weights()
    snapshot = Snapshot(own, "old")
    for parameter in own.values():
        parameter.data.add_(1)
    with caplog.at_level(logging.WARNING):
        snapshot.load(tmp_path)
    assert all(map(torch.equal, snapshot.copy, own.values()))
    [message] = caplog.messages
    assert message.startswith(f"{tmp_path} has no old weights")


def test_a_copy_of_other_weights_is_rejected(tmp_path):
    Snapshot(weights(), "old").save(tmp_path)
    with pytest.raises(ValueError, match=r"^old\.safetensors: .* a$"):
        Snapshot({"c": nn.Parameter(torch.zeros(2))}, "old").load(tmp_path)
    reshaped = {"a": nn.Parameter(torch.zeros(1, 2)), "b": nn.Parameter(torch.zeros(4))}
    with pytest.raises(ValueError, match=r"^old\.safetensors: a .*\(3, 2\).*\(1, 2\)"):
        Snapshot(reshaped, "old").load(tmp_path)
