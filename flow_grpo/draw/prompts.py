"""The prompts of a run, from its config; what a user may not expect is told in a line."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from flow_grpo.data.images import contents
from flow_grpo.data.mixing import (
    PromptSource,
    check_groups,
    in_turn,
    parse_sources,
    share_out,
    split_off,
    warn_of_repeats,
)
from flow_grpo.data.prompts import find_prompts, load_prompts
from flow_grpo.data.rows import Prompt
from flow_grpo.draw.fields import DrawFields
from flow_grpo.draw.plan import BatchPlan

logger = logging.getLogger("flow_grpo")


@dataclass(frozen=True)
class PromptSets:
    train: list[Prompt]  # of all sets, one after the other
    test: list[Prompt]
    sets: list[tuple[int, int]]  # rows of `train` and groups of an epoch, of each set


def build_prompts(config: DrawFields, plan: BatchPlan) -> PromptSets:
    sources = parse_sources(config.dataset)
    pairs = [_train_and_test(config, source) for source in sources]
    counts = share_out(plan.groups, [source.share for source in sources])
    if len(sources) == 1:
        plan.check_prompts(len(pairs[0][0]), config.dataset)
    else:
        for source, (train, _), groups in zip(sources, pairs, counts, strict=True):
            check_groups(source, len(train), groups, of=plan.groups)
            logger.info("%-21s %d of %d groups", source.name, groups, plan.groups)
    train = [prompt for own, _ in pairs for prompt in own]
    sizes = [len(own) for own, _ in pairs]
    _tell_ignored_negatives(train, config.sample.guidance_scale)
    test = in_turn([own for _, own in pairs])[: config.eval_prompts or None]
    return PromptSets(train, test, list(zip(sizes, counts, strict=True)))


def build_test_prompts(config: DrawFields) -> list[Prompt]:
    """Where a set has test prompts of its own, those for training are not read."""
    tests = [_test(config, source) for source in parse_sources(config.dataset)]
    test = in_turn(tests)[: config.eval_prompts or None]
    _tell_ignored_negatives(test, config.sample.guidance_scale)
    return test


def _train_and_test(config: DrawFields, source: PromptSource) -> tuple[list[Prompt], list[Prompt]]:
    train, test = _load(config, source, "train", load_prompts), _own_test(config, source)
    if test is None:
        train, test = _split_off(config, source, train)
    warn_of_repeats(train, test, source.path, key=_contents)
    return train, test


def _test(config: DrawFields, source: PromptSource) -> list[Prompt]:
    test = _own_test(config, source)
    if test is None:
        train = _load(config, source, "train", load_prompts)
        test = _split_off(config, source, train)[1]
    return test


def _own_test(config: DrawFields, source: PromptSource) -> list[Prompt] | None:
    return _load(config, source, "test", find_prompts)


def _load(
    config: DrawFields, source: PromptSource, split: str, load: Callable
) -> list[Prompt] | None:
    columns = config.dataset_column, config.image_column, config.metadata_columns
    prompts = load(source.path, split, config.prompt_fn, *columns)
    if source.path == config.dataset.strip() or prompts is None:
        return prompts
    return [replace(p, metadata={**p.metadata, "dataset": source.name}) for p in prompts]


def _split_off(
    config: DrawFields, source: PromptSource, prompts: list[Prompt]
) -> tuple[list[Prompt], list[Prompt]]:
    return split_off(prompts, config.seed, source.path, key=_contents)


def _contents(prompt: Prompt) -> tuple[str, ...]:
    return contents(prompt.prompt, prompt.images)


def _tell_ignored_negatives(prompts: list[Prompt], guidance_scale: float) -> None:
    count = sum(bool(p.negative_prompt) for p in prompts)
    if count and guidance_scale <= 1:
        logger.info(
            "not used: negative_prompt of %d out of %d prompts; it takes guidance, and "
            "sample.guidance_scale=%s is none (above 1 is)",
            *(count, len(prompts), guidance_scale),
        )
