"""The gallery: an image and a self-contained page that escapes all prompts."""

import base64
import io
import re
from argparse import Namespace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
from demo_run import HOSTILE, LONG, make_trained_run
from gallery import draw
from PIL import Image
from user_errors import raises_user_error

from flow_grpo.data.prompts import Prompt
from flow_grpo.demo import gallery
from flow_grpo.diffusion.evaluation import EvaluationResult
from flow_grpo.diffusion.results import CandidateScores, save_images
from flow_grpo.report.grid import CELL_GAP, LINE_HEIGHT
from flow_grpo.training.candidates import Candidate

SETTINGS = {"model": "/home/me/model", "steps": 4, "guidance_scale": 1.0, "seed": 3}
PROMPTS = [HOSTILE, LONG, 'a "sign"']


class Page(HTMLParser):
    """Collects tags, headings and all references to other files."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.headings, self.sources, self.captions = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href")]
        assert not [name for name, _ in attrs if name.startswith("on")]
        for place, name in (("h2", self.headings), ("figcaption", self.captions)):
            name += [""] if tag == place else []

    def handle_data(self, data):
        inside = [t for t in self.tags if t in ("h1", "h2", "figcaption")][-1:]
        if inside == ["h2"]:
            self.headings[-1] += data
        if inside == ["figcaption"]:
            self.captions[-1] += data


def scored(name: str, samples: list, scores: list[float], sources: list) -> CandidateScores:
    values = {"words": np.array(scores), "avg": np.array(scores)}
    return CandidateScores(Candidate(name, None), EvaluationResult(values, samples, sources))


def write(out: Path, samples: list, sources: list) -> Page:
    columns = [
        scored("base", samples, [0.5, np.nan, -np.inf], sources),
        scored("<b>8", samples, [1.0, 0.0, 0.25], sources),
    ]
    prompts = [Prompt(text) for text in PROMPTS]
    out.mkdir()
    for each in columns:
        save_images(out, each, prompts, len(samples))
    gallery.write(out, SETTINGS, columns, prompts)
    return Page((out / "gallery.html").read_text())


def test_prompts_are_text_and_images_are_embedded(tmp_path):
    samples = [Image.new("RGB", (48, 32), (60 * i, 0, 0)) for i in range(3)]
    page = write(tmp_path / "out", samples, [])
    assert {*page.tags} <= {
        *("html", "meta", "title", "style", "h1", "p"),
        *("h2", "div", "figure", "img", "figcaption", "b", "br"),
    }
    assert [text.strip() for text in page.headings] == PROMPTS
    captions = [text.split("\n")[0] for text in page.captions]
    assert captions[0].startswith("basewords 0.50")
    assert captions[1].startswith("<b>8words 1.00")
    assert captions[2].startswith("basewords failed")
    assert captions[4].startswith("basewords -")
    assert len(page.sources) == 6
    for source, sample in zip(page.sources, np.repeat(np.arange(3), 2), strict=True):
        data = base64.b64decode(source.removeprefix("data:image/png;base64,"))
        assert Image.open(io.BytesIO(data)).getpixel((0, 0)) == (60 * sample, 0, 0)
    text = (tmp_path / "out/gallery.html").read_text()
    assert "default-src 'none'" in text
    assert "model model, steps 4" in text
    assert "/home/me" not in text  # a local path is private
    assert not re.search(r"https?://", text)
    width, height = Image.open(tmp_path / "out/gallery.png").size
    assert (width, height) == (
        2 * (192 + CELL_GAP),
        LINE_HEIGHT + 3 * (LINE_HEIGHT + 128 + LINE_HEIGHT + CELL_GAP),
    )


def test_source_images_precede_their_edits(tmp_path):
    samples = [Image.new("RGB", (48, 32), (60 * i, 0, 0)) for i in range(3)]
    sources = [[Image.new("RGB", (48, 32), (0, 60 * i, 0))] * min(i, 1) for i in range(3)]
    page = write(tmp_path / "out", samples, sources)
    captions = [text.split("words")[0].strip() for text in page.captions]
    assert captions == ["base", "<b>8", "source", "base", "<b>8", "source", "base", "<b>8"]
    data = base64.b64decode(page.sources[5].removeprefix("data:image/png;base64,"))
    assert Image.open(io.BytesIO(data)).getpixel((0, 0)) == (0, 120, 0)
    drawn = Image.open(tmp_path / "out/gallery.png")
    assert drawn.width == 3 * (192 + CELL_GAP)
    assert drawn.getpixel(
        (0, LINE_HEIGHT + 2 * (LINE_HEIGHT + 128 + LINE_HEIGHT + CELL_GAP) + LINE_HEIGHT)
    ) == (0, 120, 0)


def test_videos_play_in_the_page(tmp_path):
    video = [Image.new("RGB", (16, 16), (20 * i, 0, 0)) for i in range(3)]
    page = write(tmp_path / "out", [video] * 3, [])
    for source in page.sources:
        data = base64.b64decode(source.removeprefix("data:image/gif;base64,"))
        assert Image.open(io.BytesIO(data)).n_frames == 3


def test_mp4_files_are_embedded_as_videos(tmp_path):
    file = tmp_path / "0000.mp4"
    file.write_bytes(b"video")
    page = Page(gallery._figure("base", file, ["1.00"]))
    assert page.tags[:2] == ["figure", "video"]
    assert page.sources == [f"data:video/mp4;base64,{base64.b64encode(b'video').decode()}"]
    assert "media-src data:" in gallery.CONTENT_SECURITY_POLICY


def test_a_run_is_sampled_with_its_own_config(tiny_sd3, tmp_path, monkeypatch):
    run = make_trained_run(tiny_sd3, tmp_path / "mine", steps=(8, 16))
    file = tmp_path / "prompts.txt"
    file.write_text(f"{HOSTILE}\na cat\n")
    given = {"run": run, "checkpoints": ["latest", "best", "8"], "prompts": file, "count": None}
    draw(Namespace(**given, out=tmp_path / "out"), [])
    page = Page((tmp_path / "out/gallery.html").read_text())
    assert [text.strip() for text in page.headings] == [HOSTILE, "a cat"]
    names = [re.match(r"(base|checkpoint-\d+)jpeg_comp\w+ -", text)[1] for text in page.captions]
    assert names == ["base", "checkpoint-16", "checkpoint-8"] * 2
    assert len({*page.sources}) == 6
    with raises_user_error("out already exists"):
        draw(Namespace(**given, out=tmp_path / "out"), [])
    with raises_user_error("'7'", "latest, best, 8, 16"):
        draw(Namespace(**{**given, "checkpoints": ["7"]}, out=tmp_path / "new"), [])
    assert not (tmp_path / "new").exists()
