"""Plan and checks of context parallelism; tests/e2e/test_context_parallel.py runs it."""

import shutil
from pathlib import Path

import pytest
from sessions import short_config
from untrained import small
from user_errors import raises_user_error

from flow_grpo.data.prompts import Prompt
from flow_grpo.diffusion.context_parallel import check_context_sources, count_tokens
from flow_grpo.diffusion.models import Size
from flow_grpo.diffusion.models.flux2 import Flux2KleinAdapter
from flow_grpo.diffusion.models.wan import WanAdapter
from flow_grpo.diffusion.session import build_session

FIELD = "sample.context_parallel"


@pytest.fixture(scope="module")
def models(tmp_path_factory, tiny_sd3) -> Path:
    """Directory of small models without weights."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("wan", "flux"):
        small.build(name, heads=4).save_pretrained(folder / "whole" / name)
    weights = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(folder / "whole", folder / "hollow", ignore=weights)
    shutil.copytree(tiny_sd3, folder / "hollow/sd3", ignore=weights)
    return folder / "hollow"


def config_of(model: Path, logs: Path, context: int, **fields):
    settings = {"pretrained.model": str(model), "height": 32, "width": 32, "compile": False}
    return short_config(logs, "run", **{**settings, FIELD: context, **fields})


@pytest.mark.parametrize(
    ("size", "tokens"),
    [(Size(480, 832, 81), 32_760), (Size(720, 1280, 81), 75_600), (Size(480, 832), 1560)],
)
def test_the_tokens_of_a_video_are_counted(size, tokens):
    """Latent frames x height x width: 21 x 30 x 52 and 21 x 45 x 80."""
    transformer = {"out_channels": 16, "patch_size": [1, 2, 2]}
    assert count_tokens(WanAdapter, transformer, {}, size) == tokens


@pytest.mark.parametrize(
    ("model", "context", "fields", "shown"),
    [
        ("sd3", 2, {}, ["StableDiffusion3Pipeline", "WanPipeline"]),
        ("wan", 8, {}, ["4 attention heads"]),
        ("wan", 4, {"height": 48}, ["6 tokens", "32 x 48"]),
        ("wan", 4, {"eval_height": 48}, ["6 tokens", "32 x 48"]),
        ("flux", 4, {"max_sequence_length": 6}, ["6 tokens", "prompt"]),
        ("wan", 3, {}, ["number of processes, 8"]),
    ],
    ids=["model", "heads", "tokens", "evaluation", "prompt", "processes"],
)
def test_numbers_that_cannot_split_the_work_are_rejected_before_weights_are_read(
    models, tmp_path, model, context, fields, shown
):
    config = config_of(models / model, tmp_path / "logs", context, **fields)
    with raises_user_error(*shown, field=FIELD, value=context):
        build_session(config, num_processes=8)
    assert not (tmp_path / "logs").exists()


def test_compiled_code_is_rejected(models, tmp_path):
    with raises_user_error("compile=True", "compile=False", field=FIELD):
        build_session(config_of(models / "wan", tmp_path / "logs", 2, compile=True))


def test_source_images_whose_tokens_are_appended_are_rejected():
    prompts = [Prompt("a cat"), Prompt("a dog", images=(b"image",))]
    check_context_sources(2, WanAdapter, prompts)
    check_context_sources(1, Flux2KleinAdapter, prompts)
    check_context_sources(2, Flux2KleinAdapter, prompts[:1])
    with raises_user_error("Flux2KleinPipeline", field=FIELD, value=2):
        check_context_sources(2, Flux2KleinAdapter, prompts)


def test_the_plan_of_a_dry_run_shows_the_tokens_per_process(models, tmp_path):
    """One process plans for eight, in two groups of four."""
    fields = {"frames": 5, "width": 64, "sample.num_image_per_prompt": 4}
    model = models.parent / "whole/wan"
    session = build_session(config_of(model, tmp_path, 4, **fields), num_processes=8)
    session.close()
    shown = session.plan.describe()
    assert "x 2 groups of 4 processes" in shown
    assert "4 = 16 / sample.context_parallel=4" in shown
    assert session.plan.world_size == 8
