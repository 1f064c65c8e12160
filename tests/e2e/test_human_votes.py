"""Runs that wait for the votes of a scripted voter; run and server are killed in between."""

import json
from collections.abc import Iterator

import pytest
from runner import FORK_SERVER, Runner, torchrun
from server_process import wait_until
from voting import TOKEN, TOKEN_VARIABLE, Voter, VoteServer

SHORT = {  # two groups of four images per epoch and process, in batches of one group
    "config": "config/grpo.py:tiny_ocr",
    "device": "cpu",
    "num_epochs": 1,
    "eval_freq": 0,
    "eval_before_training": False,
    "eval_prompts": 1,
    "eval_reward_fn": "{'jpeg_compressibility': 1.0}",
    "reward_fn": "{'human': 1.0, 'jpeg_compressibility': 0.0}",
    "reward_options": "{'human': {'pairs_per_image': 2, 'timeout': 300}}",
    "sample__num_steps": 2,
    "sample__sde_window_size": 0,
    "sample__train_batch_size": 4,
    "sample__num_image_per_prompt": 4,
    "sample__num_batches_per_epoch": 2,
    "train__batch_size": 4,
    "train__gradient_accumulation_steps": 2,
}
PAIRS = 4  # of a group


@pytest.fixture
def server(tmp_path, monkeypatch) -> Iterator[VoteServer]:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    with VoteServer(tmp_path / "votes") as server:
        yield server


def votes(server: VoteServer) -> list[dict]:
    return [json.loads(line) for line in server.votes.read_text().splitlines()]


def wait_for_ballots(voter: Voter, count: int) -> None:
    """Wait until this many ballots are left for the voter."""
    wait_until(lambda: voter.progress()["left"] == count, 120)


def assert_all_judged_once(runner: Runner, server: VoteServer, groups: int) -> None:
    ballots = [vote["ballot"] for vote in votes(server)]
    assert len(ballots) == len({*ballots}) == groups * PAIRS
    [metrics] = runner.metrics()
    assert metrics["reward/failed"] == metrics["reward/human/failed"] == 0
    assert metrics["reward/human/unjudged"] == 0
    assert metrics["reward/human"] == 0.5
    assert metrics["reward/human/std"] > 0
    assert metrics["train/grad_norm"] > 0


def test_votes_survive_the_death_of_run_and_server(run, server):
    run.fields["reward_servers"] = f"{{'human': '{server.url}'}}"
    voter = Voter(server)

    process = run.start(launcher=FORK_SERVER, **SHORT)
    wait_for_ballots(voter, 2 * PAIRS)
    assert voter.vote_on_all(most=1) == 1
    process.terminate()
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 75, stderr
    assert server.url in stdout  # where to vote
    assert voter.shown() == []  # nobody waits for the votes now

    resumed = run.start("--config.resume=auto", launcher=FORK_SERVER, **SHORT)
    wait_for_ballots(voter, 2 * PAIRS - 1)
    assert voter.vote_on_all(most=2) == 2
    resumed.kill()
    resumed.communicate()

    again = run.start("--config.resume=auto", launcher=FORK_SERVER, **SHORT)
    wait_until(lambda: "vote at" in again.stdout.readline(), 120)
    server.kill()
    server.restart()
    assert voter.vote_on_all() == 2 * PAIRS - 3
    _, stderr = again.communicate(timeout=120)
    assert again.returncode == 0, stderr
    assert_all_judged_once(run, server, groups=2)


def test_each_process_posts_its_groups(run, server):
    run.fields["reward_servers"] = f"{{'human': '{server.url}'}}"
    voter = Voter(server)
    process = run.start(launcher=torchrun(), **SHORT)
    wait_for_ballots(voter, 4 * PAIRS)
    voter.vote_on_all()
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert_all_judged_once(run, server, groups=4)
