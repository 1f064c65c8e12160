"""`flow-grpo plan`: the plan of a run on any number of GPUs."""

import re

import pytest
from runner import run_script, run_with_import_times

SD3 = ("--config", "config/grpo.py:general_ocr_sd3")
GEOMETRY = ("--config", "config/vlm.py:qwen2_5_vl_3b_geometry3k")


def plan(*words: str) -> tuple[int, str]:
    """Return the exit code and the output."""
    done = run_script("scripts/plan.py", *words)
    return done.returncode, (done.stdout + done.stderr).strip()


def rows(text: str) -> dict[str, str]:
    return {line[:21].strip(): line[22:] for line in text.splitlines()}


def test_a_diffusion_run_on_64_gpus_is_planned_without_torch():
    options = ("--world_size=64", "--reward_s=4", "--network_gbit=100")
    code, text, modules = run_with_import_times("scripts/plan.py", *SD3, *options)
    assert code == 0, text
    assert "torch" not in modules
    found = rows(text)
    assert found["samples per epoch"].startswith("1152 = 9 per batch x 2 batches x 64 processes")
    assert found["updates per epoch"].startswith("2 ")
    assert found["samples per GPU"].startswith("18 per epoch, on 8 nodes")
    assert found["measured"].startswith("sd3_h200.jsonl, ")
    assert "2 x gradient all-reduce of 75 MB" in found["communication"]
    # 2 x 63/64 x 75 MB at 12.5 GB/s, and the latencies of 126 steps
    assert re.search(r"12\.\d ms each", found["communication"]), found["communication"]
    # two batches of 1 s each: 4 s for the last, and what the first takes longer than the second
    assert re.search(r"waiting for rewards 7\.\d s", found["time per epoch"])
    assert found["checkpoint"].startswith("451 MB every epoch, in the background")
    assert found["memory per GPU"].startswith("28.1 GiB ")
    assert found["evaluation"].count("evaluations in") == 1


def test_a_vlm_run_with_sharded_weights():
    code, text = plan(*GEOMETRY, "--world_size=64", "--sharded", "--disk_gb_s=4")
    assert code == 0, text
    found = rows(text)
    assert found["samples per update"] == "640"
    assert "weight all-gather of 7,509 MB" in found["communication"]
    assert "gradient reduce-scatter of 15,018 MB" in found["communication"]
    assert found["memory per GPU"].endswith("(not sharded)")
    assert "of gathered weights" in found["memory of sampling"]
    assert "--config.eval_questions=N" in found["evaluation"]  # a dataset on the hub


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ((*SD3, "--world_size=512"), ["512 GPUs", "use 288 or 576 GPUs"]),
        ((*GEOMETRY, "--world_size=512"), ["320 or 640 processes", "4 or 8 responses"]),
        (("--config=config/grpo.py:tiny_offline",), ["preferences.data", "--dry_run"]),
        ((*SD3, "--world_size=0"), ["--world_size=0"]),
        ((*SD3, "--network_gbit=nan"), ["--network_gbit=nan must be finite"]),
        ((*SD3, "--reward_s=1e300"), ["--reward_s=1e300"]),
    ],
)
def test_what_cannot_be_planned_is_one_line(words, shown):
    code, text = plan(*words)
    assert code == 2
    (line,) = text.splitlines()
    assert line.startswith("error: ")
    for each in shown:
        assert each in line


def test_the_name_of_a_preset_has_the_number_of_gpus():
    code, text = plan("--config=config/grpo.py:general_ocr_sd3_8gpu")
    assert code == 0, text
    assert rows(text)["samples per GPU"] == "144 per epoch, on 1 node of up to 8 GPUs"


def test_without_a_measurement_the_batches_are_planned():
    code, text = plan("--config=config/grpo.py:tiny_ocr", "--world_size=2")
    assert code == 0, text
    assert rows(text)["samples per epoch"].startswith("192 ")
    assert "--measured FILE" in rows(text)["time and memory"]


WAN_14B = ("--config", "config/grpo.py:wan_14b_ocr", "--config.frames=81", "--config.compile=False")
HD = ("--config.height=720", "--config.width=1280")
ONE = ("--config.train.batch_size=1", "--config.sample.train_batch_size=1")


def test_tokens_and_memory_with_context_parallelism():
    split = "--config.sample.context_parallel=8"
    code, text = plan(*WAN_14B, *HD, *ONE, "--world_size=16", split)
    assert code == 0, text
    found = rows(text)
    assert found["samples per epoch"].endswith("x 2 groups of 8 processes")
    assert found["samples per group"].startswith("2 per epoch")
    assert found["tokens per GPU"] == "9,450 of 75,600 of a sample"
    assert found["memory per GPU"].startswith("44.7 GiB = 26.6 of weights + 2.0 of LoRA")


def test_tokens_with_sequence_parallelism():
    vlm = ("--config=config/vlm.py:tiny_vlm", "--world_size=4")
    code, text = plan(*vlm, "--config.train.sequence_parallel=2")
    assert code == 0, text
    assert "by 2 groups of 2 processes: 8192 = 16384 / " in rows(text)["trained together"]
    code, text = plan(*vlm, "--config.train.sequence_parallel=3")
    assert code != 0
    assert "train.sequence_parallel=3 does not divide the number of processes, 4" in text


@pytest.mark.parametrize(
    ("context", "shown"), [(3, "processes, 8"), (8, "12 attention heads")], ids=["world", "heads"]
)
def test_context_parallelism_must_divide_processes_heads_and_tokens(context, shown):
    config = ("--config", "config/grpo.py:wan_ocr", "--config.compile=False", "--world_size=8")
    code, text = plan(*config, f"--config.sample.context_parallel={context}")
    assert code != 0
    assert shown in text
    assert len(text.splitlines()) == 1
