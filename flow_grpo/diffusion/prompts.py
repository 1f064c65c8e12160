"""Load the prompts of a run from its config."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from flow_grpo.data.columns import parse_column_names
from flow_grpo.data.eval_dataset import load_eval_dataset
from flow_grpo.data.mixing import (
    PromptSource,
    allocate_groups,
    check_groups,
    interleave,
    parse_sources,
    split_held_out,
    tag_rows,
    warn_duplicates,
)
from flow_grpo.data.prompts import Prompt, PromptLayout, find_prompts, load_prompts
from flow_grpo.diffusion.fields import DiffusionConfig
from flow_grpo.diffusion.plan import BatchPlan

logger = logging.getLogger("flow_grpo")


@dataclass(frozen=True)
class PromptSets:
    """The training and test prompts of a run."""

    train: list[Prompt]  # of all sets, concatenated
    test: list[Prompt]
    sets: list[tuple[int, int]]  # for each set: rows in `train`, groups per epoch


def row_layout(config: DiffusionConfig) -> PromptLayout:
    """Return the layout of prompt files with the columns that a config names."""
    metadata = parse_column_names(config.metadata_columns)
    return PromptLayout(config.dataset_column, config.image_column, metadata)


def eval_row_layout(config: DiffusionConfig) -> PromptLayout:
    """Return the layout of the files of `eval_dataset`, by default that of the training prompts."""
    own = {"text": config.eval_dataset_column, "image": config.eval_image_column}
    return replace(row_layout(config), **{k: v for k, v in own.items() if v is not None})


def build_prompts(config: DiffusionConfig, plan: BatchPlan) -> PromptSets:
    """Load all prompt sets and check that they suffice for an epoch."""
    sources = parse_sources(config.dataset)
    pairs = [_load_train_and_test(config, source) for source in sources]
    counts = allocate_groups(plan.groups, [source.share for source in sources])
    if len(sources) == 1:
        plan.check_prompt_count(len(pairs[0][0]), config.dataset)
    else:
        for source, (train, _), groups in zip(sources, pairs, counts, strict=True):
            check_groups(source, len(train), groups, of=plan.groups)
            logger.info("%-21s %d of %d groups", source.name, groups, plan.groups)
    train = [prompt for prompts, _ in pairs for prompt in prompts]
    sizes = [len(prompts) for prompts, _ in pairs]
    _log_ignored_negative_prompts(train, config.sample.guidance_scale)
    if config.eval_dataset:
        test = _load_eval_dataset(config, train)
    else:
        test = interleave([prompts for _, prompts in pairs])
    test = test[: config.eval_prompts or None]
    return PromptSets(train, test, list(zip(sizes, counts, strict=True)))


def build_test_prompts(config: DiffusionConfig) -> list[Prompt]:
    """Load the test prompts; training prompts are read only to split off a held-out part."""
    if config.eval_dataset:
        test = _load_eval_dataset(config)
    else:
        test = interleave(_load_test(config, source) for source in parse_sources(config.dataset))
    test = test[: config.eval_prompts or None]
    _log_ignored_negative_prompts(test, config.sample.guidance_scale)
    return test


def _load_train_and_test(
    config: DiffusionConfig, source: PromptSource
) -> tuple[list[Prompt], list[Prompt]]:
    """Return the training and test prompts of a source; warn about duplicates.

    Without a test split, a part of the training prompts is held out, unless the evaluation has its
    own dataset.
    """
    train = _load_split(config, source, "train", load_prompts)
    if config.eval_dataset:
        warn_duplicates(train, [], source.path)
        return train, []
    test = _load_split(config, source, "test", find_prompts)
    if test is None:
        train, test = split_held_out(train, config.seed, source.path)
    warn_duplicates(train, test, source.path)
    return train, test


def _load_test(config: DiffusionConfig, source: PromptSource) -> list[Prompt]:
    """Return the test prompts of a source, held out from training prompts if it has none."""
    test = _load_split(config, source, "test", find_prompts)
    if test is not None:
        return test
    train = _load_split(config, source, "train", load_prompts)
    return split_held_out(train, config.seed, source.path)[1]


def _load_eval_dataset(config: DiffusionConfig, train: Sequence[Prompt] = ()) -> list[Prompt]:
    """Return the prompts of `eval_dataset`; warn if some of them are training prompts."""
    options = {"layout": eval_row_layout(config), "prompt_fn": config.prompt_fn}
    find, load = partial(find_prompts, **options), partial(load_prompts, **options)
    return load_eval_dataset(config.eval_dataset, train, find, load)


def _load_split(
    config: DiffusionConfig, source: PromptSource, split: str, load: Callable
) -> list[Prompt] | None:
    """Return a split read by `load`, with each prompt tagged by its set if there are several."""
    prompts = load(source.path, split, row_layout(config), config.prompt_fn)
    if source.path == config.dataset.strip() or prompts is None:
        return prompts
    return tag_rows(prompts, source.name)


def _log_ignored_negative_prompts(prompts: list[Prompt], guidance_scale: float) -> None:
    """Log how many negative prompts have no effect because guidance is off."""
    count = sum(bool(p.negative_prompt) for p in prompts)
    if count and guidance_scale <= 1:
        logger.info(
            "ignoring negative_prompt of %d out of %d prompts: sample.guidance_scale=%s must be "
            "above 1 to use it",
            count,
            len(prompts),
            guidance_scale,
        )
