"""Errors in a config file or in overrides are one line that names the place."""

import shlex
import sys

import pytest
from runner import ROOT
from user_errors import raises_user_error

from flow_grpo.config import command_line, migration, overrides
from flow_grpo.config.error_reporting import format_command, quote_for_shell
from flow_grpo.config.paths import resolve_config_file
from flow_grpo.diffusion.config_loading import load_config_file
from flow_grpo.diffusion.fields import DIFFUSION_SPEC
from flow_grpo.errors import UserError
from flow_grpo.vlm.fields import VLM_SPEC

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
def new_process(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "config_config", None)
    del sys.modules["config_config"]


def write(path, body: str) -> str:
    path.write_text(
        "from flow_grpo.diffusion.fields import get_config as base\n\n"
        f"def get_config():\n    {body}\n"
    )
    return f"--config={path}"


@pytest.mark.parametrize("body", BODIES)
def test_an_error_in_a_config_file_names_its_line(tmp_path, body):
    with pytest.raises(UserError, match=BODIES[body]) as error:
        overrides.load_checked_config(
            ["train.py", write(tmp_path / "mine.py", body)], DIFFUSION_SPEC
        )
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
        overrides.load_checked_config(["train.py", f"--config={path}"], DIFFUSION_SPEC)
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=r"cannot load --config .*none\.py: .*No such file"):
        overrides.load_checked_config(
            ["train.py", f"--config={tmp_path / 'none.py'}"], DIFFUSION_SPEC
        )
    with pytest.raises(UserError, match=r"cannot load --config .*mien\.py.*mean .*/mine\.py\?$"):
        overrides.load_checked_config(
            ["train.py", f"--config={tmp_path / 'mien.py'}"], DIFFUSION_SPEC
        )


def test_names_of_flow_grpo_are_translated_on_the_command_line(tmp_path):
    config = write(tmp_path / "mine.py", "return base()")
    overrides.load_checked_config(["train.py", config, "--config.logdir=logs/ocr"], DIFFUSION_SPEC)
    for name, ours in migration.RENAMED_FIELDS.items():
        overrides.load_checked_config(["train.py", config, f"--config.{ours}=1"], DIFFUSION_SPEC)
        with pytest.raises(UserError, match=f"'{name}'; it is called {ours} here"):
            overrides.load_checked_config(
                ["train.py", config, f"--config.{name}=1"], DIFFUSION_SPEC
            )


def test_an_alias_and_its_setting_must_not_differ(tmp_path):
    config = write(tmp_path / "mine.py", "return base()")
    overrides.load_checked_config(
        ["train.py", config, "--config.train.beta=.1", "--config.grpo.beta=.1"], DIFFUSION_SPEC
    )
    with raises_user_error("grpo.beta=.2", field="train.beta", value=0.1):
        overrides.load_checked_config(
            ["train.py", config, "--config.train.beta=.1", "--config.grpo.beta=.2"], DIFFUSION_SPEC
        )


def test_a_suggested_command_keeps_all_other_options(monkeypatch):
    script = f"{ROOT}/scripts/train.py"
    kept = ["--config.num_epochs=3", "--dry_run", "--config.project_name=a b"]
    words = ["--config", "a.py", "--config.reward_fn.ocr=1", "--config.run_name", "x", "--resume=y"]
    argv = [script, *words, "--config.num_epochs", "3", *kept[1:]]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", ["python", *argv])
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    line = format_command("--resume logs/x", without=["run_name", "reward_fn"])
    assert line.startswith(f"python {script} --resume logs/x ")
    assert shlex.split(line)[4:] == kept
    assert [quote_for_shell(word) for word in ("a", "--b={'c': 1}", "--b=$d")] == [
        *("a", "--b=\"{'c': 1}\"", "'--b=$d'")
    ]


def test_a_preset_name_alone_selects_its_config_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = str(ROOT / "config/grpo.py")
    for argv in (["--config", "tiny_ocr"], ["--config=tiny_ocr"]):
        found = command_line._resolve_config_options(
            ["train.py", *argv], DIFFUSION_SPEC.preset_file
        )
        assert " ".join(found).replace("=", " ") == f"train.py --config {file}:tiny_ocr"
    assert (
        resolve_config_file("tiny_vlm", VLM_SPEC.preset_file)
        == f"{ROOT / 'config/vlm.py'}:tiny_vlm"
    )
    with pytest.raises(UserError, match="did you mean tiny_ocr"):
        load_config_file("tiny_orc", [])
    assert load_config_file("tiny_ocr", ["--config.seed=7"]).seed == 7
    (tmp_path / "tiny_ocr").touch()  # files take precedence
    assert resolve_config_file("tiny_ocr", DIFFUSION_SPEC.preset_file) == "tiny_ocr"


def test_a_setting_of_other_algorithms_is_not_suggested(tmp_path):
    """train.clip_range is an alias of grpo.clip_range."""
    config = write(tmp_path / "mine.py", "return base()")
    for method, message in {
        "nft": "has no setting clip_range$",
        "dgpo": r"did you mean --config\.dgpo\.clip_range=1e-4\?$",
        "grpo": r"did you mean --config\..*train\.clip_range=1e-4",
    }.items():
        argv = ["train.py", config, f"--config.algorithm={method}", "--clip_range=1e-4"]
        with pytest.raises(UserError, match=message):
            overrides.load_checked_config(argv, DIFFUSION_SPEC)
