"""Invalid command lines and files of the scripts that show, compare and export runs: each ends with
one line that names the value, and nothing is written."""

import json
import runpy
import shlex
import sys

import pytest
from compare import read_run
from runner import ROOT
from runs import Run, check_unchanged_config, resolve
from user_errors import raises_user_error

from flow_grpo.config import saved_config
from flow_grpo.diffusion.config_loading import check_eval_fields
from flow_grpo.diffusion.fields import DIFFUSION_SPEC
from flow_grpo.diffusion.presets import get_config
from flow_grpo.errors import UserError
from flow_grpo.report.page import build_report_data
from flow_grpo.vlm.fields import VLM_SPEC

COMPARE = "compare.py tiny_ocr --seeds 1 --no-train --out OUT/figure --logdir OUT/logs"
COMMANDS = [  # the command, what the error line contains
    ("export.py --checkpoint OUT --out OUT/e --model=", "--model is empty"),
    ("report.py OUT --port 80", "--port=80 has no effect without --watch"),
    ("report.py OUT --host 0.0.0.0", "--host='0.0.0.0' has no effect without --watch"),
    (f"{COMPARE} --threshold nan", "--threshold=[nan]"),
    (f"{COMPARE} --threshold inf", "--threshold=[inf]"),
    (f"{COMPARE} --rates nan", "--rates=[nan]"),
    (f"{COMPARE} --rates 1e-4 inf", "--rates=[0.0001, inf]"),
    (f"{COMPARE} --choose 5", "--choose=5 has no effect without --rates"),
    (f"{COMPARE} --config.nope=1", "'nope'"),
    (f"{COMPARE} --out ''", "has no file name"),
    (f"{COMPARE} --out ..", "has no file name"),
]


@pytest.mark.parametrize(("command", "named"), COMMANDS, ids=[c for c, _ in COMMANDS])
def test_an_invalid_command_line_is_one_line(tmp_path, monkeypatch, capsys, command, named):
    script, *words = shlex.split(command.replace("OUT", str(tmp_path)))
    monkeypatch.setattr(sys, "argv", [f"scripts/{script}", *words])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "scripts" / script), run_name="__main__")
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert named in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("spec", [DIFFUSION_SPEC, VLM_SPEC], ids=["diffusion", "vlm"])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda fields: fields.clear(), "'pretrained'"),
        (lambda fields: fields.update(pretrained=None), "pretrained=None"),
        (lambda fields: fields.update(sample=[1]), r"sample=\[1\]"),
        (lambda fields: fields.update(reward_fn="ocr"), "reward_fn='ocr'"),
    ],
    ids=["empty", "no section", "a list", "a string"],
)
def test_an_invalid_config_of_a_run_is_named(tmp_path, spec, change, named):
    fields = json.loads(spec.get_config().to_json_best_effort())
    change(fields)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match=named) as error:
        saved_config.load_run_config(tmp_path, spec)
    assert str(tmp_path / "config.json") in str(error.value)


@pytest.mark.parametrize(
    ("option", "eval_field", "value"),
    [
        ("sample.num_steps=4", "sample.eval_num_steps", 40),
        ("dataset=dataset/ocr", "eval_dataset", "dataset/scenes"),
        ("resolution=64", "eval_resolution", 32),
        ("sample.guidance_scale=1", "sample.eval_guidance_scale", 2.0),
        ("reward_fn={'ocr': 1}", "eval_reward_fn", {"jpeg_compressibility": 1.0}),
        ("reward_fn.ocr=2", "eval_reward_fn", {"jpeg_compressibility": 1.0}),
    ],
)
def test_training_settings_are_rejected_where_evaluation_uses_its_own(option, eval_field, value):
    config, given = get_config("tiny_ocr"), [f"--config.{option}"]
    config.update_from_flattened_dict({eval_field: value})
    with raises_user_error(eval_field, eval_field.replace("eval_", "")):
        check_eval_fields(given, config)
    check_eval_fields([*given, f"--config.{eval_field}=..."], config)


@pytest.mark.parametrize("option", ["sample.guidance_scale=1", "reward_fn={'ocr': 1}", "height=8"])
def test_training_settings_apply_to_an_evaluation_without_its_own(option):
    check_eval_fields([f"--config.{option}"], get_config("tiny_ocr"))


def test_an_existing_run_must_have_the_given_fields(tmp_path):
    run, steps = Run("signs", "tiny_ocr", 1), "--config.sample.num_steps=7"
    default = resolve(run, [])["sample.num_steps"]
    fields = {"sample": {"num_steps": default}}
    check_unchanged_config(tmp_path, run, [steps])  # a metrics file without a config
    (tmp_path / "config.json").write_text(json.dumps(fields))
    check_unchanged_config(tmp_path, run, [])
    with raises_user_error(tmp_path, " 7 ", field="sample.num_steps", value=default):
        check_unchanged_config(tmp_path, run, [steps])
    with raises_user_error(tmp_path, " 7 ", field="sample.num_steps", value=default):
        check_unchanged_config(tmp_path, Run("signs", "tiny_ocr+sample.num_steps=7", 1), [])
    fields["sample"]["num_steps"] = 7
    (tmp_path / "config.json").write_text(json.dumps(fields))
    check_unchanged_config(tmp_path, run, [steps])
    (tmp_path / "config.json").write_text("{")
    with raises_user_error("JSON", field=str(tmp_path / "config.json")):
        check_unchanged_config(tmp_path, run, [steps])


def test_a_directory_in_place_of_a_samples_file_is_ignored(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"epoch": 0, "eval/avg": 0.5, "perf/passes": 0}\n')
    (tmp_path / "samples/eval-0/samples.jsonl").mkdir(parents=True)
    [run] = build_report_data([tmp_path])["runs"]
    assert run["eval"]["of"] == 0
    assert read_run(tmp_path)[0].reward == 0.5
