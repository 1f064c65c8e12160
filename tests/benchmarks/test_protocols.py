"""The table of protocols, and the deviations of an evaluation from it."""

from dataclasses import replace

import pytest
from user_errors import raises_user_error

from flow_grpo.benchmarks.formulas import FORMULAS
from flow_grpo.benchmarks.protocol import (
    Settings,
    benchmark_names,
    find_deviations,
    get_protocol,
    scorer_infos,
)
from flow_grpo.benchmarks.session import Overrides, select_scorers
from flow_grpo.config.presets import check_preset_exists
from flow_grpo.diffusion.models import ADAPTERS
from flow_grpo.diffusion.presets import PRESETS as DIFFUSION_PRESETS
from flow_grpo.rewards.registry import IMAGE_REWARDS, REWARDS, TEXT_REWARDS
from flow_grpo.vlm.presets import PRESETS as VLM_PRESETS

PROTOCOLS = [get_protocol(name) for name in benchmark_names()]
FAMILIES = {each.__module__.rpartition(".")[2] for each in ADAPTERS.values()}


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=benchmark_names())
def test_every_protocol_is_complete(protocol):
    source = protocol.prompts
    assert protocol.formula in FORMULAS
    assert {*protocol.sampling} <= {"default", *FAMILIES}
    kind, _, repository = source.source.partition(" ")
    assert (kind, bool(repository)) in {("bundled", False), ("github", True), ("hub", True)}
    if kind == "github":
        assert len(source.sha256) == 64 or protocol.name == "mathverse"  # pinned by its commit
        assert len(source.commit) == 40
    presets = DIFFUSION_PRESETS if protocol.trainer == "diffusion" else VLM_PRESETS
    if protocol.preset:
        check_preset_exists(protocol.preset, presets)
    rewards = IMAGE_REWARDS if protocol.trainer == "diffusion" else TEXT_REWARDS
    assert {*protocol.scorers} - {*protocol.missing_scorers()} <= {*rewards}


def test_a_scorer_is_built_in_or_the_table_says_why_not():
    for name, info in scorer_infos().items():
        assert (name in REWARDS.paths) == (not info.missing), name


def test_deviations_name_each_setting_with_both_values():
    protocol = get_protocol("geneval")
    used = Settings(
        prompts=protocol.prompts.count,
        samples=4,
        seed=protocol.seed,
        sampling=protocol.sampling_of("sd3"),
        scorers=protocol.scorers,
        prompts_sha256=protocol.prompts.sha256,
    )
    assert find_deviations(protocol, used, "sd3") == []
    other = replace(used, prompts=12, sampling=replace(used.sampling, steps=8))
    found = {
        each.setting: (each.protocol, each.used) for each in find_deviations(protocol, other, "sd3")
    }
    assert found == {"prompts": (553, 12), "steps": (40, 8)}
    # a family with settings of its own deviates with those of another
    changed = {each.setting for each in find_deviations(protocol, used, "flux")}
    assert changed == {"steps", "guidance"}


def test_scorers_that_are_not_available_are_left_out_or_reported():
    available = dict.fromkeys(IMAGE_REWARDS, "")
    less = {name: "" for name in available if name != "hpsv3"}
    chosen = select_scorers(get_protocol("drawbench"), Overrides(), less)
    assert [*chosen] == ["pickscore", "hpsv2", "aesthetic", "imagereward"]
    chosen = select_scorers(get_protocol("drawbench"), Overrides(), available)
    assert [*chosen] == ["pickscore", "hpsv2", "hpsv3", "aesthetic", "imagereward"]
    for name in ("dpg", "wise", "t2i_compbench", "geneval_official"):
        with raises_user_error("custom_rewards", field="scorer", value=name):
            select_scorers(get_protocol(name), Overrides(), available)
    own = select_scorers(get_protocol("wise"), Overrides(), {"wise": "custom a:b"})
    assert own == {"wise": {}}
    assert select_scorers(get_protocol("geneval2"), Overrides(), available) == {"geneval2": {}}
    with raises_user_error(field="scorer", value="hpsv3"):
        select_scorers(get_protocol("drawbench"), Overrides(scorers=["hpsv3"]), less)


def test_an_unknown_benchmark_is_rejected_with_a_suggestion():
    with raises_user_error("geneval2", field="NAME", value="geneval_2"):
        get_protocol("geneval_2")
