"""Errors under torchrun and `accelerate launch`, which print a failure report themselves."""

import os
import subprocess
import sys

import pytest
from runner import accelerate, environment, torchrun

ACCELERATE = accelerate(
    *("--num_processes=2", "--main_process_port=0"),
    "--config_file=scripts/accelerate_configs/multi_gpu.yaml",
)
OUR_LAUNCHER = (
    *(sys.executable, "scripts/multi_node/launch.py", "torchrun"),
    *("--nproc_per_node=2", "--standalone"),
)


def assert_report_ends_with(stderr: str, line: str) -> None:
    """Check that the first process prints the error once and the launcher's report ends with it.

    The report is followed by a horizontal rule.
    """
    *_, last, rule = stderr.strip().splitlines()
    assert set(rule) == {"="}
    assert last.split("traceback : ")[1].startswith(line)
    assert stderr.count(line) == 2, stderr
    assert sum(each.startswith(line) for each in stderr.splitlines()) == 1, stderr
    assert "To enable traceback see" not in stderr


@pytest.fixture
def slow_first(tmp_path):
    """A config that rank 0 reads after rank 1 has raised its error."""
    file = tmp_path / "slow.py"
    file.write_text(
        "import os, time\n"
        "from flow_grpo.diffusion.fields import get_config as base\n"
        "def get_config():\n"
        "    time.sleep(4 * (os.environ['RANK'] == '0'))\n"
        "    return base()\n"
    )
    return file


def test_the_report_of_torchrun_ends_with_the_error(train, slow_first):
    done = train(launcher=torchrun(), config=slow_first, sample__num_stepz=3)
    assert done.returncode != 0
    error = "error: unknown config key 'sample.num_stepz'; did you mean sample.num_steps?"
    assert_report_ends_with(done.stderr, error)


def test_our_launcher_prints_only_the_error(train, slow_first):
    done = train(launcher=OUR_LAUNCHER, config=slow_first, sample__num_stepz=3)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("error: unknown config key 'sample.num_stepz'")


def test_the_report_of_accelerate_ends_with_a_reward_outage_during_training(
    train, tmp_path, monkeypatch
):
    """The reward fails on one of two processes, after the evaluation."""
    (tmp_path / "second_fails.py").write_text(
        "import os\n"
        "def score(images, prompts, metadata):\n"
        "    return [1.0] * (len(images) - int(os.environ['RANK']) * (len(images) > 2))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    done = train(
        launcher=ACCELERATE,
        reward_fn="{'second': 1.0}",
        custom_rewards="{'second': 'second_fails:score'}",
        eval_reward_fn="{'jpeg_compressibility': 1.0}",
    )
    assert done.returncode != 0
    line = "error: epoch 1: reward 'second' gave no score for 8 of 16 images"
    assert_report_ends_with(done.stderr, line)
    assert "it returned scores of shape (3,) for 4 images" in done.stderr.splitlines()[-2]
    assert done.stdout.count("epoch 0/1") == 1


def test_the_error_of_a_process_is_reported_rather_than_the_lost_connection_of_others(tmp_path):
    script = tmp_path / "one_is_full.py"
    script.write_text(
        "import os, torch\n"
        "from torch import distributed\n"
        "from flow_grpo.errors import OutOfMemory\n"
        "from flow_grpo.config.error_reporting import exit_on_user_error\n"
        "def main():\n"
        "    distributed.init_process_group('gloo')\n"
        "    if os.environ['RANK'] == '1':\n"
        "        raise OutOfMemory('GPU 1 is full')\n"
        "    distributed.all_reduce(torch.ones(1))\n"
        "exit_on_user_error(main, debug=False)\n"
    )
    command, env = [*torchrun(), str(script)], environment(warmed=True)
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode != 0
    assert_report_ends_with(done.stderr, "error: GPU 1 is full")
    assert "lost contact" not in done.stderr
