"""leap: the gradient of the reward through leaps, and rewards without a gradient."""

import numpy as np
import pytest
import torch
from algorithm_fixtures import STEPS, method, rollout
from torch import Tensor
from train import collect_rewards, sample_epoch, train_epoch

from flow_grpo.diffusion.algorithms.base import ScoredSamples
from flow_grpo.diffusion.policy import Policy
from flow_grpo.errors import UserError
from flow_grpo.rewards import build_reward


def reward(x: Tensor) -> Tensor:
    """What `rollout` gives the gradient of."""
    return (x - x**2).sum()


def through_the_leaps(policy: Policy, batch, prepared, discount: float) -> list[Tensor]:
    """The same with autograd only: each leap begins at the state of the rollout, but with the
    gradient, discounted, of where the leap before it came to."""
    conditioning, x, t = batch.trajectory.conditioning, prepared.x_t, prepared.t
    at, came = x[:, 0], None
    for j in range(x.shape[1]):
        if came is not None:  # the state's value, the leap's gradient
            at = x[:, j] + discount * (came - came.detach())
        velocity = policy.velocity(at, prepared.timesteps[:, j], conditioning)
        until = t[:, j + 1] if j + 1 < x.shape[1] else torch.zeros_like(t[:, j])
        moved = (until - t[:, j]) * velocity
        # where the next begins: the full gradient of this leap, and what came before it
        came = (came if came is not None else x[:, 0]) + moved
    last = batch.trajectory.final + came - came.detach()
    return torch.autograd.grad(-reward(last) / len(batch), policy.parameters())


@pytest.mark.parametrize("discount", [0.0, 0.4, 1.0])
def test_the_gradient_is_that_of_the_reward_through_the_leaps(discount):
    algorithm = method("leap", {"num_steps": STEPS}, times=3, discount=discount)
    policy, batch = rollout(algorithm, moved=0.0)
    batch.credit.fill_(1.0)
    prepared = algorithm.prepare(policy, batch)
    losses = [algorithm.loss(policy, batch, prepared, j).per_sample.mean() for j in range(3)]
    found = torch.autograd.grad(torch.stack(losses).sum(), policy.parameters())
    for a, b in zip(found, through_the_leaps(policy, batch, prepared, discount), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-12)


def test_leaps_over_all_steps_without_discount_equal_the_rollout():
    """DRaFT: the loss falls along the gradient as the reward of a new rollout rises."""
    algorithm = method("leap", {"num_steps": STEPS}, times=STEPS, discount=1.0)
    policy, batch = rollout(algorithm, moved=0.0)
    batch.credit.fill_(1.0)
    prepared = algorithm.prepare(policy, batch)
    losses = [algorithm.loss(policy, batch, prepared, j).per_sample for j in range(STEPS)]
    parameters = policy.parameters()
    gradients = torch.autograd.grad(torch.stack(losses).sum(), parameters)
    slope = sum(float((g**2).sum()) for g in gradients)
    h, values = 1e-6 / slope**0.5, []
    for sign in (h, -2 * h):
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= sign * gradient
        policy.on_weights_updated()
        start = batch.trajectory.states[:, 0]
        values.append(reward(policy.denoiser.sample(start, batch.trajectory.conditioning).final))
    assert float(values[0] - values[1]) / (2 * h) == pytest.approx(slope, rel=1e-4)


def test_a_run_follows_the_gradient_of_a_custom_reward(make_session):
    """After a few updates the same noise gives a brighter image."""
    session = make_session(
        algorithm="leap",
        custom_rewards={"light": "test_leap:Light"},
        reward_fn={"light": 1.0},
        **{"leap.times": 2, "sample.guidance_scale": 1.0, "train.learning_rate": 1e-3},
    )
    samples = sample_epoch(session, 0)
    before = collect_rewards(session, 0, samples)
    train_epoch(session, 0, samples, session.algorithm.credit(before))
    after = collect_rewards(session, 0, sample_epoch(session, 0))
    assert (after.rewards["light"] > before.rewards["light"]).all()


class Light:
    def score_pixels(self, pixels: Tensor, prompts: list[str]) -> Tensor:
        return pixels.flatten(1).mean(1)

    def __call__(self, images: list, prompts: list[str], metadata: list[dict]) -> list[float]:
        return [float(np.asarray(image).mean()) / 255 for image in images]


def test_all_scored_samples_have_credit():
    scored = ScoredSamples({"a": np.array([0.3, np.nan, 7.0])}, np.zeros(3, int), {"a": 1.0})
    assert method("leap").credit(scored).tolist() == [1, 0, 1]


def test_a_reward_without_a_gradient_is_rejected():
    reward = build_reward({"jpeg_compressibility": 1.0})
    with pytest.raises(UserError, match=r"^reward 'jpeg_compressibility' .*differentia.*'leap'"):
        reward.check_differentiable("algorithm='leap'")
