"""What every model family must do, each held against its stock pipeline."""

from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline
from families import (
    FAMILIES,
    NEGATIVE,
    PROMPTS,
    TOKENS,
    Family,
    draw_ode,
    noise_for,
    save_small,
)

from flow_grpo.models import ModelAdapter, Size, load_adapter

BY_NAME = {family.name: family for family in FAMILIES}


@pytest.fixture(scope="module", params=FAMILIES, ids=str)
def family(request) -> Family:
    return request.param


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory) -> Path:
    return save_small(family, tmp_path_factory.mktemp("families") / family.name)


@pytest.fixture(scope="module")
def pipeline(family, folder) -> DiffusionPipeline:
    return family.stock(folder)


@pytest.fixture(scope="module")
def adapter(folder) -> ModelAdapter:
    """Not to be changed."""
    return load(folder)


def load(folder: Path, **settings) -> ModelAdapter:
    return load_adapter(str(folder), max_sequence_length=TOKENS, **settings)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("guided", [False, True], ids=["plain", "guided"])
@pytest.mark.parametrize("width", [32, 48])
def test_the_ode_draws_the_picture_of_the_stock_pipeline(family, pipeline, adapter, guided, width):
    """Of two prompts of different length, each with a negative prompt of its own."""
    size, scale = Size(32, width, family.frames), family.guided if guided else family.plain
    call = noise_for(adapter, size), PROMPTS, NEGATIVE, size, scale
    expected = family.draw(pipeline, *call)
    found = draw_ode(adapter, *call)
    frames = (family.frames,) if family.frames > 1 else ()
    assert found.shape == (2, *frames, 3, 32, width)
    assert found.std() > 0.05
    assert_close(found, expected)


def test_a_picture_depends_on_its_own_texts_alone(family, adapter):
    size = Size(32, 32, family.frames)
    noise = noise_for(adapter, size)
    together = draw_ode(adapter, noise, PROMPTS, NEGATIVE, size, family.guided)
    for i in range(2):
        alone = (noise[i : i + 1], PROMPTS[i : i + 1], NEGATIVE[i : i + 1])
        assert_close(draw_ode(adapter, *alone, size, family.guided)[0], together[i])
    other = draw_ode(adapter, noise, PROMPTS[::-1], NEGATIVE, size, family.guided)
    assert (other - together).abs().amax(tuple(range(1, other.ndim))).min() > 1e-3


def test_flux_schnell_draws_without_guidance(tmp_path):
    family, size = BY_NAME["flux"], Size(32, 32)
    folder = save_small(family, tmp_path / "schnell", guidance_embeds=False)
    adapter = load(folder)
    call = noise_for(adapter, size), PROMPTS, NEGATIVE, size, 1.0
    assert_close(draw_ode(adapter, *call), family.draw(family.stock(folder), *call))


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.frames > 1], indirect=True, ids=str)
def test_a_video_of_one_frame_is_a_picture(family, pipeline, adapter):
    size = Size(32, 48, 1)
    call = noise_for(adapter, size), PROMPTS, NEGATIVE, size, family.guided
    found = draw_ode(adapter, *call)
    assert found.shape == (2, 3, 32, 48)
    assert_close(found, family.draw(pipeline, *call))
