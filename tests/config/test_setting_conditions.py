"""What settings require and exclude, declared next to them."""

from dataclasses import dataclass, replace

import pytest
from user_errors import raises_user_error

from flow_grpo.config.settings import check_conditions, iter_settings, section, setting
from flow_grpo.diffusion import config_checks as diffusion_checks
from flow_grpo.diffusion.fields import DIFFUSION_SPEC
from flow_grpo.vlm import config_checks as vlm_checks
from flow_grpo.vlm.fields import VLM_SPEC

DIFFUSION = DIFFUSION_SPEC, diffusion_checks.check_config
VLM = VLM_SPEC, vlm_checks.check_config


@dataclass(frozen=True)
class Part:
    mode: str = setting("plain", "", choices=("plain", "fast", "faster"))
    depth: int = setting(3, "", requires="part.mode=fast|faster")


@dataclass(frozen=True)
class Settings:
    part: Part = section(Part)
    folder: str = setting("", "")
    cache: bool = setting(False, "", requires="folder", excludes={"part.mode=fast": "no room"})
    options: dict = setting({}, "", excludes="cache")


@pytest.mark.parametrize(
    ("settings", "field", "shown"),
    [
        (Settings(part=Part(depth=4)), "part.depth", ("part.mode='plain'", "fast|faster", "3")),
        (Settings(cache=True), "cache", ("folder=''", "False")),
        (
            Settings(cache=True, folder="x", part=Part(mode="fast")),
            "cache",
            ("part.mode='fast'", "no room"),
        ),
        (Settings(cache=True, folder="x", options={"a": 1}), "options", ("cache=True",)),
    ],
)
def test_a_violated_condition_names_both_settings(settings, field, shown):
    with raises_user_error(*shown, field=field):
        check_conditions(settings)


@pytest.mark.parametrize(
    "settings",
    [
        Settings(),
        Settings(part=Part("fast", depth=4)),
        Settings(part=Part("faster", depth=4), folder="x", cache=True),
        Settings(options={"a": 1}),
        Settings(folder="x", part=Part("fast")),
    ],
)
def test_conditions_hold_or_the_setting_has_its_default(settings):
    check_conditions(settings)
    check_conditions(replace(settings, options={}))


@pytest.mark.parametrize("spec", [DIFFUSION_SPEC, VLM_SPEC])
def test_declared_conditions_name_settings_and_their_values(spec):
    known = dict(iter_settings(spec.settings()))
    for each in known.values():
        for condition in {**each.metadata.get("requires", {}), **each.metadata.get("excludes", {})}:
            name, _, values = condition.partition("=")
            choices = known[name].metadata["choices"] or ("True", "False")
            assert not values or {*values.split("|")} <= {*choices}


@pytest.mark.parametrize(
    ("trainer", "changed", "other"),
    [
        (DIFFUSION, {"train.offload_optimizer": True, "train.use_8bit_adam": True}, "8bit_adam"),
        (DIFFUSION, {"train.keep_best_worst": 2, "sample.same_latent": True}, "same_latent=True"),
        (VLM, {"train.critic_warmup": 2}, "train.advantage='grpo'"),
        (VLM, {"train.critic": "separate"}, "train.advantage='grpo'"),
        (VLM, {"train.critic_model": "own"}, "train.critic='head'"),
        (VLM, {"sample.refills": 2, "train.advantage": "gae"}, "train.advantage='gae'"),
        (VLM, {"train.dual_clip": 3.0, "train.loss": "cispo"}, "train.loss='cispo'"),
    ],
)
def test_both_trainers_check_the_conditions(trainer, changed, other):
    spec, check_config = trainer
    config = spec.get_config()
    config.update_from_flattened_dict(changed)
    name, value = next(iter(changed.items()))
    with raises_user_error(other, field=name, value=value):
        check_config(config)
