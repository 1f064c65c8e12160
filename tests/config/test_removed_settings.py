"""Settings of earlier versions that were removed, in old runs and on the command line."""

import json

import pytest
from user_errors import raises_user_error

from flow_grpo.config import migration, overrides
from flow_grpo.config.settings import to_json
from flow_grpo.diffusion.config_checks import check_config
from flow_grpo.diffusion.config_loading import load_run_config
from flow_grpo.diffusion.fields import DIFFUSION_SPEC, get_config
from flow_grpo.training.config_changes import compare_configs

NAME = "sample.old_shortcut"


@pytest.fixture(autouse=True)
def removed_setting(monkeypatch):
    monkeypatch.setitem(migration.REMOVED_FIELDS, NAME, False)


@pytest.fixture
def current() -> dict:
    config = get_config()
    config.dataset = "no/such/folder"
    return to_json(check_config(config))


def write_old_config(tmp_path, current: dict, value: object) -> None:
    """Write a config.json with the removed setting."""
    sample = {**current["sample"], "old_shortcut": value}
    (tmp_path / "config.json").write_text(json.dumps({**current, "sample": sample}))


def test_a_run_with_the_value_of_today_resumes_silently(tmp_path, current, caplog):
    write_old_config(tmp_path, current, value=False)
    with caplog.at_level("INFO"):
        compare_configs(tmp_path, None, current, same_run=True)
        load_run_config(tmp_path, [])
    assert not caplog.messages


def test_a_run_with_another_value_is_not_resumed(tmp_path, current):
    write_old_config(tmp_path, current, value=True)
    with raises_user_error(f"{NAME}=True", "False", field=str(tmp_path / "config.json")):
        compare_configs(tmp_path, None, current, same_run=True)
    compare_configs(tmp_path, None, current, same_run=False)  # a new run from its weights


def test_a_run_with_another_value_is_evaluated_with_a_warning(tmp_path, current, caplog):
    write_old_config(tmp_path, current, value=True)
    with caplog.at_level("WARNING"):
        load_run_config(tmp_path, [])
    [message] = caplog.messages
    assert NAME in message


def test_an_option_gets_a_hint():
    with raises_user_error(repr(NAME), "removed", "False"):
        overrides.check_field_name(NAME, get_config(), DIFFUSION_SPEC, "True")


def test_a_config_file_gets_a_hint():
    config = get_config()
    config.sample.old_shortcut = False
    with raises_user_error(f"{NAME} ({migration.field_hint(NAME)})"):
        check_config(config)


def test_a_run_with_an_in_process_reward_of_an_earlier_version_resumes(tmp_path, current, caplog):
    before = {**current, "custom_rewards": {"mine": "flow_grpo.rewards.given:mine"}}
    (tmp_path / "config.json").write_text(json.dumps(before))
    now = {**current, "custom_rewards": {"mine": "flow_grpo.rewards.custom:mine"}}
    compare_configs(tmp_path, None, now, same_run=True)
    assert not caplog.messages
