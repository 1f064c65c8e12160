"""The training loop of scripts/train.py, run in process."""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from test_dry_run import LOOP
from user_errors import raises_user_error

from flow_grpo.diffusion.session import Session
from flow_grpo.errors import StoppedBySignal
from flow_grpo.report.run_reader import read_metrics
from flow_grpo.training.session import run_training

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from train import (
    collect_rewards,
    compute_remax_baselines,
    run_evaluation,
    sample_current_epoch,
    sample_epoch,
    sample_next_epoch,
    train,
    train_epoch,
)

SUBMITTED = object()


@pytest.mark.parametrize(("gradient", "passes"), [("both", [4]), ("conditional", [2, 2])])
def test_guidance_is_trained_in_the_batches_it_was_sampled_in(make_session, gradient, passes):
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
    """Two updates per epoch, so that 0.1 n is 0.2."""
    rule = {"nft.old_rate": 0.1, "nft.old_max_decay": 0.9, "nft.times": 2}
    session = make_session(num_epochs=1, eval_prompts=1, algorithm="nft", **rule)
    before = torch.cat([copy.flatten() for copy in session.policy.old.copy])
    train(session)
    assert session.progress.step == 2
    old = torch.cat([copy.flatten() for copy in session.policy.old.copy])
    now = torch.cat([weight.detach().flatten() for weight in session.policy.parameters()])
    assert (now - before).abs().max() > 1e-4
    torch.testing.assert_close(old - before, 0.8 * (now - before), rtol=1e-3, atol=1e-7)


def test_dgpo_samples_with_the_old_weights_after_enough_updates(make_session):
    session = make_session(algorithm="dgpo", **{"dgpo.times": 2, "dgpo.old_after": 3})
    with torch.no_grad():
        for copy in session.policy.old.copy:
            copy.add_(0.1)

    def sampled_after(updates: int) -> torch.Tensor:
        session.progress.step = updates
        return torch.cat([s.trajectory.final for s in sample_current_epoch(session, 1)])

    current = torch.cat([s.trajectory.final for s in sample_epoch(session, 1)])
    with session.policy.old.applied():
        old = torch.cat([s.trajectory.final for s in sample_epoch(session, 1)])
    assert not torch.equal(current, old)
    assert torch.equal(sampled_after(3), current)
    assert torch.equal(sampled_after(4), old)


def test_the_best_and_worst_seeds_are_sampled_again(make_session):
    """With as many exploration steps as sampling steps they score the same; all passes count."""
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
    assert sum(sizes) == 2 * (12 * 3 + 4 * 3)  # with guidance: explored, then sampled again
    assert 2 * sum(s.sample_steps for s in samples) == sum(sizes)
    scored = collect_rewards(session, 0, samples)
    for group in range(2):
        explored = before.total[before.groups == group]
        rewards = scored.total[2 * group : 2 * group + 2]
        assert sorted(rewards) == pytest.approx([explored.min(), explored.max()], abs=1e-3)


def test_only_the_reference_may_be_guided(make_session):
    """Negative prompts are encoded for it, though the rollout needs none."""
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
    # the second update the old weights differ from the current ones.
    assert sorted(sizes) == sorted(2 * 2 * [4, 2, 2] + 2 * [2])
    assert metrics["train/kl"] > 0


def test_prompts_of_the_next_epoch_are_encoded_ahead(make_session):
    session = make_session(num_epochs=2)
    events = encoded_and_submitted(session)

    def texts(sampled) -> set[str]:
        return {session.prompts[row].prompt for s in sampled for row in s.ids.row}

    first = texts(sample_epoch(session, 0))
    last = max(i for i, event in enumerate(events) if event is SUBMITTED)
    ahead, events[:] = set(events[last + 1 :]), []
    second = texts(sample_epoch(session, 1))  # the last epoch
    assert ahead == second - first != set()
    assert set(events) == {SUBMITTED}


def test_offloaded_encoders_are_not_loaded_during_the_last_batch(make_session):
    session = make_session(num_epochs=2, offload_idle=True)
    events = encoded_and_submitted(session)
    sample_epoch(session, 0)
    assert events[0] is not SUBMITTED
    assert events[-1] is SUBMITTED


def encoded_and_submitted(session: Session) -> list:
    """Record texts as they are encoded, and when images are submitted to the rewards."""
    events, encode, submit = [], session.adapter.encode_single, session.reward.submit
    session.adapter.encode_single = lambda text: (events.append(text), encode(text))[1]
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


def test_all_processes_sample_the_same_number_of_baseline_batches(make_session, monkeypatch):
    """Two prompts here and five on another rank: three batches of two on both, because sharded
    weights need all ranks in each forward pass."""
    session = make_session(**{"train.advantage": "remax", "sample.num_steps": 2})
    samples = sample_epoch(session, 0)
    monkeypatch.setattr("train.gather_object", lambda own: [*own, 5])
    decode, sizes = session.adapter.decode, []
    session.adapter.decode = lambda latents: (sizes.append(len(latents)), decode(latents))[1]
    found = compute_remax_baselines(session, 0, samples)
    assert sizes == [2, 2, 2]
    assert [len(column) for column in found] == [2, 2]
    assert not np.isnan(found).any()


def test_zero_gradient_samples_are_skipped(make_session):
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


def test_the_kl_of_an_unchanged_policy_is_zero(make_session):
    session = make_session(**{"train.beta": 0.04, "train.learning_rate": 1e-12})
    samples = sample_epoch(session, 0)
    metrics = train_epoch(session, 0, samples, np.array([1.0, -1.0, 1.0, -1.0]))
    assert 0 <= metrics["train/kl"] < 1e-9


def test_each_group_branches_at_its_own_step(make_session):
    """In batches of one, both samples of a group are identical up to that step and differ after."""
    branch = {"same_latent": True, "sde_window_size": 1, "sde_window_range": (0, 4)}
    branch |= {"sde_window_per": "group", "num_steps": 5, "num_batches_per_epoch": 4}
    fields = {f"sample.{name}": value for name, value in branch.items()}
    one = {"sample.train_batch_size": 1, "train.batch_size": 1, "sample.guidance_scale": 1.0}
    session = make_session(**fields, **one, **{"train.gradient_accumulation_steps": 2})
    steps = [[session.noisy_steps(epoch, i) for i in range(4)] for epoch in range(20)]
    assert all(a == b and c == d for a, b, c, d in steps)
    assert {each[0].start for each in steps} == {0, 1, 2, 3}
    epoch = next(i for i, each in enumerate(steps) if each[0] != each[2] and each[0].start)
    samples = sample_epoch(session, epoch)
    for a, b in zip(samples[::2], samples[1::2], strict=True):
        assert torch.equal(a.trajectory.latents[:, 0], b.trajectory.latents[:, 0])
        assert not torch.allclose(a.trajectory.final, b.trajectory.final, atol=1e-3)


@pytest.mark.parametrize(("compiled", "sizes"), [(False, [3, 3]), (True, [4, 4])])
def test_evaluation_keeps_the_batch_size_of_a_compiled_model(make_session, compiled, sizes):
    session = make_session(**{"eval_prompts": 5, "sample.test_batch_size": 4})
    session.adapter.compiled = compiled
    decode, seen = session.adapter.decode, []
    session.adapter.decode = lambda latents: (seen.append(len(latents)), decode(latents))[1]
    metrics = run_evaluation(session, epoch=0)
    assert seen == sizes
    assert metrics["eval/failed"] == 0


def test_sampling_ahead_keeps_the_behaviour_weights_of_the_current_epoch(make_session):
    session = make_session(**{"sample.async_depth": 1, "num_epochs": 2})
    first = [copy.clone() for copy in session.behaviour_snapshot.copy]
    with torch.no_grad():
        for parameter in session.policy.parameters():
            parameter += 1
    assert sample_next_epoch(session, 1) is not None
    assert all(map(torch.equal, session.behaviour_snapshot.copy, first))
    session.snapshot_behaviour_weights()
    assert all(map(torch.equal, session.behaviour_snapshot.copy, session.policy.parameters()))


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Handle Ctrl-C even if the shell that started the tests ignores it (background jobs)."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("place", ["training", "closing"])
def test_a_second_interrupt_reports_how_to_resume(make_session, monkeypatch, place):
    session = make_session()

    def interrupt(*_):
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)

    if place == "closing":
        monkeypatch.setattr("flow_grpo.training.session.write_final_report", interrupt)
    with pytest.raises(StoppedBySignal, match=r"--resume .*/run-0$"):
        run_training(session, interrupt if place == "training" else lambda _: None, advice=[])


@pytest.mark.parametrize("depth", [0, 1])
def test_baselines_use_the_behaviour_weights(make_session, depth):
    """With `async_depth` they are an epoch older than the current weights."""
    session = make_session(
        **{"sample.async_depth": depth, "train.advantage": "remax", "num_epochs": 2}
    )
    samples = sample_epoch(session, 0)
    before = compute_remax_baselines(session, 0, samples)
    with torch.no_grad():
        for parameter in session.policy.parameters():
            parameter += 0.5
    trained = [p.detach().clone() for p in session.policy.parameters()]
    assert np.array_equal(compute_remax_baselines(session, 0, samples), before) == (depth == 1)
    assert all(map(torch.equal, session.policy.parameters(), trained))


@pytest.mark.parametrize("depth", [0, 1])
def test_nft_compares_with_the_behaviour_weights(make_session, monkeypatch, depth):
    """With `async_depth` they are older than `policy.old`, which has been updated since."""
    session = make_session(
        **{"algorithm": "nft", "nft.times": 1, "nft.old_rate": 0.1, "train.learning_rate": 0.01},
        **{"sample.async_depth": depth, "num_epochs": 3, "eval_freq": 0, "eval_prompts": 1},
        **{"sample.num_steps": 2, "sample.eval_num_steps": 1, "height": 32, "width": 32},
    )
    policy, sampled_by, trained, compared = session.policy, {}, [], []

    def sample(session, epoch, *args):
        sampled_by[epoch] = [p.detach().clone() for p in policy.parameters()]
        return sample_epoch(session, epoch, *args)

    def train_one(session, epoch, *args):
        trained.append(epoch)
        return train_epoch(session, epoch, *args)

    def velocities(which, *args, **kwargs):
        if which != "reference":
            weights = policy.old if which == "old" else which
            expected = sampled_by[trained[-1]]
            assert all(map(torch.equal, weights.copy, expected))
            compared.append(trained[-1])
        return no_grad_velocities(which, *args, **kwargs)

    no_grad_velocities = policy.no_grad_velocities
    monkeypatch.setattr(policy, "no_grad_velocities", velocities)
    monkeypatch.setattr("train.sample_epoch", sample)
    monkeypatch.setattr("train.train_epoch", train_one)
    train(session)
    assert trained == [0, 1, 2]
    assert set(compared) >= {1, 2}
    assert not all(map(torch.equal, sampled_by[0], sampled_by[2]))


def test_reward_memory_is_not_released_while_the_next_epoch_is_scored(make_session):
    """A reward model that is offloaded in the middle of a batch fails."""
    session = make_session(
        **{"sample.async_depth": 1, "num_epochs": 2, "eval_freq": 0, "eval_prompts": 1}
    )
    released = []
    session.reward.release_memory = lambda: released.append(session.progress.epoch + 1)
    train(session)
    assert released == [2]  # only in the last epoch, which samples nothing ahead


def test_an_evaluation_has_its_own_size_and_may_wait_for_the_end_of_an_epoch(make_session):
    session = make_session(
        num_epochs=1, eval_prompts=2, eval_height=48, eval_before_training=False, log_images=1
    )
    train(session)
    session.close()
    [record] = read_metrics(session.folder)
    assert record["epoch"] == 1
    assert np.isfinite(record["eval/jpeg_compressibility"])
    assert session.progress.best == record["eval/avg"]
    sizes = {}
    for kind in ("eval", "train"):
        with Image.open(session.folder / f"samples/{kind}-00001/0000.png") as image:
            sizes[kind] = image.size
    assert sizes == {"eval": (96, 48), "train": (96, 32)}
    assert (session.folder / "report.html").is_file()
    assert LOOP.describe(session) == "2 prompts x 10 steps at 96 x 48"


def test_sizes_of_evaluations_are_checked(make_session):
    with raises_user_error("eval_width=96", field="eval_resolution", value=8):
        make_session(eval_resolution=8, eval_height=48, eval_width=96)
    for name in ("eval_width", "eval_resolution"):  # not a multiple of the side of a token
        with raises_user_error(field=name, value=90):
            make_session(**{name: 90})
