"""The gradient of every method's loss against finite differences, in float64."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from methods import METHODS, STEPS, assert_slopes, method, numbers, rollout
from torch import Tensor

# Far from every kink: a clip or a mask that acts here would leave nothing to compare.
WIDE = {
    "grpo": {"clip_range": 0.5, "beta": 0.3},
    "grpo_guard": {"clip_range": 0.5, "beta": 0.3, "kl_type": "gaussian"},
    "dppo": {"delta": 1e3, "beta": 0.3, "kl_type": "velocity", "step_weight": "tempflow"},
    "mix": {"clip_range": 0.5, "beta": 0.3, "window_size": 2},
    "nft": {"times": 3, "beta": 0.7, "kl_beta": 0.3},
    "awm": {"times": 3, "kl_beta": 0.3, "kl_type": "gaussian"},
    "ram": {"times": 3, "kl_beta": 0.3, "noise_per": "group"},
    "leap": {"times": 3, "kl_beta": 0.3, "discount": 0.5},
    "dgpo": {"times": 3, "clip_range": 1e3, "beta": 5.0, "kl_beta": 0.3, "kl_type": "flow_grpo"},
    "dpo": {"times": 3, "beta": 20.0, "kl_beta": 0.3},
    "sft": {"times": 3, "kl_beta": 0.3, "kl_type": "flow_grpo"},
    "rwr": {"times": 3, "kl_beta": 0.3, "kl_type": "gaussian"},
}
WIDE["opd"] = {
    "teachers": {"signs": "signs/lora", "all": "scenes/lora"},
    "distance": "flow_grpo",
    "anchor_beta": 0.3,
}
CREDIT = {"dpo": (1, -1, -1, 1), "sft": (0, 1, 1, 0), "rwr": (0.4, 1.6, 1.9, 0.1)}
SETUP = {"num_steps": STEPS, "group_size": 2, "update_samples": 4}


class StopGradients:
    """What passes `detach` is a constant of the loss: it keeps the value of the first time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch, self.values = monkeypatch, []

    @contextmanager
    def held(self) -> Iterator[None]:
        detach, seen = Tensor.detach, iter(self.values)

        def first(tensor: Tensor) -> Tensor:
            self.values.append(detach(tensor).clone())
            return self.values[-1]

        with self.monkeypatch.context() as patch:
            patch.setattr(Tensor, "detach", (lambda _: next(seen)) if self.values else first)
            yield


@pytest.mark.parametrize(
    ("name", "guidance"),
    [*((name, 1.0) for name in METHODS), ("grpo", 4.5), ("nft", 4.5), ("dpo", 4.5)],
)
def test_the_gradient_equals_finite_differences(name, guidance, monkeypatch):
    algorithm = method(name, SETUP, **WIDE[name])
    policy, batch = rollout(algorithm, guidance=guidance)
    batch = replace(batch, credit=numbers(*CREDIT.get(name, batch.credit.tolist())))
    prepared = list(algorithm.prepared(policy, algorithm.batches([batch], 4)))
    constants = StopGradients(monkeypatch)

    def objective() -> Tensor:
        with constants.held():
            losses = [
                algorithm.loss(policy, part, fixed, j)
                for part, fixed in prepared
                for j in range(algorithm.losses_per_sample)
            ]
        leash = "anchor_distance" if name == "opd" else "kl"
        assert all((loss.columns[leash] > 0).all() for loss in losses)
        return torch.stack([loss.per_sample.mean() for loss in losses]).mean()

    assert_slopes(objective, policy, torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", METHODS)
def test_where_a_method_says_so_there_is_no_gradient(name):
    """Samples without credit: left out of training where no leash holds the weights."""
    leash = next(n for n in ("kl_beta", "beta", "anchor_beta") if hasattr(method(name).settings, n))
    held = method(name, SETUP, **{**WIDE[name], leash: 0.3})
    free = method(name, SETUP, **{**WIDE[name], leash: 0.0})
    policy, batch = rollout(free)
    batch = replace(batch, credit=torch.zeros_like(batch.credit))
    assert held.has_gradient(batch.credit).all()
    [(part, prepared)] = free.prepared(policy, [batch])
    gradients = torch.autograd.grad(
        free.loss(policy, part, prepared, 0).per_sample.sum(), policy.parameters()
    )
    none = not any(g.any() for g in gradients)
    assert none or free.has_gradient(batch.credit).all()
    # they move, or are held to, the old weights or a teacher
    trained = name in ("nft", "awm", "opd")
    assert none != trained
    assert free.has_gradient(numbers(0.1, -0.1)).all()


def test_all_methods_are_here():
    assert WIDE.keys() == set(METHODS)
