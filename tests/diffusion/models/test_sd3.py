"""The SD3 adapter compared with the pipeline of diffusers."""

import pytest
import torch
from diffusers import AutoencoderKL, StableDiffusion3Pipeline
from policies import make_policy
from untrained.full import SD3_VAE
from user_errors import raises_user_error

from flow_grpo.diffusion.models import base, load_adapter
from flow_grpo.diffusion.policy import Policy
from flow_grpo.diffusion.rollout import Denoiser, Dynamics, initial_noise

PROMPTS = ["a red sign", 'it says "HELLO"', "a red sign"]
NEGATIVE = ["blurry", "", "dark"]


@pytest.fixture(scope="module")
def pipeline(tiny_sd3):
    pipeline = StableDiffusion3Pipeline.from_pretrained(tiny_sd3)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.mark.parametrize("guidance", [1.0, 4.5])
@pytest.mark.parametrize(("height", "width"), [(32, 32), (32, 96)])
@pytest.mark.parametrize("length", [1, 8, 77])
def test_the_ode_reproduces_the_images_of_diffusers(
    tiny_sd3, pipeline, guidance, height, width, length
):
    adapter = load_adapter(str(tiny_sd3), max_sequence_length=length)
    generators = [torch.Generator().manual_seed(s) for s in range(3)]
    noise = initial_noise(generators, adapter.latent_shape(height, width), "cpu")
    expected = pipeline(
        PROMPTS,
        negative_prompt=NEGATIVE,
        latents=noise,
        num_inference_steps=5,
        guidance_scale=guidance,
        height=height,
        width=width,
        max_sequence_length=length,
        output_type="pt",
    ).images
    dynamics = Dynamics(adapter.schedule(5, height, width), guidance_scale=guidance)
    trajectory = Denoiser(adapter, adapter.transformer, dynamics).sample(
        noise, adapter.encode(PROMPTS, NEGATIVE if guidance > 1 else None)
    )
    images = adapter.decode(trajectory.final)
    assert images.shape == (3, 3, height, width)
    torch.testing.assert_close(images, expected, atol=1e-5, rtol=0)


def test_sigmas_are_those_of_the_scheduler_with_dynamic_shifting_too(adapter):
    scheduler_class = type(adapter.pipeline.scheduler)
    adapter.pipeline.scheduler = scheduler_class(
        use_dynamic_shifting=True, base_image_seq_len=4, max_image_seq_len=64
    )
    small, large = adapter.schedule(6, 32, 32), adapter.schedule(6, 32, 96)
    assert len(small) == 6
    assert small.sigmas[0] == 1
    assert small.sigmas[-1] == 0
    assert large.sigmas[3] > small.sigmas[3]  # more tokens, more shift
    assert small.timesteps == pytest.approx([1000 * s for s in small.sigmas[:-1]], rel=1e-6)


def test_each_distinct_prompt_is_encoded_once(adapter, monkeypatch):
    seen = []
    encode_prompt = adapter.pipeline.encode_prompt

    def counted(**kwargs):
        seen.extend(kwargs["prompt"])
        return encode_prompt(**kwargs)

    monkeypatch.setattr(adapter.pipeline, "encode_prompt", counted)
    conditioning = adapter.encode(["a", "b", "a", "a"], ["", "", "b", ""])
    assert sorted(seen) == ["", "a", "b"]
    assert len(conditioning) == 4
    texts = [seen[i] for i in conditioning.positive], [seen[i] for i in conditioning.negative]
    assert texts == (["a", "b", "a", "a"], ["", "", "b", ""])


def test_the_conditional_gradient_treats_the_other_half_as_constant(adapter):
    """Its gradient is the conditional velocity's times g; the whole one has -(g - 1) times the
    unconditional's besides."""
    policy = make_policy(adapter, rank=4, alpha=8)
    randomise(policy)
    latents = torch.randn(2, *adapter.latent_shape(32, 32))

    def gradient(prompts, guidance=1.0, kind="both"):
        conditioning = adapter.encode(prompts, ["x", ""] if guidance > 1 else None)
        velocity = adapter.velocity(
            policy.module, latents, 500.0, conditioning, guidance, gradient=kind
        )
        found = torch.autograd.grad(velocity.sum(), policy.parameters())
        return torch.cat([g.flatten() for g in found])

    conditional, unconditional = gradient(["a", "b"]), gradient(["x", ""])
    shortcut = gradient(["a", "b"], 4.5, "conditional")
    assert (shortcut - 4.5 * conditional).norm() < 1e-3 * shortcut.norm()
    whole = gradient(["a", "b"], 4.5)
    assert (whole - (shortcut - 3.5 * unconditional)).norm() < 1e-3 * whole.norm()
    assert (whole - shortcut).norm() > 0.1 * whole.norm()


def randomise(policy: Policy) -> None:
    """LoRA starts at zero, where every test of it would pass."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("use_lora", [True, False])
def test_the_reference_is_the_model_before_training(adapter, use_lora):
    conditioning = adapter.encode(["a"], None)
    latents = torch.randn(1, *adapter.latent_shape(32, 32))

    def velocity(module):
        with torch.no_grad():
            return adapter.velocity(module, latents, 500.0, conditioning, 1.0)

    before = velocity(adapter.transformer)
    policy = make_policy(adapter, use_lora=use_lora, rank=4, alpha=8)
    randomise(policy)
    with policy.frozen_denoiser("reference") as reference:
        assert torch.equal(velocity(reference.transformer), before)
    assert not torch.allclose(velocity(policy.module), before, atol=1e-3)


def test_lora_is_attached_to_the_eight_attention_projections(adapter):
    policy = make_policy(adapter, rank=4, alpha=8)
    names = {n for n, p in policy.transformer.named_parameters() if p.requires_grad}
    targets = {n.split(".attn.")[1].split(".lora_")[0] for n in names}
    assert targets == {
        *("to_q", "to_k", "to_v", "to_out.0"),
        *("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
    }


def test_training_can_start_from_a_saved_lora(adapter, tiny_sd3, tmp_path):
    policy = make_policy(adapter, rank=3, alpha=5)
    randomise(policy)
    policy.save(tmp_path)
    fresh = load_adapter(str(tiny_sd3))
    again = make_policy(fresh, rank=7, alpha=7, lora_path=str(tmp_path / "lora"))
    assert again.transformer.peft_config["default"].r == 3
    assert again.transformer.peft_config["default"].lora_alpha == 5
    pairs = list(zip(policy.parameters(), again.parameters(), strict=True))
    assert pairs
    assert all(torch.equal(a, b) for a, b in pairs)
    with raises_user_error(tmp_path / "nothing"):
        make_policy(fresh, lora_path=str(tmp_path / "nothing"))


def test_a_half_precision_model_keeps_lora_and_latents_in_float32(tiny_sd3):
    adapter = load_adapter(str(tiny_sd3), dtype=torch.bfloat16, max_sequence_length=8)
    policy = make_policy(adapter, rank=4, alpha=8)
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    assert adapter.pipeline.vae.dtype == torch.float32
    noise = torch.randn(1, *adapter.latent_shape(32, 32))
    with torch.autocast("cpu", torch.bfloat16):
        trajectory = policy.denoiser.sample(noise, adapter.encode(["a"], None))
    assert trajectory.final.dtype == torch.float32


@pytest.mark.parametrize(("size", "ok"), [(32, True), (36, False), (0, False), (264, False)])
def test_unsupported_sizes_are_rejected(adapter, size, ok):
    if ok:
        assert adapter.latent_shape(size, 96) == (4, 8, 24)
    else:
        with raises_user_error("8", "256", field="height", value=size):
            adapter.latent_shape(size, 96)


@pytest.mark.parametrize(
    ("most", "parts"), [(7, [7]), (6.9, [4, 3]), (3.9, [3, 3, 1]), (0.5, [1] * 7)]
)
def test_decoding_in_chunks_gives_the_same_images(adapter, monkeypatch, most, parts):
    latents = torch.randn(7, *adapter.latent_shape(32, 96))
    expected, decode, seen = adapter.decode(latents), adapter.pipeline.vae.decode, []
    widest = 32 * 96 * adapter.pipeline.vae.config.block_out_channels[1]
    monkeypatch.setattr(base, "MAX_VAE_ELEMENTS", int(most * widest))
    monkeypatch.setattr(
        adapter.pipeline.vae,
        "decode",
        lambda part, **options: (seen.append(len(part)), decode(part, **options))[1],
    )
    torch.testing.assert_close(adapter.decode(latents), expected, rtol=0, atol=1e-5)
    assert seen == parts


@pytest.mark.parametrize(("count", "largest"), [(4, 4), (9, 3)])
def test_the_vae_decodes_four_images_of_512_pixels_at_a_time(adapter, monkeypatch, count, largest):
    with torch.device("meta"):
        vae, latents = AutoencoderKL(**SD3_VAE), torch.empty(count, 16, 64, 64)
    seen = []
    for module in vae.modules():
        module.register_forward_hook(lambda _, __, out: seen.append(out))
    monkeypatch.setattr(adapter, "vae", vae)
    assert adapter.decode(latents).shape == (count, 3, 512, 512)
    tensors = [out for out in seen if isinstance(out, torch.Tensor)]
    assert max(tensor.numel() for tensor in tensors) <= 2**28
    assert max(len(tensor) for tensor in tensors) == largest
