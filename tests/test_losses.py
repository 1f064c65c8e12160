import pytest
import torch

from flow_grpo.losses import (
    adapt_kl_weight,
    clipped_policy_loss,
    gaussian_step_kl,
    kl_to_reference,
    root_mean_square,
)


def policy_loss(log_ratio, advantage, **kwargs):
    log_ratio = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    settings = {"clip_low": 0.1, "clip_high": 0.3, **kwargs}
    advantages = torch.tensor([advantage], dtype=torch.float64)
    out = clipped_policy_loss(log_ratio.exp(), advantages, **settings)
    out.loss.sum().backward()
    return out, log_ratio.grad.item()


def test_at_ratio_one_the_gradient_is_the_policy_gradient():
    out, gradient = policy_loss(0.0, 2.0)
    assert out.ratio.item() == 1
    assert not out.ratio.requires_grad
    assert out.loss.item() == gradient == -2.0


@pytest.mark.parametrize(
    ("ratio", "advantage", "clipped"),
    [
        (1.4, 1.0, True),  # already above the trust region
        (1.4, -1.0, False),  # too likely and bad: keeps its gradient
        (0.8, -1.0, True),
        (0.8, 0.5, False),
        (1.2, 1.0, False),  # within the wider upper bound
        (0.95, -1.0, False),
    ],
)
def test_only_ratios_moving_outward_are_clipped(ratio, advantage, clipped):
    out, gradient = policy_loss(torch.tensor(ratio).double().log().item(), advantage)
    assert (gradient == 0) == clipped
    assert (out.clipped_low | out.clipped_high).item() == clipped
    assert out.clipped_high.item() == (clipped and ratio > 1)


def test_zero_advantages_and_ratios_at_the_bound_are_not_counted_as_clipped():
    at_the_edge = [(0.0, advantage, {"clip_low": 0, "clip_high": 0}) for advantage in (1.0, -1.0)]
    no_advantage = [(log_ratio, 0.0, {}) for log_ratio in (1.0, -1.0)]
    for log_ratio, advantage, settings in at_the_edge + no_advantage:
        out, _ = policy_loss(log_ratio, advantage, **settings)
        assert not out.clipped_low
        assert not out.clipped_high


def kl(kind, **kwargs):
    arguments = {
        "mean": torch.full((2, 3), 0.5),
        "reference_mean": torch.full((2, 3), 0.2),
        "std": torch.full((2, 1), 0.1),
        "rate": torch.full((2, 1), 0.4),
        "velocity": torch.full((2, 3), 2.0),
        "reference_velocity": torch.full((2, 3), 1.0),
        **kwargs,
    }
    return kl_to_reference(kind, **arguments)


def test_gaussian_kl_equals_torch_distributions():
    normal = torch.distributions.Normal
    expected = torch.distributions.kl_divergence(normal(0.5, 0.1), normal(0.2, 0.1))
    torch.testing.assert_close(kl("gaussian"), expected.expand(2))
    moved = gaussian_step_kl(
        torch.full((2, 3), 0.5), torch.full((2, 3), 0.2), torch.full((2, 1), 0.1)
    )
    torch.testing.assert_close(moved, expected.expand(2))


def test_flow_grpo_kl_omits_dt():
    torch.testing.assert_close(kl("flow_grpo"), torch.full((2,), 0.3**2 / (2 * 0.4**2)))


def test_velocity_kl_is_the_mean_squared_difference():
    velocity = torch.tensor([[2.0, -1.0, 1.0], [1.0, 1.0, 4.0]])
    torch.testing.assert_close(kl("velocity", velocity=velocity), torch.tensor([5.0, 9.0]) / 3)


def test_the_square_of_half_precision_velocities_does_not_overflow():
    large = torch.full((2, 3), 301.0, dtype=torch.float16)
    found = kl("velocity", velocity=large, reference_velocity=torch.ones_like(large))
    assert found.tolist() == [90000.0, 90000.0]


@pytest.mark.parametrize("kind", ["flow_grpo", "gaussian", "velocity"])
def test_kl_is_zero_at_the_reference_and_pulls_towards_it(kind):
    moved = torch.full((2, 3), 1.5, requires_grad=True)
    value = kl(kind, mean=moved, velocity=moved)
    value.sum().backward()
    assert (value > 0).all()
    assert (moved.grad > 0).all()
    same = torch.ones(2, 3)
    at_reference = kl(kind, mean=same, reference_mean=same, velocity=same, reference_velocity=same)
    assert at_reference.tolist() == [0, 0]


def test_an_unknown_kl_type_is_rejected():
    with pytest.raises(ValueError, match=r"'k3'.*flow_grpo, gaussian, velocity"):
        kl("k3")


@pytest.mark.parametrize(
    ("kl", "expected"), [(1.13, 0.08), (1.125, 0.04), (0.75, 0.04), (0.5, 0.04), (0.49, 0.02)]
)
def test_the_kl_weight_follows_its_target(kl, expected):
    """Target .75: doubled above 1.125, halved below .5."""
    assert adapt_kl_weight(0.04, kl, 0.75) == pytest.approx(expected)


def test_the_norm_of_a_velocity_is_per_sample_and_has_no_gradient():
    velocity = torch.tensor([[[3.0, -5.0]], [[0.0, 2.0]]], requires_grad=True)
    norm = root_mean_square(velocity)
    assert not norm.requires_grad
    torch.testing.assert_close(norm, torch.tensor([17.0, 2.0]).sqrt())
    assert root_mean_square(velocity.bfloat16()).dtype == torch.float32
