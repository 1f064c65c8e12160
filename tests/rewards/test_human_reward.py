"""Votes of people as a reward: what counts, time-outs, outages and bad answers of the server."""

import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from PIL import Image
from server_process import wait_until
from user_errors import raises_user_error
from voting import TOKEN, TOKEN_VARIABLE, Voter, VoteServer

from flow_grpo.rewards import WeightedReward, build_reward, close_scorers

GREYS = [Image.new("RGB", (8, 8), (level,) * 3) for level in (0, 60, 120, 180, 240)]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[VoteServer]:
    with VoteServer(tmp_path_factory.mktemp("votes") / "out") as server:
        yield server


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)


@pytest.fixture
def human(server) -> Iterator:
    """Factory of rewards; the arguments are options."""
    made = []

    def make(url: str = server.url, **options) -> WeightedReward:
        made.append(
            build_reward({"human": 1.0}, servers={"human": url}, options={"human": options})
        )
        return made[-1]

    yield make
    close_scorers(*made)


def ask(reward: WeightedReward, prompt: str, count: int = 3):
    """Post a group of grey images, each brighter than the one before; return its future scores."""
    return reward.submit(GREYS[:count], [prompt] * count)


def wait_for_ballots(voter: Voter) -> None:
    wait_until(lambda: voter.shown())


def test_win_rates_of_two_voters_with_a_tie(server, human):
    """Pairs (0, 1), (0, 2), (1, 2): ann prefers the brighter image, bob finds all equal."""
    pending = ask(human(votes_per_pair=2), "two voters")
    ann, bob = Voter(server, "ann"), Voter(server, "bob")
    wait_for_ballots(ann)
    assert ann.vote_on_all() == 3
    assert bob.vote_on_all(prefer=lambda *_: "tie") == 3
    scores = pending.result()
    assert scores["human"].tolist() == [0.25, 0.5, 0.75]
    assert scores["human/unjudged"].tolist() == [0, 0, 0]


def test_groups_are_separate_and_a_skipped_pair_is_unscored(server, human):
    reward = human()
    prompts = ["skipped", "judged", "skipped", "judged", "alone"]
    pending = reward.submit(GREYS, prompts)
    voter = Voter(server)
    wait_until(lambda: {each["prompt"] for each in voter.shown()} == {"skipped", "judged"})
    for ballot in voter.shown():
        choice = {"skipped": "skip", "judged": "first"}[ballot["prompt"]]
        assert voter.vote(ballot, choice).ok
    scores = pending.result()["human"]
    assert scores[[1, 3]].tolist() == [1, 0]
    assert all(map(math.isnan, scores[[0, 2, 4]]))


def test_edits_of_one_source_are_a_group_and_show_it(server, human):
    sources = [Image.new("RGB", (8, 8), color) for color in ("red", "blue", "red", "blue")]
    metadata = [{"source": source} for source in sources]
    pending = human().submit(GREYS[:4], ["edited"] * 4, metadata)
    voter = Voter(server)
    wait_until(lambda: len(voter.shown()) == 2)
    assert len({tuple(each["sources"]) for each in voter.shown()}) == 2
    voter.vote_on_all()
    assert pending.result()["human"].tolist() == [0, 0, 1, 1]


def test_batches_are_asked_at_the_same_time(server, human):
    reward = human()
    first, second = ask(reward, "first batch", 2), ask(reward, "second batch", 2)
    voter = Voter(server)
    wait_until(lambda: len(voter.shown()) == 2)
    voter.vote_on_all()
    for pending in (first, second):
        assert pending.result()["human"].tolist() == [0, 1]


def test_a_time_out_is_nan_and_votes_are_found_again(server, human):
    voter = Voter(server)
    stopped = human()
    pending = ask(stopped, "time-out")
    wait_until(lambda: len(voter.shown()) == 3)
    assert voter.vote_on_all(most=1) == 1
    close_scorers(stopped)  # as a run does at its end
    pending.result()
    assert voter.shown() == []
    impatient = human(timeout=0.1)
    scores = ask(impatient, "time-out").result()  # nobody votes, but one vote is known
    assert sorted(map(str, scores["human"])) == ["0.0", "1.0", "nan"]
    assert sorted(scores["human/unjudged"]) == [0.5, 0.5, 1]
    assert "0.1 s" in impatient.last_errors["human"]
    assert voter.shown() == []
    pending = ask(human(), "time-out")
    wait_for_ballots(voter)
    assert voter.vote_on_all() == 2
    assert pending.result()["human"].tolist() == [0, 0.5, 1]


def test_a_killed_server_loses_no_vote_and_counts_none_twice(tmp_path, human, caplog):
    with VoteServer(tmp_path / "out") as server:
        pending = ask(human(server.url), "killed")
        voter = Voter(server)
        wait_until(lambda: len(voter.shown()) == 3)
        ballots = voter.shown()
        assert voter.vote_on_all(most=1) == 1
        server.kill()
        wait_until(lambda: any(record.levelname == "WARNING" for record in caplog.records))
        server.restart()
        for ballot in ballots:  # the page repeats votes without a response
            voter.vote(ballot, "first")
        assert sorted(pending.result()["human"]) == sorted([0, 0.5, 1])
        votes = [json.loads(line) for line in server.votes.read_text().splitlines()]
        assert sorted(v["ballot"] for v in votes) == sorted(b["id"] for b in ballots)


def test_a_missing_token_and_other_servers_are_rejected(server, human, monkeypatch):
    human().check(["a prompt"])
    monkeypatch.delenv(TOKEN_VARIABLE)
    with raises_user_error("401", TOKEN_VARIABLE, field="reward_servers.human"):
        human().check(["a prompt"])
    with (
        replying(404, b"<html>") as url,
        raises_user_error(field="reward_servers.human", value=url),
    ):
        human(url).check(["a prompt"])
    with raises_user_error(field="reward_servers.human", value=url):  # it is down now
        human(url).check(["a prompt"])


@contextmanager
def replying(status: int, content: bytes) -> Iterator[str]:
    """A server with one answer to everything."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_DELETE = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("content", "timeout"),
    [
        (b"null", 60),
        (b'{"pairs": [[0, 5, 1, 0, 0]], "done": true}', 60),
        (b'{"pairs": [[0, 0, 1, 0, 0]], "done": true}', 60),
        (b'{"pairs": [[0, 1, -1, 2, 0]], "done": true}', 60),
        (b'{"pairs": [[0, 1, 1e9, 2, 0]], "done": true}', 60),
        (b'{"pairs": [[0, 1, 1, 0]], "done": true}', 60),
        (b'{"pairs": [[0, 1, 1, 0, 0]], "done": 1}', 60),
        (b"<html>starting", 0.1),  # of a proxy, so it is asked again until the time is over
    ],
)
def test_malformed_votes_are_no_scores(human, content, timeout):
    with replying(200, content) as url:
        scores = ask(human(url, timeout=timeout), "malformed").result()["human"]
    assert all(map(math.isnan, scores))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"timeout": 0}, "timeout"),
        ({"timeout": "1h"}, "timeout"),
        ({"votes_per_pair": 0}, "votes_per_pair"),
        ({"votes_per_pair": 1.5}, "votes_per_pair"),
        ({"pairs_per_image": 1}, "pairs_per_image"),
        ({"pairs_per_image": True}, "pairs_per_image"),
    ],
)
def test_invalid_options_are_rejected(human, options, field):
    with raises_user_error(field=f"reward_options.human.{field}", value=options[field]):
        human(**options)


def test_the_address_comes_from_the_config_or_the_environment(monkeypatch):
    monkeypatch.delenv("HUMAN_URL", raising=False)
    with raises_user_error("HUMAN_URL", field="reward_servers.human"):
        build_reward({"human": 1.0})
    monkeypatch.setenv("HUMAN_URL", "votes.example.org")
    with raises_user_error(field="HUMAN_URL", value="votes.example.org"):
        build_reward({"human": 1.0})
    monkeypatch.setenv("HUMAN_URL", "http://votes.example.org")
    assert build_reward({"human": 1.0}).scorers["human"].interactive
    two = "http://a,http://b"
    with raises_user_error(field="reward_servers.human", value=two):
        build_reward({"human": 1.0}, servers={"human": two})
