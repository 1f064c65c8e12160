"""Several prompt sets in one run, and test prompts that are held out."""

import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flow_grpo.data.mixing import hold_out, parse_sources, share_out
from flow_grpo.data.prompts import Prompt, epoch_draws
from flow_grpo.draw import fields
from flow_grpo.draw.plan import BatchPlan
from flow_grpo.draw.prompts import build_prompts, build_test_prompts
from flow_grpo.errors import UserError

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
from train import train as train_loop


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def plan(groups: int) -> BatchPlan:
    return BatchPlan(
        num_processes=1,
        sample_batch_size=2,
        batches_per_epoch=groups,
        group_size=2,
        train_batch_size=2,
        accumulation_steps=1,
        inner_epochs=1,
    )


def config_of(dataset, **changes):
    config = fields.get_config()
    config.dataset = str(dataset)
    config.update_from_flattened_dict(changes)
    return config


def told(call, *args) -> str:
    with pytest.raises(UserError) as error:
        call(*args)
    assert "\n" not in str(error.value)
    return str(error.value)


def make_set(folder: Path, rows: int, test: int = 0) -> Path:
    folder.mkdir()
    for split, count in (("train", rows), ("test", test)):
        lines = [f"{folder.name} {split} {i}" for i in range(count)]
        if lines:
            (folder / f"{split}.txt").write_text("\n".join(lines))
    return folder


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        ("path/a", [("path/a", "a", 1)]),
        ("path/a:0.7,path/b:0.3", [("path/a", "a", "0.7"), ("path/b", "b", "0.3")]),
        ("path/a, other/a", [("path/a", "path/a", 1), ("other/a", "other/a", 1)]),
        ("path/a:1/3,b:2e0", [("path/a", "a", "1/3"), ("b", "b", 2)]),
    ],
)
def test_sets_and_shares_are_one_string(dataset, expected):
    found = [(s.path, s.name, s.share) for s in parse_sources(dataset)]
    assert found == [(path, name, Fraction(share)) for path, name, share in expected]


def test_a_path_may_have_a_comma_or_a_colon_in_it(tmp_path):
    odd = make_set(tmp_path / "a,b:0.5", 2)
    assert [s.path for s in parse_sources(str(odd))] == [str(odd)]


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ("", "dataset='' names no prompt set in one place; write it like"),
        ("a,,b", "dataset='a,,b' names no prompt set in one place; write it like"),
        ("a:0.5,b", "dataset='a:0.5,b' must have a share for each set or for none; write it like"),
        ("a:x,b:1", "dataset='a:x,b:1': 'x' is no share; write it like \"path/a:0.7,path/b:0.3\""),
        ("a:nan,b:1", "dataset='a:nan,b:1': 'nan' is no share; write it"),
        ("a:1/0,b:1", "dataset='a:1/0,b:1': '1/0' is no share; write it"),
        ("a:0,b:1", "dataset='a:0,b:1': the share 0 must be above 0"),
        ("a:1,a:2", "dataset='a:1,a:2' names a twice; add up the shares"),
    ],
)
def test_a_mistake_in_the_shares_is_told(dataset, message):
    assert told(parse_sources, dataset).startswith(message)


@given(st.integers(1, 100), st.lists(st.fractions(Fraction(1, 99), 9), min_size=1, max_size=5))
def test_groups_are_shared_out_to_the_last(groups, shares):
    counts = share_out(groups, shares)
    assert sum(counts) == groups
    for count, share in zip(counts, shares, strict=True):
        assert abs(count - groups * share / sum(shares)) < 1


def test_the_largest_remainder_gets_what_is_left_and_the_first_of_equal_ones():
    assert share_out(10, [Fraction("0.7"), Fraction("0.3")]) == [7, 3]
    assert share_out(10, [Fraction("0.25"), Fraction("0.26"), Fraction("0.49")]) == [2, 3, 5]
    assert share_out(5, [Fraction(1), Fraction(1)]) == [3, 2]


@given(st.integers(0, 99), st.sampled_from([(1, 12), (2, 3), (3, 2), (4, 1)]))
def test_every_epoch_has_its_groups_of_each_set_for_any_number_of_processes(seed, split):
    world, batch_size = split
    sizes = [(20, 4), (5, 5), (9, 3)]

    def draw(world, batch_size):
        draws = [
            epoch_draws(
                rows=34, groups=12, group_size=2, batch_size=batch_size, updates=2, process=p,
                num_processes=world, rng=rng(seed), sets=sizes,
            )
            for p in range(world)
        ]  # fmt: skip
        parts = [part for own in draws for part in own]
        index, row = (np.concatenate([getattr(p, n) for p in parts]) for n in ("index", "row"))
        return set(zip(index.tolist(), row.tolist(), strict=True))

    drawn = draw(world, batch_size)
    assert drawn == draw(1, 24)
    rows = [row for _, row in drawn]
    assert len(set(rows)) == 12
    counts = [
        len({r for r in rows if first <= r < last}) for first, last in ((0, 20), (20, 25), (25, 34))
    ]
    assert counts == [4, 5, 3]


def test_updates_mix_the_sets():
    def first_half(seed):
        draws = epoch_draws(
            rows=200, groups=100, group_size=1, batch_size=50, updates=2, process=0,
            num_processes=1, rng=rng(seed), sets=[(100, 50), (100, 50)],
        )  # fmt: skip
        first, second = (int((draw.row < 100).sum()) for draw in draws)
        assert first + second == 50
        return first

    assert all(10 < first_half(seed) < 40 for seed in range(5))


def test_one_set_is_drawn_as_ever():
    settings = dict(group_size=1, batch_size=4, updates=1, process=0, num_processes=1)
    for sets in ((), [(50, 4)]):
        [draw] = epoch_draws(rows=50, groups=4, rng=rng(3), sets=sets, **settings)
        assert draw.row.tolist() == rng(3).choice(50, size=4, replace=False).tolist()


@pytest.mark.parametrize(("rows", "tests"), [(10, 1), (20, 2), (500, 50), (9000, 256)])
def test_a_tenth_is_held_out_at_least_one_and_at_most_256(rows, tests):
    prompts = [Prompt(f"prompt {i}") for i in range(rows)]
    train, test = hold_out(prompts, rng())
    assert len(test) == tests
    assert {p.prompt for p in [*train, *test]} == {p.prompt for p in prompts}
    assert len(train) == rows - tests
    assert (train, test) == hold_out(prompts, rng())
    if rows == 500:
        assert test != hold_out(prompts, rng(1))[1]


@given(st.lists(st.sampled_from("abcdefghijklmn"), min_size=2, max_size=60), st.integers(0, 99))
def test_no_text_is_in_both_however_often_it_is_there(texts, seed):
    prompts = [Prompt(text, "", {"row": i}) for i, text in enumerate(texts)]
    train, test = hold_out(prompts, rng(seed))
    if len(set(texts)) < 10:
        assert train is test is prompts
        return
    assert train
    assert test
    assert not {p.prompt for p in train} & {p.prompt for p in test}
    assert sorted(p.metadata["row"] for p in [*train, *test]) == list(range(len(texts)))


def test_a_text_that_is_nearly_all_of_a_set_is_not_held_out_with_the_others():
    prompts = [*(Prompt(f"rare {i}") for i in range(9)), *[Prompt("often")] * 91]
    for seed in range(8):
        train, test = hold_out(prompts, rng(seed))
        assert train
        assert test


def test_what_is_held_out_is_told_and_the_same_for_an_evaluation(tmp_path, caplog):
    folder = make_set(tmp_path / "mine", 40)
    with caplog.at_level("INFO"):
        data = build_prompts(config_of(folder), plan(8))
    assert (len(data.train), len(data.test), data.sets) == (36, 4, [(36, 8)])
    assert [record.getMessage() for record in caplog.records] == [
        f"{folder} has no test prompts: held out 4 of its 40 prompts by seed=42; for your own, "
        "give a folder with a train and a test file"
    ]
    few = make_set(tmp_path / "few", 4)
    with caplog.at_level("INFO"):
        data_of_few = build_prompts(config_of(few), plan(4))
    assert data_of_few.train == data_of_few.test
    assert f"{few} has no test prompts: its 4 prompts, too few to hold any out, are" in caplog.text
    assert build_test_prompts(config_of(folder)) == data.test
    assert build_test_prompts(config_of(folder, seed=1)) != data.test
    assert build_test_prompts(config_of(folder / "train.txt")) == data.test
    (folder / "test.txt").write_text("my own")
    assert build_prompts(config_of(folder), plan(8)).test == [Prompt("my own")]
    (folder / "train.txt").unlink()
    assert build_test_prompts(config_of(folder)) == [Prompt("my own")]


def test_sets_are_joined_with_their_names_and_tested_in_turn(tmp_path, caplog):
    one, two = make_set(tmp_path / "one", 8, test=2), make_set(tmp_path / "two", 6, test=4)
    config = config_of(f"{one}:0.75,{two}:0.25", eval_prompts=5)
    with caplog.at_level("INFO"):
        data = build_prompts(config, plan(8))
    assert data.sets == [(8, 6), (6, 2)]
    assert [p.metadata["dataset"] for p in data.train] == ["one"] * 8 + ["two"] * 6
    assert [p.prompt for p in data.test] == [
        *("one test 0", "two test 0", "one test 1", "two test 1", "two test 2")
    ]
    assert "6 of 8 groups" in caplog.text
    assert build_test_prompts(config) == data.test


def test_a_set_that_cannot_give_its_share_is_told(tmp_path):
    one, two = make_set(tmp_path / "one", 90, test=1), make_set(tmp_path / "two", 3, test=1)
    assert told(build_prompts, config_of(f"{one}:1,{two}:1"), plan(8)) == (
        f"{two} has 3 prompts to train on but its share of the 8 groups of an epoch needs 4 "
        "distinct ones; add prompts, lower its share or sample.num_batches_per_epoch"
    )
    assert told(build_prompts, config_of(f"{one}:99,{two}:1"), plan(8)) == (
        f"the share of {two} comes to none of the 8 groups of an epoch; raise it, or "
        "sample.num_batches_per_epoch"
    )
    alone = f"{two} has 3 prompts to train on but an epoch needs 8 distinct ones"
    assert told(build_prompts, config_of(two), plan(8)).startswith(alone)


@pytest.mark.parametrize(("scale", "lines"), [(1.0, 1), (4.5, 0)])
def test_negative_prompts_without_guidance_are_told_once(tmp_path, caplog, scale, lines):
    for split in ("train", "test"):
        (tmp_path / f"{split}.csv").write_text("prompt,negative_prompt\na,blurry\nb,\nc,dark\n")
    config = config_of(tmp_path, **{"sample.guidance_scale": scale})
    with caplog.at_level("INFO"):
        build_prompts(config, plan(2))
    assert "3 of 3 test prompts are also training prompts" in caplog.text
    told = [r.getMessage() for r in caplog.records if r.getMessage().startswith("not used")]
    assert told == lines * [
        "not used: negative_prompt of 2 out of 3 prompts; it takes guidance, and "
        "sample.guidance_scale=1.0 is none (above 1 is)"
    ]


def test_a_run_from_a_spreadsheet_and_a_text_file(make_session, tmp_path):
    """Each set has its share of the groups and its own rows in the evaluation."""
    table = tmp_path / "table.csv"
    rows = [f'"a sign that says ""{word}""",{n}' for n, word in enumerate(("CAT", "DOG", "SUN"))]
    table.write_text("\n".join(["\ufeffcaption,number", *rows]), encoding="utf-8")
    (tmp_path / "lines.txt").write_text("two red circles\na blue square\na green triangle\n")
    session = make_session(
        **{
            "dataset": f"{table}:0.5,{tmp_path / 'lines.txt'}:0.5",
            "dataset_column": "caption",
            "num_epochs": 1,
            "sample.eval_num_steps": 2,
        }
    )
    seen, score = [], session.reward.submit

    def submit(images, prompts, metadata):
        seen.extend(zip(prompts, metadata, strict=True))
        return score(images, prompts, metadata)

    session.reward.submit = submit
    train_loop(session)
    assert [m["dataset"] for _, m in seen].count("table") == 2  # one group of two
    assert len(seen) == 4
    signs = [(p, m) for p, m in seen if m["dataset"] == "table"]
    assert all(m["prompt"] == m["caption"] == p and m["number"] in "012" for p, m in signs)
    metrics = session.progress.record
    parts = [metrics[f"eval/{name}/jpeg_compressibility"] for name in ("table", "lines")]
    assert np.mean(parts) == pytest.approx(metrics["eval/jpeg_compressibility"])
    assert metrics["eval/table/avg"] == parts[0]
