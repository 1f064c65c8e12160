"""Run a benchmark of images: sample every prompt with each candidate, and score the images.

A batch has the same samples on any number of processes and after any interruption. Its images and
scores are written as soon as it is scored.
"""

import logging
import math
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from flow_grpo.benchmarks.protocol import ImageSampling, Protocol, Settings
from flow_grpo.benchmarks.results import BenchmarkResults
from flow_grpo.benchmarks.session import (
    BenchmarkSession,
    Overrides,
    log_protocol,
    resolve_settings,
)
from flow_grpo.benchmarks.sources import find_files, read_prompts
from flow_grpo.benchmarks.store import (
    BatchRecord,
    explain_write_errors,
    subset,
    weights_checksum,
    write_geneval_layout,
)
from flow_grpo.config.paths import relative_name
from flow_grpo.config.trainer_spec import UncheckedConfig
from flow_grpo.data.prompts import Prompt
from flow_grpo.diffusion.builders import image_size, resolve_model_family, with_eval_size
from flow_grpo.diffusion.candidates import CandidateModels, parse_diffusion_candidates
from flow_grpo.diffusion.config_checks import check_config, reject_groupwise_eval_rewards
from flow_grpo.diffusion.fields import DiffusionConfig
from flow_grpo.diffusion.rollout import Denoiser, eval_generators, initial_noise
from flow_grpo.diffusion.session import check_reward
from flow_grpo.diffusion.source_images import check_source_images, reward_metadata
from flow_grpo.errors import RewardOutage, UserError
from flow_grpo.report.console import progress_bar
from flow_grpo.rewards import TOTAL, WeightedReward, close_scorers
from flow_grpo.rewards.frames import to_uint8, uint8_to_pil
from flow_grpo.rewards.registry import IMAGE_REWARDS
from flow_grpo.rewards.weighted_reward import PendingScores
from flow_grpo.training.builder import (
    available_scorers,
    build_accelerator,
    build_rewards,
    eval_reward_weights,
)
from flow_grpo.training.candidates import Candidate
from flow_grpo.training.distributed import call_on_main, is_sharded, raise_on_all_ranks
from flow_grpo.training.lock import lock_output

logger = logging.getLogger("flow_grpo")
# Distance of the seeds of two images of a prompt: the first image is that of an evaluation.
NUMBER_STRIDE = 1_000_000


def run_benchmark(
    config: UncheckedConfig | DiffusionConfig,
    protocol: Protocol,
    checkpoints: Sequence[str],
    out: Path,
    overrides: Overrides | None = None,
) -> BenchmarkResults:
    """Score candidates on a benchmark, and write the results.

    An output directory of the same benchmark and settings is continued: what is scored is kept, and
    further candidates are added.

    Args:
        config: Config of the base model; what the protocol pins is replaced.
        protocol: The benchmark.
        checkpoints: Candidates, as in `flow-grpo evaluate`.
        out: Output directory.
        overrides: Deviations from the protocol.

    Raises:
        RewardOutage: If a scorer fails on a whole batch; everything else is kept.
    """
    overrides, checked = overrides or Overrides(), with_eval_size(check_config(config))
    family = resolve_model_family(checked.pretrained)
    family_name = family.__module__.rpartition(".")[2] if family else ""
    files = find_files(protocol.prompts, overrides.prompts)
    prompts, tags = read_prompts(files, protocol.prompts)
    rows = subset(len(prompts), overrides.num_prompts)
    settings, deviations = resolve_settings(
        protocol,
        overrides,
        family=family_name,
        available=available_scorers(checked, IMAGE_REWARDS),
        num_prompts=len(rows),
        prompts_sha256=files.sha256,
    )
    checked = check_config(apply_settings(checked, settings))
    if checked.frames > 1:
        raise UserError("must be 1 for a benchmark of images", field="frames", value=checked.frames)
    candidates = parse_diffusion_candidates(list(checkpoints), checked.train.lora_path)
    accelerator = build_accelerator(checked)
    prompts = [prompts[row] for row in rows]
    model = relative_name(checked.pretrained.model)
    check_source_images(prompts, checked.pretrained.model, family, image_size(checked), accelerator)
    session = BenchmarkSession(
        protocol=protocol,
        settings=settings,
        deviations=deviations,
        prompts=[prompt.prompt for prompt in prompts],
        tags=[tags[row] for row in rows],
        model=model,
        out=out,
        batch_size=checked.sample.test_batch_size,
        model_settings=model_settings(checked),
    )
    log_protocol(protocol, settings, deviations, model)
    [reward] = build_rewards(checked, accelerator, eval_reward_weights(checked))
    with ExitStack() as cleanup:
        cleanup.callback(close_scorers, reward)
        reject_groupwise_eval_rewards(reward.pairwise_rewards)
        check_reward(reward, prompts, image_size(checked))

        def lock() -> None:
            cleanup.callback(lock_output(out).release)

        main = accelerator.is_main_process
        raise_on_all_ranks(accelerator, lambda: main and lock())
        _Run(checked, accelerator, session, reward, prompts, rows).score(candidates)
        # a candidate that is added alone is compared with those that were scored before
        reference = candidates[0].name if len(candidates) > 1 else ""
        results = call_on_main(accelerator, lambda: session.finish(reference))
        if protocol.layout and accelerator.is_main_process:
            for each in session.store.candidates():
                candidate = session.store.candidate(each)
                folder = candidate.folder / protocol.layout
                write_geneval_layout(
                    candidate, folder, [p.metadata for p in prompts], settings.samples
                )
    _report(results, [each.name for each in candidates], out, checked.max_failed_fraction)
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return results


def apply_settings(config: DiffusionConfig, settings: Settings) -> DiffusionConfig:
    """Return a config that samples and scores as a benchmark requires."""
    sampling = settings.sampling
    assert isinstance(sampling, ImageSampling)
    sample = replace(
        config.sample, eval_num_steps=sampling.steps, eval_guidance_scale=sampling.guidance
    )
    return replace(
        config,
        sample=sample,
        height=sampling.height,
        width=sampling.width,
        seed=settings.seed,
        eval_reward_fn=dict.fromkeys(settings.scorers, 1.0),
        reward_options={name: own for name, own in settings.scorers.items() if own},
    )


def model_settings(config: DiffusionConfig) -> dict[str, Any]:
    """Return the settings that change the samples, but belong to the model, not to a protocol."""
    pretrained, sample = config.pretrained, config.sample
    return {
        "precision": config.mixed_precision,
        "allow_tf32": config.allow_tf32,
        "revision": pretrained.revision,
        "base_precision": pretrained.base_precision,
        "encoder_precision": pretrained.encoder_precision,
        "eval_precision": sample.eval_precision,
        "guidance_scale_2": sample.guidance_scale_2,
        "max_sequence_length": config.max_sequence_length,
    }


@dataclass
class _Batch:
    """A sampled batch whose scores are being computed."""

    number: int
    pending: PendingScores


@dataclass
class _Run:
    """The sampling and scoring of all candidates."""

    config: DiffusionConfig
    accelerator: Accelerator
    session: BenchmarkSession
    reward: WeightedReward
    prompts: list[Prompt]
    rows: list[int]  # position of each prompt among all of the benchmark: the seed of its noise

    def score(self, candidates: list[Candidate]) -> None:
        """Score the batches of all candidates that are not done."""
        batches = self.session.batches
        is_open = call_on_main(self.accelerator, self.session.out.exists)
        if is_open:  # other settings are reported before a model is loaded
            self._open_store(candidates)
        models = CandidateModels(self.config, self.accelerator, candidates)
        for number, candidate in enumerate(candidates, 1):
            find_pending = partial(self.session.store.candidate(candidate.name).pending, batches)
            pending = call_on_main(self.accelerator, find_pending)
            done = len(batches) - len(pending)
            kept = f", {done} of {len(batches)} batches are done" if done else ""
            logger.info("%d/%d  %s%s", number, len(candidates), candidate.name, kept)
            if not pending:
                continue
            with models.denoiser(candidate) as denoiser:
                if not is_open:  # all checks have passed
                    self._open_store(candidates)
                    is_open = True
                self._score_batches(candidate.name, denoiser, pending)

    def _open_store(self, candidates: list[Candidate]) -> None:
        """Create the output directory, or check that it belongs to the same evaluation."""

        def open_store() -> None:
            self.session.open()
            for each in candidates:
                path = "" if each.weights is None else str(each.weights)
                self.session.store.add_candidate(each.name, path, weights_checksum(each.weights))

        main = self.accelerator.is_main_process
        raise_on_all_ranks(self.accelerator, lambda: main and open_store())

    def _score_batches(self, candidate: str, denoiser: Denoiser, pending: list[int]) -> None:
        """Sample and score batches, split over the processes."""
        accelerator = self.accelerator
        own = pending[accelerator.process_index :: accelerator.num_processes]
        rounds = math.ceil(len(pending) / accelerator.num_processes)
        batches = self.session.batches
        indices = dict.fromkeys(prompt for number in own for prompt, _ in batches[number])
        denoiser.precompute_embeddings([self.prompts[i] for i in indices])
        running: _Batch | None = None
        name = f"{self.session.protocol.name} {candidate}"
        for turn in progress_bar(range(rounds), name, shown=accelerator.is_main_process):
            # sharded weights need all ranks in every forward pass
            number = own[turn] if turn < len(own) else pending[0]
            has_batch = turn < len(own)
            sampled = None
            if has_batch or is_sharded(accelerator):
                sampled = self._sample(candidate, denoiser, number, keep=has_batch)
            self._finish(candidate, running)
            running = sampled
        self._finish(candidate, running)

    @torch.no_grad()
    def _sample(
        self, candidate: str, denoiser: Denoiser, number: int, *, keep: bool
    ) -> _Batch | None:
        """Sample a batch, save its images and start scoring them."""
        samples = self.session.batches[number]
        prompts = [self.prompts[prompt] for prompt, _ in samples]
        seeds = [self.rows[prompt] + NUMBER_STRIDE * image for prompt, image in samples]
        adapter = denoiser.adapter
        shape = adapter.latent_shape(*image_size(self.config))
        generators = eval_generators(self.config.seed, seeds)
        noise = initial_noise(generators, shape, self.accelerator.device)
        images = adapter.decode(denoiser.sample(noise, denoiser.encode(prompts)).final)
        if not keep:
            return None
        saved = self.session.store.candidate(candidate)
        finite = images.isfinite().flatten(1).all(dim=1).tolist()
        pictures = uint8_to_pil(to_uint8(images))
        with explain_write_errors(self.session.out):
            for (prompt, image), picture, usable in zip(samples, pictures, finite, strict=True):
                if usable:
                    picture.save(saved.image_path(prompt, image))
        metadata = reward_metadata(prompts, adapter)
        pending = self.reward.submit(images, [p.prompt for p in prompts], metadata)
        return _Batch(number, pending)

    def _finish(self, candidate: str, batch: _Batch | None) -> None:
        """Wait for the scores of a batch and write them; raise if a scorer failed on all of it.

        It does not raise for a batch that already failed when the command was run before: the
        batch may never get a score.
        """
        outage = ""
        if batch is not None:
            scores = batch.pending.result()
            store = self.session.store.candidate(candidate)
            size = len(self.session.batches[batch.number])
            is_new = store.read(batch.number, size) is None
            record = BatchRecord(
                {name: list(map(float, v)) for name, v in scores.items() if name != TOTAL},
                dict(self.reward.last_errors),
            )
            with explain_write_errors(self.session.out):
                store.write(batch.number, record)
            outage = self.session.describe_outage(candidate, record) if is_new else ""

        def raise_outage() -> None:
            if outage:
                raise RewardOutage(outage)

        raise_on_all_ranks(self.accelerator, raise_outage)


def _report(
    results: BenchmarkResults, named: Collection[str], out: Path, max_failed_fraction: float
) -> None:
    """Log the table; raise `RewardOutage` if the named candidates lack too many scores."""
    logger.info("\n%s\nwrote %s", results.table, out)
    for each in results.candidates:
        failed = sum(None in sample.values() for sample in each.samples)
        if not failed:
            continue
        what = f"{failed} of {len(each.samples)} images of {each.name!r} have no score"
        if each.name not in named:  # of an earlier command
            logger.warning("%s; name it with --checkpoint to score them again", what)
            continue
        if failed > max_failed_fraction * len(each.samples):
            raise RewardOutage(f"{what}; the same command scores them again")
        logger.warning("%s; the same command scores them again", what)
