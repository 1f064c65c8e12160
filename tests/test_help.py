"""--help lists every field, and what is suggested works."""

import re

import pytest

from flow_grpo.draw.fields import DRAW, get_config
from flow_grpo.files import dotted

# dicts with names of the user's, and what says enough by its name
SAY_ENOUGH = ("reward_fn.", "reward_servers.")


def test_every_field_has_a_reason():
    known = DRAW.reasons()
    names = [name for name, _ in dotted(get_config().to_dict())]
    assert not [n for n in names if not known.get(n) and not n.startswith(SAY_ENOUGH)]
    assert known["sample.num_steps"].startswith("Few steps are enough")
    assert known["nft.times"].startswith("Noise levels trained per sample")


def test_fields_are_listed_as_the_config_has_them():
    config = get_config()
    config.sample.num_steps = 7
    text = DRAW.describe(config)
    assert "  --config.sample.num_steps=7\n        Few steps are enough" in text
    assert "  --config.custom_rewards={}\n        Names for rewards of your own" in text
    empty = [name for name, value in config.to_dict().items() if value == {}]
    listed = re.findall(r"(?m)^  --config\.", text)
    assert len(listed) == len(list(dotted(config.to_dict()))) + len(empty)


@pytest.mark.parametrize("script", ["train", "evaluate", "benchmark"])
def test_help_only_prints(run, script):
    done = run("--help", script=f"scripts/{script}.py", config="config/grpo.py:tiny_ocr")
    assert done.returncode == 0, done.stderr
    assert "--config.train.learning_rate=" in done.stdout
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
