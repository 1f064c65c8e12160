import pytest
import torch

from flow_grpo.objectives import clipped_policy_loss, kl_to_reference


def policy_loss(log_ratio, advantage, **kwargs):
    log_prob = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    settings = {"clip_low": 0.1, "clip_high": 0.3, **kwargs}
    out = clipped_policy_loss(
        log_prob,
        torch.zeros(1, dtype=torch.float64),
        torch.tensor([advantage], dtype=torch.float64),
        **settings,
    )
    out.loss.sum().backward()
    return out, log_prob.grad.item()


def test_at_ratio_one_the_gradient_is_the_policy_gradient():
    out, gradient = policy_loss(0.0, 2.0)
    assert out.ratio.item() == 1
    assert out.loss.item() == gradient == -2.0


@pytest.mark.parametrize(
    ("ratio", "advantage", "held"),
    [
        (1.4, 1.0, True),  # already more likely than the region allows
        (1.4, -1.0, False),  # too likely and bad: must come back
        (0.8, -1.0, True),
        (0.8, 1.0, False),
        (1.2, 1.0, False),  # within the wider upper side
        (0.95, -1.0, False),
    ],
)
def test_the_clip_holds_only_what_moves_further_out(ratio, advantage, held):
    out, gradient = policy_loss(torch.tensor(ratio).double().log().item(), advantage)
    assert (gradient == 0) == held
    assert (out.clipped_low | out.clipped_high).item() == held
    assert out.clipped_high.item() == (held and ratio > 1)


def test_advantages_are_clamped():
    assert policy_loss(0.0, 50.0, adv_clip_max=5.0)[0].loss.item() == -5
    assert policy_loss(0.0, -50.0, adv_clip_max=5.0)[0].loss.item() == 5


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


def test_flow_grpo_kl_leaves_dt_out():
    torch.testing.assert_close(kl("flow_grpo"), torch.full((2,), 0.3**2 / (2 * 0.4**2)))


def test_velocity_kl_is_the_mean_squared_difference():
    torch.testing.assert_close(kl("velocity"), torch.ones(2))


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


def test_an_unknown_kl_is_named():
    with pytest.raises(ValueError, match="unknown KL 'k3'"):
        kl("k3")
