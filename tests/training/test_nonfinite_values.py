"""Non-finite losses and gradients are skipped, and non-finite state is neither written nor read."""

import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import nonfinite_runs
import pytest
import torch
import vlm_runs
from accelerate import Accelerator
from accelerate.utils import DistributedType
from safetensors.torch import load_file, save_file
from torch import nn
from user_errors import raises_user_error

from flow_grpo.diffusion.fields import get_config
from flow_grpo.diffusion.models import load_adapter
from flow_grpo.diffusion.models.lora_files import load_full_weights, read_lora
from flow_grpo.diffusion.session import Session, build_algorithm
from flow_grpo.rewards import build_reward
from flow_grpo.training.accelerator import check_deepspeed
from flow_grpo.training.export import ExportSource, reject_nonfinite
from flow_grpo.training.finite import (
    backward,
    clip_gradients,
    first_nonfinite,
    is_finite,
    loss_scale,
    step_if_finite,
)
from flow_grpo.training.metrics import TrainingStats
from flow_grpo.training.session import find_outage, save_session
from flow_grpo.training.snapshot import Snapshot
from flow_grpo.training.update import optimizer_step, set_learning_rates
from flow_grpo.vlm import export as vlm_export


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_one_non_finite_element_is_found(value, dtype):
    tensor = torch.ones(3, 4, dtype=dtype)
    assert is_finite(tensor)
    tensor[1, 2] = value
    assert not is_finite(tensor)
    named = {"good": torch.ones(2), "none": torch.ones(0), "count": torch.ones(2).int()}
    assert first_nonfinite({**named, "bad": tensor}.items()) == "bad"
    assert first_nonfinite(named.items()) is None


def test_the_shard_of_a_partitioned_parameter_is_read():
    parameter = nn.Parameter(torch.ones(0))
    parameter.ds_tensor = torch.tensor([1.0, math.nan])  # as ZeRO-3 stores it
    assert first_nonfinite([("weight", parameter)]) == "weight"


@pytest.mark.parametrize("constant", [0.0, math.inf, math.nan])
def test_a_non_finite_loss_has_a_non_finite_gradient(constant):
    """Although its derivative is finite."""
    weight = torch.tensor([2.0, 0.0], requires_grad=True)
    # a real one may divide by the accumulation steps, or scale by the precision, of earlier tests
    accelerator = SimpleNamespace(backward=torch.Tensor.backward)
    backward(accelerator, (weight * 3).sum() + constant)
    assert weight.grad.tolist() == [3.0, 3.0] or not math.isfinite(constant)
    assert weight.grad.isfinite().all() == math.isfinite(constant)


def prepared(accelerator: Accelerator) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    """A parameter and its optimizer, after one step."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = accelerator.prepare(torch.optim.AdamW([weight], lr=0.1))
    weight.grad = torch.ones(2)
    optimizer.step()
    optimizer.zero_grad()
    return weight, optimizer


# 1e30 is finite, but its square is not
@pytest.mark.parametrize("gradient", [[math.nan, 1.0], [1.0, math.inf], [1e30, 1e30]])
def test_a_step_with_a_non_finite_norm_is_not_taken(gradient):
    accelerator = Accelerator(cpu=True)
    weight, optimizer = prepared(accelerator)
    before, state = weight.detach().clone(), dict(optimizer.state[weight])
    state = {name: value.clone() for name, value in state.items()}
    weight.grad = torch.tensor(gradient)
    norm = clip_gradients(accelerator, [weight], 1.0)
    assert not math.isfinite(norm)
    assert not step_if_finite(accelerator, optimizer, norm)
    assert weight.grad is None
    assert torch.equal(weight, before)
    assert all(torch.equal(optimizer.state[weight][name], state[name]) for name in state)

    weight.grad = torch.tensor([3.0, 4.0])
    assert clip_gradients(accelerator, [weight], 1.0) == 5.0
    weight.grad = torch.tensor([3.0, 4.0])
    assert step_if_finite(accelerator, optimizer, 5.0)
    assert not torch.equal(weight, before)


@pytest.fixture
def scaled(monkeypatch) -> Accelerator:
    """As with mixed_precision=fp16, for which accelerate needs a GPU."""
    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(accelerator.state, "_mixed_precision", "fp16")
    accelerator.native_amp = True
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    return accelerator


def test_an_overflow_lowers_the_loss_scale_until_steps_are_taken(scaled):
    weight = nn.Parameter(torch.ones(2))
    optimizer = scaled.prepare(torch.optim.AdamW([weight], lr=0.1))
    taken = []
    for _ in range(3):
        backward(scaled, weight.sum())
        if loss_scale(scaled) > 1:
            weight.grad[0] = math.inf  # it overflows at larger scales
        norm = clip_gradients(scaled, [weight], 1.0)
        taken.append(step_if_finite(scaled, optimizer, norm))
    assert taken == [False, False, True]
    assert loss_scale(scaled) == 1.0
    assert weight.isfinite().all()


@pytest.fixture
def session(tmp_path) -> Session:
    nonfinite_runs.make_prompts(tmp_path)
    session = nonfinite_runs.image_session(
        tmp_path, **{"train.max_skipped_updates": 3, "train.lr_scheduler": "linear"}
    )
    yield session
    session.close()


def update(session: Session, gradient: float) -> TrainingStats:
    stats = TrainingStats()
    for parameter in session.policy.parameters():
        parameter.grad = torch.full_like(parameter, gradient)
    set_learning_rates(session)
    optimizer_step(session, stats)
    return stats


def everything(session: Session) -> list[torch.Tensor]:
    """Copies of weights, moving average and optimizer state."""
    states = session.optimizer.state.values()
    found = [*session.policy.parameters(), *session.ema.copy]
    found += [value for state in states for value in state.values()]
    return [tensor.detach().clone() for tensor in found]


def rate(session: Session) -> float:
    return session.optimizer.param_groups[0]["lr"]


def test_a_skipped_update_changes_nothing(session):
    update(session, 1.0)
    before, first = everything(session), rate(session)
    stats = update(session, math.nan)
    assert all(map(torch.equal, everything(session), before))
    assert all(parameter.grad is None for parameter in session.policy.parameters())
    assert stats.metrics(session.accelerator)["train/skipped_updates"] == 1
    progress = session.progress
    assert (progress.step, progress.skipped, progress.applied) == (2, 1, 1)
    second = rate(session)
    update(session, 1.0)
    assert first > second == rate(session)  # the rate of the skipped update is used again
    assert not any(map(torch.equal, everything(session)[:1], before[:1]))


def test_skipped_updates_in_a_row_end_the_run(session):
    checkpoint = save_session(session)
    for gradient in (math.nan, math.inf, 1.0, math.nan, math.nan):
        update(session, gradient)
    assert session.progress.skipped_in_a_row == 2
    with raises_user_error(
        "update 6", "inf", checkpoint, field="train.max_skipped_updates", value=3
    ):
        update(session, math.inf)


def test_a_limit_of_0_never_ends_the_run(session):
    train = session.config.train
    object.__setattr__(train, "max_skipped_updates", 0)  # the config is frozen
    for _ in range(12):
        update(session, math.nan)
    assert session.progress.skipped_in_a_row == 12


def test_the_search_for_a_loss_scale_does_not_end_the_run(session, monkeypatch):
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    scaler.scale(torch.ones(()))  # as a backward pass does
    monkeypatch.setattr(session.accelerator, "scaler", scaler)
    monkeypatch.setattr(session.accelerator.state, "_mixed_precision", "fp16")
    session.accelerator.native_amp = True
    for scale in (8.0, 4.0, 2.0, 1.0):
        assert update(session, math.inf)._loss_scale == scale
    assert (session.progress.skipped, session.progress.skipped_in_a_row) == (4, 0)
    update(session, math.inf)
    update(session, math.inf)
    with raises_user_error(field="train.max_skipped_updates", value=3):
        update(session, math.inf)


def break_weight(session: Session) -> None:
    session.policy.parameters()[0].data.view(-1)[0] = math.nan


def break_average(session: Session) -> None:
    session.ema.copy[0].view(-1)[0] = math.inf


def break_optimizer(session: Session) -> None:
    state = next(iter(session.optimizer.state.values()))
    state["exp_avg_sq"].view(-1)[0] = math.inf


BREAK = {"lora_A": break_weight, "moving average": break_average, "exp_avg_sq": break_optimizer}


@pytest.mark.parametrize("part", BREAK)
def test_a_checkpoint_with_non_finite_values_is_not_written(session, part):
    update(session, 1.0)
    good = save_session(session)
    session.progress.step += 1
    BREAK[part](session)
    with raises_user_error(part, good):
        save_session(session)
    assert [path.name for path in good.parent.glob("*checkpoint*")] == [good.name]
    assert (good.parent / "latest").resolve() == good


@pytest.mark.parametrize("part", BREAK)
def test_a_run_is_not_resumed_from_non_finite_values(session, part, monkeypatch):
    update(session, 1.0)
    BREAK[part](session)
    with monkeypatch.context() as patch:  # as an earlier version wrote it
        patch.setattr("flow_grpo.training.saving.find_nonfinite", lambda *_: None)
        patch.setattr(Snapshot, "_check_finite", lambda *_: None)
        bad = save_session(session)
    session.close()
    with raises_user_error(bad, "NaN"):
        nonfinite_runs.image_session(session.folder.parents[1], resume="auto")


def test_gradients_kept_from_the_rollout_are_checked_too(tmp_path):
    """They reach the weights at the end of the epoch, which then is one skipped update."""
    nonfinite_runs.make_prompts(tmp_path)
    session = nonfinite_runs.image_session(
        tmp_path,
        **{
            "sample.train_batch_size": 1,
            "sample.num_batches_per_epoch": 4,
            "train.batch_size": 1,
            "train.gradient_accumulation_steps": 4,
            "train.keep_gradients": True,
            "grpo.beta": 0.0,
        },
    )
    before = [parameter.detach().clone() for parameter in session.policy.parameters()]
    try:
        with nonfinite_runs.nan_gradients(1):
            nonfinite_runs.train(session)
    finally:
        session.close()
    assert session.progress.skipped == session.progress.step == 1
    assert all(map(torch.equal, session.policy.parameters(), before))
    assert (session.folder / "checkpoints/latest/lora").is_dir()


def test_non_finite_images_are_the_fault_of_the_model():
    reward = build_reward({"jpeg_compressibility": 1.0})
    images = torch.zeros(4, 3, 8, 8)
    images[1:, 0, 0, 0] = math.nan
    scores = reward(images, ["a"] * 4)
    with raises_user_error("3 of 4 images", "NaN", field="max_failed_fraction") as error:
        find_outage(Accelerator(cpu=True), reward, scores, 0.2)
    assert "jpeg_compressibility" not in str(error.value)
    assert "resume" not in str(error.value)


def spoil(file: Path) -> str:
    """Make the first tensor of a file NaN and return its name."""
    tensors = load_file(file)
    name = min(name for name, tensor in tensors.items() if tensor.is_floating_point())
    tensors[name] = torch.full_like(tensors[name], math.nan)
    save_file(tensors, file, metadata={"format": "pt"})
    return name


def test_files_of_an_image_model_are_checked(session, tiny_sd3, tmp_path):
    lora = save_session(session) / "lora/pytorch_lora_weights.safetensors"
    name = spoil(lora)
    with raises_user_error(lora, name, "NaN"):
        read_lora(lora)
    shutil.copytree(tiny_sd3, tmp_path / "pipeline")
    file = tmp_path / "pipeline/transformer/diffusion_pytorch_model.safetensors"
    name = spoil(file)
    with raises_user_error(name, "NaN"):
        load_full_weights(session.policy.transformer, file.parent)
    with raises_user_error("SD3Transformer2DModel", name, "NaN"):
        load_adapter(str(tmp_path / "pipeline"))


def test_a_vision_language_model_with_nan_is_not_exported(tmp_path):
    nonfinite_runs.make_files(tmp_path)
    fields = nonfinite_runs.vlm_fields(tmp_path)
    session = vlm_runs.run(**{**fields, "train.ema": False})
    spoil(session.folder / "checkpoints/latest/lora/adapter_model.safetensors")
    (session.folder / "checkpoints/latest/state/files.json").unlink()  # which has checksums
    source = ExportSource.find(session.folder / "checkpoints/latest")
    with raises_user_error("NaN", "lora"):
        vlm_export.export(source, fields["pretrained.model"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_that_overflow_in_the_exported_precision_are_rejected(tmp_path):
    model = nn.Linear(2, 2)
    nn.init.constant_(model.bias, 1e6)
    reject_nonfinite(tmp_path, model, torch.float32)
    with raises_user_error("bias", "float16", field=str(tmp_path)):
        reject_nonfinite(tmp_path, model.half(), torch.float16)


def test_versions_of_deepspeed_that_do_not_skip_are_rejected(monkeypatch):
    monkeypatch.setattr("flow_grpo.training.accelerator.version", lambda _: "0.19.7")
    with raises_user_error("0.19.8", field="deepspeed", value="0.19.7"):
        check_deepspeed(2)
    monkeypatch.setattr("flow_grpo.training.accelerator.version", lambda _: "0.20.0")
    check_deepspeed(2)
    with raises_user_error(field="zero_stage", value=0):
        check_deepspeed(0)


@pytest.mark.parametrize(("norm", "skipped"), [(5.0, False), (math.inf, True), (math.nan, False)])
def test_a_step_of_deepspeed_is_applied_skipped_or_fatal(norm, skipped):
    """DeepSpeed has taken the step, or not, before the norm is known."""
    accelerator = SimpleNamespace(
        distributed_type=DistributedType.DEEPSPEED, optimizer_step_was_skipped=skipped
    )
    optimizer = SimpleNamespace(zero_grad=lambda: None)
    if math.isnan(norm):
        with raises_user_error("gradient norm nan"):
            step_if_finite(accelerator, optimizer, norm)
    else:
        assert step_if_finite(accelerator, optimizer, norm) == (not skipped)


def test_the_kl_weight_does_not_change_if_every_update_was_skipped():
    config = get_config()
    config.grpo.kl_target = config.grpo.beta = 0.1
    algorithm = build_algorithm(config)
    before = algorithm.state_dict()
    for metrics in ({"train/loss": math.nan}, {"train/kl": math.nan}):
        algorithm.update_kl_weight(metrics)
    assert algorithm.state_dict() == before
