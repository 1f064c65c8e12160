"""Exchange samples within a group of processes that train on them together."""

from collections.abc import Sequence
from dataclasses import replace

from flow_grpo.data.questions import Question
from flow_grpo.training.distributed import Ranks
from flow_grpo.vlm.rollout import Rollout, RolloutEngine, Sample


def share_rollout(
    ranks: Ranks, rollout: Rollout, engine: RolloutEngine, questions: Sequence[Question]
) -> None:
    """Give each process all samples of its group, on which it trains; collective.

    Args:
        ranks: Rank of this process.
        rollout: The samples of this process; those of its group are added.
        engine: Engine that encodes their prompts.
        questions: Training questions.
    """
    if ranks.mesh is None:
        return
    parts = enumerate(ranks.gather_objects(rollout.samples))
    shared = {i: _from_rank(sample, rank) for rank, own in parts for i, sample in own.items()}
    rollout.samples = dict(sorted(shared.items()))  # in the same order on all processes
    rows = {sample.row for sample in rollout.samples.values()}
    rollout.prompts |= engine.encode(questions, sorted(rows - rollout.prompts.keys()))


def _from_rank(sample: Sample, rank: int) -> Sample:
    """Return a sample of another process; image names are unique only within a process."""
    if sample.conversation is None:
        return sample
    sources = tuple((rank, source) for source in sample.conversation.sources)
    return replace(sample, conversation=replace(sample.conversation, sources=sources))
