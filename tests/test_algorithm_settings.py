"""The fields of algorithms and their rules, and combinations that cannot work."""

from dataclasses import dataclass, fields

import pytest
from methods import METHODS

from flow_grpo.draw.algorithms import ALGORITHMS, check_settings, setting
from flow_grpo.draw.check import check
from flow_grpo.draw.fields import get_config
from flow_grpo.draw.session import build_algorithm
from flow_grpo.errors import UserError


@dataclass(frozen=True)
class Example:
    share: float = setting(0.5, "Of it.", above=0, at_most=1)
    count: int = setting(2, "Of them.", at_least=1, below=9)
    kind: str = setting("a", "Which.", choices=("a", "b"))
    side: float | None = setting(None, "Where set.", above=0)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_help_of_a_field_stands_by_itself(name):
    for each in fields(ALGORITHMS[name].Settings):
        reason = each.metadata["reason"]
        assert not reason.startswith(("Of ", "Where set, that ", "As above")), each.name
        assert reason[0].isupper() or reason[0].isdigit(), each.name
        assert reason.endswith("."), each.name


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"share": 0.0}, "example.share=0.0 must be above 0"),
        ({"share": 1.5}, "example.share=1.5 must be at most 1"),
        ({"count": 0}, "example.count=0 must be at least 1"),
        ({"count": 9}, "example.count=9 must be below 9"),
        ({"kind": "c"}, "example.kind='c' must be one of 'a', 'b'"),
        ({"side": 0.0}, "example.side=0.0 must be above 0"),
        ({"share": -1.0, "count": 0}, "example.share=-1.0 must be above 0"),
    ],
)
def test_a_value_that_breaks_its_rule_is_named(changed, message):
    with pytest.raises(UserError) as caught:
        check_settings("example", Example(**changed))
    assert str(caught.value) == message


@pytest.mark.parametrize("changed", [{}, {"share": 1}, {"count": 8}, {"count": 1}, {"side": 0.1}])
def test_values_at_the_edge_are_taken(changed):
    check_settings("example", Example(**changed))


@pytest.mark.parametrize("name", METHODS)
def test_every_setting_has_a_reason_and_a_default_that_keeps_its_rule(name):
    settings = ALGORITHMS[name].Settings
    check_settings(name, settings())
    for each in fields(settings):
        reason = each.metadata["reason"]
        assert reason.strip() == reason
        assert len(reason.split()) > 1
        assert reason.endswith(".")
        numeric = isinstance(each.default, int | float) or each.default is None
        assert bool(each.metadata["rules"]) == numeric
        assert bool(each.metadata["choices"]) == isinstance(each.default, str)


@pytest.mark.parametrize("name", METHODS)
def test_the_config_has_the_settings_at_their_defaults(name):
    settings = ALGORITHMS[name].Settings
    section = get_config()[name].to_dict()
    assert section == {each.name: each.default for each in fields(settings)}
    assert settings(**section) == settings()


@pytest.mark.parametrize("name", METHODS)
def test_every_rule_holds_in_the_config(name):
    """Below each lower bound and above each upper one: refused by the name of the field."""
    outside = {"at least": -1, "above": 0, "at most": 1, "below": 0}
    for each in fields(ALGORITHMS[name].Settings):
        wrong = [(bound, bound + outside[words]) for words, bound in each.metadata["rules"].items()]
        for bound, value in [*wrong, *[("", "none such")] * bool(each.metadata["choices"])]:
            config = get_config()
            kind = type(each.default) if each.default is not None else float
            config[name][each.name] = kind(value)
            with pytest.raises(UserError, match=rf"^{name}\.{each.name}=.* must be .*{bound}"):
                check(config)


def refused(**changed) -> str:
    config = get_config()
    config.update_from_flattened_dict({k.replace("__", "."): v for k, v in changed.items()})
    check(config)  # each value alone is allowed
    with pytest.raises(UserError) as caught:
        build_algorithm(config)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("kind", ["cps", "dance"])
def test_guard_needs_the_flow_rule(kind):
    message = refused(algorithm="grpo_guard", sample__sde_type=kind)
    assert message.startswith(f"algorithm='grpo_guard' needs sample.sde_type='flow', not {kind!r}:")


def test_dppo_needs_a_variance():
    message = refused(algorithm="dppo", sample__sde_type="cps")
    assert message.startswith("algorithm='dppo' needs sample.sde_type='flow' or 'dance', not 'cps'")


FORWARD = ["nft", "awm", "dgpo", "dpo", "sft", "rwr"]


@pytest.mark.parametrize("name", FORWARD)
def test_a_window_needs_noise(name):
    message = refused(algorithm=name, sample__sde_window_size=2)
    assert message.startswith(f"sample.sde_window_size=2 does not go with algorithm={name!r}")
    assert message.endswith("set it to 0")


@pytest.mark.parametrize("name", FORWARD)
def test_remax_needs_noise(name):
    message = refused(algorithm=name, train__advantage="remax")
    assert message.startswith(f"train.advantage='remax' does not go with algorithm={name!r}")
    own = ALGORITHMS[name].own_credit
    assert message.endswith("leave it at 'grpo'" if own else "use 'rloo'")


@pytest.mark.parametrize("name", ["mix", "dpo", "sft", "rwr"])
def test_credit_of_its_own_leaves_no_choice_of_advantages(name):
    message = refused(algorithm=name, train__advantage="rloo")
    assert message.startswith(f"train.advantage='rloo' does not go with algorithm={name!r}, which")


@pytest.mark.parametrize("name", ["dgpo", "dpo", "sft"])
def test_groups_of_one_have_nothing_to_compare(name):
    message = refused(algorithm=name, sample__num_image_per_prompt=1)
    assert message.startswith("sample.num_image_per_prompt=1 must be at least 2 for algorithm=")


@pytest.mark.parametrize("name", ["grpo_guard", "dppo"])
def test_whole_trajectories_have_no_means_to_compare(name):
    message = refused(algorithm=name, **{f"{name}__ratio": "trajectory"})
    assert message.startswith(f"{name}.ratio='trajectory' does not go with algorithm={name!r}")


@pytest.mark.parametrize(("name", "weight"), [("grpo", "beta"), ("awm", "kl_beta")])
def test_a_target_needs_a_kl(name, weight):
    fields = {f"{name}__kl_target": 0.1, f"{name}__{weight}": 0.0}
    assert refused(algorithm=name, **fields).startswith(f"{name}.kl_target=0.1 needs a KL to move")


@pytest.mark.parametrize("name", FORWARD)
def test_no_more_times_than_steps(name):
    message = refused(algorithm=name, sample__num_steps=5, **{f"{name}__times": 6})
    assert message.startswith(f"{name}.times=6 must be at most sample.num_steps=5:")
    config = get_config()
    config.algorithm, config.sample.num_steps, config[name].times = name, 6, 6
    assert build_algorithm(config).losses_per_sample == 6


@pytest.mark.parametrize("name", FORWARD)
def test_no_more_times_than_steps_that_are_left(name):
    skipped = {f"{name}__skip_first": 1, f"{name}__skip_last": 4}
    message = refused(algorithm=name, **{f"{name}__times": 6}, **skipped)
    assert message.startswith(f"{name}.times=6 must be at most sample.num_steps=10 less 5, of skip")


def test_dpo_needs_pairs():
    message = refused(algorithm="dpo", sample__num_image_per_prompt=1)
    assert message.startswith("sample.num_image_per_prompt=1 must be at least 2 for algorithm=")


def test_mix_has_a_window_of_its_own():
    message = refused(algorithm="mix", sample__sde_window_size=2)
    assert message.startswith("sample.sde_window_size=2 does not go with algorithm='mix'")
    assert message.endswith("set mix.window_size")


def test_mix_needs_steps_for_its_window():
    message = refused(algorithm="mix", mix__window_size=10)
    assert message.startswith("mix.window_size=10 must be below sample.num_steps=10")


@pytest.mark.parametrize("name", ["grpo", "grpo_guard", "dppo"])
def test_a_window_must_fit_its_range(name):
    message = refused(algorithm=name, sample__sde_window_size=6)
    assert message == "sde_window_size=6 does not fit into sde_window_range=(0, 5)"


@pytest.mark.parametrize("name", METHODS)
def test_all_methods_can_be_built_from_the_defaults(name):
    config = get_config()
    config.algorithm = name
    check(config)
    algorithm = build_algorithm(config)
    assert type(algorithm) is ALGORITHMS[name]
    assert algorithm.losses_per_sample >= 1
