"""scripts/evaluate.py with several checkpoints."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from policies import make_policy
from runner import run_script

from flow_grpo.diffusion.fields import get_config
from flow_grpo.diffusion.models import load_adapter


@pytest.fixture
def run_folder(tiny_sd3, tmp_path):
    """Checkpoints of a run: one of LoRA and one of full fine-tuning."""
    for name, lora in (("checkpoint-8", True), ("checkpoint-16", False)):
        policy = make_policy(load_adapter(str(tiny_sd3), max_sequence_length=8), use_lora=lora)
        generator = torch.Generator().manual_seed(0)
        for parameter in policy.parameters():
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
        policy.save(tmp_path / "a/checkpoints" / name)
    return tmp_path / "a/checkpoints"


def test_the_base_model_and_two_checkpoints_are_compared_in_one_run(train, run_folder, tmp_path):
    fields = {
        "reward_fn": {"jpeg_compressibility": 1.0, "jpeg_incompressibility": 0.5},
        "log_images": 3,
        "eval_prompts": 5,
    }
    lora, full = run_folder / "checkpoint-8", run_folder / "checkpoint-16"
    out, alone = tmp_path / "compared", tmp_path / "alone"
    single = train(f"--out={alone}", script="scripts/evaluate.py", **fields)
    assert single.returncode == 0, single.stderr
    # the base model comes last, so that leftovers of other weights would change its scores; the
    # config is that of the run
    config = get_config()
    values = {**train.fields, **fields}
    config.update_from_flattened_dict(
        {k: str(v) if isinstance(v, Path) else v for k, v in values.items()}
    )
    (tmp_path / "a/config.json").write_text(config.to_json_best_effort())
    checkpoints = f"--checkpoint={lora},{full}", "--checkpoint=base"
    done = run_script("scripts/evaluate.py", f"--out={out}", *checkpoints)
    assert done.returncode == 0, done.stderr

    found = json.loads((out / "results.json").read_text())
    names = ["checkpoint-8", "checkpoint-16", "base"]
    assert [each["name"] for each in found["checkpoints"]] == names
    base = json.loads((alone / "results.json").read_text())
    assert base["weights"] == ""
    for key in ("means", "scores", "failed", "weights"):
        assert found["checkpoints"][2][key] == base[key]
    for i in range(5):
        folders = [out / "samples/base", alone / "samples/base"]
        assert len({(folder / f"000{i}.png").read_bytes() for folder in folders}) == 1

    first, *others = found["checkpoints"]
    for other in others:
        for name, difference in other["difference"].items():
            higher = [
                b[name] - a[name] for a, b in zip(first["scores"], other["scores"], strict=True)
            ]
            assert difference["prompts"] == 5
            assert difference["mean"] == pytest.approx(np.mean(higher))
            error = np.std(higher, ddof=1) / np.sqrt(5)
            assert difference["standard_error"] == pytest.approx(error)
            assert np.any(higher)
    table = (out / "results.md").read_text()
    assert table.strip() in done.stdout
    for name in names:
        assert f"\n| {name} " in table
        lines = (out / "samples" / name / "samples.jsonl").read_text().splitlines()
        assert [json.loads(line)["prompt"] for line in lines] == [
            f"test prompt number {i}" for i in range(5)
        ]
    # three columns of 32 px images at 6x; a heading, three rows with a prompt and 3 scores
    grid = Image.open(out / "grid.png")
    assert grid.size == (3 * (192 + 6), 14 + 3 * (14 + 192 + 3 * 14 + 6))


def test_an_output_directory_that_cannot_be_created_is_rejected_early(train):
    done = train("--out=setup.py/new", script="scripts/evaluate.py")
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: --out='setup.py/new' cannot be created: Not a directory")
