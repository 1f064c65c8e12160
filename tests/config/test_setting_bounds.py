"""Every numeric setting of both trainers has bounds: meaningless values are rejected by name."""

import math
from dataclasses import replace

import pytest
from ml_collections import ConfigDict
from user_errors import raises_user_error

from flow_grpo.config.settings import DEFAULT_MAX, UPPER_BOUNDS, iter_settings
from flow_grpo.data.questions import Question
from flow_grpo.diffusion.config_checks import check_config, check_nonzero_advantages
from flow_grpo.diffusion.fields import DIFFUSION_SPEC
from flow_grpo.diffusion.presets import get_config
from flow_grpo.diffusion.session import build_algorithm, build_session
from flow_grpo.errors import UserError
from flow_grpo.rewards import build_reward, close_scorers
from flow_grpo.training.plan import check_lora_path, count_processes
from flow_grpo.vlm.builders import reject_images
from flow_grpo.vlm.config_checks import check_config as check_vlm_config
from flow_grpo.vlm.fields import VLM_SPEC

SPECS = {"draw": DIFFUSION_SPEC, "answer": VLM_SPEC}
# Settings that accept 0, as "disabled", "all", "the model's default" or an ordinary value. A name
# without a section applies to every section that has it.
ZERO = {
    # counts and intervals
    *("seed", "eval_freq", "save_freq", "num_checkpoint_limit", "log_images", "reward_retries"),
    *("eval_resolution", "eval_height", "eval_width"),
    *("eval_prompts", "eval_questions", "max_prompt_length", "min_pixels", "max_pixels"),
    *("refills", "reset_epochs", "keep_best_worst", "async_depth", "sde_window_size"),
    *("skip_first", "skip_last", "old_after", "old_start", "lr_warmup_steps"),
    *("max_skipped_updates", "critic_warmup"),
    # sizes that another setting may define
    *("resolution", "height", "width", "eval_resolution", "eval_height", "eval_width", "video_fps"),
    # weights, decays and fractions
    *("max_failed_fraction", "lr_min_ratio", "adam_beta1", "adam_beta2", "adam_weight_decay"),
    *("ema_decay", "norm_guard", "kl_gate", "reset_kl", "kl_beta", "kl_target", "old_beta"),
    *("old_rate", "old_max_decay", "discount", "anchor_beta", "importance_cap", "clip_low"),
    *("clip_high", "dual_clip", "gae_decay", "value_weight"),
    *("center_scores", "desirable_weight", "undesirable_weight"),
    *("cppo_budget", "filter_low", "filter_high", "max_samples"),
    "per_epoch",  # all of them
    # guidance: the unconditional velocity
    *("guidance_scale", "eval_guidance_scale", "guidance_scale_2", "train_guidance"),
    *("kl_guidance", "teacher_guidance"),
}
NO_ZERO_BETA = {
    "dgpo.beta",
    "dpo.beta",
    "ipo.beta",
    "kto.beta",
    "nft.beta",
}  # elsewhere `beta` is the weight of a KL
NO_ZERO_SIZE = {"draw.height", "draw.width"}  # no other setting defines them
LARGE_SEED = {"seed", "draw.seed"}  # 64-bit integers
SIGNED = {"sample.filter_low", "sample.filter_high"}  # bounds of rewards, which may be negative


def numeric(spec) -> dict[str, type]:
    """Return the type of each setting whose value is a number, None or a tuple of numbers."""
    kinds = {}
    for name, each in iter_settings(spec.settings()):
        own = {"int": int, "float": float, "float | None": float, "tuple": tuple}
        kind = each.type.__name__ if isinstance(each.type, type) else str(each.type)
        if kind in own and not each.metadata.get("alias_of"):
            kinds[name] = own[kind]
    return kinds


def accepts_zero(name: str) -> bool:
    key = name.rpartition(".")[2]
    if name in NO_ZERO_SIZE:
        return False
    return key in ZERO or (key == "beta" and name not in NO_ZERO_BETA)


def rejection(spec, settings, name: str, value) -> str | None:
    """Return the error for this value of a setting, or None if it is accepted."""
    section, _, key = name.rpartition(".")
    if section:
        part = replace(getattr(settings, section), **{key: value})
        changed = replace(settings, **{section: part})
    else:
        changed = replace(settings, **{key: value})
    for alias in [alias for alias, other in spec.field_aliases().items() if other == name]:
        part, _, key = alias.partition(".")
        changed = replace(changed, **{part: replace(getattr(changed, part), **{key: value})})
    try:
        spec.check(changed)
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_extreme_numbers_are_rejected_by_name(spec):
    settings, found, wrong = spec.check(spec.get_config()), numeric(spec), []
    assert len(found) > 50
    for name, kind in found.items():
        for value in (-1, 0, 1e39, math.nan, math.inf, -math.inf, 10**11, 10**400):
            message = rejection(spec, settings, name, (value, value) if kind is tuple else value)
            accepts = value == 0 and (accepts_zero(name) or kind is tuple)
            accepts |= value == 10**11 and name in LARGE_SEED
            accepts |= value == -1 and name in SIGNED
            if accepts is (message is not None):
                wrong.append(f"{name}={value!r}: {message or 'accepted'}")
            if message is not None and (not message.startswith(f"{name}=") or "\n" in message):
                wrong.append(f"{name}={value!r} is not named: {message}")
    assert not wrong


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_strings_are_rejected_as_numbers(spec):
    """Also in a config not built from the defaults, which would reject the assignment."""
    wrong = {}
    for name in numeric(spec):
        config = plain = ConfigDict(spec.get_config().to_dict())
        section, _, key = name.rpartition(".")
        part = plain[section] if section else plain
        del part[key]
        part[key] = "x"
        with pytest.raises(UserError) as error:
            spec.check(config)
        wrong[name] = str(error.value)
    assert [name for name, message in wrong.items() if not message.startswith(f"{name}=")] == []


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_the_bounds_themselves_are_accepted(spec):
    """Values at the declared limits are valid, so messages state the actual rule."""
    settings, wrong = spec.check(spec.get_config()), []
    fields = dict(iter_settings(spec.settings()))
    for name, kind in numeric(spec).items():
        rules = fields[name].metadata["rules"]
        assert rules.keys() - {"at most", "below"}, f"{name} has no lower bound"
        inclusive = [rules[words] for words in ("at least", "at most") if words in rules]
        if not rules.keys() & {*UPPER_BOUNDS}:
            inclusive.append(DEFAULT_MAX)
        for bound in inclusive:
            value = (bound, bound) if kind is tuple else kind(bound)
            if message := rejection(spec, settings, name, value):
                wrong.append(message)
    assert not wrong


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"resolution": 0}, "resolution=0"),
        ({"resolution": 0, "height": 512}, "512 and 0"),
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
        check_nonzero_advantages(check_config(config_with(DIFFUSION_SPEC, fields)))
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
def test_a_run_that_can_learn_is_accepted(fields):
    check_nonzero_advantages(check_config(config_with(DIFFUSION_SPEC, fields)))


def test_a_custom_algorithm_may_assign_credit_in_any_way():
    settings = check_config(config_with(DIFFUSION_SPEC, {"reward_fn": {"ocr": 0.0}}))
    check_nonzero_advantages(replace(settings, custom_algorithms={"grpo": "mine.py:Mine"}))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"reward_fn": {"math_answer": 0.0}}, "reward_fn={'math_answer': 0.0}"),
        ({"eval_reward_fn": {"choice": 0.0}}, "eval_reward_fn={'choice': 0.0}"),
        ({"train.importance_cap": 0.5}, "train.importance_cap=0.5"),
        ({"question_format": "Think."}, "question_format='Think.'"),
    ],
)
def test_a_vlm_run_that_cannot_learn_is_rejected(fields, named):
    with pytest.raises(UserError) as error:
        check_vlm_config(config_with(VLM_SPEC, fields))
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
def test_a_vlm_setting_without_effect_is_rejected(fields, named):
    with pytest.raises(UserError) as error:
        check_vlm_config(config_with(VLM_SPEC, fields))
    assert str(error.value).startswith(named)


@pytest.mark.parametrize(
    "fields",
    [
        {"train.advantage": "gae", "train.discount": 0.9, "train.value_clip": 0.5},
        {"train.advantage": "pairwise", "train.advantage_scale": "none"},
        {"image_key": "none", "video_key": "none"},
    ],
)
def test_a_vlm_setting_with_an_effect_is_accepted(fields):
    check_vlm_config(config_with(VLM_SPEC, fields))


@pytest.mark.parametrize("urls", [3, None, ["http://a:1"]])
def test_a_reward_server_must_be_a_string(urls):
    settings = replace(
        DIFFUSION_SPEC.check(DIFFUSION_SPEC.get_config()), reward_servers={"ocr": urls}
    )
    with raises_user_error(field="reward_servers.ocr", value=urls):
        DIFFUSION_SPEC.check_rewards(settings)


class NeedsArgument:
    def __init__(self, path):
        self.path = path

    def __call__(self, images, prompts, metadata):
        return [0.0 for _ in images]


def test_a_missing_required_reward_option_is_named():
    custom = {"mine": f"{__name__}:NeedsArgument"}
    with pytest.raises(UserError, match=r"'mine' needs path; set --config\.reward_options"):
        build_reward({"mine": 1.0}, custom=custom)
    close_scorers(build_reward({"mine": 1.0}, custom=custom, options={"mine": {"path": "x"}}))


@pytest.mark.parametrize("path", [3, None, ""])
def test_a_teacher_must_be_a_path(path):
    fields = {"algorithm": "opd", "opd.start": "model", "opd.teachers": {"all": path}}
    with pytest.raises(UserError, match=r"opd\.teachers\['all'\]="):
        build_algorithm(config_with(DIFFUSION_SPEC, fields))


@pytest.mark.parametrize("number", ["x", "", "0", "-1"])
def test_world_size_must_be_a_positive_integer(monkeypatch, number):
    monkeypatch.setenv("WORLD_SIZE", number)
    with pytest.raises(UserError, match=f"WORLD_SIZE='{number}'"):
        count_processes()


def test_a_model_is_rejected_as_a_lora(tmp_path):
    """Its weights are not read."""
    (tmp_path / "readme.md").touch()
    for name in ("config.json", "model_index.json"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).touch()
        with pytest.raises(UserError, match=rf"lora_path='{folder}' .*{name}"):
            check_lora_path(str(folder))
        (folder / "adapter_config.json").touch()
        check_lora_path(str(folder))
    with pytest.raises(UserError, match=r"readme\.md' is not a \.safetensors file"):
        check_lora_path(str(tmp_path / "readme.md"))


def test_a_checkpoint_is_rejected_as_a_lora(tmp_path):
    for part in ("state", "lora"):
        (tmp_path / part).mkdir()
    check_lora_path(str(tmp_path / "lora"))
    with raises_user_error("checkpoint", field="train.lora_path", value=str(tmp_path)):
        check_lora_path(str(tmp_path))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"height": 16384, "width": 16384}, "height=16384"),
        ({"train.use_8bit_adam": True}, "train.use_8bit_adam=True needs a GPU"),
    ],
)
def test_invalid_settings_are_reported_before_rewards_are_tested(
    monkeypatch, tmp_path, fields, named
):
    """Test calls of rewards take long with large images."""
    monkeypatch.setattr("flow_grpo.diffusion.session.check_reward", None)
    config = get_config("tiny_ocr")
    config.update_from_flattened_dict({**fields, "logdir": str(tmp_path), "device": "cpu"})
    with pytest.raises(UserError, match=f"^{named}"):
        build_session(config)


def test_a_text_only_model_rejects_images():
    words, seen = (Question("?", images, where="a:1") for images in ((), (b"x",)))
    reject_images([words], "m")
    with pytest.raises(UserError, match=r"^a:1 .*pretrained\.model='m'.*image_key=none"):
        reject_images([words, seen], "m")


@pytest.mark.parametrize("weight", [1e39, -1e39, math.nan, math.inf, True, "1"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_reward_weights_must_be_finite_float32_numbers(spec, weight):
    settings = replace(spec.check(spec.get_config()), reward_fn={"ocr": weight})
    with raises_user_error(field="reward_fn.ocr"):
        spec.check_rewards(settings)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"reward_fn": {1: 2.0}}, "reward_fn has a key 1 "),
        ({"custom_rewards": {3: "a.b:c"}}, "custom_rewards has a key 3 "),
        ({"reward_options": {"ocr": {2: 3}}}, "reward_options.ocr has a key 2 "),
        ({"opd.teachers": {1: "x"}}, "opd.teachers has a key 1 "),
    ],
)
def test_keys_of_dicts_must_be_strings(fields, named):
    with pytest.raises(UserError) as error:
        DIFFUSION_SPEC.check(config_with(DIFFUSION_SPEC, fields))
    assert str(error.value).startswith(named)


def config_with(spec, fields) -> ConfigDict:
    config = spec.get_config()
    for name, value in fields.items():
        section, _, key = name.rpartition(".")
        part = config[section] if section else config
        part[key] = ConfigDict(value) if isinstance(value, dict) else value
    return config
