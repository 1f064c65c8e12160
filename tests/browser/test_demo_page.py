"""The demo of a real run, in a real browser and for those who need none; and a gallery of it."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import requests
from gradio_client import Client
from gradio_client.exceptions import AppError
from playwright.sync_api import Browser, Page, expect, sync_playwright
from runner import ROOT, Runner, environment, run_script
from shown import CUSTOM, HOSTILE, LONG

from flow_grpo.demo.painter import list_weights

pytestmark = pytest.mark.browser
PATIENCE = 120_000  # ms
NAMES = ("chromium", "chromium-browser", "google-chrome")
REWARDS = {"jpeg_compressibility": 1.0, "words": 1.0, "broken": 1.0, "gated": 1.0}


@pytest.fixture(scope="module")
def run(short_runs, tmp_path_factory) -> Path:
    """Trained for an epoch; its first test prompt is a hostile one."""
    folder = tmp_path_factory.mktemp("demo")
    dataset = folder / "prompts"
    dataset.mkdir()
    for split in ("train", "test"):
        (dataset / f"{split}.txt").write_text(f"{HOSTILE}\na cat\na dog\n")
    fields = {**short_runs, "dataset": dataset, "train__ema_update_interval": 1}
    done = Runner(folder / "logs", **fields)(eval_freq=0, train__learning_rate=0.05)
    assert done.returncode == 0, done.stderr
    return folder / "logs/run"


@pytest.fixture(scope="module")
def good(run) -> list:
    """What may be posted: a prompt, weights, steps, guidance and a seed."""
    return ['a "CAT"', next(iter(list_weights(run))), 3, 1.0, 5]


@pytest.fixture(scope="module")
def gate(tmp_path_factory) -> Path:
    """Nothing is scored while this file is there."""
    return tmp_path_factory.mktemp("gate") / "closed"


@pytest.fixture(scope="module")
def process(run, gate) -> Iterator[subprocess.Popen]:
    fields = {"eval_reward_fn": REWARDS, "custom_rewards": CUSTOM}
    options = [f"--config.{name}={value}" for name, value in fields.items()]
    files = gate.with_name("files")
    files.mkdir()
    process = subprocess.Popen(
        [sys.executable, "scripts/demo.py", run, "--port=0", *options],
        cwd=ROOT,
        env={**environment(), "GATE": str(gate), "TMPDIR": str(files)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
        process.terminate()
        assert process.wait(60) == 0
        assert not list(files.glob("*demo*"))  # nothing that was drawn stays
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def url(process) -> str:
    line = process.stdout.readline()
    return re.fullmatch(r"open (http://\S+)  \(Ctrl-C ends it\)\n", line)[1]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = next(filter(None, map(shutil.which, NAMES)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def page(browser, url) -> Page:
    page = browser.new_page()
    page.set_default_timeout(PATIENCE)
    page.asked = []  # of any server
    page.on("request", lambda request: page.asked.append(request.url))
    page.goto(url)
    return page


@pytest.fixture(scope="module")
def client(url, tmp_path_factory) -> Client:
    place = tmp_path_factory.mktemp("downloads")
    return Client(url, verbose=False, analytics_enabled=False, download_files=place)


def draw(page: Page, prompt: str, button: str = "Draw") -> tuple[list[str], list[str]]:
    """Addresses of the pictures, and what stands under them."""
    before = [image.get_attribute("src") for image in page.locator(".drawn img").all()]
    page.get_by_label("Prompt").fill(prompt)
    page.get_by_role("button", name=button).click()
    page.wait_for_function(
        """before => {
            const images = [...document.querySelectorAll(".drawn img")];
            return images.length == 2 && images.every(i =>
                i.complete && i.naturalWidth > 0 && !before.includes(i.src));
        }""",
        arg=before,
    )
    pictures = page.locator(".drawn img").all()
    return (
        [picture.get_attribute("src") for picture in pictures],
        [box.input_value() for box in page.locator(".scores textarea").all()],
    )


def test_a_typed_prompt_is_drawn_twice_and_scored(page, good):
    sources, scores = draw(page, 'a sign with "WORDS"')
    assert len({*sources}) == 2
    sizes = page.eval_on_selector_all(".drawn img", "all => all.map(i => i.naturalWidth)")
    assert sizes == [32, 32]
    pictures = [requests.get(source, timeout=60).content for source in sources]
    assert pictures[0] != pictures[1]
    for text in scores:
        assert re.search(r"^jpeg_compressibility  -[\d.]+$", text, re.M)
        assert re.search(r"^words  0.50$", text, re.M)
        assert re.search(r"^broken  failed  \(ValueError: ", text, re.M)
    _, scores = draw(page, "without")
    assert all("words  -  (it has no word in double quotes)" in text for text in scores)
    assert page.get_by_label("Trained weights").input_value() == good[1]
    assert page.get_by_label("Seed").input_value() == "42"
    draw(page, "once more", button="Other seed")
    assert page.get_by_label("Seed").input_value() != "42"


def test_a_hostile_prompt_is_text_and_runs_nothing(page):
    for prompt in (HOSTILE, LONG):
        draw(page, prompt)
        assert page.get_by_label("Prompt").input_value() == prompt
    # an example of the run's own, and a mistake that names what was given
    page.get_by_text(HOSTILE[:20]).first.click()
    expect(page.get_by_label("Prompt")).to_have_value(HOSTILE, timeout=PATIENCE)
    page.get_by_label("Prompt").fill(" ")
    page.get_by_role("button", name="Draw").click()
    page.get_by_text("the prompt is empty; write what to draw").wait_for()
    assert page.evaluate("window.hacked") is None
    assert page.locator("img[src=x]").count() == 0


def test_no_other_server_is_asked_for_anything(page, url):
    assert [asked for asked in page.asked if not asked.startswith((url, "data:", "blob:"))] == []
    assert len(page.asked) > 10


def test_only_this_machine_reaches_it(process, url):
    listening = [
        each.laddr.ip
        for each in psutil.Process(process.pid).net_connections("tcp")
        if each.status == psutil.CONN_LISTEN
    ]
    assert listening == ["127.0.0.1"]


@pytest.mark.parametrize(
    ("place", "value", "told"),
    [
        (0, "x" * 2001, "the prompt has 2001 characters; at most 2000 are drawn"),
        (1, "../../../etc", "there is no such checkpoint any more; reload the page and choose one"),
        (1, None, "no trained weights are chosen; choose some"),
        (2, 51, "steps is 51; it must be a whole number from 2 to 50"),
        (2, "<b>9</b>", "steps is &#x27;&lt;b&gt;9&lt;/b&gt;&#x27;; it must be a whole number"),
        (3, 1e9, "guidance is 1000000000.0; it must be a number from 0 to 20"),
        (4, -1, "seed is -1; it must be a whole number from 0 to 4294967295"),
    ],
)
def test_what_is_posted_past_the_page_is_held_to_the_limits(client, good, place, value, told):
    values = [*good[:place], value, *good[place + 1 :]]
    with pytest.raises(AppError) as error:
        client.predict(*values, api_name="/draw")
    assert str(error.value).startswith(told)
    assert "\n" not in str(error.value)


def test_no_file_can_be_left_or_read(url, run):
    file = {"files": ("a.txt", b"x" * 100)}
    assert requests.post(f"{url}gradio_api/upload", files=file, timeout=60).status_code == 413
    for path in (run / "config.json", "/etc/hostname", ROOT / "setup.py"):
        answer = requests.get(f"{url}gradio_api/file={path}", timeout=60)
        assert answer.status_code in (403, 404)


def test_a_gallery_of_hostile_prompts_makes_no_request(browser, run, tmp_path):
    out = tmp_path / "gallery"
    done = run_script("scripts/gallery.py", run, f"--out={out}", "--count=2")
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(out)) == ["gallery.html", "gallery.png", "samples"]
    page, asked = browser.new_page(viewport={"width": 390, "height": 800}), []
    page.on("request", lambda request: asked.append(request.url.partition(":")[0]))
    page.goto((out / "gallery.html").as_uri())
    assert page.locator("h2").first.inner_text() == HOSTILE
    sizes = page.eval_on_selector_all("img", "all => all.map(i => i.naturalWidth)")
    assert sizes == [32] * 4
    assert page.evaluate("window.hacked") is None
    assert {*asked} <= {"file", "data"}
    assert asked.count("file") == 1
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_who_comes_to_a_full_queue_is_told(url, client, good, gate):
    """The last test: nothing is scored from here on."""
    gate.touch()
    [number] = [each["id"] for each in client.config["dependencies"] if each["api_name"] == "draw"]
    body = {"data": good, "fn_index": number, "session_hash": "waiting"}
    answers = [
        requests.post(f"{url}gradio_api/queue/join", json=body, timeout=60) for _ in range(12)
    ]
    refused = [answer for answer in answers if answer.status_code == 503]
    # one is drawn and eight wait, or all wait
    assert 3 <= len(refused) <= 4
    assert all("Queue is full" in answer.text for answer in refused)
