"""The gradient of every method's loss against finite differences, in float64."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from algorithm_fixtures import METHODS, STEPS, assert_gradient_matches, method, numbers, rollout
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
    "ipo": {"times": 3, "beta": 20.0, "kl_beta": 0.3},
    "kto": {"times": 3, "beta": 20.0, "dislike_weight": 0.5, "kl_beta": 0.3},
    "sft": {"times": 3, "kl_beta": 0.3, "kl_type": "flow_grpo"},
    "rwr": {"times": 3, "kl_beta": 0.3, "kl_type": "gaussian"},
}
WIDE["opd"] = {
    "teachers": {"signs": "signs/lora", "all": "scenes/lora"},
    "distance": "flow_grpo",
    "anchor_beta": 0.3,
}
CREDIT = {
    "dpo": (1, -1, -0.6, 0.6),
    "ipo": (1, -1, -0.6, 0.6),
    "kto": (1, -1, -1, 1),
    "sft": (0, 1, 1, 0),
    "rwr": (0.4, 1.6, 1.9, 0.1),
}
SETUP = {"num_steps": STEPS, "group_size": 2, "update_samples": 4}


class StopGradients:
    """Detached values are constants of the loss: replay those of the first evaluation."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch, self.values = monkeypatch, []

    @contextmanager
    def replayed(self) -> Iterator[None]:
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
    prepared = list(algorithm.iter_prepared(policy, algorithm.batches([batch], 4)))
    constants = StopGradients(monkeypatch)

    def objective() -> Tensor:
        with constants.replayed():
            losses = [
                algorithm.loss(policy, part, fixed, j)
                for part, fixed in prepared
                for j in range(algorithm.losses_per_sample)
            ]
        distance = "anchor_distance" if name == "opd" else "kl"
        assert all((loss.columns[distance] > 0).all() for loss in losses)
        return torch.stack([loss.per_sample.mean() for loss in losses]).mean()

    assert_gradient_matches(objective, policy, torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", METHODS)
def test_samples_without_a_gradient_are_reported(name):
    """Samples without credit are dropped from training unless the KL regularizes them."""
    kl_weight = next(
        n for n in ("kl_beta", "beta", "anchor_beta") if hasattr(method(name).settings, n)
    )
    regularized = method(name, SETUP, **{**WIDE[name], kl_weight: 0.3})
    plain = method(name, SETUP, **{**WIDE[name], kl_weight: 0.0})
    policy, batch = rollout(plain)
    batch = replace(batch, credit=torch.zeros_like(batch.credit))
    assert regularized.has_gradient(batch.credit).all()
    [(part, prepared)] = plain.iter_prepared(policy, [batch])
    gradients = torch.autograd.grad(
        plain.loss(policy, part, prepared, 0).per_sample.sum(), policy.parameters()
    )
    none = not any(g.any() for g in gradients)
    assert none or plain.has_gradient(batch.credit).all()
    # methods that depend on the old weights or on a teacher
    trained = name in ("nft", "awm", "opd")
    assert none != trained
    assert plain.has_gradient(numbers(0.1, -0.1)).all()


def test_all_algorithms_are_covered():
    assert WIDE.keys() == set(METHODS)
