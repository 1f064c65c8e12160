"""Write the tables of docs/rewards.md and docs/vlm/rewards.md from flow_grpo/rewards/cards.toml.

python docs/make_rewards.py
"""

import re
from pathlib import Path

from flow_grpo.report.console import markdown_table
from flow_grpo.rewards.cards import RewardCard, reward_cards
from flow_grpo.rewards.registry import IMAGE_REWARDS, TEXT_REWARDS

HERE = Path(__file__).parent
PAGES = (HERE / "rewards.md", HERE / "vlm/rewards.md")
PLACE = re.compile(r"(<!-- rewards (\w+) -->\n).*?(?=<!-- end -->)", re.S)
IMAGE_HEAD = ["name", "score, *additional values*", "typical range", "model", "parameters"]
IMAGE_HEAD += ["runs", "licence"]


def image_row(card: RewardCard) -> list[str]:
    model = card.model or "none"
    facts = [card.score, card.range, model, card.parameters, card.runs, card.licence]
    return [f"`{card.name}`", *facts]


def table(kind: str) -> str:
    """Return the table of "image" or "text" rewards, or of the "measured" ones."""
    cards = reward_cards().values()
    if kind == "text":
        rows = [[f"`{c.name}`", c.score, c.options] for c in cards if c.name in TEXT_REWARDS]
        return markdown_table([["name", "score", "options"], *rows])
    if kind == "measured":
        rows = [
            [f"`{c.name}`", f"{c.images_per_s:g}", f"{c.gpu_memory_gib:g}", c.measured]
            for c in cards
            if c.images_per_s is not None
        ]
        return markdown_table([["name", "samples/s", "GPU memory (GiB)", "measured with"], *rows])
    return markdown_table([IMAGE_HEAD, *(image_row(c) for c in cards if c.name in IMAGE_REWARDS)])


def page(text: str) -> str:
    """Return a page with its generated tables."""
    return PLACE.sub(lambda place: f"{place[1]}\n{table(place[2])}\n\n", text)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(page(path.read_text("utf-8")), "utf-8")
