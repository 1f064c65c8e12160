"""A method, a loss and families of the user's own, in a folder that is not the package."""

import json
import shutil
import sys

import pytest
import small_vlm
from runner import ROOT, run_script
from test_new_method import example

from flow_grpo.draw.algorithms import ALGORITHMS
from flow_grpo.draw.fields import DRAW
from flow_grpo.errors import UserError

FAMILY = """
from diffusers import StableDiffusion3Pipeline
from flow_grpo.draw.models.sd3 import SD3Adapter

class MyPipeline(StableDiffusion3Pipeline):
    pass

class MyAdapter(SD3Adapter):
    pipeline_class = MyPipeline
"""
ANSWERS = """
from __future__ import annotations
from dataclasses import dataclass
from flow_grpo.answer.losses.clip import Clip
from flow_grpo.answer.models.qwen_vl import QwenVL
from flow_grpo.config.settings import setting

@dataclass(frozen=True)
class Scaled(Clip):
    scale: float = setting(1.0, "By how much the loss is multiplied.", above=0)

    def per_token(self, *tensors):
        found = super().per_token(*tensors)
        print("scaled by", self.scale)
        return type(found)(found.loss * self.scale, *list(vars(found).values())[1:])

class MyFamily(QwenVL):
    names = {"qwen3_vl": "My-VL"}
    layers = r".*language_model.*\\.q_proj"
"""


def words(**fields) -> list[str]:
    return [f"--config.{name.replace('__', '.')}={value}" for name, value in fields.items()]


def test_a_method_and_a_family_that_draws(short_runs, tmp_path):
    (tmp_path / "positive.py").write_text(example(), encoding="utf-8")
    (tmp_path / "family.py").write_text(FAMILY, encoding="utf-8")
    model = shutil.copytree(short_runs["pretrained__model"], tmp_path / "model")
    index = json.loads((model / "model_index.json").read_text())
    (model / "model_index.json").write_text(json.dumps({**index, "_class_name": "MyPipeline"}))
    script, base = ROOT / "scripts/train.py", f"--config={ROOT}/config/base.py"
    method = words(custom_algorithms="{'positive': 'positive.py:Positive'}", algorithm="positive")
    family = words(custom_models="{'MyPipeline': 'family:MyAdapter'}")
    fields = words(**{**short_runs, "pretrained__model": "model", "run_name": "own"}, eval_freq=0)

    wrong = run_script(script, base, *method, "--config.positive.tims=2", cwd=tmp_path)
    assert "unknown config key 'positive.tims'; did you mean positive.times?" in wrong.stderr
    wrong = run_script(script, base, *method, "--config.positive.times=0", cwd=tmp_path)
    assert wrong.stderr.startswith("error: positive.times=0 must be at least 1")
    told = run_script(script, base, *method, "--help=all", cwd=tmp_path).stdout
    assert "--config.positive.adv_clip_max=5.0\n        One lucky sample should not" in told

    done = run_script(
        script, base, *method, *family, *fields, *words(positive__times=2), cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    rest = run_script(script, "--resume", "logs/own", "--config.num_epochs=2", cwd=tmp_path)
    assert rest.returncode == 0, rest.stderr
    lines = (tmp_path / "logs/own/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["train/matching_error"] > 0 for line in lines[1:]] == [True, True]


def test_a_loss_and_a_family_that_answers(tmp_path):
    (tmp_path / "own.py").write_text(ANSWERS, encoding="utf-8")
    fields = words(
        custom_losses="{'scaled': 'own.py:Scaled'}",
        custom_models="{'qwen3_vl': 'own.py:MyFamily'}",
        train__loss="scaled",
        train__scale=0.5,
        pretrained__model=small_vlm.save(tmp_path / "model"),
        dataset=small_vlm.small_data(tmp_path / "data"),
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
    wrong = run_script(script, base, *fields, "--config.train.scale=0", cwd=tmp_path)
    assert wrong.stderr == "error: train.scale=0.0 must be above 0\n"
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
        ("algorithms", "grpo", "own.py:X", ".grpo has the name of a field or a method of ours"),
        (
            "algorithms",
            "train",
            "own.py:X",
            ".train has the name of a field or a method of our",
        ),
        ("algorithms", "own", "own.py:X", ".own has the name of a field or a method of ours"),
        ("algorithms", "mine", "own.py", ".mine='own.py' must read 'package.module:Class' or "),
        ("algorithms", "mine", "own.py:Y", ".mine: cannot import 'own.py:Y' (module "),
        ("algorithms", "mine", "own.py:X", ".mine must name a subclass of flow_grpo.draw.algo"),
        ("algorithms", "mine", "own.py:A", ".mine names a class with name='other'; make it 'm"),
        ("algorithms", "bare", "own.py:B", ".bare: rate needs a default: setting(default, rea"),
        ("models", "MyPipeline", "own.py:X", ".MyPipeline must name a subclass of flow_grpo.d"),
        (
            "models",
            "P",
            "flow_grpo.draw.models:SD3Adapter",
            ".P is for StableDiffusion3Pipeline; name ",
        ),
    ],
)
def test_what_cannot_be_taken_is_told(tmp_path, monkeypatch, field, name, path, message):
    (tmp_path / "own.py").write_text(
        "from dataclasses import make_dataclass\n"
        "from flow_grpo.draw.algorithms import Algorithm\n"
        "class X: pass\n"
        "class A(Algorithm): name = 'other'\n"
        "class B(Algorithm): name, Settings = 'bare', make_dataclass('S', ['rate'])\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = dict(ALGORITHMS)
    with pytest.raises(UserError) as told:
        DRAW.load_custom({f"custom_{field}": {name: path}})
    ALGORITHMS.clear()
    ALGORITHMS.update(before)
    assert str(told.value).startswith(f"custom_{field}{message}")
    assert "\n" not in str(told.value)
