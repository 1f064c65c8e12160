"""The fields of a run that trains a model that answers: their reasons, and mistakes in them."""

import pytest
import small_vlm
from ml_collections import ConfigDict

from flow_grpo.answer import fields
from flow_grpo.answer.check import check
from flow_grpo.config import old_names, overrides
from flow_grpo.config.trade import all_fields
from flow_grpo.draw import fields as picture_fields
from flow_grpo.draw.check import check as check_pictures
from flow_grpo.draw.saved import config_of_run
from flow_grpo.errors import UserError


def test_the_reason_of_a_field_is_its_own():
    known = fields.ANSWER.reasons()
    assert known["logdir"] == "Folder of all runs."
    assert known["num_epochs"].startswith("Epochs of the whole run")
    assert known["train.learning_rate"].startswith("AdamW's")
    assert "fp16" not in known["mixed_precision"]


def test_rewards_are_those_of_answers():
    config = fields.get_config()
    check(config)
    config.eval_reward_fn = ConfigDict({"ocr": 1.0})
    with pytest.raises(UserError, match="reward 'ocr' scores pictures, not answers; those that"):
        check(config)
    config.custom_rewards = ConfigDict({"ocr": "my_module:ocr"})
    check(config)


@pytest.mark.parametrize(
    ("loss", "along"),
    [
        ("clip", (0.2, 0.28, "token")),
        ("gspo", (3e-4, 4e-4, "sequence")),
        ("cispo", (0.2, 0.2, "token")),
    ],
)
def test_a_loss_brings_what_goes_with_it_where_the_run_does_not_say(loss, along):
    config = fields.get_config()
    config.train.loss = loss
    if loss == "clip":
        config.train.clip_high = 0.28
    train = check(config).train
    assert (train.clip_low, train.clip_high, train.aggregation) == along


def test_the_config_of_the_other_script_is_told(tmp_path):
    with pytest.raises(
        UserError, match=r"config of scripts/train\.py; run that, or start from con"
    ):
        check(picture_fields.get_config())
    with pytest.raises(UserError, match=r"this is a config of scripts/train_vlm\.py"):
        check_pictures(fields.get_config())
    (tmp_path / "config.json").write_text(fields.get_config().to_json())
    with pytest.raises(UserError, match=r"is a run of scripts/train_vlm\.py; this works with"):
        config_of_run(tmp_path, [])


def test_a_model_that_is_not_there_is_told_before_the_hub_is_asked(tmp_path):
    small_vlm.save(tmp_path / "tiny")
    config = fields.get_config()
    config.pretrained.model = str(tmp_path / "tinny")
    with pytest.raises(
        UserError, match=r"no model at .*tinny': there is no .*did you mean .*tiny\?"
    ):
        check(config)


def test_fields_by_their_names_in_trl_and_easyr1_are_told_ours():
    known = set(dict(all_fields(fields.get_config())))
    assert known.issuperset(old_names.OF_ANSWERS.values())
    assert not known.intersection(old_names.OF_ANSWERS)
    with pytest.raises(UserError, match=r"'train\.lr'; it is train\.learning_rate here$"):
        overrides.check_name("train.lr", fields.get_config(), fields.ANSWER)
