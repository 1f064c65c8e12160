"""A scripted voter who prefers green images, and a reward that measures green.

    flow-grpo vote --config config/grpo.py:tiny_ocr --checkpoint base --pairs_per_prompt 2 \\
        --prompts dataset/ocr/train.txt --out votes
    python examples/color_voter.py http://127.0.0.1:8701 --votes 256

It opens the voting page in Chromium, compares the pixels that it sees and presses an arrow key. It
needs `pip install playwright` and a Chromium on the path.
"""

import argparse
import shutil

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# How much green exceeds the mean of red and blue, of both images on the page; -255 to 255.
GREEN_OF_BOTH = """() => ["left", "right"].map(side => {
    const image = document.querySelector(`#${side} img`);
    const canvas = new OffscreenCanvas(image.naturalWidth, image.naturalHeight);
    const context = canvas.getContext("2d");
    context.drawImage(image, 0, 0);
    const {data} = context.getImageData(0, 0, canvas.width, canvas.height);
    let sum = 0;
    for (let i = 0; i < data.length; i += 4) sum += data[i + 1] - (data[i] + data[i + 2]) / 2;
    return sum / (data.length / 4);
})"""
NEXT_OR_END = """id => document.body.dataset.ballot ? document.body.dataset.ballot !== id
    : document.getElementById("message").textContent.startsWith("All pairs")"""
SENT = "() => !Object.keys(localStorage).some(key => key.includes('pending'))"


def green(images, prompts, metadata):
    """Return how much green exceeds the mean of red and blue, from -1 to 1, per image."""
    import numpy as np

    means = (np.asarray(image, float).mean((0, 1)) / 255 for image in images)
    return [float(g - (r + b) / 2) for r, g, b in means]


def vote(url: str, votes: int, name: str) -> int:
    """Vote on the page at `url` until all is answered; return the number of votes."""
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, BROWSERS)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(url)
        page.get_by_label("Your name").fill(name)
        page.keyboard.press("Enter")
        given, ballot = 0, ""
        while given < votes:
            page.wait_for_function(NEXT_OR_END, arg=ballot)
            ballot = page.evaluate("document.body.dataset.ballot")
            if not ballot:
                break
            left, right = page.evaluate(GREEN_OF_BOTH)
            page.keyboard.press("ArrowLeft" if left > right else "ArrowRight")
            given += 1
        page.wait_for_function(SENT)
        browser.close()
    return given


def main() -> None:
    """Parse the command line and vote."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", help="address that the vote server prints")
    parser.add_argument("--votes", type=int, default=256)
    parser.add_argument("--name", default="green")
    args = parser.parse_args()
    print(f"{vote(args.url, args.votes, args.name)} votes")


if __name__ == "__main__":
    main()
