"""Settings without effect are rejected; scripts/ineffective_settings.py finds them."""

from dataclasses import fields

import ineffective_settings
import pytest
from algorithm_fixtures import METHODS
from config_checks import build, rejection_message
from ineffective_settings import (
    ALGORITHM_BASE,
    TRIED_VALUES,
    UNTRIED_FIELDS,
    Setting,
    Trials,
    settings_to_try,
    try_all_pairs,
)
from user_errors import raises_user_error

from flow_grpo.config.config_dicts import FREE_FORM_FIELDS
from flow_grpo.diffusion.algorithms import ALGORITHMS
from flow_grpo.diffusion.config_checks import check_config, check_guidance_gradient
from flow_grpo.diffusion.fields import get_config
from flow_grpo.diffusion.models.flux import FluxAdapter
from flow_grpo.diffusion.models.sd3 import SD3Adapter
from flow_grpo.diffusion.models.z_image import ZImageAdapter
from flow_grpo.untrusted_files import flatten_fields

FORWARD = ["nft", "awm", "ram", "leap", "dgpo", "dpo", "sft", "rwr"]
OWN_CREDIT = ["mix", "leap", "dpo", "sft", "rwr"]
CONDITIONAL = {"field": "train.guidance_gradient", "value": "conditional"}


@pytest.mark.parametrize("name", FORWARD)
def test_a_shared_latent_needs_stochastic_steps(name):
    message = rejection_message(algorithm=name, sample__same_latent=True)
    assert message.startswith("sample.same_latent=True ")
    assert f"algorithm={name!r}" in message


@pytest.mark.parametrize(
    ("changed", "start"),
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
def test_noise_settings_have_no_effect_on_deterministic_rollouts(name, changed, start):
    message = rejection_message(algorithm=name, **changed)
    why = f"no effect with algorithm={name!r}, which samples without noise; reset"
    assert message.startswith(f"{start} {why}")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"sample__sde_window_range": (1, 4), "sample__sde_window_per": "batch"},
            "sample.sde_window_range=(1, 4), sample.sde_window_per='batch' have no effect with "
            "sample.sde_window_size=0; reset them to (0, 5), 'epoch'",
        ),
        (
            {"sample__sde_window_size": 2, "train__timestep_fraction": 0.5},
            "train.timestep_fraction=0.5 has no effect with sample.sde_window_size=2; reset it to "
            "1.0",
        ),
        (
            {"algorithm": "mix", "train__timestep_fraction": 0.5},
            "train.timestep_fraction=0.5 has no effect with algorithm='mix', which has its own "
            "moving window; reset it to 1.0",
        ),
        (
            {"sample__solver": "dpm2"},
            "sample.solver='dpm2' has no effect with noise on all steps but the last; reset it to "
            "'euler'",
        ),
        (
            {"train__advantage": "rloo", "sample__global_std": False},
            "sample.global_std=False has no effect with train.advantage='rloo'; reset it to True",
        ),
        (
            {"train__beta": 0.0, "train__kl_type": "gaussian"},
            "grpo.kl_type='gaussian' has no effect with a KL weight of 0; reset it to 'flow_grpo'",
        ),
        (
            {"algorithm": "nft", "nft__kl_beta": 0.0, "nft__kl_guidance": 4.5},
            "nft.kl_guidance=4.5 has no effect with a KL weight of 0; reset it to None",
        ),
        (
            {
                "algorithm": "mix",
                "mix__clip_range": 0.1,
                "mix__clip_range_low": 0.1,
                "mix__clip_range_high": 0.2,
            },
            "mix.clip_range=0.1 has no effect with both mix.clip_range_low and "
            "mix.clip_range_high; reset it to 0.0001",
        ),
        (
            {
                "algorithm": "nft",
                "nft__old_max_decay": 0.0,
                "nft__old_rate": 0.2,
                "nft__old_start": 3,
            },
            "nft.old_rate=0.2, nft.old_start=3 have no effect with nft.old_max_decay=0.0; "
            "reset them to 0.001, 0",
        ),
        (
            {"algorithm": "dgpo", "dgpo__old_max_decay": 0.0, "dgpo__old_after": 0},
            "dgpo.old_after=0 has no effect with dgpo.old_max_decay=0.0; reset it to 200",
        ),
        (
            {"algorithm": "dpo", "dpo__noise_per": "group"},
            "dpo.noise_per='group' has no effect with algorithm='dpo', which compares samples at "
            "the same noise; reset it to 'sample'",
        ),
        (
            {"algorithm": "awm", "awm__old_max_decay": 0.5, "awm__old_rate": 0.0},
            "awm.old_max_decay=0.5 has no effect with awm.old_rate=0.0; reset it to 0.3",
        ),
        (
            {"resolution": 64, "height": 32, "width": 96},
            "resolution=64 has no effect with height=32 and width=96; reset it to 512",
        ),
    ],
)
def test_a_setting_without_effect_is_rejected(changed, message):
    assert rejection_message(**changed) == message


@pytest.mark.parametrize("name", OWN_CREDIT)
def test_global_std_has_no_effect_on_algorithms_with_their_own_credit(name):
    message = rejection_message(algorithm=name, sample__global_std=False)
    assert message.startswith(f"sample.global_std=False has no effect with algorithm={name!r}")


@pytest.mark.parametrize(
    "changed",
    [
        {"sample__same_latent": True},
        {"sample__sde_window_size": 2, "sample__sde_window_range": (1, 4)},
        {"sample__sde_window_size": 2, "sample__solver": "dpm2"},
        {"train__timestep_fraction": 0.5, "sample__solver": "dpm2"},
        {"train__advantage": "remax", "sample__solver": "dpm2"},  # baselines have no noise
        {"train__keep_best_worst": 2, "sample__solver": "dpm2"},  # nor do the candidates
        {"algorithm": "nft", "sample__solver": "dpm2"},
        {"algorithm": "nft", "nft__kl_type": "gaussian", "sample__noise_level": 0.5},
        {"algorithm": "dpo", "dpo__kl_type": "gaussian"},  # it is logged
        {
            "algorithm": "dgpo",
            "dgpo__kl_beta": 0.0,
            "dgpo__kl_guidance": 4.5,
        },  # it weights the samples
        {"algorithm": "mix", "sample__solver": "dpm2"},
        {"train__advantage": "pairwise", "sample__global_std": False},
        {"train__clip_range": 0.1, "train__clip_range_low": 0.1},
        {"algorithm": "awm", "awm__old_max_decay": 0.0, "awm__old_rate": 0.0},
        {"resolution": 64, "height": 32},
        {"resolution": 0, "height": 32, "width": 96},
    ],
)
def test_a_setting_with_an_effect_is_accepted(changed):
    build(**changed)


@pytest.mark.parametrize(
    ("model", "scale", "guided"),
    [
        *((SD3Adapter, 1.0, False), (SD3Adapter, 1.5, True), (FluxAdapter, 3.5, False)),
        *((ZImageAdapter, 0.0, False), (ZImageAdapter, 1.0, True)),
    ],
)
def test_conditional_gradients_need_guidance_in_two_passes(model, scale, guided):
    config = get_config()
    config.sample.guidance_scale, config.train.guidance_gradient = scale, "conditional"
    if guided:
        check_guidance_gradient(check_config(config), model)
        return
    with raises_user_error(f"sample.guidance_scale={scale}", **CONDITIONAL):
        check_guidance_gradient(check_config(config), model)


def test_conditional_gradients_need_guidance_of_the_trained_velocity():
    config = get_config()
    config.algorithm, config.train.guidance_gradient = "dgpo", "conditional"
    config.sample.guidance_scale, config.dgpo.train_guidance = 4.5, 1.0
    with raises_user_error("dgpo.train_guidance=1.0", **CONDITIONAL):
        check_guidance_gradient(check_config(config), SD3Adapter)
    config.sample.guidance_scale, config.dgpo.train_guidance = 1.0, 4.5
    check_guidance_gradient(check_config(config), SD3Adapter)


def test_every_setting_is_tried_or_excluded_with_a_reason():
    known = {name for name, _ in flatten_fields(get_config().to_dict())}
    own = {name for name in known if name.partition(".")[0] in ALGORITHMS}
    left_out = {name for names in UNTRIED_FIELDS.values() for name in names.split()}
    sections = {*FREE_FORM_FIELDS} & {*get_config()}
    fields = {name if (s := name.partition(".")[0]) not in sections else s for name in known - own}
    assert not left_out & set(TRIED_VALUES)
    assert left_out | set(TRIED_VALUES) == fields | sections
    assert {name.partition(".")[0] for name in own} == set(METHODS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_setting_of_an_algorithm_is_tried_with_another_value(name):
    settings = [f for f in fields(ALGORITHMS[name].Settings) if "alias_of" not in f.metadata]
    base = {f.name: f.default for f in settings} | ALGORITHM_BASE.get(name, {})
    tried = [s for s in settings_to_try(name) if s.name.startswith(f"{name}.")]
    assert {s.name.removeprefix(f"{name}.") for s in tried} == set(base)
    for setting in tried:
        assert setting.value is not None
        assert setting.value != base[setting.name.removeprefix(f"{name}.")], setting


def test_the_script_finds_settings_without_effect_alone_and_in_pairs(tmp_path, monkeypatch):
    """It compares the weights after runs of scripts/train.py."""
    monkeypatch.setattr(ineffective_settings, "DEFAULT_ALGORITHM", "rwr")
    monkeypatch.setattr(
        ineffective_settings,
        "EXPECTED_INEFFECTIVE",
        [("train.lora_rank=3", "use_lora=*", "no LoRA")],
    )
    settings = [
        *(Setting("use_lora", False), Setting("train.lora_rank", 3)),
        *(Setting("sample.same_latent", True), Setting("train.gradient_checkpointing", True)),
    ]
    lines = []
    counts = try_all_pairs(Trials(tmp_path), "rwr", settings, lines.append)
    rejected, single, pair = lines
    assert rejected.startswith("rwr: sample.same_latent=True is rejected: sample.same_latent=True")
    assert single.startswith("rwr: train.gradient_checkpointing=True ")
    assert "with" not in single
    assert pair.startswith("rwr: train.lora_rank=3 ")
    assert pair.endswith("with use_lora=False: no LoRA")
    assert vars(counts) == {
        "singles": 4,
        "pairs": 6,
        "rejected": 4,
        "expected": 1,
        "unexpected": 1,
    }
