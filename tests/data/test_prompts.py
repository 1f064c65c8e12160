import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from user_errors import raises_user_error

from flow_grpo.data.epoch_batches import build_epoch_batches
from flow_grpo.data.prompts import Prompt, load_prompts


def test_text_prompts_are_lines(tmp_path):
    (tmp_path / "train.txt").write_text("a cat\n\n  a dog \nA Cat\n")
    assert load_prompts(tmp_path, "train") == [Prompt("a cat"), Prompt("a dog"), Prompt("A Cat")]


def test_lines_end_at_newlines_only_and_a_byte_order_mark_is_ignored(tmp_path):
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
    assert load_prompts(tmp_path, "test", prompt_fn="text") == [Prompt("other")]


@pytest.mark.parametrize(
    ("name", "content", "shown"),
    [
        ("train.txt", "\n \n", "train.txt is empty"),
        ("train_metadata.jsonl", '{"prompt": "a"}\n{"prompt": \n', "train_metadata.jsonl:2"),
        ("train_metadata.jsonl", '{"text": "a"}\n', '"prompt"'),
        ("train_metadata.jsonl", '{"prompt": "a", "negative_prompt": 3}', "got 3"),
        ("train.txt", b"\xff\xfe", "UTF-8"),
        ("train_metadata.jsonl", r'{"prompt": "a \ud800"}', r"'\ud800'"),
        ("train_metadata.jsonl", r'{"prompt": "a", "negative_prompt": "\udfff"}', r"'\udfff'"),
        ("train_metadata.jsonl", r'{"prompt": "a", "tags": [{"b": "\ud83d"}]}', r"'\ud83d'"),
    ],
)
def test_an_invalid_file_is_named_with_the_line(tmp_path, name, content, shown):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    where = f"{path}:" if name.endswith("jsonl") else path
    with raises_user_error(where, shown):
        load_prompts(tmp_path, "train")


def test_a_surrogate_pair_is_one_character(tmp_path):
    (tmp_path / "train_metadata.jsonl").write_text(r'{"prompt": "a \ud83d\ude00"}')
    assert [p.prompt for p in load_prompts(tmp_path, "train")] == ["a \U0001f600"]


def test_an_unknown_prompt_fn_is_rejected_with_the_choices(tmp_path):
    with raises_user_error("auto, text, metadata", field="prompt_fn", value="geneval"):
        load_prompts(tmp_path, "train", prompt_fn="geneval")


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
        """Return the (sample, row) pairs of each update over all processes."""
        parts = [
            build_epoch_batches(
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
def test_the_error_for_a_missing_split_lists_the_files_it_may_be(tmp_path, prompt_fn, wanted):
    shown = f"{wanted} (prompt_fn={prompt_fn!r})"
    with raises_user_error(shown, field="dataset", value=str(tmp_path)):
        load_prompts(tmp_path, "test", prompt_fn=prompt_fn)


def test_the_metadata_file_can_be_selected(tmp_path):
    (tmp_path / "train.txt").write_text("other\n")
    (tmp_path / "train_metadata.jsonl").write_text(
        '{"prompt": "a", "negative_prompt": null, "n": 1}\n'
    )
    [prompt] = load_prompts(tmp_path, "train", prompt_fn="metadata")
    assert prompt == Prompt("a", "", {"prompt": "a", "n": 1})


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        (["prompt"], '["prompt"]'),
        ({"prompt": 3}, "3"),
        ({"prompt": ""}, "''"),
        ({"prompt": None}, "None"),
    ],
)
def test_a_row_without_a_prompt_is_shown(tmp_path, row, shown):
    path = tmp_path / "train_metadata.jsonl"
    path.write_text(json.dumps(row))
    with raises_user_error('"prompt"', f"got {shown}", field=f"{path}:1"):
        load_prompts(tmp_path, "train")


def test_a_long_row_is_truncated_in_the_message(tmp_path):
    (tmp_path / "train_metadata.jsonl").write_text(json.dumps(["a" * 99]))
    with raises_user_error() as caught:
        load_prompts(tmp_path, "train")
    assert caught.value.rule.endswith('got ["' + "a" * 78)  # 80 characters


def test_numbers_that_are_not_finite_are_null_in_the_metadata(tmp_path):
    """As in parquet files: requests to reward servers cannot contain NaN."""
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "score": NaN, "sizes": [1.5, Infinity]}')
    [prompt] = load_prompts(tmp_path, "train")
    assert prompt.metadata == {"prompt": "a", "score": None, "sizes": [1.5, None]}
