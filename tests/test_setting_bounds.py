"""Every numeric setting of both trainers has bounds: meaningless values are rejected by name."""

import math
from dataclasses import replace

import pytest
from ml_collections import ConfigDict

from flow_grpo.answer.check import check as check_answers
from flow_grpo.answer.fields import ANSWER
from flow_grpo.answer.session import reject_images
from flow_grpo.config.settings import LARGEST, UPPER_BOUNDS, walk
from flow_grpo.data.questions import Question
from flow_grpo.draw.check import check, check_learning
from flow_grpo.draw.fields import DRAW
from flow_grpo.draw.presets import get_config
from flow_grpo.draw.session import build_algorithm, build_session
from flow_grpo.errors import UserError
from flow_grpo.rewards import build_reward, close_scorers
from flow_grpo.run.plan import check_lora_path, count_processes

TRADES = {"draw": DRAW, "answer": ANSWER}
# Where 0 has a meaning: it switches something off, stands for "all" or "the model's own", or is an
# ordinary value. Names without a section are of every section that has them.
ZERO = {
    # counts and intervals
    *("seed", "eval_freq", "save_freq", "num_checkpoint_limit", "log_images", "reward_retries"),
    *("eval_prompts", "eval_questions", "max_prompt_length", "min_pixels", "max_pixels"),
    *("refills", "reset_epochs", "keep_best_worst", "async_depth", "sde_window_size"),
    *("skip_first", "skip_last", "old_after", "old_start", "lr_warmup_steps"),
    *("max_skipped_updates", "critic_warmup"),
    # sizes that another setting gives
    *("resolution", "height", "width", "video_fps"),
    # weights, decays and fractions
    *("max_failed_fraction", "lr_min_ratio", "adam_beta1", "adam_beta2", "adam_weight_decay"),
    *("ema_decay", "norm_guard", "kl_gate", "reset_kl", "kl_beta", "kl_target", "old_beta"),
    *("old_rate", "old_most", "discount", "anchor_beta", "importance_cap", "clip_low"),
    *("clip_high", "dual_clip", "gae_decay", "value_weight"),
    # guidance: the unconditional velocity
    *("guidance_scale", "eval_guidance_scale", "guidance_scale_2", "train_guidance"),
    *("kl_guidance", "teacher_guidance"),
}
NO_ZERO_BETA = {"dgpo.beta", "dpo.beta", "nft.beta"}  # elsewhere `beta` is the weight of a KL
LARGE_SEED = {"seed"}  # of 64 bits


def numeric(trade) -> dict[str, type]:
    """The type of each setting whose value is a number, an optional one or a tuple of them."""
    kinds = {}
    for name, each in walk(trade.settings()):
        own = {"int": int, "float": float, "float | None": float, "tuple": tuple}
        kind = each.type.__name__ if isinstance(each.type, type) else str(each.type)
        if kind in own and not each.metadata.get("same_as"):
            kinds[name] = own[kind]
    return kinds


def takes_zero(name: str) -> bool:
    key = name.rpartition(".")[2]
    return key in ZERO or (key == "beta" and name not in NO_ZERO_BETA)


def rejection(trade, settings, name: str, value) -> str | None:
    """What the check says to this value of a field, None where it accepts it."""
    section, _, key = name.rpartition(".")
    if section:
        part = replace(getattr(settings, section), **{key: value})
        changed = replace(settings, **{section: part})
    else:
        changed = replace(settings, **{key: value})
    if aliases := [alias for alias, other in trade.second_names().items() if other == name]:
        keys = [alias.rpartition(".")[2] for alias in aliases]
        changed = replace(changed, train=replace(changed.train, **dict.fromkeys(keys, value)))
    try:
        trade.check(changed)
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize("trade", TRADES.values(), ids=TRADES)
def test_every_number_is_accepted_on_purpose_or_rejected_by_name(trade):
    settings, found, wrong = trade.check(trade.get_config()), numeric(trade), []
    assert len(found) > 50
    for name, kind in found.items():
        for value in (-1, 0, 1e39, math.nan, math.inf, -math.inf, 10**11, 10**400):
            told = rejection(trade, settings, name, (value, value) if kind is tuple else value)
            accepts = value == 0 and (takes_zero(name) or kind is tuple)
            accepts |= value == 10**11 and name in LARGE_SEED
            if accepts is (told is not None):
                wrong.append(f"{name}={value!r}: {told or 'accepted'}")
            if told is not None and (not told.startswith(f"{name}=") or "\n" in told):
                wrong.append(f"{name}={value!r} is not named: {told}")
    assert not wrong


@pytest.mark.parametrize("trade", TRADES.values(), ids=TRADES)
def test_every_number_is_a_number(trade):
    """Also in a config that was not made from the defaults, which would reject the assignment."""
    wrong = {}
    for name in numeric(trade):
        config = plain = ConfigDict(trade.get_config().to_dict())
        section, _, key = name.rpartition(".")
        part = plain[section] if section else plain
        del part[key]
        part[key] = "x"
        with pytest.raises(UserError) as error:
            trade.check(config)
        wrong[name] = str(error.value)
    assert [name for name, told in wrong.items() if not told.startswith(f"{name}=")] == []


@pytest.mark.parametrize("trade", TRADES.values(), ids=TRADES)
def test_the_bounds_themselves_are_accepted(trade):
    """At the declared limits a value is still good, so that messages state the rule as it is."""
    settings, wrong = trade.check(trade.get_config()), []
    fields = dict(walk(trade.settings()))
    for name, kind in numeric(trade).items():
        rules = fields[name].metadata["rules"]
        assert rules.keys() - {"at most", "below"}, f"{name} has no lower bound"
        inclusive = [rules[words] for words in ("at least", "at most") if words in rules]
        if not rules.keys() & {*UPPER_BOUNDS}:
            inclusive.append(LARGEST)
        for bound in inclusive:
            value = (bound, bound) if kind is tuple else kind(bound)
            if told := rejection(trade, settings, name, value):
                wrong.append(told)
    assert not wrong


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"resolution": 0}, "resolution=0"),
        ({"resolution": 0, "height": 512}, "width=0"),
        ({"reward_fn": {"ocr": 0.0}}, "reward_fn={'ocr': 0.0}"),
        ({"reward_fn": {"ocr": 1.0}, "eval_reward_fn": {"ocr": 0}}, "eval_reward_fn={'ocr': 0}"),
        ({"sample.num_image_per_prompt": 1}, "sample.num_image_per_prompt=1"),
        ({"sample.num_image_per_prompt": 1, "train.advantage": "gdpo"}, "advantage='gdpo'"),
        ({"sample.num_image_per_prompt": 1, "algorithm": "rwr"}, "algorithm='rwr'"),
        ({"sample.num_image_per_prompt": 1, "algorithm": "mix"}, "algorithm='mix'"),
    ],
)
def test_a_run_that_cannot_learn_is_rejected(fields, named):
    with pytest.raises(UserError) as error:
        check_learning(check(config_with(DRAW, fields)))
    assert named in str(error.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"resolution": 0, "height": 512, "width": 512},
        {"reward_fn": {"ocr": 0.0, "pickscore": -1.0}},
        {"algorithm": "opd", "reward_fn": {"ocr": 0.0}, "sample.num_image_per_prompt": 1},
        {"algorithm": "leap", "sample.num_image_per_prompt": 1},
        {"train.advantage": "reinforce_pp", "sample.num_image_per_prompt": 1},
        {"train.advantage": "remax", "sample.num_image_per_prompt": 1},
    ],
)
def test_a_run_that_can_learn_is_not(fields):
    check_learning(check(config_with(DRAW, fields)))


def test_a_custom_method_may_give_credit_in_any_way():
    settings = check(config_with(DRAW, {"reward_fn": {"ocr": 0.0}}))
    check_learning(replace(settings, custom_algorithms={"grpo": "mine.py:Mine"}))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"reward_fn": {"math_answer": 0.0}}, "reward_fn={'math_answer': 0.0}"),
        ({"eval_reward_fn": {"choice": 0.0}}, "eval_reward_fn={'choice': 0.0}"),
        ({"train.importance_cap": 0.5}, "train.importance_cap=0.5"),
        ({"question_format": "Think."}, "question_format='Think.'"),
    ],
)
def test_an_answer_run_that_cannot_learn_is_rejected(fields, named):
    with pytest.raises(UserError) as error:
        check_answers(config_with(ANSWER, fields))
    assert named in str(error.value)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"sample.max_turns": 2}, "sample.max_turns=2"),
        ({"sample.max_observation_tokens": 9}, "sample.max_observation_tokens=9"),
        ({"environment_timeout": 3.0}, "environment_timeout=3.0"),
        ({"environment_workers": 2}, "environment_workers=2"),
        ({"sample.vllm_memory": 0.3}, "sample.vllm_memory=0.3"),
        ({"train.discount": 0.9}, "train.discount=0.9"),
        ({"train.gae_decay": 0.9}, "train.gae_decay=0.9"),
        ({"train.value_weight": 0.5}, "train.value_weight=0.5"),
        ({"train.value_clip": 0.5}, "train.value_clip=0.5"),
        (
            {"train.advantage": "rloo", "train.advantage_scale": "none"},
            "train.advantage_scale='none'",
        ),
        ({"image_key": "x", "video_key": "x"}, "image_key='x' and video_key='x'"),
        ({"input_key": "answer"}, "input_key='answer' and answer_key='answer'"),
    ],
)
def test_a_setting_without_an_effect_on_answers_is_rejected(fields, named):
    with pytest.raises(UserError) as error:
        check_answers(config_with(ANSWER, fields))
    assert str(error.value).startswith(named)


@pytest.mark.parametrize(
    "fields",
    [
        {"train.advantage": "gae", "train.discount": 0.9, "train.value_clip": 0.5},
        {"train.advantage": "pairwise", "train.advantage_scale": "none"},
        {"image_key": "none", "video_key": "none"},
    ],
)
def test_a_setting_with_an_effect_on_answers_is_not(fields):
    check_answers(config_with(ANSWER, fields))


@pytest.mark.parametrize("urls", [3, None, ["http://a:1"]])
def test_a_reward_server_is_a_string(urls):
    settings = replace(DRAW.check(DRAW.get_config()), reward_servers={"ocr": urls})
    with pytest.raises(UserError, match=r"^reward_servers\.ocr="):
        DRAW.check_rewards(settings)


class NeedsArgument:
    def __init__(self, path):
        self.path = path

    def __call__(self, images, prompts, metadata):
        return [0.0 for _ in images]


def test_a_reward_that_needs_an_option_names_it():
    custom = {"mine": f"{__name__}:NeedsArgument"}
    with pytest.raises(UserError, match=r"'mine' needs path; set --config\.reward_options"):
        build_reward({"mine": 1.0}, custom=custom)
    close_scorers(build_reward({"mine": 1.0}, custom=custom, options={"mine": {"path": "x"}}))


@pytest.mark.parametrize("path", [3, None, ""])
def test_a_teacher_is_a_folder(path):
    fields = {"algorithm": "opd", "opd.start": "model", "opd.teachers": {"all": path}}
    with pytest.raises(UserError, match=r"opd\.teachers\['all'\]="):
        build_algorithm(config_with(DRAW, fields))


@pytest.mark.parametrize("number", ["x", "", "0", "-1"])
def test_the_number_of_processes_is_a_number(monkeypatch, number):
    monkeypatch.setenv("WORLD_SIZE", number)
    with pytest.raises(UserError, match=f"WORLD_SIZE='{number}'"):
        count_processes()


def test_a_model_is_not_taken_for_a_lora(tmp_path):
    """Without its weights being read."""
    (tmp_path / "readme.md").touch()
    for name in ("config.json", "model_index.json"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).touch()
        with pytest.raises(UserError, match=rf"lora_path='{folder}' has a {name}"):
            check_lora_path(str(folder))
        (folder / "adapter_config.json").touch()
        check_lora_path(str(folder))
    with pytest.raises(UserError, match=r"readme\.md' is not a \.safetensors file"):
        check_lora_path(str(tmp_path / "readme.md"))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"height": 16384, "width": 16384}, "height=16384"),
        ({"train.use_8bit_adam": True}, "train.use_8bit_adam=True needs a GPU"),
    ],
)
def test_a_mistake_is_reported_before_rewards_are_tried(monkeypatch, tmp_path, fields, named):
    """These take long with images of such a size."""
    monkeypatch.setattr("flow_grpo.draw.session.check_reward", None)
    config = get_config("tiny_ocr")
    config.update_from_flattened_dict({**fields, "logdir": str(tmp_path), "device": "cpu"})
    with pytest.raises(UserError, match=f"^{named}"):
        build_session(config)


def test_a_language_model_is_not_given_images():
    words, seen = (Question("?", images, where="a:1") for images in ((), (b"x",)))
    reject_images([words], "m")
    with pytest.raises(UserError, match=r"^a:1: .*pretrained\.model='m'.*image_key=none"):
        reject_images([words, seen], "m")


@pytest.mark.parametrize("weight", [1e39, -1e39, math.nan, math.inf, True, "1"])
@pytest.mark.parametrize("trade", TRADES.values(), ids=TRADES)
def test_a_weight_of_a_reward_is_a_number_of_a_usual_size(trade, weight):
    settings = replace(trade.check(trade.get_config()), reward_fn={"ocr": weight})
    with pytest.raises(UserError, match=r"^reward_fn\.ocr="):
        trade.check_rewards(settings)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"reward_fn": {1: 2.0}}, "reward_fn: the name 1 "),
        ({"custom_rewards": {3: "a.b:c"}}, "custom_rewards: the name 3 "),
        ({"reward_options": {"ocr": {2: 3}}}, "reward_options.ocr: the name 2 "),
        ({"opd.teachers": {1: "x"}}, "opd.teachers: the name 1 "),
    ],
)
def test_names_in_a_dict_are_strings(fields, named):
    with pytest.raises(UserError) as error:
        DRAW.check(config_with(DRAW, fields))
    assert str(error.value).startswith(named)


def config_with(trade, fields) -> ConfigDict:
    config = trade.get_config()
    for name, value in fields.items():
        section, _, key = name.rpartition(".")
        part = config[section] if section else config
        part[key] = ConfigDict(value) if isinstance(value, dict) else value
    return config
