"""The small diffusion models in the repository: generation, training, evaluation and export."""

import json
import subprocess
import sys
import time
import wave
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import psutil
import pytest
from PIL import Image
from runner import ROOT, run_script, torchrun

from flow_grpo.report.run_reader import read_sample_records
from flow_grpo.rewards.scorers.ocr import OcrScorer

MODEL, EDITOR, VIDEO = (ROOT / "assets" / f"tiny-{name}" for name in ("sd3", "edit", "video"))
TINY_OCR = "config/grpo.py:tiny_ocr"
QUICKSTART = "config/grpo.py:tiny_awm"


@pytest.mark.parametrize(
    ("model", "max_bytes"), [(MODEL, 16 * 2**20), (EDITOR, 6 * 10**6), (VIDEO, 7 * 10**6)]
)
def test_a_model_of_the_repository_is_small(model, max_bytes):
    sizes = [p.stat().st_size for p in model.rglob("*") if p.is_file()]
    assert sum(sizes) <= max_bytes
    assert max(sizes) <= 15 * 2**20


def test_stock_diffusers_generates_a_readable_sign(tmp_path):
    """The script does not import flow_grpo and sets only the size and number of steps."""
    (tmp_path / "draw.py").write_text(
        "import sys, torch\n"
        "from diffusers import StableDiffusion3Pipeline\n"
        "pipeline = StableDiffusion3Pipeline.from_pretrained(sys.argv[1])\n"
        "for seed in range(4):\n"
        "    generator = torch.Generator().manual_seed(seed)\n"
        "    image = pipeline('a sign that says \"MAPLE\"', height=32, width=96,\n"
        "                     num_inference_steps=10, generator=generator).images[0]\n"
        "    image.save(f'{seed}.png')\n"
        "assert not any(name.startswith('flow_grpo') for name in sys.modules)\n"
    )
    command = [sys.executable, "draw.py", str(MODEL)]  # not forked: a fork has our modules
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    images = [Image.open(tmp_path / f"{seed}.png") for seed in range(4)]
    with OcrScorer(workers=1) as ocr:
        scores = ocr(images, ['a sign that says "MAPLE"'] * 4, [{}] * 4)
    assert max(scores) == 1.0


def evaluate(run, out, *arguments, **overrides) -> tuple[dict, np.ndarray]:
    done = run(
        f"--out={out}", *arguments, script="scripts/evaluate.py", config=TINY_OCR, **overrides
    )
    assert done.returncode == 0, done.stderr
    return json.loads((out / "results.json").read_text()), np.asarray(Image.open(out / "grid.png"))


@pytest.mark.slow
def test_evaluation_does_not_depend_on_batches_or_processes(run, tmp_path):
    """Images agree up to float32 rounding, one 8-bit level."""
    fields = {"eval_prompts": 5, "log_images": 5, "device": "cpu"}
    fields["reward_options"] = "{'ocr': {'workers': 1}}"
    reference, grid = evaluate(run, tmp_path / "whole", **fields)
    assert reference["prompts"] == len(reference["scores"]) == 5
    assert reference["means"]["ocr"] == pytest.approx(
        np.mean([s["ocr"] for s in reference["scores"]])
    )
    for name, others in {
        "small": {"sample__test_batch_size": 3},
        "two": {"sample__test_batch_size": 2, "launcher": torchrun()},
    }.items():
        result, result_grid = evaluate(run, tmp_path / name, **others, **fields)
        assert result["scores"] == reference["scores"]
        assert np.abs(result_grid.astype(int) - grid).max() <= 1
    again = run(
        f"--out={tmp_path / 'two'}", script="scripts/evaluate.py", config=TINY_OCR, **fields
    )
    assert again.returncode == 2
    assert "already exists" in again.stderr


def kill_a_worker() -> None:
    """Kill an OCR worker, as the kernel does when the machine runs out of memory."""
    workers = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # a process that has just ended
            if "flow_grpo.rewards.workers.worker" in child.cmdline():
                workers.append(child)
    assert workers
    workers[0].kill()


@pytest.mark.slow
def test_the_preset_learns_to_generate_signs(run):
    """The held-out OCR reward rises by 0.15 in the first epoch of the quickstart.

    An OCR worker is killed before training.
    """
    with ThreadPoolExecutor(1) as background:
        running = background.submit(run, config=QUICKSTART, num_epochs=1, eval_prompts=48)
        metrics = run.logdir / "run/metrics.jsonl"
        while not (metrics.is_file() and metrics.read_text()):
            assert not running.done(), running.result().stderr
            time.sleep(0.2)
        kill_a_worker()
        done = running.result()
    assert done.returncode == 0, done.stderr
    before, after = run.metrics()
    assert after["reward/failed"] == 0
    assert 0.4 < before["eval/ocr"] < 0.8
    assert after["eval/ocr"] > before["eval/ocr"] + 0.15


def test_the_image_editing_model_trains_with_its_preset(run, tmp_path):
    """The run is then evaluated and exported."""
    fields = {"num_epochs": 1, "eval_freq": 0, "eval_prompts": 8, "sample__num_steps": 3}
    sizes = dict.fromkeys(("sample__train_batch_size", "train__batch_size"), 8)
    groups = {"sample__num_image_per_prompt": 4, "sample__num_batches_per_epoch": 2}
    groups["train__gradient_accumulation_steps"] = 1
    done = run(config="config/grpo.py:tiny_edit", **fields, **sizes, **groups)
    assert done.returncode == 0, done.stderr
    first, last = run.metrics()
    assert {"eval/geneval/strict", "eval/geneval/asked"} <= set(last)
    assert "reward/diversity" not in last  # there is one correct edit
    assert first["eval/geneval/kept"] > 0.5  # the model uses the source images
    for kind in ("eval-00000", "train-00001"):  # and the records contain them
        records = read_sample_records(run.logdir / "run/samples" / kind, 8)
        assert [Image.open(*record.sources).size for record in records] == [(96, 32)] * 8
    evaluated, exported = tmp_path / "evaluated", tmp_path / "exported"
    for script, out in (("evaluate", evaluated), ("export", exported)):
        words = "--checkpoint", run.logdir / "run", "--out", out
        done = run_script(f"scripts/{script}.py", *words)
        assert done.returncode == 0, done.stderr
        assert "nan" not in done.stdout
    means = json.loads((evaluated / "results.json").read_text())["means"]
    assert means["geneval/kept"] == pytest.approx(last["eval/geneval/kept"])
    assert "pipeline_tag: image-to-image" in (exported / "README.md").read_text()


def test_the_video_model_trains_with_its_preset(run):
    fields = {"num_epochs": 1, "eval_freq": 1, "eval_prompts": 16, "log_images": 4}
    sizes = dict.fromkeys(("sample__train_batch_size", "train__batch_size"), 8)
    groups = {"sample__num_image_per_prompt": 4, "sample__num_batches_per_epoch": 2}
    steps = {"train__gradient_accumulation_steps": 1, "sample__num_steps": 3}
    done = run(config="config/grpo.py:tiny_video", **fields, **sizes, **groups, **steps)
    assert done.returncode == 0, done.stderr
    before, after = run.metrics()
    assert 0.2 <= before["eval/moving_shape"] <= 0.8
    assert before["eval/moving_shape/shape"] == 1.0
    assert after["step"] == 2
    assert after["reward/failed"] == 0
    assert after["train/grad_norm"] > 0
    for record in read_sample_records(run.logdir / "run/samples/train-00001", 4):
        assert set(record.scores.values()) <= {0.0, 1.0}
        with wave.open(str(record.audio)) as sound:
            assert sound.getframerate() == 8000
            assert 0.6 < sound.getnframes() / 8000 < 0.8


def test_a_prompt_that_ocr_cannot_score_is_rejected_before_training(run, tmp_path):
    for split in ("train", "test"):
        (tmp_path / f"{split}.txt").write_text('a sign that says "OK"\na sign\n' * 8)
    done = run(config=TINY_OCR, dataset=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "'a sign'" in done.stderr
    assert not run.logdir.exists()
