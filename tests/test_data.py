import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flow_grpo.data.prompts import Prompt, epoch_draws, load_prompts
from flow_grpo.errors import UserError


def test_text_prompts_are_lines(tmp_path):
    (tmp_path / "train.txt").write_text("a cat\n\n  a dog \nA Cat\n")
    assert load_prompts(tmp_path, "train") == [Prompt("a cat"), Prompt("a dog"), Prompt("A Cat")]


def test_lines_end_at_newlines_only_and_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "train_metadata.jsonl").write_bytes(
        b"\xef\xbb\xbf" + '{"prompt": "a\u2028b"}\r\n'.encode()
    )
    assert load_prompts(tmp_path, "train") == [Prompt("a\u2028b", "", {"prompt": "a\u2028b"})]


def test_metadata_goes_to_the_rewards(tmp_path):
    row = {"prompt": "two cats", "negative_prompt": "blurry", "count": 2, "tag": "counting"}
    (tmp_path / "test_metadata.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "test.txt").write_text("other\n")
    expected = Prompt("two cats", "blurry", {k: row[k] for k in ("prompt", "count", "tag")})
    assert load_prompts(tmp_path, "test") == [expected]
    assert load_prompts(tmp_path, "test", "text") == [Prompt("other")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (None, "", "no dataset at"),
        ("train.txt", "\n \n", "train.txt is empty"),
        (
            "train_metadata.jsonl",
            '{"prompt": "a"}\n{"prompt": \n',
            "train_metadata.jsonl:2: not JSON",
        ),
        ("train_metadata.jsonl", '{"text": "a"}\n', 'jsonl:1: needs an object with a "prompt"'),
        ("train_metadata.jsonl", '{"prompt": "a", "negative_prompt": 3}', "must be a string"),
        ("train.txt", b"\xff\xfe", "not UTF-8"),
        ("train_metadata.jsonl", r'{"prompt": "a \ud800"}', r"jsonl:1: '\\ud800' is half a char"),
        ("train_metadata.jsonl", r'{"prompt": "a", "negative_prompt": "\udfff"}', "is half a char"),
        ("train_metadata.jsonl", r'{"prompt": "a", "tags": [{"b": "\ud83d"}]}', "is half a char"),
    ],
)
def test_a_bad_dataset_is_named_with_its_line(tmp_path, name, content, message):
    if name:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message):
        load_prompts(tmp_path, "train")


def test_a_character_of_two_halves_is_whole(tmp_path):
    (tmp_path / "train_metadata.jsonl").write_text(r'{"prompt": "a \ud83d\ude00"}')
    assert [p.prompt for p in load_prompts(tmp_path, "train")] == ["a \U0001f600"]


def test_an_unknown_prompt_fn_is_named(tmp_path):
    with pytest.raises(UserError, match="unknown prompt_fn='geneval'"):
        load_prompts(tmp_path, "train", "geneval")


plans = st.tuples(
    st.sampled_from([1, 2, 4]),  # processes
    st.integers(1, 3),  # samples per batch
    st.integers(1, 3),  # batches per update
    st.integers(1, 3),  # updates
    st.integers(1, 6),  # images per prompt
)


@given(plans, st.integers(0, 1000))
def test_an_update_has_the_same_samples_for_any_number_of_processes_and_batch_size(plan, seed):
    processes, size, batches, updates, group_size = plan
    total = processes * size * batches * updates * group_size
    groups = total // group_size

    def draw(world, batch_size):
        """Pairs of sample and row, update by update, of all processes together."""
        parts = [
            epoch_draws(
                rows=groups + 3,
                groups=groups,
                group_size=group_size,
                batch_size=batch_size,
                updates=updates,
                process=p,
                num_processes=world,
                rng=np.random.default_rng(seed),
            )
            for p in range(world)
        ]
        assert all(len(b.index) == batch_size for part in parts for b in part)
        pairs = [
            [(int(k), int(r)) for b in part for k, r in zip(b.index, b.row, strict=True)]
            for part in parts
        ]
        share = total // (updates * world)
        return [
            {pair for part in pairs for pair in part[u * share : (u + 1) * share]}
            for u in range(updates)
        ]

    many = draw(processes, size)
    assert many == draw(1, size)
    assert many == draw(1, total)  # one batch for all updates
    everything = set().union(*many)
    rows = [row for _, row in everything]
    assert sorted(k for k, _ in everything) == list(range(total))
    assert len(set(rows)) == groups
    assert all(rows.count(row) == group_size for row in set(rows))


@pytest.mark.parametrize(
    ("prompt_fn", "wanted"),
    [
        ("auto", "test_metadata.jsonl, test.jsonl, test.csv, test.parquet or test.txt"),
        ("text", "test.txt"),
        ("metadata", "test_metadata.jsonl"),
    ],
)
def test_a_missing_dataset_is_told_with_the_files_it_may_be(tmp_path, prompt_fn, wanted):
    with pytest.raises(UserError) as told:
        load_prompts(tmp_path, "test", prompt_fn)
    assert str(told.value) == (
        f"no dataset at {tmp_path}: it must hold {wanted} (prompt_fn={prompt_fn!r})"
    )


def test_prompts_can_be_asked_for_with_their_metadata(tmp_path):
    (tmp_path / "train.txt").write_text("other\n")
    (tmp_path / "train_metadata.jsonl").write_text(
        '{"prompt": "a", "negative_prompt": null, "n": 1}\n'
    )
    assert load_prompts(tmp_path, "train", "metadata") == [Prompt("a", "", {"prompt": "a", "n": 1})]


@pytest.mark.parametrize("row", [["prompt"], {"prompt": 3}, {"prompt": ""}, {"prompt": None}])
def test_a_row_without_a_prompt_is_shown(tmp_path, row):
    (tmp_path / "train_metadata.jsonl").write_text(json.dumps(row))
    with pytest.raises(UserError) as told:
        load_prompts(tmp_path, "train")
    where = f"{tmp_path}/train_metadata.jsonl:1"
    needs = f'{where}: needs an object with a "prompt" string, got {json.dumps(row)}'
    assert str(told.value) == needs


def test_of_a_long_row_the_beginning_is_shown(tmp_path):
    (tmp_path / "train_metadata.jsonl").write_text(json.dumps({"text": "a" * 99}))
    with pytest.raises(UserError, match=r'got \{"text": "a{70}$'):  # 80 characters
        load_prompts(tmp_path, "train")


def test_what_can_be_chosen_is_told(tmp_path):
    with pytest.raises(UserError, match=r"choose one of auto, text, metadata$"):
        load_prompts(tmp_path, "train", "all")
