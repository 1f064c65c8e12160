"""The voting page in a browser: keys, undo, reload, two voters, and a server that is killed."""

import base64
import io
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright
from runner import ROOT, environment

from flow_grpo.data.preferences import load_preferences
from flow_grpo.votes.store import read_log

pytestmark = pytest.mark.browser
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
TIMEOUT_MS = 120_000
HOSTILE = "<img src=x onerror=\"window.hacked=1\"><script>window.hacked=2</script> 'a' 😀"
SENT = "() => !Object.keys(localStorage).some(key => key.includes('pending'))"


class VoteServer:
    """A vote server in its own process, which can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, 0
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "scripts/vote.py", f"--out={self.folder}", f"--port={self.port}"],
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        lines = iter(self.process.stdout.readline, "")  # the log may warn first
        self.url = next(filter(None, (re.match(r"open (http://\S+)  ", x) for x in lines)))[1]
        self.port = int(self.url.rstrip("/").rpartition(":")[2])

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def post(self, key: str, *prompts: str, votes: int = 1, colors=("#222", "#ddd")) -> None:
        """Post a pair of images for each prompt, by default a dark and a bright one."""
        body = {
            "run": "test",
            "key": key,
            "prompts": [prompt for prompt in prompts for _ in range(2)],
            "images": [png(color, i) for i in range(len(prompts)) for color in colors],
            "votes_per_pair": votes,
        }
        assert requests.post(f"{self.url}api/groups", json=body, timeout=60).ok

    def result(self, key: str) -> dict:
        return requests.get(f"{self.url}api/groups/{key}", timeout=60).json()

    def votes(self, voter: str) -> list[dict]:
        return [row for row in read_log(self.folder / "votes.jsonl") if row["voter"] == voter]


def png(color: str, number: int) -> str:
    """Return an image of one color and a size that depends on the number."""
    file = io.BytesIO()
    Image.new("RGB", (16, 16 + number), color).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[VoteServer]:
    server = VoteServer(tmp_path_factory.mktemp("votes"))
    yield server
    server.process.terminate()
    output, _ = server.process.communicate(timeout=60)
    assert "pairs answered" in output  # the summary
    assert server.process.returncode == 0


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = next(filter(None, map(shutil.which, BROWSERS)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def enter(browser: Browser, server: VoteServer, voter: str, **options) -> Page:
    """Open the page as a new voter."""
    page = browser.new_context(**options).new_page()
    page.set_default_timeout(TIMEOUT_MS)
    page.problems = []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.goto(server.url)
    page.get_by_label("Your name").fill(voter)
    page.keyboard.press("Enter")
    page.wait_for_selector("body[data-ballot]")
    return page


def shown(page: Page) -> str:
    return page.locator("body[data-ballot]").get_attribute("data-ballot")


def press(page: Page, key: str, *, wait: bool = True) -> str:
    """Press a key, wait for another ballot or the end, and return the ballot it was for."""
    before = shown(page)
    page.keyboard.press(key)
    page.wait_for_function("id => document.body.dataset.ballot !== id", arg=before)
    if wait:
        page.wait_for_function(SENT)
        page.locator("body[data-ballot], #message:not(:empty)").first.wait_for()
    return before


def test_keys_clicks_tie_skip_and_undo(browser, server):
    server.post("keys", HOSTILE, "b", "c", "d", "e")
    page = enter(browser, server, "ann")
    expect(page.locator("#progress")).to_have_text("0 answered, 5 left")
    ballots = [press(page, key) for key in ("ArrowLeft", "ArrowRight", "t", "s")]
    assert len({*ballots}) == 4
    last = shown(page)
    page.keyboard.press("z")
    page.wait_for_function("id => document.body.dataset.ballot === id", arg=ballots[3])
    assert press(page, "ArrowDown") == ballots[3]
    assert shown(page) == last
    page.locator("#right").click()
    page.get_by_text("Waiting for the next images").wait_for()
    page.wait_for_function(SENT)
    expect(page.locator("#progress")).to_have_text("5 answered, 0 left")
    left, right, tie, skip, undo, again, click = server.votes("ann")
    assert left["chosen"] == left["left"]
    assert right["chosen"] == right["right"]
    assert click["chosen"] == click["right"]
    assert [tie["choice"], skip["choice"], again["choice"]] == ["tie", "skip", "tie"]
    assert undo["undo"] == skip["id"]
    assert again["ballot"] == skip["ballot"]
    result = server.result("keys")
    assert result["done"]
    assert [sum(column) for column in zip(*result["pairs"], strict=True)][4] == 2  # ties
    found = load_preferences(server.folder)
    assert len(found.pairs) == 3
    assert found.left_out == {"ties": 2, "undone": 1}
    assert page.evaluate("window.hacked") is None
    assert HOSTILE in {row["prompt"] for row in server.votes("ann") if "prompt" in row}
    assert not page.problems


def test_a_reload_and_a_lost_answer_lose_and_repeat_nothing(browser, server):
    server.post("reload", "a", "b", "c")
    page = enter(browser, server, "rita")
    page.route("**/api/vote", lambda route: route.abort())  # not delivered
    first = press(page, "ArrowLeft", wait=False)
    page.get_by_role("alert").wait_for()
    page.reload()
    page.get_by_role("alert").wait_for()
    page.unroute("**/api/vote")
    page.wait_for_function(SENT)
    page.wait_for_selector("body[data-ballot]")

    def lose_answer(route):
        route.fetch()
        route.abort()

    page.route("**/api/vote", lose_answer, times=1)  # delivered, but the page cannot know
    press(page, "ArrowRight")
    page.reload()
    page.wait_for_selector("body[data-ballot]")
    expect(page.locator("#progress")).to_have_text("2 answered, 1 left")
    press(page, "ArrowLeft")
    votes = server.votes("rita")
    assert votes[0]["ballot"] == first
    assert len({row["ballot"] for row in votes}) == len(votes) == 3
    assert server.result("reload")["done"]
    assert not page.problems


def test_two_voters_at_once_on_a_desktop_and_a_phone(browser, server):
    server.post("two", "a", "b", "c", votes=2)
    desktop = enter(browser, server, "dora")
    phone = enter(browser, server, "phil", viewport={"width": 390, "height": 760}, has_touch=True)
    for page, key in ((desktop, "ArrowLeft"), (phone, "ArrowRight")) * 3:
        press(page, key)
    for voter in ("dora", "phil"):
        votes = server.votes(voter)
        assert len({row["ballot"] for row in votes}) == len(votes) == 3
    result = server.result("two")
    assert result["done"]
    assert all(sum(row[2:]) == 2 for row in result["pairs"])
    server.post("phone", "d")
    phone.wait_for_selector("body[data-ballot]")
    boxes = [phone.locator(f"#{side}").bounding_box() for side in ("left", "right")]
    assert boxes[0]["y"] + boxes[0]["height"] <= boxes[1]["y"]  # stacked
    assert boxes[1]["y"] + boxes[1]["height"] < phone.locator("#tie").bounding_box()["y"]
    assert phone.evaluate("document.documentElement.scrollWidth") == 390
    phone.locator("#left").tap()
    phone.get_by_text("Waiting for the next images").wait_for()
    phone.wait_for_function(SENT)
    assert server.result("phone")["done"]
    assert not desktop.problems + phone.problems


def test_a_killed_server_loses_no_vote_and_counts_none_twice(browser, server):
    server.post("kill", "a", "b", "c")
    page = enter(browser, server, "kim")
    ballots = [press(page, "ArrowLeft")]
    server.kill()
    with (server.folder / "votes.jsonl").open("ab") as file:
        file.write(b'{"id": "torn')  # as if the power had failed during a write
    ballots.append(press(page, "ArrowRight", wait=False))
    page.get_by_role("alert").wait_for()
    server.start()
    page.wait_for_function(SENT)
    expect(page.get_by_role("alert")).to_be_hidden()
    page.wait_for_selector("body[data-ballot]")
    ballots.append(press(page, "t"))
    assert [row["ballot"] for row in server.votes("kim")] == ballots
    assert len({*ballots}) == 3
    assert server.result("kill")["done"]
    assert len(server.votes("ann")) == 7  # those before the kill are as they were
    assert not page.problems


def test_the_scripted_voter_of_the_example_prefers_green(server):
    server.post("green", "a", "b", "c", colors=("#080", "#f8f"))
    command = [sys.executable, "examples/color_voter.py", server.url, "--votes=3", "--name=greta"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), text=True, capture_output=True)
    assert done.stdout == "3 votes\n", done.stderr
    assert server.result("green") == {
        "pairs": [[i, i + 1, 1, 0, 0] for i in (0, 2, 4)],
        "done": True,
    }
