"""scripts/bench.py on the small models: pinned protocols, resuming, several processes."""

import json
import shutil
import subprocess

import bench
import pytest
import torch
from policies import make_policy
from runner import ROOT, environment, run_script, torchrun
from user_errors import raises_user_error

from flow_grpo.benchmarks.results import read_results
from flow_grpo.diffusion.models import load_adapter

BENCH = "scripts/bench.py"
SCENES = ("tiny_scenes", "--num_prompts=6", "--steps=3", "--config.sample.test_batch_size=5")
FILES = ("results.json", "results.md", "results.csv")
JUDGE = """
from pathlib import Path
import numpy as np

CALLS = []

def brightness(images, prompts, metadata):
    CALLS.append(len(images))
    if len(CALLS) > 2 and Path(__file__).with_name("down").exists():
        raise ValueError("the judge is down")
    return [float(np.asarray(image).mean()) / 255 for image in images]
"""


@pytest.fixture(scope="module")
def lora(tmp_path_factory):
    """A LoRA of the small model with random weights."""
    policy = make_policy(load_adapter(str(ROOT / "assets/tiny-sd3"), max_sequence_length=8))
    generator = torch.Generator().manual_seed(0)
    for parameter in policy.parameters():
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)
    folder = tmp_path_factory.mktemp("run") / "lora-a"
    policy.save(folder)
    return folder


@pytest.fixture(scope="module")
def compared(lora, tmp_path_factory):
    """The base model and the LoRA on six scenes, and the command."""
    out = tmp_path_factory.mktemp("bench") / "one"
    command = [BENCH, *SCENES, "--checkpoint=base", f"--checkpoint={lora}"]
    done = run_script(*command, f"--out={out}")
    assert done.returncode == 0, done.stderr
    return command, out, done.stdout


def test_candidates_are_compared_and_every_deviation_is_stored(compared):
    _, out, shown = compared
    found = read_results(out)
    assert {each.setting: each.used for each in found.deviations} == {"prompts": 6, "steps": 3}
    for each in found.deviations:
        assert str(each) in shown
        assert str(each) in (out / "results.md").read_text()
    assert [each.name for each in found.candidates] == ["base", "lora-a"]
    base, other = found.candidates
    assert len(base.samples) == 12
    tags = [name for name in base.scores if name in {s["tag"] for s in base.samples}]
    assert base.mean("score") == pytest.approx(sum(base.mean(tag) for tag in tags) / len(tags))
    assert other.scores["score"]["difference"]["count"] == 6
    images = {path.read_bytes() for path in (out / "candidates/base/images").iterdir()}
    assert len(images) == 12  # each sample has its own noise


def test_two_processes_give_the_same_files_after_an_interruption(compared, tmp_path):
    command, out, _ = compared
    again = tmp_path / "two"
    # what a killed process leaves behind: some batches, and a candidate that was not started
    shutil.copytree(out, again)
    for name in FILES:
        (again / name).unlink()
    (again / "candidates/base/scores/00001.json").unlink()
    shutil.rmtree(again / "candidates/base/images")
    (again / "candidates/base/images").mkdir()
    shutil.rmtree(again / "candidates/lora-a")
    done = subprocess.run(
        [*torchrun(), *command, f"--out={again}"],
        cwd=ROOT,
        env=environment(warmed=True),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    for name in FILES:
        assert (again / name).read_bytes() == (out / name).read_bytes(), name
    # only the missing batch was sampled
    assert len(list((again / "candidates/base/images").iterdir())) == 5


def test_a_judge_that_fails_halfway_loses_nothing(tmp_path):
    out, judge, flag = tmp_path / "out", tmp_path / "judge.py", tmp_path / "down"
    judge.write_text(JUDGE)
    command = [BENCH, "tiny_signs", "--num_prompts=8", "--steps=2", f"--out={out}"]
    command += ["--config.sample.test_batch_size=2"]
    command += [f"--config.custom_rewards={{'ocr': '{judge}:brightness'}}"]
    flag.touch()
    done = run_script(*command)
    assert done.returncode == 3, done.stdout + done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert "the judge is down" in line
    first = json.loads((out / "candidates/base/scores/00000.json").read_text())
    assert None not in first["scores"]["ocr"]
    assert not (out / "results.json").exists()
    flag.unlink()
    done = run_script(*command)
    assert done.returncode == 0, done.stderr
    found = read_results(out)
    scores = [each["ocr"] for each in found.candidates[0].samples]
    assert scores[:2] == first["scores"]["ocr"]
    assert None not in scores
    assert "scorer_origins" in {each.setting for each in found.deviations}


def test_a_vlm_answers_the_questions_of_a_benchmark(tmp_path):
    out = tmp_path / "qa"
    done = run_script(BENCH, "tiny_shapes_qa", "--num_prompts=4", f"--out={out}")
    assert done.returncode == 0, done.stderr
    found = read_results(out)
    [base] = found.candidates
    assert all(each["response"] for each in base.samples)
    scores = [each["math_answer"] for each in base.samples]
    assert base.mean("math_answer") == pytest.approx(sum(scores) / 4)
    assert {each.setting: each.used for each in found.deviations} == {"prompts": 4}


def test_an_unknown_benchmark_is_one_line():
    done = run_script(BENCH, "tiny_scene")
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert "'tiny_scene'" in line


@pytest.mark.parametrize(
    ("arguments", "field", "shown"),
    [
        (["geneval"], "--config", "--checkpoint"),
        (["tiny_scenes", "--config.seed=3"], "--config.seed", "--seed"),
        (["geneval2", "--config=tiny_ocr", "--prompts=no.jsonl"], "--prompts", "curl -L -o"),
        (["tiny_signs", "--scorers=geneval"], "--scorers", "ocr"),
        (["tiny_edits", "--config=tiny_geneval"], None, "1 image"),
        (["tiny_shapes_qa", "--samples=2"], "--samples", "--temperature"),
        (["tiny_shapes_qa", "--steps=2"], "--steps", "vlm"),
    ],
)
def test_invalid_commands_are_rejected(arguments, field, shown, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", [BENCH, *arguments, f"--out={tmp_path / 'out'}"])
    args, options = bench.build_parser().parse_with_overrides()
    with raises_user_error(shown) as caught:
        bench.run(bench.check_options(args, options), args, options)
    assert field in (None, caught.value.field)
    assert not (tmp_path / "out").exists()
