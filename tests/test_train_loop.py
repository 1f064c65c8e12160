"""The loop of scripts/train.py, called in this process."""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig
from torch import nn

from flow_grpo.draw.models import load_adapter
from flow_grpo.draw.session import Session
from flow_grpo.errors import Stopped, UserError
from flow_grpo.run.session import carry_out

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
from train import (
    baselines,
    collect_rewards,
    run_evaluation,
    sample_ahead,
    sample_behind,
    sample_epoch,
    train,
    train_epoch,
)

SUBMITTED = object()


@pytest.mark.parametrize(("gradient", "passes"), [("both", [4]), ("conditional", [2, 2])])
def test_both_halves_of_guidance_are_trained_in_the_batch_that_was_sampled(
    make_session, gradient, passes
):
    session = make_session(**{"train.guidance_gradient": gradient})
    sizes, forward = [], session.policy.module.forward
    session.policy.module.forward = lambda **inputs: (
        sizes.append(len(inputs["timestep"])),
        forward(**inputs),
    )[1]
    samples = sample_epoch(session, 0)
    assert sizes == passes * 3 * 2  # steps, batches
    sizes.clear()
    metrics = train_epoch(session, 0, samples, np.array([1.0, -1.0, 1.0, -1.0]))
    assert sizes == passes * 2 * 2  # trained steps, micro-batches
    assert metrics["train/first_update_ratio_dev"] <= 1e-5


def test_old_weights_count_updates_and_not_epochs(make_session):
    """Two updates in the epoch, so that .1 n is .2."""
    rule = {"nft.old_rate": 0.1, "nft.old_most": 0.9, "nft.times": 2}
    session = make_session(num_epochs=1, eval_prompts=1, algorithm="nft", **rule)
    before = torch.cat([copy.flatten() for copy in session.policy.old.copy])
    train(session)
    assert session.progress.step == 2
    old = torch.cat([copy.flatten() for copy in session.policy.old.copy])
    now = torch.cat([weight.detach().flatten() for weight in session.policy.parameters()])
    assert (now - before).abs().max() > 1e-4
    torch.testing.assert_close(old - before, 0.8 * (now - before), rtol=1e-3, atol=1e-7)


def test_dgpos_old_weights_sample_once_there_were_enough_updates(make_session):
    session = make_session(algorithm="dgpo", **{"dgpo.times": 2, "dgpo.old_after": 3})
    with torch.no_grad():
        for copy in session.policy.old.copy:
            copy.add_(0.1)

    def drawn(updates: int) -> torch.Tensor:
        session.progress.step = updates
        return torch.cat([s.trajectory.final for s in sample_behind(session, 1)])

    current = torch.cat([s.trajectory.final for s in sample_epoch(session, 1)])
    with session.policy.old.applied():
        old = torch.cat([s.trajectory.final for s in sample_epoch(session, 1)])
    assert not torch.equal(current, old)
    assert torch.equal(drawn(3), current)
    assert torch.equal(drawn(4), old)


def test_the_best_and_the_worst_seeds_are_drawn_again(make_session):
    """With as many steps as there are, they score as they did; every pass is counted."""
    common = {"algorithm": "awm", "awm.times": 2, "sample.num_image_per_prompt": 6}
    whole = make_session(**common, **{"sample.num_batches_per_epoch": 6})
    before = collect_rewards(whole, 0, sample_epoch(whole, 0))
    keep = {"train.keep_best_worst": 1, "sample.explore_steps": 3}
    session = make_session(**common, **keep)
    assert "2 prompts x 2 images, kept of 6" in session.plan.describe()
    sizes, forward = [], session.policy.module.forward
    session.policy.module.forward = lambda **inputs: (
        sizes.append(len(inputs["timestep"])),
        forward(**inputs),
    )[1]
    samples = sample_epoch(session, 0)
    assert sum(sizes) == 2 * (12 * 3 + 4 * 3)  # with guidance: explored, and drawn again
    assert 2 * sum(s.steps for s in samples) == sum(sizes)
    scored = collect_rewards(session, 0, samples)
    for group in range(2):
        of_group, rewards = before.total[before.groups == group], scored.total[2 * group :][:2]
        assert sorted(rewards) == pytest.approx([of_group.min(), of_group.max()], abs=1e-3)


def test_a_reference_may_have_guidance_where_nothing_else_has(make_session):
    """Its negative prompts are encoded, though the rollout needs none."""
    fields = {"dgpo.times": 2, "dgpo.kl_guidance": 4.5, "sample.guidance_scale": 1.0}
    session = make_session(algorithm="dgpo", **fields)
    sizes, forward = [], session.policy.module.forward
    session.policy.module.forward = lambda **inputs: (
        sizes.append(len(inputs["timestep"])),
        forward(**inputs),
    )[1]
    samples = sample_epoch(session, 0)
    assert sizes == [2] * 6  # three steps of two batches
    sizes.clear()
    metrics = train_epoch(session, 0, samples, np.array([1.0, -1.0, 1.0, -1.0]))
    # At both times of each of two updates: the guided reference, the current weights, the loss. In
    # the second update the old weights are others.
    assert sorted(sizes) == sorted(2 * 2 * [4, 2, 2] + 2 * [2])
    assert metrics["train/kl"] > 0


def test_the_texts_of_the_next_epoch_are_encoded_ahead(make_session):
    session = make_session(num_epochs=2)
    events = encoded_and_submitted(session)

    def texts(sampled) -> set[str]:
        return {session.prompts[row].prompt for s in sampled for row in s.draw.row}

    first = texts(sample_epoch(session, 0))
    last = max(i for i, event in enumerate(events) if event is SUBMITTED)
    ahead, events[:] = set(events[last + 1 :]), []
    second = texts(sample_epoch(session, 1))  # there is nothing to look ahead to
    assert ahead == second - first != set()
    assert set(events) == {SUBMITTED}


def test_encoders_that_wait_on_the_cpu_do_not_join_the_last_batch(make_session):
    session = make_session(num_epochs=2, offload_idle=True)
    events = encoded_and_submitted(session)
    sample_epoch(session, 0)
    assert events[0] is not SUBMITTED
    assert events[-1] is SUBMITTED


def encoded_and_submitted(session: Session) -> list:
    """Texts as they are encoded, and where pictures go to be scored."""
    events, encode, submit = [], session.adapter.encode_one, session.reward.submit
    session.adapter.encode_one = lambda text: (events.append(text), encode(text))[1]
    session.reward.submit = lambda *args: (events.append(SUBMITTED), submit(*args))[1]
    return events


@pytest.mark.parametrize("estimator", ["grpo", "remax"])
def test_a_reward_may_be_called_baseline(make_session, estimator):
    session = make_session(
        **{
            "custom_rewards": {"baseline": "flow_grpo.rewards.scorers.jpeg:jpeg_compressibility"},
            "reward_fn": {"baseline": 1.0},
            "train.advantage": estimator,
        }
    )
    scored = collect_rewards(session, 0, sample_epoch(session, 0))
    assert scored.rewards.keys() == {"baseline", "avg"}
    assert (scored.baseline is not None) == (estimator == "remax")


def test_baselines_are_sampled_equally_often_on_all_processes(make_session, monkeypatch):
    """Two prompts here and five on another process: in batches of two, three on both, as weights
    that are shared out need all processes for each."""
    session = make_session(**{"train.advantage": "remax", "sample.num_steps": 2})
    samples = sample_epoch(session, 0)
    monkeypatch.setattr("train.gather_object", lambda own: [*own, 5])
    decode, sizes = session.adapter.decode, []
    session.adapter.decode = lambda latents: (sizes.append(len(latents)), decode(latents))[1]
    found = baselines(session, 0, samples)
    assert sizes == [2, 2, 2]
    assert [len(column) for column in found] == [2, 2]
    assert not np.isnan(found).any()


def test_samples_without_a_gradient_are_not_trained(make_session):
    session = make_session(**{"train.beta": 0.0})
    samples = sample_epoch(session, 0)
    velocity, sizes = session.adapter.velocity, []
    session.adapter.velocity = lambda module, latents, *args, **options: (
        sizes.append(len(latents)),
        velocity(module, latents, *args, **options),
    )[1]
    metrics = train_epoch(session, 0, samples, np.array([1.0, 0.0, 1.0, -1.0]))
    assert sorted(sizes) == [1, 1, 2, 2]  # two trained steps of each
    assert "train/kl" not in metrics  # there is no reference


def test_the_kl_to_a_policy_that_has_not_moved_is_zero(make_session):
    session = make_session(**{"train.beta": 0.04, "train.learning_rate": 1e-12})
    samples = sample_epoch(session, 0)
    metrics = train_epoch(session, 0, samples, np.array([1.0, -1.0, 1.0, -1.0]))
    assert 0 <= metrics["train/kl"] < 1e-9


def test_a_group_branches_at_one_step_of_its_own(make_session):
    """In batches of one: both samples of a group are one until its step, wherever that is, and end
    apart."""
    branch = {"same_latent": True, "sde_window_size": 1, "sde_window_range": (0, 4)}
    branch |= {"sde_window_per": "group", "num_steps": 5, "num_batches_per_epoch": 4}
    fields = {f"sample.{name}": value for name, value in branch.items()}
    one = {"sample.train_batch_size": 1, "train.batch_size": 1, "sample.guidance_scale": 1.0}
    session = make_session(**fields, **one, **{"train.gradient_accumulation_steps": 2})
    steps = [[session.noisy_steps(epoch, i) for i in range(4)] for epoch in range(20)]
    assert all(a == b and c == d for a, b, c, d in steps)
    assert {each[0].start for each in steps} == {0, 1, 2, 3}
    epoch = next(i for i, each in enumerate(steps) if each[0] != each[2] and each[0].start)
    for a, b in zip(*[iter(sample_epoch(session, epoch))] * 2, strict=True):
        assert torch.equal(a.trajectory.latents[:, 0], b.trajectory.latents[:, 0])
        assert not torch.allclose(a.trajectory.final, b.trajectory.final, atol=1e-3)


def test_steps_without_noise_are_taken_with_lora_merged_as_it_is(make_session):
    plain, merged = make_session(), make_session(**{"sample.merge_lora": True})
    layer = merged.adapter.transformer.transformer_blocks[0].attn.to_q
    off, velocity = [], merged.adapter.velocity

    def seen(*args, **kwargs):
        off.append(layer.disable_adapters)
        return velocity(*args, **kwargs)

    merged.adapter.velocity = seen
    for epoch in range(2):
        off.clear()
        for session in (plain, merged):
            torch.manual_seed(epoch)
            for parameter in session.policy.parameters():
                nn.init.normal_(parameter, std=0.1)
        expected, found = (sample_epoch(session, epoch) for session in (plain, merged))
        assert off == [False, False, True] * len(found)
        for a, b in zip(expected, found, strict=True):
            if a.images is not None:
                torch.testing.assert_close(b.images, a.images, rtol=0, atol=1e-3)
        assert not layer.disable_adapters


def test_a_lora_that_is_no_sum_cannot_be_merged(make_session, tmp_path):
    adapter = load_adapter("assets/tiny-sd3", max_sequence_length=8)
    transformer = adapter.transformer
    transformer.add_adapter(LoraConfig(r=2, use_dora=True, target_modules=adapter.lora_targets))
    adapter.save_lora(tmp_path / "dora", transformer, transformer.state_dict())
    with pytest.raises(UserError, match="dora has more than plain LoRA"):
        make_session(**{"sample.merge_lora": True, "train.lora_path": str(tmp_path / "dora")})


@pytest.mark.parametrize(("compiled", "sizes"), [(False, [3, 3]), (True, [4, 4])])
def test_evaluation_takes_the_size_that_is_compiled(make_session, compiled, sizes):
    session = make_session(**{"eval_prompts": 5, "sample.test_batch_size": 4})
    session.adapter.compiled = compiled
    decode, seen = session.adapter.decode, []
    session.adapter.decode = lambda latents: (seen.append(len(latents)), decode(latents))[1]
    metrics = run_evaluation(session, epoch=0)
    assert seen == sizes
    assert metrics["eval/failed"] == 0


def test_a_run_stopped_while_it_samples_ahead_has_the_weights_of_what_it_was_to_train(make_session):
    session = make_session(**{"sample.async_depth": 1, "num_epochs": 2})
    first = [copy.clone() for copy in session.stale.copy]
    with torch.no_grad():
        for parameter in session.policy.parameters():
            parameter += 1
    assert sample_ahead(session, 1) is not None
    assert all(map(torch.equal, session.stale.copy, first))
    session.remember_behaviour()
    assert all(map(torch.equal, session.stale.copy, session.policy.parameters()))


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Also where the shell that started the tests had them ignore Ctrl-C, as in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("place", ["training", "closing"])
def test_a_second_interrupt_says_how_to_go_on(make_session, monkeypatch, place):
    session = make_session()

    def interrupt(*_):
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)

    if place == "closing":
        monkeypatch.setattr("flow_grpo.run.session.write_at_end", interrupt)
    with pytest.raises(Stopped, match=r"; go on with --resume .*/run-0$"):
        carry_out(session, interrupt if place == "training" else lambda _: None, advice=[])


@pytest.mark.parametrize("depth", [0, 1])
def test_a_baseline_is_drawn_by_the_weights_that_drew_the_samples(make_session, depth):
    """With `async_depth` they are an epoch older than those that collect the rewards."""
    session = make_session(
        **{"sample.async_depth": depth, "train.advantage": "remax", "num_epochs": 2}
    )
    samples = sample_epoch(session, 0)
    before = baselines(session, 0, samples)
    with torch.no_grad():
        for parameter in session.policy.parameters():
            parameter += 0.5
    trained = [p.detach().clone() for p in session.policy.parameters()]
    assert np.array_equal(baselines(session, 0, samples), before) == (depth == 1)
    assert all(map(torch.equal, session.policy.parameters(), trained))


@pytest.mark.parametrize("depth", [0, 1])
def test_nft_compares_with_the_weights_that_drew_the_samples(make_session, monkeypatch, depth):
    """With `async_depth` they are older than `policy.old`, which has moved on since."""
    session = make_session(
        **{"algorithm": "nft", "nft.times": 1, "nft.old_rate": 0.1, "train.learning_rate": 0.01},
        **{"sample.async_depth": depth, "num_epochs": 3, "eval_freq": 0, "eval_prompts": 1},
        **{"sample.num_steps": 2, "sample.eval_num_steps": 1, "height": 32, "width": 32},
    )
    policy, drawn_by, trained, compared = session.policy, {}, [], []

    def sample(session, epoch, *args):
        drawn_by[epoch] = [p.detach().clone() for p in policy.parameters()]
        return sample_epoch(session, epoch, *args)

    def train_one(session, epoch, *args):
        trained.append(epoch)
        return train_epoch(session, epoch, *args)

    def velocities(which, *args, **kwargs):
        if which != "reference":
            weights = policy.old if which == "old" else which
            expected = drawn_by[trained[-1]]
            assert all(map(torch.equal, weights.copy, expected))
            compared.append(trained[-1])
        return fixed_velocities(which, *args, **kwargs)

    fixed_velocities = policy.fixed_velocities
    monkeypatch.setattr(policy, "fixed_velocities", velocities)
    monkeypatch.setattr("train.sample_epoch", sample)
    monkeypatch.setattr("train.train_epoch", train_one)
    train(session)
    assert trained == [0, 1, 2]
    assert set(compared) >= {1, 2}
    assert not all(map(torch.equal, drawn_by[0], drawn_by[2]))


def test_rewards_do_not_rest_while_they_score_the_next_epoch(make_session):
    """A network that is moved off the GPU in the middle of a batch gives no scores."""
    session = make_session(
        **{"sample.async_depth": 1, "num_epochs": 2, "eval_freq": 0, "eval_prompts": 1}
    )
    rested = []
    session.reward.rest = lambda: rested.append(session.progress.epoch + 1)
    train(session)
    assert rested == [2]  # the last, after which there is nothing to sample
