"""`flow-grpo migrate`: commands, scripts and config files of other trainers are only read."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import migrate
import pytest
from runner import ROOT
from user_errors import raises_user_error

from flow_grpo.config.config_dicts import iter_config_fields
from flow_grpo.config.migration import PROJECTS
from flow_grpo.config.migration.commands import read_command, split_commands
from flow_grpo.config.migration.mm_grpo import weigh_listed_rewards
from flow_grpo.config.migration.python_configs import read_python_config
from flow_grpo.config.migration.readme_commands import (
    README_COMMANDS,
    RECIPES,
    REPLACED,
    RUNS,
    TRANSLATED,
)
from flow_grpo.diffusion.fields import DIFFUSION_SPEC
from flow_grpo.diffusion.presets import get_config as diffusion_preset
from flow_grpo.vlm.fields import VLM_SPEC

sys.path.insert(0, str(ROOT / "docs"))
import make_migrating

CONFIG = """
import ml_collections, imp, os
base = imp.load_source("base", os.path.join(os.path.dirname(__file__), "base.py"))
open("executed", "w")

def compressibility():
    config = base.get_config()
    config.sample.batch_size = 8
    config.per_prompt_stat_tracking = True
    return config

def mine():
    gpu_number = 8
    config = compressibility()
    config.run_name = "mine"
    config.dataset = os.path.join(os.getcwd(), "dataset/ocr")
    config.sample.num_image_per_prompt = 24
    config.sample.train_batch_size = 9
    config.sample.num_batches_per_epoch = int(48/(gpu_number*9/config.sample.num_image_per_prompt))
    assert config.sample.num_batches_per_epoch % 2 == 0
    config.train.gradient_accumulation_steps = config.sample.num_batches_per_epoch//2
    config.train.clip_range_lt = 1e-5
    config.save_dir = f'logs/{config.run_name}'
    config.reward_fn = {"video_ocr": 1.0}
    config.prompt_fn = "general_ocr"
    config.sample.deterministic = os.environ["NAME"]
    for each in range(3):
        config.seed = each
    return config
"""
BASE = """
import ml_collections

def get_config():
    config = ml_collections.ConfigDict()
    config.seed = 3
    config.sample = sample = ml_collections.ConfigDict()
    sample.num_steps = 40
    return config
"""


def settings_of(text: str) -> dict[str, str]:
    """Return the options of our command in an answer."""
    command = text.split("\n\n")[0].partition("\n")[2]
    words = shlex.split(command)
    pairs = (word.removeprefix("--config.").split("=", 1) for word in words)
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def answer(*words: str) -> str:
    [text] = map(migrate.answer, migrate.read(words))
    return text


@pytest.mark.parametrize("path", RECIPES)
def test_the_scripts_of_readmes_are_translated_to_a_valid_command(path):
    text = answer("bash", path)
    assert "Fails validation" not in text
    ours = settings_of(text)
    is_vlm = "scripts/train_vlm.py" in text
    spec = VLM_SPEC if is_vlm else DIFFUSION_SPEC
    assert ours.keys() <= {name for name, _ in iter_config_fields(spec.get_config(), closed=())}
    assert {"dataset", "run_name"} <= ours.keys()


@pytest.mark.parametrize("each", README_COMMANDS, ids=lambda each: each.line[:60])
def test_every_command_of_a_readme_has_an_answer(each, capsys):
    assert "\n" not in each.line + each.answer
    if each.kind == RUNS:
        for word in shlex.split(each.line):
            if word.endswith((".sh", ".py", ".yaml")):
                assert (ROOT / word).is_file(), word
        return
    migrate.main([each.line])
    printed = capsys.readouterr().out
    if each.kind == REPLACED:
        assert printed.strip() == each.answer
    else:
        assert each.kind == TRANSLATED
        assert "python scripts/train" in printed or "accelerate launch" in printed


RUNNING = [each.line for each in README_COMMANDS if each.kind == RUNS and "scripts/" in each.line]


@pytest.mark.parametrize("line", RUNNING)
def test_scripts_of_flow_grpo_start_ours(line, tmp_path):
    """The interpreter is replaced by a program that prints its arguments."""
    python = tmp_path / "python"
    python.write_text('#!/usr/bin/env bash\n[ "$1" = -c ] && echo 8 || echo "$@"\n')
    python.chmod(0o755)
    command = line.replace("accelerate launch", f"{python} -m accelerate.commands.launch")
    done = subprocess.run(
        shlex.split(command),
        cwd=ROOT,
        env={**os.environ, "PYTHON": str(python), "MASTER_ADDR": "node-a"},
        capture_output=True,
        text=True,
        check=False,
    )
    if line.endswith("multi_node/main.sh"):
        assert done.stderr.startswith("error: nothing to train")
        assert "scripts/multi_node/sd3.sh 0" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    script = next(word for word in words if "scripts/train" in word)
    assert (ROOT / script).resolve() == ROOT / "scripts/train.py"
    if rank := re.search(r"(?: |main)(\d)(?:\.sh)?$", line):
        assert words[words.index("--node_rank") + 1] == rank[1]
    config = words[words.index("--config") + 1]
    if "general_ocr_wan2_1" not in config:  # answered with our name
        path, _, preset = config.partition(":")
        assert path in ("config/grpo.py", "config/dpo.py", "config/sft.py")
        diffusion_preset(f"{preset.removesuffix('_1gpu').removesuffix('_8gpu')}_8gpu")


def test_a_config_file_is_read_without_executing_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("grpo.py").write_text(CONFIG)
    found = read_python_config(Path("grpo.py"), "mine")
    assert not Path("executed").exists()
    assert found.settings["sample.num_batches_per_epoch"] == 16
    assert found.settings["train.gradient_accumulation_steps"] == 8
    assert [text.partition(": ")[2][:20] for text in found.skipped] == [
        "base.get_config(), a",
        "config.sample.determ",
        "for each in range(3)",
    ]
    text = answer("grpo.py:mine")
    ours = settings_of(text)
    assert ours["train.clip_range_low"] == "1e-05"
    assert ours["logdir"] == "logs/mine"
    assert ours["reward_fn"] == "{'ocr': 1.0}"
    assert "per_prompt_stat_tracking=True" in text.partition("Without counterpart:")[2]
    Path("base.py").write_text(BASE)
    found = read_python_config(Path("grpo.py"), "mine")
    assert found.settings["sample.num_steps"] == 40
    assert len(found.skipped) == 2
    with raises_user_error("mine", field="grpo.py"):
        read_python_config(Path("grpo.py"), "minne")


def test_a_yaml_file_with_overrides(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "data:\n  rollout_batch_size: 128\nworker:\n  actor:\n    global_batch_size: 32\n"
    )
    ours = settings_of(answer(str(path), "worker.rollout.n=4"))
    assert ours["sample.questions_per_epoch"] == "128"
    assert ours["sample.group_size"] == "4"
    assert ours["train.updates_per_epoch"] == "4"
    path.write_text("!!python/object/apply:os.system ['touch executed']")
    with raises_user_error("is not YAML", field=str(path)):
        migrate.read([str(path)])


def test_a_script_with_variables(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text(
        "MODEL=Qwen/Qwen2.5-VL-3B-Instruct  # or a path\n"
        "export N=${N:-6}\n"
        "ray job submit -- python3 -m openrlhf.cli.train_ppo_ray \\\n"
        "   --pretrain ${MODEL} \\\n   --n_samples_per_prompt $N --top_p 0.9 \\\n"
        "   --save_path ${UNKNOWN}/x > >(tee log) 2>&1 &\n"
    )
    text = answer(str(path))
    ours, missing = settings_of(text), text.partition("Without counterpart:")[2]
    assert "pretrained.model" not in ours  # the default
    assert "top_p=0.9" in missing
    assert "logdir=${UNKNOWN}" in missing


def test_a_command_of_flow_grpo_keeps_its_launcher_and_preset():
    line = (
        "accelerate launch --config_file scripts/accelerate_configs/deepspeed_zero2.yaml "
        "--num_processes=8 scripts/train_flux.py --config config/grpo.py:pickscore_flux_8gpu "
        "--config.save_dir=logs/a --config.sample.kl_reward=0"
    )
    text = answer(*shlex.split(line))
    assert "deepspeed_zero2.yaml --num_processes 8 scripts/train.py" in text
    assert "--config config/grpo.py:pickscore_flux_8gpu" in text
    assert settings_of(text) == {"logdir": "logs/a"}
    with raises_user_error("Bagel"):
        answer("python", "scripts/train_bagel.py", "--config", "config/grpo.py:pickscore_bagel")


def test_a_zero_stage_that_has_no_effect_is_reported():
    line = ["python", "-m", "openrlhf.cli.train_ppo_ray", "--pretrain", "a/b"]
    stage = ["--zero_stage", "3"]
    assert "ZeRO stage=3" in answer(*line, *stage)
    assert "ZeRO stage" not in answer(*line)
    assert "ZeRO stage" not in answer(*line, *stage, "--actor_num_gpus_per_node", "8")


@pytest.mark.parametrize("words", [["python", "train.py"], ["a=1"], ["missing.sh"]])
def test_other_commands_are_one_line(words):
    with raises_user_error(words[-1]):
        migrate.read(words)


def test_every_program_is_found_in_a_command_line():
    for project in PROJECTS:
        for program in project.programs:
            run = read_command(["python", *program.split()])
            assert run is not None
            assert run.project is project


def test_shell_variables_are_substituted_in_order():
    text = "A=1\nB=${A}2\npython x.py n=$B m=${C:-3} o=$D # comment\n"
    assert list(split_commands(text)) == [["python", "x.py", "n=12", "m=3", "o=$D"]]


def test_a_list_of_rewards_is_weighted_equally():
    given = '--config.reward_fn=["paddle-ocr", "pickscore"]'
    assert weigh_listed_rewards(given) == "--config.reward_fn={'ocr': 0.5, 'pickscore': 0.5}"
    for other in ("--config.reward_fn={'ocr': 1.0}", "--config.seed=1", "--config.reward_fn=[1]"):
        assert weigh_listed_rewards(other) == other


def test_the_generated_pages_are_up_to_date():
    """If not: python docs/make_migrating.py"""
    for path, text in make_migrating.pages().items():
        assert path.read_text("utf-8") == text, path
        assert len(text.splitlines()) <= 300


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("", "empty"),
        ("python 'a", "quotation"),
        ("python -m openrlhf.cli.train_ppo_ray --zero_stage 99", "99"),
    ],
)
def test_commands_that_cannot_be_run_are_user_errors(line, shown):
    with raises_user_error(shown):
        migrate.main([line])
