"""What keeps a policy from hacking its reward: docs/hacking.md."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from families import pictures_of
from methods import METHODS, STEPS, assert_slopes, method, numbers, pixels, rollout, small_policy
from test_void_settings import build, refusal
from torch import Tensor

from flow_grpo.data.rows import Prompt
from flow_grpo.draw.algorithms import ALGORITHMS
from flow_grpo.draw.algorithms.anchors import (
    Anchors,
    doubted,
    hinge,
    nearest,
    norm_ratio,
    ranks,
    rarer_first,
    thumbnails,
)
from flow_grpo.draw.data_anchor import DataAnchor, check_data
from flow_grpo.draw.fields import DrawAnchors
from flow_grpo.draw.models import Size
from flow_grpo.draw.models.qwen_image_edit import QwenImageEditAdapter
from flow_grpo.draw.models.wan import WanAdapter
from flow_grpo.errors import UserError
from flow_grpo.run.metrics import Scored

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
from train import collect_rewards, sample_epoch, train_epoch

SETUP = {"num_steps": STEPS, "group_size": 2, "update_samples": 4}
TRAJECTORY = ("grpo", "grpo_guard", "dppo", "mix")
GATE = {"reward_fn": {"jpeg_compressibility": 1.0, "jpeg_incompressibility": 0.0}}


# --- the norm guard --------------------------------------------------------------------------


def test_a_velocity_is_held_where_it_is_longer_than_the_reference_alone():
    """|v| / |v_ref| is 2, 1/2 and 1: the first pays (2 - 1)^2."""
    velocity, reference = pixels([6, 8], [1, 0], [3, -4]), pixels([3, 4], [0, 2], [4, 3])
    ratio = norm_ratio(velocity, reference)
    torch.testing.assert_close(ratio, numbers(2.0, 0.5, 1.0))
    torch.testing.assert_close(hinge(ratio), numbers(1.0, 0.0, 0.0))


@pytest.mark.parametrize("name", [name for name in METHODS if ALGORITHMS[name].holds])
def test_any_method_can_be_guarded_and_gated(name):
    """The loss has the guard and the KL of the gated sample, with the weight of both, on top."""
    own = {"beta" if name in TRAJECTORY else "kl_beta": 0.3}
    own |= {"window_size": 2} if name == "mix" else {}
    plain = method(name, SETUP, **own)
    guarded = method(name, {**SETUP, "anchors": DrawAnchors(norm_guard=7.0, kl_gate=0.5)}, **own)
    guarded.anchors.gate = numbers(0, 2, 2, 0)
    policy, batch = rollout(plain)
    [first], [second] = (list(each.prepared(policy, [batch])) for each in (plain, guarded))
    a, b = plain.loss(policy, *first, 0), guarded.loss(policy, *second, 0)
    guard = (b.columns["norm_ratio"] - 1).clamp_min(0) ** 2
    assert guard.any()
    added = 7.0 * guard + 0.3 * (guarded.anchors.gate - 1) * a.columns["kl"]
    torch.testing.assert_close(b.per_sample - a.per_sample, added)
    assert b.columns["gated"].tolist() == [False, True, True, False]


@pytest.mark.parametrize(("name", "own"), [("grpo", {"clip_range": 0.5}), ("sft", {"times": 3})])
def test_the_gradient_of_guard_and_gate_equals_finite_differences(name, own):
    anchors = DrawAnchors(norm_guard=50.0, kl_gate=0.5)
    own = own | {"beta" if name == "grpo" else "kl_beta": 0.3}
    algorithm = method(name, {**SETUP, "anchors": anchors}, **own)
    algorithm.anchors.gate = numbers(0, 2, 2, 0)
    policy, batch = rollout(algorithm)
    prepared = list(algorithm.prepared(policy, [batch]))

    def objective() -> Tensor:
        """Less what the method does without: then the anchors alone have to be right."""
        losses = [algorithm.loss(policy, *each, 0) for each in prepared]
        assert all(loss.columns["norm_guard"].any() for loss in losses)
        return sum((loss.per_sample - loss.columns["policy_loss"]).mean() for loss in losses)

    assert_slopes(objective, policy, torch.Generator().manual_seed(1))


def test_a_guarded_method_trains_samples_without_credit():
    free, held = (method("grpo", {"anchors": DrawAnchors(norm_guard=g)}, beta=0.0) for g in (0, 1))
    assert (free.needs_reference, held.needs_reference) == (False, True)
    assert not free.has_gradient(numbers(0)).any()
    assert held.has_gradient(numbers(0)).all()


# --- the gate and the reference --------------------------------------------------------------


def scored(reward: list[float], *others: list[float]) -> Scored:
    columns = {"reward": np.array(reward)} | {str(i): np.array(o) for i, o in enumerate(others)}
    weights = dict.fromkeys(columns, 0.0) | {"reward": 1.0}
    return Scored(columns, np.zeros(len(reward), int), weights)


def test_equal_values_share_a_rank_and_a_missing_one_has_none():
    np.testing.assert_array_equal(ranks(np.array([3.0, 1, np.nan, 3, 2])), [2.5, 0, np.nan, 2.5, 1])


def test_the_gate_doubts_what_other_rewards_rank_lower():
    """Ranks 3, 2, 1, 0 against means of 0, 2, 1, 3 or so: the first is doubted by 2.5."""
    both = scored([0.9, 0.8, 0.2, 0.1], [1, 3, 2, 4], [1, 3, 4, 2])
    assert doubted(both, 0.25).tolist() == [True, False, False, False]
    assert doubted(both, 0.99).tolist() == [True, False, False, False]  # nothing else is above 0
    alike = scored([0.9, 0.8], [9, 8])
    assert not doubted(alike, 0.5).any()
    missing = scored([0.9, np.nan, 0.8, 0.1], [1, 0, 2, 3])
    assert doubted(missing, 0.25).tolist() == [True, False, False, False]


def test_the_whole_weight_of_the_kl_falls_on_the_gated():
    anchors = Anchors(DrawAnchors(kl_gate=0.25))
    credit = np.array([1.0, 2.0, -1.0, -2.0])
    given = scored([0.9, 0.8, 0.2, 0.1], [1, 3, 2, 4])
    np.testing.assert_array_equal(anchors.shape(credit, given), credit)
    assert anchors.gate.tolist() == [4, 0, 0, 0]
    anchors.shape(credit, scored([0.1, 0.2, 0.3, 0.4], [1, 2, 3, 4]))
    assert anchors.gate.tolist() == [0, 0, 0, 0]  # nobody is doubted


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
    algorithm = method("grpo", {**SETUP, "anchors": DrawAnchors(**settings)})
    policy, _ = rollout(algorithm)
    parameters, told = policy.parameters(), []
    for kl in kls:
        with torch.no_grad():
            parameters[0].add_(1.0)
        anchors, state = algorithm.anchors, algorithm.state_dict()
        told += anchors.renew_reference(policy, {"train/kl": kl}).values()
        is_reset = torch.equal(policy.reference.copy[0], parameters[0])
        assert is_reset == bool(settings and told[-1])
        resumed = method("grpo", {**SETUP, "anchors": DrawAnchors(**settings)})
        resumed.load_state_dict(algorithm.state_dict())
        algorithm, before = resumed, state
        assert ("since_reset" in before) == bool(settings)
    assert told == reset
    with torch.no_grad():
        for copy in policy.reference.copy:
            copy.zero_()  # as the other tests share it


# --- diversity -------------------------------------------------------------------------------


def test_good_samples_unlike_the_others_count_more():
    """Nearest at 1, 1, 3; the other group has one sample, the third two that are equal."""
    features = np.array([[0.0, 0], [1, 1], [4, 4], [9, 9], [5, 5], [5, 5]])
    groups = np.array([0, 0, 0, 1, 2, 2])
    apart = nearest(features, groups)
    np.testing.assert_allclose(apart, [1, 1, 3, 0, 0, 0])
    credit = np.array([1.0, -1.0, 2.0, 1.0, 1.0, -1.0])
    np.testing.assert_allclose(rarer_first(credit, apart, groups), [0.6, -1, 3.6, 1, 1, -1])


@pytest.mark.parametrize("shape", [(2, 3, 32, 96), (2, 5, 3, 32, 96)])
def test_thumbnails_show_layout_and_colours(shape):
    images = torch.zeros(shape)
    images[1, ..., :16, :] = 1.0
    small = thumbnails(images)
    assert (len(small), small.unique().tolist()) == (2, [0, 1])
    assert small[1].mean() == 0.5


# --- pictures of the user's -------------------------------------------------------------------


@pytest.fixture
def pictures(tmp_path) -> Path:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number, file in enumerate(pictures_of("data", 3)):
        (folder / f"{number}.png").write_bytes(file)
        (folder / f"{number}.txt").write_text(f"picture {number}\n")
    return folder


def test_the_gradient_of_the_data_loss_equals_finite_differences(monkeypatch):
    policy, _ = rollout(method("sft", SETUP), guidance=4.5)
    monkeypatch.setattr(policy.adapter, "source_size", Size(16, 24))
    rows = [
        Prompt(text, images=(file,)) for text, file in zip("ab", pictures_of("x", 2), strict=True)
    ]
    data = DataAnchor(rows, policy, 1.0)
    [batch] = data.batches((1, 2), 3, 1, 0, 1)
    assert batch.at.x_t.dtype == torch.float64

    def objective() -> Tensor:
        return data.loss(batch).mean()

    assert_slopes(objective, policy, torch.Generator().manual_seed(1))
    with torch.no_grad():
        plain = policy.denoiser.guided(1.0).velocity(
            batch.at.x_t, batch.at.timesteps, batch.conditioning
        )
    expected = ((plain - batch.at.target) ** 2).mean((1, 2, 3))
    torch.testing.assert_close(data.loss(batch), expected)


def test_pictures_are_encoded_once_and_dealt_out_alike_for_any_number_of_processes(monkeypatch):
    policy, adapter = small_policy(), small_policy().adapter
    monkeypatch.setattr(adapter, "source_size", Size(16, 24))
    encoded, own = [], adapter.encode_picture
    monkeypatch.setattr(adapter, "encode_picture", lambda p: (encoded.append(p), own(p))[1])
    rows = [
        Prompt(text, images=(file,)) for text, file in zip("ab", pictures_of("x", 2), strict=True)
    ]
    data = DataAnchor(rows, policy, 1.0)
    [whole] = data.batches((1, 2), 8, 1, 0, 1)
    parts = [b.at.x_t for p in range(2) for b in data.batches((1, 2), 2, 2, p, 2)]
    torch.testing.assert_close(torch.cat(parts), whole.at.x_t, rtol=0, atol=0)
    assert len(encoded) == 2
    [other] = data.batches((1, 3), 8, 1, 0, 1)
    assert not torch.equal(other.at.x_t, whole.at.x_t)


def test_a_run_with_all_anchors(make_session, pictures):
    """Also with guidance, which the pictures are trained without."""
    anchors = {"norm_guard": 1.0, "diversity": True, "kl_gate": 0.5, "reset_epochs": 1}
    anchors |= {"data": str(pictures), "data_weight": 3.0}
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
    credit = session.algorithm.anchors.shape(session.algorithm.credit(given), given)
    metrics = train_epoch(session, 0, samples, credit)
    steps = session.algorithm.losses_per_sample
    assert (session.plan.updates, len(losses)) == (1, 2 * steps + 2)
    whole = metrics["train/loss"] + 3.0 * metrics["train/data_loss"]
    assert sum(losses) / (2 * steps) == pytest.approx(whole, rel=1e-5)
    assert metrics["train/norm_ratio"] == pytest.approx(1, abs=0.05)
    assert 0 <= metrics["train/gated"] <= 0.5
    assert session.algorithm.anchors.renew_reference(session.policy, metrics) == {
        "train/reference_reset": 1.0
    }


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "1.txt").unlink(), "1.png has no caption: write it to 1.txt beside it"),
        (lambda f: (f / "1.txt").write_text(" "), "1.txt is empty; write what 1.png shows"),
        (lambda f: (f / "1.png").write_bytes(b"no"), "1.txt: picture 1.png cannot be decoded"),
        (
            lambda f: (f / "train.jsonl").write_text('{"prompt": "a"}'),
            "train.jsonl:1: has no pictures, and anchors.data needs one in each row",
        ),
    ],
)
def test_what_is_no_picture_with_a_caption_is_refused_at_the_start(
    make_session, pictures, spoil, message
):
    spoil(pictures)
    with pytest.raises(UserError, match=".*".join(message.split("picture "))):
        make_session(**{"anchors.data": str(pictures)})


def test_a_table_of_pictures_will_do(make_session, pictures):
    (pictures / "train.jsonl").write_text('{"prompt": "a", "image": "2.png"}\n')
    session = make_session(**{"anchors.data": str(pictures)})
    assert [(row.prompt, row.images[0].name) for row in session.data.rows] == [("a", "2.png")]


# --- what cannot work ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"anchors__kl_gate": 0.1},
            "anchors.kl_gate=0.1 needs a second opinion on the pictures: add a reward of weight 0 "
            "to reward_fn, e.g. {'ocr': 1.0, 'pickscore': 0.0}",
        ),
        (
            {"anchors__kl_gate": 0.1, "train__beta": 0.0, **GATE},
            "anchors.kl_gate=0.1 needs a KL to gate: set its weight above 0",
        ),
        (
            {"anchors__reset_epochs": 3, "train__beta": 0.0},
            "anchors.reset_epochs=3 needs a reference to reset: set the weight of the KL or "
            "anchors.norm_guard above 0",
        ),
        (
            {"anchors__data_weight": 2.0},
            "anchors.data_weight=2.0 has no effect with anchors.data=''; leave it at 1.0",
        ),
        ({"anchors__kl_gate": 1.0}, "anchors.kl_gate=1.0 must be at least 0 and below 1"),
    ],
)
def test_what_cannot_work_is_refused(changed, message):
    assert refusal(**changed) == message


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
    message = refusal(anchors__diversity=True, **fields)
    assert message.startswith("anchors.diversity=True ")
    assert named in message


def test_what_can_work_is_taken():
    build(anchors__norm_guard=1.0, anchors__reset_epochs=3, train__beta=0.0)
    build(anchors__kl_gate=0.1, **GATE)
    build(algorithm="dpo", anchors__reset_kl=0.1)  # its own reference is reset
    kept = {"train__keep_best_worst": 2, "sample__num_image_per_prompt": 8}
    build(anchors__diversity=True, **kept)


def test_a_method_that_does_not_call_hold_cannot_be_guarded():
    algorithm = method("grpo", {"anchors": DrawAnchors(norm_guard=1.0)})
    algorithm.holds = False
    with pytest.raises(ValueError, match="does not go with algorithm='grpo', whose loss does not"):
        algorithm.check()


@pytest.mark.parametrize(
    ("family", "message"),
    [
        (QwenImageEditAdapter, "anchors.data: m draws from a picture that it is given, and here"),
        (WanAdapter, "anchors.data has pictures, and m draws clips; leave it empty"),
    ],
)
def test_models_that_draw_no_pictures_from_texts_are_refused(family, message):
    with pytest.raises(UserError, match=message):
        check_data([Prompt("a", images=(b"",))], "m", family, None)
