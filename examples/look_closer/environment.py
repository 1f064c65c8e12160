"""An environment with one tool: whatever the model says without answer tags gets it a closer look
at its picture. The last number that it then says should be the right one."""

import re
from typing import Any


class LookCloser:
    def __init__(self, tool: bool = True) -> None:
        """Without the `tool`, the first answer is the last."""
        self.tool = tool

    def reset(self, row: dict[str, Any]) -> None:
        self.row, self.looked = row, False

    def step(self, answer: str) -> tuple[Any, float, bool]:
        if self.tool and not self.looked and "<answer>" not in answer:
            self.looked = True
            crop = self.row["images"][0].crop(self.row["box"])
            return (self.row["question"], [crop]), 0.0, False
        numbers = re.findall(r"\d+", answer)
        return "", float(numbers[-1:] == [self.row["answer"]]), True
