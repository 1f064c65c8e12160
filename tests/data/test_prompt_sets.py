"""Mixtures of prompt sets, and held-out test prompts."""

import json
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from user_errors import raises_user_error

from flow_grpo.data.epoch_batches import build_epoch_batches
from flow_grpo.data.mixing import allocate_groups, hold_out, parse_sources
from flow_grpo.data.prompts import Prompt
from flow_grpo.diffusion import fields
from flow_grpo.diffusion.config_checks import check_config, preflight_check
from flow_grpo.diffusion.plan import BatchPlan
from flow_grpo.diffusion.prompts import build_prompts, build_test_prompts

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
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
def test_sets_and_shares_are_parsed_from_one_string(dataset, expected):
    found = [(s.path, s.name, s.share) for s in parse_sources(dataset)]
    assert found == [(path, name, Fraction(share)) for path, name, share in expected]


def test_a_path_may_contain_a_comma_or_a_colon(tmp_path):
    odd = make_set(tmp_path / "a,b:0.5", 2)
    assert [s.path for s in parse_sources(str(odd))] == [str(odd)]


@pytest.mark.parametrize(
    ("dataset", "shown"),
    [
        ("", "empty path"),
        ("a,,b", "empty path"),
        ("a:0.5,b", "for every set or for none"),
        ("a:x,b:1", "'x'; write it like \"path/a:0.7,path/b:0.3\""),
        ("a:nan,b:1", "'nan'"),
        ("a:1/0,b:1", "'1/0'"),
        ("a:0,b:1", "above 0"),
        ("a:1,a:2", "a twice"),
    ],
)
def test_invalid_shares_are_rejected(dataset, shown):
    with raises_user_error(shown, field="dataset", value=dataset):
        parse_sources(dataset)


@given(st.integers(1, 100), st.lists(st.fractions(Fraction(1, 99), 9), min_size=1, max_size=5))
def test_groups_add_up_and_are_proportional_to_shares(groups, shares):
    counts = allocate_groups(groups, shares)
    assert sum(counts) == groups
    for count, share in zip(counts, shares, strict=True):
        assert abs(count - groups * share / sum(shares)) < 1


def test_the_largest_remainder_gets_the_next_group_and_the_first_set_wins_ties():
    assert allocate_groups(10, [Fraction("0.7"), Fraction("0.3")]) == [7, 3]
    assert allocate_groups(10, [Fraction("0.25"), Fraction("0.26"), Fraction("0.49")]) == [2, 3, 5]
    assert allocate_groups(5, [Fraction(1), Fraction(1)]) == [3, 2]


@given(st.integers(0, 99), st.sampled_from([(1, 12), (2, 3), (3, 2), (4, 1)]))
def test_every_epoch_has_its_groups_of_each_set_for_any_number_of_processes(seed, split):
    world, batch_size = split
    sizes = [(20, 4), (5, 5), (9, 3)]

    def draw(world, batch_size):
        draws = [
            build_epoch_batches(
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
        draws = build_epoch_batches(
            rows=200, groups=100, group_size=1, batch_size=50, updates=2, process=0,
            num_processes=1, rng=rng(seed), sets=[(100, 50), (100, 50)],
        )  # fmt: skip
        first, second = (int((draw.row < 100).sum()) for draw in draws)
        assert first + second == 50
        return first

    assert all(10 < first_half(seed) < 40 for seed in range(5))


def test_a_single_set_is_sampled_without_replacement():
    settings = dict(group_size=1, batch_size=4, updates=1, process=0, num_processes=1)
    for sets in ((), [(50, 4)]):
        [draw] = build_epoch_batches(rows=50, groups=4, rng=rng(3), sets=sets, **settings)
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
def test_no_text_is_in_both_splits(texts, seed):
    prompts = [Prompt(text, "", {"row": i}) for i, text in enumerate(texts)]
    train, test = hold_out(prompts, rng(seed))
    if len(set(texts)) < 10:
        assert train is test is prompts
        return
    assert train
    assert test
    assert not {p.prompt for p in train} & {p.prompt for p in test}
    assert sorted(p.metadata["row"] for p in [*train, *test]) == list(range(len(texts)))


def test_both_splits_have_rows_if_one_text_dominates():
    prompts = [*(Prompt(f"rare {i}") for i in range(9)), *[Prompt("often")] * 91]
    for seed in range(8):
        train, test = hold_out(prompts, rng(seed))
        assert train
        assert test


def test_the_held_out_split_is_logged_and_the_same_in_an_evaluation(tmp_path, caplog):
    folder = make_set(tmp_path / "mine", 40)
    with caplog.at_level("INFO"):
        data = build_prompts(config_of(folder), plan(8))
    assert (len(data.train), len(data.test), data.sets) == (36, 4, [(36, 8)])
    [record] = caplog.records
    for shown in (str(folder), "4 of its 40 prompts", "seed=42"):
        assert shown in record.getMessage()
    few = make_set(tmp_path / "few", 4)
    with caplog.at_level("INFO"):
        data_of_few = build_prompts(config_of(few), plan(4))
    assert data_of_few.train == data_of_few.test
    assert str(few) in caplog.text
    assert "its 4 prompts are too few" in caplog.text
    assert build_test_prompts(config_of(folder)) == data.test
    assert build_test_prompts(config_of(folder, seed=1)) != data.test
    assert build_test_prompts(config_of(folder / "train.txt")) == data.test
    (folder / "test.txt").write_text("my own")
    assert build_prompts(config_of(folder), plan(8)).test == [Prompt("my own")]
    (folder / "train.txt").unlink()
    assert build_test_prompts(config_of(folder)) == [Prompt("my own")]


def test_sets_are_concatenated_for_training_and_interleaved_for_testing(tmp_path, caplog):
    one, two = make_set(tmp_path / "one", 8, test=2), make_set(tmp_path / "two", 6, test=4)
    config = config_of(f"{one}:0.75,{two}:0.25", eval_prompts=5)
    with caplog.at_level("INFO"):
        data = build_prompts(config, plan(8))
    assert data.sets == [(8, 6), (6, 2)]
    assert [p.metadata["dataset"] for p in data.train] == ["one"] * 8 + ["two"] * 6
    expected = ["one test 0", "two test 0", "one test 1", "two test 1", "two test 2"]
    assert [p.prompt for p in data.test] == expected
    assert "6 of 8 groups" in caplog.text
    assert build_test_prompts(config) == data.test


def test_a_set_with_too_few_rows_or_groups_is_rejected(tmp_path):
    one, two = make_set(tmp_path / "one", 90, test=1), make_set(tmp_path / "two", 3, test=1)
    setting = "sample.num_batches_per_epoch"
    shown = ("3 training prompts", "8 groups", "needs 4 distinct prompts", setting)
    with raises_user_error(*shown, field=str(two)):
        build_prompts(config_of(f"{one}:1,{two}:1"), plan(8))
    with raises_user_error("share", "8 groups", setting, field=str(two)):
        build_prompts(config_of(f"{one}:99,{two}:1"), plan(8))
    with raises_user_error(two, " 3 ", " 8 "):
        build_prompts(config_of(two), plan(8))


@pytest.mark.parametrize(("scale", "lines"), [(1.0, 1), (4.5, 0)])
def test_negative_prompts_without_guidance_are_logged_once(tmp_path, caplog, scale, lines):
    for split in ("train", "test"):
        (tmp_path / f"{split}.csv").write_text("prompt,negative_prompt\na,blurry\nb,\nc,dark\n")
    config = config_of(tmp_path, **{"sample.guidance_scale": scale})
    with caplog.at_level("INFO"):
        build_prompts(config, plan(2))
    assert "3 of 3 test prompts are also training prompts" in caplog.text
    logged = [m for m in caplog.messages if "sample.guidance_scale" in m]
    assert len(logged) == lines
    assert all("2" in m and "sample.guidance_scale=1.0" in m for m in logged)


def test_a_run_from_a_spreadsheet_and_a_text_file(make_session, tmp_path):
    """Each set has its share of the groups and its own metrics in the evaluation."""
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

    def submit(images, prompts, metadata, audio):
        seen.extend(zip(prompts, metadata, strict=True))
        return score(images, prompts, metadata, audio)

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


def write_rows(file: Path, *rows: dict) -> Path:
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def test_an_eval_dataset_replaces_the_test_split(tmp_path):
    """Nothing is held out then: all rows of `dataset` are trained."""
    train, other = make_set(tmp_path / "train", 20), make_set(tmp_path / "other", 3, test=2)
    config = config_of(train, eval_dataset=str(other))
    data = build_prompts(config, plan(4))
    assert len(data.train) == 20
    assert [p.prompt for p in data.test] == ["other test 0", "other test 1"]
    assert build_test_prompts(config) == data.test
    config.eval_prompts = 1
    assert build_prompts(config, plan(4)).test == build_test_prompts(config) == data.test[:1]


def test_an_eval_dataset_without_a_test_split_is_used_whole(tmp_path):
    train, other = make_set(tmp_path / "train", 20, test=5), make_set(tmp_path / "other", 12)
    for source in (other, other / "train.txt"):
        test = build_prompts(config_of(train, eval_dataset=str(source)), plan(4)).test
        assert [p.prompt for p in test] == [f"other train {i}" for i in range(12)]


def test_an_eval_dataset_has_its_own_columns_and_may_be_a_mixture(tmp_path):
    train = write_rows(tmp_path / "t.jsonl", *({"text": f"t{i}"} for i in range(4)))
    one = write_rows(tmp_path / "one.jsonl", {"caption": "a"}, {"caption": "b"})
    two = write_rows(tmp_path / "two.jsonl", {"caption": "c"})
    config = config_of(train, eval_dataset=f"{one},{two}", dataset_column="text")
    with raises_user_error("--config.eval_dataset_column=NAME", field=f"{one}:1"):
        build_prompts(config, plan(2))
    config.eval_dataset_column = "caption"
    test = build_prompts(config, plan(2)).test
    assert [(p.prompt, p.metadata["dataset"]) for p in test] == [
        ("a", "one"),
        ("c", "two"),
        ("b", "one"),
    ]


@pytest.mark.parametrize(
    ("eval_dataset", "message"), [("missing", "does not exist"), ("a:x,b:1", "invalid share")]
)
def test_errors_name_the_setting_of_the_eval_dataset(tmp_path, eval_dataset, message):
    config = config_of(make_set(tmp_path / "train", 20), eval_dataset=eval_dataset)
    for load in (lambda: build_prompts(config, plan(4)), lambda: preflight_check(config)):
        with raises_user_error(message, field="eval_dataset", value=eval_dataset):
            load()


def test_columns_of_an_eval_dataset_need_one(tmp_path):
    config = config_of(make_set(tmp_path / "train", 20), eval_dataset_column="caption")
    with raises_user_error("eval_dataset=''", field="eval_dataset_column", value="caption"):
        check_config(config)


def test_test_prompts_that_are_trained_are_reported(tmp_path, caplog):
    train = make_set(tmp_path / "train", 20)
    caplog.set_level("INFO", "flow_grpo")
    build_prompts(config_of(train, eval_dataset=str(train)), plan(4))
    assert "20 of 20 test prompts are also training prompts" in caplog.text
