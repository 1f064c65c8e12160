"""Rules of `preferences`; tests/e2e/test_float64_equivalence.py trains given images."""

from dataclasses import replace

import pytest
import small_vlm
from algorithm_fixtures import small_policy
from PIL import Image
from user_errors import raises_user_error

from flow_grpo.api import build_config
from flow_grpo.config.command_line import expand_shorthand
from flow_grpo.data.preferences import DEFAULT_LAYOUT
from flow_grpo.data.prompts import Prompt
from flow_grpo.diffusion.config_checks import collect_config_warnings
from flow_grpo.diffusion.fields import DIFFUSION_SPEC, get_config
from flow_grpo.diffusion.given_images import GivenImages, GivenRow, load_given_data
from flow_grpo.diffusion.models import Size
from flow_grpo.diffusion.offline_plan import build_offline_plan, given_rows_per_update
from flow_grpo.diffusion.session import build_algorithm

SECTIONS = DIFFUSION_SPEC.freeze(get_config())


def offline(**fields):
    config = get_config()
    config.update_from_flattened_dict({"preferences.data": "pairs", "algorithm": "dpo", **fields})
    return config


def plan(rows: int, processes: int = 1, per_epoch: int = 0, batch: int = 8):
    preferences = replace(SECTIONS.preferences, data="pairs", per_epoch=per_epoch)
    train = replace(
        SECTIONS.train, batch_size=batch, gradient_accumulation_steps=1 if batch % 2 else 2
    )
    return build_offline_plan(train, preferences, processes, rows, images_per_row=2)


def test_an_epoch_has_as_many_whole_updates_as_the_data_fills():
    found = plan(rows=100, processes=3)
    assert (found.given_rows, found.updates_per_pass, found.given_samples_per_epoch) == (8, 4, 192)
    assert (found.samples, found.groups, found.samples_per_update) == (0, 0, 16)
    assert plan(rows=5, per_epoch=32).updates_per_pass == 4  # several passes per epoch
    smaller = plan(rows=100).with_smaller_batches()
    assert plan(rows=100).overrides_for(smaller) == (
        "--config.train.batch_size=4 --config.train.gradient_accumulation_steps=4"
    )


def test_what_does_not_divide_is_rejected_with_the_nearest_number():
    with raises_user_error("use 16 or 24", field="preferences.per_epoch", value=20):
        plan(rows=100, per_epoch=20)
    with raises_user_error("has 5 pairs", "of 8", field="preferences.data"):
        plan(rows=5)
    with raises_user_error("use 6", field="train.batch_size", value=5):
        plan(rows=100, batch=5).check_whole_groups("dpo")


def test_a_share_must_be_a_whole_number_of_pairs():
    assert given_rows_per_update(0.5, 8, 2) == 4
    assert given_rows_per_update(0.333, 8, 2) == 2
    assert given_rows_per_update(0.5, 3, 1) == 3
    with raises_user_error("use 0.2 or 0.3333", field="preferences.share", value=0.3):
        given_rows_per_update(0.3, 8, 2)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"algorithm": "grpo"}, "preferences.data"),
        ({"sample.num_image_per_prompt": 4}, "sample.num_image_per_prompt"),
        ({"sample.num_steps": 4}, "sample.num_steps"),
        ({"anchors.diversity": True}, "anchors.diversity"),
        ({"anchors.kl_gate": 0.5}, "anchors.kl_gate"),
        ({"dpo.kl_beta": 0.1, "dpo.kl_type": "gaussian"}, "dpo.kl_type"),
        ({"frames": 5}, "frames"),
        ({"preferences.data": "", "preferences.density": "uniform"}, "preferences.density"),
        ({"preferences.share": 0.5, "preferences.per_epoch": 8}, "preferences.per_epoch"),
    ],
)
def test_settings_without_effect_on_given_images_are_rejected(fields, field):
    with raises_user_error(field=field):
        build_algorithm(offline(**fields))


def test_settings_of_an_online_preset_are_rejected_at_once():
    settings = {"sample.num_steps": 4, "sample.sde_window_size": 2}
    with raises_user_error(*settings):
        build_algorithm(offline(**settings))


@pytest.mark.parametrize("algorithm", ["dpo", "ipo", "kto", "sft"])
def test_the_small_preset_trains_one_noise_level_with_each_method(algorithm):
    """Settings that the methods share are no reason for a warning."""
    config = build_config("", None, None, None, "tiny_offline", {"algorithm": algorithm})
    settings = DIFFUSION_SPEC.freeze(config)
    assert settings.preferences.data
    assert settings.algorithm_settings.times == 1
    assert not collect_config_warnings(settings)
    other = "ipo" if algorithm == "kto" else "kto"
    config[other].times = 3
    [line] = collect_config_warnings(DIFFUSION_SPEC.freeze(config))
    assert line.startswith(f"{other}.times=3 ")


def test_the_section_may_be_given_as_its_data():
    config = build_config("", None, None, None, "tiny_offline", {"preferences": "pairs"})
    assert config.preferences.data == "pairs"
    assert expand_shorthand("--config.preferences=pairs") == "--config.preferences.data=pairs"


@pytest.mark.parametrize(("pairs", "warns"), [(1024, False), (1025, True)])
def test_a_set_that_does_not_fit_into_the_cache_is_reported(caplog, pairs, warns):
    row = GivenRow(Prompt("a"), ("chosen.png", "rejected.png"), (1.0, -1.0))
    GivenImages([row] * pairs, small_policy(), seed=0)
    assert ("prompt_cache" in caplog.text) == warns


def test_every_pass_uses_each_pair_once(monkeypatch):
    """Passes of 7 pairs go on across the epochs of 2 updates x 2 processes x 2 pairs."""
    policy = small_policy()
    monkeypatch.setattr(policy.adapter, "source_size", Size(16, 24))
    image = small_vlm.encode_image(Image.new("RGB", (24, 16)))
    rows = [GivenRow(Prompt("a"), (image, image), (i, -i)) for i in range(1, 8)]
    given, epochs = GivenImages(rows, policy, seed=0), plan(7, 2, per_epoch=8, batch=2)
    used = []
    for epoch in range(7):
        batches = [
            batch
            for update in range(2)
            for process in range(2)
            for batch in given.batches(epochs, epoch, update, process)
        ]
        assert [index for batch in batches for index in batch.index] == [*range(16)]
        assert [group for batch in batches for group in batch.group[::2]] == [*range(8)]
        assert all((batch.credit[::2] == -batch.credit[1::2]).all() for batch in batches)
        used += [credit for batch in batches for credit in batch.credit[::2].tolist()]
    passes = [used[i : i + 7] for i in range(0, len(used), 7)]
    assert all(sorted(each) == [*range(1, 8)] for each in passes)
    assert len({*map(tuple, passes)}) == 8


@pytest.mark.parametrize("algorithm", ["dpo", "kto"])
def test_data_of_another_kind_is_rejected(tmp_path, algorithm):
    """A liked image is no pair, and not both kinds; sft takes it."""
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "image": "a.png", "liked": 1}\n')
    config = offline(algorithm=algorithm)
    with raises_user_error(field="preferences.data", value=str(tmp_path)):
        load_given_data(str(tmp_path), build_algorithm(config), DEFAULT_LAYOUT)
    sft = build_algorithm(offline(algorithm="sft"))
    [row] = load_given_data(str(tmp_path), sft, DEFAULT_LAYOUT).rows
    assert (row.prompt.prompt, row.credit) == ("a", (1.0,))
