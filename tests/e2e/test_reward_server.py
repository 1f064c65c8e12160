"""Training with a reward server, which is killed in some tests."""

import json
import os
import re

import pytest
import requests
from runner import EDITS, FORK_SERVER
from server_process import Server, wait_until

# needs only numpy, so that the server starts quickly
GATED = """
import time
from pathlib import Path
import numpy as np

batches = []

def score(images, prompts, metadata):
    batches.append(len(images))
    while len(batches) > 2 and not Path({gate!r}).exists():
        time.sleep(0.02)
    sources = [np.asarray(row["source"], float) for row in metadata]
    return [float(np.abs(image - source).mean()) for image, source in zip(images, sources)]
"""


def samples(runner, run_name: str, name: str) -> list[dict]:
    lines = (runner.logdir / run_name / "samples" / name / "samples.jsonl").read_text()
    return [json.loads(line) for line in lines.splitlines()]


def test_ocr_over_http_scores_every_image_as_in_process(run, tmp_path):
    short = {
        "config": "config/grpo.py:tiny_ocr",
        "num_epochs": 1,
        "eval_prompts": 4,
        "device": "cpu",
        "log_images": 36,
        "sample__train_batch_size": 36,
        "sample__num_batches_per_epoch": 1,
        "train__batch_size": 36,
        "train__gradient_accumulation_steps": 1,
    }
    in_process = run(run_name="here", **short)
    assert in_process.returncode == 0, in_process.stderr
    with Server("ocr", "--workers", "2", path=tmp_path) as server:
        remote = run(run_name="there", reward_servers__ocr=server.url, **short)
        assert remote.returncode == 0, remote.stderr
        assert server.metric("images_scored_total", reward="ocr") == 36 + 2 * 4
    scores = [s["ocr"] for s in samples(run, "here", "train-00001")]
    assert len(scores) == 36
    assert len(set(scores)) > 2
    for name in ("train-00001", "eval-00000", "eval-00001"):
        assert samples(run, "here", name) == samples(run, "there", name)


@pytest.fixture
def slow(tmp_path, monkeypatch) -> dict:
    """Config of image edits with 16 images per epoch in four batches.

    Its reward scores only two batches before the file `gate` exists.
    """
    (tmp_path / "slow.py").write_text(GATED.format(gate=str(tmp_path / "gate")))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return {
        **EDITS,
        "reward_fn": "{'slow': 1.0}",
        "custom_rewards": "{'slow': 'slow:score'}",
        "eval_reward_fn": "{'keep_source': 1.0}",
        "sample__num_batches_per_epoch": 4,
        "train__gradient_accumulation_steps": 4,
    }


@pytest.fixture
def server(slow, tmp_path):
    with Server("slow", "--custom", "slow=slow:score", path=tmp_path) as server:
        server.wait_until_ready()
        yield server


def kill_within_an_epoch(server: Server) -> None:
    """Kill the server after a batch of the first epoch, whose others wait for the gate."""
    wait_until(lambda: server.metric("images_scored_total", reward="slow") >= 4, 300)
    server.kill()


def test_a_server_restart_does_not_change_the_run(train, server, slow, tmp_path):
    servers = f"{{'slow': '{server.url}'}}"
    process = train.start(launcher=FORK_SERVER, reward_servers=servers, **slow)
    kill_within_an_epoch(server)
    with pytest.raises(requests.ConnectionError):
        requests.get(f"{server.url}/healthz", timeout=5)
    for line in process.stdout:
        if "retrying in" in line:
            break
    (tmp_path / "gate").touch()
    server.restart()
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    alone = train(run_name="alone", **slow)
    assert alone.returncode == 0, alone.stderr
    for a, b in zip(train.metrics(), train.metrics("alone"), strict=True):
        for name in a:
            if not name.startswith(("time/", "perf/")):
                assert a[name] == b[name], name
    assert train.metrics()[-1]["reward/failed"] == 0


def test_a_server_outage_ends_the_run_with_a_checkpoint(train, server, slow):
    servers = f"{{'slow': '{server.url}'}}"
    process = train.start(launcher=FORK_SERVER, reward_servers=servers, reward_timeout=6.0, **slow)
    kill_within_an_epoch(server)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 3
    errors = [line for line in stderr.splitlines() if "error" in line]  # not the progress bars
    assert len(errors) == 1, stderr
    assert re.match(
        r"error: epoch 1: reward 'slow' gave no score for \d+ of 16 images .*"
        rf"last error: .*{re.escape(server.url)}.* cannot connect.*; saved .*checkpoint-0; "
        r".*--resume .*/run$",
        errors[0],
    )
    assert (train.logdir / "run/checkpoints/checkpoint-0/lora").is_dir()
