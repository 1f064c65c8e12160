"""Wrong command lines and files of the scripts that show, compare and export runs, in this process:
each ends with one line that names the value, and nothing is written."""

import json
import runpy
import shlex
import sys

import pytest
from compare import read_run
from runner import ROOT
from runs import Run, check_changes, resolve

from flow_grpo.answer.fields import ANSWER
from flow_grpo.config import saved
from flow_grpo.draw.fields import DRAW
from flow_grpo.draw.presets import get_config
from flow_grpo.draw.saved import check_eval_fields
from flow_grpo.errors import UserError
from flow_grpo.show.page import build

COMPARE = "compare.py tiny_ocr --seeds 1 --no-train --out OUT/figure --logdir OUT/logs"
COMMANDS = [  # what is typed, what the line names
    ("export.py --checkpoint OUT --out OUT/e --model=", "--model is empty"),
    ("report.py OUT --port 80", "--port 80 has no effect without --watch"),
    ("report.py OUT --host 0.0.0.0", "--host 0.0.0.0 has no effect without --watch"),
    (f"{COMPARE} --threshold nan", "--threshold [nan]"),
    (f"{COMPARE} --threshold inf", "--threshold [inf]"),
    (f"{COMPARE} --rates nan", "--rates [nan]"),
    (f"{COMPARE} --rates 1e-4 inf", "inf] must be finite"),
    (f"{COMPARE} --choose 5", "--choose=5 has no effect without --rates"),
    (f"{COMPARE} --config.nope=1", "'nope'"),
    (f"{COMPARE} --out ''", "has no file name"),
    (f"{COMPARE} --out ..", "has no file name"),
]


@pytest.mark.parametrize(("command", "named"), COMMANDS, ids=[c for c, _ in COMMANDS])
def test_a_wrong_command_line_of_a_tool(tmp_path, monkeypatch, capsys, command, named):
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


@pytest.mark.parametrize("trade", [DRAW, ANSWER], ids=["diffusion", "vlm"])
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
def test_a_config_of_a_run_that_cannot_be_read(tmp_path, trade, change, named):
    fields = json.loads(trade.get_config().to_json_best_effort())
    change(fields)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match=named) as error:
        saved.config_of_run(tmp_path, trade)
    assert str(tmp_path / "config.json") in str(error.value)


@pytest.mark.parametrize(
    ("option", "own", "value"),
    [
        ("sample.num_steps=4", "sample.eval_num_steps", 40),
        ("sample.guidance_scale=1", "sample.eval_guidance_scale", 2.0),
        ("reward_fn={'ocr': 1}", "eval_reward_fn", {"jpeg_compressibility": 1.0}),
        ("reward_fn.ocr=2", "eval_reward_fn", {"jpeg_compressibility": 1.0}),
    ],
)
def test_settings_of_training_are_not_ignored_by_an_evaluation(option, own, value):
    config, given = get_config("tiny_ocr"), [f"--config.{option}"]
    config.update_from_flattened_dict({own: value})
    with pytest.raises(UserError, match=f"has no effect.*{own}") as error:
        check_eval_fields(given, config)
    assert own.replace("eval_", "") in str(error.value)
    check_eval_fields([*given, f"--config.{own}=..."], config)


@pytest.mark.parametrize("option", ["sample.guidance_scale=1", "reward_fn={'ocr': 1}"])
def test_settings_of_training_count_where_an_evaluation_has_none_of_its_own(option):
    check_eval_fields([f"--config.{option}"], get_config("tiny_ocr"))


def test_a_run_that_is_shown_has_the_fields_that_were_given(tmp_path):
    run, steps = Run("signs", "tiny_ocr", 1), "--config.sample.num_steps=7"
    fields = {"sample": {"num_steps": resolve(run, [])["sample.num_steps"]}}
    check_changes(tmp_path, run, [steps])  # a metrics file alone
    (tmp_path / "config.json").write_text(json.dumps(fields))
    check_changes(tmp_path, run, [])
    with pytest.raises(UserError, match=r"has sample\.num_steps=\d+, not 7"):
        check_changes(tmp_path, run, [steps])
    with pytest.raises(UserError, match=r"has sample\.num_steps=\d+, not 7"):
        check_changes(tmp_path, Run("signs", "tiny_ocr+sample.num_steps=7", 1), [])
    fields["sample"]["num_steps"] = 7
    (tmp_path / "config.json").write_text(json.dumps(fields))
    check_changes(tmp_path, run, [steps])
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        check_changes(tmp_path, run, [steps])


def test_a_folder_in_place_of_samples_is_not_read(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"epoch": 0, "eval/avg": 0.5, "perf/passes": 0}\n')
    (tmp_path / "samples/eval-0/samples.jsonl").mkdir(parents=True)
    [run] = build([tmp_path])["runs"]
    assert run["eval"]["of"] == 0
    assert read_run(tmp_path)[0].reward == 0.5
