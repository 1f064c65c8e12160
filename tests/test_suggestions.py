"""Every did-you-mean, followed: what it suggests is taken, and the config passes its checks."""

import importlib.util
import re
import shlex
import sys

import pytest
from absl import flags
from ml_collections import ConfigDict, config_flags
from runner import ROOT
from untrained.full import FULL

from flow_grpo.config import command, old_names, overrides
from flow_grpo.config.settings import walk
from flow_grpo.config.trackers import TRACKERS
from flow_grpo.config.trade import OPEN_FIELDS
from flow_grpo.data.prompts import load_prompts
from flow_grpo.draw import presets
from flow_grpo.draw.algorithms import ALGORITHMS
from flow_grpo.draw.check import check
from flow_grpo.draw.fields import DRAW, get_config
from flow_grpo.draw.models import find_adapter
from flow_grpo.errors import UserError, nearest
from flow_grpo.files import dotted
from flow_grpo.rewards import REWARDS, build_scorers, option_names

PRESET = f"--config={ROOT}/config/grpo.py:tiny_ocr_1gpu"
FIELDS = dict(dotted(get_config().to_dict()))
VALUES = {  # of Flow-GRPO's fields, where 1 is none
    "train.algorithm": "grpo",
    "resume_from": "none",
    "activation_checkpointing": "True",
    "fsdp_optimizer_offload": "False",
    "train.clip_range_lt": "1e-4",
    "train.clip_range_gt": "1e-4",
    "save_dir": "logs/ocr",
}


@pytest.fixture
def load(monkeypatch):
    """The config that a command line makes, checked, in this process."""

    def load(*words: str, script: str = "train.py") -> ConfigDict:
        argv, values = [script, *words], flags.FlagValues()
        monkeypatch.setattr(sys, "argv", argv)
        monkeypatch.setattr(sys, "path", [*sys.path])
        overrides.check_names(argv, DRAW)
        config_flags.DEFINE_config_file("config", flag_values=values)
        values(argv)
        check(values.config)
        return values.config

    return load


def mistyped(name: str) -> str:
    """Its last two letters swapped, or the last one doubled where they are the same."""
    return name[:-2] + name[-1] + name[-2] if name[-1] != name[-2] else name + name[-1]


def suggested(error: pytest.ExceptionInfo) -> list[str]:
    """What the message ends with, one or more."""
    told = str(error.value)
    assert "\n" not in told
    match = re.search(r"did you mean (.*)\?$", told)
    assert match, told
    return match[1].split(" or ")


def refused(call, *arguments, **keywords) -> list[str]:
    with pytest.raises(UserError) as error:
        call(*arguments, **keywords)
    return suggested(error)


def plain_fields() -> list[str]:
    """Those with a value that can be given again."""
    config = get_config()
    open_fields = tuple(f"{name}." for name in OPEN_FIELDS)
    names = [n for n, v in dotted(config.to_dict()) if v is not None]
    return [n for n in names if not n.startswith(open_fields)]


@pytest.mark.parametrize("name", plain_fields())
def test_every_field(load, name):
    """Mistyped with its section, and by its last name alone."""
    config = load(PRESET)
    section, _, key = name.rpartition(".")
    value = (config[section] if section else config)[key]
    [near] = refused(load, PRESET, f"--config.{mistyped(name)}={value}")
    assert near[:-1] == name[:-1]  # adam_bet1a may be either of two
    load(PRESET, f"--config.{near}={value}")
    algorithm = section if section in ALGORITHMS else "grpo"
    words = [PRESET, f"--config.algorithm={algorithm}"]
    for each in refused(load, *words, f"--{key}={value}"):
        load(*words, each)


@pytest.mark.parametrize("option", ["--num_step=4", "--sde_typ=cps", "--epochs=3", "--Seed=1"])
def test_mistyped_last_names(load, option):
    for each in refused(load, PRESET, option):
        load(PRESET, each)


def test_a_field_in_a_config_file(load):
    config = get_config()
    config.train.learning_rat = 1e-3
    with pytest.raises(UserError) as error:
        check(config)
    [near] = re.findall(r"train.learning_rat \(did you mean (\S+)\?\)", str(error.value))
    del config.train.learning_rat
    config.update_from_flattened_dict({near: 1e-3})
    check(config)
    assert config.train.learning_rate == 1e-3


@pytest.mark.parametrize("name", presets.PRESETS)
def test_every_preset(name):
    for ending in ("", "_1gpu"):
        [near] = refused(presets.get_config, mistyped(name) + ending)
        assert near.endswith(ending)
        check(presets.get_config(near))


def choices() -> list[tuple[str, str]]:
    fields = walk(DRAW.settings())
    return [(n, c) for n, each in fields for c in each.metadata["choices"] if len(c) > 2]


@pytest.mark.parametrize(("name", "choice"), choices())
def test_every_value_of_a_list(load, name, choice):
    """Algorithms, solvers, kinds of noise, advantages, ...; not in the right case, or mistyped."""
    for typed in {choice.upper(), choice[:-1] + choice[-1] * 2} - {choice}:
        [near] = refused(load, PRESET, f"--config.{name}={typed}")
        assert near == choice
    load(PRESET, f"--config.{name}={near}")


@pytest.mark.parametrize("name", TRACKERS)
def test_every_tracker(load, name):
    [near] = refused(load, PRESET, f"--config.log_with={mistyped(name)}")
    assert near == name
    if importlib.util.find_spec(near):  # else it is to be installed
        load(PRESET, f"--config.log_with={near}")


@pytest.mark.parametrize("name", REWARDS)
def test_every_reward(load, name):
    [near] = refused(build_scorers, [mistyped(name)])
    assert near in REWARDS
    [whole] = refused(load, PRESET, f"--config.reward_fn.{mistyped(name)}=0.5")
    config = load(PRESET, *shlex.split(whole))
    assert config.reward_fn.to_dict() == {"ocr": 1.0} | {near: 0.5}


@pytest.mark.parametrize(
    ("reward", "option"), [(r, o) for r in ("ocr", "qwenvl") for o in option_names(r, REWARDS[r])]
)
def test_every_option_of_a_reward(load, reward, option):
    value = "first" if option == "frames" else "7"
    [whole] = refused(load, PRESET, f"--config.reward_options.{reward}.{mistyped(option)}={value}")
    config = load(PRESET, *shlex.split(whole))
    [near] = config.reward_options[reward]
    assert near in option_names(reward, REWARDS[reward])
    options = {reward: {mistyped(option): value}}
    [again] = refused(build_scorers, [reward], options=options)
    assert again == near


def test_an_option_is_added_to_those_of_the_config(load, tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from flow_grpo.draw.presets import get_config as preset\n"
        "def get_config():\n"
        "    config = preset('tiny_ocr_1gpu')\n"
        "    config.reward_options = {'ocr': {'workers': 2}}\n"
        "    return config\n"
    )
    with pytest.raises(UserError) as error:
        load(f"--config={mine}", "--config.reward_options.ocr.engine=rapidocr")
    [whole] = re.findall(r"is not in the config; give the whole dict: (.*)$", str(error.value))
    config = load(f"--config={mine}", *shlex.split(whole))
    assert config.reward_options.to_dict() == {"ocr": {"workers": 2, "engine": "rapidocr"}}


@pytest.mark.parametrize(
    ("field", "name", "value"),
    [
        ("reward_servers", "sharpness", "http://host:18085"),  # any name may be behind a server
        ("custom_rewards", "pickscor", "my_module:score"),
        ("reward_fn", "sharpness", "1.0"),
    ],
)
def test_names_of_your_own_are_not_corrected(load, field, name, value):
    with pytest.raises(UserError) as error:
        load(PRESET, f"--config.{field}.{name}={value}")
    [whole] = re.findall(r"is not in the config; give the whole dict: (.*)$", str(error.value))
    config = load(PRESET, *shlex.split(whole))
    assert str(config[field][name]) == value


@pytest.mark.parametrize("name", old_names.RENAMED)
def test_every_field_of_flow_grpos_that_has_another_name(load, name):
    value = VALUES.get(name, "1")
    with pytest.raises(UserError) as error:
        load(PRESET, f"--config.{name}={value}")
    [ours] = re.findall(r"; it is (\S+) here$", str(error.value))
    load(PRESET, f"--config.{ours}={value}")


@pytest.mark.parametrize("name", old_names.GONE)
def test_every_field_of_flow_grpos_that_is_gone(load, name):
    """It is left out, and what stands in for it is taken."""
    with pytest.raises(UserError) as error:
        load(PRESET, f"--config.{name}=1")
    _, told = str(error.value).split("; ", 1)
    assert told.startswith("leave it out")
    load(PRESET, *re.findall(r"--config\.\S+=\w+", told))
    for field in re.findall(r"\b(?:sample|train)\.\w+", told):
        assert field in FIELDS


@pytest.mark.parametrize("name", old_names.PROMPT_FNS)
def test_every_prompt_function_of_flow_grpos(load, name):
    with pytest.raises(UserError) as error:
        load(PRESET, f"--config.prompt_fn={name}")
    load(PRESET, *re.findall(r"--config\.\S+", str(error.value)))


@pytest.mark.parametrize("name", old_names.REWARDS)
def test_every_reward_of_flow_grpos(load, name):
    with pytest.raises(UserError) as error:
        load(PRESET, f"--config.reward_fn={{'{name}': 1.0}}")
    words = shlex.split(str(error.value).rpartition("; type ")[2])
    config = load(*(word for word in words if word.startswith("--")))
    for reward, options in config.reward_options.to_dict().items():
        assert reward in config.reward_fn
        assert {*options} <= {*option_names(reward, REWARDS[reward])}


def test_models_and_prompt_sets_that_are_beside():
    [near] = refused(find_adapter, f"{ROOT}/assets/tiny-sd")
    find_adapter(near)
    [near] = refused(load_prompts, f"{ROOT}/dataset/orc", "train")
    assert load_prompts(near, "train")
    for name in FULL:
        assert nearest(mistyped(name), FULL) == name


@pytest.mark.parametrize("name", command.commands())
def test_every_command(monkeypatch, capsys, name):
    monkeypatch.setattr(sys, "argv", ["flow-grpo", mistyped(name)])
    with pytest.raises(SystemExit) as end:
        command.main()
    assert end.value.code == 2
    [near] = re.findall(r"did you mean (\S+)\?$", capsys.readouterr().err.strip())
    assert near == name


def test_an_option_that_is_far_from_all_is_told_what_there_is(load):
    with pytest.raises(UserError, match=r"unknown reward_options.ocr.colour; it takes engine, "):
        load(PRESET, "--config.reward_options.ocr.colour=red")


def test_far_names_get_no_suggestion():
    assert not nearest("beauty", REWARDS)
    assert nearest("OCR", REWARDS) == "ocr"
    assert nearest("make_small", command.commands()) == "make-small"


def test_a_config_file_without_the_field_is_no_traceback(load, tmp_path):
    """As those of Flow-GRPO are."""
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from ml_collections import ConfigDict\n\ndef get_config():\n"
        "    return ConfigDict({'reward_fn': {'ocr': 1.0}})\n"
    )
    with pytest.raises(UserError, match="reward_fn"):
        load(f"--config={mine}", "--config.reward_fn.pickscore=0.5")
