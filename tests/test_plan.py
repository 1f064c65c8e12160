import math
import re
import sys
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flow_grpo.answer.plan import AnswerPlan
from flow_grpo.draw import presets
from flow_grpo.draw.plan import BatchPlan, largest_divisor, lighter_evaluation, lighter_training
from flow_grpo.errors import OutOfMemory, UserError
from flow_grpo.run.building import advice_when_short
from flow_grpo.run.plan import count_processes


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


def test_the_arithmetic():
    p = plan()
    assert (p.samples, p.groups, p.micro_batches, p.updates) == (48, 6, 8, 2)
    assert "48 = 6 per batch x 4 batches x 2 processes" in p.describe()
    assert "24 = 3 per micro-batch x 4 accumulated x 2 processes" in p.describe()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_size": 7}, "48 samples per epoch .* groups of sample.num_image_per_prompt=7"),
        ({"train_batch_size": 4}, "train.batch_size=4 does not divide sample.train_batch_size=6"),
        ({"accumulation_steps": 3}, "gradient_accumulation_steps=3 does not divide the 8"),
        ({"batches_per_epoch": 0}, "sample.num_batches_per_epoch=0 must be at least 1"),
    ],
)
def test_numbers_that_do_not_divide_are_named(changes, message):
    with pytest.raises(UserError, match=message):
        plan(**changes)


def test_too_few_prompts_are_counted():
    plan().check_prompts(6, "dataset")
    with pytest.raises(UserError, match="dataset has 5 prompts to train on but an epoch needs 6"):
        plan().check_prompts(5, "dataset")


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
    with pytest.raises(UserError, match="1152 samples do not divide over 7 GPUs"):
        presets.get_config("general_ocr_sd3_7gpu")


def test_without_a_number_the_launcher_says_how_many_gpus(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert presets.get_config("pickscore_sd3") == presets.get_config("pickscore_sd3_4gpu")


def test_a_preset_for_another_number_of_gpus_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UserError, match="is for 8 GPUs but 4 processes were planned"):
        presets.get_config("pickscore_sd3_8gpu")


def test_an_unknown_preset_is_named():
    with pytest.raises(
        UserError, match=r"unknown preset 'ocr-flux'; did you mean general_ocr_flux"
    ):
        presets.get_config("ocr-flux")
    with pytest.raises(UserError, match="unknown preset 'tiny_awm_0gpu'"):
        presets.get_config("tiny_awm_0gpu")


def test_smaller_batches_make_the_same_epoch():
    whole = plan(sample_batch_size=18, train_batch_size=9)
    smaller = whole.in_smaller_batches()
    assert (smaller.sample_batch_size, smaller.train_batch_size) == (3, 3)
    assert (smaller.samples, smaller.updates) == (whole.samples, whole.updates)
    assert smaller.in_smaller_batches().in_smaller_batches() is None


def test_running_out_of_memory_is_told_with_a_way_out():
    config = presets.get_config("tiny_ocr")
    advice = lighter_training(config, BatchPlan(1, 4, 6, 4, 4, 3, 1))
    with pytest.raises(OutOfMemory) as told, advice_when_short(advice):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")
    assert not told.value.seen_by_all  # each process tells it
    assert str(told.value) == (
        "CUDA out of memory; try --config.sample.train_batch_size=2 "
        "--config.sample.num_batches_per_epoch=12 --config.train.batch_size=2 "
        "--config.train.gradient_accumulation_steps=6 (the same epoch, smaller batches), or "
        "--config.train.gradient_checkpointing=True, or --config.offload_idle=True; "
        "see docs/performance.md"
    )


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
def test_a_cpu_out_of_memory_is_one_line_with_advice(error, reason):
    with pytest.raises(OutOfMemory) as told, advice_when_short(["--config.a=1"]):
        raise error
    assert reason in str(told.value)
    assert "--config.a=1" in str(told.value)


def test_another_runtime_error_is_left_alone():
    with pytest.raises(RuntimeError, match="shapes"), advice_when_short([]):
        raise RuntimeError("shapes do not match")


def test_compiled_code_samples_with_the_memory_of_training():
    config = presets.get_config("tiny_ocr")
    config.compile = True
    assert "--config.compile=False" not in lighter_training(config, BatchPlan(1, 4, 6, 4, 4, 3, 1))
    assert "--config.compile=False" in lighter_training(config, BatchPlan(1, 4, 6, 4, 2, 6, 1))


def test_merged_weights_take_memory_too():
    config, plan = presets.get_config("tiny_ocr"), BatchPlan(1, 4, 6, 4, 4, 3, 1)
    assert "--config.sample.merge_lora=False" not in lighter_training(config, plan)
    config.sample.merge_lora = True
    assert "--config.sample.merge_lora=False" in lighter_training(config, plan)


def test_advice_names_nothing_that_is_on_already():
    config = presets.get_config("tiny_ocr")
    config.train.gradient_checkpointing = config.offload_idle = True
    config.sample.test_batch_size = 2
    assert lighter_evaluation(config) == ["--config.sample.test_batch_size=1"]


@given(st.integers(1, 200), st.integers(-3, 300))
def test_the_largest_divisor_is_one_and_no_larger_fits(number, most):
    found = largest_divisor(number, most)
    assert number % found == 0
    assert found <= max(1, most)
    assert all(number % n or n > most for n in range(found + 1, number + 1))


def test_an_epoch_is_described_in_full():
    assert plan(inner_epochs=3).describe().splitlines() == [
        "samples per epoch     48 = 6 per batch x 4 batches x 2 processes",
        "groups per epoch      6 prompts x 8 images",
        "samples per update    24 = 3 per micro-batch x 4 accumulated x 2 processes,"
        " each over 9 steps",
        "updates per epoch     6 (train.num_inner_epochs=3)",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_processes": 0}, "num_processes=0 must be at least 1"),
        (
            {"group_size": 7},
            "48 samples per epoch = sample.train_batch_size=6 x sample.num_batches_per_epoch=4 "
            "x 2 processes do not divide into groups of sample.num_image_per_prompt=7; "
            "change one of these numbers",
        ),
        (
            {"train_batch_size": 4},
            "train.batch_size=4 does not divide sample.train_batch_size=6; training works on "
            "whole slices of the sampling batches, so make it a divisor (equal is best)",
        ),
        (
            {"accumulation_steps": 3},
            "train.gradient_accumulation_steps=3 does not divide the 8 micro-batches of an epoch "
            "per process; some gradients would be left over, so make it a divisor",
        ),
    ],
)
def test_a_mistake_is_told_with_its_numbers_the_rule_and_the_way_out(changes, message):
    with pytest.raises(UserError) as told:
        plan(**changes)
    assert str(told.value) == message


def test_updates_of_parts_of_groups_are_told_with_the_way_out():
    plan(accumulation_steps=8).check_whole_groups("dpo")
    with pytest.raises(UserError) as told:
        plan().check_whole_groups("dpo")
    assert str(told.value) == (
        "algorithm='dpo' compares within groups of sample.num_image_per_prompt=8, but an update "
        "has 12 samples per process = train.batch_size=3 x train.gradient_accumulation_steps=4; "
        "make that a multiple"
    )


def test_too_few_prompts_are_told_with_the_way_out():
    with pytest.raises(UserError) as told:
        plan().check_prompts(5, "dataset/ocr")
    assert str(told.value) == (
        "dataset/ocr has 5 prompts to train on but an epoch needs 6 distinct ones (48 samples in "
        "groups of 8); add prompts, or set --config.sample.num_batches_per_epoch=2"
    )


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
    with pytest.raises(UserError, match=rf"_1gpu' is for 1 GPUs but {processes} processes"):
        presets.get_config("general_ocr_sd3_1gpu")
    monkeypatch.setattr(sys, "argv", ["train.py", "--dry_run", "--world_size", "128"])
    with pytest.raises(UserError, match="128 GPUs x 2 updates"):
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
def test_the_values_that_too_few_prompts_are_told_to_set_are_good(
    rows, processes, size, group_size, accumulated
):
    """Six prompts for sixteen groups, for one."""
    large = plan(
        num_processes=processes,
        sample_batch_size=size,
        train_batch_size=size,
        batches_per_epoch=group_size * (rows + 1) * accumulated,
        group_size=group_size,
        accumulation_steps=accumulated,
    )
    with pytest.raises(UserError) as told:
        large.check_prompts(rows, "dataset/ocr")
    options = dict(re.findall(r"--config\.([\w.]+)=(\d+)", str(told.value)))
    if not options:  # even batches of one sample are too many on so many processes
        assert math.lcm(processes, group_size) > rows * group_size
        assert "processes" in str(told.value)
        return
    named = {f.metadata["config"]: f.name for f in fields(large) if "config" in f.metadata}
    smaller = replace(large, **{named[name]: int(value) for name, value in options.items()})
    smaller.check_prompts(rows, "dataset/ocr")


def test_too_few_questions_are_told_a_number_that_divides():
    small = AnswerPlan(
        2, questions=16, group_size=3, updates_per_pass=4, inner_epochs=1, most_at_once=8
    )
    with pytest.raises(
        UserError, match=r"has 15 questions .*--config\.sample\.questions_per_epoch=8$"
    ):
        small.check_questions(15, "dataset/qa")
    replace(small, questions=8).check_questions(15, "dataset/qa")
    with pytest.raises(UserError, match=r"train\.updates_per_epoch"):
        small.check_questions(7, "dataset/qa")
