"""--help is short and quick, --help=all lists every setting, and suggestions work."""

import ast
import os
import re
import signal
import subprocess
import sys
from typing import get_args

import pytest
from ml_collections import ConfigDict
from runner import ROOT, environment, run_with_import_times
from user_errors import raises_user_error

from flow_grpo import losses, sde
from flow_grpo.config.config_dicts import iter_config_fields
from flow_grpo.config.error_reporting import ScriptParser
from flow_grpo.config.help import describe_settings
from flow_grpo.config.settings import iter_settings
from flow_grpo.diffusion.algorithms import ALGORITHMS
from flow_grpo.diffusion.algorithms.settings import KL_TYPES, SETTINGS
from flow_grpo.diffusion.config_loading import load_config_file
from flow_grpo.diffusion.fields import DIFFUSION_SPEC, build_config_class, get_config
from flow_grpo.diffusion.models.base import GuidanceGradient
from flow_grpo.errors import UserError
from flow_grpo.untrusted_files import flatten_fields

# Dicts whose keys the user chooses; they have no help of their own.
WITHOUT_HELP = ("reward_fn.", "reward_servers.")


def test_examples_keep_their_line_breaks():
    """A backslash at the end of a line of a docstring joins it with the next, unless escaped."""
    folders = ("scripts", "reward_server")
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        node = next(iter(ast.parse(path.read_text("utf-8")).body), None)
        if isinstance(node, ast.Expr):
            assert node.value.value.count("\n") == node.end_lineno - node.lineno, path


def test_a_description_of_several_lines_is_not_cut(monkeypatch):
    about = "Compares runs\nof several methods.\n\n    python a.py --out b \\\n        --all\n"
    monkeypatch.setattr(sys.modules["__main__"], "__doc__", about)
    text = ScriptParser(prog="a.py", description=about.splitlines()[0]).format_help()
    assert "\nCompares runs\nof several methods.\n\noptions:" in text
    assert text.endswith("\n    python a.py --out b \\\n        --all\n")


def test_the_demo_rejects_the_config_of_a_vlm():
    with pytest.raises(UserError, match=r"--config='config/vlm\.py:tiny_vlm' "):
        load_config_file("config/vlm.py:tiny_vlm", [])


def test_every_setting_has_help():
    known = DIFFUSION_SPEC.help_texts()
    names = [name for name, _ in flatten_fields(get_config().to_dict())]
    assert not [n for n in names if not known.get(n) and not n.startswith(WITHOUT_HELP)]
    assert known["sample.num_steps"].startswith("Denoising steps of rollouts")
    assert known["nft.times"].startswith("Noise levels trained per sample")


def test_settings_are_listed_with_their_values():
    config = get_config()
    config.sample.num_steps = 7
    text = describe_settings(config.to_dict(), DIFFUSION_SPEC)
    help_texts = DIFFUSION_SPEC.help_texts()
    assert f"  --config.sample.num_steps=7\n        {help_texts['sample.num_steps']}" in text
    assert f"  --config.custom_rewards={{}}\n        {help_texts['custom_rewards']}" in text
    empty = [name for name, value in iter_config_fields(config) if value == ConfigDict()]
    assert {"custom_rewards", "opd.teachers"} <= {*empty}
    listed = re.findall(r"(?m)^  --config\.", text)
    assert len(listed) == len(list(flatten_fields(config.to_dict()))) + len(empty)
    of_nft = re.findall(
        r"(?m)^  --config\.(.*?)=", describe_settings(config.to_dict(), DIFFUSION_SPEC, "nft")
    )
    assert of_nft == sorted(f"nft.{name}" for name in config.nft)
    with raises_user_error("did you mean nft?", field="--help", value="ntf"):
        describe_settings(config.to_dict(), DIFFUSION_SPEC, "ntf")


FLOW_GRPO = ("-m", "flow_grpo.config.command")
TINY = "--config=config/grpo.py:tiny_ocr"
TINY_VLM = "--config=config/vlm.py:tiny_vlm"
OWN = "--config=config/base.py"  # stands for a custom config file
TAKEN = ("--config.logdir=.", "--config.run_name=docs")
QUICK = [  # arguments, text in the output
    ((*FLOW_GRPO, "--help"), "\n  train-vlm "),
    ((*FLOW_GRPO, "train", "--help"), "    flow-grpo train --config config/grpo.py:PRESET"),
    ((*FLOW_GRPO, "export", "--help"), "usage: flow-grpo export [-h]"),
    ((*FLOW_GRPO, "reward-server", "--help"), "usage: flow-grpo reward-server [-h]"),
    (("scripts/train.py", "--help"), "    python scripts/train.py --config config/grpo.py:PRESET"),
    (("scripts/train_vlm.py", "-h"), "\n  --config.sample.group_size=...\n        "),
    (("scripts/demo.py", "--help"), "usage: python scripts/demo.py [-h]"),
    (("scripts/evaluate.py", "--help"), "\n  --checkpoint\n        A run (its newest"),
    (("scripts/train.py", "--help=presets"), "tiny_ocr\n"),
    ((*FLOW_GRPO, "trian"), "error: unknown command 'trian'; did you mean train?"),
    (("scripts/train.py",), "error: --config is missing; "),
    (("scripts/train.py", "--config=config/grpo.py:tiny_orc"), "; did you mean tiny_ocr?"),
    (("scripts/train.py", TINY, "--config.sampel.num_steps=3"), "; did you mean sample.num_steps?"),
    (("scripts/train.py", TINY, "--config.gpro.beta=0"), "'gpro.beta'; did you mean grpo.beta?"),
    (("scripts/train.py", TINY, "--config.resume_from=a"), "; it is called resume here"),
    (("scripts/train.py", TINY, "--num_step=3"), "mean --config.sample.num_steps=3?"),
    (("scripts/train_vlm.py", TINY_VLM, "--config.train.loos=clip"), "did you mean train.loss?"),
    (("scripts/train.py", TINY, "--config.train.learning_rate=abc"), "=abc must be a number"),
    (("scripts/train_vlm.py", TINY_VLM, "--config.train.loss=clop"), "; did you mean clip?"),
    (("scripts/train.py", TINY, "--config.reward_fn={'orc': 1}"), "; did you mean ocr?"),
    (("scripts/train.py", "--confg", "config/grpo.py:tiny_ocr"), "--confg; did you mean --config?"),
    (("scripts/train.py", OWN, "--config.grpo.kl_type=gauss"), "; did you mean gaussian?"),
    (("scripts/train.py", "--resume=docs", "--config.sed=1"), "error: docs is not a run directory"),
    (("scripts/train.py", TINY, "--help=nft"), "\n  --config.nft.times=9\n"),
    (("scripts/evaluate.py", TINY), "error: --out is missing: "),
    (("scripts/evaluate.py", TINY_VLM, "--help"), "\n  --config.eval_questions="),
    (("scripts/evaluate.py", TINY_VLM, "--out=x", "--n=0"), "error: flag --n=0: "),
    # checks of settings and files
    (("scripts/train.py", TINY, "--config.sample.train_batch_size=7"), "do not divide into groups"),
    (("scripts/train.py", TINY, *TAKEN), "error: docs already exists"),
    (("scripts/train.py", TINY, "--config.dataset=dataset/orc"), "did you mean dataset/ocr?"),
    (
        ("scripts/train_vlm.py", TINY_VLM, "--config.train.updates_per_epoch=7"),
        "train.updates_per_epoch=7",
    ),
]


@pytest.mark.parametrize(("words", "shown"), QUICK)
def test_help_and_user_errors_need_no_slow_imports(words, shown):
    code, printed, imported = run_with_import_times(*words)
    assert shown in printed
    assert code == (2 if "error: " in printed else 0)
    assert code == 0 or "\n" not in printed
    assert len(printed.splitlines()) < 100
    assert not imported & {"torch", "diffusers", "transformers", "accelerate", "pyarrow"}


@pytest.mark.parametrize("words", [(*FLOW_GRPO,), ("scripts/train.py",), ("scripts/report.py",)])
def test_help_exits_quietly_if_the_reader_closes_the_pipe(words):
    """As `head` does."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, *words, "--help"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), stdout=writing, stderr=subprocess.PIPE, text=True
    )
    os.close(writing)
    assert done.stderr == ""
    assert done.returncode == -signal.SIGPIPE


def test_settings_declared_without_torch_match_the_algorithms():
    assert [*SETTINGS] == [*ALGORITHMS.paths]
    for name in SETTINGS:
        assert ALGORITHMS[name].name == name
        assert ALGORITHMS[name].Settings is SETTINGS[name]
    assert get_args(losses.KLType) == KL_TYPES
    choices = {name: each.metadata["choices"] for name, each in iter_settings(build_config_class())}
    assert (*choices["sample.sde_type"], "ode") == sde.KINDS
    assert choices["sample.solver"] == sde.SOLVERS
    assert choices["train.guidance_gradient"] == get_args(GuidanceGradient)


@pytest.mark.parametrize("script", ["train", "evaluate", "benchmark"])
def test_help_only_prints(run, script):
    done = run("--help", script=f"scripts/{script}.py", config="config/grpo.py:tiny_ocr")
    assert done.returncode == 0, done.stderr
    evaluates = script == "evaluate"  # help lists the settings that the script uses
    assert ("--config.train.learning_rate=" in done.stdout) != evaluates
    assert ("--config.eval_reward_fn=" in done.stdout) == evaluates
    assert ("--config.sample.eval_num_steps=" in done.stdout) == evaluates
    assert "repeat this option" not in done.stdout
    assert "--debug" in done.stdout
    assert ("  --dry_run\n" in done.stdout) == (script == "train")
    assert not run.logdir.exists()


@pytest.mark.parametrize(
    "option",
    [
        *("--learning_rate=1e-4", "--num_step=4", "--config.train.learning_rat=1e-4"),
        *("--config.num_epoch=3", "--config.sampel.num_steps=5", "--sde_typ=cps"),
    ],
)
def test_suggestions_work(run, option):
    """The first of two suggestions is tried; then the error in another setting is reported."""
    failed = run(option, config="config/grpo.py:tiny_ocr", seed=-1)
    assert failed.returncode == 2
    [suggestion] = re.findall(r"did you mean (\S+?)(?: or .*)?\?$", failed.stderr.strip())
    if not suggestion.startswith("--"):
        suggestion = f"--config.{suggestion}={option.partition('=')[2]}"
    done = run(suggestion, config="config/grpo.py:tiny_ocr", seed=-1)
    assert "seed=-1 must be at least 0" in done.stderr, done.stderr


def test_the_dict_suggested_for_a_reward_option_works(run):
    failed = run("--config.reward_options.ocr.workers=2", config="config/grpo.py:tiny_ocr", seed=-1)
    [suggestion] = re.findall(r"set the whole dict: (--config.*)$", failed.stderr.strip())
    whole = suggestion.replace('"', "").replace("...", "2")
    assert whole == "--config.reward_options={'ocr': {'workers': 2}}"
    done = run(whole, config="config/grpo.py:tiny_ocr", seed=-1)
    assert "seed=-1 must be at least 0" in done.stderr, done.stderr
