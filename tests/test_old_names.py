"""Coming from Flow-GRPO: each of its names works here, or one line says what to write instead."""

import re
import sys

import pytest
from ml_collections import ConfigDict
from runner import ROOT

from flow_grpo.config import old_names, overrides
from flow_grpo.config.trade import all_fields
from flow_grpo.draw import presets
from flow_grpo.draw.check import check
from flow_grpo.draw.fields import DRAW, get_config
from flow_grpo.errors import UserError

# all that the configs of its repository set
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
OURS = set(dict(all_fields(get_config(), closed=())))


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_of_flow_grpos_is_known_or_told_what_to_use(name):
    if name in OURS:
        assert not old_names.hint(name)
        return
    with pytest.raises(UserError) as error:
        overrides.check_names(
            ["train.py", f"--config={ROOT}/config/base.py", f"--config.{name}=1"], DRAW
        )
    told = str(error.value)
    assert told == f"unknown config key '{name}'; {old_names.hint(name)}"
    assert "\n" not in told


def test_what_is_told_can_be_followed():
    assert set(old_names.RENAMED.values()) <= OURS
    assert not OURS & (old_names.RENAMED.keys() | old_names.GONE.keys())
    assert set(old_names.PRESETS.values()) <= presets.PRESETS.keys()
    assert set(FIELDS) >= old_names.RENAMED.keys() | old_names.GONE.keys()
    named = {
        f: re.findall(r"\b(?:train|sample|anchors)\.\w+", h) for f, h in old_names.GONE.items()
    }
    assert {field for fields in named.values() for field in fields} <= OURS
    assert named["train.ref_update_step"] == ["anchors.reset_epochs"]
    assert named["train.sft"] == ["anchors.data", "anchors.data_weight"]


def test_a_config_file_gets_the_same_lines():
    config = get_config()
    config.resume_from, config.train.clip_range_lt = "auto", 1e-4
    config.prompt_fn = "geneval"
    config.per_prompt_stat_tracking = True
    with pytest.raises(UserError) as error:
        check(config)
    for field in ("resume_from", "train.clip_range_lt", "per_prompt_stat_tracking"):
        assert f"{field} ({old_names.hint(field)})" in str(error.value)
    assert str(error.value).endswith(
        "; prompt_fn=geneval has a name of Flow-GRPO's; write config.prompt_fn = 'metadata'; "
        "config.resume = 'auto'; config.train.clip_range_low = 0.0001"
    )


def test_the_command_line_is_told_all_at_once_and_what_to_type(monkeypatch):
    words = ["--config.save_dir=logs/a b", "--config.prompt_fn=geneval", "--config.debug=True"]
    argv = ["scripts/train.py", f"--config={ROOT}/config/base.py", *words, "--config.seed=3"]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", ["python", *argv])
    with pytest.raises(UserError) as error:
        overrides.check_names(argv, DRAW)
    assert "'save_dir'; it is logdir here; prompt_fn=geneval has" in str(error.value)
    assert str(error.value).endswith(
        f"type python scripts/train.py --config={ROOT}/config/base.py --config.logdir="
        '"logs/a b" --config.prompt_fn=metadata --config.seed=3'
    )


def test_a_field_that_is_set_by_its_new_name_too_is_to_be_left_out(monkeypatch):
    config = presets.get_config("general_ocr_sd3_1gpu")
    config.sample.train_batch_size, config.sample.batch_size = 9, 8
    with pytest.raises(UserError) as error:
        check(config)
    told = "(leave it out: it is sample.train_batch_size here, which is 9)"
    assert str(error.value) == (
        f"the config does not fit: it has unknown fields: sample.batch_size {told}"
    )
    words = ["--config.sample.batch_size=8", "--config.sample.train_batch_size=9"]
    argv = ["scripts/train.py", f"--config={ROOT}/config/base.py", *words, "--config.save_dir=a"]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", ["python", *argv])
    with pytest.raises(UserError, match=r"'sample\.batch_size'; leave it out: it is") as error:
        overrides.check_names(argv, DRAW)
    assert str(error.value).endswith("py --config.sample.train_batch_size=9 --config.logdir=a")


@pytest.mark.parametrize("name", old_names.PROMPT_FNS)
def test_prompt_functions_are_told_ours(name):
    config = get_config()
    config.prompt_fn = name
    with pytest.raises(UserError, match=f"prompt_fn={name} has a name of Flow-GRPO's") as error:
        check(config)
    exec(str(error.value).rpartition("; write ")[2], {"config": config})
    check(config)


CLIP = "openai/clip-vit-large-patch14"


@pytest.mark.parametrize("field", ["reward_fn", "eval_reward_fn"])
@pytest.mark.parametrize(
    ("theirs", "ours", "options"),
    [
        ("video_ocr", "ocr", {"frames": "mean of 4"}),
        ("image_similarity", "keep_source", {"model": CLIP}),
    ],
)
def test_rewards_are_told_ours(field, theirs, ours, options):
    config = get_config()
    config[field] = ConfigDict({theirs: 1.0})
    with pytest.raises(UserError) as error:
        check(config)
    assert str(error.value).endswith(
        f"{field}={{{theirs!r}: 1.0}} has a name of Flow-GRPO's; write config.{field} = "
        f"{{{ours!r}: 1.0}}; config.reward_options = { ({ours: options})!r}"
    )
    config.custom_rewards[theirs] = "my_module:my_reward"
    check(config)


@pytest.mark.parametrize("name", old_names.PRESETS)
def test_presets_are_told_ours(name):
    with pytest.raises(UserError, match=r"unknown preset .*; it is .* here") as error:
        presets.get_config(f"{name}_8gpu")
    presets.get_config(str(error.value).split()[-2])


def test_the_guide_has_every_name():
    guide = (ROOT / "docs/migrating.md").read_text("utf-8")
    rewards, functions = old_names.REWARDS, old_names.PROMPT_FNS
    for name in (*FIELDS, *rewards, *functions, *old_names.PRESETS):
        assert f"`{name}`" in guide, name
    for theirs, ours in old_names.RENAMED.items():
        [row] = [line for line in guide.splitlines() if line.startswith(f"| `{theirs}` |")]
        assert f"`{ours}`" in row
