"""A run with a judge in an isolated environment, whose server is killed in the middle of an epoch.

The environment is created from scratch, offline; it uses the packages of the tests.
"""

import json
import os
import re
import signal

import numpy as np
import psutil
import pytest
from PIL import Image
from runner import FORK_SERVER, Runner, run_script
from server_process import wait_until
from small_deqa import MODELING, write_small_deqa
from user_errors import raises_user_error

from flow_grpo.rewards import build_scorers
from flow_grpo.rewards.environments import RECORD, environment_names, get_environment
from flow_grpo.rewards.environments.create import make_environment
from flow_grpo.rewards.workers.environment import EnvironmentServer

# Counts its calls, and the third one waits until the server is killed.
GATED = MODELING.replace(
    "    def score(self, images):\n",
    """    def score(self, images):
        import time
        from pathlib import Path

        folder = Path({folder!r})
        (folder / f"call-{{time.time_ns()}}").touch()
        while len([*folder.glob("call-*")]) == 3 and not (folder / "gate").exists():
            time.sleep(0.02)
""",
)
SERVED = {"reward_fn": "{'deqa': 1.0}", "reward_servers": "{'deqa': 'env:deqa'}"}


@pytest.fixture(scope="module")
def environments(tmp_path_factory):
    """Return a directory with the environment `deqa`, created by the command."""
    folder = tmp_path_factory.mktemp("environments")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLOW_GRPO_REWARD_ENVS", str(folder))
        done = run_script("scripts/reward_env.py", "deqa", "--inherit")
        assert done.returncode == 0, done.stderr
        assert f"{folder / 'deqa'} works" in done.stdout
        assert "env:deqa" in done.stdout
        yield folder


@pytest.fixture
def judge(environments, tmp_path, monkeypatch) -> str:
    """Return the directory of the gated model; its code is cached per test."""
    monkeypatch.setenv("FLOW_GRPO_REWARD_ENVS", str(environments))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "judge"
    folder.mkdir()
    return write_small_deqa(folder, GATED.format(folder=str(tmp_path)))


def servers(judge: str) -> list[psutil.Process]:
    """Return the processes of servers with this judge: a supervisor and a server each."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        command = " ".join(process.info["cmdline"] or ())
        if "-m reward_server " in command and judge in command:
            found.append(process)
    return [each for each in found if each.info["status"] != psutil.STATUS_ZOMBIE]


def test_a_run_survives_the_death_of_its_judge_and_stops_it(
    short_runs, environments, judge, tmp_path
):
    train = Runner(tmp_path / "logs", **short_runs)
    options = f"{{'deqa': {{'model': {judge!r}, 'trust_remote_code': True}}}}"
    process = train.start(
        launcher=FORK_SERVER,
        **SERVED,
        reward_options=options,
        num_epochs=2,
        eval_prompts=2,
        log_images=8,
        eval_freq=1,  # samples are saved in these epochs
    )
    try:
        wait_until(lambda: len([*tmp_path.glob("call-*")]) == 3, 300)
        before = servers(judge)
        assert len(before) == 2
        for each in before:
            each.send_signal(signal.SIGKILL)
        (tmp_path / "gate").touch()
        stdout, stderr = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, stderr
    assert "restarting it" in stdout + stderr
    rows = [row for row in train.metrics() if "reward/failed" in row]
    assert [(row["reward/failed"], row["reward/samples"]) for row in rows] == [(0, 8), (0, 8)]
    for epoch in (1, 2):
        folder = train.logdir / f"run/samples/train-{epoch:05d}"
        samples = [json.loads(line) for line in (folder / "samples.jsonl").open()]
        assert samples
        for sample in samples:
            mean = np.asarray(Image.open(folder / sample["file"]).convert("RGB")).mean() / 255
            assert sample["deqa"] == pytest.approx((1 + 4 * mean) / 5, abs=2e-3)
    wait_until(lambda: not servers(judge))


def test_the_judge_ends_with_a_killed_run(short_runs, judge, tmp_path):
    train = Runner(tmp_path / "logs", **short_runs)
    options = f"{{'deqa': {{'model': {judge!r}, 'trust_remote_code': True}}}}"
    process = train.start(launcher=FORK_SERVER, **SERVED, reward_options=options, num_epochs=2)
    try:
        wait_until(lambda: len([*tmp_path.glob("call-*")]) == 3, 300)
        assert servers(judge)
    finally:
        process.kill()
    process.communicate(timeout=60)
    wait_until(lambda: not servers(judge))


def test_a_judge_that_cannot_be_built_ends_the_run_in_one_line(environments, judge):
    """The server raises the same error as the reward in process."""
    with raises_user_error("trust_remote_code=True"):
        build_scorers(["deqa"], servers={"deqa": "env:deqa"}, options={"deqa": {"model": judge}})
    assert not servers(judge)


def test_wrong_environments_are_reported(environments, tmp_path, monkeypatch):
    field = "reward_servers.deqa"
    with raises_user_error("did you mean deqa?", field=field, value="deqaa"):
        build_scorers(["deqa"], servers={"deqa": "env:deqaa"})
    monkeypatch.setenv("FLOW_GRPO_REWARD_ENVS", str(tmp_path))
    with raises_user_error("flow-grpo reward-env deqa", field=field, value="env:deqa"):
        build_scorers(["deqa"], servers={"deqa": "env:deqa"})
    monkeypatch.setenv("FLOW_GRPO_REWARD_ENVS", str(environments))
    record = environments / "deqa" / RECORD
    done = run_script("scripts/reward_env.py", "deqa", "--inherit", "--python", "/bin/false")
    assert "is not a Python interpreter" in done.stderr
    content = record.read_text()
    record.write_text(json.dumps({**json.loads(content), "lock": "of an earlier version"}))
    try:
        with raises_user_error("another lock file", field=field):
            build_scorers(["deqa"], servers={"deqa": "env:deqa"})
    finally:
        record.write_text(content)
    [site] = (environments / "deqa").glob("lib/*/site-packages")
    (site / "broken.pth").write_text("import os; os._exit(3)")
    try:
        with raises_user_error("importing reward 'deqa' failed"):
            make_environment(get_environment("deqa"), inherit=True, log=print)
        assert not record.exists()
    finally:
        (site / "broken.pth").unlink()
        record.write_text(content)
    interpreter = environments / "deqa/bin/python"
    target = os.readlink(interpreter)
    interpreter.unlink()
    interpreter.symlink_to(tmp_path / "removed")
    try:
        with raises_user_error("has no interpreter", field=field):
            build_scorers(["deqa"], servers={"deqa": "env:deqa"})
        server = EnvironmentServer(get_environment("deqa"), "ocr", options={}, device="cpu")
        with raises_user_error("No such file"):
            server.wait_until_ready()
        server.close()
    finally:
        interpreter.unlink()
        interpreter.symlink_to(target)


def test_directories_and_interpreters_are_checked_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setenv("FLOW_GRPO_REWARD_ENVS", str(tmp_path))
    (tmp_path / "deqa").mkdir()
    kept = tmp_path / "deqa/photos"
    kept.touch()
    for arguments, shown in (
        ([], f"{tmp_path / 'deqa'} exists and is not a virtual environment"),
        (["--python", "/bin/false"], "is not a Python interpreter"),
        (["--python", "/bin/echo"], "is not a Python interpreter"),
    ):
        done = run_script("scripts/reward_env.py", "deqa", *arguments)
        assert done.returncode == 2
        assert shown in done.stderr
        assert done.stderr.count("\n") == 1
    assert kept.exists()
    listed = run_script("scripts/reward_env.py")
    assert re.search(r"(?m)^deqa +missing +rewards deqa, qalign; Python >=3.11", listed.stdout)


@pytest.mark.parametrize("name", environment_names())
def test_lock_files_pin_every_package(name):
    environment = get_environment(name)
    assert environment.rewards
    lines = environment.lock.read_text().splitlines()
    packages = [line for line in lines if line and not line.startswith("#")]
    assert len(packages) > 20
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in packages)
    names = {line.partition("==")[0].lower().replace("-", "_") for line in packages}
    server = {"fastapi", "uvicorn", "prometheus_client", "psutil", "ml_collections", "requests"}
    assert server <= names
    assert os.access(environment.lock, os.R_OK)
