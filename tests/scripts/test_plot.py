"""scripts/plot.py: figures of runs."""

import json
import sys
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import plot

from flow_grpo.training.trackers import save_samples


def make_run(folder: Path, epochs: int = 3, sources: int = 0) -> Path:
    folder.mkdir(parents=True)
    rows = [
        {"epoch": i, "eval/ocr": 0.5 + i / 10, "eval/clip": 0.3, "eval/jpeg": -40.0 - i}
        for i in range(epochs)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for epoch in (0, epochs):
        images = [Image.new("RGB", (24, 16), (40 * epoch, 0, 0))] * 2
        name = f"eval-{epoch:05d}"
        made_from = [[Image.new("RGB", (24, 16), (0, 0, 200))] * sources] * 2
        columns = {"prompt": ["a", "b"], "avg": [0.5, 1.0]}
        save_samples(folder / "samples" / name, images, made_from, **columns)
    return folder


@pytest.fixture
def drawn(monkeypatch) -> list[list[Axes]]:
    """Collect the axes of every saved figure."""
    figures, save = [], Figure.savefig
    monkeypatch.setattr(
        Figure,
        "savefig",
        lambda self, *args, **kwargs: figures.append(self.axes) or save(self, *args, **kwargs),
    )
    return figures


def call(monkeypatch, *arguments) -> None:
    monkeypatch.setattr(sys, "argv", ["plot.py", *map(str, arguments)])
    plot.main()


@pytest.mark.parametrize(
    ("values", "groups"),
    [
        ({"ocr": [0.2, 0.9], "jpeg": [-40.0, -60.0]}, [["ocr"], ["jpeg"]]),
        ({"ocr": [0.2, 0.9], "jpeg": [-40.0], "clip": [0.3]}, [["ocr", "clip"], ["jpeg"]]),
        ({"kl": [0.0, 0.001], "ocr": [0.5], "loss": [-0.004]}, [["kl", "loss"], ["ocr"]]),
        ({"failed": [0.0, 0.0], "ocr": [0.5], "jpeg": [-50.0]}, [["failed", "ocr"], ["jpeg"]]),
        ({"a": [1.0], "b": [9.0], "c": [50.0]}, [["a", "b"], ["c"]]),  # 50 would flatten a
    ],
)
def test_metrics_of_one_scale_share_their_axes(values, groups):
    assert plot.group_by_scale(values) == groups


def test_curves_have_axes_by_scale_and_integer_epochs(tmp_path, monkeypatch, capsys, drawn):
    runs = [make_run(tmp_path / name) for name in ("one", "two")]
    call(monkeypatch, "curve", *runs, "--metric", "eval/ocr", "eval/jpeg", "eval/clip")
    assert capsys.readouterr().out == f"wrote {runs[0] / 'curve.png'}\n"
    assert Image.open(runs[0] / "curve.png").width > 300
    [[rewards, sizes]] = drawn
    assert rewards.get_ylim()[0] >= 0
    assert rewards.get_ylim()[1] <= 1
    assert sizes.get_ylim()[1] < -39
    assert sizes.get_ylabel() == "eval/jpeg"
    labels = [text.get_text() for text in rewards.get_legend().get_texts()]
    assert labels == ["one eval/ocr", "two eval/ocr", "one eval/clip", "two eval/clip"]
    assert [text.get_text() for text in sizes.get_legend().get_texts()] == ["one", "two"]
    for axes in (rewards, sizes):
        assert len(axes.get_xticks()) > 1
        assert all(tick == round(tick) for tick in axes.get_xticks())


@pytest.mark.parametrize("epochs", [1, 2, 30])
def test_epoch_ticks_are_integers(tmp_path, monkeypatch, drawn, epochs):
    run = make_run(tmp_path / "run", epochs)
    call(monkeypatch, "curve", run / "metrics.jsonl", "--metric", "eval/ocr")
    assert (run / "metrics.png").is_file()
    [[axes]] = drawn
    low, high = axes.get_xlim()
    ticks = [tick for tick in axes.get_xticks() if low <= tick <= high]
    assert ticks
    assert all(tick == round(tick) for tick in ticks)


@pytest.mark.parametrize("sources", [0, 1])
def test_images_are_saved_in_the_run_directory_with_headings(
    tmp_path, monkeypatch, capsys, sources
):
    run = make_run(tmp_path / "run", sources=sources)
    folders = [run / "samples/eval-00000", run / "samples/eval-00003"]
    seen = []
    grid = plot.image_grid
    monkeypatch.setattr(
        plot, "image_grid", lambda *args, **kwargs: seen.append(kwargs) or grid(*args, **kwargs)
    )
    call(monkeypatch, "pictures", *folders)
    assert capsys.readouterr().out == f"wrote {run / 'pictures.png'}\n"
    drawn = Image.open(run / "pictures.png")
    assert drawn.width == (4 + 2 * sources) * (192 + 6)  # two pairs in a row
    assert drawn.getpixel((96, 92)) == (0, 0, 200 * sources)
    names = ["source"] * sources + ["before (epoch 0)", "after (epoch 3)"]
    assert seen[0]["headings"] == names
    out = tmp_path / "new/both.png"
    call(monkeypatch, "pictures", *folders, "--out", out)
    assert out.is_file()


def test_headings_of_other_directories_are_their_distinguishing_names():
    runs = [Path("/a/samples/eval-00002"), Path("/b/samples/eval-00002")]
    assert plot.headings(runs) == ["a", "b"]
    names = ["eval-00004", "eval-00002"]
    assert plot.headings([Path("/a/samples") / name for name in names]) == names
    names = ["base", "checkpoint-8"]
    assert plot.headings([Path("/e/samples") / name for name in names]) == names


@pytest.mark.parametrize("command", ["curve", "pictures"])
def test_a_missing_run_is_an_error(tmp_path, monkeypatch, capsys, command):
    run = tmp_path / "no/run"
    with pytest.raises(SystemExit) as end:
        call(monkeypatch, command, run)
    assert end.value.code == 2
    assert str(run) in capsys.readouterr().err
    assert not run.parent.exists()
