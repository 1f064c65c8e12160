import importlib.util
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate.utils import DistributedType
from ml_collections import ConfigDict
from policies import policy_of

from flow_grpo.answer import plan as answer_plan
from flow_grpo.answer import presets as answer_presets
from flow_grpo.answer.fields import ANSWER
from flow_grpo.config.custom import CUSTOM
from flow_grpo.config.places import check_made
from flow_grpo.config.trade import OPEN_FIELDS
from flow_grpo.data.mixing import parse_sources
from flow_grpo.data.seeding import Stream, torch_generator
from flow_grpo.draw import fields as base
from flow_grpo.draw import presets
from flow_grpo.draw.check import check, check_early, unusual
from flow_grpo.draw.session import build_session, can_compile, can_replay
from flow_grpo.errors import UserError
from flow_grpo.run.building import choose_device
from flow_grpo.speed.compiler import missing_tool

ROOT = Path(__file__).parents[1]


def test_few_files_read_what_a_config_file_returns():
    """The others get the settings that a check makes of it, which are frozen."""
    paths = [p for p in (ROOT / "flow_grpo").rglob("*.py") if "ConfigDict" in p.read_text("utf-8")]
    outside = {f"{p.parent.name}/{p.stem}" for p in paths if p.parent.name != "config"}
    trades = {f"{trade}/{part}" for trade in ("draw", "answer") for part in ("fields", "presets")}
    assert outside == {*trades, "draw/saved", "flow_grpo/api"}


def test_the_parts_of_the_config_stand_below_all_others():
    text = "".join(p.read_text("utf-8") for p in (ROOT / "flow_grpo/config").glob("*.py"))
    imported = {*re.findall(r"(?:from|import) flow_grpo\.(\w+)", text)}
    assert imported == {"access", "config", "errors", "files"}


def test_the_defaults_are_allowed():
    check(base.get_config())


def test_a_tracker_that_is_not_installed_is_named(monkeypatch):
    """accelerate itself would go on without it."""
    config = base.get_config()
    config.log_with = "wandb"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="log_with='wandb' needs: pip install wandb"):
        check(config)


def test_merging_needs_a_lora():
    config = base.get_config()
    config.sample.merge_lora, config.use_lora = True, False
    with pytest.raises(UserError, match=r"sample\.merge_lora=True needs use_lora=True"):
        check(config)


def test_a_gpu_can_be_named(monkeypatch):
    monkeypatch.delenv("ACCELERATE_TORCH_DEVICE", raising=False)
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for count, device, processes, told in [
        (0, "cuda", 1, "device='cuda', but torch sees no GPU here; use device=cpu"),
        (2, "cuda:2", 1, "device='cuda:2', but the last GPU here is cuda:1"),
        (2, "cuda:1", 8, "device='cuda:1' is one GPU for 8 processes; use device=cuda, and each"),
        (2, "gpu", 1, "device='gpu' must be 'auto', 'cpu', 'cuda' or one GPU, as 'cuda:1'"),
    ]:
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        with pytest.raises(UserError) as error:
            choose_device(device, processes)
        assert str(error.value).startswith(told)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    on_cpu = {name: choose_device(name, 1) for name in ("auto", "cpu", "cuda", "cuda:1")}
    assert on_cpu == {"auto": False, "cpu": True, "cuda": False, "cuda:1": False}
    assert chosen == ["cuda:1"]
    assert os.environ.pop("ACCELERATE_TORCH_DEVICE") == "cuda:1"


def on_gpu(**state) -> SimpleNamespace:
    """An accelerator, as far as it matters here."""
    return SimpleNamespace(
        **{"device": torch.device("cuda"), "distributed_type": DistributedType.NO, **state}
    )


def test_what_is_compiled_and_replayed(monkeypatch, caplog):
    monkeypatch.setattr("flow_grpo.draw.session.missing_tool", lambda: "")
    config = base.get_config()
    several = on_gpu(distributed_type=DistributedType.MULTI_GPU)
    assert can_compile(config, on_gpu())
    assert can_replay(config, on_gpu())
    assert can_compile(config, several)
    assert can_replay(config, several)
    on_cpu = on_gpu(device=torch.device("cpu"))
    assert not can_compile(config, on_cpu)
    assert not can_replay(config, on_cpu)
    for sharded in (DistributedType.FSDP, DistributedType.DEEPSPEED):
        assert not can_replay(config, on_gpu(distributed_type=sharded))
    assert not can_compile(config, on_gpu(distributed_type=DistributedType.FSDP))
    config.train.gradient_checkpointing = True
    assert not can_replay(config, on_gpu())
    config.train.gradient_checkpointing, config.cuda_graphs = False, False
    assert not can_replay(config, on_gpu())
    config.cuda_graphs, config.use_lora = True, False
    assert not can_replay(config, on_gpu())
    monkeypatch.setattr("flow_grpo.draw.session.missing_tool", lambda: "Triton")
    with caplog.at_level("WARNING"):
        assert not can_compile(config, on_gpu())
    assert "Triton is missing" in caplog.text
    config.compile = False
    caplog.clear()
    assert not can_compile(config, on_gpu())
    assert not caplog.text


def test_what_the_compiler_needs(monkeypatch, tmp_path):
    monkeypatch.setattr("flow_grpo.speed.compiler.has_triton", lambda: False)
    assert missing_tool() == "Triton"
    monkeypatch.setattr("flow_grpo.speed.compiler.has_triton", lambda: True)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    assert missing_tool() == "a C compiler (gcc or clang)"
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr("sysconfig.get_path", lambda *_: str(tmp_path))
    assert missing_tool() == f"{tmp_path / 'Python.h'} (python3-dev)"
    (tmp_path / "Python.h").touch()
    assert missing_tool() == ""


def with_fields(**fields) -> ConfigDict:
    config = base.get_config()
    config.update_from_flattened_dict({k.replace("__", "."): v for k, v in fields.items()})
    return config


FLOATS = [
    *("max_failed_fraction", "reward_timeout", "sample.noise_level", "sample.guidance_scale"),
    *("train.learning_rate", "train.adam_beta1", "train.beta", "train.timestep_fraction"),
    *("train.clip_range_low", "train.ema_decay", "train.adam_weight_decay"),
]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", FLOATS)
def test_every_number_is_finite(name, value):
    key = name.rpartition(".")[2]
    told = f"grpo.{key}" if name in base.DRAW.second_names() else name
    with pytest.raises(UserError, match=f"^{told}={value} must be a finite number$"):
        check(with_fields(**{name: value}))


def test_a_seed_is_what_torch_takes(adapter):
    most = 2**64 - 1
    check(with_fields(seed=most))
    policy_of(adapter, rank=2, seed=most)
    torch_generator(most, Stream.EVAL, 0)
    with pytest.raises(UserError, match=f"seed={most + 1} must be at most {most}"):
        check(with_fields(seed=most + 1))
    with pytest.raises(ValueError, match="Overflow"):
        torch.manual_seed(most + 1)


@pytest.mark.parametrize("name", ["distributed_timeout", "reward_timeout"])
def test_clocks_end_somewhere(name):
    with pytest.raises(UserError, match=f"{name}=.* must be at most 100000000"):
        check(with_fields(**{name: 10**30}))


def test_unknown_fields_are_named_with_a_suggestion():
    config = base.get_config()
    config.train.learning_rat = 1e-4
    config.save_dir = "logs/ocr"
    with pytest.raises(UserError) as error:
        check(config)
    assert str(error.value) == (
        "the config does not fit: it has unknown fields: save_dir (it is logdir here), "
        "train.learning_rat (did you mean train.learning_rate?); write config.logdir = "
        "'logs/ocr'; start from the nearest preset, "
        "flow_grpo.draw.presets.get_config('tiny_ocr') for one, and change what differs"
    )


def test_missing_fields_are_named_and_counted():
    config = base.get_config()
    del config.train.beta
    with pytest.raises(UserError, match=r"lacks train\.beta; start from the nearest preset, f"):
        check(config)
    del config.sample
    with pytest.raises(UserError, match=r"it lacks sample, train\.beta; start"):
        check(config)


def test_open_dicts_take_any_name_and_nothing_but_dicts():
    for name in ({*OPEN_FIELDS} & {*base.get_config()}) - {*CUSTOM}:
        config = base.get_config()
        config[name] = ConfigDict({"mine": {"any": "thing"}})
        check(config)
        config = base.get_config()
        with config.ignore_type():
            config[name] = "ocr"
        with pytest.raises(UserError, match=f"{name}='ocr' must be a ConfigDict"):
            check(config)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("train.learning_rate", "3e-4", "a number"),
        ("train.learning_rate", None, "a number"),
        ("train.learning_rate", True, "a number"),
        ("num_epochs", 1.5, "a whole number"),
        ("train.ema", 1, "True or False"),
        ("train.lora_path", None, "a string; '' is for none"),
        ("sample.sde_window_range", 5, "a tuple"),
        ("sample.sde_window_range", ("a", 5), "a whole number"),
        ("sample.sde_window_range", (1, 2, 3), "must have 2 values"),
        ("train", 3, "a ConfigDict"),
        ("train.clip_range_high", "wide", "a number"),
    ],
)
def test_values_have_the_type_of_the_default(name, value, rule):
    config = base.get_config()
    section, _, key = name.rpartition(".")
    part = config[section] if section else config
    del part[key]
    part[key] = value  # as in a config that was not made from config/base.py
    with pytest.raises(UserError, match=rf"^{name}=.* {rule}$"):
        check(config)


def test_numbers_of_other_kinds_are_numbers():
    config = base.get_config()
    for section, key, value in [
        (config.train, "adam_weight_decay", 0),
        (config, "num_epochs", np.int64(3)),
        (config.sample, "sde_window_range", [0, 2]),
    ]:
        del section[key]
        section[key] = value
    check(config)


def test_two_names_of_one_field_have_one_value():
    config = with_fields(train__beta=0.5, grpo__clip_range=1e-3)
    assert (config.grpo.beta, config.train.clip_range) == (0.5, 1e-3)
    check(config)
    apart = config.copy_and_resolve_references()  # as in a config that was not made from fields.py
    check(apart)
    apart.train.beta = 0.25
    with pytest.raises(UserError, match=r"^train\.beta=0\.25 and grpo\.beta=0\.5 are two names of"):
        check(apart)


def test_a_wide_clip_range_for_cps_is_warned_of():
    assert unusual(base.get_config()) == []
    assert unusual(with_fields(sample__sde_type="cps", train__clip_range=1e-5)) == []
    [line] = unusual(with_fields(sample__sde_type="cps"))
    assert line == (
        "grpo.clip_range=0.0001 is wide for sample.sde_type='cps': all published settings have "
        "1e-05; set --config.grpo.clip_range=1e-05"
    )
    sides = {"train__clip_range_low": 1e-5, "train__clip_range_high": 1e-3}
    [line] = unusual(with_fields(sample__sde_type="cps", **sides))
    assert line.startswith("grpo.clip_range_high=0.001 is wide")
    sides["train__clip_range_high"] = 1e-5
    assert unusual(with_fields(sample__sde_type="cps", **sides)) == []


def test_a_setting_of_an_algorithm_that_is_not_used_is_told():
    fields = {"awm__times": 3, "awm__kl_beta": 0.5, "train__beta": 0.5}
    assert unusual(with_fields(algorithm="nft", nft__times=3, **fields)) == [
        "awm.times=3 has no effect: algorithm='nft'",
        "awm.kl_beta=0.5 has no effect: algorithm='nft'; set nft.kl_beta instead",
        "grpo.beta=0.5 has no effect: algorithm='nft'",
    ]


def test_the_warning_is_given_once_before_anything_is_loaded(tmp_path, caplog):
    config = with_fields(device="cpu", dataset="no/such/folder", sample__sde_type="cps")
    config.logdir = str(tmp_path)
    with caplog.at_level("WARNING"), pytest.raises(UserError, match="no dataset at"):
        build_session(config)
    assert [r.message for r in caplog.records if r.name == "flow_grpo"] == unusual(config)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("logdir", "logs\udcff", "'logdir': '\\udcff' is half a character; write it whole"),
        ("run_name", "a\0b", "run_name='a\\x00b' has a zero byte in it"),
        ("dataset", "x" * 5000, "dataset=xxx"),
        ("custom_rewards", ConfigDict({"mine": "a:\ud800"}), "'custom_rewards.mine': '\\ud800' is"),
    ],
)
def test_text_that_no_path_and_no_file_takes_is_told(name, value, told):
    config = base.get_config()
    config[name] = value
    with pytest.raises(UserError) as error:
        check(config)
    assert str(error.value).startswith(told)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["../x", "../../x", "a/../../x", "/tmp/x", ".", "a/..", "./"])
def test_a_run_stays_inside_its_logdir(name):
    with pytest.raises(UserError, match=f"^run_name={name!r} must name a folder inside logdir"):
        check(with_fields(run_name=name))
    with pytest.raises(UserError, match=r"^run_name="):
        ANSWER.check(with_run_name(answer_presets.get_config("tiny_vlm"), name))


@pytest.mark.parametrize("name", ["", "a", "a/b", "..a", "a..b", "./a"])
def test_a_run_may_be_called_anything_inside_it(name):
    check(with_fields(run_name=name))


@pytest.mark.parametrize("name", ["run_name", "logdir"])
@pytest.mark.parametrize("value", [" ", " a", "a ", "a\n", "a\x1b[2J"])
def test_a_folder_has_a_name_that_can_be_read(name, value):
    with pytest.raises(UserError, match=f"^{name}=") as error:
        check(with_fields(**{name: value}))
    assert "\n" not in str(error.value)


def test_a_logdir_is_named():
    with pytest.raises(UserError, match=r"^logdir=''"):
        check(with_fields(logdir=""))


def with_run_name(config: ConfigDict, name: str) -> ConfigDict:
    config.run_name = name
    return config


@pytest.mark.parametrize("get", [presets.get_config, answer_presets.get_config])
def test_a_folder_has_no_revision(get):
    name = "tiny_ocr" if get is presets.get_config else "tiny_vlm"
    config, trade = get(name), base.DRAW if name == "tiny_ocr" else ANSWER
    config.pretrained.revision = "v2"
    with pytest.raises(UserError, match=r"^pretrained\.revision='v2' .*tiny-.* is a folder"):
        trade.check(config)
    config.pretrained.model = "owner/name"
    trade.check(config)


@pytest.mark.parametrize("name", ["dataset", "logdir", "pretrained.model", "train.lora_path"])
def test_a_path_that_is_none_is_told(name):
    config = base.get_config()
    config.update_from_flattened_dict({name: None})
    with pytest.raises(UserError, match=f"^{name}=None must be a string"):
        check(config)


def test_many_prompt_sets_are_no_path_that_is_too_long():
    config = base.get_config()
    config.dataset = ",".join(f"set-{i:03d}.txt:1" for i in range(100))
    check(config)
    assert len(parse_sources(config.dataset)) == 100


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"train__batch_size": 3}, "train.batch_size=3 does not divide sample.train_batch_size=8"),
        ({"logdir": str(ROOT), "run_name": "docs"}, f"{ROOT}/docs already exists; go on with it"),
        ({"resume": "logs/no"}, "resume='logs/no' is neither a run nor a whole checkpoint; name"),
        ({"train__lora_path": "a/b/c"}, "no LoRA at train.lora_path='a/b/c': there is no such fil"),
        ({"dataset": "no/such/set:1,a.txt:2"}, "no dataset at no/such/set: it must hold train_met"),
        ({"dataset": "a.txt"}, "no dataset at a.txt: there is no such file"),
        (
            {"custom_rewards": {"own": "no.py:f"}, "reward_fn": {"own": 1.0}},
            "reward 'own': cannot import 'no.py:f' (there is no such file)",
        ),
    ],
)
def test_what_settings_and_the_disk_can_tell_is_told_early(fields, told):
    with pytest.raises(UserError) as error:
        check_early(with_fields(**fields))
    assert str(error.value).startswith(told)


def test_a_run_that_another_process_writes_to_is_left_to_its_lock(tmp_path):
    """Which names who has it: to remove the folder would be bad advice."""
    (tmp_path / "run").mkdir()
    config = with_fields(logdir=str(tmp_path), run_name="run")
    with pytest.raises(UserError, match="already exists"):
        check_early(config)
    (tmp_path / ".run.lock").touch()
    check_early(config)


def test_a_data_set_joined_to_the_current_folder_is_ours_where_there_is_none(
    tmp_path, monkeypatch, caplog
):
    """As Flow-GRPO's configs have it; a line says that it is not Flow-GRPO's."""
    monkeypatch.chdir(tmp_path)
    theirs, ours = os.path.join(os.getcwd(), "dataset/ocr"), str(ROOT / "dataset/ocr")
    with caplog.at_level("INFO"):
        assert check(with_fields(dataset=theirs)).dataset == ours
    assert caplog.messages == [
        f"{theirs} is not there; taken is what ships with flow_grpo, {ours}, which is not "
        "Flow-GRPO's"
    ]
    with pytest.raises(UserError, match=r"^dataset='dataset/geneval' does not ship with flow_grpo"):
        check_made(os.path.join(os.getcwd(), "dataset/geneval"))
    (tmp_path / "dataset/ocr").mkdir(parents=True)
    assert check(with_fields(dataset=theirs)).dataset == theirs


def test_prompts_are_read_early_where_that_is_quick(tmp_path, monkeypatch, caplog):
    """A missing column, or too few prompts: before the imports that take seconds."""
    table = tmp_path / "train.csv"
    table.write_text("text,tag\na,1\nb,2\n")
    with pytest.raises(UserError, match=r'has no column "prompt".*--config\.dataset_column='):
        check_early(with_fields(dataset=str(table)))
    fields = {"dataset": str(table), "dataset_column": "text"}
    with pytest.raises(UserError, match=r"2 prompts .*needs 4 .*num_batches_per_epoch=4"):
        check_early(with_fields(**fields))
    few = {"sample__num_batches_per_epoch": 4, "train__gradient_accumulation_steps": 4}
    with caplog.at_level("INFO"):
        check_early(with_fields(**fields, **few))
    assert not caplog.records  # the run tells it
    monkeypatch.setattr("flow_grpo.data.early.MOST_BYTES", 10)
    check_early(with_fields(dataset=str(table)))


def test_questions_are_read_early_where_that_is_quick(tmp_path):
    config = answer_presets.get_config("tiny_vlm")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "a", "answer": "b"}\n' * 12)
    config.dataset = str(rows)
    with pytest.raises(UserError, match=r"questions .*sample\.questions_per_epoch=\d+$"):
        answer_plan.check_early(ANSWER.check(config))
    config.input_key = "prompt"
    with pytest.raises(UserError, match=r"rows\.jsonl:1: has no 'prompt' \(input_key\)"):
        answer_plan.check_early(ANSWER.check(config))


def test_what_is_told_early_takes_no_heavy_import():
    heavy = "[m for m in ('torch', 'transformers', 'diffusers', 'pyarrow') if m in sys.modules]"
    code = "import sys, flow_grpo.draw.check, flow_grpo.answer.plan, flow_grpo.answer.questions"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print({heavy})"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_questions_that_are_not_there_are_told_early():
    config = answer_presets.get_config("tiny_vlm")
    config.dataset = "dataset/no"
    with pytest.raises(UserError, match=r"^no questions at dataset/no: it must be a folder with"):
        answer_plan.check_early(ANSWER.check(config))
