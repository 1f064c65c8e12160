"""Every suggestion ("did you mean X?") is valid: with X the config passes its checks."""

import importlib.util
import re
import shlex
import sys
from functools import cache

import pytest
from absl import flags
from ml_collections import ConfigDict, config_flags
from runner import ROOT
from untrained.full import FULL
from user_errors import raises_user_error

from flow_grpo.config import command, migration, overrides
from flow_grpo.config.config_dicts import FREE_FORM_FIELDS
from flow_grpo.config.settings import iter_settings
from flow_grpo.config.trackers import TRACKER_HINTS
from flow_grpo.data.prompts import load_prompts
from flow_grpo.diffusion import presets
from flow_grpo.diffusion.algorithms import ALGORITHMS
from flow_grpo.diffusion.config_checks import check_config
from flow_grpo.diffusion.fields import DIFFUSION_SPEC, get_config
from flow_grpo.diffusion.models import find_adapter
from flow_grpo.errors import UserError, nearest
from flow_grpo.rewards import REWARDS, build_scorers, option_names
from flow_grpo.untrusted_files import flatten_fields

PRESET = f"--config={ROOT}/config/grpo.py:tiny_ocr_1gpu"
FIELDS = dict(flatten_fields(get_config().to_dict()))
VALUES = {  # values of Flow-GRPO's settings for which 1 is invalid
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
    """Return a function that parses and checks a command line in this process."""

    def load(*words: str, script: str = "train.py") -> ConfigDict:
        argv, values = [script, *words], flags.FlagValues()
        monkeypatch.setattr(sys, "argv", argv)
        monkeypatch.setattr(sys, "path", [*sys.path])
        overrides.load_checked_config(argv, DIFFUSION_SPEC)
        config_flags.DEFINE_config_file("config", flag_values=values)
        values(argv)
        check_config(values.config)
        return values.config

    return load


def misspell(name: str) -> str:
    """Swap the last two letters of a name, or double the last one if they are equal."""
    return name[:-2] + name[-1] + name[-2] if name[-1] != name[-2] else name + name[-1]


def suggested(error: pytest.ExceptionInfo) -> list[str]:
    """Return the suggestions at the end of the message."""
    message = str(error.value)
    assert "\n" not in message
    match = re.search(r"did you mean (.*)\?$", message)
    assert match, message
    return match[1].split(" or ")


def suggestions_of(call, *arguments, **keywords) -> list[str]:
    with pytest.raises(UserError) as error:
        call(*arguments, **keywords)
    return suggested(error)


def plain_fields() -> list[str]:
    """Return the settings whose default can be set on the command line."""
    config = get_config()
    open_fields = tuple(f"{name}." for name in FREE_FORM_FIELDS)
    names = [n for n, v in flatten_fields(config.to_dict()) if v is not None]
    return [n for n in names if not n.startswith(open_fields)]


@cache
def default_config() -> ConfigDict:
    return presets.get_config("tiny_ocr_1gpu")


@pytest.mark.parametrize("name", plain_fields())
def test_every_field(load, name):
    """Misspelt with its section, and without it.

    The value is that of the preset, so that an existing field accepts it.
    """
    config = default_config()
    section, _, key = name.rpartition(".")
    value = (config[section] if section else config)[key]
    [near] = suggestions_of(load, PRESET, f"--config.{misspell(name)}={value}")
    assert near[:-1] == name[:-1]  # adam_bet1a is close to adam_beta1 and adam_beta2
    assert near in FIELDS
    algorithm = section if section in ALGORITHMS else "grpo"
    words = [PRESET, f"--config.algorithm={algorithm}"]
    for each in suggestions_of(load, *words, f"--{key}={value}"):
        load(*words, each)


@pytest.mark.parametrize("option", ["--num_step=4", "--sde_typ=cps", "--epochs=3", "--Seed=1"])
def test_misspelt_names_without_a_section(load, option):
    for each in suggestions_of(load, PRESET, option):
        load(PRESET, each)


def test_a_field_in_a_config_file(load):
    config = get_config()
    config.train.learning_rat = 1e-3
    with pytest.raises(UserError) as error:
        check_config(config)
    [near] = re.findall(r"train.learning_rat \(did you mean (\S+)\?\)", str(error.value))
    del config.train.learning_rat
    config.update_from_flattened_dict({near: 1e-3})
    check_config(config)
    assert config.train.learning_rate == 1e-3


@pytest.mark.parametrize("name", presets.PRESETS)
def test_every_preset(name):
    for ending in ("", "_1gpu"):
        [near] = suggestions_of(presets.get_config, misspell(name) + ending)
        assert near.endswith(ending)
        check_config(presets.get_config(near))


def choices() -> list[tuple[str, str]]:
    fields = iter_settings(DIFFUSION_SPEC.settings())
    return [(n, c) for n, each in fields for c in each.metadata["choices"] if len(c) > 2]


@pytest.mark.parametrize(("name", "choice"), choices())
def test_every_value_of_a_list(load, name, choice):
    """Upper case or misspelt algorithms, solvers, SDE types, advantage estimators, ..."""
    for typed in {choice.upper(), choice[:-1] + choice[-1] * 2} - {choice}:
        [near] = suggestions_of(load, PRESET, f"--config.{name}={typed}")
        assert near == choice
    load(PRESET, f"--config.{name}={near}")


@pytest.mark.parametrize("name", TRACKER_HINTS)
def test_every_tracker(load, name):
    [near] = suggestions_of(load, PRESET, f"--config.log_with={misspell(name)}")
    assert near == name
    if importlib.util.find_spec(near):  # otherwise it must be installed first
        load(PRESET, f"--config.log_with={near}")


@pytest.mark.parametrize("name", REWARDS)
def test_every_reward(load, name):
    [near] = suggestions_of(build_scorers, [misspell(name)])
    assert near in REWARDS
    [whole] = suggestions_of(load, PRESET, f"--config.reward_fn.{misspell(name)}=0.5")
    config = load(PRESET, *shlex.split(whole))
    assert config.reward_fn.to_dict() == {"ocr": 1.0} | {near: 0.5}


@pytest.mark.parametrize(
    ("reward", "option"),
    [(r, o) for r in ("ocr", "qwenvl") for o in option_names(r, REWARDS.paths[r])],
)
def test_every_option_of_a_reward(load, reward, option):
    value = "first" if option == "frames" else "7"
    [whole] = suggestions_of(
        load, PRESET, f"--config.reward_options.{reward}.{misspell(option)}={value}"
    )
    config = load(PRESET, *shlex.split(whole))
    [near] = config.reward_options[reward]
    assert near in option_names(reward, REWARDS.paths[reward])
    options = {reward: {misspell(option): value}}
    [again] = suggestions_of(build_scorers, [reward], options=options)
    assert again == near


def test_an_option_is_added_to_those_of_the_config(load, tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from flow_grpo.diffusion.presets import get_config as preset\n"
        "def get_config():\n"
        "    config = preset('tiny_ocr_1gpu')\n"
        "    config.reward_options = {'ocr': {'workers': 2}}\n"
        "    return config\n"
    )
    with pytest.raises(UserError) as error:
        load(f"--config={mine}", "--config.reward_options.ocr.engine=rapidocr")
    [whole] = re.findall(r"set the whole dict: (.*)$", str(error.value))
    config = load(f"--config={mine}", *shlex.split(whole))
    assert config.reward_options.to_dict() == {"ocr": {"workers": 2, "engine": "rapidocr"}}


@pytest.mark.parametrize(
    ("field", "name", "value"),
    [
        ("reward_servers", "sharpness", "http://host:18085"),  # a server may have any name
        ("custom_rewards", "pickscor", "my_module:score"),
        ("reward_fn", "sharpness", "1.0"),
    ],
)
def test_custom_names_are_not_corrected(load, field, name, value):
    with pytest.raises(UserError) as error:
        load(PRESET, f"--config.{field}.{name}={value}")
    [whole] = re.findall(r"set the whole dict: (.*)$", str(error.value))
    config = load(PRESET, *shlex.split(whole))
    assert str(config[field][name]) == value


@pytest.mark.parametrize("name", migration.RENAMED_FIELDS)
def test_every_renamed_setting_of_flow_grpo(load, name):
    value = VALUES.get(name, "1")
    with pytest.raises(UserError) as error:
        load(PRESET, f"--config.{name}={value}")
    [ours] = re.findall(r"; it is called (\S+) here$", str(error.value))
    load(PRESET, f"--config.{ours}={value}")


@pytest.mark.parametrize("name", migration.UNSUPPORTED_FIELDS)
def test_every_unsupported_setting_of_flow_grpo(load, name):
    """It is omitted, and the suggested replacement is valid."""
    with pytest.raises(UserError) as error:
        load(PRESET, f"--config.{name}=1")
    _, hint = str(error.value).split("; ", 1)
    assert hint.startswith("omit it")
    load(PRESET, *re.findall(r"--config\.\S+=\w+", hint))
    for field in re.findall(r"\b(?:sample|train)\.\w+", hint):
        assert field in FIELDS


@pytest.mark.parametrize("name", migration.PROMPT_FNS)
def test_every_prompt_function_of_flow_grpo(load, name):
    with pytest.raises(UserError) as error:
        load(PRESET, f"--config.prompt_fn={name}")
    load(PRESET, *re.findall(r"--config\.\S+", str(error.value)))


@pytest.mark.parametrize("name", migration.RENAMED_REWARDS)
def test_every_reward_of_flow_grpo(load, name):
    with pytest.raises(UserError) as error:
        load(PRESET, f"--config.reward_fn={{'{name}': 1.0}}")
    words = shlex.split(str(error.value).rpartition("; run ")[2])
    config = load(*(word for word in words if word.startswith("--")))
    for reward, options in config.reward_options.to_dict().items():
        assert reward in config.reward_fn
        assert {*options} <= {*option_names(reward, REWARDS.paths[reward])}


def test_neighbouring_models_and_prompt_sets():
    [near] = suggestions_of(find_adapter, f"{ROOT}/assets/tiny-sd")
    find_adapter(near)
    [near] = suggestions_of(load_prompts, f"{ROOT}/dataset/orc", "train")
    assert load_prompts(near, "train")
    for name in FULL:
        assert nearest(misspell(name), FULL) == name


@pytest.mark.parametrize("name", command.list_commands())
def test_every_command(monkeypatch, capsys, name):
    monkeypatch.setattr(sys, "argv", ["flow-grpo", misspell(name)])
    with pytest.raises(SystemExit) as end:
        command.main()
    assert end.value.code == 2
    [near] = re.findall(r"did you mean (\S+)\?$", capsys.readouterr().err.strip())
    assert near == name


def test_an_option_without_a_similar_one_lists_the_known_ones(load):
    with raises_user_error("reward_options.ocr.colour", "engine, "):
        load(PRESET, "--config.reward_options.ocr.colour=red")


def test_dissimilar_names_get_no_suggestion():
    assert not nearest("beauty", REWARDS)
    assert nearest("OCR", REWARDS) == "ocr"
    assert nearest("make_small", command.list_commands()) == "make-small"


def test_a_config_file_without_most_settings_is_a_user_error(load, tmp_path):
    """Such as a config file of Flow-GRPO."""
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from ml_collections import ConfigDict\n\ndef get_config():\n"
        "    return ConfigDict({'reward_fn': {'ocr': 1.0}})\n"
    )
    with pytest.raises(UserError, match="reward_fn"):
        load(f"--config={mine}", "--config.reward_fn.pickscore=0.5")
