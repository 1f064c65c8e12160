"""Score a model and checkpoints of it, all on the same prompts and noise."""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from accelerate import Accelerator

from flow_grpo.config.trade import Unchecked
from flow_grpo.data.prompts import Prompt
from flow_grpo.draw import results
from flow_grpo.draw.check import check, check_eval_judges
from flow_grpo.draw.evaluation import (
    BASE,
    Candidate,
    Exchange,
    evaluate,
    find_candidates,
)
from flow_grpo.draw.fields import DrawFields
from flow_grpo.draw.models.experts import check_places, places_of_model
from flow_grpo.draw.prompts import build_test_prompts
from flow_grpo.draw.results import CandidateScores
from flow_grpo.draw.rollout import Denoiser
from flow_grpo.draw.session import (
    build_adapter,
    build_dynamics,
    check_reward,
    eval_guidance,
    image_size,
    model_and_family,
    model_at_revision,
)
from flow_grpo.draw.sources import check_sources
from flow_grpo.errors import RewardOutage, UserError
from flow_grpo.rewards import WeightedReward, close_scorers
from flow_grpo.run.building import build_accelerator, build_rewards, eval_weights
from flow_grpo.run.distributed import on_all_or_none
from flow_grpo.run.session import describe_outage

logger = logging.getLogger("flow_grpo")


def evaluate_all(
    config: Unchecked,
    checkpoints: list[str],
    out: Path,
    *,
    pictures: int | None = None,
    prompts: list[Prompt] | None = None,
    write: Callable = results.write,
    lora_given: str = "",
) -> list[CandidateScores]:
    """Score each of `checkpoints` ("base": the model as it is) and write the new folder `out`.

    `pictures` of each are saved, of the first prompts. None saves all; of clips, which are large,
    those that the grid shows. `prompts` stand in for the test prompts of the config, `write` for
    what is written beside the pictures. `lora_given` is the `train.lora_path` that the caller set
    for this evaluation, as opposed to one in the config of a run: it is rejected if no candidate
    uses it.
    """
    config = check(config)
    if out.exists():
        raise UserError(f"{out} already exists; choose another --out or remove it")
    candidates = find_candidates(checkpoints, config.train.lora_path)
    if lora_given and all(candidate.name != BASE for candidate in candidates):
        raise UserError(
            f"train.lora_path={lora_given!r} has no effect: only 'base' is evaluated with it, and "
            f"{', '.join(checkpoints)} already contain their LoRA; add 'base' to --checkpoint"
        )
    accelerator = build_accelerator(config)
    prompts = prompts or build_test_prompts(config)
    check_sources(prompts, *model_and_family(config), image_size(config), accelerator)
    if pictures is None:
        pictures = config.log_images if config.frames > 1 else len(prompts)
    scored, outage = [], None
    [reward] = build_rewards(config, accelerator, eval_weights(config))
    try:
        check_eval_judges(reward.judges)
        check_reward(reward, prompts, image_size(config))
        for each in score_each(config, accelerator, candidates, reward, prompts, out, pictures):
            scored.append(CandidateScores(each.candidate, each.result.shortened(config.log_images)))
            scores, limit = each.result.scores, config.max_failed_fraction
            outage = describe_outage(accelerator, reward, scores, limit)
            if outage:
                break  # it would fail for the others as well
    finally:
        close_scorers(reward)
    if accelerator.is_main_process:
        write(out, settings(config, prompts), scored, prompts)
        logger.info("%s\nwrote %s", results.console(scored, len(prompts)), out)
    if outage:
        raise RewardOutage(f"{outage}; wrote {out}")
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return scored


def score_each(
    config: DrawFields,
    accelerator: Accelerator,
    candidates: list[Candidate],
    reward: WeightedReward,
    prompts: list[Prompt],
    out: Path,
    pictures: int,
) -> Iterator[CandidateScores]:
    """One model, whose weights are exchanged; pictures are saved as they come."""
    places = places_of_model(model_at_revision(config))
    for weights in (each.weights for each in candidates if each.weights):
        check_places(weights, places)
    adapter = build_adapter(config, accelerator)
    exchange = Exchange(adapter, candidates)
    exchange.check(candidates)
    module = accelerator.prepare_model(adapter.transformer, evaluation_mode=True)
    dynamics = build_dynamics(config, adapter, config.sample.eval_num_steps)
    main = accelerator.is_main_process
    for number, candidate in enumerate(candidates, 1):
        if len(candidates) > 1:
            logger.info("%d/%d  %s", number, len(candidates), candidate.name)
        with exchange.applied(candidate) as loaded:
            if number == 1:  # all that can be wrong is known by now
                on_all_or_none(accelerator, lambda: main and make_folder(out))
            result = evaluate(
                Denoiser(loaded, module, dynamics),
                reward,
                prompts,
                accelerator=accelerator,
                size=image_size(config),
                batch_size=config.sample.test_batch_size,
                seed=config.seed,
                keep_images=max(pictures, config.log_images),
            )
        scored = CandidateScores(candidate, result)
        save = partial(results.save_pictures, out, scored, prompts, pictures if main else 0)
        on_all_or_none(accelerator, save)
        yield scored


def make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"--out={path} cannot be made: {error.strerror}") from error


def settings(config: DrawFields, prompts: list[Prompt]) -> dict[str, str | float]:
    """What all candidates share."""
    return {
        "model": config.pretrained.model,
        "dataset": config.dataset,
        "prompts": len(prompts),
        "steps": config.sample.eval_num_steps,
        "guidance_scale": eval_guidance(config),
        "seed": config.seed,
    }
