"""Settings of other trainers: each has a counterpart or a reason, and each counterpart exists."""

from functools import cache

import pytest
from runner import ROOT
from user_errors import raises_user_error

from flow_grpo.config import overrides
from flow_grpo.config.config_dicts import iter_config_fields
from flow_grpo.config.migration import PROJECTS, foreign_hint
from flow_grpo.config.migration.commands import read_command
from flow_grpo.config.migration.counterparts import DIFFUSION, LAUNCH, translate
from flow_grpo.diffusion.fields import DIFFUSION_SPEC
from flow_grpo.vlm.fields import VLM_SPEC

NAMES = [project.name for project in PROJECTS]
KEYS_FILE = ROOT / "tests/config/keys_of_other_trainers.txt"


@cache
def known_settings(trainer: str) -> frozenset[str]:
    spec = DIFFUSION_SPEC if trainer == DIFFUSION else VLM_SPEC
    return frozenset(name for name, _ in iter_config_fields(spec.get_config(), closed=()))


def recorded_keys() -> dict[str, list[str]]:
    """Return the settings of each trainer: lines "section: name name ..." that may be continued."""
    keys: dict[str, list[str]] = {}
    prefix = ""
    for line in KEYS_FILE.read_text("utf-8").splitlines():
        if line.startswith("["):
            names = keys.setdefault(line.strip("[]"), [])
        elif not line.startswith("#"):
            start, colon, rest = line.partition(": ")
            if not line.startswith(" "):
                prefix = f"{start}." if colon else ""
            names += [prefix + name for name in (rest if colon else line).split()]
    return keys


RECORDED = recorded_keys()


@pytest.mark.parametrize("project", PROJECTS, ids=NAMES)
def test_every_counterpart_exists_here(project):
    known = {*known_settings(project.trainer), *LAUNCH}
    assert set(project.targets()) <= known
    for key, found in project.keys.items():
        assert bool(found.setting) != bool(found.note), key  # a counterpart or a reason


@pytest.mark.parametrize("project", PROJECTS[1:], ids=NAMES[1:])
def test_every_setting_has_a_counterpart_or_a_reason(project):
    missing = [key for key in RECORDED[project.name] if project.find(key) is None]
    assert not missing
    assert {*project.defaults} <= {*project.keys}
    unused = set(project.keys) - set(RECORDED[project.name]) - EXTRA.get(project.name, set())
    assert not unused, "not a setting of this trainer"


# Of transformers' TrainingArguments and earlier versions; of verl's pull request 5951.
TRAINING_ARGUMENTS = str.split(
    "max_prompt_length per_device_train_batch_size gradient_accumulation_steps bf16 fp16 "
    "output_dir run_name seed max_steps num_train_epochs save_steps eval_steps save_total_limit "
    "logging_steps resume_from_checkpoint report_to gradient_checkpointing max_grad_norm "
    "weight_decay adam_beta1 adam_beta2 warmup_steps lr_scheduler_type"
)
EXTRA = {
    **{name: set(TRAINING_ARGUMENTS) for name in NAMES if name.startswith("TRL")},
    "MM-GRPO and verl-omni": {
        "actor_rollout_ref.rollout.true_cfg_scale",
        "actor_rollout_ref.rollout.max_sequence_length",
    },
}


@pytest.mark.parametrize("project", PROJECTS[1:], ids=NAMES[1:])
def test_the_defaults_of_a_trainer_translate_to_valid_settings(project):
    known = known_settings(project.trainer)
    spec = DIFFUSION_SPEC if project.trainer == DIFFUSION else VLM_SPEC
    found = translate(project, {}, known)
    assert not found.missing
    config = spec.get_config()
    for name, value in found.settings.items():
        if name not in LAUNCH:
            section, _, key = name.rpartition(".")
            place = config[section] if section else config
            with place.ignore_type():
                place[key] = value
    spec.check(config)


@pytest.mark.parametrize(
    ("trainer", "name", "text", "hint"),
    [
        ("train-vlm", "n_samples_per_prompt", "8", "--config.sample.group_size=8"),
        ("train-vlm", "init_kl_coef", "0.01", "--config.train.beta=0.01"),
        ("train-vlm", "advantage_estimator", "rloo", "--config.train.advantage=rloo"),
        (
            "train-vlm",
            "advantage_estimator",
            "reinforce_baseline",
            "--config.train.advantage=grpo --config.train.advantage_scale=batch",
        ),
        ("train-vlm", "generate_max_len", "512", "--config.sample.max_new_tokens=512"),
        ("train-vlm", "zero_stage", "3", "train_deepspeed.sh"),
        ("train-vlm", "max_completion_length", "64", "--config.sample.max_new_tokens=64"),
        ("train-vlm", "actor_rollout_ref.rollout.n", "5", "--config.sample.group_size=5"),
        ("train", "actor_rollout_ref.rollout.n", "16", "--config.sample.num_image_per_prompt=16"),
        (
            "train",
            "actor_rollout_ref.rollout.pipeline.true_cfg_scale",
            "4.0",
            "--config.sample.guidance_scale=4.0",
        ),
        ("train-vlm", "worker.rollout.n", "5", "--config.sample.group_size=5"),
        ("train-vlm", "algorithm.adv_estimator", "rloo", "--config.train.advantage=rloo"),
        ("train-vlm", "train.lr", None, "it is called train.learning_rate here"),
        ("train", "train.lr", None, "it is called train.learning_rate here"),
        ("train-vlm", "top_p", "0.9", "without counterpart"),
    ],
)
def test_a_setting_of_another_trainer_is_answered_with_ours(trainer, name, text, hint):
    assert hint in foreign_hint(name, known_settings(trainer), text)


@pytest.mark.parametrize(
    ("option", "ours"),
    [
        (["--n_samples_per_prompt", "8"], "--config.sample.group_size=8"),
        (["--init_kl_coef=0.01"], "--config.train.beta=0.01"),
    ],
)
def test_an_option_of_another_trainer_is_not_corrected_by_its_spelling(option, ours):
    with raises_user_error(f"unknown option {option[0].partition('=')[0]}", ours):
        overrides.check_flags(["train_vlm.py", *option], known_settings("train-vlm"))


def test_translations_of_values():
    known = known_settings("train-vlm")
    lmm_r1 = next(project for project in PROJECTS if project.name.startswith("LMM-R1"))
    given = {
        "rollout_batch_size": 256,
        "n_samples_per_prompt": 16,
        "train_batch_size": 256,
        "advantage_estimator": "reinforce_baseline",
        "actor_learning_rate": 4e-7,
        "init_kl_coef": 0.001,
        "normalize_reward": True,
        "zero_stage": 3,
        "save_path": "/checkpoints/lmm-r1-fre-text",
    }
    found = translate(lmm_r1, given, known)
    ours = found.settings
    assert ours["train.updates_per_epoch"] == 16
    assert (ours["train.advantage"], ours["train.advantage_scale"]) == ("grpo", "batch")
    assert (ours["train.kl"], ours["train.kl_in"]) == ("k1", "reward")
    assert (ours["train.adam_beta2"], ours["train.clip_high"]) == (0.95, 0.2)
    assert (ours["logdir"], ours["run_name"]) == ("/checkpoints", "lmm-r1-fre-text")
    assert ours["launch.zero"] == 3
    assert [name for name, *_ in found.missing] == ["normalize_reward"]


def named(name: str):
    return next(project for project in PROJECTS if project.name.startswith(name))


def test_losses_filters_and_adaptive_kl_of_vlm_trainers():
    known, actor, kl = known_settings("train-vlm"), "worker.actor", "algorithm.kl_ctrl"
    given = {
        f"{actor}.loss_type": "sapo",
        f"{actor}.tau_negative": 1.2,
        "algorithm.use_kl_loss": False,
        "algorithm.kl_type": "adaptive",
        "algorithm.kl_target": 0.05,
        "algorithm.online_filtering": True,
        "algorithm.filter_key": "accuracy",
        "algorithm.filter_high": 0.9,
    }
    found = translate(named("EasyR1"), given, known)
    ours = found.settings
    assert not found.missing
    assert (ours["train.loss"], ours["train.tau_negative"]) == ("sapo", 1.2)
    assert not {"train.clip_low", "train.clip_high", "train.dual_clip"} & ours.keys()
    assert (ours["train.kl_target"], ours["train.kl_horizon"]) == (0.05, 10_000)
    assert ours["sample.filter_reward"] == "math_answer"
    assert ours["sample.filter_high"] == 0.9
    given = {f"{actor}.loss_type": "cispo", "algorithm.kl_type": "adaptive"}
    ours = translate(named("EasyR1"), given, known).settings
    assert ours["train.clip_high"] == 0.3
    assert not {"train.dual_clip", "train.kl_target"} & ours.keys()  # the KL is in the loss
    given = {"loss_type": "sapo", "sapo_temperature_neg": 1.1, "mask_truncated_completions": True}
    found = translate(named("TRL"), given, known)
    assert not found.missing
    assert found.settings["train.aggregation"] == "sequence"
    assert found.settings["train.tau_negative"] == 1.1
    assert found.settings["train.mask_truncated"]
    assert "train.clip_low" not in found.settings
    assert translate(named("TRL"), {"delta": 2.0}, known).settings["train.dual_clip"] == 2.0
    ours = translate(named("LMM-R1"), {"kl_target": 0.02}, known).settings
    assert (ours["train.kl_target"], ours["train.kl_horizon"]) == (0.02, 10_000)
    given = {f"{kl}.type": "adaptive", "algorithm.use_kl_in_reward": True}
    ours = translate(named("verl"), given, known).settings
    assert (ours["train.kl_target"], ours["train.kl_horizon"]) == (0.1, 10_000)


def translated(command: str):
    """Return the trainer of a command line, our settings, and the names without a counterpart."""
    run = read_command(command.split())
    found = translate(run.project, run.settings, known_settings(run.project.trainer))
    return run.project.name, found.settings, [name for name, *_ in found.missing]


def test_command_lines_on_given_responses():
    """Those of TRL's sft.py and dpo_vlm.py and of OpenRLHF's SFT are translated."""
    name, ours, missing = translated(
        "python trl/scripts/sft.py --model_name_or_path Qwen/Qwen2-0.5B --dataset_name "
        "trl-lib/Capybara --learning_rate 2.0e-4 --num_train_epochs 1 --packing "
        "--per_device_train_batch_size 2 --gradient_accumulation_steps 8 --eos_token <|im_end|> "
        "--eval_strategy steps --eval_steps 100 --use_peft --lora_r 32 --lora_alpha 16 "
        "--assistant_only_loss --output_dir Qwen2-0.5B-SFT"
    )
    assert (name, ours["train.loss"], ours["train.learning_rate"]) == ("TRL SFT", "sft", 2e-4)
    assert (ours["sample.questions_per_epoch"], ours["train.updates_per_epoch"]) == (16, 1)
    assert (ours["eval_freq"], ours["train.lora_rank"], ours["response_turns"]) == (100, 32, "all")
    assert missing == ["num_train_epochs", "eos_token", "eval_strategy"]
    name, ours, missing = translated(
        "accelerate launch examples/scripts/dpo_vlm.py --dataset_name HuggingFaceH4/rlaif-v "
        "--model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct --per_device_train_batch_size 2 "
        "--gradient_accumulation_steps 32 --max_steps 100 --output_dir dpo --dtype bfloat16 "
        "--use_peft --lora_target_modules all-linear --loss_type ipo --beta 0.2"
    )
    assert (name, ours["train.loss"], ours["train.beta"]) == ("TRL DPO", "ipo", 0.2)
    assert (ours["num_epochs"], ours["sample.questions_per_epoch"]) == (100, 64)
    assert (ours["mixed_precision"], missing) == ("bf16", [])
    name, ours, _ = translated("trl kto --dataset_name a/b --undesirable_weight 0.5")
    assert (name, ours["train.loss"], ours["train.undesirable_weight"]) == ("TRL KTO", "kto", 0.5)
    assert ours["sample.max_new_tokens"] == 1024
    name, ours, missing = translated(
        "deepspeed --module openrlhf.cli.train_sft --max_len 2048 --dataset Open-Orca/OpenOrca "
        "--input_key question --output_key response --input_template User:{} "
        "--train_batch_size 256 --micro_train_batch_size 2 --pretrain meta/Llama --save_path "
        "./checkpoint/llama --max_epochs 1 --zero_stage 2 --multiturn --learning_rate 5e-6"
    )
    assert (name, ours["train.loss"]) == ("LMM-R1 SFT (OpenRLHF)", "sft")
    assert (ours["input_key"], ours["response_key"]) == ("question", "response")
    assert ours["question_format"] == "User:{question}"
    assert (ours["response_turns"], ours["sample.questions_per_epoch"]) == ("all", 256)
    assert (ours["train.lr_min_ratio"], ours["run_name"]) == (0.1, "llama")
    assert missing == ["micro_train_batch_size", "max_epochs"]


def test_batches_of_diffusion_trainers():
    """64 prompts with 16 images each on 8 GPUs, two updates."""
    mm_grpo = next(project for project in PROJECTS if project.name.startswith("MM-GRPO"))
    rollout = "actor_rollout_ref.rollout"
    given = {
        "data.train_batch_size": 64,
        f"{rollout}.n": 16,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 32,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 8,
        "trainer.n_gpus_per_node": 8,
        "data.reward_fn": ["paddle-ocr", "unified-reward-vllm"],
        f"{rollout}.sde_window_range": [0, 5],
    }
    ours = translate(mm_grpo, given, known_settings("train")).settings
    images = ours["sample.train_batch_size"] * ours["sample.num_batches_per_epoch"] * 8
    assert images == 64 * 16
    updates = ours["sample.num_batches_per_epoch"] / ours["train.gradient_accumulation_steps"]
    assert updates == 2
    assert ours["reward_fn"] == {"ocr": 0.5, "unifiedreward": 0.5}
    assert ours["sample.sde_window_range"] == (0, 5)


def test_data_sets_and_layers_of_lora():
    easyr1 = next(project for project in PROJECTS if project.name == "EasyR1")
    lora = "worker.actor.model.lora"
    given = {
        "data.train_files": "hiyouga/math12k@train",
        "data.val_files": "hiyouga/math12k@test",
        f"{lora}.target_modules": "q_proj,v_proj",
    }
    ours = translate(easyr1, given, known_settings("train-vlm")).settings
    assert ours["dataset"] == "hiyouga/math12k"
    assert not {"eval_dataset", "train.lora_target_modules"} & ours.keys()  # full fine-tuning
    given |= {"data.val_files": "hiyouga/geometry3k@test", f"{lora}.rank": 16}
    ours = translate(easyr1, given, known_settings("train-vlm")).settings
    assert ours["eval_dataset"] == "hiyouga/geometry3k"
    assert (ours["train.lora_rank"], ours["train.lora_target_modules"]) == (16, "q_proj,v_proj")


# A value of each option that is translated together with others.
VALUES = {
    "prompt_data": "a,b",
    "dataset": "a,b",
    "prompt_data_probs": "0.5,0.5",
    "input_template": "Q: {}",
    "processor_kwargs": '{"max_pixels": 1000}',
    "freeze_prefix": "visual",
    "save_path": "a/b",
    "adam_betas": (0.9, 0.95),
    "kl_estimator": "k2",
    "data.train_files": "a/b@train",
    "data.val_files": "c/d@test",
    "data.reward_fn": ["paddle-ocr"],
    "reward.custom_reward_function.name": "compute_score_ocr",
    "data.format_prompt": "math.jinja",
    "worker.reward.reward_function": "r1v.py:compute_score",
    "algorithm.kl_penalty": "mse",
    "algorithm.use_kl_loss": True,
    "algorithm.disable_kl": False,
    "actor_rollout_ref.actor.kl_loss_type": "mse",
    "actor_rollout_ref.rollout.sde_window_range": [0, 5],
    "actor_rollout_ref.rollout.algo.sde_window_range": [0, 5],
    "trainer.resume_from_path": "logs/a",
    "trainer.logger": ["wandb"],
    "report_to": "wandb",
    "reward_funcs": ["accuracy_reward"],
    "reward_weights": [1.0],
}
NEEDED = {  # the options that the others only matter with
    "vllm_num_engines": 1,
    "advantage_estimator": "gae",
    "algorithm.adv_estimator": "gae",
    "use_peft": True,
    "use_vllm": True,
    "trainer.resume_mode": "resume_path",
    "actor_rollout_ref.rollout.name": "vllm",
    "worker.rollout.name": "vllm",
    "kl_target": 0.1,
}
OTHERWISE = {  # of another loss, and with the KL in the reward
    "loss_type": "sapo",
    "worker.actor.loss_type": "sapo",
    "algorithm.use_kl_loss": False,
    "algorithm.kl_type": "adaptive",
    "actor_rollout_ref.actor.use_kl_loss": False,
    "algorithm.use_kl_in_reward": True,
    "algorithm.kl_ctrl.type": "adaptive",
}


@pytest.mark.parametrize("project", PROJECTS[1:], ids=NAMES[1:])
def test_no_option_is_dropped_that_is_translated_with_others(project):
    """`derive` produces each of our settings that a derived option is mapped to."""
    joint = {key: found.setting for key, found in project.keys.items() if found.derived}
    given = {key: VALUES.get(key, 2) for key in joint}
    for name in ("optim.betas", "lora.target_modules", "target_modules"):
        given |= {key: (0.9, 0.95) for key in joint if key.endswith(name)}
    needed = {key: value for key, value in NEEDED.items() if key in project.keys}
    otherwise = {key: value for key, value in OTHERWISE.items() if key in project.keys}
    ours = project.derive({**project.defaults, **given, **needed})
    ours |= project.derive({**project.defaults, **given, **needed, **otherwise})
    assert set(joint.values()) <= {*ours}
