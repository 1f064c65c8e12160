"""The report of a trained run in a real browser."""

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright
from report_runs import make_run
from runner import ROOT, Runner, environment

from flow_grpo.report.grid import format_score
from flow_grpo.report.health import summarize
from flow_grpo.report.page import write_report
from flow_grpo.report.run_reader import read_metrics
from flow_grpo.rewards.failure import NotApplicable
from flow_grpo.training.trackers import save_samples
from flow_grpo.untrusted_files import flatten_fields

pytestmark = pytest.mark.browser

PROMPTS = [
    "<img src=x onerror=\"window.hacked = 'img'\">",
    "</script><script>window.hacked = 'script'</script>",
    "quotes \" and ' and &amp; and 🦊",
    "long " * 400,
    *(f"prompt number {i}" for i in range(4)),
]


@pytest.fixture(scope="module")
def run(short_runs, tmp_path_factory) -> Path:
    """A run of two epochs with an evaluation after each."""
    root = tmp_path_factory.mktemp("report")
    for split in ("train", "test"):
        (root / f"{split}.txt").write_text("\n".join(PROMPTS) + "\n")
    trained = Runner(root / "logs", **{**short_runs, "dataset": root})
    done = trained(
        num_epochs=2,
        eval_freq=1,
        log_images=6,
        sample__train_batch_size=2,
        sample__num_batches_per_epoch=4,
        train__batch_size=2,
        train__learning_rate=0.05,  # large enough to change the images
        train__ema=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"finished: {root}/logs/run/report.html" in done.stdout
    return root / "logs/run"


@pytest.fixture(scope="module")
def browser():
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def open_report(browser: Browser, file: Path, **options) -> tuple[Page, list[str]]:
    """Return the page with all curves rendered, and a list of requests and errors."""
    page = browser.new_page(**options)
    problems: list[str] = []
    page.on("request", lambda r: r.url.startswith(("file:", "data:")) or problems.append(r.url))
    page.on("console", lambda m: m.type == "error" and problems.append(m.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(file.as_uri())
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    expect(page.locator("path.raw:not([d])")).to_have_count(0)
    return page, problems


def points(page: Page, number: int = 0) -> dict[str, int]:
    """Return the number of points of each curve of a run."""
    paths = page.eval_on_selector_all(
        f"path.raw[data-run='{number}']",
        "all => all.map((p) => [p.closest('figure').dataset.metric, p.getAttribute('d')])",
    )
    return {name: len(re.findall("[ML]", path)) for name, path in paths}


def logged(run: Path) -> dict[str, int]:
    counts: dict[str, int] = {}
    for row in read_metrics(run):
        for name, value in row.items():
            if "/" in name and value is not None:
                counts[name] = counts.get(name, 0) + 1
    return counts


def image_sources(page: Page) -> list[str]:
    return page.eval_on_selector_all("#evolution img", "all => all.map((each) => each.src)")


def samples(run: Path, folder: str) -> list[dict]:
    lines = (run / "samples" / folder / "samples.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_the_page_opens_from_a_file_and_makes_no_request(run, browser):
    page, problems = open_report(browser, run / "report.html")
    assert page.title() == "run"
    assert logged(run) == points(page)
    assert len(logged(run)) > 20
    shown = page.locator("#verdict").inner_text()
    found, passed, not_applicable = summarize(read_metrics(run))
    assert all(finding.text in shown for finding in found)
    assert bool(found) or "Healthy" in shown
    assert f"{len(passed)} " in shown
    assert f"{len(not_applicable)} not applicable" in shown
    assert all(name in shown for name in not_applicable)
    # the test file has the prompts of the training file
    assert "on training prompts" in page.locator("#summary").inner_text()
    assert "finished" in page.locator("#head").inner_text()
    assert not page.locator(".thinned").count()
    page.wait_for_timeout(200)
    assert problems == []
    page.close()


def test_the_slider_shows_the_same_prompts_epoch_by_epoch(run, browser):
    page, problems = open_report(browser, run / "report.html")
    slider, shown = page.locator("#epoch"), page.locator("#epoch-shown")
    assert shown.inner_text() == "epoch 2"
    prompts = page.locator("#evolution .prompt").all_inner_texts()
    assert [" ".join(p.split()) for p in prompts] == [" ".join(p.split()) for p in PROMPTS[:6]]
    seen = {2: image_sources(page)}
    slider.focus()
    for epoch, key in ((1, "ArrowLeft"), (0, "Home")):
        page.keyboard.press(key)
        assert shown.inner_text() == f"epoch {epoch}"
        seen[epoch] = image_sources(page)
        rows = samples(run, f"eval-{epoch:05d}")
        values = [format_score(row["jpeg_compressibility"]) for row in rows]
        scores = page.locator("#evolution .slot:nth-child(2) .scores li span:nth-child(2)")
        assert scores.all_inner_texts() == values
    for epoch in seen:
        assert len(seen[epoch]) == 2 * 6
        assert seen[epoch][::2] == seen[0][1::2]  # the first evaluation is next to each
    assert len({tuple(seen[epoch][1::2]) for epoch in seen}) == 3
    assert page.locator("#extremes .card").count() == 6
    assert problems == []
    page.close()


def test_a_group_is_complete_with_its_advantages(run, browser):
    """The samples of a group come from two batches."""
    page, _ = open_report(browser, run / "report.html")
    rows = samples(run, "train-00002")
    group = [row for row in rows if row["group"] == rows[0]["group"]]
    assert len(group) == 4
    shown = page.locator("#group .advantage span:nth-child(2)").all_inner_texts()
    values = sorted((row["advantage"] for row in group), reverse=True)
    assert [float(text) for text in shown] == pytest.approx(values, abs=0.006)
    assert page.locator("#group .card img").count() == 4
    page.close()


@pytest.mark.parametrize(("kept", "shown"), [(0, "2 of the 8 samples"), (1, "2 samples")])
def test_a_group_has_the_samples_that_were_selected_for_training(browser, tmp_path, kept, shown):
    """With `train.keep_best_worst`, a group is smaller than `sample.num_image_per_prompt`."""
    run = make_run(tmp_path / "run", epochs=1, prompts=1)
    config = {"sample": {"num_image_per_prompt": 8}, "train": {"keep_best_worst": kept}}
    (run / "config.json").write_text(json.dumps(config))
    folder = run / "samples/train-00001"
    shutil.rmtree(folder)
    blank = [Image.new("RGB", (8, 8))] * 2
    save_samples(folder, blank, prompt=["a", "a"], avg=[0.0, 1.0], group=[0, 0])
    write_report([run], tmp_path / "page.html")
    page, _ = open_report(browser, tmp_path / "page.html")
    assert f"epoch 1 · {shown}" in page.locator("#group").inner_text()
    page.close()


def test_smoothing_adds_a_line_and_keeps_the_points(run, browser):
    page, _ = open_report(browser, run / "report.html")
    smooth = page.locator("[data-metric='eval/avg'] path.smooth")
    assert not smooth.get_attribute("d")
    page.locator("#smoothing").fill("0.6")
    expect(smooth).to_have_attribute("d", re.compile("M.*L.*L"))
    assert logged(run) == points(page)
    page.locator("[data-metric='eval/avg'] svg").hover()
    row = read_metrics(run)[1]
    shown = page.locator("[data-metric='eval/avg'] .readout").inner_text().split()
    assert shown[:2] == ["epoch", "1"]
    assert float(shown[2]) == pytest.approx(row["eval/avg"], rel=1e-3)
    page.close()


def test_text_of_a_run_is_never_executed(run, browser, tmp_path):
    hostile = tmp_path / "<img src=x onerror=hacked=1>"
    shutil.copytree(run, hostile)
    config = json.loads((hostile / "config.json").read_text())
    config["dataset"] = "<script>window.hacked = 'config'</script>"
    (hostile / "config.json").write_text(json.dumps(config))
    rows = read_metrics(hostile)
    rows[-1]["eval/<img src=x onerror=hacked=1>"] = 1.0
    (hostile / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = hostile / "samples/eval-00002"
    line = {"file": "0000.png", "prompt": PROMPTS[0], "answer": PROMPTS[1], PROMPTS[1]: None}
    (folder / "samples.jsonl").write_text(json.dumps(line) + "\n")
    write_report([hostile], tmp_path / "page.html")
    page, problems = open_report(browser, tmp_path / "page.html")
    page.wait_for_timeout(200)
    assert page.evaluate("window.hacked") is None
    assert problems == []
    assert page.locator("h1").inner_text() == hostile.name
    shown = page.locator("body").inner_text()
    for text in (*PROMPTS[:3], config["dataset"], "eval/<img src=x onerror=hacked=1>"):
        assert text in shown
    assert page.locator("#evolution .answer:visible").inner_text() == PROMPTS[1]
    assert page.locator("img:not([src^='data:image/webp'])[src]").count() == 0
    page.close()


def test_a_run_without_evaluations_and_with_extreme_numbers_is_shown(browser, tmp_path):
    complete, odd = make_run(tmp_path / "whole", epochs=1, prompts=2), tmp_path / "odd"
    folder = odd / "samples/train-00001"
    blank = [Image.new("RGB", (8, 8))] * 2
    scores = {
        "constructor": [0.5, NotApplicable()],
        "avg": [math.nan, 0.5],
        "advantage": [math.nan, 1],
    }
    save_samples(folder, blank, prompt=["a", "a"], **scores)
    row = {"epoch": 1, "reward/avg": None, "train/a": 5e-324, "train/b": -1e300, "time/train": 0}
    (odd / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    write_report([odd, complete], tmp_path / "page.html")
    page, problems = open_report(browser, tmp_path / "page.html")
    assert problems == []
    assert {"train/a", "train/b", "time/train"} <= {*points(page)}
    labels = page.locator("#evolution .label").all_inner_texts()
    assert labels == ["odd, no evaluation", "whole, epoch 1"] * 2
    page.close()


def test_an_edit_is_next_to_its_source(browser, tmp_path):
    run = make_run(tmp_path / "run", epochs=1, prompts=1)
    shades = [Image.new("RGB", (24, 16), (60 * i, 0, 0)) for i in range(4)]
    for epoch in (0, 1):
        for kind in ("eval", "train")[: epoch + 1]:
            folder = run / f"samples/{kind}-{epoch:05d}"
            shutil.rmtree(folder, ignore_errors=True)
            scores = {"avg": [0.5, 1.0], "prompt": ["a", "a"]}
            save_samples(folder, shades[epoch : epoch + 2], [[shades[2]], [shades[3]]], **scores)
    write_report([run], tmp_path / "page.html")
    page, problems = open_report(browser, tmp_path / "page.html")
    assert problems == []
    for index in range(2):
        card = page.locator("#evolution .card").nth(index)
        labels = card.locator(".label").all_inner_texts()
        assert labels == ["source", "start, epoch 0", "epoch 1"]
        assert card.locator("img").count() == 3
    first, before, after, second, *both = image_sources(page)
    assert both == [after, first]
    assert len({first, before, after, second}) == 4
    assert page.locator("#extremes .asked").count() == 2
    assert page.locator("#group .asked").count() == 1
    page.close()


def test_two_runs_are_compared(run, browser, tmp_path):
    other = run.parent / "other"
    shutil.copytree(run, other)
    config = json.loads((other / "config.json").read_text())
    config["train"]["learning_rate"] = 0.5
    (other / "config.json").write_text(json.dumps(config))
    lines = (other / "metrics.jsonl").read_text().splitlines()
    (other / "metrics.jsonl").write_text("\n".join(lines[:2]) + "\n")
    shutil.rmtree(other / "samples/eval-00002")
    write_report([run, other], tmp_path / "both.html")
    page, problems = open_report(browser, tmp_path / "both.html")
    assert points(page, 0) == logged(run)
    assert points(page, 1) == logged(other)
    fields = page.locator("#differences tbody th").all_inner_texts()
    assert fields == ["train.learning_rate"]
    first = dict(flatten_fields(json.loads((run / "config.json").read_text())))[
        "train.learning_rate"
    ]
    assert page.locator("#differences td").all_inner_texts() == [json.dumps(first), "0.5"]
    slots = page.locator("#evolution .card").first.locator(".slot")
    assert [text.split("\n")[0] for text in slots.all_inner_texts()] == [
        "run, epoch 2",
        "other, epoch 1",
    ]
    page.locator("#epoch").fill("1")
    left, right = image_sources(page)[:2]
    assert left == right  # the same run, at the same epoch
    assert page.locator("#verdict .verdict").count() == 2
    assert problems == []
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_needs_no_horizontal_scrolling(run, browser, scheme):
    size = {"width": 360, "height": 640}
    page, problems = open_report(browser, run / "report.html", viewport=size, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    slider = page.locator("#epoch").bounding_box()
    assert slider["width"] > 80
    assert slider["x"] + slider["width"] <= 360
    card = page.locator("#evolution .card").first.bounding_box()
    assert card["width"] > 300
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    light = sum(map(int, re.findall(r"\d+", background)[:3])) > 384
    assert light == (scheme == "light")
    assert problems == []
    page.close()


def test_watching_shows_a_new_epoch_without_a_reload(run, browser, tmp_path):
    active = tmp_path / "active"
    shutil.copytree(run, active)
    lines = (active / "metrics.jsonl").read_text().splitlines()
    (active / "metrics.jsonl").write_text("\n".join(lines[:2]) + "\n" + lines[2][:30])
    for kind in ("eval", "train"):
        shutil.move(active / f"samples/{kind}-00002", tmp_path / kind)
    command = [sys.executable, "scripts/report.py", str(active), "--watch", "--port=0"]
    server = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        address = re.search(r"http://127\.0\.0\.1:\d+", server.stdout.readline())[0]
        page, requested = browser.new_page(), []
        page.on("request", lambda request: requested.append(request.url))
        page.goto(address)
        page.locator("#smoothing").fill("0.4")
        page.locator("#epoch").fill("0")
        assert page.locator("#epoch").get_attribute("max") == "1"
        page.evaluate("window.same = true")
        for kind in ("eval", "train"):
            shutil.move(tmp_path / kind, active / f"samples/{kind}-00002")
        (active / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        expect(page.locator("#epoch")).to_have_attribute("max", "2", timeout=30_000)
        assert page.evaluate("window.same")
        assert page.locator("#smoothing").input_value() == "0.4"
        assert page.locator("#epoch").input_value() == "0"
        page.locator("#epoch").fill("2")
        assert page.locator("#epoch-shown").inner_text() == "epoch 2"
        curve = page.locator("[data-metric='eval/avg'] path.raw")
        expect(curve).to_have_attribute("d", re.compile("M.*L.*L"))
        assert all(url.startswith((address, "data:")) for url in requested)
        page.close()
    finally:
        server.kill()
        server.communicate()


def test_responses_are_shown_below_their_question_and_reference_answer(browser, tmp_path):
    """Two groups of two responses, one question with an image; wrong responses are marked."""
    run = tmp_path / "responses"
    columns = {"prompt": ["How many?", "What is 1+2?"], "truth": ["2", "3"]}
    images = [Image.new("RGB", (64, 32), "red"), None]
    for epoch, responses in enumerate([["1", "4"], ["2", "4"]]):
        scores = [float(a == t) for a, t in zip(responses, columns["truth"], strict=True)]
        folder = run / f"samples/eval-{epoch:05d}"
        save_samples(folder, images, **columns, answer=responses, avg=scores)
    groups = {
        name: [value for value in values for _ in range(2)] for name, values in columns.items()
    }
    groups |= {"answer": ["2", "1", "3", "5"], "avg": [1.0, 0.0] * 2, "group": [0, 0, 1, 1]}
    shown = [images[0], images[0], None, None]
    save_samples(run / "samples/train-00001", shown, **groups, advantage=[1, -1] * 2)
    rows = [{"epoch": epoch, "eval/avg": epoch / 2} for epoch in (0, 1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_report([run], tmp_path / "page.html")
    page, problems = open_report(browser, tmp_path / "page.html")
    assert problems == []
    card = page.locator("#evolution .card").first
    assert card.locator("img:visible").count() == 1
    assert card.locator(".truth").inner_text().split()[-1] == "2"
    assert card.locator(".answer").all_inner_texts() == ["1", "2"]
    assert card.locator(".answer.bad").inner_text() == "1"
    assert card.locator(".answer.good").inner_text() == "2"
    group = page.locator("#group")
    assert "One question, all responses" in group.inner_text()
    assert group.locator(".answer").all_inner_texts() == ["2", "1"]
    group.locator("select").select_option(label="What is 1+2? (3)")
    assert group.locator(".answer").all_inner_texts() == ["3", "5"]
    assert group.locator(".answer.bad").all_inner_texts() == ["5"]
    assert group.locator("img:visible").count() == 0
    page.close()
