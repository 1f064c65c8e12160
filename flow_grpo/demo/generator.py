"""Generate images of a prompt with base and trained weights from the same noise, and score them."""

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flow_grpo.config.trainer_spec import UncheckedConfig
from flow_grpo.data.images import image_digest
from flow_grpo.data.prompts import Prompt
from flow_grpo.demo.limits import DemoLimits, GenerationRequest
from flow_grpo.diffusion.builders import image_size, with_eval_size
from flow_grpo.diffusion.candidates import (
    CHECKPOINT_OPTION,
    CandidateModels,
    parse_diffusion_candidates,
)
from flow_grpo.diffusion.config_checks import check_config
from flow_grpo.diffusion.fields import DiffusionConfig
from flow_grpo.diffusion.models import ModelAdapter
from flow_grpo.diffusion.prompts import build_test_prompts
from flow_grpo.diffusion.rollout import eval_generators, initial_noise
from flow_grpo.diffusion.source_images import reward_metadata
from flow_grpo.errors import UserError
from flow_grpo.hub_access import split_hub_id
from flow_grpo.report.console import displayed_rewards
from flow_grpo.report.grid import format_score
from flow_grpo.rewards import TOTAL, WeightedReward, close_scorers
from flow_grpo.rewards.failure import NotApplicable
from flow_grpo.rewards.frames import Sample, as_videos, to_pil
from flow_grpo.training.builder import (
    build_accelerator,
    build_rewards,
    eval_reward_weights,
    suggest_on_oom,
)
from flow_grpo.training.candidates import BASE, Candidate
from flow_grpo.training.checkpoint import (
    BEST,
    CHECKPOINT_PREFIX,
    LATEST,
    find_weights,
    list_checkpoints,
)
from flow_grpo.training.weight_sources import locate_weights

WEIGHT_KINDS = {
    "ema_lora": "EMA",
    "lora": "LoRA",
    "ema_transformer": "EMA",
    "transformer": "weights",
}
MAX_REWARD_SECONDS = 60.0  # a user waits for it
MAX_REASON_LENGTH = 200


def list_weights(run: Path) -> dict[str, Path]:
    """Return weight directories by display name, newest first, EMA weights before raw ones.

    Raises:
        UserError: If the run has no checkpoints yet.
    """
    root, found = run / "checkpoints", {}
    best = (root / BEST).resolve()
    for checkpoint in reversed(list_checkpoints(root)):
        step = checkpoint.name.removeprefix(CHECKPOINT_PREFIX)
        mark = " (best)" if checkpoint.resolve() == best else ""
        for folder, kind in WEIGHT_KINDS.items():
            if any((checkpoint / folder).glob("*.safetensors")):
                found[f"step {step}, {kind}{mark}"] = checkpoint / folder
    if not found:
        raise UserError(
            "has no checkpoints yet", field=run, hint="train.py saves one every save_freq epochs"
        )
    return found


def find_checkpoints(run: Path | None, names: Sequence[str]) -> list[str]:
    """Return the paths and hub ids of candidates, without duplicates.

    Args:
        run: Run directory; None if there is none.
        names: "latest" (the newest intact one of the run), "best", steps, paths or hub ids.
    """
    known = _checkpoints_by_name(run) if run else {}
    found: dict[Path, str] = {}
    for name in names:
        source = str(known.get(name, name))
        if run and not (os.path.exists(source) or split_hub_id(source)):
            raise UserError(
                f"has no checkpoint {name!r}", field=run, hint=f"choose one of {', '.join(known)}"
            )
        weights = locate_weights(source, CHECKPOINT_OPTION).resolve()
        found.setdefault(weights, str(weights) if name in known else source)
    return list(found.values())


def _checkpoints_by_name(run: Path) -> dict[str, Path]:
    """Return the checkpoints of a run as "latest", "best" and by step."""
    root = run / "checkpoints"
    if not list_checkpoints(root):
        list_weights(run)  # raises
    known = {LATEST: run} | ({BEST: root / BEST} if (root / BEST).exists() else {})
    steps = {p.name.removeprefix(CHECKPOINT_PREFIX): p for p in list_checkpoints(root)}
    return known | steps


@dataclass(frozen=True)
class GeneratedSample:
    """A generated image or video and its scores."""

    sample: Sample
    scores: list[str]  # one line per reward


class DemoGenerator:
    """A loaded model with the rewards of its config; it serves one request at a time.

    Args:
        config: Config of the run, or of the model if there is no run.
        run: Run directory; None for the base model, with the LoRA of `train.lora_path`, and
            `checkpoints`.
        rewards: Whether to score what is generated.
        checkpoints: Further candidates, as for `parse_candidates`.
    """

    def __init__(
        self,
        config: UncheckedConfig,
        run: Path | None,
        *,
        rewards: bool = True,
        checkpoints: Sequence[str] = (),
    ) -> None:
        config = with_eval_size(check_config(config))
        timeout = min(MAX_REWARD_SECONDS, config.reward_timeout)
        # no prompt cache: prompts of users are not stored
        config = replace(config, prompt_cache="", reward_retries=0, reward_timeout=timeout)
        self.config, self.run = config, run
        self.size = image_size(config)
        candidates = parse_diffusion_candidates([BASE, *checkpoints], config.train.lora_path)
        self.base, self.given = candidates[0], {each.name: each for each in candidates[1:]}
        self.newest = next(iter(self.given), None) or self._newest()
        self.accelerator = build_accelerator(config)
        self.reward = self._build_reward() if rewards else None
        self.prompts = _load_test_prompts(config)
        trained = [*candidates[1:], *([self._candidate(self._newest())] if run else [])]
        self.models = CandidateModels(config, self.accelerator, [self.base, *trained])
        with self.models.loaded(self.base):
            pass  # rejects a LoRA that does not fit the model
        self.limits = DemoLimits.of(config.sample, self.adapter.num_source_images)
        self._lock = threading.Lock()

    @property
    def adapter(self) -> ModelAdapter:
        """The model in memory, of the family of all candidates."""
        return self.models.adapter

    @property
    def has_candidates(self) -> bool:
        """Whether there are weights to compare the base model with."""
        return bool(self.run or self.given)

    def weights(self) -> list[str]:
        """Return the names of the current weights.

        An active run saves new ones and removes old ones.
        """
        return [*self.given, *(list_weights(self.run) if self.run else {})]

    def generate(self, request: GenerationRequest) -> list[GeneratedSample]:
        """Generate and score with the base model and, if requested, with trained weights.

        Returns:
            The sample of the base model, then that of the trained weights.
        """
        candidates = [self.base]
        if request.weights is not None:
            candidates.append(self._candidate(request.weights))
        model = self.adapter
        model.check(model.pipeline.config, model.transformer.config, {"guidance": request.guidance})
        prompt = self.find_prompt(request)
        with self._lock, suggest_on_oom(["fewer --config.frames", "a smaller resolution"]):
            images = torch.cat([self._sample(each, prompt, request) for each in candidates])
            lines = self._score(images, prompt) if self.reward else [[] for _ in candidates]
        samples = as_videos(to_pil(images), model.fps)
        return [GeneratedSample(*each) for each in zip(samples, lines, strict=True)]

    def find_prompt(self, request: GenerationRequest) -> Prompt:
        """Return the test prompt with this text and these images, else a new prompt.

        Only a test prompt has metadata for the rewards.
        """
        digests = list(map(image_digest, request.images))
        for prompt in self.prompts:
            same_text = prompt.prompt == request.prompt
            if same_text and list(map(image_digest, prompt.images)) == digests:
                return prompt
        return Prompt(request.prompt, images=request.images)

    def close(self) -> None:
        if self.reward:
            close_scorers(self.reward)

    def _newest(self) -> str | None:
        """Return the display name of the newest intact weights, EMA weights if there are any."""
        if self.run is None:
            return None
        names = {folder: name for name, folder in list_weights(self.run).items()}
        return names[find_weights(self.run)]

    def _sample(self, candidate: Candidate, prompt: Prompt, request: GenerationRequest) -> Tensor:
        """Return the sample of a candidate with the seed of the request, decoded, in [0, 1].

        Its shape is (1, 3, H, W), or (1, F, 3, H, W) for a video.
        """
        with self.models.denoiser(candidate, request.steps, request.guidance) as denoiser:
            adapter = denoiser.adapter
            shape = adapter.latent_shape(*self.size)
            noise = initial_noise(eval_generators(request.seed, [0]), shape, adapter.device)
            return adapter.decode(denoiser.sample(noise, denoiser.encode([prompt])).final)

    def _score(self, images: Tensor, prompt: Prompt) -> list[list[str]]:
        """Return the score lines of each image, scored together: a reward may compare them."""
        self.reward.clear_errors()
        count = len(images)
        metadata = reward_metadata([prompt] * count, self.adapter)
        scores = self.reward(images, [prompt.prompt] * count, metadata)
        return [format_score_lines(self.reward, scores, row, prompt) for row in range(count)]

    def _candidate(self, name: str) -> Candidate:
        """Return the weights with this display name; reject missing and damaged ones."""
        if isinstance(name, str) and name in self.given:
            return self.given[name]
        found = list_weights(self.run) if self.run else {}
        if not isinstance(name, str) or name not in found:
            raise UserError(
                f"checkpoint {name!r} no longer exists",
                hint="reload the page and choose one",
            )
        return Candidate(name, find_weights(found[name]))  # raises if damaged

    def _build_reward(self) -> WeightedReward:
        """Build the evaluation reward of the run."""
        try:
            [reward] = build_rewards(
                self.config, self.accelerator, eval_reward_weights(self.config)
            )
        except UserError as error:
            raise UserError(str(error), hint="use --no-rewards to generate without") from error
        return reward


def format_score_lines(
    reward: WeightedReward, scores: dict[str, np.ndarray], row: int, prompt: Prompt
) -> list[str]:
    """Return a line per reward with its score, or the reason why there is none."""
    names, lines = displayed_rewards(scores), []
    if all(scores[name][row] == NotApplicable() for name in reward.weights):
        names = [name for name in names if name != TOTAL]
    for name in names:
        value, reason = float(scores[name][row]), ""
        if value == NotApplicable():
            reason = reward.scorers[name].skip_reason(prompt.prompt, prompt.metadata)
        elif np.isnan(value):
            reason = reward.last_errors.get(name)
        reason = f"  ({' '.join(reason.split())[:MAX_REASON_LENGTH]})" if reason else ""
        lines.append(f"{name}  {format_score(value)}{reason}")
    return lines


def _load_test_prompts(config: DiffusionConfig) -> list[Prompt]:
    """Return the test prompts; none if they are missing, as generation does not need them."""
    try:
        return build_test_prompts(config)
    except UserError:
        return []
