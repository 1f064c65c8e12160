"""Run a benchmark of questions with the evaluation of VLMs and language models.

Responses and their scores are in the log of the evaluation, from which a killed benchmark
continues: OUT/responses.
"""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from flow_grpo.benchmarks.protocol import Protocol, ResponseSampling, Settings
from flow_grpo.benchmarks.questions import read_questions
from flow_grpo.benchmarks.results import BenchmarkResults, RawScores, collect_results, write_results
from flow_grpo.benchmarks.session import Overrides, log_protocol, resolve_settings
from flow_grpo.benchmarks.sources import find_files
from flow_grpo.benchmarks.store import reject_other_content, subset, weights_checksum
from flow_grpo.config.paths import relative_name
from flow_grpo.config.trainer_spec import UncheckedConfig
from flow_grpo.errors import UserError
from flow_grpo.rewards import close_scorers
from flow_grpo.rewards.registry import TEXT_REWARDS
from flow_grpo.training.builder import available_scorers, build_accelerator, build_rewards
from flow_grpo.training.candidates import Candidate, parse_candidates
from flow_grpo.training.distributed import is_sharded, raise_on_all_ranks
from flow_grpo.training.lock import lock_output
from flow_grpo.vlm.builders import check_media
from flow_grpo.vlm.checkpoint_evaluation import (
    ResponseEvaluation,
    check_reward,
    evaluation_settings,
)
from flow_grpo.vlm.config_checks import check_config
from flow_grpo.vlm.engine_choice import choose_engine
from flow_grpo.vlm.evaluation_candidates import check_candidates
from flow_grpo.vlm.evaluation_questions import EvaluationSet
from flow_grpo.vlm.fields import VlmConfig
from flow_grpo.vlm.response_generation import Sampling
from flow_grpo.vlm.response_log import ResponseKey, Responses, open_evaluation
from flow_grpo.vlm.response_metrics import Correctness

logger = logging.getLogger("flow_grpo")
RESPONSES = "responses"  # directory of the evaluation in the output directory


def run_benchmark(
    config: UncheckedConfig | VlmConfig,
    protocol: Protocol,
    checkpoints: Sequence[str],
    out: Path,
    overrides: Overrides | None = None,
) -> BenchmarkResults:
    """Score candidates on a benchmark of questions, and write the results.

    Args:
        config: Config of the base model; what the protocol pins is replaced.
        protocol: The benchmark.
        checkpoints: Candidates, as in `flow-grpo evaluate`.
        out: Output directory; one of the same evaluation is continued.
        overrides: Deviations from the protocol.
    """
    overrides, checked = overrides or Overrides(), check_config(config)
    files = find_files(protocol.prompts, overrides.prompts)
    questions, tags = read_questions(files, protocol.prompts)
    rows = subset(len(questions), overrides.num_prompts)
    settings, deviations = resolve_settings(
        protocol,
        overrides,
        family="",
        available=available_scorers(checked, TEXT_REWARDS),
        num_prompts=len(rows),
        prompts_sha256=files.sha256,
    )
    checked = check_config(apply_settings(checked, settings))
    candidates = parse_candidates(list(checkpoints))
    accelerator = build_accelerator(checked, autocast=False)
    if is_sharded(accelerator):
        raise UserError("bench does not support sharding", hint="start it with torchrun")
    sampling = sampling_of(settings)
    source = str(files.files[0])
    sets = [EvaluationSet(protocol.name, source, [questions[row] for row in rows])]
    check_media(checked, sets[0].questions, accelerator)
    checked = choose_engine(checked, sets[0].questions, accelerator)
    checked = replace(checked, filter_overlong_prompts=False)  # no question may be dropped
    sets = raise_on_all_ranks(accelerator, lambda: check_candidates(checked, candidates, sets))
    model = relative_name(checked.pretrained.model)
    log_protocol(protocol, settings, deviations, model)
    weights, main = checked.eval_reward_fn, accelerator.is_main_process
    correctness = Correctness.parse("", weights)
    with ExitStack() as cleanup:
        [reward] = raise_on_all_ranks(
            accelerator, lambda: build_rewards(checked, accelerator, weights)
        )
        cleanup.callback(close_scorers, reward)
        raise_on_all_ranks(
            accelerator, lambda: check_reward(reward, sets, checked.sample.max_new_tokens)
        )
        described = evaluation_settings(checked, candidates, sets, sampling, correctness, weights)
        folder = out / RESPONSES

        def open_folder() -> None:
            if not folder.exists():
                reject_other_content(out)
            lock = lock_output(folder)
            cleanup.callback(lock.release)
            open_evaluation(folder, described)

        raise_on_all_ranks(accelerator, lambda: main and open_folder())
        evaluation = ResponseEvaluation(
            checked, accelerator, sets, sampling, reward, folder, cleanup
        )
        responses = evaluation.run(candidates)
        results = collect_results(
            protocol,
            model=model,
            settings=settings.to_json(),
            deviations=deviations,
            prompts=[question.text for question in sets[0].questions],
            tags=[tags[row] for row in rows],
            candidates=[raw_scores(each, responses, sets[0], settings) for each in candidates],
            responses={each.name: texts(each, responses, sets[0], settings) for each in candidates},
        )
        raise_on_all_ranks(accelerator, partial(_write, out, results) if main else lambda: None)
        accelerator.wait_for_everyone()
    accelerator.end_training()
    return results


def apply_settings(config: VlmConfig, settings: Settings) -> VlmConfig:
    """Return a config that samples and scores as a benchmark requires."""
    used = settings.sampling
    assert isinstance(used, ResponseSampling)
    sample = replace(config.sample, max_new_tokens=used.max_new_tokens)
    if used.temperature:
        sample = replace(sample, temperature=used.temperature)
    return replace(
        config,
        sample=sample,
        question_format=used.question_format or config.question_format,
        seed=settings.seed,
        eval_reward_fn=dict.fromkeys(settings.scorers, 1.0),
        reward_options={name: own for name, own in settings.scorers.items() if own},
    )


def sampling_of(settings: Settings) -> Sampling:
    """Return how responses are generated; several greedy responses would be equal."""
    temperature = settings.sampling.temperature
    if temperature:
        return Sampling(settings.samples, temperature)
    if settings.samples > 1:
        raise UserError(
            "needs a temperature above 0: greedy responses are all equal",
            field="--samples",
            value=settings.samples,
            hint="set --temperature=0.6",
        )
    return Sampling()


def raw_scores(
    candidate: Candidate, responses: Responses, used: EvaluationSet, settings: Settings
) -> RawScores:
    """Return the scores of a candidate, (questions, samples) by scorer."""
    shape = (len(used.questions), settings.samples)
    scores = {name: np.full(shape, np.nan) for name in settings.scorers}
    for row, number in np.ndindex(shape):
        own = responses[ResponseKey(candidate.name, used.name, row, number)].scores
        for name, values in scores.items():
            value = own.get(name, -np.inf)  # absent: the scorer does not apply
            values[row, number] = np.nan if value is None else value
    path = "" if candidate.weights is None else str(candidate.weights)
    return RawScores(candidate.name, path, weights_checksum(candidate.weights), scores)


def texts(
    candidate: Candidate, responses: Responses, used: EvaluationSet, settings: Settings
) -> list[list[str]]:
    """Return the responses of a candidate, (questions, samples)."""
    return [
        [
            responses[ResponseKey(candidate.name, used.name, row, number)].answer
            for number in range(settings.samples)
        ]
        for row in range(len(used.questions))
    ]


def _write(out: Path, results: BenchmarkResults) -> None:
    write_results(out, results)
    logger.info("\n%s\nwrote %s", results.table, out)
