"""Choose the rollout engine of a run with sample.engine="auto"."""

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from flow_grpo.data.questions import Question
from flow_grpo.errors import UserError, first_line
from flow_grpo.vlm.config_checks import check_vllm_settings
from flow_grpo.vlm.fields import AUTO, TRANSFORMERS, VLLM, VlmConfig
from flow_grpo.vlm.vllm_engine import check_vllm_platform, check_vllm_support, reject_videos

logger = logging.getLogger("flow_grpo")


def choose_engine(
    config: VlmConfig,
    questions: Sequence[Question],
    accelerator: Accelerator,
    *,
    temperature: float | None = None,
) -> VlmConfig:
    """Return the config with the chosen engine in place of "auto", and log the reason.

    Call it on all processes: vLLM is chosen if all of them can use it.

    Args:
        config: Checked settings.
        questions: Training and test questions.
        accelerator: Provides the device.
        temperature: Sampling temperature; by default that of the config.
    """
    if config.sample.engine != AUTO:
        return config
    temperature = config.sample.temperature if temperature is None else temperature
    own = find_vllm_obstacle(config, questions, accelerator.device, temperature)
    obstacles = gather_object([own])
    obstacle = next(filter(None, obstacles), "")
    engine = TRANSFORMERS if obstacle else VLLM
    reason = obstacle or "it is installed and supports the model, the data and the settings"
    logger.info("%-21s %s, because %s", "rollout engine", engine, reason)
    return replace(config, sample=replace(config.sample, engine=engine))


def find_vllm_obstacle(
    config: VlmConfig, questions: Sequence[Question], device: torch.device, temperature: float
) -> str:
    """Return why this process cannot sample with vLLM, or ""."""
    sample, model = config.sample, config.pretrained
    try:
        check_vllm_settings(temperature)
        reject_videos(questions)
        check_vllm_platform(device)
        check_vllm_support(model.model, model.revision, sample.vllm_tensor_parallel)
    except UserError as error:
        return str(error).removesuffix(f"; {error.hint}")
    except Exception as error:  # its import runs code of many packages
        return f"vLLM cannot be used: {first_line(error)}"
    return ""
