"""The table of included data sets in dataset/README.md, against the files and their scripts."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from runner import ROOT, environment

DATASET = ROOT / "dataset"
ROWS = re.findall(
    r"^\| `(\w+)` \| (\d+) \| (\d+) \| (.+?) \| .+? \| `python (.+?)`",
    (DATASET / "README.md").read_text("utf-8"),
    re.M,
)


def lines(name: str, split: str) -> list[str]:
    [file] = [*DATASET.glob(f"{name}/{split}*.txt"), *DATASET.glob(f"{name}/{split}*.jsonl")]
    return file.read_text("utf-8").splitlines()


def test_the_table_lists_every_set():
    folders = {file.parent.name for file in DATASET.glob("*/test*")}
    assert {name for name, *_ in ROWS} == folders


@pytest.mark.parametrize(("name", "train", "test", "columns", "command"), ROWS)
def test_sizes_and_columns_are_those_of_the_files(name, train, test, columns, command):
    rows = lines(name, "train")
    assert (len(rows), len(lines(name, "test"))) == (int(train), int(test))
    if columns != "one prompt per line":
        found = set(json.loads(rows[0]))
        assert set(re.findall(r"`(\w+)`", columns)) - {"scenes"} <= found
    assert (ROOT / shlex.split(command)[0]).is_file()


@pytest.mark.parametrize(
    "name", ["ocr", "ocr_full", "places", "products", "scenes", "sign_requests"]
)  # tests of the others draw images
def test_the_command_writes_the_same_files(name, tmp_path):
    [command] = [row[-1] for row in ROWS if row[0] == name]
    script, *arguments = shlex.split(command.replace("new/", f"{tmp_path}/"))
    command = [sys.executable, ROOT / script, *arguments]
    subprocess.run(command, check=True, capture_output=True, env=environment(), cwd=tmp_path)
    for file in (DATASET / name).iterdir():
        assert (tmp_path / name / file.name).read_bytes() == file.read_bytes()
    assert len([*Path(tmp_path, name).iterdir()]) == len([*(DATASET / name).iterdir()])
