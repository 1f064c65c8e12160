"""A config file that is not right: one line that says where."""

import shlex
import sys

import pytest
from runner import ROOT

from flow_grpo.answer.fields import ANSWER
from flow_grpo.config import command_line, old_names, overrides
from flow_grpo.config.mistakes import line_to_type, quoted
from flow_grpo.config.places import find_config
from flow_grpo.draw.fields import DRAW
from flow_grpo.draw.saved import config_of_file
from flow_grpo.errors import UserError

BODIES = {
    "return None": "must return a ConfigDict, not NoneType",
    "return {'seed': 1}": "must return a ConfigDict, not dict",
    "return nothing": r"\(line 4\): NameError: name 'nothing' is not defined",
    "return base()['sample']['num_stepz']": r"\(line 4\): KeyError: .*num_stepz",
    "config = base(); config.train.learning_rate = 'fast'; return config": (
        r"\(line 4\): TypeError: Could not override field 'learning_rate'"
    ),
    "raise ValueError": r"\(line 4\): ValueError: $",
}


@pytest.fixture(autouse=True)
def as_in_a_new_process(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "config_config", None)
    del sys.modules["config_config"]


def write(path, body: str) -> str:
    path.write_text(
        f"from flow_grpo.draw.fields import get_config as base\n\ndef get_config():\n    {body}\n"
    )
    return f"--config={path}"


@pytest.mark.parametrize("body", BODIES)
def test_what_is_wrong_in_a_config_file_is_told_with_its_line(tmp_path, body):
    with pytest.raises(UserError, match=BODIES[body]) as error:
        overrides.check_names(["train.py", write(tmp_path / "mine.py", body)], DRAW)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", "has no attribute 'get_config'"),
        ("def get_config(:\n", "SyntaxError: "),
        ("import no_such_module\n", r"\(line 1\): ModuleNotFoundError: No module named 'no_such"),
    ],
)
def test_a_file_without_a_config(tmp_path, text, message):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(UserError, match=f"cannot load --config .*{message}") as error:
        overrides.check_names(["train.py", f"--config={path}"], DRAW)
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=r"cannot load --config .*none\.py: .*No such file"):
        overrides.check_names(["train.py", f"--config={tmp_path / 'none.py'}"], DRAW)
    with pytest.raises(UserError, match=r"cannot load --config .*mien\.py.*mean .*/mine\.py\?$"):
        overrides.check_names(["train.py", f"--config={tmp_path / 'mien.py'}"], DRAW)


def test_flow_grpos_names_are_translated_on_the_command_line(tmp_path):
    config = write(tmp_path / "mine.py", "return base()")
    overrides.check_names(["train.py", config, "--config.logdir=logs/ocr"], DRAW)
    for name, ours in old_names.RENAMED.items():
        overrides.check_names(["train.py", config, f"--config.{ours}=1"], DRAW)
        with pytest.raises(UserError, match=f"unknown config key '{name}'; it is {ours} here"):
            overrides.check_names(["train.py", config, f"--config.{name}=1"], DRAW)


def test_two_names_of_one_field_cannot_have_two_values(tmp_path):
    config = write(tmp_path / "mine.py", "return base()")
    overrides.check_names(
        ["train.py", config, "--config.train.beta=.1", "--config.grpo.beta=.1"], DRAW
    )
    message = r"^train\.beta=\.1 and grpo\.beta=\.2 are two names of one field; give one$"
    with pytest.raises(UserError, match=message):
        overrides.check_names(
            ["train.py", config, "--config.train.beta=.1", "--config.grpo.beta=.2"], DRAW
        )


def test_the_line_to_type_has_all_that_was_typed_but_what_it_should_be_without(monkeypatch):
    script = f"{ROOT}/scripts/train.py"
    kept = ["--config.num_epochs=3", "--dry_run", "--config.project_name=a b"]
    words = ["--config", "a.py", "--config.reward_fn.ocr=1", "--config.run_name", "x", "--resume=y"]
    argv = [script, *words, "--config.num_epochs", "3", *kept[1:]]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", ["python", *argv])
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    line = line_to_type("--resume logs/x", without=["run_name", "reward_fn"])
    assert line.startswith(f"python {script} --resume logs/x ")
    assert shlex.split(line)[4:] == kept
    assert [quoted(word) for word in ("a", "--b={'c': 1}", "--b=$d")] == [
        *("a", "--b=\"{'c': 1}\"", "'--b=$d'")
    ]


def test_a_preset_name_alone_is_a_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = str(ROOT / "config/grpo.py")
    for argv in (["--config", "tiny_ocr"], ["--config=tiny_ocr"]):
        found = command_line._with_our_configs(["train.py", *argv], DRAW.preset_file)
        assert " ".join(found).replace("=", " ") == f"train.py --config {file}:tiny_ocr"
    assert find_config("tiny_vlm", ANSWER.preset_file) == f"{ROOT / 'config/vlm.py'}:tiny_vlm"
    with pytest.raises(UserError, match="did you mean tiny_ocr"):
        config_of_file("tiny_orc", [])
    assert config_of_file("tiny_ocr", ["--config.seed=7"]).seed == 7
    (tmp_path / "tiny_ocr").touch()  # a file comes first
    assert find_config("tiny_ocr", DRAW.preset_file) == "tiny_ocr"


def test_a_method_without_a_setting_is_not_told_to_set_it(tmp_path):
    """train.clip_range is an alias of grpo.clip_range."""
    config = write(tmp_path / "mine.py", "return base()")
    for method, told in {
        "nft": "the algorithm of this run has no setting clip_range$",
        "dgpo": r"did you mean --config\.dgpo\.clip_range=1e-4\?$",
        "grpo": r"did you mean --config\..*train\.clip_range=1e-4",
    }.items():
        argv = ["train.py", config, f"--config.algorithm={method}", "--clip_range=1e-4"]
        with pytest.raises(UserError, match=told):
            overrides.check_names(argv, DRAW)
