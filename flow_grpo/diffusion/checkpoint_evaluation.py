"""Score a model and its checkpoints, all on the same prompts and noise."""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from accelerate import Accelerator

from flow_grpo.config.trainer_spec import UncheckedConfig
from flow_grpo.data.prompts import Prompt
from flow_grpo.diffusion import results
from flow_grpo.diffusion.builders import (
    get_eval_guidance_scale,
    image_size,
    resolve_model_family,
    with_eval_size,
)
from flow_grpo.diffusion.candidates import CandidateModels, config_for, parse_diffusion_candidates
from flow_grpo.diffusion.config_checks import check_config, reject_groupwise_eval_rewards
from flow_grpo.diffusion.evaluation import evaluate
from flow_grpo.diffusion.fields import DiffusionConfig
from flow_grpo.diffusion.prompts import build_test_prompts
from flow_grpo.diffusion.results import CandidateScores
from flow_grpo.diffusion.session import check_audio_rewards, check_reward
from flow_grpo.diffusion.source_images import check_source_images
from flow_grpo.errors import RewardOutage, UserError
from flow_grpo.rewards import WeightedReward, close_scorers
from flow_grpo.training.builder import build_accelerator, build_rewards, eval_reward_weights
from flow_grpo.training.candidates import BASE, Candidate
from flow_grpo.training.distributed import raise_on_all_ranks
from flow_grpo.training.session import find_outage

logger = logging.getLogger("flow_grpo")


def evaluate_checkpoints(
    config: UncheckedConfig,
    checkpoints: list[str],
    out: Path,
    *,
    num_images: int | None = None,
    prompts: list[Prompt] | None = None,
    write: Callable = results.write_results,
    lora_override: str = "",
) -> list[CandidateScores]:
    """Score checkpoints and write the results to a new folder.

    Args:
        config: Config of the model and of the evaluation.
        checkpoints: "base" for the model without training, or paths and hub ids of checkpoints,
            LoRAs and models, see `locate_weights`.
        out: Folder to create.
        num_images: Number of prompts whose images are saved per checkpoint. None saves all images;
            of videos, which are large, those shown in the grid.
        prompts: Replacement for the test prompts of the config.
        write: Replacement for `results.write_results`.
        lora_override: `train.lora_path` if the caller set it for this evaluation, as opposed to one
            in the config of a run: it is rejected if no candidate uses it.
    """
    config = with_eval_size(check_config(config))
    if out.exists():
        raise UserError("already exists", field=out, hint="choose another --out or remove it")
    candidates = parse_diffusion_candidates(checkpoints, config.train.lora_path)
    if lora_override and all(candidate.name != BASE for candidate in candidates):
        raise UserError(
            "has no effect: only 'base' is evaluated with it, and "
            f"{', '.join(checkpoints)} already contain their LoRA",
            field="train.lora_path",
            value=lora_override,
            hint="add 'base' to --checkpoint",
        )
    config = config_for(config, candidates)
    accelerator = build_accelerator(config)
    prompts = prompts or build_test_prompts(config)
    model, family = config.pretrained.model, resolve_model_family(config.pretrained)
    check_source_images(prompts, model, family, image_size(config), accelerator)
    if num_images is None:
        num_images = config.log_images if config.frames > 1 else len(prompts)
    scored, outage = [], None
    [reward] = build_rewards(config, accelerator, eval_reward_weights(config))
    try:
        reject_groupwise_eval_rewards(reward.pairwise_rewards)
        check_audio_rewards(reward.audio_rewards, model, family, image_size(config))
        check_reward(reward, prompts, image_size(config))
        for each in evaluate_each(
            config, accelerator, candidates, reward, prompts, out, num_images
        ):
            shown = each.result.with_max_images(config.log_images)
            scored.append(CandidateScores(each.candidate, shown))
            limit = config.max_failed_fraction
            outage = find_outage(accelerator, reward, each.result.scores, limit)
            if outage:
                break  # the other candidates would fail as well
    finally:
        close_scorers(reward)
    if accelerator.is_main_process:
        write(out, evaluation_metadata(config, prompts), scored, prompts)
        logger.info("%s\nwrote %s", results.console_summary(scored, len(prompts)), out)
    if outage:
        raise RewardOutage(f"{outage}; wrote {out}")
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return scored


def evaluate_each(
    config: DiffusionConfig,
    accelerator: Accelerator,
    candidates: list[Candidate],
    reward: WeightedReward,
    prompts: list[Prompt],
    out: Path,
    num_images: int,
) -> Iterator[CandidateScores]:
    """Score the candidates one after another; save images as they come."""
    models = CandidateModels(config, accelerator, candidates)
    main = accelerator.is_main_process
    for number, candidate in enumerate(candidates, 1):
        if len(candidates) > 1:
            logger.info("%d/%d  %s", number, len(candidates), candidate.name)
        with models.denoiser(candidate) as denoiser:
            if number == 1:  # all checks have passed
                raise_on_all_ranks(accelerator, lambda: main and create_output_dir(out))
            result = evaluate(
                denoiser,
                reward,
                prompts,
                accelerator=accelerator,
                size=image_size(config),
                batch_size=config.sample.test_batch_size,
                seed=config.seed,
                keep_images=max(num_images, config.log_images),
            )
        scored = CandidateScores(candidate, result)
        save = partial(results.save_images, out, scored, prompts, num_images if main else 0)
        raise_on_all_ranks(accelerator, save)
        yield scored


def create_output_dir(path: Path) -> None:
    """Create a new directory; raise a UserError if it exists or cannot be created."""
    try:
        path.mkdir(parents=True)
    except OSError as error:
        raise UserError(
            f"cannot be created: {error.strerror}", field="--out", value=str(path)
        ) from error


def evaluation_metadata(config: DiffusionConfig, prompts: list[Prompt]) -> dict[str, str | float]:
    """Return the settings that all candidates share."""
    return {
        "model": config.pretrained.model,
        "dataset": config.eval_dataset or config.dataset,
        "prompts": len(prompts),
        "steps": config.sample.eval_num_steps,
        "guidance_scale": get_eval_guidance_scale(config.sample),
        "seed": config.seed,
    }
