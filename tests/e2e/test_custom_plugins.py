"""User-defined algorithms, losses and model families outside the package."""

import json
import shutil
import sys

import pytest
import small_vlm
from docs_example import example
from runner import ROOT, run_script

from flow_grpo.diffusion.algorithms import ALGORITHMS
from flow_grpo.diffusion.fields import DIFFUSION_SPEC
from flow_grpo.errors import UserError

DIFFUSION_FAMILY = """
from diffusers import StableDiffusion3Pipeline
from flow_grpo.diffusion.models.sd3 import SD3Adapter

class MyPipeline(StableDiffusion3Pipeline):
    pass

class MyAdapter(SD3Adapter):
    pipeline_class = MyPipeline
"""
VLM_PLUGINS = """
from __future__ import annotations
from dataclasses import dataclass
from flow_grpo.vlm.losses.clip import ClipLoss
from flow_grpo.vlm.models.qwen_vl import QwenVL
from flow_grpo.config.settings import setting

@dataclass(frozen=True)
class Scaled(ClipLoss):
    scale: float = setting(1.0, "By how much the loss is multiplied.", above=0)

    def per_token(self, *tensors):
        found = super().per_token(*tensors)
        print("scaled by", self.scale)
        return type(found)(found.loss * self.scale, *list(vars(found).values())[1:])

class MyFamily(QwenVL):
    names = {"qwen3_vl": "My-VL"}
    layers = r".*language_model.*\\.q_proj"
"""


def options(**fields) -> list[str]:
    return [f"--config.{name.replace('__', '.')}={value}" for name, value in fields.items()]


def test_a_custom_algorithm_and_diffusion_family(short_runs, tmp_path):
    (tmp_path / "positive.py").write_text(example(), encoding="utf-8")
    (tmp_path / "family.py").write_text(DIFFUSION_FAMILY, encoding="utf-8")
    model = shutil.copytree(short_runs["pretrained__model"], tmp_path / "model")
    index = json.loads((model / "model_index.json").read_text())
    (model / "model_index.json").write_text(json.dumps({**index, "_class_name": "MyPipeline"}))
    script, base = ROOT / "scripts/train.py", f"--config={ROOT}/config/base.py"
    method = options(custom_algorithms="{'positive': 'positive.py:Positive'}", algorithm="positive")
    family = options(custom_models="{'MyPipeline': 'family:MyAdapter'}")
    fields = options(**{**short_runs, "pretrained__model": "model", "run_name": "own"}, eval_freq=0)

    rejected = run_script(script, base, *method, "--config.positive.tims=2", cwd=tmp_path)
    assert "unknown config key 'positive.tims'; did you mean positive.times?" in rejected.stderr
    rejected = run_script(script, base, *method, "--config.positive.times=0", cwd=tmp_path)
    assert rejected.stderr.startswith("error: positive.times=0 must be at least 1")
    help_text = run_script(script, base, *method, "--help=all", cwd=tmp_path).stdout
    assert "--config.positive.adv_clip_max=5.0\n        One lucky sample should not" in help_text

    done = run_script(
        script, base, *method, *family, *fields, *options(positive__times=2), cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    resumed = run_script(script, "--resume", "logs/own", "--config.num_epochs=2", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    lines = (tmp_path / "logs/own/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["train/matching_error"] > 0 for line in lines[1:]] == [True, True]


def test_a_custom_loss_and_vlm_family(tmp_path):
    (tmp_path / "own.py").write_text(VLM_PLUGINS, encoding="utf-8")
    fields = options(
        custom_losses="{'scaled': 'own.py:Scaled'}",
        custom_models="{'qwen3_vl': 'own.py:MyFamily'}",
        train__loss="scaled",
        train__scale=0.5,
        pretrained__model=small_vlm.save(tmp_path / "model"),
        dataset=small_vlm.write_data(tmp_path / "data"),
        device="cpu",
        run_name="own",
        num_epochs=1,
        eval_freq=0,
        eval_questions=1,
        question_format="{question}",
        reward_fn="{'mine': 1.0}",
        custom_rewards="{'mine': 'small_vlm:early_letters'}",
        sample__questions_per_epoch=4,
        sample__group_size=4,
        sample__max_new_tokens=4,
    )
    script, base = ROOT / "scripts/train_vlm.py", f"--config={ROOT}/config/vlm.py"
    rejected = run_script(script, base, *fields, "--config.train.scale=0", cwd=tmp_path)
    assert rejected.stderr == "error: train.scale=0.0 must be above 0\n"
    done = run_script(script, base, *fields, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "scaled by 0.5" in done.stdout
    lora = json.loads(
        (tmp_path / "logs/own/checkpoints/latest/lora/adapter_config.json").read_text()
    )
    assert lora["target_modules"] == r".*language_model.*\.q_proj"
    out = run_script(ROOT / "scripts/export.py", "--checkpoint=logs/own", "--out=out", cwd=tmp_path)
    assert out.returncode == 0, out.stderr


@pytest.mark.parametrize(
    ("field", "name", "path", "message"),
    [
        ("algorithms", "grpo", "own.py:X", ".grpo is the name of a built-in"),
        ("algorithms", "train", "own.py:X", ".train is the name of a built-in"),
        ("algorithms", "algorithm_settings", "own.py:X", ".algorithm_settings is the name of a"),
        ("algorithms", "mine", "own.py", ".mine='own.py' "),
        ("algorithms", "mine", "own.py:Y", ".mine: cannot import 'own.py:Y' (module "),
        (
            "algorithms",
            "mine",
            "own.py:X",
            ".mine must name a subclass of flow_grpo.diffusion.algo",
        ),
        ("algorithms", "mine", "own.py:A", ".mine names a class with name='other'; "),
        ("algorithms", "bare", "own.py:B", ".bare needs a default for its setting rate"),
        ("models", "MyPipeline", "own.py:X", ".MyPipeline must name a subclass of flow_grpo.d"),
        (
            "models",
            "P",
            "flow_grpo.diffusion.models.sd3:SD3Adapter",
            ".P is registered for the pipeline class 'P' but adapts Stable",
        ),
    ],
)
def test_an_invalid_custom_class_is_rejected(tmp_path, monkeypatch, field, name, path, message):
    (tmp_path / "own.py").write_text(
        "from dataclasses import make_dataclass\n"
        "from flow_grpo.diffusion.algorithms import Algorithm\n"
        "class X: pass\n"
        "class A(Algorithm): name = 'other'\n"
        "class B(Algorithm): name, Settings = 'bare', make_dataclass('S', ['rate'])\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = dict(ALGORITHMS)
    with pytest.raises(UserError) as caught:
        DIFFUSION_SPEC.load_custom_classes({f"custom_{field}": {name: path}})
    ALGORITHMS.clear()
    ALGORITHMS.update(before)
    assert str(caught.value).startswith(f"custom_{field}{message}")
    assert "\n" not in str(caught.value)
