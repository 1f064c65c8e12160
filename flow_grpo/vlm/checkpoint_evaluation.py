"""Evaluate a VLM or language model and its checkpoints on questions."""

import gc
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from flow_grpo.config.settings import to_json
from flow_grpo.config.trainer_spec import UncheckedConfig
from flow_grpo.errors import RewardOutage, UserError
from flow_grpo.report.score_table import ScoreTable
from flow_grpo.rewards import TOTAL, WeightedReward, close_scorers
from flow_grpo.rewards.draw_settings import draw_settings
from flow_grpo.rewards.drawn_names import drawn_names
from flow_grpo.training.builder import build_accelerator, build_rewards
from flow_grpo.training.candidates import Candidate, parse_candidates
from flow_grpo.training.distributed import is_sharded, raise_on_all_ranks
from flow_grpo.training.lock import lock_output
from flow_grpo.training.session import find_outage
from flow_grpo.training.weight_sources import locate_weights
from flow_grpo.untrusted_files import flatten_fields
from flow_grpo.vlm.builders import (
    build_engine,
    build_policy,
    check_media,
    check_reward_inputs,
    load_encoder_and_model,
    load_policy_model,
)
from flow_grpo.vlm.config_checks import check_config
from flow_grpo.vlm.engine_choice import choose_engine
from flow_grpo.vlm.environment import EnvironmentPool
from flow_grpo.vlm.evaluation_candidates import check_candidates, settings_of
from flow_grpo.vlm.evaluation_page import write_page
from flow_grpo.vlm.evaluation_questions import EvaluationSet, load_evaluation_sets, split_sources
from flow_grpo.vlm.evaluation_results import EvaluationResults
from flow_grpo.vlm.fields import ENVIRONMENT, VLLM, VlmConfig
from flow_grpo.vlm.multi_turn import EpisodeRunner
from flow_grpo.vlm.questions import build_test_questions, eval_question_layout
from flow_grpo.vlm.response_generation import (
    ResponseScorer,
    Sampling,
    generate_responses,
    merge_on_all_ranks,
    missing_keys,
    score_again,
)
from flow_grpo.vlm.response_log import (
    ResponseLog,
    Responses,
    open_evaluation,
    read_responses,
)
from flow_grpo.vlm.response_metrics import Correctness, answer_parser
from flow_grpo.vlm.rollout import RolloutEngine

logger = logging.getLogger("flow_grpo")
# Settings that change the responses or their scores, besides the options of the command line.
RESULT_SETTINGS = (
    "pretrained",
    "mixed_precision",
    "allow_tf32",
    "use_lora",
    "seed",
    "min_pixels",
    "max_pixels",
    "video_fps",
    "video_frames",
    "video_pixels",
    "system_prompt",
    "special_tokens",
    "question_format",
    "max_prompt_length",
    "reward_options",
    "reward_servers",
    "custom_rewards",
    "environment",
    "environment_options",
)
DRAW_RESOURCES = ("batch_size", "device", "offload")  # they affect at most the rounding
RESULT_SAMPLE_SETTINGS = ("max_new_tokens", "engine", "max_turns", "max_observation_tokens")


def evaluate_responses(
    config: UncheckedConfig,
    checkpoints: list[str],
    out: Path,
    *,
    datasets: Sequence[str] = (),
    limit: int = 0,
    n: int | None = None,
    temperature: float | None = None,
    correct: str = "",
) -> ScoreTable:
    """Evaluate candidates on datasets; an interrupted evaluation resumes if it is called again.

    Args:
        config: The settings of a VLM run.
        checkpoints: Candidates, see `parse_candidates`.
        out: Directory of the results.
        datasets: Paths or hub names; by default the test set of the config.
        limit: Number of questions of each of `datasets`; 0 uses all.
        n: Responses to sample per question; None decodes one greedily.
        temperature: Sampling temperature, by default `sample.temperature`.
        correct: Reward and threshold of pass@k and maj@n, see `Correctness.parse`.

    Returns:
        The scores of all candidates.
    """
    config = check_config(config)
    sampling = parse_sampling(config, n, temperature)
    weights = evaluation_weights(config)
    correctness = Correctness.parse(correct, weights)
    candidates = parse_candidates(checkpoints)
    accelerator = build_accelerator(config, autocast=False)
    if is_sharded(accelerator):
        raise UserError(
            "evaluate.py does not support sharding; each process loads the complete model",
            hint="start it with torchrun",
        )
    if datasets:
        sets = load_evaluation_sets(datasets, eval_question_layout(config), limit=limit)
    else:
        sets = split_sources(*build_test_questions(config))
    questions = [question for each in sets for question in each.questions]
    check_media(config, questions, accelerator)
    config = choose_engine(config, questions, accelerator, temperature=sampling.temperature)
    sets = raise_on_all_ranks(accelerator, lambda: check_candidates(config, candidates, sets))
    # located before the rewards load their weights: a later checkpoint is rejected, not mixed in
    settings = raise_on_all_ranks(
        accelerator,
        lambda: evaluation_settings(config, candidates, sets, sampling, correctness, weights),
    )
    with ExitStack() as cleanup:
        [reward] = raise_on_all_ranks(
            accelerator, lambda: build_rewards(config, accelerator, weights)
        )
        cleanup.callback(close_scorers, reward)
        raise_on_all_ranks(
            accelerator, lambda: check_reward(reward, sets, config.sample.max_new_tokens)
        )
        raise_on_all_ranks(
            accelerator, lambda: accelerator.is_main_process and _open(out, settings, cleanup)
        )
        evaluation = ResponseEvaluation(config, accelerator, sets, sampling, reward, out, cleanup)
        responses = evaluation.run(candidates)
        results = EvaluationResults(
            settings,
            [each.name for each in candidates],
            sets,
            sampling,
            correctness,
            list(weights),
            answer_parser(reward, correctness.reward),
            responses,
        )
        table = results.table()
        if accelerator.is_main_process:
            results.write(out)
            write_page(results, out)
            logger.info("%s\nwrote %s", results.markdown(), out)
        accelerator.wait_for_everyone()
    accelerator.end_training()
    return table


class ResponseEvaluation:
    """Generates and scores the responses of candidates, one candidate after another.

    Args:
        config: Checked settings.
        accelerator: Rank, world size and device.
        sets: The datasets.
        sampling: How responses are generated.
        reward: The rewards.
        out: Directory of the evaluation, with its log.
        cleanup: Closes environments at the end.
    """

    def __init__(
        self,
        config: VlmConfig,
        accelerator: Accelerator,
        sets: Sequence[EvaluationSet],
        sampling: Sampling,
        reward: WeightedReward,
        out: Path,
        cleanup: ExitStack,
    ) -> None:
        self.config, self.accelerator, self.sets = config, accelerator, sets
        self.sampling, self.reward = sampling, reward
        self.questions = [question for each in sets for question in each.questions]
        turns = config.sample.max_turns if config.environment else 1
        self.scorer = ResponseScorer(
            reward,
            {each.name: each.questions for each in sets},
            config.sample.max_new_tokens * turns,
            ResponseLog(out, accelerator.process_index),
        )
        self.known = self._read_log(out)
        self.engine: RolloutEngine | None = None
        self.environments: EnvironmentPool | None = None
        self.cleanup = cleanup

    def run(self, candidates: Sequence[Candidate]) -> Responses:
        """Generate the responses that the log lacks, score those without scores, and return all.

        Called on all processes; each returns the responses of all candidates.

        Raises:
            RewardOutage: If too many scores of a candidate are missing.
        """
        for number, candidate in enumerate(candidates, 1):
            if len(candidates) > 1:
                logger.info("%d/%d  %s", number, len(candidates), candidate.name)
            self._complete(candidate)
            self._raise_on_outage(candidate)
        return self.known

    def _read_log(self, out: Path) -> Responses:
        """Return the responses in the log; every machine reads its own disk."""
        read = self.accelerator.is_local_main_process
        known = raise_on_all_ranks(self.accelerator, lambda: read_responses(out) if read else {})
        return merge_on_all_ranks(known)

    def _complete(self, candidate: Candidate) -> None:
        """Generate the missing responses of a candidate and score those without scores."""
        config, names = self.config, {each.name for each in self.sets}
        self.scorer.scored.clear()
        own = {
            key: each
            for key, each in self.known.items()
            if key.checkpoint == candidate.name and key.dataset in names
        }
        missing = missing_keys(candidate.name, self.sets, self.sampling.n, own)
        if own:
            logger.info("%d responses in the log, %d missing", len(own), len(missing))
        score_again(
            own, self.scorer, accelerator=self.accelerator, batch_size=config.sample.batch_size
        )
        if missing:
            engine, runner = self._load(candidate)
            generate_responses(
                engine,
                runner,
                missing,
                self.sampling,
                self.scorer,
                accelerator=self.accelerator,
                batch_size=config.sample.batch_size,
                seed=config.seed,
            )
        self.known |= merge_on_all_ranks(self.scorer.scored)

    def _load(self, candidate: Candidate) -> tuple[RolloutEngine, EpisodeRunner | None]:
        """Load a candidate in place of the previous one."""
        accelerator = self.accelerator
        config = settings_of(self.config, candidate, self.sampling)
        reused = self.engine if config.sample.engine == VLLM else None  # starting it takes minutes
        self._release(keep_engine=reused is not None)
        encoder, model = load_encoder_and_model(
            config, self.questions, load_policy_model, accelerator
        )
        policy = build_policy(config, encoder, model, accelerator)
        if reused is not None:
            reused.policy, reused.encoder = policy, encoder
            self.engine = reused
        else:
            longest = max(map(encoder.prompt_length, self.questions))
            self.engine = build_engine(
                config, policy, encoder, self.questions, longest, accelerator
            )
        if not config.environment:
            return self.engine, None
        sample = config.sample
        pool = self._environments(config)
        limits = sample.max_turns, sample.max_observation_tokens
        return self.engine, EpisodeRunner(self.engine, pool, *limits)

    def _release(self, *, keep_engine: bool) -> None:
        """Free the previous candidate, so that there are never two models in memory."""
        if self.engine is not None and keep_engine:
            self.engine.policy = None
        else:
            self.engine = None
        gc.collect()
        if self.accelerator.device.type == "cuda":
            torch.cuda.empty_cache()

    def _environments(self, config: VlmConfig) -> EnvironmentPool:
        """Return the environments of the episodes, which all candidates share."""
        if self.environments is None:
            self.environments = EnvironmentPool(
                config.environment,
                config.environment_options,
                timeout=config.environment_timeout,
                workers=config.environment_workers,
            )
            self.cleanup.callback(self.environments.close)
        return self.environments

    def _raise_on_outage(self, candidate: Candidate) -> None:
        """Raise a RewardOutage if too large a fraction of a candidate's scores is missing."""
        own = [each.scores for key, each in self.known.items() if key.checkpoint == candidate.name]
        columns = {
            name: np.array([_to_float(scores.get(name, -np.inf)) for scores in own])
            for name in (*self.reward.weights, TOTAL)
        }
        limit = self.config.max_failed_fraction
        if outage := find_outage(self.accelerator, self.reward, columns, limit):
            raise RewardOutage(outage, hint="run the same command again to score the rest")


def _to_float(value: float | None) -> float:
    return np.nan if value is None else value


def parse_sampling(config: VlmConfig, n: int | None, temperature: float | None) -> Sampling:
    """Combine `--n` and `--temperature`; raise a UserError for a temperature without `n`."""
    if n is None:
        if temperature is not None:
            raise UserError(
                "requires --n: without it, responses are decoded greedily",
                field="--temperature",
                value=temperature,
                hint="add --n=1 to sample one response per question",
            )
        return Sampling()
    if n < 1:
        raise UserError("must be at least 1", field="--n", value=n)
    temperature = config.sample.temperature if temperature is None else temperature
    sample = replace(config.sample, temperature=temperature)
    check_config(replace(config, sample=sample))
    return Sampling(n, temperature)


def evaluation_weights(config: VlmConfig) -> dict[str, float]:
    """Return the weights of the evaluation rewards, by default those of training."""
    trained = {**({ENVIRONMENT: 1.0} if config.environment else {}), **config.reward_fn}
    return config.eval_weights(trained)


def check_reward(
    reward: WeightedReward, sets: Sequence[EvaluationSet], max_new_tokens: int
) -> None:
    """Reject rewards that cannot score single responses to these questions."""
    for name in sorted(reward.pairwise_rewards):
        raise UserError(
            "compares the responses of a group and cannot score a single one",
            field=f"reward {name!r}",
            hint="set another reward with --config.eval_reward_fn",
        )
    for each in sets:
        check_reward_inputs(reward, each.questions, max_new_tokens)


def evaluation_settings(
    config: VlmConfig,
    candidates: Sequence[Candidate],
    sets: Sequence[EvaluationSet],
    sampling: Sampling,
    correctness: Correctness,
    weights: dict[str, float],
) -> dict[str, Any]:
    """Return everything that the results depend on, as JSON values."""
    saved = to_json(config)
    settings = {name: saved[name] for name in RESULT_SETTINGS}
    settings["lora_path"] = config.train.lora_path
    settings |= {name: saved["sample"][name] for name in RESULT_SAMPLE_SETTINGS}
    drawn = [name for name in drawn_names(weights) if not config.reward_servers.get(name)]
    if drawn:
        settings["draw"] = {k: v for k, v in saved["draw"].items() if k not in DRAW_RESOURCES}
    return {
        "model": config.pretrained.model,
        "n": sampling.n,
        "temperature": sampling.temperature,
        "correct": str(correctness),
        "rewards": dict(weights),
        "datasets": {
            each.name: {
                "source": each.source,
                "questions": len(each.questions),
                "sha256": each.digest(),
            }
            for each in sets
        },
        "checkpoints": {each.name: _describe_weights(each.weights) for each in candidates},
        "draw_loras": {name: _describe_weights(_locate_lora(config, name)) for name in drawn},
        "settings": dict(flatten_fields(settings)),
    }


def _locate_lora(config: VlmConfig, reward: str) -> Path | None:
    """Return the weights that a reward drawn:NAME loads into the diffusion model, or None."""
    lora = draw_settings(reward, config.draw, config.reward_options.get(reward, {})).lora
    return locate_weights(lora, "draw.lora") if lora else None


def _describe_weights(weights: Path | None) -> dict[str, Any]:
    """Return path, sizes and modification times of the weights, which identify them."""
    if weights is None:
        return {"weights": ""}
    path = weights.resolve()
    files = [path]
    if path.is_dir():  # a .json file may have the scale of a LoRA
        files = sorted(each for each in path.iterdir() if each.suffix in (".safetensors", ".json"))
    stats = {file.name: file.stat() for file in files}
    identity = {name: [each.st_size, each.st_mtime_ns] for name, each in stats.items()}
    return {"weights": str(path), "files": identity}


def _open(out: Path, settings: dict[str, Any], cleanup: ExitStack) -> None:
    """Lock the directory of the evaluation, and create it or check that it continues."""
    lock = lock_output(out)
    cleanup.callback(lock.release)
    open_evaluation(out, settings)
