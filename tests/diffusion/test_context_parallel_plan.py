"""Plan and checks of context parallelism; tests/e2e/test_context_parallel.py runs it."""

import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from diffusers import LTX2VideoTransformer3DModel, WanTransformer3DModel
from runner import ROOT
from sessions import short_config
from untrained import small
from untrained.full import FULL
from user_errors import raises_user_error

from flow_grpo.data.prompts import Prompt
from flow_grpo.diffusion import presets
from flow_grpo.diffusion.context_parallel import (
    check_context_parallel,
    check_context_sources,
    count_tokens,
)
from flow_grpo.diffusion.fields import DIFFUSION_SPEC
from flow_grpo.diffusion.models import Size
from flow_grpo.diffusion.models.flux2 import Flux2KleinAdapter
from flow_grpo.diffusion.models.ltx2 import LTX2Adapter
from flow_grpo.diffusion.models.wan import WanAdapter
from flow_grpo.diffusion.session import build_session
from flow_grpo.diffusion.video_memory import (
    MODELS,
    count_audio_tokens,
    count_video_tokens,
    describe_video_memory,
    video_memory,
    video_model,
)
from flow_grpo.training.measurements import PARAMETERS, read_measurements

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


@pytest.mark.parametrize(
    ("context", "frames", "heads", "shown"),
    [
        (2, 121, 32, ()),
        (8, 161, 32, ()),
        (4, 121, 32, ("126 audio tokens of 121 frames", "those of 81 and 161 frames")),
        (8, 121, 32, ("126 audio tokens of 121 frames", "those of 161 frames")),
        (2, 121, 33, ("33 audio attention heads",)),
    ],
)
def test_the_sound_of_a_video_is_split_too(context, frames, heads, shown):
    """25 audio tokens per second of 24 frames."""
    configs = {"transformer": {**FULL["ltx-2.3"].transformer}, "vae": {}}
    configs["transformer"] |= {"num_attention_heads": 32, "audio_num_attention_heads": heads}
    size = Size(512, 768, frames)
    configs["transformer"].setdefault("in_channels", 128)
    with raises_user_error(*shown, field=FIELD, value=context) if shown else nullcontext():
        check_context_parallel(context, LTX2Adapter, configs, [size], 1024)
    config = presets.get_config("pickscore_ltx2")
    config.update_from_flattened_dict({FIELD: context, **size._asdict()})
    if heads == 32:
        with raises_user_error(*shown, field=FIELD, value=context) if shown else nullcontext():
            describe_video_memory(DIFFUSION_SPEC.freeze(config), MODELS["ltx-2.3"])


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


@pytest.mark.parametrize(
    ("model", "frames", "peak"),
    [
        ("wan2.1-1.3b", "832x480x33", 11.3),
        ("wan2.1-14b", "416x240x33", 34.9),
        ("wan2.1-14b", "832x480x33", 52.2),
    ],
)
def test_the_computed_memory_is_close_to_measured_peaks(model, frames, peak):
    lines = [
        line
        for line in read_measurements()
        if line.get("settings", {}).get("model") == model
        and (line["settings"]["size"], line["settings"]["batch"]) == (frames, 1)
        and line["peak_gib"] == peak
    ]
    assert lines
    config = presets.get_config("wan_14b_ocr" if "14b" in model else "wan_ocr")
    config.train.batch_size = 1
    width, height, count = map(int, frames.split("x"))
    known = MODELS[model]
    tokens = count_video_tokens(known, height, width, count)
    computed = video_memory(DIFFUSION_SPEC.freeze(config), known, tokens)
    assert sum(computed.values()) == pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize("preset", ["wan_ocr", "wan_14b_ocr", "pickscore_ltx2"])
def test_the_page_on_videos_has_the_computed_memory(preset):
    page = (ROOT / "docs/video.md").read_text("utf-8")
    wan, ltx2 = [(480, 832, 81), (720, 1280, 81)], [(512, 768, 121), (512, 768, 161)]
    sizes = wan if "wan" in preset else ltx2
    for height, width, frames in sizes:
        config = presets.get_config(preset)
        config.train.batch_size = 1
        frozen = DIFFUSION_SPEC.freeze(config)
        model = video_model(frozen)
        tokens = count_video_tokens(model, height, width, frames)
        audio = count_audio_tokens(frames, model.fps, model.audio_rate)
        counts = [n for n in (1, 2, 4, 8) if model.heads % n == audio % n == 0]
        gib = [sum(video_memory(frozen, model, tokens // n).values()) for n in counts]
        assert f"| {tokens:,} | {', '.join(f'{each:.1f}' for each in gib)} |" in page


@pytest.mark.parametrize("name", MODELS)
def test_the_architectures_are_those_of_the_benchmarked_models(name):
    full, model = FULL[name].transformer, MODELS[name]
    kind = LTX2VideoTransformer3DModel if name == "ltx-2.3" else WanTransformer3DModel
    with torch.device("meta"):
        transformer = kind(**full)
    config, parameters = transformer.config, dict(transformer.named_parameters())
    assert model.layers == config.num_layers
    assert model.heads == config.num_attention_heads
    assert model.width == model.heads * config.attention_head_dim
    ends = ("blocks.0.ff.net.2.weight", "blocks.0.ffn.net.2.weight")
    [mlp] = [weight for key, weight in parameters.items() if key.endswith(ends)]
    assert mlp.shape == (model.width, model.mlp)
    targets = LTX2Adapter.lora_targets if name == "ltx-2.3" else WanAdapter.lora_targets
    ends = tuple(f".{target}" for target in targets)
    layers = [m for n, m in transformer.named_modules() if n.endswith(ends)]
    per_rank = sum(layer.in_features + layer.out_features for layer in layers)
    assert (sum(p.numel() for p in parameters.values()), per_rank) == PARAMETERS[name]
