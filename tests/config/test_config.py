import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate.utils import DistributedType
from ml_collections import ConfigDict
from policies import make_policy
from user_errors import raises_user_error

from flow_grpo.config import migration
from flow_grpo.config.config_dicts import FREE_FORM_FIELDS
from flow_grpo.config.custom import CUSTOM_CLASS_FIELDS
from flow_grpo.config.paths import check_dataset_available
from flow_grpo.config.saved_config import load_run_config
from flow_grpo.config.settings import build_default_config
from flow_grpo.config.settings import section as config_section
from flow_grpo.data.mixing import parse_sources
from flow_grpo.data.seeding import Stream, torch_generator
from flow_grpo.diffusion import fields as base
from flow_grpo.diffusion import presets
from flow_grpo.diffusion.algorithms.settings import NftSettings
from flow_grpo.diffusion.builders import can_compile, can_use_cuda_graphs
from flow_grpo.diffusion.config_checks import check_config, collect_config_warnings, preflight_check
from flow_grpo.diffusion.session import build_session
from flow_grpo.errors import UserError
from flow_grpo.perf.compile_utils import missing_compile_dependency
from flow_grpo.training.accelerator import choose_device
from flow_grpo.vlm import config_checks as vlm_checks
from flow_grpo.vlm import presets as vlm_presets
from flow_grpo.vlm.fields import VLM_SPEC

ROOT = Path(__file__).parents[2]


def test_only_the_boundary_reads_config_dicts():
    """All other files read frozen settings."""
    paths = [p for p in (ROOT / "flow_grpo").rglob("*.py") if "ConfigDict" in p.read_text("utf-8")]
    config = ROOT / "flow_grpo/config"
    outside = {f"{p.parent.name}/{p.stem}" for p in paths if not p.is_relative_to(config)}
    schema = {f"{part}/{file}" for part in ("diffusion", "vlm") for file in ("fields", "presets")}
    assert outside == {*schema, "diffusion/config_loading", "flow_grpo/api"}


def test_the_config_package_imports_no_higher_layer():
    text = "".join(p.read_text("utf-8") for p in (ROOT / "flow_grpo/config").rglob("*.py"))
    imported = {*re.findall(r"(?:from|import) flow_grpo\.(\w+)", text)}
    assert imported == {"config", "errors", "hub_access", "untrusted_files"}


def test_the_defaults_are_valid():
    check_config(base.get_config())


def test_a_tracker_that_is_not_installed_is_rejected(monkeypatch):
    """accelerate would silently skip it."""
    config = base.get_config()
    config.log_with = "wandb"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with raises_user_error("pip install wandb", field="log_with", value="wandb"):
        check_config(config)


def test_a_gpu_can_be_selected(monkeypatch):
    monkeypatch.delenv("ACCELERATE_TORCH_DEVICE", raising=False)
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for count, device, processes, shown in [
        (0, "cuda", 1, ""),
        (2, "cuda:2", 1, "cuda:1"),
        (2, "cuda:1", 8, "8 processes"),
        (2, "gpu", 1, "'auto', 'cpu', 'cuda'"),
    ]:
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        with raises_user_error(shown, field="device", value=device):
            choose_device(device, processes)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    on_cpu = {name: choose_device(name, 1) for name in ("auto", "cpu", "cuda", "cuda:1")}
    assert on_cpu == {"auto": False, "cpu": True, "cuda": False, "cuda:1": False}
    assert chosen == ["cuda:1"]
    assert os.environ.pop("ACCELERATE_TORCH_DEVICE") == "cuda:1"


def on_gpu(**state) -> SimpleNamespace:
    """Return a stand-in for an accelerator."""
    return SimpleNamespace(
        **{"device": torch.device("cuda"), "distributed_type": DistributedType.NO, **state}
    )


def test_when_compilation_and_cuda_graphs_are_used(monkeypatch, caplog):
    monkeypatch.setattr("flow_grpo.diffusion.builders.missing_compile_dependency", lambda: "")
    config = base.get_config()
    several = on_gpu(distributed_type=DistributedType.MULTI_GPU)
    assert can_compile(config, on_gpu(), [])
    assert can_use_cuda_graphs(config, on_gpu())
    assert can_compile(config, several, [])
    assert can_use_cuda_graphs(config, several)
    on_cpu = on_gpu(device=torch.device("cpu"))
    assert not can_compile(config, on_cpu, [])
    assert not can_use_cuda_graphs(config, on_cpu)
    for sharded in (DistributedType.FSDP, DistributedType.DEEPSPEED):
        assert not can_use_cuda_graphs(config, on_gpu(distributed_type=sharded))
    config.train.gradient_checkpointing = True
    assert not can_use_cuda_graphs(config, on_gpu())
    config.train.gradient_checkpointing, config.cuda_graphs = False, False
    assert not can_use_cuda_graphs(config, on_gpu())
    config.cuda_graphs, config.use_lora = True, False
    assert not can_use_cuda_graphs(config, on_gpu())
    monkeypatch.setattr("flow_grpo.diffusion.builders.missing_compile_dependency", lambda: "Triton")
    with caplog.at_level("WARNING"):
        assert not can_compile(config, on_gpu(), [])
    assert "Triton is missing" in caplog.text
    config.compile = False
    caplog.clear()
    assert not can_compile(config, on_gpu(), [])
    assert not caplog.text


def test_missing_compile_dependencies_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr("flow_grpo.perf.compile_utils.has_triton", lambda: False)
    assert missing_compile_dependency() == "Triton"
    monkeypatch.setattr("flow_grpo.perf.compile_utils.has_triton", lambda: True)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    assert missing_compile_dependency() == "a C compiler (gcc or clang)"
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr("sysconfig.get_path", lambda *_: str(tmp_path))
    assert missing_compile_dependency() == f"{tmp_path / 'Python.h'} (python3-dev)"
    (tmp_path / "Python.h").touch()
    assert missing_compile_dependency() == ""


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
def test_numbers_must_be_finite(name, value):
    key = name.rpartition(".")[2]
    field = f"grpo.{key}" if name in base.DIFFUSION_SPEC.field_aliases() else name
    with raises_user_error("finite", str(value), field=field):
        check_config(with_fields(**{name: value}))


def test_the_largest_seed_is_that_of_torch(adapter):
    most = 2**64 - 1
    check_config(with_fields(seed=most))
    make_policy(adapter, rank=2, seed=most)
    torch_generator(most, Stream.EVAL, 0)
    with raises_user_error(most, field="seed", value=most + 1):
        check_config(with_fields(seed=most + 1))
    with pytest.raises(ValueError, match="Overflow"):
        torch.manual_seed(most + 1)


@pytest.mark.parametrize("name", ["distributed_timeout", "reward_timeout"])
def test_timeouts_are_bounded(name):
    with raises_user_error("100000000", field=name):
        check_config(with_fields(**{name: 10**30}))


def test_unknown_settings_are_listed_with_suggestions():
    config = base.get_config()
    config.train.learning_rat = 1e-4
    config.save_dir = "logs/ocr"
    with raises_user_error(
        f"save_dir ({migration.field_hint('save_dir')})",
        "train.learning_rat (did you mean train.learning_rate?)",
        "config.logdir = 'logs/ocr'",
        "flow_grpo.diffusion.presets.get_config('tiny_ocr')",
    ):
        check_config(config)


def test_missing_settings_are_listed():
    config = base.get_config()
    del config.train.beta
    with raises_user_error("missing settings: train.beta;"):
        check_config(config)
    del config.sample
    with raises_user_error("missing settings: sample, train.beta;"):
        check_config(config)


def test_free_form_settings_accept_any_key_but_must_be_dicts():
    for name in ({*FREE_FORM_FIELDS} & {*base.get_config()}) - {*CUSTOM_CLASS_FIELDS}:
        config = base.get_config()
        config[name] = ConfigDict({"mine": {"any": "thing"}})
        check_config(config)
        config = base.get_config()
        with config.ignore_type():
            config[name] = "ocr"
        with raises_user_error("ConfigDict", field=name, value="ocr"):
            check_config(config)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("train.learning_rate", "3e-4", "a number"),
        ("train.learning_rate", None, "a number"),
        ("train.learning_rate", True, "a number"),
        ("num_epochs", 1.5, "a whole number"),
        ("train.ema", 1, "True or False"),
        ("train.lora_path", None, "a string; .*''.*"),
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
    part[key] = value  # possible in a config that does not start from config/base.py
    with pytest.raises(UserError, match=rf"^{name}=.* {rule}$"):
        check_config(config)


def test_other_numeric_types_are_accepted():
    config = base.get_config()
    for section, key, value in [
        (config.train, "adam_weight_decay", 0),
        (config, "num_epochs", np.int64(3)),
        (config.sample, "sde_window_range", [0, 2]),
    ]:
        del section[key]
        section[key] = value
    check_config(config)


def test_an_alias_has_the_value_of_its_setting():
    config = with_fields(train__beta=0.5, grpo__clip_range=1e-3)
    assert (config.grpo.beta, config.train.clip_range) == (0.5, 1e-3)
    check_config(config)
    apart = config.copy_and_resolve_references()  # as in a config loaded from elsewhere
    check_config(apart)
    apart.train.beta = 0.25
    with raises_user_error("grpo.beta=0.5", field="train.beta", value=0.25):
        check_config(apart)


@pytest.mark.parametrize("method", ["awm", "dgpo", "nft"])
def test_a_renamed_setting_of_an_old_run_is_used(method, tmp_path):
    """config.json of an earlier version names only `old_most`."""
    saved = with_fields(algorithm=method).to_dict()
    del saved[method]["old_max_decay"]
    saved[method]["old_most"] = 0.75
    (tmp_path / "config.json").write_text(json.dumps(saved))
    config = load_run_config(tmp_path, base.DIFFUSION_SPEC)
    assert getattr(check_config(config), method).old_max_decay == 0.75
    assert not [line for line in collect_config_warnings(check_config(config)) if "old_" in line]


def test_an_alias_of_a_derived_section_belongs_to_that_section():
    @dataclass(frozen=True)
    class Settings:
        nft: NftSettings = config_section(NftSettings)
        mine: NftSettings = config_section(NftSettings)

    config = build_default_config(Settings)
    config.mine.old_most = 0.25
    assert (config.mine.old_max_decay, config.nft.old_max_decay) == (0.25, 0.5)


def warnings_for(**fields) -> list[str]:
    return collect_config_warnings(check_config(with_fields(**fields)))


def test_a_wide_clip_range_for_cps_gets_a_warning():
    assert warnings_for() == []
    assert warnings_for(sample__sde_type="cps", train__clip_range=1e-5) == []
    [line] = warnings_for(sample__sde_type="cps")
    assert line.startswith("grpo.clip_range=0.0001 ")
    assert "sample.sde_type='cps'" in line
    assert line.endswith("--config.grpo.clip_range=1e-05")
    sides = {"train__clip_range_low": 1e-5, "train__clip_range_high": 1e-3}
    [line] = warnings_for(sample__sde_type="cps", **sides)
    assert line.startswith("grpo.clip_range_high=0.001 ")
    sides["train__clip_range_high"] = 1e-5
    assert warnings_for(sample__sde_type="cps", **sides) == []


def test_a_setting_of_an_unused_algorithm_gets_a_warning():
    fields = {"awm__times": 3, "awm__kl_beta": 0.5, "train__beta": 0.5}
    lines = warnings_for(algorithm="nft", nft__times=4, **fields)
    assert [line.partition(" ")[0] for line in lines] == [
        *("awm.times=3", "awm.kl_beta=0.5", "grpo.beta=0.5")
    ]
    assert all("algorithm='nft'" in line for line in lines)
    assert ["nft.kl_beta" in line for line in lines] == [False, True, False]


def test_warnings_are_logged_once_before_anything_is_loaded(tmp_path, caplog):
    fields = {"device": "cpu", "dataset": "no/such/folder", "sample__sde_type": "cps"}
    config = with_fields(logdir=str(tmp_path), **fields)
    with caplog.at_level("WARNING"), raises_user_error(field="dataset", value="no/such/folder"):
        build_session(config)
    logged = [record.message for record in caplog.records if record.name == "flow_grpo"]
    assert logged == warnings_for(**fields)


@pytest.mark.parametrize(
    ("name", "value", "start"),
    [
        ("logdir", "logs\udcff", "'logdir': '\\udcff' is"),
        ("run_name", "a\0b", "run_name='a\\x00b' "),
        ("dataset", "x" * 5000, "dataset='xxx"),
        ("custom_rewards", ConfigDict({"mine": "a:\ud800"}), "'custom_rewards.mine': '\\ud800' is"),
    ],
)
def test_text_that_cannot_be_written_is_rejected(name, value, start):
    config = base.get_config()
    config[name] = value
    with pytest.raises(UserError) as error:
        check_config(config)
    assert str(error.value).startswith(start)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["../x", "../../x", "a/../../x", "/tmp/x", ".", "a/..", "./"])
def test_a_run_name_outside_logdir_is_rejected(name):
    with raises_user_error("logdir", field="run_name", value=name):
        check_config(with_fields(run_name=name))
    with raises_user_error(field="run_name", value=name):
        VLM_SPEC.check(with_run_name(vlm_presets.get_config("tiny_vlm"), name))


@pytest.mark.parametrize("name", ["", "a", "a/b", "..a", "a..b", "./a"])
def test_a_run_name_inside_logdir_is_accepted(name):
    check_config(with_fields(run_name=name))


@pytest.mark.parametrize("name", ["run_name", "logdir"])
@pytest.mark.parametrize("value", [" ", " a", "a ", "a\n", "a\x1b[2J"])
def test_directory_names_must_be_printable(name, value):
    with raises_user_error(field=name, value=value):
        check_config(with_fields(**{name: value}))


def test_an_empty_logdir_is_rejected():
    with raises_user_error(field="logdir", value=""):
        check_config(with_fields(logdir=""))


def with_run_name(config: ConfigDict, name: str) -> ConfigDict:
    config.run_name = name
    return config


@pytest.mark.parametrize("get", [presets.get_config, vlm_presets.get_config])
def test_a_revision_of_a_local_directory_is_rejected(get):
    name = "tiny_ocr" if get is presets.get_config else "tiny_vlm"
    config, spec = get(name), base.DIFFUSION_SPEC if name == "tiny_ocr" else VLM_SPEC
    config.pretrained.revision = "v2"
    with raises_user_error("tiny-", field="pretrained.revision", value="v2"):
        spec.check(config)
    config.pretrained.model = "owner/name"
    spec.check(config)


@pytest.mark.parametrize("name", ["dataset", "logdir", "pretrained.model", "train.lora_path"])
def test_a_path_must_not_be_none(name):
    config = base.get_config()
    config.update_from_flattened_dict({name: None})
    with raises_user_error("string", field=name, value=None):
        check_config(config)


def test_a_long_mixture_of_data_sets_is_accepted():
    config = base.get_config()
    config.dataset = ",".join(f"set-{i:03d}.txt:1" for i in range(100))
    check_config(config)
    assert len(parse_sources(config.dataset)) == 100


@pytest.mark.parametrize(
    ("fields", "start"),
    [
        ({"train__batch_size": 3}, "train.batch_size=3 does not divide sample.train_batch_size=8"),
        ({"logdir": str(ROOT), "run_name": "docs"}, f"{ROOT}/docs already exists"),
        ({"resume": "logs/no"}, "resume='logs/no' "),
        ({"train__lora_path": "a/b/c"}, "train.lora_path='a/b/c' "),
        ({"dataset": "no/such/set:1,a.txt:2"}, "dataset='no/such/set' "),
        ({"dataset": "a.txt"}, "dataset='a.txt' "),
        (
            {"custom_rewards": {"own": "no.py:f"}, "reward_fn": {"own": 1.0}},
            "reward 'own': cannot import 'no.py:f' (no such file)",
        ),
    ],
)
def test_preflight_checks_report_invalid_settings_and_files(fields, start):
    with pytest.raises(UserError) as error:
        preflight_check(with_fields(**fields))
    assert str(error.value).startswith(start)


def test_an_active_run_is_reported_by_its_lock_instead(tmp_path):
    """The lock names the process; advice to remove the directory would be wrong."""
    (tmp_path / "run").mkdir()
    config = with_fields(logdir=str(tmp_path), run_name="run")
    with pytest.raises(UserError, match="already exists"):
        preflight_check(config)
    (tmp_path / ".run.lock").touch()
    preflight_check(config)


def test_an_absolute_path_of_a_bundled_data_set_falls_back_to_ours(tmp_path, monkeypatch, caplog):
    """Flow-GRPO's configs join it to the current directory; the fallback is logged."""
    monkeypatch.chdir(tmp_path)
    theirs, ours = os.path.join(os.getcwd(), "dataset/ocr"), str(ROOT / "dataset/ocr")
    with caplog.at_level("INFO"):
        assert check_config(with_fields(dataset=theirs)).dataset == ours
    [message] = caplog.messages
    assert theirs in message
    assert ours in message
    with raises_user_error("make_prompts.py", field="dataset", value="dataset/geneval"):
        check_dataset_available(os.path.join(os.getcwd(), "dataset/geneval"))
    (tmp_path / "dataset/ocr").mkdir(parents=True)
    assert check_config(with_fields(dataset=theirs)).dataset == theirs


def test_small_prompt_files_are_checked_before_slow_imports(tmp_path, monkeypatch, caplog):
    """A missing column and too few prompts are reported at once."""
    table = tmp_path / "train.csv"
    table.write_text("text,tag\na,1\nb,2\n")
    with pytest.raises(UserError, match=r'"prompt".*--config\.dataset_column='):
        preflight_check(with_fields(dataset=str(table)))
    fields = {"dataset": str(table), "dataset_column": "text"}
    with pytest.raises(UserError, match=r" 2 .*needs 4 .*num_batches_per_epoch=4"):
        preflight_check(with_fields(**fields))
    few = {"sample__num_batches_per_epoch": 4, "train__gradient_accumulation_steps": 4}
    with caplog.at_level("INFO"):
        preflight_check(with_fields(**fields, **few))
    assert not caplog.records  # the run logs it
    monkeypatch.setattr("flow_grpo.data.early_checks.MAX_BYTES", 10)
    preflight_check(with_fields(dataset=str(table)))


def test_small_question_files_are_checked_before_slow_imports(tmp_path):
    config = vlm_presets.get_config("tiny_vlm")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "a", "answer": "b"}\n' * 12)
    config.dataset = str(rows)
    with pytest.raises(UserError, match=r"questions, .*sample\.questions_per_epoch=12$"):
        vlm_checks.preflight_check(VLM_SPEC.check(config))
    config.input_key = "prompt"
    with pytest.raises(UserError, match=r"rows\.jsonl:1 .*'prompt' \(input_key\)"):
        vlm_checks.preflight_check(VLM_SPEC.check(config))


def test_preflight_checks_import_no_heavy_package():
    heavy = "[m for m in ('torch', 'transformers', 'diffusers', 'pyarrow') if m in sys.modules]"
    code = "import sys, flow_grpo.diffusion.config_checks, flow_grpo.vlm.config_checks"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print({heavy})"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_a_missing_question_file_is_reported_early():
    config = vlm_presets.get_config("tiny_vlm")
    config.dataset = "dataset/no"
    with raises_user_error(field="dataset", value="dataset/no"):
        vlm_checks.preflight_check(VLM_SPEC.check(config))
