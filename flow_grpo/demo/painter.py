"""Draws a prompt with the base and with trained weights, from the same noise, and scores both."""

import threading
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flow_grpo.config.trade import Unchecked
from flow_grpo.data.images import digest
from flow_grpo.data.prompts import Prompt
from flow_grpo.demo.limits import DemoLimits, Wish
from flow_grpo.draw.check import check
from flow_grpo.draw.evaluation import Candidate, Exchange, base_candidate
from flow_grpo.draw.fields import DrawFields
from flow_grpo.draw.prompts import build_test_prompts
from flow_grpo.draw.rollout import Denoiser, eval_generators, initial_noise
from flow_grpo.draw.session import build_adapter, build_dynamics, image_size
from flow_grpo.draw.sources import reward_metadata
from flow_grpo.errors import UserError
from flow_grpo.rewards import TOTAL, WeightedReward, close_scorers
from flow_grpo.rewards.failure import NotAsked
from flow_grpo.rewards.frames import Sample, to_pil
from flow_grpo.run.building import advice_when_short, build_accelerator, build_rewards, eval_weights
from flow_grpo.run.checkpoint import BEST, LATEST, PREFIX, list_checkpoints, weights_in
from flow_grpo.show.console import shown_rewards
from flow_grpo.show.grid import score_text

KINDS = {"ema_lora": "EMA", "lora": "LoRA", "ema_transformer": "EMA", "transformer": "weights"}
REWARD_SECONDS = 60.0  # somebody waits for it
REASON_LENGTH = 200


def list_weights(run: Path) -> dict[str, Path]:
    """Folders by the names to show; the newest first, and the moving average before the weights."""
    root, found = run / "checkpoints", {}
    best = (root / BEST).resolve()
    for checkpoint in reversed(list_checkpoints(root)):
        step = checkpoint.name.removeprefix(PREFIX)
        mark = " (best)" if checkpoint.resolve() == best else ""
        for folder, kind in KINDS.items():
            if any((checkpoint / folder).glob("*.safetensors")):
                found[f"step {step}, {kind}{mark}"] = checkpoint / folder
    if not found:
        raise UserError(f"{run} has no checkpoints yet; train.py saves one every save_freq epochs")
    return found


def find_checkpoints(run: Path, words: list[str]) -> list[Path]:
    """ "latest", "best", a step or a path each; those that are one and the same stand once."""
    found = {weights_in(_find(run, word)).resolve(): None for word in words}
    return list(found)


def _find(run: Path, word: str) -> Path:
    root = run / "checkpoints"
    steps = [each.name.removeprefix(PREFIX) for each in list_checkpoints(root)]
    if not steps:
        list_weights(run)  # tells it
    if word == LATEST:
        return run  # the newest that is whole
    place = root / f"{PREFIX}{word}" if word in steps else root / BEST if word == BEST else None
    place = place or Path(word)
    if not place.exists():
        there = [LATEST, *([BEST] if (root / BEST).exists() else []), *steps]
        raise UserError(f"{run} has no checkpoint {word!r}; it has {', '.join(there)}")
    return place


@dataclass(frozen=True)
class Drawn:
    sample: Sample
    scores: list[str]  # a line for each reward


class Painter:
    """A model in memory, and the rewards of its config; draws for one at a time."""

    def __init__(self, config: Unchecked, run: Path | None, *, rewards: bool = True) -> None:
        """Without a `run` there is the base alone, which has the LoRA of `train.lora_path`."""
        config = check(config)
        timeout = min(REWARD_SECONDS, config.reward_timeout)
        # what people type is kept nowhere
        config = replace(config, prompt_cache="", reward_retries=0, reward_timeout=timeout)
        self.config, self.run = config, run
        self.size = image_size(config)
        self.newest = self._newest()
        self.base = base_candidate(config.train.lora_path)
        self.accelerator = build_accelerator(config)
        self.reward = self._rewards() if rewards else None
        self.prompts = _test_prompts(config)
        self.adapter = build_adapter(config, self.accelerator)
        self.limits = DemoLimits.of(config, self.adapter.sources)
        trained = [self._candidate(self.newest)] if self.newest else []
        self.exchange = Exchange(self.adapter, [self.base, *trained])
        with self.exchange.applied(self.base):
            pass  # rejects a LoRA that does not fit the model
        self.exchange.check(trained)
        self.module = self.accelerator.prepare_model(self.adapter.transformer, evaluation_mode=True)
        self._turn = threading.Lock()

    def weights(self) -> dict[str, Path]:
        """Those there are now: a run that goes on saves new ones and removes old ones."""
        return list_weights(self.run) if self.run else {}

    def draw(self, wish: Wish) -> list[Drawn]:
        """With the base, and with the weights that are asked for."""
        candidates = [self.base]
        if wish.weights is not None:
            candidates.append(self._candidate(wish.weights))
        model = self.adapter
        model.check(model.pipeline.config, model.transformer.config, {"guidance": wish.guidance})
        prompt = self.prompt_of(wish)
        with self._turn, advice_when_short(["fewer --config.frames", "a smaller picture"]):
            images = torch.cat([self._draw(each, prompt, wish) for each in candidates])
            lines = self._score(images, prompt) if self.reward else [[] for _ in candidates]
        return [Drawn(*each) for each in zip(to_pil(images), lines, strict=True)]

    def prompt_of(self, wish: Wish) -> Prompt:
        """One of the test prompts brings what rewards have to know of it."""
        given = [digest(picture) for picture in wish.pictures]
        for prompt in self.prompts:
            if prompt.prompt == wish.prompt and [digest(p) for p in prompt.images] == given:
                return prompt
        return Prompt(wish.prompt, images=wish.pictures)

    def close(self) -> None:
        if self.reward:
            close_scorers(self.reward)

    def _newest(self) -> str | None:
        """The name of the newest weights that are whole, the average where there is one."""
        names = {folder: name for name, folder in self.weights().items()}
        return names[weights_in(self.run)] if self.run else None

    def _draw(self, candidate: Candidate, prompt: Prompt, wish: Wish) -> Tensor:
        with self.exchange.applied(candidate) as adapter:
            dynamics = build_dynamics(
                self.config, adapter, wish.steps, guidance_scale=wish.guidance
            )
            denoiser = Denoiser(adapter, self.module, dynamics)
            shape = adapter.latent_shape(*self.size)
            noise = initial_noise(eval_generators(wish.seed, [0]), shape, adapter.device)
            return adapter.decode(denoiser.sample(noise, denoiser.encode([prompt])).final)

    def _score(self, images: Tensor, prompt: Prompt) -> list[list[str]]:
        """Together: a reward may compare the two."""
        self.reward.forget_errors()
        count = len(images)
        told = reward_metadata([prompt] * count, self.adapter)
        scores = self.reward(images, [prompt.prompt] * count, told)
        return [score_lines(self.reward, scores, row, prompt) for row in range(count)]

    def _candidate(self, name: str) -> Candidate:
        found = self.weights()
        if not isinstance(name, str) or name not in found:
            raise UserError("there is no such checkpoint any more; reload the page and choose one")
        return Candidate(name, weights_in(found[name]))  # which tells damage

    def _rewards(self) -> WeightedReward:
        try:
            [reward] = build_rewards(self.config, self.accelerator, eval_weights(self.config))
        except UserError as error:
            raise UserError(f"{error}; --no-rewards draws without") from error
        return reward


def score_lines(
    reward: WeightedReward, scores: dict[str, np.ndarray], row: int, prompt: Prompt
) -> list[str]:
    """What stands under a picture: each reward with its score, or the reason why it has none."""
    names, lines = shown_rewards(scores), []
    if all(scores[name][row] == NotAsked() for name in reward.weights):
        names = [name for name in names if name != TOTAL]
    for name in names:
        value, reason = float(scores[name][row]), ""
        if value == NotAsked():
            reason = reward.scorers[name].why_not(prompt.prompt, prompt.metadata)
        elif np.isnan(value):
            reason = reward.last_errors.get(name)
        reason = f"  ({' '.join(reason.split())[:REASON_LENGTH]})" if reason else ""
        lines.append(f"{name}  {score_text(value)}{reason}")
    return lines


def _test_prompts(config: DrawFields) -> list[Prompt]:
    """None where they are not on this machine: to draw, they are not needed."""
    try:
        return build_test_prompts(config)
    except UserError:
        return []
