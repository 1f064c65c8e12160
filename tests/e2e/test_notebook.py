"""The example notebook runs, and its saved outputs are complete."""

import ast
import base64
import io
import math
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell
from PIL import Image
from runner import ROOT, environment

PATH = ROOT / "examples/first_run.ipynb"


@pytest.fixture
def notebook() -> nbformat.NotebookNode:
    return nbformat.read(PATH, as_version=4)


def outputs(notebook: nbformat.NotebookNode, cell: str) -> list[nbformat.NotebookNode]:
    [found] = [each for each in notebook.cells if each.id == cell]
    return found.outputs


def stdout_of(notebook: nbformat.NotebookNode, cell: str) -> str:
    streams = [o for o in outputs(notebook, cell) if o.output_type == "stream"]
    return "".join(o.text for o in streams if o.name == "stdout")


def result_of(notebook: nbformat.NotebookNode, cell: str):
    [result] = [o for o in outputs(notebook, cell) if o.output_type == "execute_result"]
    return ast.literal_eval(result.data["text/plain"])


def image_output(notebook: nbformat.NotebookNode, cell: str) -> Image.Image:
    shown = [o.data for o in outputs(notebook, cell) if "data" in o]
    [png] = [data["image/png"] for data in shown if "image/png" in data]
    return Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")


@pytest.fixture(scope="module")
def executed(tmp_path_factory) -> nbformat.NotebookNode:
    """The notebook, executed outside the repository, with an invalid call appended."""
    folder = tmp_path_factory.mktemp("notebook")
    notebook = nbformat.read(PATH, as_version=4)
    allowed = {"tags": ["raises-exception"]}
    invalid_cell = new_code_cell("Trainer(preset='tiny')", id="invalid", metadata=allowed)
    notebook.cells.append(invalid_cell)
    variables = {"IPYTHONDIR": str(folder / "ipython"), "CUDA_VISIBLE_DEVICES": ""}
    resources = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources)
    return client.execute(env={**environment(), **variables})  # raises if another cell does


@pytest.mark.slow
def test_the_example_trains_evaluates_and_shows_images(executed):
    before, after = result_of(executed, "read-metrics")
    assert [before[0], after[0]] == [0, 1]
    assert 0 <= before[1] < after[1] <= 1
    for cell, last in {"train-ocr": "epoch 1/1", "train-own": "epoch 2/2"}.items():
        assert f"{last}  reward/" in stdout_of(executed, cell)
        assert "finished: logs/" in stdout_of(executed, cell)
    means = result_of(executed, "evaluate")
    assert list(means) == ["base", "checkpoint-4", "checkpoint-8"]
    assert all(math.isfinite(row["right_colour"]) for row in means.values())
    assert means["base"]["right_colour"] < means["checkpoint-8"]["right_colour"] <= 1
    assert "| checkpoint-8 |" in stdout_of(executed, "evaluate")
    for cell in ("show-pictures", "curve", "show-shapes", "grid", "diffusers"):
        shown = image_output(executed, cell)
        assert min(shown.size) >= 100
        assert len(shown.getcolors(maxcolors=2**24)) > 50, f"{cell} shows an empty image"


def test_the_example_is_saved_with_its_outputs(notebook):
    """The outputs contain no machine paths and no errors."""
    nbformat.validate(notebook)
    text = PATH.read_text("utf-8")
    assert len(text) < 400_000
    assert not re.search(r"/(home|tmp|root|work|Users)/", text)
    before, after = result_of(notebook, "read-metrics")
    assert before[1] < after[1]
    for cell in ("show-pictures", "curve", "show-shapes", "grid", "diffusers"):
        assert min(image_output(notebook, cell).size) >= 100
    assert not [o for cell in notebook.cells for o in cell.get("outputs", []) if "ename" in o]


def test_links_of_the_example_resolve(notebook):
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text)]
    assert len(links) > 4
    for link in links:
        assert Path(PATH.parent, link).is_file(), link


@pytest.mark.slow
def test_a_notebook_shows_an_error_in_one_line(executed):
    [error] = outputs(executed, "invalid")
    assert error.ename == "UserError"
    [line] = error.traceback
    assert line.startswith("UserError: preset='tiny' ")
    assert "\n" not in line
