"""Estimates of epochs on several GPUs: closed forms, simulations, and measurements that apply."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import small_vlm
import torch
from diffusers import SD3Transformer2DModel
from hypothesis import given
from hypothesis import strategies as st
from untrained import vlm as untrained_vlm
from untrained.full import FULL
from user_errors import raises_user_error

from flow_grpo.diffusion import presets
from flow_grpo.diffusion import workload as diffusion
from flow_grpo.diffusion.config_checks import check_config
from flow_grpo.diffusion.models.sd3 import SD3Adapter
from flow_grpo.diffusion.plan import count_trained_steps
from flow_grpo.diffusion.session import build_algorithm
from flow_grpo.training import measurements
from flow_grpo.training.measurements import (
    PARAMETERS,
    SHAPES,
    newest,
    read_lines,
    read_measurements,
)
from flow_grpo.training.scaling import (
    BASE_LATENCY,
    COPY_BANDWIDTH,
    NETWORK_LATENCY,
    NVLINK_BANDWIDTH,
    NVLINK_LATENCY,
    Cluster,
    Collective,
    Workload,
    checkpoint_bytes,
    checkpoint_wait,
    collective_seconds,
    estimate_epoch,
    expected_slowest,
)
from flow_grpo.training.time_estimate import MeasuredTimes, RemainingWork
from flow_grpo.vlm import presets as vlm_presets
from flow_grpo.vlm import workload as vlm
from flow_grpo.vlm.config_checks import check_config as check_vlm_config
from flow_grpo.vlm.fields import VlmConfig
from flow_grpo.vlm.memory_plan import DECODERS, Decoder, plan_memory
from flow_grpo.vlm.separate_critic import build_critic

WORKLOAD = Workload(
    samples=240,
    seconds_per_sample=0.5,
    work=RemainingWork(batches=4, micro_batches=6, eval_batches=2, epochs=10, evaluations=5),
    times=MeasuredTimes(
        sample=3.0, reward=1.0, train=2.0, first_eval=4.0, next_eval=4.0, warm_up=0.0
    ),
    collectives=[Collective("gradient all-reduce", 4e9, 2, passes=2)],
    checkpoint_bytes=32e9,
    save_every=2,
    writes_in_background=True,
)


def ring_steps(num_bytes: float, cluster: Cluster, passes: int) -> float:
    """Return the seconds of a ring, step by step: each GPU sends a part to the next one.

    A step takes as long as its slowest link; NCCL counts the latency of the network for as many
    steps as the ring has links between nodes, minus one.
    """
    between = cluster.nodes > 1
    bandwidth = min(NVLINK_BANDWIDTH, cluster.network_bandwidth) if between else NVLINK_BANDWIDTH
    seconds = BASE_LATENCY
    for _ in range(passes):
        for step in range(1, cluster.gpus):
            crosses = step < cluster.nodes
            seconds += NETWORK_LATENCY if crosses else NVLINK_LATENCY
            seconds += num_bytes / cluster.gpus / bandwidth
    return seconds


@pytest.mark.parametrize("gpus", [2, 7, 8, 9, 64, 512])
@pytest.mark.parametrize("passes", [1, 2])
def test_a_collective_takes_as_long_as_a_simulated_ring(gpus, passes):
    for cluster in (Cluster(gpus), Cluster(gpus, 4, 1e9)):
        expected = ring_steps(1e8, cluster, passes)
        assert collective_seconds(1e8, cluster, passes) == pytest.approx(expected)


def test_large_all_reduces_are_limited_by_bandwidth_and_small_ones_by_latency():
    large = collective_seconds(1e13, Cluster(512, 8, 1e9), 2)
    assert large == pytest.approx(2 * 511 / 512 * 1e13 / 1e9, rel=1e-5)
    # 64 nodes: 126 steps cross the network, 896 do not
    small = collective_seconds(0.0, Cluster(512), 2)
    assert small == pytest.approx(8.4e-6 + 126 * 9.6e-6 + 896 * 3.4e-6)
    assert collective_seconds(1e9, Cluster(1), 2) == 0


@given(st.integers(1, 600), st.floats(0, 1e11), st.sampled_from([1, 2]))
def test_more_gpus_never_communicate_faster(gpus, num_bytes, passes):
    more = collective_seconds(num_bytes, Cluster(gpus + 1), passes)
    assert more >= collective_seconds(num_bytes, Cluster(gpus), passes)


def test_the_slowest_gpu_is_the_expected_maximum_of_normal_speeds():
    assert expected_slowest(1) == pytest.approx(1)
    drawn = np.random.default_rng(0).standard_normal((4000, 64))
    for gpus in (2, 8, 64):
        simulated = 1 + 0.1 * drawn[:, :gpus].max(1).mean()
        assert expected_slowest(gpus, 0.1) == pytest.approx(simulated, abs=0.006)


@pytest.mark.parametrize(
    ("disk", "in_background", "wait"),
    [
        (16e9, True, 32e9 / COPY_BANDWIDTH),  # 2 s of writing within 2 epochs of 5 s
        (2e9, True, 32e9 / COPY_BANDWIDTH + 6),  # 16 s of writing
        (2e9, False, 16.0),
    ],
)
def test_training_waits_for_the_copy_and_for_an_unfinished_checkpoint(disk, in_background, wait):
    work = replace(WORKLOAD, writes_in_background=in_background)
    cluster = Cluster(8, disk_bandwidth=disk)
    assert checkpoint_wait(work, cluster, 5.0) == pytest.approx(wait)


def test_an_epoch_is_the_sum_of_its_phases():
    alone = estimate_epoch(replace(WORKLOAD, samples=48), Cluster(1))
    assert alone.phases == {
        "sampling": 12.0,
        "waiting for rewards": 1.0,
        "training": 12.0,
        "slowest GPU": pytest.approx(0, abs=1e-12),
        "communication": 0.0,
        "checkpoint": pytest.approx(0.5 + 0.0),  # a copy of 1 s every second epoch, hidden writes
        "evaluation": 4.0,  # 5 of 8 s in 10 epochs
    }
    assert alone.total == pytest.approx(29.5)
    assert alone.efficiency == pytest.approx(48 * 0.5 / 29.5)
    many = estimate_epoch(WORKLOAD, Cluster(64))
    assert many.phases["communication"] == 2 * collective_seconds(4e9, Cluster(64), 2)
    assert many.phases["slowest GPU"] == pytest.approx(24 * (expected_slowest(64) - 1))
    assert many.share("evaluation") == pytest.approx(4 / many.total)
    never = estimate_epoch(replace(WORKLOAD, save_every=0), Cluster(64))
    assert never.phases["checkpoint"] == 0


def measured(config) -> dict:
    line = newest(measurements.read_measurements(), config)
    assert line is not None
    return line


def test_a_larger_epoch_on_more_gpus_is_at_most_as_efficient():
    config = check_config(presets.get_config("general_ocr_sd3_8gpu"))
    line = measured(config)
    assert line["file"] == "sd3_h200.jsonl"
    found = []
    for gpus in (1, 8, 64, 512):
        plan = diffusion.plan_run(config, gpus)
        work = diffusion.build_workload(config, plan, line, tests=0)
        [reduce] = work.collectives
        # 18.8 M parameters in float32; docs/scaling.md
        assert (reduce.num_bytes, reduce.count) == (4 * 18_776_064, 2)
        assert work.checkpoint_bytes == 6 * reduce.num_bytes  # 450 MB
        found.append(estimate_epoch(work, Cluster(gpus)))
    assert [each.samples for each in found] == [144, 1152, 9216, 73728]
    efficiencies = [each.efficiency for each in found]
    assert efficiencies == sorted(efficiencies, reverse=True)
    assert 0.9 < efficiencies[-1] < efficiencies[0] < 1


def test_rewards_and_sharded_weights_of_a_diffusion_run():
    config = check_config(presets.get_config("general_ocr_sd3_8gpu"))
    plan, line = diffusion.plan_run(config, 8), measured(config)
    work = diffusion.build_workload(
        config, plan, line, tests=1000, reward_seconds=3.0, sharded=True
    )
    # 16 batches of 10 steps; 16 micro-batches of 9 steps: forward, backward, reference
    gather, scatter = work.collectives
    assert (gather.num_bytes, gather.count) == (2 * 2_243_171_520, 16 * 10 + 16 * 9 * 3)
    assert (scatter.num_bytes, scatter.count) == (4 * 18_776_064, 2)
    assert work.times.reward == 3.0
    # best 2 and worst 2 of 8 candidates, of 4 steps each, of which half are trained
    sample = replace(config.sample, num_image_per_prompt=8, train_batch_size=4)
    train = replace(config.train, keep_best_worst=2, batch_size=4)
    chosen = replace(config, sample=sample, train=train)
    explored = diffusion.build_workload(chosen, diffusion.plan_run(chosen, 8), line, tests=8)
    per_sample = work.times.sample / plan.sample_batch_size
    assert explored.times.sample == pytest.approx(4 * (per_sample + 2 * 0.4 * per_sample))
    # 125 prompts of each process in batches of 16
    assert work.work.eval_batches == -(-125 // config.sample.test_batch_size)


def test_small_batches_of_responses_take_as_long_as_the_measured_one():
    config = check_vlm_config(vlm_presets.get_config("qwen2_5_vl_3b_geometry3k"))
    line = measured(config)
    assert "--full" in line["command"]
    seconds = {}
    for gpus in (1, 8, 64, 320):
        plan = vlm.plan_run(config, gpus)
        work = vlm.build_workload(config, plan, line, tests=0, sharded=gpus > 1)
        seconds[gpus] = work.times.sample * work.work.batches
    one = line["sampling_s_per_answer"]
    assert seconds == pytest.approx({1: 2560 * one, 8: 3 * 107 * one, 64: 64 * one, 320: 64 * one})
    gather, scatter = work.collectives
    # 4 updates of 2 responses of 898 tokens: one micro-batch each
    assert (gather.count, scatter.count) == (2 + 2 * 4, 4)
    assert scatter.num_bytes == 4 * line["parameters"]
    assert work.checkpoint_bytes == checkpoint_bytes(line["parameters"], ema=config.train.ema)
    assert not work.writes_in_background


def total_gib(config: VlmConfig, phase: str, gpus: int = 8, sharded: bool = False) -> float:
    return sum(plan_memory(config, gpus, sharded=sharded)[phase].values())


def vlm_config(preset: str, **fields) -> VlmConfig:
    config = vlm_presets.get_config(preset)
    config.update_from_flattened_dict(fields)
    return check_vlm_config(config)


ALL_WEIGHTS = {"use_lora": False, "train.learning_rate": 1e-6}
CHECKPOINTED = {"train.gradient_checkpointing": True}


@pytest.mark.parametrize(
    ("options", "shape", "fields"),
    [
        ("", "3B", {"train.tokens_per_batch": 3 * 4474}),
        ("--budget 5000", "3B", {}),
        ("--budget 5000 --gradient_checkpointing", "3B", CHECKPOINTED),
        ("--full --gradient_checkpointing", "3B", {**ALL_WEIGHTS, **CHECKPOINTED}),
        ("--budget 5000", "7B", {}),
        ("--base_precision nf4 --budget 5000", "7B", {"pretrained.base_precision": "nf4"}),
    ],
)
def test_the_computed_memory_of_training_is_close_to_the_measured_one(options, shape, fields):
    """A row of the benchmark has a prompt of 386 tokens and 8 responses of 511: 4,474 tokens."""
    command = f"python scripts/benchmark_vlm.py --shape qwen2.5-vl-{shape.lower()} {options}"
    lines = [each for each in read_measurements() if each.get("command") == command.strip()]
    line = lines[-1]
    if "--full" in options:
        fields = {**fields, "train.tokens_per_batch": 3 * 4474}
    model = f"Qwen/Qwen2.5-VL-{shape}-Instruct"
    plain = {"use_lora": True, "train.lora_rank": 32, "train.gradient_checkpointing": False}
    fields = {"train.tokens_per_batch": 4474, **plain, **fields}
    config = vlm_config(
        "qwen2_5_vl_3b_geometry3k",
        **{"pretrained.model": model, "train.beta": 0.0, "train.freeze_vision": True, **fields},
    )
    found = total_gib(config, "training", gpus=1)
    assert found == pytest.approx(line["training_gib"], rel=0.1)


def test_7b_full_fine_tuning_in_bfloat16_fits_40_gb_gpus():
    """The figures of docs/vlm/scaling.md; 40 GB are 37.3 GiB."""
    preset, small = "qwen2_5_vl_7b_geometry3k_full", {"train.beta": 0.0, "sample.batch_size": 16}
    fields = {**small, "train.freeze_vision": False, **CHECKPOINTED}
    plain = vlm_config(preset, **fields)
    half = vlm_config(preset, **fields, **{"train.optimizer": "adamw_bf16"})
    parameters = 8_292_166_656
    for config, size in ((plain, 16), (half, 8)):
        terms = plan_memory(config, 8, sharded=True)["training"]
        state = terms["weights, gradients and moments"]
        assert state == pytest.approx(size * parameters / 8 / 2**30)
    assert total_gib(half, "training", sharded=True) < 37.3
    assert total_gib(half, "sampling", sharded=True) < 37.3
    assert total_gib(half, "training", sharded=False) > 62


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_vl"])  # LM head tied to the embedding or not
def test_the_weights_of_a_separate_critic_are_counted(family, monkeypatch):
    model = small_vlm.build(family)
    text, tied = small_vlm.TEXT, family == "qwen3_vl"
    widths = (text["hidden_size"], text["intermediate_size"], 32, 16, text["vocab_size"])
    parameters = sum(p.numel() for p in model.parameters())
    monkeypatch.setitem(DECODERS, "tiny", Decoder(2, *widths, tied=tied))
    monkeypatch.setitem(PARAMETERS, "tiny", measurements.Parameters(parameters, 0))
    separate = {"train.advantage": "gae", "train.critic": "separate", "train.critic_model": "tiny"}
    fields = {"train.freeze_vision": False, **CHECKPOINTED, **separate}
    config = vlm_config("qwen2_5_vl_3b_geometry3k", **fields)
    critic = build_critic(model, {"temperature": 1.0}, freeze_vision=False)
    optimizer = torch.optim.AdamW(critic.parameters())
    for parameter in critic.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    moments = [
        state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")
    ]
    states = [*critic.parameters(), *(p.grad for p in critic.parameters()), *moments]
    plans = [
        plan_memory(config, gpus, sharded=sharded) for gpus, sharded in ((1, False), (4, True))
    ]
    for plan, gpus in zip(plans, (1, 4), strict=True):
        for terms in plan.values():
            found = terms["critic's weights, gradients and moments"]
            assert found == pytest.approx(sum(t.nbytes for t in states) / gpus / 2**30)
    kept = plans[0]["training"]["critic's inputs of all layers for 16,384 tokens"]
    assert kept == pytest.approx(16384 * 2 * 32 * 4 / 2**30)  # float32
    gathered = plans[1]["sampling"]["critic's gathered weights"]
    assert gathered == pytest.approx(sum(p.numel() for p in critic.parameters()) * 2 / 2**30)


def test_70b_qlora_fits_80_gb_gpus():
    """The figures of docs/vlm/scaling.md; 80 GB are 74.5 GiB."""
    fields = {"use_lora": True, "train.learning_rate": 1e-5, "train.tokens_per_batch": 8192}
    fields |= {"pretrained.base_precision": "nf4", "sample.batch_size": 16, **CHECKPOINTED}
    fields |= {"sample.max_new_tokens": 2000, "max_prompt_length": 1000, "train.lora_rank": 32}
    for model in ("Qwen/Qwen2.5-VL-72B-Instruct", "meta-llama/Meta-Llama-3-70B-Instruct"):
        config = vlm_config("qwen2_5_vl_3b_geometry3k", **{"pretrained.model": model, **fields})
        for phase in ("training", "sampling"):
            assert 45 < total_gib(config, phase) < 74.5
        for precision, size in (("bf16", 2), ("fp8", 1)):
            own = vlm_config(
                "qwen2_5_vl_3b_geometry3k",
                **{**fields, "pretrained.model": model, "pretrained.base_precision": precision},
            )
            assert total_gib(own, "training") > size * 65
    split = replace(config, train=replace(config.train, sequence_parallel=4))
    saved = total_gib(config, "training") - total_gib(split, "training")
    layer = DECODERS["llama-3-70b"].layer_bytes
    assert saved == pytest.approx(6144 * (80 * 8192 * 2 + layer) / 2**30)


def test_the_sizes_of_decoders_agree_with_their_parameters():
    for name, decoder in DECODERS.items():
        inputs = 2 * (decoder.width + decoder.attention) + 3 * (decoder.width + decoder.inner)
        inputs += 2 * (decoder.width + decoder.key_values)
        assert decoder.layers * inputs == PARAMETERS[name].lora_per_rank
        rest = PARAMETERS[name].all - decoder.linear - decoder.embeddings
        assert 0 < rest < 0.8e9  # norms, biases and the vision tower
    llama = DECODERS["llama-3-70b"]
    norms = (2 * llama.layers + 1) * llama.width
    assert llama.linear + llama.embeddings + norms == PARAMETERS["llama-3-70b"].all


@pytest.mark.parametrize("algorithm", ["grpo", "mix", "nft", "dgpo", "opd"])
def test_trained_steps_are_those_of_the_algorithm(algorithm):
    config = presets.get_config("tiny_ocr")
    config.algorithm = algorithm
    config.sample.sde_window_size = 2 if algorithm == "grpo" else 0
    config.nft.times = 5
    config.opd.teachers, config.opd.start = {"all": "logs/teacher"}, "model"
    config.train.timestep_fraction = 0.6 if algorithm == "opd" else 1.0
    assert count_trained_steps(config) == build_algorithm(config).losses_per_sample


def test_parameter_counts_are_those_of_the_architectures():
    with torch.device("meta"):
        sd3 = SD3Transformer2DModel(**FULL["sd3.5-medium"].transformer)
    model = untrained_vlm.build("qwen2.5-vl-3b", torch.device("meta"), torch.bfloat16)
    head = model.get_output_embeddings()

    def count(module: torch.nn.Module, chosen) -> tuple[int, int]:
        linear = {n: m for n, m in module.named_modules() if isinstance(m, torch.nn.Linear)}
        per_rank = sum(m.in_features + m.out_features for n, m in linear.items() if chosen(n, m))
        return sum(p.numel() for p in module.parameters()), per_rank

    ends = tuple(f".{name}" for name in SD3Adapter.lora_targets)
    assert count(sd3, lambda name, _: name.endswith(ends)) == PARAMETERS["sd3.5-medium"]
    found = count(model, lambda name, layer: layer is not head and "visual" not in name)
    assert found == PARAMETERS["qwen2.5-vl-3b"]
    lines = measurements.read_measurements()
    known = {line["shape"]: line["parameters"] for line in lines if "parameters" in line}
    assert {name: PARAMETERS[name].all for name in known} == known
    assert {*SHAPES.values()} >= PARAMETERS.keys()


def test_a_file_of_measurements_is_checked(tmp_path):
    config = check_config(presets.get_config("general_ocr_sd3_8gpu"))
    path = tmp_path / "own.jsonl"
    with raises_user_error("cannot be read", field=str(path)):
        read_lines(path)
    for text in ("nonsense", "[1]"):
        path.write_text('{"date": "2026"}\n' + text)
        with raises_user_error(field=f"{path}:2"):
            read_lines(path)
    path.write_text(json.dumps({"full_s_per_sample": {}, "settings": {}}))
    assert newest(read_lines(path), config) is None  # of another model
    line = measured(config)
    incomplete = {name: value for name, value in line.items() if name != "date"}
    path.write_text(json.dumps(incomplete))
    with raises_user_error("'date'", field="own.jsonl"):
        newest(read_lines(path), config)
    for name, value in (
        ("sampling_s_per_image", {"median": 0}),
        ("trained_step_s_per_sample", {"median": math.nan}),
        ("trained_step_s_per_sample", {"median": "1"}),
        ("peak_gib", -1),
        ("device", None),
    ):
        path.write_text(json.dumps(line | {name: value}))
        with raises_user_error("not a measurement", field="own.jsonl"):
            newest(read_lines(path), config)


def test_vlm_measurements_of_other_settings_are_not_used():
    """Of TRL, other precisions, flex attention, sampling only, or without the separate critic."""
    config = check_vlm_config(vlm_presets.get_config("qwen2_5_vl_7b_geometry3k_full"))
    train = replace(config.train, gradient_checkpointing=False)
    lora = replace(config, use_lora=True, train=train)
    model = replace(config.pretrained, base_precision="nf4")
    small = replace(config.pretrained, model="Qwen/Qwen2.5-VL-3B-Instruct")
    script = "python scripts/benchmark_vlm.py --shape qwen2.5-vl-"
    for own, command in (
        (lora, "7b --budget 5000"),
        (replace(lora, pretrained=model), "7b --base_precision nf4 --budget 5000"),
        (replace(lora, pretrained=small), "3b --budget 5000"),
        (replace(lora, pretrained=small, flex_attention=True), "3b --budget 5000 --flex"),
    ):
        assert measured(own)["command"] == script + command
    critic = replace(train, advantage="gae", critic="separate")
    for own in (replace(lora, mixed_precision="no"), replace(lora, train=critic)):
        assert newest(measurements.read_measurements(), own) is None
