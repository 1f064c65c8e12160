"""Checks of the candidates of an evaluation before weights are loaded, and their settings."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError

from flow_grpo.errors import UserError, first_line
from flow_grpo.hub_access import DEFAULT_REVISION
from flow_grpo.training.candidates import Candidate
from flow_grpo.vlm.builders import build_encoder, load_checked_processors, max_prompt_tokens
from flow_grpo.vlm.evaluation_questions import EvaluationSet
from flow_grpo.vlm.fields import VlmConfig
from flow_grpo.vlm.lora import attach_lora, check_lora_is_used
from flow_grpo.vlm.models import build_meta_model, get_family
from flow_grpo.vlm.prompts import PromptEncoder
from flow_grpo.vlm.response_generation import Sampling
from flow_grpo.weight_checks import check_stored_weights

logger = logging.getLogger("flow_grpo")


def settings_of(config: VlmConfig, candidate: Candidate, sampling: Sampling) -> VlmConfig:
    """Return the settings with which a candidate is loaded, as in the run that trained it.

    The reference policy, the value head and what only training needs are left out.
    """
    temperature = config.sample.temperature if sampling.is_greedy else sampling.temperature
    train = replace(config.train, beta=0.0, advantage="grpo", gradient_checkpointing=False)
    config = replace(
        config,
        flex_attention=False,
        sample=replace(config.sample, temperature=temperature),
        train=train,
    )
    if candidate.kind == "lora":
        train = replace(train, lora_path=str(candidate.weights))
        return replace(config, use_lora=True, train=train)
    if candidate.kind == "model":
        pretrained = replace(
            config.pretrained, model=str(candidate.weights), revision=DEFAULT_REVISION
        )
        return replace(config, pretrained=pretrained, train=replace(train, lora_path=""))
    return config


def check_candidates(
    config: VlmConfig, candidates: Sequence[Candidate], sets: Sequence[EvaluationSet]
) -> list[EvaluationSet]:
    """Check all candidates and prompts without reading the weights of a model.

    Returns:
        The datasets without the questions that `filter_overlong_prompts` drops for a candidate.

    Raises:
        UserError: If a candidate is damaged, or is not a model or LoRA that fits the config.
    """
    for candidate in candidates:
        if candidate.kind == "pipeline":
            raise UserError(
                "is a diffusers pipeline, but the config is that of a VLM or language model",
                field="--checkpoint",
                value=str(candidate.weights),
                hint="pass the --config of a diffusion model",
            )
    questions = [question for each in sets for question in each.questions]
    for candidate in candidates:
        own = settings_of(config, candidate, Sampling())
        with _name_checkpoint(candidate):
            processors = load_checked_processors(own, questions)
            model = build_meta_model(own.pretrained.model, own.pretrained.revision)
            if candidate.kind == "model":
                _check_files(candidate.weights)
            if lora := own.train.lora_path:
                field = "--checkpoint" if candidate.kind == "lora" else "train.lora_path"
                attach_lora(model, lora, field)
                check_lora_is_used(get_family(model), lora, field)
        limit = max_prompt_tokens(own, model)
        sets = _check_prompts(
            build_encoder(own, processors, model), sets, limit, drop=own.filter_overlong_prompts
        )
    return list(sets)


def _check_prompts(
    encoder: PromptEncoder, sets: Sequence[EvaluationSet], limit: int, *, drop: bool
) -> list[EvaluationSet]:
    """Reject prompts of more than `limit` tokens, or drop their questions."""
    if not drop:
        for each in sets:
            encoder.check_prompt_lengths(each.questions, limit)
        return list(sets)
    kept = []
    for each in sets:
        fitting = [q for q in each.questions if encoder.prompt_length(q) <= limit]
        if dropped := len(each.questions) - len(fitting):
            logger.info(
                "%s: dropped %d of %d questions with prompts of more than %d tokens "
                "(max_prompt_length)",
                each.name,
                dropped,
                len(each.questions),
                limit,
            )
        if not fitting:
            raise UserError(
                f"is exceeded by the prompts of all {len(each.questions)} questions of {each.name}",
                field="max_prompt_length",
                value=limit,
                hint="raise --config.max_prompt_length",
            )
        kept.append(replace(each, questions=fitting))
    return kept


def _check_files(folder: Path) -> None:
    """Open all weight files of a model, which fails for damaged ones."""
    try:
        check_stored_weights(folder, "model*.safetensors")
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot be read: {first_line(error)}", field=folder) from error


@contextmanager
def _name_checkpoint(candidate: Candidate) -> Iterator[None]:
    """Make errors about the model that a candidate replaces name --checkpoint."""
    try:
        yield
    except UserError as error:
        if candidate.kind != "model" or error.field != "pretrained.model":
            raise
        raise UserError(
            error.rule, field="--checkpoint", value=error.value, hint=error.hint
        ) from error
