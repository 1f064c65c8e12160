"""--help is short and quick, --help=all lists every field, and what is suggested works."""

import ast
import os
import re
import signal
import subprocess
import sys
from operator import attrgetter
from typing import get_args

import pytest
from ml_collections import ConfigDict
from runner import ROOT, environment, run_light

from flow_grpo import sde
from flow_grpo.answer.fields import ANSWER
from flow_grpo.config.mistakes import Parser
from flow_grpo.config.settings import walk
from flow_grpo.config.trade import all_fields
from flow_grpo.draw.algorithms import ALGORITHMS
from flow_grpo.draw.fields import DRAW, _read_settings, _with_algorithms, get_config, settings
from flow_grpo.draw.models.base import GuidanceGradient
from flow_grpo.draw.saved import config_of_file
from flow_grpo.errors import UserError
from flow_grpo.files import dotted

# dicts with names of the user's, and what says enough by its name
SAY_ENOUGH = ("reward_fn.", "reward_servers.")


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
    text = Parser(prog="a.py", description=about.splitlines()[0]).format_help()
    assert "\nCompares runs\nof several methods.\n\noptions:" in text
    assert text.endswith("\n    python a.py --out b \\\n        --all\n")


def test_the_demo_rejects_the_config_of_a_vlm():
    with pytest.raises(UserError, match=r"config/vlm\.py:tiny_vlm is not a config of a dif"):
        config_of_file("config/vlm.py:tiny_vlm", [])


def test_every_field_has_a_reason():
    known = DRAW.reasons()
    names = [name for name, _ in dotted(get_config().to_dict())]
    assert not [n for n in names if not known.get(n) and not n.startswith(SAY_ENOUGH)]
    assert known["sample.num_steps"].startswith("Few steps are enough")
    assert known["nft.times"].startswith("Noise levels trained per sample")


@pytest.mark.parametrize("trade", [DRAW, ANSWER])
def test_numbers_are_written_as_in_the_glossary(trade):
    assert not re.findall(r"(?:^|[\s(=+-])\.\d+", trade.describe(trade.get_config()))


def test_fields_are_listed_as_the_config_has_them():
    config = get_config()
    config.sample.num_steps = 7
    text = DRAW.describe(config)
    assert "  --config.sample.num_steps=7\n        Few steps are enough" in text
    assert "  --config.custom_rewards={}\n        Names for rewards of your own" in text
    empty = [name for name, value in all_fields(config) if value == ConfigDict()]
    assert {"custom_rewards", "opd.teachers"} <= {*empty}
    listed = re.findall(r"(?m)^  --config\.", text)
    assert len(listed) == len(list(dotted(config.to_dict()))) + len(empty)
    of_nft = re.findall(r"(?m)^  --config\.(.*?)=", DRAW.describe(config, "nft"))
    assert of_nft == sorted(f"nft.{name}" for name in config.nft)
    with pytest.raises(UserError, match=r"^--help=ntf: the sections are .*; did you mean nft\?"):
        DRAW.describe(config, "ntf")


FLOW_GRPO = ("-m", "flow_grpo.config.command")
TINY = "--config=config/grpo.py:tiny_ocr"
TINY_VLM = "--config=config/vlm.py:tiny_vlm"
OWN = "--config=config/base.py"  # taken as one of the user's own
TAKEN = ("--config.logdir=.", "--config.run_name=docs")
QUICK = [  # what is typed, what it prints
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
    (("scripts/train.py",), "error: --config is missing; name one"),
    (("scripts/train.py", "--config=config/grpo.py:tiny_orc"), "; did you mean tiny_ocr?"),
    (("scripts/train.py", TINY, "--config.sampel.num_steps=3"), "; did you mean sample.num_steps?"),
    (("scripts/train.py", TINY, "--config.gpro.beta=0"), "'gpro.beta'; did you mean grpo.beta?"),
    (("scripts/train.py", TINY, "--config.resume_from=a"), "; it is resume here"),
    (("scripts/train.py", TINY, "--num_step=3"), "mean --config.sample.num_steps=3?"),
    (("scripts/train_vlm.py", TINY_VLM, "--config.train.loos=clip"), "did you mean train.loss?"),
    (("scripts/train.py", TINY, "--config.train.learning_rate=abc"), "=abc must be a number"),
    (("scripts/train_vlm.py", TINY_VLM, "--config.train.loss=clop"), "; did you mean clip?"),
    (("scripts/train.py", TINY, "--config.reward_fn={'orc': 1}"), "; did you mean ocr?"),
    (("scripts/train.py", "--confg", "config/grpo.py:tiny_ocr"), "--confg; did you mean --config?"),
    (("scripts/train.py", OWN, "--config.grpo.kl_type=gauss"), "; did you mean gaussian?"),
    (("scripts/train.py", "--resume=docs", "--config.sed=1"), "docs is not a run: it has no"),
    (("scripts/train.py", TINY, "--help=nft"), "\n  --config.nft.times=9\n"),
    (("scripts/evaluate.py", TINY), "error: --out is missing: New folder"),
    (("scripts/evaluate.py", TINY_VLM, "--out=x"), "scripts/train_vlm.py evaluates a VLM on its"),
    # what settings and the disk alone can tell
    (("scripts/train.py", TINY, "--config.sample.train_batch_size=7"), "do not divide into groups"),
    (("scripts/train.py", TINY, *TAKEN), "error: docs already exists; go on with it (--resume "),
    (("scripts/train.py", TINY, "--config.dataset=dataset/orc"), "did you mean dataset/ocr?"),
    (("scripts/train_vlm.py", TINY_VLM, "--config.train.updates_per_epoch=7"), "do not divide in"),
]


@pytest.mark.parametrize(("words", "told"), QUICK)
def test_help_and_typing_mistakes_import_nothing_that_takes_seconds(words, told):
    code, printed, imported = run_light(*words)
    assert told in printed
    assert code == (2 if "error: " in printed else 0)
    assert code == 0 or "\n" not in printed
    assert len(printed.splitlines()) < 90
    assert not imported & {"torch", "diffusers", "transformers", "accelerate", "pyarrow"}


@pytest.mark.parametrize("words", [(*FLOW_GRPO,), ("scripts/train.py",), ("scripts/report.py",)])
def test_help_is_quiet_when_nobody_reads_on(words):
    """As under `head`."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, *words, "--help"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), stdout=writing, stderr=subprocess.PIPE, text=True
    )
    os.close(writing)
    assert done.stderr == ""
    assert done.returncode == -signal.SIGPIPE


def test_what_is_known_without_torch_is_all_that_there_is():
    light = _with_algorithms(tuple(_read_settings().items()))
    parts = attrgetter("type", "default", "metadata")
    read, real = ([(n, *parts(each)) for n, each in walk(all_)] for all_ in (light, settings()))
    assert [*_read_settings()] == [*ALGORITHMS]
    assert read == real
    choices = {name: each.metadata["choices"] for name, each in walk(settings())}
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
    assert ("  --dry_run\n        Build all that the run would" in done.stdout) == (
        script == "train"
    )
    assert not run.logdir.exists()


@pytest.mark.parametrize(
    "option",
    [
        *("--learning_rate=1e-4", "--num_step=4", "--config.train.learning_rat=1e-4"),
        *("--config.num_epoch=3", "--config.sampel.num_steps=5", "--sde_typ=cps"),
    ],
)
def test_what_is_suggested_is_taken(run, option):
    """Of two suggestions the first; then the mistake in another field is the one that is told."""
    told = run(option, config="config/grpo.py:tiny_ocr", seed=-1)
    assert told.returncode == 2
    [suggestion] = re.findall(r"did you mean (\S+?)(?: or .*)?\?$", told.stderr.strip())
    if not suggestion.startswith("--"):
        suggestion = f"--config.{suggestion}={option.partition('=')[2]}"
    done = run(suggestion, config="config/grpo.py:tiny_ocr", seed=-1)
    assert "seed=-1 must be at least 0" in done.stderr, done.stderr


def test_an_option_of_a_reward_is_told_as_a_dict_that_works(run):
    told = run("--config.reward_options.ocr.workers=2", config="config/grpo.py:tiny_ocr", seed=-1)
    [suggestion] = re.findall(r"give the whole dict: (--config.*)$", told.stderr.strip())
    whole = suggestion.replace('"', "").replace("...", "2")
    assert whole == "--config.reward_options={'ocr': {'workers': 2}}"
    done = run(whole, config="config/grpo.py:tiny_ocr", seed=-1)
    assert "seed=-1 must be at least 0" in done.stderr, done.stderr
