"""What every model family must do, each held against its stock pipeline."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from families import (
    FAMILIES,
    NEGATIVE,
    PROMPTS,
    STEPS,
    TOKENS,
    Family,
    draw_ode,
    noise_for,
    run_fields,
    save_prompts,
    save_small,
)
from peft import LoraConfig
from PIL import Image
from policies import policy_of
from safetensors.torch import load_file
from sessions import short_config
from train import train

from flow_grpo.draw.models import ModelAdapter, Size, load_adapter
from flow_grpo.draw.rollout import Denoiser, Dynamics, eval_generators, initial_noise
from flow_grpo.draw.session import Session, build_session
from flow_grpo.errors import UserError

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


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    return save_prompts(tmp_path_factory.mktemp("families") / "dataset")


@pytest.fixture(scope="module")
def run_once(family, folder, dataset, tmp_path_factory):
    """Runs of one epoch, guided; fields are dotted."""
    logdir = tmp_path_factory.mktemp("families")

    def run(name: str, **fields) -> Session:
        fields = {**run_fields(family, folder, dataset), **fields}
        session = build_session(short_config(logdir, name, **fields))
        try:
            train(session)
        finally:
            session.close()
        return session

    return run


@pytest.fixture(scope="module")
def trained(run_once) -> Session:
    return run_once("trained")


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


def test_noisy_steps_keep_to_the_scale_of_the_latents(family, adapter):
    """A schedule may begin a little below 1, where the noise would be tens of times too much."""
    size = Size(32, 32, family.frames)
    dynamics = Dynamics(adapter.schedule(STEPS, *size), kind="flow", guidance_scale=family.plain)
    trajectory = Denoiser(adapter, adapter.transformer, dynamics).sample(
        noise_for(adapter, size),
        adapter.encode(PROMPTS, None),
        steps=range(STEPS - 1),
        generators=eval_generators(0, [0, 1]),
    )
    assert 0.5 < trajectory.latents.std() < 2


def test_the_policy_that_is_trained_is_the_one_that_sampled(trained):
    _, epoch = map(json.loads, (trained.folder / "metrics.jsonl").open())
    assert epoch["train/first_update_ratio_dev"] == 0
    assert epoch["train/ratio_mean"] != 1  # of the second update


def test_the_trained_lora_draws_the_runs_pictures_in_the_stock_pipeline(family, folder, trained):
    pipeline, size = family.stock(folder), Size(32, 48, family.frames)
    pipeline.load_lora_weights(trained.folder / "checkpoints/latest/ema_lora")
    prompts = trained.test_prompts
    generators = eval_generators(trained.config.seed, range(len(prompts)))
    drawn = family.draw(
        pipeline,
        initial_noise(generators, trained.adapter.latent_shape(*size), "cpu"),
        [p.prompt for p in prompts],
        [p.negative_prompt for p in prompts],
        size,
        family.guided,
    )
    middle = drawn[:, family.frames // 2] if family.frames > 1 else drawn
    expected = 255 * middle.movedim(1, -1).numpy()
    before, after = (evaluated(trained, epoch) for epoch in (0, 1))
    assert np.abs(after - expected).max() < 0.5 + 1e-2  # files have whole numbers
    assert np.abs(after - before).max() > 1


def evaluated(session: Session, epoch: int) -> np.ndarray:
    """Pictures of the test prompts, of clips the middle frame."""
    files = sorted((session.folder / f"samples/eval-{epoch:05d}").glob("*.png"))
    assert len(files) == len(session.test_prompts)
    return np.stack([np.asarray(Image.open(file)) for file in files]).astype(float)


def test_samples_of_videos_are_saved_as_such(family, trained):
    rows = (trained.folder / "samples/eval-00001/samples.jsonl").read_text().splitlines()
    kind = ".gif" if family.frames > 1 else ".png"
    for row in map(json.loads, rows):
        with Image.open(trained.folder / "samples/eval-00001" / row["file"]) as sample:
            assert (Path(row["file"]).suffix, sample.size) == (kind, (48, 32))
            assert getattr(sample, "n_frames", 1) == family.frames


@pytest.mark.parametrize("own", [True, False])
def test_every_lora_layer_gets_a_gradient_but_those_that_are_named(family, folder, own, tmp_path):
    """Also of a LoRA that others made, on all layers."""
    adapter = load(folder)
    if not own:
        other = load(folder)
        other.transformer.add_adapter(LoraConfig(r=2, target_modules=other.lora_targets))
        other.save_lora(tmp_path, other.transformer, other.transformer.state_dict())
    policy = policy_of(adapter, rank=2, alpha=4, lora_path="" if own else str(tmp_path))
    layers = [n for n, _ in policy.transformer.named_modules() if n.endswith("lora_A.default")]
    for target in adapter.lora_targets:
        assert any(layer.endswith(f"{target}.lora_A.default") for layer in layers), target
    generator = torch.Generator().manual_seed(0)
    for name, parameter in policy.trained().items():
        if "lora_B" in name:  # it starts at zero, where A has no gradient
            parameter.data.normal_(std=0.1, generator=generator)
    size = Size(32, 32, family.frames)
    guided = adapter.is_guided(family.guided)
    conditioning = adapter.encode(PROMPTS, NEGATIVE if guided else None)
    noise = noise_for(adapter, size)
    velocity = adapter.velocity(policy.module, noise, 500.0, conditioning, family.guided)
    (velocity * noise).sum().backward()
    assert all(p.grad is not None for p in policy.parameters())  # DDP waits for each
    moving = {n for n, p in policy.trained().items() if p.grad.any()}
    idle = {n.split(".lora_")[0] for n in policy.trained().keys() - moving}
    assert idle == set(family.idle)


def test_settings_that_save_memory_or_time_change_nothing(run_once, trained, tmp_path):
    settings = {"offload_idle": True, "prompt_cache": str(tmp_path / "cache")}
    lean = run_once("lean", **settings, **{"train.gradient_checkpointing": True})
    assert lean.adapter.transformer.is_gradient_checkpointing
    expected, found = (
        load_file(s.folder / "checkpoints/latest/lora/pytorch_lora_weights.safetensors")
        for s in (trained, lean)
    )
    assert expected.keys() == found.keys()
    for name in expected:
        assert torch.equal(expected[name], found[name]), name


def test_texts_in_the_cache_and_parts_that_wait_on_the_cpu_draw_the_same(
    family, folder, adapter, tmp_path, monkeypatch
):
    size = Size(32, 32, family.frames)
    call = noise_for(adapter, size), PROMPTS, NEGATIVE, size, family.guided
    expected = draw_ode(adapter, *call)
    settings = dict(prompt_cache=str(tmp_path), offload_idle=True, device="cpu:0")
    assert torch.equal(draw_ode(load(folder, **settings), *call), expected)
    again = load(folder, **settings)
    monkeypatch.setattr(again, "encode_one", lambda text: pytest.fail(f"encoded {text!r} again"))
    assert torch.equal(draw_ode(again, *call), expected)


@pytest.fixture
def refusal(tmp_path, dataset):
    """What is said of a run with this model, less its weights."""

    def refusal(family: Family, folder: Path, index: dict | None = None, **fields) -> str:
        """`index`: changes of the pipeline's config."""
        hollow = tmp_path / "hollow"
        shutil.copytree(folder, hollow, ignore=shutil.ignore_patterns("*.safetensors"))
        whole = json.loads((hollow / "model_index.json").read_text())
        (hollow / "model_index.json").write_text(json.dumps({**whole, **(index or {})}))
        fields = {**run_fields(family, hollow, dataset), **fields}
        with pytest.raises(UserError) as refused:
            build_session(short_config(tmp_path / "logs", "run", **fields))
        assert "\n" not in str(refused.value)
        assert not (tmp_path / "logs").exists()
        return str(refused.value)

    return refusal


def test_weights_are_read_once_all_else_is_right(family, folder, refusal):
    assert refusal(family, folder).startswith("cannot load pretrained.model=")


def test_frames_the_family_cannot_draw_are_refused_before(family, folder, refusal):
    frames = "1 more than a multiple of 4" if family.frames > 1 else "1: this model draws pictures"
    assert f"frames=6 must be {frames}" in refusal(family, folder, frames=6)


@pytest.mark.parametrize("side", ["height", "width"])
def test_sizes_the_family_cannot_draw_are_refused_before(family, folder, refusal, side):
    told = refusal(family, folder, **{side: 36})
    assert re.match(f"{side}=36 must be a multiple of (8|16)( and at most 256)?$", told)


@pytest.mark.parametrize(
    ("name", "settings", "index", "fields", "message"),
    [
        (
            *("sd3", {}, {"_class_name": "StableDiffusionXLPipeline"}, {}),
            "is a StableDiffusionXLPipeline; pretrained.model must be one of StableDiffusion3Pipe",
        ),
        (
            *("flux", {"guidance_embeds": False}, {}, {}),
            "sample.guidance_scale=3.5: this FLUX.1 (schnell) was trained without guidance; set",
        ),
        *(
            (
                *("flux", {"guidance_embeds": False}, {}),
                {"algorithm": "nft", "nft.times": 2, "sample.guidance_scale": 1.0, field: 2.0},
                f"{field}=2.0: this FLUX.1 (schnell) was trained without guidance; set "
                f"--config.{field}=1",
            )
            for field in ("sample.eval_guidance_scale", "nft.train_guidance", "nft.kl_guidance")
        ),
        (
            *("qwen_image", {}, {}, {"sample.eval_num_steps": 1}),
            "1 step is too few: this model's scheduler stretches the noise levels between",
        ),
        (
            *("wan", {}, {"boundary_ratio": 0.875}, {}),
            "this Wan has boundary_ratio=0.875: it is Wan 2.2, and only Wan 2.1 can be trained",
        ),
    ],
    ids=["another kind", "schnell", "its evaluation", "trained", "KL", "one step", "wan 2.2"],
)
def test_a_model_that_does_not_fit_is_refused_before(
    tmp_path, refusal, name, settings, index, fields, message
):
    folder = save_small(BY_NAME[name], tmp_path / "whole", **settings)
    assert message in refusal(BY_NAME[name], folder, index, **fields)


def test_a_part_of_a_pipeline_is_none(family, folder, dataset, tmp_path):
    fields = run_fields(family, folder / "transformer", dataset)
    with pytest.raises(UserError, match="is not a diffusers pipeline folder: it has no model_inde"):
        build_session(short_config(tmp_path, "run", **fields))
