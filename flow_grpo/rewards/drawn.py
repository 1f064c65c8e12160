"""Image rewards of text: a diffusion model draws each response, and the image is scored.

The reward `drawn:NAME` evaluates prompts written by a language model: it applies the image reward
NAME (`drawn:ocr`, `drawn:pickscore`, or a custom image reward) to images generated from them. The
section `draw` of the config selects the diffusion model. Images are scored against the user's
prompt, not against the rewritten one: otherwise the language model could change the request.

The noise of an image depends only on `draw.seed`, the question and the index of the image.
Therefore scores do not depend on the process, nor on the batch except for rounding. All responses
to a question start from the same noise, which makes their scores comparable, and equal responses
are drawn only once.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from PIL import Image

from flow_grpo.config.custom import import_object
from flow_grpo.errors import UserError
from flow_grpo.rewards.draw_settings import SECTION, DrawSettings
from flow_grpo.rewards.drawn_names import image_reward_of
from flow_grpo.rewards.frames import WHOLE_VIDEO, average_over_frames
from flow_grpo.rewards.protocol import BatchScores, MetadataRows, Scorer, ScorerOutput, score
from flow_grpo.rewards.text.response_format import extract_prompt
from flow_grpo.rewards.text.scorers import check_responses
from flow_grpo.rewards.workers.guard import NON_FINITE_IMAGE

# imported only when needed, because diffusion models are in a layer above this one
DIFFUSION_RENDERER = "flow_grpo.diffusion.renderer:DiffusionRenderer"
MIN_CACHED_IMAGES = 256
LENGTHS = ("answer_tokens", "max_new_tokens")
EMPTY = "empty"  # extra value: whether the rewritten prompt is empty


class Renderer(Protocol):
    """A diffusion model that generates images from prompts."""

    def draw(self, prompts: Sequence[str], keys: Sequence[bytes]) -> list[Image.Image | None]:
        """Generate one image per prompt from the noise its key selects; None for NaN pixels."""

    def release_memory(self) -> None:
        """Free GPU memory until the next call."""


class DrawnImages:
    """Generate images and cache the last ones, which several rewards may score.

    Args:
        settings: Section `draw`.
        renderer: The diffusion model.
    """

    def __init__(self, settings: DrawSettings, renderer: Renderer) -> None:
        self.settings, self._renderer = settings, renderer
        self._lock = threading.Lock()  # each reward calls it in its own thread
        self._recent: OrderedDict[tuple[str, bytes], Image.Image | None] = OrderedDict()

    def draw(self, prompts: Sequence[str], questions: Sequence[str]) -> list[Image.Image | None]:
        """Return `settings.images` images of each prompt, prompt by prompt."""
        wanted = [
            (prompt, noise_key(self.settings.seed, question, number))
            for prompt, question in zip(prompts, questions, strict=True)
            for number in range(self.settings.images)
        ]
        with self._lock:
            missing = list(dict.fromkeys(each for each in wanted if each not in self._recent))
            if missing:
                drawn = self._renderer.draw(
                    *(list(column) for column in zip(*missing, strict=True))
                )
                self._recent.update(zip(missing, drawn, strict=True))
            for each in wanted:
                self._recent.move_to_end(each)
            images = [self._recent[each] for each in wanted]
            while len(self._recent) > max(MIN_CACHED_IMAGES, len(wanted)):
                self._recent.popitem(last=False)
        return images

    def release_memory(self) -> None:
        """Move the diffusion model to the CPU if `offload` is set."""
        with self._lock:
            self._renderer.release_memory()


def noise_key(seed: int, question: str, number: int) -> bytes:
    """Return 16 bytes that select the noise of an image."""
    return hashlib.sha256(f"{seed} {number} {question}".encode()).digest()[:16]


def first_equal_rows(
    prompts: Sequence[str], questions: Sequence[str], metadata: MetadataRows
) -> list[int]:
    """Return the index of the first row equal to each row in prompt, question and metadata."""
    first: dict[tuple[str, str], int] = {}
    found = []
    for i, key in enumerate(zip(prompts, questions, strict=True)):
        row = first.setdefault(key, i)
        same = _without_lengths(metadata[row]) == _without_lengths(metadata[i])
        found.append(row if same else i)
    return found


def _without_lengths(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata without the lengths of responses, on which images do not depend."""
    return {name: value for name, value in metadata.items() if name not in LENGTHS}


class DrawnReward(Scorer):
    """Score responses with an image reward of images drawn from them.

    Args:
        name: Name of the reward.
        scorer: The image reward.
        images: Draws the responses, with a cache.
        prompt_key: Column with the prompt that images are scored against; "" for the question.

    Raises:
        UserError: If the reward cannot score single images.
    """

    kind = "answer"

    def __init__(
        self, name: str, scorer: Scorer, images: DrawnImages, prompt_key: str = ""
    ) -> None:
        obstacle = ""
        if scorer.kind != "image":
            obstacle = "scores text, not images"
        elif scorer.compares_groups:
            obstacle = "compares the images of a group"
        elif scorer.reads_audio:
            obstacle = "scores sound"
        elif scorer.frames == WHOLE_VIDEO:
            obstacle = "scores whole videos"
        if obstacle:
            raise UserError(
                f"cannot use {image_reward_of(name)!r}, which {obstacle}",
                field=f"reward {name!r}",
                hint="use a reward that scores single images",
            )
        self.scorer, self.images, self.prompt_key = scorer, images, prompt_key
        self.handles_retries = scorer.handles_retries

    def __call__(
        self, responses: list[str], questions: list[str], metadata: MetadataRows
    ) -> ScorerOutput:
        """Draw each response and return the mean score of its images."""
        check_responses("drawn", responses)
        prompts = [extract_prompt(response) for response in responses]
        first = first_equal_rows(prompts, questions, metadata)
        rows = list(dict.fromkeys(first))  # equal prompts have equal images and scores
        scored = self._score_rows(rows, prompts, questions, metadata)
        place = {row: i for i, row in enumerate(rows)}
        scores = scored.map_values(lambda values: [values[place[row]] for row in first])
        empty = [float(not prompt) for prompt in prompts]
        return scores.values, {**scores.extras, EMPTY: empty}

    def _score_rows(
        self, rows: list[int], prompts: list[str], questions: list[str], metadata: MetadataRows
    ) -> BatchScores:
        """Return the mean score of the images of these rows."""
        count = self.images.settings.images
        drawn = self.images.draw([prompts[i] for i in rows], [questions[i] for i in rows])
        sources = [row for row in rows for _ in range(count)]  # the row of each image
        valid = [i for i, image in enumerate(drawn) if image is not None]
        batch = (
            [drawn[i] for i in valid],
            [self.target(questions[sources[i]], metadata[sources[i]]) for i in valid],
            [metadata[sources[i]] for i in valid],
        )
        scored = score(self.scorer, *batch) if valid else BatchScores([])

        def mean_per_row(values: list[float]) -> list[float]:
            by_image = dict(zip(valid, values, strict=True))
            everything = [by_image.get(i, NON_FINITE_IMAGE) for i in range(len(drawn))]
            return average_over_frames(everything, [count] * len(rows))

        return scored.map_values(mean_per_row)

    def preview(
        self, responses: Sequence[str], questions: Sequence[str]
    ) -> list[Image.Image | None]:
        """Return the first image of each response, for the report."""
        prompts = [extract_prompt(response) for response in responses]
        return self.images.draw(prompts, questions)[:: self.images.settings.images]

    def target(self, question: str, metadata: Mapping[str, Any]) -> str:
        """Return the prompt that the images of a question are scored against."""
        return str(metadata.get(self.prompt_key) or "") if self.prompt_key else question

    def skip_reason(self, prompt: str, metadata: dict) -> str | None:
        """Return why the image reward does not apply to a question, or None."""
        return self.scorer.skip_reason(self.target(prompt, metadata), metadata)

    def invalid_row(self, prompt: str, metadata: dict) -> str | None:
        """Return why a data row cannot be used, or None."""
        if self.prompt_key and not metadata.get(self.prompt_key):
            return f"it has no column {self.prompt_key!r}, which draw.prompt_key names"
        return self.scorer.invalid_row(self.target(prompt, metadata), metadata)

    def check_servers(self) -> None:
        self.scorer.check_servers()

    def release_memory(self) -> None:
        self.images.release_memory()
        self.scorer.release_memory()

    def close(self) -> None:
        self.scorer.close()


def build_drawn_rewards(
    scorers: Mapping[str, Scorer], settings: Mapping[str, DrawSettings], device: str
) -> dict[str, Scorer]:
    """Build rewards drawn:NAME; those with equal settings share a diffusion model.

    Args:
        scorers: Image reward by the name of the drawn reward.
        settings: Settings of each drawn reward.
        device: Device of the diffusion model, unless its settings name one.
    """
    found: dict[DrawSettings, DrawnImages] = {}
    for each in settings.values():
        if _without_key(each) not in found:
            load = import_object(DIFFUSION_RENDERER, f"{SECTION}.model", "rewards drawn:NAME")
            found[_without_key(each)] = DrawnImages(each, load(each, each.device or device))
    return {
        name: DrawnReward(name, scorers[name], found[_without_key(each)], each.prompt_key)
        for name, each in settings.items()
    }


def _without_key(settings: DrawSettings) -> DrawSettings:
    """Return the settings that determine the images."""
    return replace(settings, prompt_key="")
