"""Settings that others make void are refused in one line, and the script that looks for them."""

from dataclasses import fields

import pytest
import void_settings
from methods import METHODS
from void_settings import NOT_TRIED, OWN_BASE, TRIED, Setting, Trials, settings_of, try_all

from flow_grpo.config.trade import OPEN_FIELDS
from flow_grpo.draw.algorithms import ALGORITHMS
from flow_grpo.draw.check import check, check_gradient
from flow_grpo.draw.fields import get_config
from flow_grpo.draw.models.flux import FluxAdapter
from flow_grpo.draw.models.sd3 import SD3Adapter
from flow_grpo.draw.models.z_image import ZImageAdapter
from flow_grpo.draw.session import build_algorithm
from flow_grpo.errors import UserError
from flow_grpo.files import dotted

FORWARD = ["nft", "awm", "ram", "leap", "dgpo", "dpo", "sft", "rwr"]
OWN_CREDIT = ["mix", "leap", "dpo", "sft", "rwr"]


def build(**changed) -> None:
    config = get_config()
    config.update_from_flattened_dict({k.replace("__", "."): v for k, v in changed.items()})
    check(config)
    build_algorithm(config)


def refusal(**changed) -> str:
    with pytest.raises(UserError) as caught:
        build(**changed)
    return str(caught.value)


@pytest.mark.parametrize("name", FORWARD)
def test_one_noise_for_a_group_needs_noise_in_the_steps(name):
    assert refusal(algorithm=name, sample__same_latent=True) == (
        f"sample.same_latent=True does not go with algorithm={name!r}, which samples without "
        "noise: all samples of a group would be the same; set it to False"
    )


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"train__timestep_fraction": 0.5}, "train.timestep_fraction=0.5 has"),
        ({"sample__sde_window_range": (1, 4)}, "sample.sde_window_range=(1, 4) has"),
        (
            {"sample__sde_type": "cps", "sample__noise_level": 0.8},
            "sample.sde_type='cps', sample.noise_level=0.8 have",
        ),
    ],
)
@pytest.mark.parametrize("name", FORWARD)
def test_what_is_about_noise_has_no_effect_without_it(name, changed, told):
    message = refusal(algorithm=name, **changed)
    why = f"no effect with algorithm={name!r}, which samples without noise; leave"
    assert message.startswith(f"{told} {why}")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"sample__sde_window_range": (1, 4), "sample__sde_window_per": "batch"},
            "sample.sde_window_range=(1, 4), sample.sde_window_per='batch' have no effect with "
            "sample.sde_window_size=0; leave them at (0, 5), 'epoch'",
        ),
        (
            {"sample__sde_window_size": 2, "train__timestep_fraction": 0.5},
            "train.timestep_fraction=0.5 has no effect with sample.sde_window_size=2; leave it at "
            "1.0",
        ),
        (
            {"algorithm": "mix", "train__timestep_fraction": 0.5},
            "train.timestep_fraction=0.5 has no effect with algorithm='mix', which moves a window "
            "of its own; leave it at 1.0",
        ),
        (
            {"sample__solver": "dpm2"},
            "sample.solver='dpm2' has no effect with noise on all steps but the last; leave it at "
            "'euler'",
        ),
        (
            {"train__advantage": "rloo", "sample__global_std": False},
            "sample.global_std=False has no effect with train.advantage='rloo'; leave it at True",
        ),
        (
            {"train__beta": 0.0, "train__kl_type": "gaussian"},
            "grpo.kl_type='gaussian' has no effect with no KL: its weight is 0; leave it at "
            "'flow_grpo'",
        ),
        (
            {"algorithm": "nft", "nft__kl_beta": 0.0, "nft__kl_guidance": 4.5},
            "nft.kl_guidance=4.5 has no effect with no KL: its weight is 0; leave it at None",
        ),
        (
            {
                "algorithm": "mix",
                "mix__clip_range": 0.1,
                "mix__clip_range_low": 0.1,
                "mix__clip_range_high": 0.2,
            },
            "mix.clip_range=0.1 has no effect with both mix.clip_range_low and "
            "mix.clip_range_high; leave it at 0.0001",
        ),
        (
            {"algorithm": "nft", "nft__old_most": 0.0, "nft__old_rate": 0.2, "nft__old_start": 3},
            "nft.old_rate=0.2, nft.old_start=3 have no effect with nft.old_most=0.0; leave them at "
            "0.001, 0",
        ),
        (
            {"algorithm": "dgpo", "dgpo__old_most": 0.0, "dgpo__old_after": 0},
            "dgpo.old_after=0 has no effect with dgpo.old_most=0.0; leave it at 200",
        ),
        (
            {"algorithm": "dpo", "dpo__noise_per": "group"},
            "dpo.noise_per='group' has no effect with algorithm='dpo', which compares samples at "
            "one noise; leave it at 'sample'",
        ),
        (
            {"algorithm": "awm", "awm__old_most": 0.5, "awm__old_rate": 0.0},
            "awm.old_most=0.5 has no effect with awm.old_rate=0.0; leave it at 0.3",
        ),
        (
            {"resolution": 64, "height": 32, "width": 96},
            "resolution=64 has no effect with height=32 and width=96; leave it at 512",
        ),
    ],
)
def test_a_setting_without_effect_is_refused(changed, message):
    assert refusal(**changed) == message


@pytest.mark.parametrize("name", OWN_CREDIT)
def test_credit_of_its_own_is_divided_by_no_deviation_of_the_batch(name):
    message = refusal(algorithm=name, sample__global_std=False)
    assert message.startswith(f"sample.global_std=False has no effect with algorithm={name!r}")


@pytest.mark.parametrize(
    "changed",
    [
        {"sample__same_latent": True},
        {"sample__sde_window_size": 2, "sample__sde_window_range": (1, 4)},
        {"sample__sde_window_size": 2, "sample__solver": "dpm2"},
        {"train__timestep_fraction": 0.5, "sample__solver": "dpm2"},
        {"train__advantage": "remax", "sample__solver": "dpm2"},  # baselines have no noise
        {"algorithm": "nft", "sample__solver": "dpm2"},
        {"algorithm": "nft", "nft__kl_type": "gaussian", "sample__noise_level": 0.5},
        {"algorithm": "dpo", "dpo__kl_type": "gaussian"},  # it is logged
        {"algorithm": "dgpo", "dgpo__kl_beta": 0.0, "dgpo__kl_guidance": 4.5},  # in its weights
        {"algorithm": "mix", "sample__solver": "dpm2"},
        {"train__advantage": "pairwise", "sample__global_std": False},
        {"train__clip_range": 0.1, "train__clip_range_low": 0.1},
        {"algorithm": "awm", "awm__old_most": 0.0, "awm__old_rate": 0.0},
        {"resolution": 64, "height": 32},
        {"resolution": 0, "height": 32, "width": 96},
    ],
)
def test_a_setting_that_acts_is_taken(changed):
    build(**changed)


@pytest.mark.parametrize(
    ("model", "scale", "guided"),
    [
        *((SD3Adapter, 1.0, False), (SD3Adapter, 1.5, True), (FluxAdapter, 3.5, False)),
        *((ZImageAdapter, 0.0, False), (ZImageAdapter, 1.0, True)),
    ],
)
def test_half_a_gradient_needs_guidance_in_two_passes(model, scale, guided):
    config = get_config()
    config.sample.guidance_scale, config.train.guidance_gradient = scale, "conditional"
    if guided:
        check_gradient(config, model)
        return
    with pytest.raises(UserError, match=f"no effect with sample.guidance_scale={scale}, where"):
        check_gradient(config, model)


def test_half_a_gradient_needs_guidance_of_what_is_trained():
    config = get_config()
    config.algorithm, config.train.guidance_gradient = "dgpo", "conditional"
    config.sample.guidance_scale, config.dgpo.train_guidance = 4.5, 1.0
    with pytest.raises(UserError, match=r"with dgpo.train_guidance=1.0, where this"):
        check_gradient(config, SD3Adapter)
    config.sample.guidance_scale, config.dgpo.train_guidance = 1.0, 4.5
    check_gradient(config, SD3Adapter)


def test_every_field_is_tried_or_has_a_reason_why_not():
    known = {name for name, _ in dotted(get_config().to_dict())}
    own = {name for name in known if name.partition(".")[0] in ALGORITHMS}
    left_out = {name for names in NOT_TRIED.values() for name in names.split()}
    sections = {*OPEN_FIELDS} & {*get_config()}
    fields = {name if (s := name.partition(".")[0]) not in sections else s for name in known - own}
    assert not left_out & set(TRIED)
    assert left_out | set(TRIED) == fields | sections
    assert {name.partition(".")[0] for name in own} == set(METHODS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_setting_of_a_method_is_tried_with_a_value_other_than_the_base(name):
    base = {f.name: f.default for f in fields(ALGORITHMS[name].Settings)} | OWN_BASE.get(name, {})
    tried = [s for s in settings_of(name) if s.name.startswith(f"{name}.")]
    assert {s.name.removeprefix(f"{name}.") for s in tried} == set(base)
    for setting in tried:
        assert setting.value is not None
        assert setting.value != base[setting.name.removeprefix(f"{name}.")], setting


def test_the_script_finds_what_is_void_alone_and_beside_another(tmp_path, monkeypatch):
    """By the weights that runs of scripts/train.py end with."""
    monkeypatch.setattr(void_settings, "ONE", "rwr")
    monkeypatch.setattr(void_settings, "RIGHT", [("train.lora_rank=3", "use_lora=*", "no LoRA")])
    settings = [
        *(Setting("use_lora", False), Setting("train.lora_rank", 3)),
        *(Setting("sample.same_latent", True), Setting("train.gradient_checkpointing", True)),
    ]
    lines = []
    counts = try_all(Trials(tmp_path), "rwr", settings, lines.append)
    assert [line.partition(" does not")[0] for line in lines] == [
        "rwr: sample.same_latent=True is refused: sample.same_latent=True",
        "rwr: train.gradient_checkpointing=True is void alone: ",
        "rwr: train.lora_rank=3 is void beside use_lora=False: no LoRA",
    ]
    assert vars(counts) == {"singles": 4, "pairs": 6, "refused": 4, "right": 1, "wrong": 1}
