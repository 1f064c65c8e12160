"""scripts/train_vlm.py with FSDP2 and DeepSpeed, in two real processes."""

import json
from collections.abc import Iterable
from pathlib import Path

import answer_runs
import pytest
import small_vlm
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForImageTextToText

from flow_grpo.answer.policy import AnswerPolicy

# micro-batches of which one process has more than the other, most with and some without pictures
COMMON = {"train.tokens_per_batch": 40, "train.beta": 0.1, "num_epochs": 1, "eval_freq": 1}
RESUMED = {"num_epochs": 2, "resume": "auto"}
RUNS = {
    "lora": {"train.ema": True, "train.advantage": "gae"},  # with a value head
    "full": {
        "use_lora": False,
        "train.freeze_vision": False,
        "train.gradient_checkpointing": True,
        "train.recompute_old": True,
    },
}
WEIGHTS = {
    "lora": ("lora/adapter_model", "ema_lora/adapter_model"),
    "full": ("model/model",),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    small_vlm.save(folder / "model")
    small_vlm.small_data(folder / "data")
    start = AnswerPolicy(small_vlm.build(), parts=[], rank=4)
    for name, parameter in start.trained().items():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02, generator=torch.Generator().manual_seed(0))
    start.save(folder)
    return folder


def runs(folder: Path, how: str, names: Iterable[str] = RUNS, **fields) -> list[dict]:
    places = {
        "pretrained.model": str(folder / "model"),
        "dataset": str(folder / "data"),
        "logdir": str(folder / how),
    }
    loaded = {"lora": {"train.lora_path": str(folder / "lora")}}  # which is the reference then
    return [
        {**COMMON, **places, "run_name": name, **RUNS[name], **loaded.get(name, {}), **fields}
        for name in names
    ]


@pytest.fixture(scope="module")
def alone(folder) -> Path:
    for name, epochs in {"lora": 1, "full": 2}.items():
        answer_runs.run(**runs(folder, "alone", [name], exact=True, num_epochs=epochs)[0])
    return folder / "alone"


@pytest.fixture(scope="module")
def fsdp2(folder) -> Path:
    """And one in half precision, in a folder of its own."""
    half = runs(folder, "half", ["lora"], mixed_precision="bf16", **{"train.lora_path": ""})
    again = runs(folder, "fsdp2", ["full"], exact=True, **RESUMED)
    answer_runs.run_by_two([*half, *runs(folder, "fsdp2", exact=True), *again], "fsdp2")
    return folder / "fsdp2"


def metrics(run: Path) -> list[dict[str, float]]:
    lines = map(json.loads, (run / "metrics.jsonl").open())
    measured = ("time/", "perf/")
    return [{n: v for n, v in line.items() if not n.startswith(measured)} for line in lines]


def weights(run: Path, file: str) -> dict[str, torch.Tensor]:
    return load_file(run / f"checkpoints/latest/{file}.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_fsdp2_trains_what_one_process_does_and_can_be_resumed(alone, fsdp2, name):
    assert (fsdp2 / name / "checkpoints/latest/state/pytorch_model_fsdp_0").is_dir()
    for one, two in zip(metrics(alone / name), metrics(fsdp2 / name), strict=True):
        assert one == pytest.approx(two, abs=1e-6 if name == "ppo" else 1e-9)  # values are float32
    for file in WEIGHTS[name]:
        one, two = (weights(logdir / name, file) for logdir in (alone, fsdp2))
        assert one.keys() == two.keys()
        for parameter in one:
            torch.testing.assert_close(one[parameter], two[parameter], rtol=0, atol=1e-7)


@pytest.mark.slow
def test_half_precision_is_sharded_with_lora_in_float32(folder, fsdp2):
    assert metrics(folder / "half/lora")[-1]["train/grad_norm"] > 0
    trained = weights(folder / "half/lora", "lora/adapter_model")
    assert {weight.dtype for weight in trained.values()} == {torch.float32}
    assert any(weight.any() for name, weight in trained.items() if "lora_B" in name)


@pytest.mark.slow
def test_what_fsdp2_saves_loads_with_stock_libraries(folder, fsdp2):
    latest = fsdp2 / "full/checkpoints/latest"
    model, info = AutoModelForImageTextToText.from_pretrained(
        latest / "model", output_loading_info=True
    )
    assert not any(info.values())
    saved = weights(fsdp2 / "full", "model/model")
    assert (latest / "model/tokenizer.json").is_file()
    for parameter, value in model.named_parameters():
        torch.testing.assert_close(value.detach().double(), saved[parameter], rtol=0, atol=1e-6)
    base = AutoModelForImageTextToText.from_pretrained(folder / "model")
    model = PeftModel.from_pretrained(base, fsdp2 / "lora/checkpoints/latest/lora")
    saved = weights(fsdp2 / "lora", "lora/adapter_model")
    loaded = {n: p for n, p in model.named_parameters() if "lora_" in n}
    assert len(loaded) == len(saved) > 0
    for parameter, value in loaded.items():
        own = saved[parameter.replace(".default", "")]
        torch.testing.assert_close(value.detach().double(), own, rtol=0, atol=1e-6)


# Adam would blow up the rounding of gradients next to zero
FLOAT32 = {"train.learning_rate": 1e-2, "train.adam_epsilon": 1e-3}
STAGES = {2: ["full"], 3: ["lora", "full"]}  # to us, stage 1 is as 2; test_engines.py has it


@pytest.fixture(scope="module")
def zero(folder) -> dict[tuple[int, str], Path]:
    """Runs by stage of ZeRO and what is trained; LoRA is stopped after an epoch and resumed."""
    every = []
    for stage, names in STAGES.items():
        # else weights as small as these would not be sharded
        settings = {"stage": stage, "stage3_param_persistence_threshold": 0}
        file = folder / f"zero{stage}.json"
        file.write_text(json.dumps({"zero_optimization": settings}))
        own = runs(folder, f"zero{stage}", names, zero=str(file), **FLOAT32)
        every += [*own, *({**one, **RESUMED} for one in own if one["run_name"] == "lora")]
    answer_runs.run_by_two(every, "zero")
    for name, epochs in {"lora": 2, "full": 1}.items():
        answer_runs.run(**runs(folder, "float32", [name], **FLOAT32, num_epochs=epochs)[0])
    return {(s, name): folder / f"zero{s}" / name for s, names in STAGES.items() for name in names}


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "name"), [(s, n) for s, names in STAGES.items() for n in names])
def test_zero_trains_what_one_process_does(folder, zero, stage, name):
    alone, sharded = folder / "float32" / name, zero[stage, name]
    parts = list((sharded / "checkpoints/latest/state/pytorch_model").glob("*optim_states.pt"))
    assert len(parts) == 2
    for one, two in zip(metrics(alone), metrics(sharded), strict=True):
        assert one == pytest.approx(two, rel=1e-3, abs=1e-5)
    for file in WEIGHTS[name]:
        one, two = weights(alone, file), weights(sharded, file)
        assert one.keys() == two.keys()
        for parameter in one:
            torch.testing.assert_close(one[parameter], two[parameter], rtol=0, atol=1e-5)
