"""The losses of answers: gradients, aggregation, KL, GAE."""

import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from flow_grpo.advantages import compute_advantages
from flow_grpo.answer.check import check
from flow_grpo.answer.credit import generalized_advantages, token_rewards
from flow_grpo.answer.fields import get_config
from flow_grpo.answer.losses import AGGREGATIONS, DIVERGENCES, KINDS, build_loss
from flow_grpo.answer.losses.base import (
    Counts,
    divergence,
    importance_weights,
    token_weights,
    value_loss,
)
from flow_grpo.losses import PolicyLoss

LENGTHS = torch.tensor([5, 2, 4, 1])
MASK = torch.arange(5) < LENGTHS[:, None]
COUNTS = Counts(tokens=float(LENGTHS.sum()), answers=4.0)
ADVANTAGES = torch.tensor([[1.5], [-0.7], [0.4], [-2.0]], dtype=torch.float64)
CLIP = {"clip_low": 0.2, "clip_high": 0.3}


def numbers(seed: int, scale: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(4, 5, generator=generator, dtype=torch.float64)


OLD = numbers(0, 1.0) - 2.0
NEW = OLD + numbers(1, 0.35)  # some ratios in the clip range, some beyond either end
NEW[2] += 0.2  # now the ratios of whole answers are beyond these ends too
NEW[3] = OLD[3] + 0.6  # and beyond the dual clip
REFERENCE = OLD + numbers(2, 0.3)
DUAL = 1.5


def policy_loss(kind: str, *tensors: Tensor, **settings: float) -> PolicyLoss:
    settings = {"dual_clip": 0.0, **CLIP, **settings}
    return build_loss(kind, SimpleNamespace(**settings)).per_token(*tensors)


def total(kind: str, aggregation: str, new: Tensor, dual: float = 0.0, kl: str = "") -> Tensor:
    loss = policy_loss(kind, new, OLD, ADVANTAGES, MASK, dual_clip=dual).loss
    return summed(loss, aggregation, new, kl)


def summed(loss: Tensor, aggregation: str, new: Tensor, kl: str) -> Tensor:
    if kl:
        loss = loss + 0.1 * divergence(kl, new, REFERENCE)
    return (loss * token_weights(aggregation, MASK, COUNTS, max_new_tokens=8)).sum()


def finite_differences(function, at: Tensor, step: float = 1e-6) -> Tensor:
    gradient = torch.zeros_like(at)
    for place in itertools.product(*map(range, at.shape)):
        up, down = at.clone(), at.clone()
        up[place] += step
        down[place] -= step
        gradient[place] = (function(up) - function(down)) / (2 * step)
    return gradient


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("kl", ["", *DIVERGENCES])
@pytest.mark.parametrize(
    ("kind", "dual"),
    [("clip", 0.0), ("clip", DUAL), ("gspo", 0.0), ("gspo", DUAL), ("cispo", 0.0)],
)
def test_gradients_equal_finite_differences(kind, dual, kl, aggregation):
    """Of cispo with the weights held as they are, which have no gradient by its definition."""
    held = (NEW - OLD).exp().clamp(0.8, 1.3)

    def function(new: Tensor) -> Tensor:
        if kind == "cispo":
            return summed(-held * ADVANTAGES * new, aggregation, new, kl)
        return total(kind, aggregation, new, dual, kl)

    new = NEW.clone().requires_grad_()
    loss = total(kind, aggregation, new, dual, kl)
    loss.backward()
    assert torch.allclose(loss, function(NEW))
    assert torch.allclose(new.grad, finite_differences(function, NEW), atol=1e-8)
    assert new.grad[~MASK].abs().max() == 0
    assert new.grad[MASK].abs().max() > 0
    if not kl:  # all ways to be held are there, else the test would not see them
        held = held_tokens(kind, dual)
        assert all(one.any() for one in held)
        assert torch.equal(new.grad == 0, ~MASK | sum(held, torch.zeros_like(MASK)))


def held_tokens(kind: str, dual: float) -> list[Tensor]:
    """Those without a gradient: beyond either end of the clip range, and beyond the dual clip."""
    if kind == "cispo":
        return []
    log_ratio = torch.where(MASK, NEW - OLD, 0.0)
    if kind == "gspo":
        log_ratio = (log_ratio.sum(1) / LENGTHS)[:, None].expand_as(MASK)
    ratio, gains = log_ratio.exp(), ADVANTAGES > 0
    held = [MASK & gains & (ratio > 1.3), MASK & ~gains & (ratio < 0.8)]
    return [*held, MASK & ~gains & (ratio > dual)] if dual else held


def test_gradients_of_the_value_loss_equal_finite_differences():
    old, returns = OLD, OLD + numbers(3, 0.5)
    values = NEW.clone().requires_grad_()
    value_loss(values, old, returns, clip=0.2).sum().backward()
    expected = finite_differences(lambda x: value_loss(x, old, returns, clip=0.2).sum(), NEW)
    assert torch.allclose(values.grad, expected, atol=1e-8)
    held = values.grad == 0
    assert held.any()
    assert not held.all()


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


def test_cispo_tells_what_its_clip_range_holds():
    new = torch.tensor([[0.7, 0.9, 1.2, 1.4]], dtype=torch.float64).log()
    old, mask = torch.zeros_like(new), torch.ones_like(new, dtype=torch.bool)
    found = policy_loss("cispo", new, old, old, mask)
    assert torch.equal(found.ratio, new.exp())
    assert found.clipped_low.tolist() == [[True, False, False, False]]
    assert found.clipped_high.tolist() == [[False, False, False, True]]
    at_the_edge = policy_loss("cispo", old, old, old, mask, clip_low=0.0, clip_high=0.0)
    assert not (at_the_edge.clipped_low | at_the_edge.clipped_high).any()


def test_gspo_has_one_ratio_for_an_answer_the_geometric_mean():
    ratio = policy_loss("gspo", NEW, OLD, ADVANTAGES, MASK).ratio
    for row, length in enumerate(LENGTHS):
        own = (NEW - OLD)[row, :length].mean().exp()
        assert torch.allclose(ratio[row, :length], own.expand(length))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_parts_of_an_update_add_up_to_the_whole(aggregation):
    """So neither micro-batches nor processes change what is minimized."""
    whole = total("clip", aggregation, NEW)
    parts = []
    for rows in ([0], [1, 2], [3]):
        longest = int(LENGTHS[rows].max())  # a part is padded to its own longest
        new, old, mask = (t[rows, :longest] for t in (NEW, OLD, MASK))
        loss = policy_loss("clip", new, old, ADVANTAGES[rows], mask).loss
        parts.append((loss * token_weights(aggregation, mask, COUNTS, 8)).sum())
    assert torch.allclose(torch.stack(parts).sum(), whole, atol=1e-12)


def test_what_the_aggregations_average():
    sums = {name: token_weights(name, MASK, COUNTS, 8).sum(1) for name in AGGREGATIONS}
    assert torch.allclose(sums["token"], LENGTHS / 12)
    assert torch.allclose(sums["sequence"], torch.full((4,), 0.25))
    assert torch.allclose(sums["constant"], LENGTHS / 32)


def test_divergences_of_known_distributions():
    """All expectations over a distribution that can be written down."""
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)
    kl = (policy * (policy / reference).log()).sum()
    means = {k: (policy * divergence(k, policy.log(), reference.log())).sum() for k in DIVERGENCES}
    assert torch.allclose(means["k1"], kl)
    assert torch.allclose(means["k3"], kl)
    assert means["k2"] == pytest.approx(kl.item(), rel=0.2)  # biased, little near the reference
    for kind in ("k2", "k3"):
        assert (divergence(kind, policy.log(), reference.log()) >= 0).all()


def kl_gradients(policy: Tensor, reference: Tensor) -> dict[tuple[str, str], Tensor]:
    """Expected gradients over all tokens of a softmax policy, with respect to its logits, of each
    estimator in the loss and as a reward."""
    logits, found = policy.log().requires_grad_(), {}
    for kind in DIVERGENCES:
        log_probs = logits.log_softmax(0)
        estimate = divergence(kind, log_probs, reference.log(), clamp=False)
        in_loss = (policy * estimate).sum()
        as_reward = (policy * estimate.detach() * log_probs).sum()
        for place, mean in (("loss", in_loss), ("reward", as_reward)):
            (found[kind, place],) = torch.autograd.grad(mean, logits, retain_graph=True)
    return found


def kl(one: Tensor, other: Tensor) -> Tensor:
    return (one * (one / other).log()).sum()


def test_only_k1_in_the_reward_and_k2_in_the_loss_have_the_gradient_of_the_kl():
    policy = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    reference = torch.tensor([0.3, 0.3, 0.1, 0.3], dtype=torch.float64)
    exact = finite_differences(lambda x: kl(x.softmax(0), reference), policy.log())
    backward = finite_differences(lambda x: kl(reference, x.softmax(0)), policy.log())
    found = kl_gradients(policy, reference)
    assert torch.allclose(found["k1", "reward"], exact, atol=1e-8)
    assert torch.allclose(found["k2", "loss"], exact, atol=1e-8)
    assert torch.allclose(found["k3", "loss"], backward, atol=1e-8)  # of the KL the other way round
    assert found["k1", "loss"].abs().max() < 1e-12
    assert torch.allclose(found["k3", "reward"], exact - backward, atol=1e-8)


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_near_the_reference_k2_and_k3_in_the_reward_have_next_to_no_gradient(kind):
    """The gradient of the KL falls with the distance, theirs with its square."""
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


@pytest.mark.parametrize("kind", KINDS)
def test_log_ratios_are_clamped_before_they_overflow(kind):
    """By 20 on either side, as those of EasyR1 and verl; the gradient is 0 beyond, not NaN."""
    mask = torch.ones_like(FAR, dtype=torch.bool)
    per_token = kind != "gspo"  # which clamps the mean of a response
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
    """The exponent by 20, the value by 10; k1 and k2 are as they are."""
    far = FAR.clone().requires_grad_()
    found = divergence("k3", far, torch.zeros_like(far))
    expected = [10.0, 10.0, 10.0, 10.0, np.exp(-3.0) + 2]
    assert found[0].tolist() == pytest.approx(expected)
    found.sum().backward()
    assert far.grad[0].tolist() == pytest.approx([0, 0, 0, 0, 1 - np.exp(-3.0)])
    assert divergence("k3", FAR, 0 * FAR, clamp=False)[0].tolist() == pytest.approx(
        [999.0, np.inf, 24.0, np.exp(25.0) - 26, np.exp(-3.0) + 2]
    )
    assert torch.equal(divergence("k1", FAR, 0 * FAR), FAR)
    assert torch.equal(divergence("k2", FAR, 0 * FAR), 0.5 * FAR**2)


def test_importance_weights_are_ratios_up_to_the_cap():
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64, requires_grad=True)
    engine = torch.tensor([0.4, 0.5, 0.1], dtype=torch.float64)
    weights = importance_weights(policy.log(), engine.log(), cap=1.5)
    assert torch.allclose(weights, torch.tensor([1.25, 0.6, 1.5], dtype=torch.float64))
    assert not weights.requires_grad
    assert importance_weights(policy.log(), engine.log(), cap=0).tolist() == [1, 1, 1]
    assert importance_weights(engine, engine, cap=2.0).tolist() == [1, 1, 1]


def test_gae_by_hand_at_unequal_lengths():
    """discount .9, decay .8; the second answer is two tokens long."""
    rewards = token_rewards(torch.tensor([1.0, 2.0]), None, MASK[:2, :3])
    assert rewards.tolist() == [[0.0, 0.0, 1.0], [0.0, 2.0, 0.0]]
    values = torch.tensor([[0.5, 0.4, 0.3], [1.0, 0.5, 99.0]])  # what is padding does not count
    mask = torch.tensor([[True, True, True], [True, True, False]])
    advantages, returns = generalized_advantages(rewards, values, mask, discount=0.9, decay=0.8)
    # first: deltas .9 * .4 - .5 = -.14, .9 * .3 - .4 = -.13, 1 - .3 = .7, each and .9 * .8 = .72 of
    # what comes after it: -.13 + .72 * .7 = .374, -.14 + .72 * .374 = .12928
    # second: deltas .9 * .5 - 1 = -.55, 2 - .5 = 1.5; -.55 + .72 * 1.5 = .53
    expected = torch.tensor([[0.12928, 0.374, 0.7], [0.53, 1.5, 0.0]])
    assert torch.allclose(advantages, expected, atol=1e-6)
    assert torch.allclose(returns[mask], (expected + values)[mask], atol=1e-6)


def test_without_discount_and_decay_advantages_are_what_is_left_to_gain():
    rewards = torch.tensor([[0.1, 0.2, 0.7]])
    values, mask = torch.tensor([[0.3, 0.6, 0.2]]), torch.ones(1, 3, dtype=torch.bool)
    advantages, _ = generalized_advantages(rewards, values, mask, discount=1.0, decay=1.0)
    assert torch.allclose(advantages, torch.tensor([[1.0, 0.9, 0.7]]) - values)


def test_all_tokens_of_a_correct_response_get_credit_by_default():
    """Also 512 tokens before its end, while the value head is still at zero."""
    train = check(get_config()).train
    length, mask = 512, torch.ones(2, 512, dtype=torch.bool)
    rewards = token_rewards(torch.tensor([1.0, 0.0]), None, mask)
    advantages, _ = generalized_advantages(
        rewards, torch.zeros(2, length), mask, discount=train.discount, decay=train.gae_decay
    )
    right, wrong = advantages - advantages.mean()
    assert (right > 0).all()
    assert (wrong < 0).all()


def test_penalties_come_with_each_token():
    penalty = torch.ones(2, 3)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    rewards = token_rewards(torch.tensor([1.0, 2.0]), 0.5 * penalty, mask)
    assert rewards.tolist() == [[-0.5, -0.5, 0.5], [1.5, 0.0, 0.0]]


def test_the_value_loss_gains_nothing_beyond_its_clip():
    values = torch.tensor([[1.0]], requires_grad=True)
    loss = value_loss(values, torch.zeros(1, 1), torch.full((1, 1), 2.0), clip=0.5)
    assert loss.item() == pytest.approx(0.5 * 1.5**2)  # of the held value .5
    loss.sum().backward()
    assert values.grad.item() == 0


def test_the_value_loss_is_the_larger_of_both():
    values, old, returns = torch.tensor([[-1.0, 3.0, 0.5], [0.3, 1.0, 0.3], [-2.0, 0.0, 0.0]])
    loss = value_loss(values, old, returns, clip=0.5)
    # the held value -.2; the value itself; a value that has not moved far
    assert torch.allclose(loss, torch.tensor([0.5 * 1.8**2, 4.5, 0.125]))


@pytest.mark.parametrize(("low", "high"), [(0.3, 0.2), (0.2, 0.3)])
def test_a_clipped_loss_trusts_up_to_its_nearer_end(low, high):
    settings = SimpleNamespace(clip_low=low, clip_high=high, dual_clip=0.0)
    assert build_loss("clip", settings).trust == 0.2


def test_rloo_is_unbiased_on_a_policy_that_can_be_enumerated():
    """Over all triples of its three answers, of one token and of two: the mean of the gradients
    that training takes is the gradient of the expected reward."""
    logits = torch.tensor([[0.2, -0.4], [0.7, 0.1]], dtype=torch.float64, requires_grad=True)
    end, go_on = 0, 1
    answers = [[end], [go_on, end], [go_on, go_on]]  # cut off after two
    rewards = np.array([1.0, 0.3, -0.5])
    mask = torch.tensor([[True, False], [True, True], [True, True]])

    def log_probs() -> Tensor:
        steps = logits.log_softmax(1)
        rows = [[steps[t, token] for t, token in enumerate(answer)] for answer in answers]
        return torch.stack(
            [torch.stack([*row, *[steps.new_zeros(())] * (2 - len(row))]) for row in rows]
        )

    chances = log_probs().sum(1).exp()
    assert chances.sum().item() == pytest.approx(1)
    (exact,) = torch.autograd.grad((chances * torch.from_numpy(rewards)).sum(), logits)
    estimate = torch.zeros_like(exact)
    for three in map(list, itertools.product(range(3), repeat=3)):
        new, own = log_probs()[three], mask[three]
        advantages = compute_advantages(rewards[three], np.zeros(3, dtype=int), estimator="rloo")
        credit = torch.from_numpy(advantages)[:, None]
        loss = policy_loss("clip", new, new.detach(), credit, own).loss
        counts = Counts(tokens=float(own.sum()), answers=3.0)
        # a constant in place of the length, which would favour short answers
        loss = (loss * token_weights("constant", own, counts, max_new_tokens=1)).sum()
        (gradient,) = torch.autograd.grad(loss, logits)
        estimate -= chances[three].prod().detach() * gradient
    assert torch.allclose(estimate, exact, atol=1e-12)


def test_the_example_of_the_docs_is_a_loss():
    text = (Path(__file__).parents[1] / "docs/vlm.md").read_text("utf-8")
    [code] = [
        each for each in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "LOSS" in each
    ]
    exec(code, example := {"__name__": "capped"})
    new = NEW.clone().requires_grad_()
    loss = example["LOSS"].read(SimpleNamespace(**CLIP)).per_token(new, OLD, ADVANTAGES, MASK).loss
    loss[MASK].sum().backward()
    assert torch.allclose(new.grad, -(NEW - OLD).exp().clamp(max=1.3) * ADVANTAGES * MASK)


def test_kinds_are_all_tried():
    assert {"clip", "gspo", "cispo"} <= set(KINDS)
    for call, known in (
        (lambda: policy_loss("ppo", NEW, OLD, ADVANTAGES, MASK), KINDS),
        (lambda: token_weights("mean", MASK, COUNTS, 8), AGGREGATIONS),
        (lambda: divergence("k4", NEW, OLD), DIVERGENCES),
    ):
        with pytest.raises(ValueError, match=f"choose one of {', '.join(known)}$"):
            call()
