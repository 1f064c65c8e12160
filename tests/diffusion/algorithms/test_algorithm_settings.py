"""Settings of algorithms, their rules, and incompatible combinations."""

from dataclasses import asdict, dataclass, fields

import numpy as np
import pytest
import torch
from algorithm_fixtures import METHODS, method
from user_errors import raises_user_error

from flow_grpo.config.settings import field_aliases
from flow_grpo.diffusion.algorithms import (
    ALGORITHMS,
    Algorithm,
    Loss,
    Setup,
    check_settings,
    setting,
)
from flow_grpo.diffusion.algorithms.base import ScoredSamples
from flow_grpo.diffusion.config_checks import check_config
from flow_grpo.diffusion.fields import get_config
from flow_grpo.diffusion.session import build_algorithm
from flow_grpo.errors import UserError


@dataclass(frozen=True)
class Example:
    share: float = setting(0.5, "Of it.", above=0, at_most=1)
    count: int = setting(2, "Of them.", at_least=1, below=9)
    kind: str = setting("a", "Which.", choices=("a", "b"))
    side: float | None = setting(None, "Where set.", above=0)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_help_of_a_setting_is_a_sentence(name):
    for each in fields(ALGORITHMS[name].Settings):
        text = each.metadata["help"]
        assert text[0].isupper() or text[0].isdigit(), each.name
        assert text.endswith("."), each.name


@pytest.mark.parametrize(
    ("changed", "shown", "bound"),
    [
        ({"share": 0.0}, "example.share=0.0", "above 0"),
        ({"share": 1.5}, "example.share=1.5", "at most 1"),
        ({"count": 0}, "example.count=0", "at least 1"),
        ({"count": 9}, "example.count=9", "below 9"),
        ({"kind": "c"}, "example.kind='c'", "'a', 'b'"),
        ({"side": 0.0}, "example.side=0.0", "above 0"),
        ({"share": -1.0, "count": 0}, "example.share=-1.0", "above 0"),
    ],
)
def test_a_value_that_breaks_its_rule_is_rejected(changed, shown, bound):
    with raises_user_error(shown, bound):
        check_settings("example", Example(**changed))


@pytest.mark.parametrize("changed", [{}, {"share": 1}, {"count": 8}, {"count": 1}, {"side": 0.1}])
def test_values_at_the_bounds_are_accepted(changed):
    check_settings("example", Example(**changed))


@pytest.mark.parametrize("name", METHODS)
def test_every_setting_has_help_and_a_valid_default(name):
    settings = ALGORITHMS[name].Settings
    check_settings(name, settings())
    for each in fields(settings):
        reason = each.metadata["help"]
        assert reason.strip() == reason
        assert len(reason.split()) > 1
        assert reason.endswith(".")
        if "alias_of" in each.metadata:
            continue
        numeric = isinstance(each.default, int | float) or each.default is None
        assert bool(each.metadata["rules"]) == numeric
        # paths are unrestricted
        assert bool(each.metadata["choices"]) == (
            isinstance(each.default, str) and each.default != ""
        )


@pytest.mark.parametrize("name", METHODS)
def test_the_config_has_the_settings_at_their_defaults(name):
    settings = ALGORITHMS[name].Settings
    aliases = field_aliases(settings)  # the config resolves them
    section = {k: v for k, v in get_config()[name].to_dict().items() if k not in aliases}
    assert section == {k: v for k, v in asdict(settings()).items() if k not in aliases}
    assert settings(**section) == settings()


@pytest.mark.parametrize("name", METHODS)
def test_every_rule_holds_in_the_config(name):
    """Values below each lower and above each upper bound are rejected by the field's name."""
    outside = {"at least": -1, "above": 0, "at most": 1, "below": 0}
    for each in fields(ALGORITHMS[name].Settings):
        rules = each.metadata.get("rules", {})  # aliases have none
        wrong = [(bound, bound + outside[words]) for words, bound in rules.items()]
        if each.metadata["choices"]:
            wrong.append(("", "no such choice"))
        for bound, value in wrong:
            config = get_config()
            kind = type(each.default) if each.default is not None else float
            config[name][each.name] = kind(value)
            with raises_user_error(f"{name}.{each.name}={kind(value)!r}", bound):
                check_config(config)


def rejection(**changed) -> UserError:
    config = get_config()
    config.update_from_flattened_dict({k.replace("__", "."): v for k, v in changed.items()})
    check_config(config)  # each value is valid by itself
    with raises_user_error() as caught:
        build_algorithm(config)
    return caught.value


@pytest.mark.parametrize(
    ("name", "kind"), [("grpo_guard", "cps"), ("grpo_guard", "dance"), ("dppo", "cps")]
)
def test_an_algorithm_rejects_step_rules_it_is_not_derived_for(name, kind):
    error = rejection(algorithm=name, sample__sde_type=kind)
    assert (error.field, error.value) == ("sample.sde_type", kind)
    assert f"algorithm={name!r}" in str(error)
    assert "'flow'" in error.hint


FORWARD = ["nft", "awm", "ram", "leap", "dgpo", "dpo", "sft", "rwr"]


@pytest.mark.parametrize("name", [*FORWARD, "mix"])
def test_a_window_needs_an_algorithm_that_trains_it(name):
    error = rejection(algorithm=name, sample__sde_window_size=2)
    assert (error.field, error.value) == ("sample.sde_window_size", 2)
    assert f"algorithm={name!r}" in str(error)
    assert ("mix.window_size" if name == "mix" else "0") in error.hint


@pytest.mark.parametrize("name", FORWARD)
def test_remax_needs_noise(name):
    error = rejection(algorithm=name, train__advantage="remax")
    assert (error.field, error.value) == ("train.advantage", "remax")
    assert f"algorithm={name!r}" in str(error)
    assert ("'grpo'" if ALGORITHMS[name].overrides_credit else "'rloo'") in error.hint


@pytest.mark.parametrize("name", ["mix", "dpo", "sft", "rwr"])
def test_an_algorithm_with_its_own_credit_rejects_other_advantages(name):
    error = rejection(algorithm=name, train__advantage="rloo")
    assert (error.field, error.value) == ("train.advantage", "rloo")
    assert f"algorithm={name!r}" in str(error)
    assert "'grpo'" in error.hint


@pytest.mark.parametrize("name", ["dgpo", "dpo", "sft"])
def test_groups_of_one_cannot_be_compared(name):
    error = rejection(algorithm=name, sample__num_image_per_prompt=1)
    assert (error.field, error.value) == ("sample.num_image_per_prompt", 1)
    assert f"algorithm={name!r}" in str(error)
    config = get_config()
    config.algorithm, config.sample.num_image_per_prompt = name, 2
    build_algorithm(config)


@pytest.mark.parametrize("name", ["grpo_guard", "dppo"])
def test_trajectory_ratios_have_no_step_means(name):
    error = rejection(algorithm=name, **{f"{name}__ratio": "trajectory"})
    assert (error.field, error.value) == (f"{name}.ratio", "trajectory")
    assert "'step'" in error.hint


@pytest.mark.parametrize(("name", "weight"), [("grpo", "beta"), ("awm", "kl_beta")])
def test_a_target_needs_a_kl(name, weight):
    error = rejection(algorithm=name, **{f"{name}__kl_target": 0.1, f"{name}__{weight}": 0.0})
    assert (error.field, error.value) == (f"{name}.kl_target", 0.1)


@pytest.mark.parametrize("name", FORWARD)
def test_no_more_noise_levels_than_steps(name):
    error = rejection(algorithm=name, sample__num_steps=5, **{f"{name}__times": 6})
    assert (error.field, error.value) == (f"{name}.times", 6)
    assert "sample.num_steps=5" in str(error)
    assert "skip" not in str(error)
    config = get_config()
    config.algorithm, config.sample.num_steps, config[name].times = name, 6, 6
    assert build_algorithm(config).losses_per_sample == 6


@pytest.mark.parametrize("name", FORWARD)
def test_skipped_noise_levels_are_not_available(name):
    skipped = {f"{name}__skip_first": 1, f"{name}__skip_last": 4}
    error = rejection(algorithm=name, **{f"{name}__times": 6}, **skipped)
    assert (error.field, error.value) == (f"{name}.times", 6)
    for shown in ("sample.num_steps=10", " 5 ", "skip_first", "skip_last"):
        assert shown in str(error)


def test_a_window_for_each_group_needs_batches_of_one_group():
    fields = {"sample__sde_window_size": 1, "sample__sde_window_per": "group"}
    message = str(rejection(**fields, sample__num_image_per_prompt=12))
    for shown in ("'group'", "sample.train_batch_size=8", "sample.num_image_per_prompt=12"):
        assert shown in message
    # the sampled group consists of whole batches, the trained one does not
    kept = {"sample__num_image_per_prompt": 16, "train__keep_best_worst": 2}
    message = str(rejection(**fields, **kept))
    assert "sample.train_batch_size=8" in message
    assert "2 x train.keep_best_worst=2" in message


def test_reward_gradients_reject_videos():
    message = str(rejection(algorithm="leap", frames=5))
    assert "frames=5" in message
    assert "algorithm='leap'" in message


def test_mix_needs_steps_for_its_window():
    message = str(rejection(algorithm="mix", mix__window_size=10))
    assert message.startswith("mix.window_size=10 ")
    assert "sample.num_steps=10" in message


@pytest.mark.parametrize("name", ["grpo", "grpo_guard", "dppo"])
def test_a_window_must_fit_its_range(name):
    message = str(rejection(algorithm=name, sample__sde_window_size=6))
    assert "sde_window_size=6 " in message
    assert "sde_window_range=(0, 5)" in message


@pytest.mark.parametrize("name", METHODS)
def test_all_algorithms_can_be_built_from_the_defaults(name):
    config = get_config()
    config.algorithm = name
    if name == "opd":  # needs a teacher
        config.opd.update(teachers={"all": "a/b/c"}, start="model")
    check_config(config)
    algorithm = build_algorithm(config)
    assert type(algorithm) is ALGORITHMS[name]
    assert algorithm.losses_per_sample >= 1


class Plain(Algorithm):
    """An algorithm that overrides nothing."""


def test_the_base_class_samples_with_the_ode_and_trains_every_sample():
    plain = Plain(object(), Setup(update_samples=5))
    plain.check()
    assert plain.noisy_steps(np.random.default_rng(0), 0) == range(0)
    assert (plain.needs_reference, plain.trust_radius, plain.samples_with_old_policy(9)) == (
        False,
        None,
        False,
    )
    assert (plain.trained_samples, plain.batch_count(2), plain.batches([7], 2)) == (5, 3, [7])
    trained = plain.has_gradient(torch.zeros(2))
    assert (trained.dtype, trained.tolist()) == (torch.bool, [True, True])
    assert list(plain.iter_prepared(None, [7, 8])) == [(7, None), (8, None)]
    with pytest.raises(NotImplementedError):
        plain.loss(None, None, None, 0)
    assert plain.update_kl_weight({"train/kl": 1.0}) == {}
    plain.load_state_dict({"kl_weight": 2.0, "most_kl": 1.0})
    assert plain.state_dict() == {"kl_weight": 0.0, "most_kl": 0.0}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_is_registered_by_its_name(name):
    assert name
    assert issubclass(ALGORITHMS[name], Algorithm)
    assert ALGORITHMS[name].name == name


def test_credit_is_the_configured_advantage():
    """Win rates of the scores are .5, 0, 1; the judge's are used directly, twice. Minus 1.5."""
    rewards = {"judge": np.array([0.9, 0.5, 0.1]), "score": np.array([7.0, 3.0, 90.0])}
    weights = {"judge": 2.0, "score": 1.0}
    scored = ScoredSamples(rewards, np.zeros(3, int), weights, judged={"judge"})
    plain = Plain(object(), Setup(estimator="pairwise", scale="none"))
    np.testing.assert_allclose(plain.credit(scored), [0.8, -0.5, -0.3], atol=1e-12)


def test_a_loss_without_samples_has_the_same_columns():
    none = Loss(torch.ones(2), {"a": torch.ones(2)}).without_samples()
    assert (none.per_sample.tolist(), none.columns["a"].tolist()) == ([], [])


@pytest.mark.parametrize(
    ("setup", "steps"),
    [
        ({"window_size": 2, "window_range": (3, 5)}, range(3, 5)),
        ({"timestep_fraction": 0.5}, range(4)),
    ],
)
def test_noisy_steps_follow_the_setup(setup, steps):
    algorithm = method("grpo", {"num_steps": 8, **setup})
    assert algorithm.noisy_steps(np.random.default_rng(0), 0) == steps
    assert algorithm.losses_per_sample == len(steps)
