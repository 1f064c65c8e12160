"""Generate pairs of images ahead of the voters, in the background.

The plan is fixed: for round k, every prompt once. Two checkpoints generate one image each from the
noise (seed, prompt, k); a single one generates two, from the noises 2k and 2k + 1. The id of a pair
is a hash of everything that determines it, so a restarted server reuses the pairs that exist.
"""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from flow_grpo.config.trainer_spec import UncheckedConfig
from flow_grpo.data.images import image_digest
from flow_grpo.data.prompts import Prompt
from flow_grpo.data.seeding import Stream, torch_generator
from flow_grpo.diffusion.builders import (
    get_eval_guidance_scale,
    image_size,
    resolve_model_family,
    with_eval_size,
)
from flow_grpo.diffusion.candidates import (
    CHECKPOINT_OPTION,
    CandidateModels,
    config_for,
    parse_diffusion_candidates,
)
from flow_grpo.diffusion.config_checks import check_config, reject_groupwise_eval_rewards
from flow_grpo.diffusion.fields import DiffusionConfig
from flow_grpo.diffusion.rollout import initial_noise
from flow_grpo.diffusion.session import check_reward
from flow_grpo.diffusion.source_images import (
    check_source_images,
    load_source_images,
    reward_metadata,
)
from flow_grpo.errors import UserError, first_line
from flow_grpo.rewards import TOTAL, WeightedReward, close_scorers
from flow_grpo.rewards.frames import to_pil
from flow_grpo.training.builder import build_accelerator, build_rewards, suggest_on_oom
from flow_grpo.training.candidates import Candidate
from flow_grpo.votes.ballots import CHECKPOINTS, Ballot, stable_id
from flow_grpo.votes.book import VoteBook
from flow_grpo.votes.image_files import ImageFiles

logger = logging.getLogger("flow_grpo")
FIRST_PAIRS = 2  # generated first, so that voting can start early
CHECK_SECONDS = 0.2  # between checks of how many pairs are ready


@dataclass(frozen=True)
class PlannedPair:
    """A pair of the plan."""

    ballot: str  # id
    row: int  # of the prompt
    round: int


class PairGenerator:
    """Generates the pairs of a plan in a thread, at most `ahead` more than voters have answered.

    Args:
        config: Config of the base model and of sampling.
        checkpoints: One or two, as for `parse_candidates`.
        prompts: Prompts; repeated ones are used once.
        rounds: Pairs per prompt.
        votes: Wanted votes per pair.
        ahead: Pairs that are ready for the voter who has answered most.
        reward: Name of the reward whose margins are stored with the ballots, or "".
    """

    def __init__(
        self,
        config: UncheckedConfig,
        checkpoints: Sequence[str],
        prompts: Sequence[Prompt],
        *,
        rounds: int = 1,
        votes: int = 1,
        ahead: int = 32,
        reward: str = "",
    ) -> None:
        config = with_eval_size(check_config(config))
        self._candidates = parse_diffusion_candidates([*checkpoints], config.train.lora_path)
        if len(self._candidates) > 2:
            raise UserError(
                "has more than two candidates", field=CHECKPOINT_OPTION, value=[*checkpoints]
            )
        # no prompt cache: it is for the prompts of a run
        config = replace(config_for(config, self._candidates), prompt_cache="")
        if config.frames > 1:
            raise UserError("must be 1: pairs of videos are not supported", field="frames")
        self._config, self._size = config, image_size(config)
        self._accelerator = build_accelerator(config)
        self._prompts = list({prompt.identity: prompt for prompt in prompts}.values())
        if repeated := len(prompts) - len(self._prompts):
            logger.info("%d repeated prompts are used once", repeated)
        family = resolve_model_family(config.pretrained)
        model = config.pretrained.model
        check_source_images(self._prompts, model, family, self._size, self._accelerator)
        self._votes, self._ahead = votes, ahead
        planned = [
            PlannedPair(self._pair_id(prompt, number), row, number)
            for number in range(rounds)
            for row, prompt in enumerate(self._prompts)
        ]
        self._plan = {each.ballot: each for each in planned}
        self._reward = self._build_reward(reward) if reward else None
        self._models = CandidateModels(config, self._accelerator, self._candidates)
        with self._models.loaded(self._candidates[0]):
            pass  # rejects weights that do not fit the model
        self._book: VoteBook | None = None
        self._problem = ""
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, book: VoteBook, images: ImageFiles) -> None:
        """Start generating the pairs of the plan that are not in the book."""
        self._book = book
        self._thread = threading.Thread(target=self._run, args=(book, images), daemon=True)
        self._thread.start()

    def status(self) -> tuple[int, str]:
        """Return the number of pairs to be generated, and why generation stopped, or ""."""
        return len(self._missing()), self._problem

    def close(self) -> None:
        """Stop the thread after the current pairs."""
        self._stopping.set()
        if self._thread:
            self._thread.join()
        if self._reward:
            close_scorers(self._reward)

    def _run(self, book: VoteBook, images: ImageFiles) -> None:
        try:
            while (missing := self._missing()) and not self._stopping.is_set():
                ready = book.num_ready()
                count = min(self._ahead - ready, max(FIRST_PAIRS, ready))
                if count > 0:
                    for ballot in self._generate(missing[:count], images):
                        book.add_ballot(ballot)
                else:
                    self._stopping.wait(CHECK_SECONDS)
        except (Exception, torch.OutOfMemoryError) as error:
            self._problem = first_line(error)
            if isinstance(error, UserError):
                logger.error("no more pairs are generated: %s", error)
            else:
                logger.exception("no more pairs are generated")

    def _missing(self) -> list[PlannedPair]:
        """Return the pairs of the plan that the book does not have."""
        if self._book is None:
            return list(self._plan.values())
        return [self._plan[name] for name in self._book.without_ballots(self._plan)]

    def _generate(self, pairs: list[PlannedPair], images: ImageFiles) -> list[Ballot]:
        """Generate and store the images of some pairs; return their ballots."""
        prompts = [self._prompts[each.row] for each in pairs]
        with suggest_on_oom(["a smaller --config.sample.test_batch_size", "a smaller resolution"]):
            sides = [self._sample(side, pairs) for side in (0, 1)]
            margins = self._margins(sides, prompts)
        sources = load_source_images(prompts, self._models.adapter)
        source_files = [tuple(map(images.add, each)) for each in sources]
        files = [[images.add(image) for image in to_pil(side)] for side in sides]
        names = (self._candidates[0].name, self._candidates[-1].name)
        return [
            Ballot(
                pair.ballot,
                prompts[i].prompt,
                (files[0][i], files[1][i]),
                source=CHECKPOINTS,
                candidates=names,
                sources=source_files[i],
                margin=margins[i],
                votes=self._votes,
            )
            for i, pair in enumerate(pairs)
        ]

    def _sample(self, side: int, pairs: list[PlannedPair]) -> Tensor:
        """Return the first or second images of pairs, (N, 3, H, W) in [0, 1]."""
        candidate, batch = self._candidates[-side], self._config.sample.test_batch_size
        seeds = [
            each.round if len(self._candidates) > 1 else 2 * each.round + side for each in pairs
        ]
        decoded = []
        with self._models.denoiser(candidate) as denoiser:
            adapter = denoiser.adapter
            shape = adapter.latent_shape(*self._size)
            for start in range(0, len(pairs), batch):
                rows = range(start, min(start + batch, len(pairs)))
                generators = [
                    torch_generator(self._config.seed, Stream.EVAL, pairs[i].row, seeds[i])
                    for i in rows
                ]
                noise = initial_noise(generators, shape, adapter.device)
                prompts = denoiser.encode([self._prompts[pairs[i].row] for i in rows])
                decoded.append(adapter.decode(denoiser.sample(noise, prompts).final).cpu())
        return torch.cat(decoded)

    def _margins(self, sides: list[Tensor], prompts: list[Prompt]) -> list[float | None]:
        """Return the absolute differences of the reward; None where an image has no score."""
        if self._reward is None:
            return [None] * len(prompts)
        texts, metadata = (
            [p.prompt for p in prompts],
            reward_metadata(prompts, self._models.adapter),
        )
        first, second = (self._reward(side, texts, metadata)[TOTAL] for side in sides)
        margins = np.abs(np.asarray(first, float) - np.asarray(second, float)).tolist()
        return [None if np.isnan(margin) else margin for margin in margins]

    def _build_reward(self, name: str) -> WeightedReward:
        """Build and test the reward of the margins."""
        [reward] = build_rewards(self._config, self._accelerator, {name: 1.0})
        reject_groupwise_eval_rewards(reward.pairwise_rewards)
        check_reward(reward, self._prompts, self._size)
        return reward

    def _pair_id(self, prompt: Prompt, number: int) -> str:
        """Return a hash of all that determines the images of a pair."""
        config: DiffusionConfig = self._config
        return stable_id(
            CHECKPOINTS,
            config.pretrained.model,
            [_identity(each) for each in self._candidates],
            [config.seed, config.sample.eval_num_steps, get_eval_guidance_scale(config.sample)],
            [self._size.height, self._size.width],
            [prompt.prompt, prompt.negative_prompt, *map(image_digest, prompt.images)],
            number,
        )


def _identity(candidate: Candidate) -> str:
    return str(candidate.weights.resolve()) if candidate.weights else candidate.name
