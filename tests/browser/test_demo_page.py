"""The demo and gallery of a trained run, in a browser and through the API."""

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
from demo_run import CUSTOM, HOSTILE, LONG
from gradio_client import Client
from gradio_client.exceptions import AppError
from playwright.sync_api import Browser, Page, expect, sync_playwright
from runner import ROOT, Runner, environment, run_script

from flow_grpo.demo.generator import list_weights

pytestmark = pytest.mark.browser
TIMEOUT_MS = 120_000
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
REWARDS = {"jpeg_compressibility": 1.0, "words": 1.0, "broken": 1.0, "gated": 1.0}


@pytest.fixture(scope="module")
def run(short_runs, tmp_path_factory) -> Path:
    """A run of one epoch whose first test prompt is hostile."""
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
def valid_values(run) -> list:
    """Valid values to post: a prompt, weights, steps, guidance and a seed."""
    return ['a "CAT"', next(iter(list_weights(run))), 3, 1.0, 5]


@pytest.fixture(scope="module")
def gate(tmp_path_factory) -> Path:
    """A file that blocks scoring while it exists."""
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
        assert not list(files.glob("*demo*"))  # generated images are removed
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def url(process) -> str:
    line = process.stdout.readline()
    return re.match(r"open (http://\S+)  ", line)[1]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = next(filter(None, map(shutil.which, BROWSERS)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def page(browser, url) -> Page:
    page = browser.new_page()
    page.set_default_timeout(TIMEOUT_MS)
    page.requested = []  # requests to any server
    page.on("request", lambda request: page.requested.append(request.url))
    page.goto(url)
    return page


@pytest.fixture(scope="module")
def client(url, tmp_path_factory) -> Client:
    folder = tmp_path_factory.mktemp("downloads")
    return Client(url, verbose=False, analytics_enabled=False, download_files=folder)


def generate(page: Page, prompt: str, button: str = "Generate") -> tuple[list[str], list[str]]:
    """Return the URLs of the images, and the text below them."""
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
    images = page.locator(".drawn img").all()
    return (
        [image.get_attribute("src") for image in images],
        [box.input_value() for box in page.locator(".scores textarea").all()],
    )


def test_a_prompt_is_generated_twice_and_scored(page, valid_values):
    urls, scores = generate(page, 'a sign with "WORDS"')
    assert len({*urls}) == 2
    sizes = page.eval_on_selector_all(".drawn img", "all => all.map(i => i.naturalWidth)")
    assert sizes == [32, 32]
    images = [requests.get(url, timeout=60).content for url in urls]
    assert images[0] != images[1]
    for text in scores:
        assert re.search(r"^jpeg_compressibility  -[\d.]+$", text, re.M)
        assert re.search(r"^words  0.50$", text, re.M)
        assert re.search(r"^broken  failed  \(ValueError: ", text, re.M)
    _, scores = generate(page, "without")
    assert all("words  -  (it has no word in double quotes)" in text for text in scores)
    assert page.get_by_label("Trained weights").input_value() == valid_values[1]
    assert page.get_by_label("Seed").input_value() == "42"
    generate(page, "once more", button="Random seed")
    assert page.get_by_label("Seed").input_value() != "42"


def test_a_hostile_prompt_is_shown_as_text(page):
    for prompt in (HOSTILE, LONG):
        generate(page, prompt)
        assert page.get_by_label("Prompt").input_value() == prompt
    # a test prompt of the run, and an error message
    page.get_by_text(HOSTILE[:20]).first.click()
    expect(page.get_by_label("Prompt")).to_have_value(HOSTILE, timeout=TIMEOUT_MS)
    page.get_by_label("Prompt").fill(" ")
    page.get_by_role("button", name="Generate").click()
    page.get_by_text("prompt is empty").wait_for()
    assert page.evaluate("window.hacked") is None
    assert page.locator("img[src=x]").count() == 0


def test_no_other_server_is_contacted(page, url):
    assert [each for each in page.requested if not each.startswith((url, "data:", "blob:"))] == []
    assert len(page.requested) > 10


def test_the_demo_listens_on_the_loopback_interface_only(process, url):
    listening = [
        each.laddr.ip
        for each in psutil.Process(process.pid).net_connections("tcp")
        if each.status == psutil.CONN_LISTEN
    ]
    assert listening == ["127.0.0.1"]


@pytest.mark.parametrize(
    ("index", "value", "shown"),
    [
        (0, "x" * 2001, "2001 characters"),
        (1, "../../../etc", "../../../etc"),
        (1, None, "weights"),
        (2, 51, "steps must be an integer from 2 to 50, not 51"),
        (2, "<b>9</b>", "&#x27;&lt;b&gt;9&lt;/b&gt;&#x27;"),
        (3, 1e9, "1000000000.0"),
        (4, -1, "-1"),
    ],
)
def test_values_posted_to_the_api_are_validated(client, valid_values, index, value, shown):
    values = [*valid_values[:index], value, *valid_values[index + 1 :]]
    with pytest.raises(AppError) as error:
        client.predict(*values, api_name="/draw")
    assert shown in str(error.value)
    assert "\n" not in str(error.value)


def test_files_can_be_neither_uploaded_nor_read(url, run):
    file = {"files": ("a.txt", b"x" * 100)}
    assert requests.post(f"{url}gradio_api/upload", files=file, timeout=60).status_code == 413
    for path in (run / "config.json", "/etc/hostname", ROOT / "setup.py"):
        response = requests.get(f"{url}gradio_api/file={path}", timeout=60)
        assert response.status_code in (403, 404)


def test_a_gallery_of_hostile_prompts_makes_no_request(browser, run, tmp_path):
    out = tmp_path / "gallery"
    done = run_script("scripts/gallery.py", run, f"--out={out}", "--count=2")
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(out)) == ["gallery.html", "gallery.png", "samples"]
    page, schemes = browser.new_page(viewport={"width": 390, "height": 800}), []
    page.on("request", lambda request: schemes.append(request.url.partition(":")[0]))
    page.goto((out / "gallery.html").as_uri())
    assert page.locator("h2").first.inner_text() == HOSTILE
    sizes = page.eval_on_selector_all("img", "all => all.map(i => i.naturalWidth)")
    assert sizes == [32] * 4
    assert page.evaluate("window.hacked") is None
    assert {*schemes} <= {"file", "data"}
    assert schemes.count("file") == 1
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_full_queue_rejects_requests(url, client, valid_values, gate):
    """This test runs last, because it blocks scoring."""
    gate.touch()
    [number] = [each["id"] for each in client.config["dependencies"] if each["api_name"] == "draw"]
    body = {"data": valid_values, "fn_index": number, "session_hash": "waiting"}
    responses = [
        requests.post(f"{url}gradio_api/queue/join", json=body, timeout=60) for _ in range(12)
    ]
    rejected = [response for response in responses if response.status_code == 503]
    # one is generated and eight wait, or all wait
    assert 3 <= len(rejected) <= 4
    assert all("Queue is full" in response.text for response in rejected)
