"""An environment with one tool: after "<look>", the model gets a crop of the relevant region.

It then has to give the right number in answer tags.
"""

from typing import Any


class LookCloser:
    def __init__(self, tool: bool = True) -> None:
        """Without the `tool`, the episode ends after the first response."""
        self.tool = tool

    def reset(self, row: dict[str, Any]) -> None:
        self.row, self.looked = row, False

    def step(self, answer: str) -> tuple[Any, float, bool]:
        if self.tool and not self.looked and answer == "<look>":
            self.looked = True
            crop = self.row["images"][0].crop(self.row["box"])
            return (self.row["question"], [crop]), 0.0, False
        expected = f"<answer>{self.row['answer']}</answer>"
        return "", float(answer.endswith(expected)), True
