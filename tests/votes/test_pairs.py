"""Pairs that a model generates ahead of the voters."""

from contextlib import closing
from pathlib import Path

import pytest
from demo_run import make_trained_run
from user_errors import raises_user_error

from flow_grpo.data.preferences import load_preferences
from flow_grpo.data.prompts import Prompt
from flow_grpo.diffusion.config_loading import load_run_config
from flow_grpo.votes.ask import ORDERS
from flow_grpo.votes.ballots import CHECKPOINTS, Ballot, Vote
from flow_grpo.votes.book import VoteBook
from flow_grpo.votes.image_files import ImageFiles
from flow_grpo.votes.pairs import PairGenerator

PROMPTS = [Prompt("a cat"), Prompt("a dog"), Prompt("a cat"), Prompt("a fox")]
REWARD = "jpeg_compressibility"


@pytest.fixture(scope="module")
def run(tiny_sd3, tmp_path_factory) -> Path:
    return make_trained_run(tiny_sd3, tmp_path_factory.mktemp("logs") / "mine")


def generate(
    run: Path, folder: Path, *checkpoints: str, wanted: int, prompts=PROMPTS, **options
) -> list[Ballot]:
    """Generate until `wanted` pairs are stored, and return all ballots."""
    folder.mkdir(exist_ok=True)
    generator = PairGenerator(load_run_config(run, []), checkpoints, prompts, **options)
    book = VoteBook(folder, ORDERS["random"])
    with closing(book):
        with closing(generator):
            generator.start(book, ImageFiles(folder))
            while len(book.votes_by_ballot()) < wanted:
                generator._thread.join(0.05)
                assert not generator.status()[1]
        return [ballot for ballot, _ in book.votes_by_ballot()]


def test_a_restart_continues_and_repeats_no_pair(run, tmp_path):
    """With a buffer of one pair, the next is generated once there is a vote."""
    generator = PairGenerator(load_run_config(run, []), [str(run)], PROMPTS, rounds=2, ahead=1)
    book = VoteBook(tmp_path, ORDERS["random"])
    with closing(generator), closing(book):
        generator.start(book, ImageFiles(tmp_path))
        for voted in range(3):
            while not (ballots := book.next_ballots("ann", 9)):
                generator._thread.join(0.05)
            assert len(book.votes_by_ballot()) == voted + 1
            assert generator.status() == (5 - voted, "")
            book.cast(Vote(str(voted), ballots[0].id, "ann", "first"))
        generator.close()
        started = [ballot for ballot, _ in book.votes_by_ballot()]
    both = generate(run, tmp_path, str(run), wanted=6, rounds=2)
    assert both[: len(started)] == started
    assert [each.prompt for each in both] == ["a cat", "a dog", "a fox"] * 2
    assert len({each.id for each in both}) == 6
    images = [image for each in both for image in each.images]
    assert len({*images}) == 12  # all noises differ
    assert {p.name for p in (tmp_path / "images").iterdir()} == {Path(i).name for i in images}
    assert {each.source for each in both} == {CHECKPOINTS}
    pairs = load_preferences(tmp_path / "votes.jsonl").pairs
    assert [pair.prompt.prompt for pair in pairs] == ["a cat", "a dog", "a fox"]
    assert pairs[0].chosen == tmp_path / both[0].images[0]


def test_two_checkpoints_start_from_the_same_noise(run, tiny_sd3, tmp_path):
    same = generate(
        run, tmp_path / "same", "base", str(tiny_sd3), wanted=2, prompts=PROMPTS[:2], reward=REWARD
    )
    assert all(each.is_identical and each.margin == 0 for each in same)  # nothing to ask
    other = generate(
        run, tmp_path / "other", "base", str(run), wanted=2, prompts=PROMPTS[:2], reward=REWARD
    )
    assert [each.images[0] for each in other] == [each.images[0] for each in same]
    assert not any(each.is_identical for each in other)
    assert other[0].candidates == ("base", "checkpoint-8")
    assert all(each.margin >= 0 for each in other)
    assert any(each.margin > 0 for each in other)


def test_invalid_candidates_and_rewards_are_rejected(run, tiny_sd3):
    config = load_run_config(run, [])
    with raises_user_error(field="--checkpoint"):
        PairGenerator(config, ["base", str(run), str(tiny_sd3)], PROMPTS)
    with raises_user_error("unknown_reward"):
        PairGenerator(config, ["base"], PROMPTS, reward="unknown_reward")
