import math
import re
import sys
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from user_errors import raises_user_error

from flow_grpo.diffusion import presets
from flow_grpo.diffusion.builders import evaluation_memory_options, training_memory_options
from flow_grpo.diffusion.plan import BatchPlan, largest_divisor
from flow_grpo.errors import OutOfMemory, UserError
from flow_grpo.training.builder import suggest_on_oom
from flow_grpo.training.plan import count_processes
from flow_grpo.vlm.plan import VlmBatchPlan


def plan(**changes) -> BatchPlan:
    values = {
        "num_processes": 2,
        "sample_batch_size": 6,
        "batches_per_epoch": 4,
        "group_size": 8,
        "train_batch_size": 3,
        "accumulation_steps": 4,
        "inner_epochs": 1,
        "trained_steps": 9,
    }
    return BatchPlan(**{**values, **changes})


def test_the_arithmetic_of_an_epoch():
    p = plan()
    assert (p.samples, p.groups, p.micro_batches, p.updates) == (48, 6, 8, 2)
    assert "48 = 6 per batch x 4 batches x 2 processes" in p.describe()
    assert "24 = 3 per micro-batch x 4 accumulated x 2 processes" in p.describe()


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"group_size": 7}, ["48 samples", "sample.num_image_per_prompt=7"]),
        ({"train_batch_size": 4}, ["train.batch_size=4", "sample.train_batch_size=6"]),
        ({"accumulation_steps": 3}, ["train.gradient_accumulation_steps=3", "8 micro-batches"]),
        ({"batches_per_epoch": 0}, ["sample.num_batches_per_epoch=0", "at least 1"]),
        ({"num_processes": 0}, ["num_processes=0", "at least 1"]),
    ],
)
def test_numbers_that_do_not_divide_are_named(changes, shown):
    with raises_user_error(*shown):
        plan(**changes)


def test_too_few_prompts_are_counted():
    plan().check_prompt_count(6, "dataset")
    with raises_user_error("dataset/ocr", 5, 6, "--config.sample.num_batches_per_epoch=2"):
        plan().check_prompt_count(5, "dataset/ocr")


@pytest.mark.parametrize("preset", ["general_ocr_sd3", "geneval_sd3", "pickscore_sd3"])
@pytest.mark.parametrize("gpus", [1, 4, 8, 32])
def test_a_preset_is_the_same_epoch_on_any_number_of_gpus(preset, gpus):
    config = presets.get_config(f"{preset}_{gpus}gpu")
    p = plan(
        num_processes=gpus,
        sample_batch_size=config.sample.train_batch_size,
        batches_per_epoch=config.sample.num_batches_per_epoch,
        group_size=config.sample.num_image_per_prompt,
        train_batch_size=config.train.batch_size,
        accumulation_steps=config.train.gradient_accumulation_steps,
    )
    assert (p.groups, p.group_size, p.updates) == (48, 24, 2)


def test_gpus_that_do_not_divide_are_named():
    with raises_user_error(1152, 7):
        presets.get_config("general_ocr_sd3_7gpu")


def test_without_a_number_the_launcher_determines_the_gpus(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert presets.get_config("pickscore_sd3") == presets.get_config("pickscore_sd3_4gpu")


def test_a_preset_for_another_number_of_gpus_is_rejected(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    name = "pickscore_sd3_8gpu"
    with raises_user_error("8 GPUs", "processes is 4", field="preset", value=name):
        presets.get_config(name)


def test_an_unknown_preset_is_named():
    with raises_user_error("ocr-flux", "did you mean general_ocr_flux"):
        presets.get_config("ocr-flux")
    with raises_user_error("tiny_awm_0gpu"):
        presets.get_config("tiny_awm_0gpu")


def test_smaller_batches_make_the_same_epoch():
    whole = plan(sample_batch_size=18, train_batch_size=9)
    smaller = whole.with_smaller_batches()
    assert (smaller.sample_batch_size, smaller.train_batch_size) == (3, 3)
    assert (smaller.samples, smaller.updates) == (whole.samples, whole.updates)
    assert smaller.with_smaller_batches().with_smaller_batches() is None


def test_an_out_of_memory_error_suggests_settings():
    config = presets.get_config("tiny_ocr")
    advice = training_memory_options(config, BatchPlan(1, 4, 6, 4, 4, 3, 1))
    with pytest.raises(OutOfMemory) as error, suggest_on_oom(advice):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")
    assert not error.value.raised_on_all_ranks  # each process reports it
    text = str(error.value)
    assert text.startswith("CUDA out of memory; ")
    assert (
        "--config.sample.train_batch_size=2 --config.sample.num_batches_per_epoch=12 "
        "--config.train.batch_size=2 --config.train.gradient_accumulation_steps=6"
    ) in text
    assert "--config.train.gradient_checkpointing=True" in text
    assert "--config.offload_idle=True" in text


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to "
                "allocate 4000000000000000 bytes. Error code 12"
            ),
            "out of CPU memory: cannot allocate 4000000000000000 bytes;",
        ),
        (MemoryError("Unable to allocate 728. TiB for an array"), "cannot allocate 728. TiB;"),
        (MemoryError(), "out of CPU memory;"),
    ],
)
def test_a_cpu_out_of_memory_error_is_one_line_with_advice(error, reason):
    with pytest.raises(OutOfMemory) as caught, suggest_on_oom(["--config.a=1"]):
        raise error
    assert reason in str(caught.value)
    assert "--config.a=1" in str(caught.value)


def test_other_runtime_errors_are_not_changed():
    with pytest.raises(RuntimeError, match="shapes"), suggest_on_oom([]):
        raise RuntimeError("shapes do not match")


def test_compiled_sampling_uses_the_memory_of_training():
    config = presets.get_config("tiny_ocr")
    config.compile = True
    assert "--config.compile=False" not in training_memory_options(
        config, BatchPlan(1, 4, 6, 4, 4, 3, 1)
    )
    assert "--config.compile=False" in training_memory_options(
        config, BatchPlan(1, 4, 6, 4, 2, 6, 1)
    )


def test_advice_omits_settings_that_are_already_used():
    config = presets.get_config("tiny_ocr")
    config.train.gradient_checkpointing = config.offload_idle = True
    config.sample.test_batch_size = 2
    assert evaluation_memory_options(config) == ["--config.sample.test_batch_size=1"]


@given(st.integers(1, 200), st.integers(-3, 300))
def test_the_largest_divisor_is_found(number, most):
    found = largest_divisor(number, most)
    assert number % found == 0
    assert found <= max(1, most)
    assert all(number % n or n > most for n in range(found + 1, number + 1))


def test_an_epoch_is_described_completely():
    assert plan(inner_epochs=3).describe().splitlines() == [
        "samples per epoch     48 = 6 per batch x 4 batches x 2 processes",
        "groups per epoch      6 prompts x 8 images",
        "samples per update    24 = 3 per micro-batch x 4 accumulated x 2 processes,"
        " each over 9 steps",
        "updates per epoch     6 (train.num_inner_epochs=3)",
    ]


def test_updates_need_complete_groups():
    plan(accumulation_steps=8).check_whole_groups("dpo")
    with raises_user_error(
        "algorithm='dpo'",
        "sample.num_image_per_prompt=8",
        "12 samples",
        "train.batch_size=3",
        "train.gradient_accumulation_steps=4",
    ):
        plan().check_whole_groups("dpo")


@pytest.mark.parametrize(("processes", "batch", "batches"), [(8, 9, 16), (64, 9, 2), (144, 4, 2)])
def test_a_preset_is_planned_for_the_world_size_of_a_dry_run(
    monkeypatch, processes, batch, batches
):
    """The numbers of docs/scaling.md: 1,152 samples in two updates."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py", "--dry_run", f"--world_size={processes}"])
    for name in ("general_ocr_sd3", f"general_ocr_sd3_{processes}gpu"):
        sample = presets.get_config(name).sample
        assert (sample.train_batch_size, sample.num_batches_per_epoch) == (batch, batches)
    assert count_processes() == processes
    with raises_user_error("_1gpu", f"processes is {processes}", field="preset"):
        presets.get_config("general_ocr_sd3_1gpu")
    monkeypatch.setattr(sys, "argv", ["train.py", "--dry_run", "--world_size", "128"])
    with raises_user_error("128 GPUs"):
        presets.get_config("general_ocr_sd3")


def test_a_world_size_of_another_script_is_not_read(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(sys, "argv", ["my_script.py", "--world_size=8"])
    assert count_processes() == 1


@given(
    rows=st.integers(1, 40),
    processes=st.integers(1, 4),
    size=st.integers(1, 24),
    group_size=st.integers(2, 16),
    accumulated=st.integers(1, 6),
)
def test_the_suggested_values_for_too_few_prompts_are_valid(
    rows, processes, size, group_size, accumulated
):
    """For example six prompts for sixteen groups."""
    large = plan(
        num_processes=processes,
        sample_batch_size=size,
        train_batch_size=size,
        batches_per_epoch=group_size * (rows + 1) * accumulated,
        group_size=group_size,
        accumulation_steps=accumulated,
    )
    with pytest.raises(UserError) as error:
        large.check_prompt_count(rows, "dataset/ocr")
    options = dict(re.findall(r"--config\.([\w.]+)=(\d+)", str(error.value)))
    if not options:  # even batches of one sample are too many on that many processes
        assert math.lcm(processes, group_size) > rows * group_size
        assert "processes" in str(error.value)
        return
    named = {f.metadata["config"]: f.name for f in fields(large) if "config" in f.metadata}
    smaller = replace(large, **{named[name]: int(value) for name, value in options.items()})
    smaller.check_prompt_count(rows, "dataset/ocr")


def test_the_suggested_number_of_questions_divides():
    small = VlmBatchPlan(
        2, questions=16, group_size=3, updates_per_pass=4, inner_epochs=1, max_batch_size=8
    )
    with raises_user_error("dataset/qa", 15, "--config.sample.questions_per_epoch=8"):
        small.check_num_questions(15, "dataset/qa")
    replace(small, questions=8).check_num_questions(15, "dataset/qa")
    with raises_user_error("train.updates_per_epoch"):
        small.check_num_questions(7, "dataset/qa")
