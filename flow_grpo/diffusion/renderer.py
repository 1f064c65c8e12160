"""Generate images with a frozen diffusion model for image rewards of text (rewards/drawn.py)."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from PIL import Image
from torch import nn

from flow_grpo.data.prompts import Prompt
from flow_grpo.diffusion.candidates import check_lora
from flow_grpo.diffusion.models import check_size, find_adapter, load_adapter
from flow_grpo.diffusion.models.inputs import Size
from flow_grpo.diffusion.rollout import Denoiser, Dynamics, initial_noise
from flow_grpo.errors import UserError
from flow_grpo.rewards.draw_settings import DrawSettings
from flow_grpo.rewards.frames import fetch_images
from flow_grpo.training.weight_sources import locate_weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class DiffusionRenderer:
    """Generate images from prompts with the sampler used in evaluations.

    Args:
        settings: Model, weights and sampling settings. The constructor loads the model.
        device: Device of the model.

    Raises:
        UserError: If the model is missing, damaged, or not a text-to-image model.
    """

    def __init__(self, settings: DrawSettings, device: str) -> None:
        self.settings, self.device = settings, _check_device(device)
        size = Size(settings.height, settings.width)
        with _errors_of_draw():
            _check_family(settings.model)
            check_size(settings.model, size)
            weights = _locate_lora(settings)
            self.adapter = load_adapter(
                settings.model,
                device=self.device,
                dtype=DTYPES[settings.dtype],
                max_sequence_length=settings.max_sequence_length,
            )
            if weights is not None:
                self.adapter.load_weights(weights)
        dynamics = Dynamics(
            self.adapter.schedule(settings.num_steps, *size),
            guidance_scale=settings.guidance_scale,
        )
        self.denoiser = Denoiser(self.adapter, self.adapter.transformer, dynamics)
        self._shape = self.adapter.latent_shape(*size)

    def draw(self, prompts: Sequence[str], keys: Sequence[bytes]) -> list[Image.Image | None]:
        """Generate one image per prompt from the noise its key selects; None for NaN pixels."""
        self._move(self.device)
        images: list[Image.Image | None] = []
        for start in range(0, len(prompts), self.settings.batch_size):
            part = slice(start, start + self.settings.batch_size)
            noise = initial_noise([_generator(key) for key in keys[part]], self._shape, self.device)
            with quiet_tokenizers():
                conditioning = self.denoiser.encode([Prompt(text) for text in prompts[part]])
            final = self.denoiser.sample(noise, conditioning).final
            decoded = self.adapter.decode(final)  # (B, 3, H, W), or one frame, (B, 1, 3, H, W)
            images += fetch_images(decoded if decoded.ndim == 4 else decoded[:, 0])()
        return images

    def release_memory(self) -> None:
        """Move the model to the CPU if `draw.offload` is set."""
        if self.settings.offload:
            self._move(torch.device("cpu"))

    def _move(self, device: torch.device) -> None:
        """Move all networks of the pipeline if `draw.offload` is set."""
        if not self.settings.offload:
            return
        for module in self.adapter.pipeline.components.values():
            if isinstance(module, nn.Module):
                nn.Module.to(module, device)


def _generator(key: bytes) -> torch.Generator:
    """Return a generator seeded by a key; it samples on the CPU, so devices agree."""
    return torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)


def _check_device(device: str) -> torch.device:
    """Return the device; reject an unknown one and a missing GPU."""
    try:
        found = torch.device(device)
    except RuntimeError as error:
        rule = "must be a device such as cpu, cuda or cuda:1"
        raise UserError(rule, field="draw.device", value=device) from error
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        rule = f"is unavailable: torch finds {torch.cuda.device_count()} GPUs"
        raise UserError(rule, field="draw.device", value=device)
    return found


def _check_family(model: str) -> None:
    """Reject models that need a source image."""
    family = find_adapter(model)
    if family.num_source_images[0] > 0:
        raise UserError("needs a source image", field="draw.model", value=model)


def _locate_lora(settings: DrawSettings) -> Path | None:
    """Return the weights of `draw.lora`, checked, or None."""
    if not settings.lora:
        return None
    path = locate_weights(settings.lora, "draw.lora")
    if not (path / "config.json").is_file():
        check_lora(path, "draw.lora")
    return path


@contextmanager
def _errors_of_draw() -> Iterator[None]:
    """Context manager that makes model errors name the settings of the section `draw`."""
    fields = {"pretrained.model": "draw.model", "height": "draw.height", "width": "draw.width"}
    try:
        yield
    except UserError as error:
        if error.field not in fields:
            raise
        raise UserError(
            error.rule, field=fields[error.field], value=error.value, hint=error.hint
        ) from error


@contextmanager
def quiet_tokenizers() -> Iterator[None]:
    """Context manager that silences warnings about truncated prompts."""
    names = ("transformers.tokenization_utils_base", "diffusers")
    loggers = [logging.getLogger(name) for name in names]
    levels = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)
