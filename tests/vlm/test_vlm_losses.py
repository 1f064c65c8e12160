"""Policy losses, aggregation, KL estimators, value loss and GAE."""

import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from user_errors import raises_user_error

from flow_grpo.advantages import compute_advantages
from flow_grpo.losses import PolicyLoss
from flow_grpo.vlm.advantages import compute_gae, compute_token_rewards
from flow_grpo.vlm.config_checks import check_config
from flow_grpo.vlm.fields import get_config
from flow_grpo.vlm.losses import (
    AGGREGATIONS,
    BUILT_IN_LOSSES,
    KL_ESTIMATORS,
    LOSS_NAMES,
    build_loss,
)
from flow_grpo.vlm.losses.base import (
    UpdateCounts,
    VlmLoss,
    estimate_kl,
    importance_weights,
    token_weights,
    value_loss,
)
from flow_grpo.vlm.losses.cppo import masked_quantile

LENGTHS = torch.tensor([5, 2, 4, 1])
MASK = torch.arange(5) < LENGTHS[:, None]
COUNTS = UpdateCounts(tokens=float(LENGTHS.sum()), responses=4.0)
ADVANTAGES = torch.tensor([[1.5], [-0.7], [0.4], [-2.0]], dtype=torch.float64)
CLIP = {"clip_low": 0.2, "clip_high": 0.3, "clamp_log_ratios": True}
TAU = {"tau_positive": 1.0, "tau_negative": 1.5}
PREFIX = {"cppo_delta": 0.02, "cppo_min_weight": 0.8, "cppo_budget": 0.002}
OWN = {**TAU, "drpo_epsilon": 0.05, **PREFIX}


def numbers(seed: int, scale: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(4, 5, generator=generator, dtype=torch.float64)


OLD = numbers(0, 1.0) - 2.0
NEW = OLD + numbers(1, 0.35)  # some ratios in the clip range, some beyond either end
NEW[2] += 0.2  # mean ratios of responses are beyond either end too
NEW[3] = OLD[3] + 0.6  # and beyond the dual clip
REFERENCE = OLD + numbers(2, 0.3)
DUAL = 1.5


def policy_loss(kind: str, *tensors: Tensor, **settings: float) -> PolicyLoss:
    settings = {"dual_clip": 0.0, **CLIP, **OWN, **settings}
    return build_loss(kind, SimpleNamespace(**settings)).per_token(*tensors)


def total(kind: str, aggregation: str, new: Tensor, dual: float = 0.0, kl: str = "") -> Tensor:
    loss = policy_loss(kind, new, OLD, ADVANTAGES, MASK, dual_clip=dual).loss
    return summed(loss, aggregation, new, kl)


def summed(loss: Tensor, aggregation: str, new: Tensor, kl: str) -> Tensor:
    if kl:
        loss = loss + 0.1 * estimate_kl(kl, new, REFERENCE)
    return (loss * token_weights(aggregation, MASK, COUNTS, max_new_tokens=8)).sum()


def finite_differences(function, at: Tensor, step: float = 1e-6) -> Tensor:
    gradient = torch.zeros_like(at)
    for index in itertools.product(*map(range, at.shape)):
        up, down = at.clone(), at.clone()
        up[index] += step
        down[index] -= step
        gradient[index] = (function(up) - function(down)) / (2 * step)
    return gradient


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("kl", ["", *KL_ESTIMATORS])
@pytest.mark.parametrize(
    ("kind", "dual"),
    [
        *[("clip", 0.0), ("clip", DUAL), ("gspo", 0.0), ("gspo", DUAL), ("cispo", 0.0)],
        *[("sapo", 0.0), ("drpo", 0.0), ("cppo", 0.0)],
    ],
)
def test_gradients_equal_finite_differences(kind, dual, kl, aggregation):
    """The weights of cispo are constants by definition."""
    constant = (NEW - OLD).exp().clamp(0.8, 1.3)

    def function(new: Tensor) -> Tensor:
        if kind == "cispo":
            return summed(-constant * ADVANTAGES * new, aggregation, new, kl)
        return total(kind, aggregation, new, dual, kl)

    new = NEW.clone().requires_grad_()
    loss = total(kind, aggregation, new, dual, kl)
    loss.backward()
    assert torch.allclose(loss, function(NEW))
    assert torch.allclose(new.grad, finite_differences(function, NEW), atol=1e-8)
    assert new.grad[~MASK].abs().max() == 0
    assert new.grad[MASK].abs().max() > 0
    if not kl:  # every kind of clipping occurs
        clipped = clipped_tokens(kind, dual)
        assert all(one.any() for one in clipped)
        assert torch.equal(new.grad == 0, ~MASK | sum(clipped, torch.zeros_like(MASK)))


def clipped_tokens(kind: str, dual: float) -> list[Tensor]:
    """Masks of tokens without gradient: above and below the clip range, beyond the dual clip."""
    if kind in ("cispo", "sapo", "drpo"):
        return []
    if kind == "cppo":
        found = policy_loss(kind, NEW, OLD, ADVANTAGES, MASK)
        return [found.clipped_low, found.clipped_high]
    log_ratio = torch.where(MASK, NEW - OLD, 0.0)
    if kind == "gspo":
        log_ratio = (log_ratio.sum(1) / LENGTHS)[:, None].expand_as(MASK)
    ratio, positive = log_ratio.exp(), ADVANTAGES > 0
    clipped = [MASK & positive & (ratio > 1.3), MASK & ~positive & (ratio < 0.8)]
    return [*clipped, MASK & ~positive & (ratio > dual)] if dual else clipped


def test_gradients_of_the_value_loss_equal_finite_differences():
    old, returns = OLD, OLD + numbers(3, 0.5)
    values = NEW.clone().requires_grad_()
    value_loss(values, old, returns, clip=0.2).sum().backward()
    expected = finite_differences(lambda x: value_loss(x, old, returns, clip=0.2).sum(), NEW)
    assert torch.allclose(values.grad, expected, atol=1e-8)
    clipped = values.grad == 0
    assert clipped.any()
    assert not clipped.all()


def test_dual_clip_bounds_the_loss_of_negative_advantages():
    far, old = torch.full((1, 1), 3.0), torch.zeros(1, 1)
    mask, negative = torch.ones(1, 1, dtype=torch.bool), -torch.ones(1, 1)
    free = policy_loss("clip", far, old, negative, mask).loss
    bound = policy_loss("clip", far, old, negative, mask, dual_clip=3.0).loss
    assert free.item() == pytest.approx(np.exp(3.0))
    assert bound.item() == 3.0
    both = [policy_loss("clip", NEW, OLD, ADVANTAGES, MASK, dual_clip=d) for d in (0, DUAL)]
    for name in ("ratio", "clipped_low", "clipped_high"):
        assert torch.equal(getattr(both[0], name), getattr(both[1], name))
    positive = policy_loss("clip", far, old, -negative, mask, dual_clip=3.0).loss
    assert positive.item() == pytest.approx(-1.3)


def test_cispo_reports_clipped_tokens():
    new = torch.tensor([[0.7, 0.9, 1.2, 1.4]], dtype=torch.float64).log()
    old, mask = torch.zeros_like(new), torch.ones_like(new, dtype=torch.bool)
    found = policy_loss("cispo", new, old, old, mask)
    assert torch.equal(found.ratio, new.exp())
    assert found.clipped_low.tolist() == [[True, False, False, False]]
    assert found.clipped_high.tolist() == [[False, False, False, True]]
    at_the_edge = policy_loss("cispo", old, old, old, mask, clip_low=0.0, clip_high=0.0)
    assert not (at_the_edge.clipped_low | at_the_edge.clipped_high).any()


def one_row(*probabilities: float) -> Tensor:
    return torch.tensor([probabilities], dtype=torch.float64).log()


def test_sapo_by_hand():
    """Compute 4 / tau sigmoid(tau (r - 1)) at r = 1.5, 1 and 0.5; tau is 1, or 1.5 for A < 0."""
    old, new = one_row(0.4, 0.4, 0.4), one_row(0.6, 0.4, 0.2)
    mask = torch.ones_like(old, dtype=torch.bool)
    up, down = torch.tensor([[2.0]]), torch.tensor([[-1.0]])
    loss = policy_loss("sapo", new, old, up, mask).loss[0]
    assert loss.tolist() == pytest.approx([-4.979674649, -4.0, -3.020325351], abs=1e-8)
    found = policy_loss("sapo", new, old, down, mask)
    assert found.loss[0].tolist() == pytest.approx([1.811143198, 4 / 3, 0.855523469], abs=1e-8)
    assert found.ratio[0].tolist() == pytest.approx([1.5, 1.0, 0.5])
    assert not (found.clipped_low | found.clipped_high).any()


def test_sapo_and_clip_have_the_same_gradient_on_policy():
    for kind in ("sapo", "clip", "drpo", "cppo"):
        new = OLD.clone().requires_grad_()
        policy_loss(kind, new, OLD, ADVANTAGES, MASK).loss.sum().backward()
        assert torch.allclose(new.grad, -ADVANTAGES * MASK, atol=1e-12), kind


def test_drpo_by_hand():
    """Compute -A r + |A| p_old (r - 1)^2 / (2 epsilon) with epsilon 0.15."""
    old, new = one_row(0.4, 0.4, 0.5), one_row(0.6, 0.4, 0.25)
    mask = torch.ones_like(old, dtype=torch.bool)
    for advantage, expected in ((2.0, [-7 / 3, -2.0, -1 / 6]), (-1.0, [11 / 6, 1.0, 11 / 12])):
        credit = torch.tensor([[advantage]], dtype=torch.float64)
        at = new.clone().requires_grad_()
        found = policy_loss("drpo", at, old, credit, mask, drpo_epsilon=0.15)
        assert found.loss[0].tolist() == pytest.approx(expected)
        # the weight of the gradient, 1 - sign(A (r - 1)) |p - p_old| / epsilon
        found.loss.sum().backward()
        sign = 1 if advantage > 0 else -1
        weights = [1 - sign * 0.2 / 0.15, 1, 1 + sign * 0.25 / 0.15]
        ratios = [1.5, 1, 0.5]
        slopes = [-advantage * r * w for r, w in zip(ratios, weights, strict=True)]
        assert at.grad[0].tolist() == pytest.approx(slopes)
        assert found.clipped_high.tolist() == [[True, False, False]]
        assert found.clipped_low.tolist() == [[False, False, True]]


@pytest.mark.parametrize(
    ("probabilities", "dropped"),
    [
        # changes .3, 0, .4: the first exceeds delta, the third the rest of the budget
        ([0.8, 0.5, 0.9], [True, False, True]),
        # changes of .15: the second is .135 weighted, but only .2 + .04 - .15 = .09 is left
        ([0.65, 0.65, 0.65], [False, True, True]),
        # changes of .01: below the budget
        ([0.51, 0.51, 0.51], [False, False, False]),
        # changes .17, .01, .01: .2 + .04 - .17 = .07 is left, then .2 + .076 - .179
        ([0.67, 0.51, 0.51], [False, False, False]),
        # one token
        ([0.71], [True]),
    ],
)
def test_cppo_by_hand(probabilities, dropped):
    """Use p_old = .5 and weights 1, .9 and .8; the fourth token is padding."""
    count = len(probabilities)
    mask = torch.tensor([[True] * count + [False]])
    new, old = one_row(*probabilities, 0.9), one_row(*[0.5] * count, 0.1)
    region = {"cppo_delta": 0.2, "cppo_budget": 0.02}
    found = policy_loss("cppo", new, old, torch.ones(1, 1), mask, **region)
    kept = [0.0 if drop else -2 * p for p, drop in zip(probabilities, dropped, strict=True)]
    assert found.loss[0, :count].tolist() == pytest.approx(kept)
    assert found.clipped_high.tolist() == [[*dropped, False]]
    back = policy_loss(
        "cppo", new, old, -torch.ones(1, 1), mask, **region
    )  # towards the old policy
    assert back.loss[0, :count].tolist() == pytest.approx([2 * p for p in probabilities])
    assert not (back.clipped_low | back.clipped_high).any()


def test_cppo_budget_is_the_limited_quantile_of_the_changes():
    """The quantile equals numpy's linear interpolation, per row without padding."""
    quantiles = masked_quantile(NEW, MASK, 0.9)
    for row, length in enumerate(LENGTHS):
        expected = np.quantile(NEW[row, :length].numpy(), 0.9)
        assert quantiles[row].item() == pytest.approx(expected)
    assert masked_quantile(NEW, torch.zeros_like(MASK), 0.9).tolist() == [[0.0]] * 4


def test_gspo_ratio_is_the_geometric_mean_of_a_response():
    ratio = policy_loss("gspo", NEW, OLD, ADVANTAGES, MASK).ratio
    for row, length in enumerate(LENGTHS):
        own = (NEW - OLD)[row, :length].mean().exp()
        assert torch.allclose(ratio[row, :length], own.expand(length))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_losses_of_micro_batches_add_up_to_that_of_the_update(aggregation):
    """So neither micro-batches nor the world size change the objective."""
    whole = total("clip", aggregation, NEW)
    parts = []
    for rows in ([0], [1, 2], [3]):
        longest = int(LENGTHS[rows].max())  # padded to the longest of the micro-batch
        new, old, mask = (t[rows, :longest] for t in (NEW, OLD, MASK))
        loss = policy_loss("clip", new, old, ADVANTAGES[rows], mask).loss
        parts.append((loss * token_weights(aggregation, mask, COUNTS, 8)).sum())
    assert torch.allclose(torch.stack(parts).sum(), whole, atol=1e-12)


def test_token_weights_of_each_aggregation():
    sums = {name: token_weights(name, MASK, COUNTS, 8).sum(1) for name in AGGREGATIONS}
    assert torch.allclose(sums["token"], LENGTHS / 12)
    assert torch.allclose(sums["sequence"], torch.full((4,), 0.25))
    assert torch.allclose(sums["constant"], LENGTHS / 32)


def test_kl_estimators_on_known_distributions():
    """Expectations are computed exactly over three tokens."""
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)
    kl = (policy * (policy / reference).log()).sum()
    means = {
        k: (policy * estimate_kl(k, policy.log(), reference.log())).sum() for k in KL_ESTIMATORS
    }
    assert torch.allclose(means["k1"], kl)
    assert torch.allclose(means["k3"], kl)
    assert means["k2"] == pytest.approx(kl.item(), rel=0.2)  # slightly biased near the reference
    for kind in ("k2", "k3"):
        assert (estimate_kl(kind, policy.log(), reference.log()) >= 0).all()


def kl_gradients(policy: Tensor, reference: Tensor) -> dict[tuple[str, str], Tensor]:
    """Return the expected gradient of each estimator, in the loss and as a reward.

    The gradient is with respect to the logits of a softmax policy.
    """
    logits, found = policy.log().requires_grad_(), {}
    for kind in KL_ESTIMATORS:
        log_probs = logits.log_softmax(0)
        estimate = estimate_kl(kind, log_probs, reference.log(), clamp=False)
        in_loss = (policy * estimate).sum()
        as_reward = (policy * estimate.detach() * log_probs).sum()
        for kl_in, mean in (("loss", in_loss), ("reward", as_reward)):
            (found[kind, kl_in],) = torch.autograd.grad(mean, logits, retain_graph=True)
    return found


def kl(one: Tensor, other: Tensor) -> Tensor:
    return (one * (one / other).log()).sum()


def test_only_k1_as_reward_and_k2_in_the_loss_have_the_gradient_of_the_kl():
    policy = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    reference = torch.tensor([0.3, 0.3, 0.1, 0.3], dtype=torch.float64)
    exact = finite_differences(lambda x: kl(x.softmax(0), reference), policy.log())
    backward = finite_differences(lambda x: kl(reference, x.softmax(0)), policy.log())
    found = kl_gradients(policy, reference)
    assert torch.allclose(found["k1", "reward"], exact, atol=1e-8)
    assert torch.allclose(found["k2", "loss"], exact, atol=1e-8)
    assert torch.allclose(found["k3", "loss"], backward, atol=1e-8)  # the reverse KL
    assert found["k1", "loss"].abs().max() < 1e-12
    assert torch.allclose(found["k3", "reward"], exact - backward, atol=1e-8)


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_gradients_of_k2_and_k3_as_reward_vanish_near_the_reference(kind):
    """The gradient of the KL is linear in the distance, theirs is quadratic."""
    reference = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    away = torch.tensor([1.0, -0.4, 0.8, -1.5], dtype=torch.float64)
    sizes = []
    for step in (0.01, 0.001):
        policy = (reference.log() + step * away).softmax(0)
        found = kl_gradients(policy, reference)
        sizes.append((found[kind, "reward"].norm() / found["k1", "reward"].norm()).item())
        assert torch.allclose(found["k3", "loss"], found["k1", "reward"], atol=step**2)
    assert sizes[0] < 0.02
    assert sizes[1] == pytest.approx(sizes[0] / 10, rel=0.1)


FAR = torch.tensor([[1000.0, -1000.0, 25.0, -25.0, 3.0]])


@pytest.mark.parametrize("kind", LOSS_NAMES)
def test_log_ratios_are_clamped_before_they_overflow(kind):
    """To +-20, as in EasyR1 and verl; beyond these bounds the gradient is 0, not NaN."""
    mask = torch.ones_like(FAR, dtype=torch.bool)
    per_token = kind != "gspo"  # gspo clamps the mean of a response
    far = FAR if per_token else torch.full_like(FAR, 1000.0)
    new = far.clone().requires_grad_()
    found = policy_loss(kind, new, torch.zeros_like(far), torch.tensor([[-1.0]]), mask)
    assert torch.allclose(found.ratio.log(), far.clamp(-20, 20))
    found.loss.sum().backward()
    assert found.loss.isfinite().all()
    assert new.grad.isfinite().all()
    if kind == "clip":
        assert (new.grad != 0).tolist() == [[False, False, False, False, True]]
    free = policy_loss(kind, far, 0 * far, -torch.ones(1, 1), mask, clamp_log_ratios=False)
    assert not free.ratio.isfinite().all()


def test_k3_is_clamped_as_in_easyr1_and_verl():
    """The exponent is clamped to +-20 and the value to +-10; k1 and k2 are not clamped."""
    far = FAR.clone().requires_grad_()
    found = estimate_kl("k3", far, torch.zeros_like(far))
    expected = [10.0, 10.0, 10.0, 10.0, np.exp(-3.0) + 2]
    assert found[0].tolist() == pytest.approx(expected)
    found.sum().backward()
    assert far.grad[0].tolist() == pytest.approx([0, 0, 0, 0, 1 - np.exp(-3.0)])
    assert estimate_kl("k3", FAR, 0 * FAR, clamp=False)[0].tolist() == pytest.approx(
        [999.0, np.inf, 24.0, np.exp(25.0) - 26, np.exp(-3.0) + 2]
    )
    assert torch.equal(estimate_kl("k1", FAR, 0 * FAR), FAR)
    assert torch.equal(estimate_kl("k2", FAR, 0 * FAR), 0.5 * FAR**2)


def test_importance_weights_are_ratios_up_to_the_cap():
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64, requires_grad=True)
    engine = torch.tensor([0.4, 0.5, 0.1], dtype=torch.float64)
    weights = importance_weights(policy.log(), engine.log(), cap=1.5)
    assert torch.allclose(weights, torch.tensor([1.25, 0.6, 1.5], dtype=torch.float64))
    assert not weights.requires_grad
    assert importance_weights(policy.log(), engine.log(), cap=0).tolist() == [1, 1, 1]
    assert importance_weights(engine, engine, cap=2.0).tolist() == [1, 1, 1]


def test_gae_by_hand_for_unequal_lengths():
    """With discount 0.9 and decay 0.8; the second response has two tokens."""
    cases = [
        (1.0, [0.5, 0.4, 0.3], [0.12928, 0.374, 0.7]),
        (2.0, [1.0, 0.5], [0.53, 1.5]),
    ]
    # first: deltas .9 * .4 - .5 = -.14, .9 * .3 - .4 = -.13, 1 - .3 = .7; each advantage adds
    # .9 * .8 = .72 of the next one: -.13 + .72 * .7 = .374, -.14 + .72 * .374 = .12928
    # second: deltas .9 * .5 - 1 = -.55, 2 - .5 = 1.5; -.55 + .72 * 1.5 = .53
    for reward, values, expected in cases:
        rewards = compute_token_rewards(torch.tensor(reward), len(values))
        assert rewards.tolist() == [0.0] * (len(values) - 1) + [reward]
        values, expected = torch.tensor(values), torch.tensor(expected)
        advantages, returns = compute_gae(rewards, values, discount=0.9, decay=0.8)
        assert torch.allclose(advantages, expected, atol=1e-6)
        assert torch.allclose(returns, expected + values, atol=1e-6)


def test_gae_without_discount_and_decay_is_return_minus_value():
    rewards, values = torch.tensor([0.1, 0.2, 0.7]), torch.tensor([0.3, 0.6, 0.2])
    advantages, _ = compute_gae(rewards, values, discount=1.0, decay=1.0)
    assert torch.allclose(advantages, torch.tensor([1.0, 0.9, 0.7]) - values)


def test_all_tokens_of_a_correct_response_get_credit_by_default():
    """Even 512 tokens before its end, while the value head is still zero."""
    train = check_config(get_config()).train
    settings = {"discount": train.discount, "decay": train.gae_decay}
    rewards = [compute_token_rewards(torch.tensor(reward), 512) for reward in (1.0, 0.0)]
    advantages = torch.stack([compute_gae(r, torch.zeros(512), **settings)[0] for r in rewards])
    right, wrong = advantages - advantages.mean()
    assert (right > 0).all()
    assert (wrong < 0).all()


def test_kl_penalties_are_subtracted_from_token_rewards():
    for reward, length, expected in ((1.0, 3, [-0.5, -0.5, 0.5]), (2.0, 1, [1.5])):
        penalty = torch.full((length,), 0.5)
        assert compute_token_rewards(torch.tensor(reward), length, penalty).tolist() == expected


def test_value_loss_has_no_gradient_beyond_its_clip():
    values = torch.tensor([[1.0]], requires_grad=True)
    loss = value_loss(values, torch.zeros(1, 1), torch.full((1, 1), 2.0), clip=0.5)
    assert loss.item() == pytest.approx(0.5 * 1.5**2)  # clipped to .5
    loss.sum().backward()
    assert values.grad.item() == 0


def test_value_loss_is_the_larger_of_the_clipped_and_unclipped_one():
    values, old, returns = torch.tensor([[-1.0, 3.0, 0.5], [0.3, 1.0, 0.3], [-2.0, 0.0, 0.0]])
    loss = value_loss(values, old, returns, clip=0.5)
    # the clipped value -.2; the value itself; a value within the clip range
    assert torch.allclose(loss, torch.tensor([0.5 * 1.8**2, 4.5, 0.125]))


@pytest.mark.parametrize(("low", "high"), [(0.3, 0.2), (0.2, 0.3)])
def test_clip_range_is_the_smaller_of_both_ends(low, high):
    settings = {**CLIP, "clip_low": low, "clip_high": high, "dual_clip": 0.0}
    assert build_loss("clip", SimpleNamespace(**settings)).clip_range == 0.2


def test_rloo_gradient_is_unbiased():
    """Its mean over all groups of three responses is the gradient of the expected reward."""
    logits = torch.tensor([[0.2, -0.4], [0.7, 0.1]], dtype=torch.float64, requires_grad=True)
    end, go_on = 0, 1
    responses = [[end], [go_on, end], [go_on, go_on]]  # truncated at two tokens
    rewards = np.array([1.0, 0.3, -0.5])
    mask = torch.tensor([[True, False], [True, True], [True, True]])

    def log_probs() -> Tensor:
        steps = logits.log_softmax(1)
        rows = [[steps[t, token] for t, token in enumerate(response)] for response in responses]
        return torch.stack(
            [torch.stack([*row, *[steps.new_zeros(())] * (2 - len(row))]) for row in rows]
        )

    chances = log_probs().sum(1).exp()
    assert chances.sum().item() == pytest.approx(1)
    (exact,) = torch.autograd.grad((chances * torch.from_numpy(rewards)).sum(), logits)
    estimate = torch.zeros_like(exact)
    for group in map(list, itertools.product(range(3), repeat=3)):
        new, own = log_probs()[group], mask[group]
        advantages = compute_advantages(rewards[group], np.zeros(3, dtype=int), estimator="rloo")
        credit = torch.from_numpy(advantages)[:, None]
        loss = policy_loss("clip", new, new.detach(), credit, own).loss
        counts = UpdateCounts(tokens=float(own.sum()), responses=3.0)
        # dividing by the length instead would favour short responses
        loss = (loss * token_weights("constant", own, counts, max_new_tokens=1)).sum()
        (gradient,) = torch.autograd.grad(loss, logits)
        estimate -= chances[group].prod().detach() * gradient
    assert torch.allclose(estimate, exact, atol=1e-12)


def test_documented_example_is_a_valid_loss(tmp_path, monkeypatch):
    text = (Path(__file__).parents[2] / "docs/vlm/losses.md").read_text("utf-8")
    [code] = [c for c in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "Capped" in c]
    (tmp_path / "capped_loss_example.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    from capped_loss_example import Capped

    new = NEW.clone().requires_grad_()
    loss = Capped.from_settings(SimpleNamespace(**CLIP)).per_token(new, OLD, ADVANTAGES, MASK).loss
    loss[MASK].sum().backward()
    assert torch.allclose(new.grad, -(NEW - OLD).exp().clamp(max=1.3) * ADVANTAGES * MASK)


def test_unknown_names_are_rejected():
    with raises_user_error(", ".join(BUILT_IN_LOSSES), field="train.loss", value="ppo"):
        policy_loss("ppo", NEW, OLD, ADVANTAGES, MASK)
    for call, known in (
        (lambda: token_weights("mean", MASK, COUNTS, 8), AGGREGATIONS),
        (lambda: estimate_kl("k4", NEW, OLD), KL_ESTIMATORS),
    ):
        with pytest.raises(ValueError, match=f"choose one of {', '.join(known)}$"):
            call()


def test_a_field_with_a_default_need_not_be_a_setting():
    @dataclass(frozen=True)
    class WithDefault(VlmLoss):
        clip_high: float
        sharpness: float = 3.0

    loss = WithDefault.from_settings(SimpleNamespace(clip_high=0.2))
    assert (loss.clip_high, loss.sharpness) == (0.2, 3.0)
