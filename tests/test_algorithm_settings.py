"""The fields of algorithms and their rules, and combinations that cannot work."""

from dataclasses import asdict, dataclass, fields

import numpy as np
import pytest
import torch
from methods import METHODS, method

from flow_grpo.draw.algorithms import ALGORITHMS, Algorithm, Loss, Setup, check_settings, setting
from flow_grpo.draw.algorithms.base import Scored
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
        # a path may be any
        assert bool(each.metadata["choices"]) == (
            isinstance(each.default, str) and each.default != ""
        )


@pytest.mark.parametrize("name", METHODS)
def test_the_config_has_the_settings_at_their_defaults(name):
    settings = ALGORITHMS[name].Settings
    section = get_config()[name].to_dict()
    assert section == asdict(settings())
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
    assert message == (
        f"algorithm='grpo_guard' needs sample.sde_type='flow', not {kind!r}: its ratio is worked "
        "out for that step"
    )


def test_dppo_needs_a_variance():
    message = refused(algorithm="dppo", sample__sde_type="cps")
    assert message == (
        "algorithm='dppo' needs sample.sde_type='flow' or 'dance', not 'cps', which leaves the "
        "variance out of its log-probability"
    )


OWN_CREDIT = ", which gives credit in a way of its own; leave it at 'grpo'"
FORWARD = ["nft", "awm", "ram", "leap", "dgpo", "dpo", "sft", "rwr"]


@pytest.mark.parametrize("name", FORWARD)
def test_a_window_needs_noise(name):
    message = refused(algorithm=name, sample__sde_window_size=2)
    assert message == (
        f"sample.sde_window_size=2 does not go with algorithm={name!r}, which samples without "
        "noise; set it to 0"
    )


@pytest.mark.parametrize("name", FORWARD)
def test_remax_needs_noise(name):
    message = refused(algorithm=name, train__advantage="remax")
    why = ": it compares with a sample drawn without noise, and here all are; use 'rloo'"
    why = OWN_CREDIT if ALGORITHMS[name].own_credit else why
    assert message == f"train.advantage='remax' does not go with algorithm={name!r}{why}"


@pytest.mark.parametrize("name", ["mix", "dpo", "sft", "rwr"])
def test_credit_of_its_own_leaves_no_choice_of_advantages(name):
    message = refused(algorithm=name, train__advantage="rloo")
    assert message == f"train.advantage='rloo' does not go with algorithm={name!r}{OWN_CREDIT}"


@pytest.mark.parametrize("name", ["dgpo", "dpo", "sft"])
def test_groups_of_one_have_nothing_to_compare(name):
    message = refused(algorithm=name, sample__num_image_per_prompt=1)
    assert message == (
        f"sample.num_image_per_prompt=1 must be at least 2 for algorithm={name!r}, which compares "
        "the samples of a group"
    )
    config = get_config()
    config.algorithm, config.sample.num_image_per_prompt = name, 2
    build_algorithm(config)


@pytest.mark.parametrize("name", ["grpo_guard", "dppo"])
def test_whole_trajectories_have_no_means_to_compare(name):
    message = refused(algorithm=name, **{f"{name}__ratio": "trajectory"})
    assert message == (
        f"{name}.ratio='trajectory' does not go with algorithm={name!r}, which measures how far "
        "single steps have moved; use 'step'"
    )


@pytest.mark.parametrize(("name", "weight"), [("grpo", "beta"), ("awm", "kl_beta")])
def test_a_target_needs_a_kl(name, weight):
    fields = {f"{name}__kl_target": 0.1, f"{name}__{weight}": 0.0}
    message = f"{name}.kl_target=0.1 needs a KL to move: set its weight above 0"
    assert refused(algorithm=name, **fields) == message


LEVELS = ": noise levels are those of the rollout; set it lower"


@pytest.mark.parametrize("name", FORWARD)
def test_no_more_times_than_steps(name):
    message = refused(algorithm=name, sample__num_steps=5, **{f"{name}__times": 6})
    assert message == f"{name}.times=6 must be at most sample.num_steps=5{LEVELS}"
    config = get_config()
    config.algorithm, config.sample.num_steps, config[name].times = name, 6, 6
    assert build_algorithm(config).losses_per_sample == 6


@pytest.mark.parametrize("name", FORWARD)
def test_no_more_times_than_steps_that_are_left(name):
    skipped = {f"{name}__skip_first": 1, f"{name}__skip_last": 4}
    message = refused(algorithm=name, **{f"{name}__times": 6}, **skipped)
    less = "sample.num_steps=10 less 5, of skip_first and skip_last"
    assert message == f"{name}.times=6 must be at most {less}{LEVELS}"


def test_mix_has_a_window_of_its_own():
    message = refused(algorithm="mix", sample__sde_window_size=2)
    assert message == (
        "sample.sde_window_size=2 does not go with algorithm='mix', which moves a window of its "
        "own; set mix.window_size"
    )


def test_a_window_for_each_group_needs_batches_of_one_group():
    fields = {"sample__sde_window_size": 1, "sample__sde_window_per": "group"}
    assert refused(**fields, sample__num_image_per_prompt=12) == (
        "sample.sde_window_per='group' needs batches of one group: sample.train_batch_size=8 must "
        "divide sample.num_image_per_prompt=12"
    )
    # the explored group holds whole batches, the trained one does not
    kept = {"sample__num_image_per_prompt": 16, "train__keep_best_worst": 2}
    message = refused(**fields, **kept)
    assert "sample.train_batch_size=8" in message
    assert "2 x train.keep_best_worst=2" in message


def test_gradients_of_rewards_are_of_pictures():
    message = refused(algorithm="leap", frames=5)
    assert message.startswith("frames=5 does not go with algorithm='leap', which takes gradients")


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
    if name == "opd":  # but for its teachers, of whom it needs one
        config.opd.update(teachers={"all": "a/b/c"}, start="model")
    check(config)
    algorithm = build_algorithm(config)
    assert type(algorithm) is ALGORITHMS[name]
    assert algorithm.losses_per_sample >= 1


class Plain(Algorithm):
    """A method that says nothing of itself."""


def test_a_method_that_says_nothing_samples_by_ode_and_trains_every_sample():
    plain = Plain(object(), Setup(update_samples=5))
    plain.check()
    assert plain.noisy_steps(np.random.default_rng(0), 0) == range(0)
    assert (plain.needs_reference, plain.trust, plain.samples_with_old(9)) == (False, None, False)
    assert (plain.trained_samples, plain.batch_count(2), plain.batches([7], 2)) == (5, 3, [7])
    trained = plain.has_gradient(torch.zeros(2))
    assert (trained.dtype, trained.tolist()) == (torch.bool, [True, True])
    assert list(plain.prepared(None, [7, 8])) == [(7, None), (8, None)]
    with pytest.raises(NotImplementedError):
        plain.loss(None, None, None, 0)
    assert plain.adapt({"train/kl": 1.0}) == {}
    plain.load_state_dict({"kl_weight": 2.0, "most_kl": 1.0})
    assert plain.state_dict() == {"kl_weight": 0.0, "most_kl": 0.0}


def test_a_method_is_known_by_its_name(monkeypatch):
    assert "" not in ALGORITHMS
    monkeypatch.setitem(ALGORITHMS, "plain", None)
    named = type("Named", (Plain,), {"name": "plain"})
    assert ALGORITHMS["plain"] is named


def test_credit_is_by_the_advantages_that_are_set():
    """Shares of the scores are .5, 0, 1; those of the judge count as they are, twice. Less 1.5."""
    rewards = {"judge": np.array([0.9, 0.5, 0.1]), "score": np.array([7.0, 3.0, 90.0])}
    weights = {"judge": 2.0, "score": 1.0}
    scored = Scored(rewards, np.zeros(3, int), weights, judged={"judge"})
    plain = Plain(object(), Setup(estimator="pairwise", scale="none"))
    np.testing.assert_allclose(plain.credit(scored), [0.8, -0.5, -0.3], atol=1e-12)


def test_of_no_sample_a_loss_has_the_same_columns():
    none = Loss(torch.ones(2), {"a": torch.ones(2)}).of_none()
    assert (none.per_sample.tolist(), none.columns["a"].tolist()) == ([], [])


@pytest.mark.parametrize(
    ("setup", "steps"),
    [
        ({"window_size": 2, "window_range": (3, 5)}, range(3, 5)),
        ({"timestep_fraction": 0.5}, range(4)),
    ],
)
def test_noisy_steps_are_those_of_the_setup(setup, steps):
    algorithm = method("grpo", {"num_steps": 8, **setup})
    assert algorithm.noisy_steps(np.random.default_rng(0), 0) == steps
    assert algorithm.losses_per_sample == len(steps)
