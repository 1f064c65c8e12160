"""On-policy distillation: which teacher a sample is pulled to, what the student starts from, and
errors before the model loads."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from algorithm_fixtures import STEPS, method, rollout
from sessions import short_config
from user_errors import raises_user_error

from flow_grpo.diffusion.algorithms import Batch
from flow_grpo.diffusion.config_loading import load_run_config
from flow_grpo.diffusion.models.lora_files import read_lora
from flow_grpo.diffusion.rollout import take_step
from flow_grpo.diffusion.session import build_session
from flow_grpo.diffusion.teachers import set_to_average

SETUP = {"num_steps": STEPS, "group_size": 2, "update_samples": 4}
TEACHERS = {"signs": "signs/lora", "all": "scenes/lora"}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A LoRA directory of the small model with rank 4."""
    folder = tmp_path_factory.mktemp("teacher")
    config = short_config(folder, "run", **{"train.lora_rank": 4, "train.lora_alpha": 8})
    session = build_session(config)
    with torch.no_grad():
        for parameter in session.policy.parameters():
            parameter += 0.01
    session.policy.save(folder)
    session.close()
    return folder / "lora"


def test_each_state_is_pulled_to_the_teacher_of_its_prompt():
    algorithm = method("opd", SETUP, teachers=TEACHERS, distance="gaussian")
    policy, batch = rollout(algorithm)
    passes = policy.passes
    [part] = algorithm.batches([batch[:2], batch[2:]], 4)
    assert part.tasks.tolist() == ["scenes", "scenes", "signs", "signs"]
    assert part.index.tolist() == [1, 3, 0, 2]
    prepared = algorithm.prepare(policy, part)
    assert policy.passes - passes == 2 * 4 * (STEPS - 1)  # all through both: batches of one size
    j, trajectory = 1, part.trajectory
    state, landed = trajectory.latents[:, j], trajectory.latents[:, j + 1]
    steps = np.full((4, 1), trajectory.steps[j])
    loss = algorithm.loss(policy, part, prepared, j)
    means = {
        which: take_step(
            policy.dynamics,
            trajectory.steps[j],
            state,
            policy.no_grad_velocities(which, state[:, None], steps, trajectory.conditioning)[:, 0],
            stochastic=True,
            next_latents=landed,
        )
        for which in ("current", *(policy.loras[path] for path in TEACHERS.values()))
    }
    current, signs, scenes = means.values()
    expected = [
        ((current.mean - other.mean)[row] ** 2 / (2 * current.std.squeeze() ** 2)).mean()
        for row, other in enumerate((scenes, scenes, signs, signs))
    ]
    torch.testing.assert_close(loss.per_sample, torch.stack(expected))


def test_samples_with_different_windows_are_trained_at_their_own_steps():
    """As with sample.sde_window_per='group' or 'batch'."""
    setup = {**SETUP, "window_size": 2, "window_range": (0, 3)}
    algorithm = method("opd", setup, teachers=TEACHERS)
    policy, batch = rollout(method("opd", SETUP, teachers=TEACHERS))
    update = [in_window(batch[:2], 0), in_window(batch[2:], 1)]
    with pytest.raises(ValueError, match=r"range\(0, 2\) and range\(1, 3\)"):
        Batch.concat(update)
    alone, together = {}, {}
    for losses, parts in (
        (alone, [part[i : i + 1] for part in update for i in range(2)]),
        (together, algorithm.batches([update[1][:1], update[0], update[1][1:]], 2)),
    ):
        for part in parts:
            prepared = algorithm.prepare(policy, part)
            for j in range(algorithm.losses_per_sample):
                loss = algorithm.loss(policy, part, prepared, j)
                for index, value in zip(part.index.tolist(), loss.per_sample, strict=True):
                    losses[index, j] = value.item()
    assert len(alone) == 4 * 2
    assert together == pytest.approx(alone, rel=1e-9)


def in_window(batch: Batch, start: int) -> Batch:
    """Two steps from `start` of a batch that was sampled with noise on all steps."""
    whole, rows = batch.trajectory, slice(start, start + 2)
    return replace(
        batch,
        trajectory=replace(
            whole,
            steps=whole.steps[rows],
            latents=whole.latents[:, start : start + 3],
            log_probs=whole.log_probs[:, rows],
        ),
    )


def test_a_batch_runs_only_its_own_teachers():
    algorithm = method("opd", SETUP, teachers=TEACHERS, anchor_beta=0.5)
    policy, batch = rollout(algorithm)
    parts, passes = algorithm.batches([batch], 2), policy.passes
    prepared = [algorithm.prepare(policy, part) for part in parts]
    assert policy.passes - passes == 2 * 4 * (STEPS - 1)  # a teacher and the anchor
    losses = [algorithm.loss(policy, *each, 0) for each in zip(parts, prepared, strict=True)]
    for loss in losses:
        far = [loss.columns[f"{name}_distance"] for name in ("teacher", "anchor")]
        torch.testing.assert_close(loss.per_sample, far[0] + 0.5 * far[1])


def test_the_student_starts_at_the_average_of_its_teachers():
    """Up to the best rank-2 approximation of a sum of rank 4."""
    policy, _ = rollout(method("opd", SETUP, teachers=TEACHERS))
    teachers = [policy.loras[path] for path in TEACHERS.values()]
    added = [products(dict(zip(t.names, t.copy, strict=True))) for t in teachers]
    set_to_average(teachers)
    for name, found in products(policy.trained_parameters()).items():
        mean = (added[0][name] + added[1][name]) / 2
        u, s, v = torch.linalg.svd(mean, full_matrices=False)
        torch.testing.assert_close(found, u[:, :2] * s[:2] @ v[:2], rtol=1e-6, atol=1e-9)
    set_to_average(teachers[:1])  # of one it is that one
    for name, found in products(policy.trained_parameters()).items():
        torch.testing.assert_close(found, added[0][name], rtol=1e-6, atol=1e-9)


def products(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: weights[name.replace("lora_A", "lora_B")].detach() @ a.detach()
        for name, a in weights.items()
        if "lora_A" in name
    }


def test_teachers_are_read_and_the_run_can_be_resumed_from_its_config(teacher, tmp_path):
    fields = {"algorithm": "opd", "train.lora_rank": 4, "train.lora_alpha": 8}
    config = short_config(tmp_path, "run", **fields)
    config.opd.teachers["ocr"] = str(teacher)
    config.opd.anchor_beta = 0.1
    session = build_session(config)
    read = session.policy.loras[str(teacher)]
    saved = read_lora(teacher).for_model("transformer")
    assert len(saved) == len(read.copy)
    for name, copy in zip(read.names, read.copy, strict=True):
        assert torch.equal(copy, saved[name.replace(".default.", ".")])
    assert not any(copy.any() for copy in session.policy.loras[""].copy)
    # it starts where the one teacher is
    there = products(dict(zip(read.names, read.copy, strict=True)))
    for name, found in products(session.policy.trained_parameters()).items():
        torch.testing.assert_close(found, there[name], rtol=1e-4, atol=1e-6)
    assert session.tasks(np.array([0, 3])).tolist() == ["ocr", "ocr"]
    session.close()
    assert load_run_config(tmp_path / "run", []).opd.teachers.to_dict() == {"ocr": str(teacher)}


@pytest.mark.parametrize(
    ("teachers", "fields", "shown"),
    [
        ({}, {}, ["opd.teachers={}", "'ocr'"]),
        ({"scenes": "{}", "ocr": "{}"}, {}, ["opd.teachers={", "'scenes'", "'ocr'", "'all'"]),
        ({"all": "{}"}, {"opd.start": "merged"}, ["opd.start='merged'", "'model'"]),
        ({"all": "a/b/c"}, {}, ["opd.teachers['all']='a/b/c'"]),
        ({"ocr": "{}"}, {"train.lora_rank": 8}, ["r=4", "lora_alpha=8", "r=8"]),
        ({"ocr": "{}"}, {"pretrained.model": "assets/tiny-edit"}, ["opd.teachers['ocr']"]),
        ({"ocr": "{}"}, {"use_lora": False}, ["'opd'", "use_lora=True"]),
        ({"all": "{}"}, {"opd.anchor": "a/b/c", "opd.anchor_beta": 1.0}, ["opd.anchor='a/b/c'"]),
        (
            {"all": "{}"},
            {"anchors.diversity": True, "sample.num_image_per_prompt": 4},
            ["anchors.diversity=True", "'opd'"],
        ),
    ],
)
def test_invalid_settings_are_rejected_before_the_model_loads(
    teacher, tmp_path, teachers, fields, shown
):
    own = {"algorithm": "opd", "opd.start": "model", "train.lora_rank": 4, "train.lora_alpha": 8}
    config = short_config(tmp_path, "run", **{**own, **fields})
    for task, path in teachers.items():
        config.opd.teachers[task] = path.format(teacher)
    with raises_user_error(*shown):
        build_session(config, load=None)
    assert not (tmp_path / "run").exists()
