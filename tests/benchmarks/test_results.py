"""The store of a running benchmark, and its results."""

import json
import math

import numpy as np
import pytest
from user_errors import raises_user_error

from flow_grpo.benchmarks.protocol import Deviation, get_protocol
from flow_grpo.benchmarks.results import (
    RawScores,
    collect_results,
    read_results,
    write_results,
)
from flow_grpo.benchmarks.store import (
    Batches,
    BatchRecord,
    BenchmarkStore,
    subset,
    weights_checksum,
    write_geneval_layout,
)


@pytest.fixture
def results():
    protocol = get_protocol("tiny_scenes")
    base = np.array([[0.0, 1.0], [1.0, math.nan], [0.0, 0.0]])
    return collect_results(
        protocol,
        model="assets/tiny-sd3",
        settings={"prompts": 3, "samples": 2, "scorers": protocol.scorers, "prompts_sha256": "a"},
        deviations=[Deviation("prompts", 192, 3)],
        prompts=["one", "two", "three"],
        tags=["counting", "counting", "position"],
        candidates=[
            RawScores("base", "", "", {"geneval": base, "geneval/x": np.full((3, 2), -np.inf)}),
            RawScores("run", "logs/run", "ff", {"geneval": np.ones((3, 2))}),
        ],
    )


def test_results_survive_writing_and_reading(results, tmp_path):
    write_results(tmp_path, results)
    found = read_results(tmp_path)
    assert found == results
    base, run = found.candidates
    assert found.headline == "score"
    assert base.mean("score") == pytest.approx((0.75 + 0.0) / 2)
    assert run.mean("score") == 1.0
    assert run.scores["score"]["difference"]["mean"] == pytest.approx(1 - 0.375)
    assert base.samples[3] == {
        "prompt": "two",
        "tag": "counting",
        "number": 1,
        "geneval": None,
        "geneval/x": "not applicable",
    }
    page = (tmp_path / "results.md").read_text()
    assert "prompts: 3 (protocol: 192)" in page
    lines = (tmp_path / "results.csv").read_text().splitlines()
    assert len(lines) == 1 + sum(len(each.scores) for each in found.candidates)


def test_a_file_that_is_no_result_is_rejected(results, tmp_path):
    write_results(tmp_path, results)
    file = tmp_path / "results.json"
    for damage in (lambda c: c.pop("table"), lambda c: c.update(format=0)):
        content = json.loads(file.read_text())
        damage(content)
        (tmp_path / "other.json").write_text(json.dumps(content))
        with raises_user_error(field=str(tmp_path / "other.json")):
            read_results(tmp_path / "other.json")
    with raises_user_error(field=str(tmp_path / "no")):
        read_results(tmp_path / "no")


def test_batches_cover_all_samples_once():
    batches = Batches(prompts=5, samples=3, size=4)
    samples = [each for i in range(len(batches)) for each in batches[i]]
    assert samples == [(prompt, number) for prompt in range(5) for number in range(3)]


def test_failed_and_damaged_batches_are_pending_and_the_others_are_kept(tmp_path):
    store = BenchmarkStore(tmp_path / "out")
    batches = Batches(prompts=3, samples=1, size=1)
    assert not store.open({"steps": 8})
    store.add_candidate("base", "", "")
    candidate = store.candidate("base")
    candidate.write(0, BatchRecord({"a": [0.5], "b": [-math.inf]}))
    candidate.write(1, BatchRecord({"a": [math.nan], "b": [1.0]}, {"a": "no server"}))
    assert candidate.pending(batches) == [1, 2]
    assert not candidate.is_complete(batches)
    np.testing.assert_array_equal(candidate.scores(batches)["a"], [[0.5], [math.nan], [math.nan]])
    assert candidate.scores(batches)["b"][0, 0] == -math.inf
    candidate.write(2, BatchRecord({"a": [0.0], "b": [0.0]}))
    assert candidate.is_complete(batches)
    path = candidate.folder / "scores/00000.json"
    path.write_text(path.read_text()[:20])
    assert candidate.pending(batches) == [0, 1]


def test_a_directory_has_one_set_of_settings_and_one_set_of_weights_per_candidate(tmp_path):
    out = tmp_path / "out"
    store = BenchmarkStore(out)
    store.open({"steps": 8})
    assert store.open({"steps": 8})
    with raises_user_error("steps=8", field="--out", value=str(out)):
        store.open({"steps": 9})
    with raises_user_error(field="--out", value=str(tmp_path)):
        BenchmarkStore(tmp_path).open({"steps": 8})
    weights = tmp_path / "lora"
    weights.mkdir()
    (weights / "a.safetensors").write_bytes(b"one")
    before = weights_checksum(weights)
    for _ in range(2):
        store.add_candidate("z/run", str(weights), before)
    store.add_candidate("base", "", "")
    assert store.candidates() == ["z/run", "base"]
    (weights / "a.safetensors").write_bytes(b"two")
    with raises_user_error("z/run", field="--out"):
        store.add_candidate("z/run", str(weights), weights_checksum(weights))


def test_a_subset_is_spread_over_a_sorted_list():
    assert subset(10, 3) == [0, 3, 6]
    assert subset(3, None) == subset(3, 9) == [0, 1, 2]


def test_images_are_arranged_for_the_scorer_of_geneval(tmp_path):
    store = BenchmarkStore(tmp_path)
    store.add_candidate("base", "", "")
    candidate = store.candidate("base")
    rows = [{"tag": "counting", "prompt": "one"}, {"tag": "colors", "prompt": "two"}]
    for prompt, number in ((0, 0), (0, 1), (1, 1)):
        candidate.image_path(prompt, number).write_bytes(bytes([prompt, number]))
    for _ in range(2):  # a benchmark may be continued
        write_geneval_layout(candidate, tmp_path / "geneval", rows, 2)
    assert json.loads((tmp_path / "geneval/00001/metadata.jsonl").read_text()) == rows[1]
    found = {
        str(path.relative_to(tmp_path / "geneval")): list(path.read_bytes())
        for path in (tmp_path / "geneval").rglob("*.png")
    }
    assert found == {
        "00000/samples/0000.png": [0, 0],
        "00000/samples/0001.png": [0, 1],
        "00001/samples/0001.png": [1, 1],
    }
