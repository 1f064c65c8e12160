"""Config fields of VLM runs: help texts, defaults and invalid values."""

import json
from pathlib import Path

import pytest
import small_vlm
from ml_collections import ConfigDict
from user_errors import raises_user_error

from flow_grpo.config.paths import ROOT
from flow_grpo.config.settings import to_json
from flow_grpo.diffusion import fields as diffusion_fields
from flow_grpo.diffusion.config_checks import check_config as check_diffusion_config
from flow_grpo.diffusion.config_loading import load_run_config
from flow_grpo.training.config_changes import check_same_goal, compare_configs
from flow_grpo.vlm import fields
from flow_grpo.vlm.builders import load_checked_processors
from flow_grpo.vlm.config_checks import check_config


def test_shared_fields_have_the_help_text_of_the_trainer():
    assert "fp16" not in fields.VLM_SPEC.help_texts()["mixed_precision"]


def test_rewards_must_score_text():
    config = fields.get_config()
    check_config(config)
    config.eval_reward_fn = ConfigDict({"ocr": 1.0})
    with raises_user_error("math_answer", field="eval_reward_fn.ocr"):
        check_config(config)
    config.custom_rewards = ConfigDict({"ocr": "my_module:ocr"})
    check_config(config)


@pytest.mark.parametrize(
    ("loss", "defaults"),
    [
        ("clip", (0.2, 0.28, "token")),
        ("gspo", (3e-4, 4e-4, "sequence")),
        ("cispo", (0.2, 0.2, "token")),
        ("sapo", (None, None, "sequence")),
        ("drpo", (None, None, "token")),
        ("cppo", (None, None, "token")),
    ],
)
def test_unset_settings_get_the_defaults_of_the_loss(loss, defaults):
    config = fields.get_config()
    config.train.loss = loss
    if loss == "clip":
        config.train.clip_high = 0.28
    train = check_config(config).train
    assert (train.clip_low, train.clip_high, train.aggregation) == defaults


@pytest.mark.parametrize("name", ["clip_low", "clip_high", "dual_clip"])
def test_losses_without_a_clip_range_reject_its_settings(name):
    config = fields.get_config()
    config.train.loss = "sapo"
    config.train[name] = 0.3
    with raises_user_error("does not clip", field=f"train.{name}", value=0.3):
        check_config(config)


@pytest.mark.parametrize("kind", ["text", "file"])
def test_the_chat_template_of_a_config_replaces_that_of_the_model(tmp_path, kind):
    template = "{% for m in messages %}({{ m['content'][0]['text'] }}){% endfor %}"
    (tmp_path / "chat.jinja").write_text(template, encoding="utf-8")
    config = fields.get_config()
    config.pretrained.model = str(small_vlm.save(tmp_path / "model"))
    config.chat_template = template if kind == "text" else str(tmp_path / "chat.jinja")
    tokenizer, _ = load_checked_processors(check_config(config), [])
    turns = [{"role": "user", "content": [{"type": "text", "text": "A?"}]}]
    assert tokenizer.apply_chat_template(turns, tokenize=False) == "(A?)"
    (tmp_path / "chat.jinja").write_text("no template", encoding="utf-8")
    config.chat_template = str(tmp_path / "chat.jinja")
    with raises_user_error("without a Jinja template", field="chat_template"):
        check_config(config)
    config.chat_template = "/proc/self/mem"  # a regular file whose first bytes cannot be read
    with raises_user_error("cannot be read", field="chat_template"):
        check_config(config)


def test_a_config_of_the_other_trainer_is_rejected(tmp_path):
    with raises_user_error("scripts/train.py"):
        check_config(diffusion_fields.get_config())
    with raises_user_error("scripts/train_vlm.py"):
        check_diffusion_config(fields.get_config())
    (tmp_path / "config.json").write_text(fields.get_config().to_json())
    with raises_user_error("scripts/train_vlm.py"):
        load_run_config(tmp_path, [])


def test_a_missing_model_directory_is_rejected_without_querying_the_hub(tmp_path):
    small_vlm.save(tmp_path / "tiny")
    config = fields.get_config()
    config.pretrained.model = str(tmp_path / "tinny")
    with raises_user_error(
        str(tmp_path / "tiny"), field="pretrained.model", value=str(tmp_path / "tinny")
    ):
        check_config(config)


def test_a_bundled_critic_is_found_from_any_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = fields.get_config()
    config.train.update(advantage="gae", critic="separate", critic_model="assets/tiny-text")
    assert check_config(config).train.critic_model == str(ROOT / "assets/tiny-text")


def test_a_changed_critic_is_rejected_by_name(tmp_path):
    """Also if the run is from a version that had only the head."""
    config = fields.get_config()
    config.train.update(advantage="gae")
    saved = to_json(check_config(config))
    config.train.critic = "separate"
    now, run = to_json(check_config(config)), tmp_path / "config.json"
    for drop in (False, True):
        if drop:
            del saved["train"]["critic"]
        run.write_text(json.dumps(saved), encoding="utf-8")
        with raises_user_error("'head'", field="train.critic", value="separate"):
            compare_configs(tmp_path, Path("checkpoint"), now, same_run=True)
    config.train.critic = "head"
    compare_configs(tmp_path, Path("checkpoint"), to_json(check_config(config)), same_run=True)


@pytest.mark.parametrize("name", ["model", "lora", "prompt_key"])
def test_another_drawing_is_another_goal(tmp_path, name):
    config = fields.get_config()
    config.logdir, config.run_name, config.resume = str(tmp_path), "run", "auto"
    (tmp_path / "run").mkdir()
    saved = to_json(config)
    (tmp_path / "run/config.json").write_text(json.dumps(saved), encoding="utf-8")
    check_same_goal(saved)
    saved["draw"][name] = "other"
    with raises_user_error(f"draw.{name}='other'", "--config.resume_changed=True"):
        check_same_goal(saved)
