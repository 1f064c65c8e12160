"""Finding, verifying and reading the prompts of a benchmark."""

import hashlib
import json
from dataclasses import replace

import pytest
from user_errors import raises_user_error

from flow_grpo.benchmarks.protocol import PromptSource, benchmark_names, get_protocol
from flow_grpo.benchmarks.sources import cache_folder, find_files, read_prompts

BUNDLED = [n for n in benchmark_names() if get_protocol(n).prompts.source == "bundled"]
REMOTE = PromptSource("github someone/prompts", "lists/test.txt", 2, commit="c" * 40)


@pytest.fixture(autouse=True)
def offline_cache(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("name", [n for n in BUNDLED if get_protocol(n).trainer == "diffusion"])
def test_bundled_prompts_match_their_checksum_and_count(name):
    source = get_protocol(name).prompts
    prompts, tags = read_prompts(find_files(source), source)
    assert len(prompts) == len(tags) == source.count
    assert all(tags) == bool(source.tag)


def test_missing_prompts_are_one_line_with_the_command_that_gets_them(tmp_path):
    url = f"https://raw.githubusercontent.com/someone/prompts/{'c' * 40}/lists/test.txt"
    with raises_user_error(f"curl -L -o test.txt {url}", field="--prompts"):
        find_files(REMOTE)
    with raises_user_error("git clone https://github.com/someone/prompts", field="--prompts"):
        find_files(replace(REMOTE, files="lists/*.txt"))
    with raises_user_error("curl", field="--prompts", value=str(tmp_path / "no.txt")):
        find_files(REMOTE, tmp_path / "no.txt")


def test_a_damaged_download_is_rejected_and_a_file_of_the_user_is_reported(tmp_path):
    text = b"a cat\na dog\na cat\n"
    pinned = replace(REMOTE, sha256=hashlib.sha256(text).hexdigest())
    path = cache_folder(pinned) / pinned.files
    path.parent.mkdir(parents=True)
    path.write_bytes(text)
    files = find_files(pinned)
    assert [p.prompt for p in read_prompts(files, pinned)[0]] == ["a cat", "a dog"]
    path.write_bytes(text[:-8])
    with raises_user_error(field=str(path)):
        find_files(pinned)
    assert find_files(pinned, path).sha256 != pinned.sha256


def test_prompts_are_read_from_every_layout_of_the_table(tmp_path):
    folder = tmp_path / "many"
    folder.mkdir()
    (folder / "10.txt").write_text("the second\n of two lines\n")
    (folder / "1.txt").write_text("the first")
    (folder / "notes.md").write_text("not a prompt")
    source = replace(REMOTE, files="prompts/*.txt")
    files = find_files(source, folder)
    names = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\n" for p in files.files]
    assert files.sha256 == hashlib.sha256("".join(names).encode()).hexdigest()
    assert [p.prompt for p in read_prompts(files, source)[0]] == [
        "the first",
        "the second of two lines",
    ]
    # one prompt per line, and the file as the category
    lists = replace(source, count=3, tag="file")
    assert read_prompts(files, lists)[1] == ["1", "10", "10"]

    table = tmp_path / "prompts.tsv"
    table.write_text('Prompt\tCategory\na "quoted\tArts\n')
    source = replace(REMOTE, files="prompts.tsv", column="Prompt", tag="Category")
    prompts, tags = read_prompts(find_files(source, table), source)
    assert ([p.prompt for p in prompts], tags) == (['a "quoted'], ["Arts"])

    rows = tmp_path / "merge.json"
    rows.write_text(json.dumps([{"Prompt": "a rose", "Category": 3}]))
    source = replace(source, files="merge.json")
    prompts, tags = read_prompts(find_files(source, rows), source)
    assert ([p.prompt for p in prompts], tags) == (["a rose"], ["3"])
    with raises_user_error('"Category"', field=f"{rows} row 1"):
        rows.write_text(json.dumps([{"Prompt": "a rose"}]))
        read_prompts(find_files(source, rows), source)
