"""Names of Flow-GRPO either work here or are rejected with their replacement."""

import re
import sys

import pytest
from ml_collections import ConfigDict
from runner import ROOT
from user_errors import raises_user_error

from flow_grpo.config import migration, overrides
from flow_grpo.config.config_dicts import iter_config_fields
from flow_grpo.diffusion import presets
from flow_grpo.diffusion.config_checks import check_config
from flow_grpo.diffusion.fields import DIFFUSION_SPEC, get_config
from flow_grpo.errors import UserError

# All settings in the configs of its repository.
GENERAL = str.split(
    "run_name debug num_epochs resume_from seed logdir save_freq eval_freq num_checkpoint_limit "
    "mixed_precision allow_tf32 use_lora dataset resolution height width frames diffusion_loss "
    "activation_checkpointing fsdp_optimizer_offload prompt_fn prompt_fn_kwargs reward_fn save_dir "
    "per_prompt_stat_tracking pretrained.model pretrained.revision"
)
SAMPLE = str.split(
    "num_steps eval_num_steps guidance_scale eval_guidance_scale batch_size train_batch_size "
    "num_image_per_prompt test_batch_size num_batches_per_epoch global_std noise_level same_latent "
    "sde_window_size sde_window_range sde_type solver kl_reward sample_time_per_prompt "
    "train_num_steps mini_num_image_per_prompt deterministic"
)
TRAIN = str.split(
    "batch_size use_8bit_adam learning_rate adam_beta1 adam_beta2 adam_weight_decay adam_epsilon "
    "gradient_accumulation_steps max_grad_norm num_inner_epochs cfg adv_clip_max clip_range "
    "clip_range_lt clip_range_gt timestep_shift timestep_fraction beta lora_path ema algorithm "
    "ref_update_step sft sft_batch_size"
)
FIELDS = [*GENERAL, *(f"sample.{n}" for n in SAMPLE), *(f"train.{n}" for n in TRAIN)]
OURS = set(dict(iter_config_fields(get_config(), closed=())))


@pytest.mark.parametrize("name", FIELDS)
def test_a_setting_of_flow_grpo_is_known_or_rejected_with_a_hint(name):
    if name in OURS:
        assert not migration.field_hint(name)
        return
    with raises_user_error(repr(name), migration.field_hint(name)):
        overrides.load_checked_config(
            ["train.py", f"--config={ROOT}/config/base.py", f"--config.{name}=1"], DIFFUSION_SPEC
        )


def test_hints_name_existing_settings():
    assert set(migration.RENAMED_FIELDS.values()) <= OURS
    assert not OURS & (migration.RENAMED_FIELDS.keys() | migration.UNSUPPORTED_FIELDS.keys())
    assert set(migration.RENAMED_PRESETS.values()) <= presets.PRESETS.keys()
    assert set(FIELDS) >= migration.RENAMED_FIELDS.keys() | migration.UNSUPPORTED_FIELDS.keys()
    named = {
        f: re.findall(r"\b(?:train|sample|anchors)\.\w+", h)
        for f, h in migration.UNSUPPORTED_FIELDS.items()
    }
    assert {field for fields in named.values() for field in fields} <= OURS
    assert named["train.ref_update_step"] == ["anchors.reset_epochs"]
    assert named["train.sft"] == ["anchors.data", "anchors.data_weight"]


def test_a_config_file_gets_the_same_hints():
    config = get_config()
    config.resume_from, config.train.clip_range_lt = "auto", 1e-4
    config.prompt_fn = "geneval"
    config.per_prompt_stat_tracking = True
    with pytest.raises(UserError) as error:
        check_config(config)
    for field in ("resume_from", "train.clip_range_lt", "per_prompt_stat_tracking"):
        assert f"{field} ({migration.field_hint(field)})" in str(error.value)
    assert migration.OLD_NAME_MESSAGE.format("prompt_fn", "geneval") in str(error.value)
    assert str(error.value).endswith(
        "config.prompt_fn = 'metadata'; config.resume = 'auto'; "
        "config.train.clip_range_low = 0.0001"
    )


def test_all_names_on_the_command_line_are_reported_with_the_corrected_command(monkeypatch):
    words = ["--config.save_dir=logs/a b", "--config.prompt_fn=geneval", "--config.debug=True"]
    argv = ["scripts/train.py", f"--config={ROOT}/config/base.py", *words, "--config.seed=3"]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", ["python", *argv])
    with pytest.raises(UserError) as error:
        overrides.load_checked_config(argv, DIFFUSION_SPEC)
    assert f"'save_dir'; {migration.field_hint('save_dir')}; prompt_fn=geneval" in str(error.value)
    assert str(error.value).endswith(
        f"python scripts/train.py --config={ROOT}/config/base.py --config.logdir="
        '"logs/a b" --config.prompt_fn=metadata --config.seed=3'
    )


def test_a_setting_given_by_both_names_must_be_omitted_once(monkeypatch):
    config = presets.get_config("general_ocr_sd3_1gpu")
    config.sample.train_batch_size, config.sample.batch_size = 9, 8
    hint = migration.field_hint("sample.batch_size", chosen={"sample.train_batch_size": 9})
    assert "sample.train_batch_size" in hint
    assert "9" in hint
    with raises_user_error(f"sample.batch_size ({hint})"):
        check_config(config)
    words = ["--config.sample.batch_size=8", "--config.sample.train_batch_size=9"]
    argv = ["scripts/train.py", f"--config={ROOT}/config/base.py", *words, "--config.save_dir=a"]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", ["python", *argv])
    with pytest.raises(UserError, match=r"'sample\.batch_size'; omit it") as error:
        overrides.load_checked_config(argv, DIFFUSION_SPEC)
    assert str(error.value).endswith("py --config.sample.train_batch_size=9 --config.logdir=a")


@pytest.mark.parametrize("name", migration.PROMPT_FNS)
def test_prompt_functions_are_rejected_with_ours(name):
    config = get_config()
    config.prompt_fn = name
    with raises_user_error(f"prompt_fn={name} ") as error:
        check_config(config)
    assignment = str(error.value).rpartition("; write ")[2]
    assert assignment == f"config.prompt_fn = {migration.PROMPT_FNS[name]!r}"
    config.prompt_fn = migration.PROMPT_FNS[name]
    check_config(config)


CLIP = "openai/clip-vit-large-patch14"


@pytest.mark.parametrize("field", ["reward_fn", "eval_reward_fn"])
@pytest.mark.parametrize(
    ("theirs", "ours", "options"),
    [
        ("video_ocr", "ocr", {"frames": "mean of 4"}),
        ("image_similarity", "keep_source", {"model": CLIP}),
    ],
)
def test_rewards_are_rejected_with_ours(field, theirs, ours, options):
    config = get_config()
    config[field] = ConfigDict({theirs: 1.0})
    with pytest.raises(UserError) as error:
        check_config(config)
    assert str(error.value).endswith(
        f"; write config.{field} = {{{ours!r}: 1.0}}; "
        f"config.reward_options = { ({ours: options})!r}"
    )
    assert migration.OLD_NAME_MESSAGE.format(field, {theirs: 1.0}) in str(error.value)
    config.custom_rewards[theirs] = "my_module:my_reward"
    check_config(config)


@pytest.mark.parametrize("name", migration.RENAMED_PRESETS)
def test_presets_are_rejected_with_ours(name):
    ours = f"{migration.RENAMED_PRESETS[name]}_8gpu"
    with raises_user_error(ours, field="preset", value=f"{name}_8gpu"):
        presets.get_config(f"{name}_8gpu")
    presets.get_config(ours)


def test_the_migration_guide_lists_every_name():
    guide = (ROOT / "docs/migrating.md").read_text("utf-8")
    rewards, functions = migration.RENAMED_REWARDS, migration.PROMPT_FNS
    for name in (*FIELDS, *rewards, *functions, *migration.RENAMED_PRESETS):
        assert f"`{name}`" in guide, name
    for theirs, ours in migration.RENAMED_FIELDS.items():
        [row] = [line for line in guide.splitlines() if line.startswith(f"| `{theirs}` |")]
        assert f"`{ours}`" in row
