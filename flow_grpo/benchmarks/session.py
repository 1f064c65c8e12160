"""What the benchmarks of both trainers share: settings, the output directory, and the results."""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from flow_grpo.benchmarks.protocol import (
    Deviation,
    Protocol,
    Settings,
    find_deviations,
)
from flow_grpo.benchmarks.results import (
    BenchmarkResults,
    RawScores,
    collect_results,
    write_results,
)
from flow_grpo.benchmarks.store import (
    Batches,
    BatchRecord,
    BenchmarkStore,
    explain_write_errors,
)
from flow_grpo.errors import UserError, did_you_mean

logger = logging.getLogger("flow_grpo")


@dataclass(frozen=True)
class Overrides:
    """Settings that replace those of a protocol; unset ones keep the protocol's value.

    Attributes:
        sampling: Fields of `ImageSampling` or `ResponseSampling`.
        samples: Images or responses per prompt.
        seed: Seed of the noise.
        num_prompts: Size of a subset, spread evenly over the prompts.
        prompts: File or directory with the prompts.
        scorers: Scorers to use.
        scorer_options: Further options by scorer, such as the path of a model.
    """

    sampling: Mapping[str, Any] = field(default_factory=dict)
    samples: int | None = None
    seed: int | None = None
    num_prompts: int | None = None
    prompts: Path | None = None
    scorers: Sequence[str] = ()
    scorer_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class BenchmarkSession:
    """One benchmark of one base model, with its output directory."""

    protocol: Protocol
    settings: Settings
    deviations: list[Deviation]
    prompts: list[str]
    tags: list[str]
    model: str
    out: Path
    batch_size: int
    model_settings: dict[str, Any]  # further settings that change the samples

    @property
    def store(self) -> BenchmarkStore:
        return BenchmarkStore(self.out)

    @property
    def batches(self) -> Batches:
        return Batches(len(self.prompts), self.settings.samples, self.batch_size)

    @property
    def used_settings(self) -> dict[str, Any]:
        """All settings that the scores depend on, as stored in the results."""
        return {**self.settings.to_json(), **self.model_settings}

    def open(self) -> None:
        """Create the output directory, or continue the one of the same settings."""
        settings = {"benchmark": self.protocol.name, "model": self.model}
        settings |= {**self.used_settings, "batch_size": self.batch_size}
        if self.store.open(settings):
            logger.info("continuing %s", self.out)

    def finish(self, reference: str = "") -> BenchmarkResults:
        """Write and return the results of all candidates whose batches were all scored.

        Args:
            reference: Candidate that the others are compared with; by default the one that was
                scored first.
        """
        raw = []
        for name in sorted(self.store.candidates(), key=lambda name: name != reference):
            candidate = self.store.candidate(name)
            if candidate.is_complete(self.batches):
                scores = candidate.scores(self.batches)
                raw.append(RawScores(name, *candidate.identity(), scores))
            else:  # an earlier command was stopped
                logger.warning("%s is left out: not all of its batches were scored", name)
        results = collect_results(
            self.protocol,
            model=self.model,
            settings=self.used_settings,
            deviations=self.deviations,
            prompts=self.prompts,
            tags=self.tags,
            candidates=raw,
        )
        with explain_write_errors(self.out):
            write_results(self.out, results)
        return results

    def describe_outage(self, candidate: str, record: BatchRecord) -> str:
        """Return which scorer failed on a whole batch, why, and what is kept; "" if none did."""
        if not (failed := record.failed()):
            return ""
        left = len(self.store.candidate(candidate).pending(self.batches))
        return (
            f"scorer {failed[0]!r} failed on a whole batch ({record.errors.get(failed[0], '')}); "
            f"{len(self.batches) - left} of {len(self.batches)} batches of {candidate!r} are kept "
            f"in {self.out}; repeat the command to resume"
        )


def log_protocol(
    protocol: Protocol, settings: Settings, deviations: Sequence[Deviation], model: str
) -> None:
    """Log the benchmark, its size and every deviation from its protocol."""
    logger.info("%s: %s", protocol.name, protocol.title)
    logger.info("%d prompts x %d, model %s", settings.prompts, settings.samples, model)
    for each in deviations:
        logger.warning("deviation from the protocol: %s", each)


def resolve_settings(
    protocol: Protocol,
    overrides: Overrides,
    *,
    family: str,
    available: Mapping[str, str],
    num_prompts: int,
    prompts_sha256: str,
) -> tuple[Settings, list[Deviation]]:
    """Return the settings of an evaluation, and how they deviate from the protocol.

    Args:
        protocol: The benchmark.
        overrides: Settings that the user changed.
        family: Family of the model.
        available: Built-in rewards and those that the user passes, with the origin of the latter.
        num_prompts: Prompts that are used.
        prompts_sha256: Checksum of their files.
    """
    known = {each.name for each in fields(protocol.sampling_of(family))}
    for name, value in overrides.sampling.items():
        if name not in known:
            raise UserError(
                f"does not apply to a benchmark for {protocol.trainer} models",
                field=f"--{name}",
                value=value,
            )
    scorers = select_scorers(protocol, overrides, available)
    settings = Settings(
        prompts=num_prompts,
        samples=overrides.samples or protocol.samples,
        seed=protocol.seed if overrides.seed is None else overrides.seed,
        sampling=replace(protocol.sampling_of(family), **overrides.sampling),
        scorers=scorers,
        prompts_sha256=prompts_sha256,
        scorer_origins={name: available[name] for name in scorers if available[name]},
    )
    return settings, find_deviations(protocol, settings, family)


def select_scorers(
    protocol: Protocol, overrides: Overrides, available: Collection[str]
) -> dict[str, dict[str, Any]]:
    """Return the options of the scorers to use; those that are not available are left out.

    Raises:
        UserError: If none is available, or one that the user names is not.
    """
    missing = protocol.missing_scorers()
    chosen, left_out = {}, []
    for name in overrides.scorers or protocol.scorers:
        if name not in protocol.scorers:
            raise UserError(
                f"is not a scorer of {protocol.name}, which has {', '.join(protocol.scorers)}",
                field="--scorers",
                value=name,
                hint=did_you_mean(name, protocol.scorers),
            )
        if name in available:
            options = {**protocol.scorers[name], **overrides.scorer_options.get(name, {})}
            chosen[name] = options
        elif name in overrides.scorers:
            raise _unavailable(protocol, name, missing.get(name, ""))
        else:
            left_out.append(name)
    if not chosen:
        name = next(iter(protocol.scorers))
        raise _unavailable(protocol, name, missing.get(name, ""))
    for name in left_out:
        logger.warning("scorer %r is not available: %s", name, missing.get(name, ""))
    if unused := [name for name in overrides.scorer_options if name not in chosen]:
        raise UserError(
            f"has options for {unused[0]!r}, which is not used",
            field="reward_options",
            hint=f"the scorers are {', '.join(chosen)}",
        )
    return chosen


def _unavailable(protocol: Protocol, name: str, reason: str) -> UserError:
    """Return the UserError for a scorer of the protocol that cannot be built."""
    example = f"\"{{'{name}': 'my_judges.py:Judge'}}\""
    return UserError(
        f"is required by {protocol.name} but not available: {reason}",
        field="scorer",
        value=name,
        hint=f"pass one as a custom reward, --config.custom_rewards={example}, or as a reward "
        "server of this name",
    )
