"""Anchors against reward hacking: docs/reward_hacking.md."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from algorithm_fixtures import (
    METHODS,
    STEPS,
    assert_gradient_matches,
    method,
    numbers,
    pixels,
    rollout,
    small_policy,
)
from config_checks import build, rejection_message
from families import make_images
from torch import Tensor
from user_errors import raises_user_error

from flow_grpo.data.prompts import Prompt
from flow_grpo.diffusion.algorithms import ALGORITHMS
from flow_grpo.diffusion.algorithms.anchors import (
    Anchors,
    average_ranks,
    downsample_images,
    gardo_gate,
    nearest_distances,
    norm_guard_penalty,
    norm_ratio,
    upweight_diverse,
)
from flow_grpo.diffusion.data_anchor import DataAnchor, check_anchor_data
from flow_grpo.diffusion.fields import AnchorConfig
from flow_grpo.diffusion.models import Size
from flow_grpo.diffusion.models.qwen_image_edit import QwenImageEditAdapter
from flow_grpo.diffusion.models.wan import WanAdapter
from flow_grpo.training.metrics import ScoredSamples

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
from train import collect_rewards, sample_epoch, train_epoch

SETUP = {"num_steps": STEPS, "group_size": 2, "update_samples": 4}
TRAJECTORY = ("grpo", "grpo_guard", "dppo", "mix")
GATE = {"reward_fn": {"jpeg_compressibility": 1.0, "jpeg_incompressibility": 0.0}}


# --- the norm guard --------------------------------------------------------------------------


def test_only_velocities_longer_than_the_reference_are_penalized():
    """|v| / |v_ref| is 2, 1/2 and 1: the penalty of the first is (2 - 1)^2."""
    velocity, reference = pixels([6, 8], [1, 0], [3, -4]), pixels([3, 4], [0, 2], [4, 3])
    ratio = norm_ratio(velocity, reference)
    torch.testing.assert_close(ratio, numbers(2.0, 0.5, 1.0))
    torch.testing.assert_close(norm_guard_penalty(ratio), numbers(1.0, 0.0, 0.0))


@pytest.mark.parametrize("name", [name for name in METHODS if ALGORITHMS[name].applies_anchors])
def test_guard_and_gate_apply_to_every_algorithm(name):
    """The guard and the KL of the gated samples are added to the loss with their weights."""
    own = {"beta" if name in TRAJECTORY else "kl_beta": 0.3}
    own |= {"window_size": 2} if name == "mix" else {}
    plain = method(name, SETUP, **own)
    guarded = method(name, {**SETUP, "anchors": AnchorConfig(norm_guard=7.0, kl_gate=0.5)}, **own)
    guarded.anchors.gate = numbers(0, 2, 2, 0)
    policy, batch = rollout(plain)
    [first], [second] = (list(each.iter_prepared(policy, [batch])) for each in (plain, guarded))
    a, b = plain.loss(policy, *first, 0), guarded.loss(policy, *second, 0)
    guard = (b.columns["norm_ratio"] - 1).clamp_min(0) ** 2
    assert guard.any()
    added = 7.0 * guard + 0.3 * (guarded.anchors.gate - 1) * a.columns["kl"]
    torch.testing.assert_close(b.per_sample - a.per_sample, added)
    assert b.columns["gated"].tolist() == [False, True, True, False]


@pytest.mark.parametrize(("name", "own"), [("grpo", {"clip_range": 0.5}), ("sft", {"times": 3})])
def test_the_gradient_of_guard_and_gate_equals_finite_differences(name, own):
    anchors = AnchorConfig(norm_guard=50.0, kl_gate=0.5)
    own = own | {"beta" if name == "grpo" else "kl_beta": 0.3}
    algorithm = method(name, {**SETUP, "anchors": anchors}, **own)
    algorithm.anchors.gate = numbers(0, 2, 2, 0)
    policy, batch = rollout(algorithm)
    prepared = list(algorithm.iter_prepared(policy, [batch]))

    def objective() -> Tensor:
        """Subtract the policy loss, so that only the anchors are tested."""
        losses = [algorithm.loss(policy, *each, 0) for each in prepared]
        assert all(loss.columns["norm_guard"].any() for loss in losses)
        return sum((loss.per_sample - loss.columns["policy_loss"]).mean() for loss in losses)

    assert_gradient_matches(objective, policy, torch.Generator().manual_seed(1))


def test_the_norm_guard_trains_samples_without_credit():
    plain, guarded = (
        method("grpo", {"anchors": AnchorConfig(norm_guard=g)}, beta=0.0) for g in (0, 1)
    )
    assert (plain.needs_reference, guarded.needs_reference) == (False, True)
    assert not plain.has_gradient(numbers(0)).any()
    assert guarded.has_gradient(numbers(0)).all()


# --- the gate and the reference --------------------------------------------------------------


def scored(reward: list[float], *others: list[float]) -> ScoredSamples:
    columns = {"reward": np.array(reward)} | {str(i): np.array(o) for i, o in enumerate(others)}
    weights = dict.fromkeys(columns, 0.0) | {"reward": 1.0}
    return ScoredSamples(columns, np.zeros(len(reward), int), weights)


def test_ties_share_a_rank_and_missing_values_have_none():
    np.testing.assert_array_equal(
        average_ranks(np.array([3.0, 1, np.nan, 3, 2])), [2.5, 0, np.nan, 2.5, 1]
    )


def test_the_gate_selects_samples_that_other_rewards_rank_lower():
    """Ranks 3, 2, 1, 0 against mean ranks of about 0, 2, 1, 3: the first differs by 2.5."""
    both = scored([0.9, 0.8, 0.2, 0.1], [1, 3, 2, 4], [1, 3, 4, 2])
    assert gardo_gate(both, 0.25).tolist() == [True, False, False, False]
    assert gardo_gate(both, 0.99).tolist() == [
        True,
        False,
        False,
        False,
    ]  # no other difference is above 0
    agreeing = scored([0.9, 0.8], [9, 8])
    assert not gardo_gate(agreeing, 0.5).any()
    missing = scored([0.9, np.nan, 0.8, 0.1], [1, 0, 2, 3])
    assert gardo_gate(missing, 0.25).tolist() == [True, False, False, False]


def test_the_gate_preserves_the_total_weight_of_the_kl():
    anchors = Anchors(AnchorConfig(kl_gate=0.25))
    credit = np.array([1.0, 2.0, -1.0, -2.0])
    given = scored([0.9, 0.8, 0.2, 0.1], [1, 3, 2, 4])
    np.testing.assert_array_equal(anchors.reweight(credit, given), credit)
    assert anchors.gate.tolist() == [4, 0, 0, 0]
    anchors.reweight(credit, scored([0.1, 0.2, 0.3, 0.4], [1, 2, 3, 4]))
    assert anchors.gate.tolist() == [0, 0, 0, 0]  # no sample is selected


@pytest.mark.parametrize(
    ("settings", "kls", "reset"),
    [
        ({"reset_kl": 0.1}, [0.05, 0.2, 0.05], [0, 1, 0]),
        ({"reset_epochs": 2}, [9, 9, 9, 9], [0, 1, 0, 1]),
        ({"reset_kl": 0.1, "reset_epochs": 2}, [0.2, 0.05, 0.05], [1, 0, 1]),
        ({}, [9], []),
    ],
)
def test_the_reference_becomes_the_policy(settings, kls, reset):
    algorithm = method("grpo", {**SETUP, "anchors": AnchorConfig(**settings)})
    policy, _ = rollout(algorithm)
    parameters, logged = policy.parameters(), []
    for kl in kls:
        with torch.no_grad():
            parameters[0].add_(1.0)
        anchors, state = algorithm.anchors, algorithm.state_dict()
        logged += anchors.maybe_reset_reference(policy, {"train/kl": kl}).values()
        is_reset = torch.equal(policy.reference.copy[0], parameters[0])
        assert is_reset == bool(settings and logged[-1])
        resumed = method("grpo", {**SETUP, "anchors": AnchorConfig(**settings)})
        resumed.load_state_dict(algorithm.state_dict())
        algorithm, before = resumed, state
        assert ("since_reset" in before) == bool(settings)
    assert logged == reset
    with torch.no_grad():
        for copy in policy.reference.copy:
            copy.zero_()  # the other tests share it


# --- diversity -------------------------------------------------------------------------------


def test_diverse_good_samples_get_more_credit():
    """Nearest distances 1, 1, 3; the second group has one sample, the third two equal ones."""
    features = np.array([[0.0, 0], [1, 1], [4, 4], [9, 9], [5, 5], [5, 5]])
    groups = np.array([0, 0, 0, 1, 2, 2])
    apart = nearest_distances(features, groups)
    np.testing.assert_allclose(apart, [1, 1, 3, 0, 0, 0])
    credit = np.array([1.0, -1.0, 2.0, 1.0, 1.0, -1.0])
    np.testing.assert_allclose(upweight_diverse(credit, apart, groups), [0.6, -1, 3.6, 1, 1, -1])


@pytest.mark.parametrize("shape", [(2, 3, 32, 96), (2, 5, 3, 32, 96)])
def test_thumbnails_preserve_layout_and_colours(shape):
    images = torch.zeros(shape)
    images[1, ..., :16, :] = 1.0
    small = downsample_images(images)
    assert (len(small), small.unique().tolist()) == (2, [0, 1])
    assert small[1].mean() == 0.5


# --- the data anchor -------------------------------------------------------------------------


@pytest.fixture
def image_folder(tmp_path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    for number, file in enumerate(make_images("data", 3)):
        (folder / f"{number}.png").write_bytes(file)
        (folder / f"{number}.txt").write_text(f"image {number}\n")
    return folder


def test_the_gradient_of_the_data_loss_equals_finite_differences(monkeypatch):
    policy, _ = rollout(method("sft", SETUP), guidance=4.5)
    monkeypatch.setattr(policy.adapter, "source_size", Size(16, 24))
    rows = [
        Prompt(text, images=(file,)) for text, file in zip("ab", make_images("x", 2), strict=True)
    ]
    data = DataAnchor(rows, policy, 1.0)
    [batch] = data.batches((1, 2), 3, 1, 0, 1)
    assert batch.noised.x_t.dtype == torch.float64

    def objective() -> Tensor:
        return data.loss(batch).mean()

    assert_gradient_matches(objective, policy, torch.Generator().manual_seed(1))
    with torch.no_grad():
        plain = policy.denoiser.with_guidance(1.0).velocity(
            batch.noised.x_t, batch.noised.timesteps, batch.conditioning
        )
    expected = ((plain - batch.noised.target) ** 2).mean((1, 2, 3))
    torch.testing.assert_close(data.loss(batch), expected)


def test_images_are_encoded_once_and_batches_do_not_depend_on_the_world_size(monkeypatch):
    policy, adapter = small_policy(), small_policy().adapter
    monkeypatch.setattr(adapter, "source_size", Size(16, 24))
    encoded, own = [], adapter.encode_image_latents
    monkeypatch.setattr(adapter, "encode_image_latents", lambda p: (encoded.append(p), own(p))[1])
    rows = [
        Prompt(text, images=(file,)) for text, file in zip("ab", make_images("x", 2), strict=True)
    ]
    data = DataAnchor(rows, policy, 1.0)
    [whole] = data.batches((1, 2), 8, 1, 0, 1)
    parts = [b.noised.x_t for p in range(2) for b in data.batches((1, 2), 2, 2, p, 2)]
    torch.testing.assert_close(torch.cat(parts), whole.noised.x_t, rtol=0, atol=0)
    assert len(encoded) == 2
    [other] = data.batches((1, 3), 8, 1, 0, 1)
    assert not torch.equal(other.noised.x_t, whole.noised.x_t)


def test_a_run_with_all_anchors(make_session, image_folder):
    """The data loss is computed without guidance."""
    anchors = {"norm_guard": 1.0, "diversity": True, "kl_gate": 0.5, "reset_epochs": 1}
    anchors |= {"data": str(image_folder), "data_weight": 3.0}
    session = make_session(
        **{f"anchors.{name}": value for name, value in anchors.items()},
        **{"train.beta": 0.1, "train.gradient_accumulation_steps": 2, **GATE},
        **{"sample.num_image_per_prompt": 4},
    )
    losses, backward = [], session.accelerator.backward
    session.accelerator.backward = lambda loss: (losses.append(loss.item()), backward(loss))
    samples = sample_epoch(session, 0)
    given = collect_rewards(session, 0, samples)
    assert given.apart.shape == (4,)
    credit = session.algorithm.anchors.reweight(session.algorithm.credit(given), given)
    metrics = train_epoch(session, 0, samples, credit)
    steps = session.algorithm.losses_per_sample
    assert (session.plan.updates, len(losses)) == (1, 2 * steps + 2)
    whole = metrics["train/loss"] + 3.0 * metrics["train/data_loss"]
    assert sum(losses) / (2 * steps) == pytest.approx(whole, rel=1e-5)
    assert metrics["train/norm_ratio"] == pytest.approx(1, abs=0.05)
    assert 0 <= metrics["train/gated"] <= 0.5
    assert session.algorithm.anchors.maybe_reset_reference(session.policy, metrics) == {
        "train/reference_reset": 1.0
    }


@pytest.mark.parametrize(
    ("spoil", "shown"),
    [
        (lambda f: (f / "1.txt").unlink(), ["1.png", "1.txt"]),
        (lambda f: (f / "1.txt").write_text(" "), ["1.txt", "empty", "1.png"]),
        (lambda f: (f / "1.png").write_bytes(b"no"), ["1.txt", "1.png"]),
        (lambda f: (f / "3.tiff").write_bytes(b"II*"), ["3.tiff", "anchors.data"]),
        (
            lambda f: (f / "train.jsonl").write_text('{"prompt": "a"}'),
            ["train.jsonl:1", "anchors.data"],
        ),
    ],
)
def test_images_without_captions_and_damaged_ones_are_rejected_at_the_start(
    make_session, image_folder, spoil, shown
):
    spoil(image_folder)
    with raises_user_error(*shown):
        make_session(**{"anchors.data": str(image_folder)})


def test_the_data_anchor_reads_a_table_of_images(make_session, image_folder):
    (image_folder / "train.jsonl").write_text('{"prompt": "a", "image": "2.png"}\n')
    session = make_session(**{"anchors.data": str(image_folder)})
    assert [(row.prompt, row.images[0].name) for row in session.data_anchor.rows] == [
        ("a", "2.png")
    ]


# --- incompatible settings -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "field", "shown"),
    [
        ({"anchors__kl_gate": 0.1}, "anchors.kl_gate=0.1", "reward_fn"),
        ({"anchors__kl_gate": 0.1, "train__beta": 0.0, **GATE}, "anchors.kl_gate=0.1", "KL"),
        (
            {"anchors__reset_epochs": 3, "train__beta": 0.0},
            "anchors.reset_epochs=3",
            "anchors.norm_guard",
        ),
        ({"anchors__data_weight": 2.0}, "anchors.data_weight=2.0", "anchors.data=''"),
        ({"anchors__kl_gate": 1.0}, "anchors.kl_gate=1.0", "below 1"),
    ],
)
def test_anchors_without_effect_are_rejected(changed, field, shown):
    message = rejection_message(**changed)
    assert message.startswith(f"{field} ")
    assert shown in message


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"sample__num_image_per_prompt": 2}, "sample.num_image_per_prompt=2"),
        (
            {"sample__num_image_per_prompt": 8, "train__keep_best_worst": 1},
            "2 x train.keep_best_worst=1",
        ),
    ],
)
def test_diversity_needs_three_samples_of_a_trained_group(fields, named):
    message = rejection_message(anchors__diversity=True, **fields)
    assert message.startswith("anchors.diversity=True ")
    assert named in message


def test_compatible_anchors_are_accepted():
    build(anchors__norm_guard=1.0, anchors__reset_epochs=3, train__beta=0.0)
    build(anchors__kl_gate=0.1, **GATE)
    build(algorithm="dpo", anchors__reset_kl=0.1)  # its own reference is reset
    kept = {"train__keep_best_worst": 2, "sample__num_image_per_prompt": 8}
    build(anchors__diversity=True, **kept)


def test_the_norm_guard_needs_a_loss_that_applies_it():
    algorithm = method("grpo", {"anchors": AnchorConfig(norm_guard=1.0)})
    algorithm.applies_anchors = False
    with raises_user_error("algorithm='grpo'", field="anchors.norm_guard", value=1.0):
        algorithm.check()


@pytest.mark.parametrize(
    "family", [QwenImageEditAdapter, WanAdapter], ids=["image editing", "video"]
)
def test_models_that_do_not_generate_images_from_text_are_rejected(family):
    with raises_user_error("anchors.data", "m "):
        check_anchor_data([Prompt("a", images=(b"",))], "m", family, None)
