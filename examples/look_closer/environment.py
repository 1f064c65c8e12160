"""An environment with one tool: a model that says "<look>" is shown the part of its picture that
the question is about, closer. Then it should give the right number in answer tags."""

from typing import Any


class LookCloser:
    def __init__(self, tool: bool = True) -> None:
        """Without the `tool`, the first answer is the last."""
        self.tool = tool

    def reset(self, row: dict[str, Any]) -> None:
        self.row, self.looked = row, False

    def step(self, answer: str) -> tuple[Any, float, bool]:
        if self.tool and not self.looked and answer == "<look>":
            self.looked = True
            crop = self.row["images"][0].crop(self.row["box"])
            return (self.row["question"], [crop]), 0.0, False
        right = f"<answer>{self.row['answer']}</answer>"
        return "", float(answer.endswith(right)), True
