"""HunyuanVideo 1.5: padding, tiles, quantized blocks and the LoRA of a pipeline without mixin."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo15, DiffusionPipeline
from families import (
    FAMILIES,
    STEPS,
    generate_ode,
    load,
    noise_for,
    run_fields,
    save_prompts,
    save_small_pipeline,
)
from policies import make_policy
from sessions import short_config
from train import train
from user_errors import raises_user_error

from flow_grpo.diffusion.models import ModelAdapter, Size, load_adapter
from flow_grpo.diffusion.models.hunyuan_video15 import HunyuanVideo15Adapter
from flow_grpo.diffusion.publish import describe_usage
from flow_grpo.diffusion.rollout import Denoiser, Dynamics
from flow_grpo.diffusion.session import build_session
from flow_grpo.perf.quantization import QuantizedLinear

[FAMILY] = (family for family in FAMILIES if family.name == "hunyuan_video15")
SIZE = Size(32, 48, 5)
PROMPT, NEGATIVE = ['a red sign that says "STOP"'], ["ugly"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_small_pipeline(FAMILY, tmp_path_factory.mktemp("hunyuan") / "model")


@pytest.fixture(scope="module")
def adapter(folder) -> ModelAdapter:
    return load(folder)


@pytest.fixture
def stock(folder) -> DiffusionPipeline:
    """The pipeline with its own padding."""
    pipeline = DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.mark.parametrize("scale", [1.0, 6.0], ids=["unguided", "guided"])
def test_with_the_same_padding_all_bits_equal_those_of_the_pipeline(adapter, stock, scale):
    """Masked tokens, and both halves of guidance in one batch, change how sums are rounded."""
    texts = PROMPT, ['a "STOP" sign, but ugly']  # of the same number of quoted characters
    length = adapter.encode(*texts).inputs["glyphs"].shape[1]
    adapter = load_adapter(str(stock.name_or_path), max_sequence_length=64)
    for each in (stock, adapter.pipeline):
        each.tokenizer_max_length, each.tokenizer_2_max_length = 64, length
    stock.vision_num_semantic_tokens = 0
    noise = noise_for(adapter, SIZE, 1)
    expected = FAMILY.generate(stock, noise, *texts, SIZE, scale)
    dynamics = Dynamics(
        adapter.schedule(STEPS, *SIZE), guidance_scale=scale, guidance_gradient="conditional"
    )
    given = adapter.encode(PROMPT, texts[1] if scale > 1 else None)
    sampled = Denoiser(adapter, adapter.transformer, dynamics).sample(noise, given)
    assert torch.equal(adapter.decode(sampled.final), expected)


def test_the_padding_of_the_pipeline_has_no_effect(adapter, stock):
    """729 tokens of no image, 1000 of the prompt and 256 of its quoted text."""
    call = noise_for(adapter, SIZE, 1), PROMPT, NEGATIVE, SIZE, 1.0
    expected = FAMILY.generate(stock, *call)
    torch.testing.assert_close(generate_ode(adapter, *call), expected, rtol=0, atol=1e-5)


def test_quoted_text_is_encoded_separately(adapter):
    given = adapter.encode(["stop", *PROMPT], None).inputs
    assert given["is_glyph"].sum((1, 2)).tolist() == [0, len('Text "STOP". ') + 1]  # with </s>
    assert given["glyphs"].shape[1] == 14
    assert given["lengths"].tolist() == [len(text) + 13 for text in ("stop", *PROMPT)]


def test_models_of_the_mean_velocity_are_rejected():
    with raises_user_error("distilled", field="use_meanflow", value=True):
        HunyuanVideo15Adapter.check({}, {"use_meanflow": True}, {})


def test_large_videos_are_decoded_in_tiles(adapter, folder):
    """As the pipeline does after `vae.enable_tiling()`."""
    vae = AutoencoderKLHunyuanVideo15.from_pretrained(folder / "vae")
    latents = torch.randn(2, 4, 1, 2, 20, generator=torch.Generator().manual_seed(0))

    def decode() -> torch.Tensor:
        with torch.no_grad():
            videos = [vae.decode(each / vae.config.scaling_factor)[0] for each in latents.split(1)]
        return (torch.cat(videos)[:, :, 0] / 2 + 0.5).clamp(0, 1)

    found, whole = adapter.decode(latents), decode()
    vae.enable_tiling()
    assert torch.equal(found, decode())
    assert not torch.equal(found, whole)


def test_the_ratio_with_quantized_blocks_is_exactly_one(folder, tmp_path):
    fields = run_fields(FAMILY, folder, save_prompts(tmp_path / "dataset"))
    fields |= {"pretrained.base_precision": "fp8", "eval_freq": 0, "frames": 1}
    session = build_session(short_config(tmp_path, "run", **fields))
    try:
        low = {
            name.split(".")[0]
            for name, module in session.adapter.transformer.named_modules()
            if isinstance(module, QuantizedLinear)
        }
        assert low == {"transformer_blocks"}
        train(session)
    finally:
        session.close()
    *_, epoch = map(json.loads, (session.folder / "metrics.jsonl").open())
    assert epoch["train/first_update_ratio_dev"] == 0


@pytest.fixture
def lora(folder, tmp_path) -> Path:
    """A LoRA with random weights."""
    adapter = load(folder)
    policy = make_policy(adapter, rank=2, alpha=5)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in policy.trained_parameters().items():
        if "lora_B" in name:  # it starts at zero
            parameter.data.normal_(std=0.2, generator=generator)
    adapter.save_lora(tmp_path, policy.transformer, policy.transformer.state_dict())
    return tmp_path


def test_a_lora_is_removed_from_a_pipeline_that_cannot_load_it(folder, adapter, lora):
    call = noise_for(adapter, SIZE, 1), PROMPT, NEGATIVE, SIZE, 1.0
    plain, other = generate_ode(adapter, *call), load(folder)
    other.load_weights(lora)
    assert (generate_ode(other, *call) - plain).abs().max() > 1e-3
    other.unload_lora()
    assert torch.equal(generate_ode(other, *call), plain)


def test_the_code_of_a_model_card_runs(folder, adapter, lora):
    settings = {"height": 32, "width": 48, "frames": 5}
    settings |= {"sample.eval_num_steps": 1, "sample.guidance_scale": 3.0}
    run = SimpleNamespace(
        base_path=folder, source=SimpleNamespace(is_lora=True), setting=settings.get
    )
    options = SimpleNamespace(repo_name=lora, merged=False)
    card = describe_usage(run, options, type(adapter), [""], [])
    code = card.removeprefix("```python\n").removesuffix("```").replace(".frames", "")
    code = code.replace('"..."', "PROMPT, latents=noise, output_type='pt'")
    noise, found = noise_for(adapter, SIZE, 1), {}
    exec(code, {"PROMPT": PROMPT, "noise": noise}, found)
    assert found["pipeline"].guider.guidance_scale == 3.0
    other = load(folder)
    other.load_weights(lora)
    dynamics = Dynamics(other.schedule(1, *SIZE), guidance_scale=3.0)
    denoiser = Denoiser(other, other.transformer, dynamics)
    expected = other.decode(denoiser.sample(noise, other.encode(PROMPT, [""])).final)
    torch.testing.assert_close(found["frames"].frames, expected, rtol=0, atol=1e-5)
