"""Environments for tests: working ones and one for each kind of failure."""

import os
import time
from pathlib import Path

from PIL import Image

EPISODES = {  # settings of a run
    "environment": f"{__file__}:CropEnvironment",
    "sample.max_turns": 2,
    "sample.max_observation_tokens": 60,
}


class CropEnvironment:
    """Environment that returns a crop of the question's image, or a text if it has none.

    The reward is the fraction of early letters in the response. An episode ends after a response
    whose last character has a code that is divisible by three.
    """

    def reset(self, row):
        self.row, self.turn = row, 0

    def step(self, answer):
        self.turn += 1
        reward = sum(c < "P" for c in answer) / max(1, len(answer))
        done = ord(answer[-1:] or " ") % 3 == 0
        if not self.row["images"]:
            return f"Wrong, {self.turn}.", reward, done
        image = self.row["images"][0]
        crop = image.crop((0, 0, 16 + 16 * self.turn, 16)).resize((16 + 16 * self.turn, 32))
        return (f"Look <image> at {self.turn}", [crop]), reward, done


class Misbehaving(CropEnvironment):
    """Environment that fails as `trouble` says for the question whose reference answer is `mark`.

    Other questions have two turns. Each reset is appended to the file `log`.
    """

    def __init__(self, trouble, mark, log):
        if trouble == "replaced":
            self.fallback_observation = "too long"
        elif trouble == "allows long steps":
            self.longest_step = 60.0
        self.trouble, self.mark, self.log = trouble, mark, Path(log)

    def reset(self, row):
        super().reset(row)
        with self.log.open("a") as file:
            file.write(row["answer"] + "\n")

    def step(self, answer):
        result = super().step(answer)
        if self.mark != self.row["answer"]:
            return result[0], 0.5, self.turn == 2
        return {
            "hangs": lambda: time.sleep(600),
            "dies": lambda: os._exit(3),
            "raises": lambda: 1 / 0,
            "long text": lambda: ("x" * 100 * 2**20, 0.0, False),
            "large image": lambda: (("", [Image.new("RGB", (6000, 6000))]), 0.0, False),
            "narrow image": lambda: (("", [Image.new("RGB", (9000, 10))]), 0.0, False),
            "many tokens": lambda: ("x" * 99, 0.0, False),
            "replaced": lambda: ("x" * 99, 0.0, self.turn == 2),
            "no reward": lambda: ("", None, False),
            "nothing": lambda: None,
        }[self.trouble]()


class Slow:
    """Environment whose steps take a number of seconds, or hang if the response is "hang"."""

    def __init__(self, seconds=0.0):
        self.seconds = seconds

    def reset(self, row):
        self.turn = 0

    def step(self, answer):
        time.sleep(600 if answer == "hang" else self.seconds)
        self.turn += 1
        return str(self.turn), 0.0, False


class NoStep:
    def reset(self, row): ...
