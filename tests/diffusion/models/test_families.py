"""Requirements of every model family, checked against its stock pipeline."""

import copy
import json
import re
import shutil
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from benchmark_utils import forward_tflop
from diffusers import DiffusionPipeline, WanImageToVideoPipeline
from families import (
    FAMILIES,
    NEGATIVE,
    PROMPTS,
    SOURCE,
    STEPS,
    Family,
    at_size,
    generate_ode,
    load,
    make_images,
    noise_for,
    run_fields,
    save_prompts,
    save_small_pipeline,
)
from peft import LoraConfig, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from PIL import Image
from policies import make_policy
from safetensors.torch import load_file
from sessions import short_config
from torch import nn
from train import train
from transformers import PreTrainedConfig, PreTrainedModel
from user_errors import raises_user_error

from flow_grpo.data.prompts import Prompt
from flow_grpo.diffusion.export import export
from flow_grpo.diffusion.models import (
    ModelAdapter,
    Size,
    build_meta_transformer,
    check_model,
    load_adapter,
)
from flow_grpo.diffusion.models.dtypes import freeze
from flow_grpo.diffusion.models.experts import (
    check_expert_folders,
    expert_folders_of_model,
    iter_experts,
)
from flow_grpo.diffusion.models.lora_files import read_lora
from flow_grpo.diffusion.models.processors import load_pipeline
from flow_grpo.diffusion.models.wan import WanAdapter
from flow_grpo.diffusion.policy import Policy
from flow_grpo.diffusion.rollout import Denoiser, Dynamics, eval_generators, initial_noise
from flow_grpo.diffusion.session import Session, build_session
from flow_grpo.diffusion.source_images import check_source_images
from flow_grpo.images import resize_and_crop
from flow_grpo.perf.quantization import QuantizedLinear
from flow_grpo.training.export import ExportSource

pytestmark = pytest.mark.slow  # all together
BY_NAME = {family.name: family for family in FAMILIES}
SEEING = {  # rewards of runs with source images
    "reward_fn": {"jpeg_compressibility": 1.0, "bright": 1.0},
    "custom_rewards": {"bright": f"{__name__}:brightness"},
}


@pytest.fixture(scope="module", params=FAMILIES, ids=str)
def family(request) -> Family:
    return request.param


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory) -> Path:
    return save_small_pipeline(family, tmp_path_factory.mktemp("families") / family.name)


@pytest.fixture(scope="module")
def pipeline(family, folder) -> DiffusionPipeline:
    return family.stock(folder)


@pytest.fixture(scope="module")
def adapter(folder) -> ModelAdapter:
    """Shared between tests; do not modify."""
    return load(folder)


@pytest.fixture(scope="module")
def dataset(family, tmp_path_factory) -> Path:
    return save_prompts(tmp_path_factory.mktemp("families") / "dataset", family.num_sources)


@pytest.fixture(scope="module")
def run_once(family, folder, dataset, tmp_path_factory):
    """Return a function that runs one epoch with guidance and dotted config fields."""
    logdir = tmp_path_factory.mktemp("families")
    rewards = SEEING if family.num_sources and family.frames == 1 else {}

    def run(name: str, **fields) -> Session:
        fields = {**run_fields(family, folder, dataset), **rewards, **fields}
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


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("square", "guided"), [(True, False), (False, True)], ids=["square", "wide and guided"]
)
def test_the_ode_reproduces_the_stock_pipeline(family, pipeline, adapter, guided, square):
    """For two prompts of different length with different negative prompts."""
    width = 32 if square else family.wide
    size, scale = (
        Size(32, width, family.frames),
        family.guidance_scale if guided else family.unguided_scale,
    )
    call = noise_for(adapter, size), PROMPTS, NEGATIVE, size, scale
    expected = family.generate(pipeline, *call)
    found = generate_ode(adapter, *call)
    frames = (family.frames,) if family.frames > 1 else ()
    assert found.shape == (2, *frames, 3, 32, width)
    assert found.std() > 0.05
    assert_close(found, expected)


def test_an_image_depends_only_on_its_own_prompts(family, adapter):
    size = Size(32, 32, family.frames)
    noise = noise_for(adapter, size)
    together = generate_ode(adapter, noise, PROMPTS, NEGATIVE, size, family.guidance_scale)
    for i in range(2):
        alone = (noise[i : i + 1], PROMPTS[i : i + 1], NEGATIVE[i : i + 1])
        assert_close(generate_ode(adapter, *alone, size, family.guidance_scale)[0], together[i])
    other = generate_ode(adapter, noise, PROMPTS[::-1], NEGATIVE, size, family.guidance_scale)
    assert (other - together).abs().amax(tuple(range(1, other.ndim))).min() > 1e-3


@pytest.mark.parametrize(
    "family", [f for f in FAMILIES if 0 < f.num_sources <= 2], indirect=True, ids=str
)
def test_prompts_may_have_fewer_source_images(family, pipeline, adapter):
    """Also in a batch with a prompt that has all, if the family supports it."""
    size, (fewest, *_) = Size(32, 32, family.frames), adapter.num_source_images
    noise, other = (
        noise_for(adapter, size),
        family.num_sources if adapter.masks_source_images else fewest,
    )
    images = [make_images("one", fewest), make_images("another", other)]
    found = generate_ode(adapter, noise, PROMPTS, NEGATIVE, size, family.guidance_scale, images)
    for i in range(2):
        alone = (
            noise[i : i + 1],
            PROMPTS[i : i + 1],
            NEGATIVE[i : i + 1],
            size,
            family.guidance_scale,
        )
        assert_close(found[i : i + 1], family.generate(pipeline, *alone, images[i : i + 1]))
        assert_close(found[i : i + 1], generate_ode(adapter, *alone, images[i : i + 1]))
        others = generate_ode(adapter, *alone)
        assert (others - found[i]).abs().max() > 1e-3


@pytest.mark.parametrize(
    "family",
    [BY_NAME["qwen_image_edit"], BY_NAME["qwen_image_edit_plus"]],
    indirect=True,
    ids=str,
)
@pytest.mark.parametrize("passed", [False, True], ids=["as diffusers 0.42.1", "ids are passed"])
def test_the_language_model_receives_3d_positions_of_images(family, folder, passed):
    """Also once diffusers passes the token types itself."""
    adapter = load_adapter(str(folder), source_size=Size(96, 160))
    encoder = adapter.pipeline.text_encoder
    forward, calls, positions = encoder.forward, [], []

    def recorded(**given):
        calls.append(given)
        return forward(**given)

    if passed:
        call = type(encoder).__call__
        kind = type(type(encoder).__name__, (type(encoder),), {})
        kind.__call__ = lambda self, **given: call(
            self,
            mm_token_type_ids=(given["input_ids"] == encoder.config.image_token_id).int(),
            **given,
        )
        encoder.__class__ = kind
    encoder.forward = recorded
    encoder.model.language_model.register_forward_pre_hook(
        lambda _, args, given: positions.append(given["position_ids"]), with_kwargs=True
    )
    adapter.encode(PROMPTS[:1], None, family.images(PROMPTS[:1]))
    [given], [found] = calls, positions
    types = adapter.pipeline.processor.create_mm_token_type_ids(given["input_ids"].tolist())
    expected, _ = encoder.model.get_rope_index(
        given["input_ids"],
        mm_token_type_ids=torch.tensor(types),
        image_grid_thw=given["image_grid_thw"],
        attention_mask=given["attention_mask"],
    )
    assert torch.equal(found, expected)
    assert len(given["image_grid_thw"]) == family.num_sources
    time, height, width = found[:, torch.tensor(types).bool()]
    assert not time.equal(height)
    assert not height.equal(width)
    encoder.forward = forward
    assert not encoder._forward_pre_hooks  # the pipeline is left as it was


# T5 and CLIP, Mistral, Qwen2.5-VL with ByT5, Qwen3, UMT5 and CLIP's vision
@pytest.mark.parametrize(
    "family",
    [BY_NAME[name] for name in ("flux", "flux2", "qwen_image_edit", "z_image", "wan_i2v")],
    indirect=True,
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_tensors_have_the_precision_in_which_the_libraries_load_them(folder, dtype):
    """T5's `wo` and rotary frequencies, among others, are in float32."""
    stock = load_pipeline(DiffusionPipeline, str(folder), dtype=dtype).components
    names = [n for n, p in stock.items() if isinstance(p, nn.Module) and n != "vae"]
    found, expected = (
        {
            f"{name}.{each}": tensor.dtype
            for name in names
            for each, tensor in chain(own[name].named_parameters(), own[name].named_buffers())
        }
        for own in (load(folder, dtype=dtype).pipeline.components, stock)
    )
    assert found == expected


class Kept(PreTrainedModel):
    _keep_in_fp32_modules = ["wo"]  # noqa: RUF012
    _keep_in_fp32_modules_strict = ["gate.*weight"]  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__(PreTrainedConfig())
        self.wo, self.gate, self.wi = (nn.Linear(2, 2) for _ in range(3))
        self.register_buffer("saved", torch.ones(1))
        self.register_buffer("frequencies", torch.ones(1), persistent=False)
        self.post_init()


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [
        (torch.float16, {"wo.weight", "wo.bias", "gate.weight", "frequencies"}),
        (torch.bfloat16, {"gate.weight", "frequencies"}),
        (torch.float64, set()),
    ],
    ids=["float16", "bfloat16", "float64"],
)
def test_layers_that_transformers_keeps_in_float32_stay_so(dtype, kept):
    module = Kept()
    freeze(module, dtype)
    dtypes = {n: t.dtype for n, t in chain(module.named_parameters(), module.named_buffers())}
    assert {*dtypes.values()} <= {dtype, torch.float32}
    assert {name for name, own in dtypes.items() if own != dtype} == kept
    assert not any(p.requires_grad for p in module.parameters())


# with one image, two, images that the text encoder sees, a first frame, all frames
@pytest.mark.parametrize(
    "family",
    [BY_NAME[name] for name in ("flux_kontext", "flux2", "qwen_image_edit", "wan22", "wan_v2v")],
    indirect=True,
    ids=str,
)
def test_source_images_are_cached_by_content(family, folder, tmp_path, monkeypatch):
    """The key depends on content and size, but not on the file name."""
    content, other = (make_images(text, family.num_sources) for text in "ab")
    names = [tmp_path / f"{i}.png" for i in range(family.num_sources)]
    for name, data in zip(names, content, strict=True):
        name.write_bytes(data)
    settings = {"prompt_cache": str(tmp_path / "cache")}
    adapter, again, smaller = (load(folder, **settings) for _ in range(3))
    encoded = []
    for each in (adapter, again):
        monkeypatch.setattr(
            each,
            "encode_single",
            lambda text, *images, own=each.encode_single: (
                encoded.append([p.size for p in images]) or own(text, *images)
            ),
        )
    one, three = adapter.encode(["a", "a", "a"], None, [content, tuple(names), other]).select(
        torch.tensor([0, 1])
    )["source"]
    assert encoded == 2 * [[(SOURCE.width, SOURCE.height)] * family.num_sources]
    assert (one - three).abs().max() > 1e-3
    again.encode(["a"], None, [content])
    assert len(encoded) == 2
    smaller = load_adapter(str(folder), source_size=Size(32, 32), **settings)
    small = smaller.encode(["a"], None, [content]).inputs["source"]
    side = adapter.pixels_per_token()
    assert small.shape[1] < len(one) or SOURCE.width // side == 32 // side
    with again.source_images_at(Size(32, 32)):
        assert torch.equal(again.encode(["a"], None, [content]).inputs["source"], small)
    assert torch.equal(again.encode(["a"], None, [content]).inputs["source"][0], one)
    names[0].unlink()
    with raises_user_error(names[0], "No such file or directory"):
        smaller.encode(["a"], None, [tuple(names)])


def brightness(images, prompts, metadata) -> list[float]:
    """Reward computed from the source images."""
    rows = [row["source"] for row in metadata]
    return [np.mean([np.asarray(p) for p in (r if isinstance(r, list) else [r])]) for r in rows]


@pytest.mark.parametrize(
    "family", [f for f in FAMILIES if f.num_sources and f.frames == 1], indirect=True, ids=str
)
def test_rewards_receive_the_source_images(family, trained):
    files = [*trained.folder.glob("samples/*/samples.jsonl")]
    assert {file.parent.name.split("-")[0] for file in files} == {"train", "eval"}
    for row in (json.loads(line) for file in files for line in file.open()):
        images = make_images(row["prompt"], family.num_sources)
        shown = [np.asarray(resize_and_crop(p, SOURCE.width, SOURCE.height)) for p in images]
        assert row["bright"] == pytest.approx(np.mean(shown))


@pytest.mark.parametrize(  # HunyuanVideo's forward pass depends on the values of its masks
    "family",
    [f for f in FAMILIES if f.num_sources and not f.name.startswith("hunyuan")],
    indirect=True,
    ids=str,
)
def test_the_benchmark_counts_the_flops_of_source_images(family, adapter):
    adapter = copy.copy(adapter)
    adapter.source_size, adapter._cache = Size(32, 64), adapter._open_cache()
    given = adapter.encode(["a"], None, [make_images("a", family.num_sources)])
    both = given.select(given.positive)
    more = forward_tflop(adapter, adapter.source_size, both)
    assert more > 0
    if not isinstance(adapter, WanAdapter):  # for which a source image is one of the frames
        alone = {**both, "source": both["source"][:, :0], "source_lengths": torch.tensor([0])}
        assert more > forward_tflop(adapter, adapter.source_size, alone)


def test_a_prompt_in_both_splits_is_counted_once(caplog):
    caplog.set_level("INFO", "flow_grpo")
    prompt = Prompt("a", images=make_images("a", 1))
    check_source_images([prompt, prompt], "model", None, SOURCE, Accelerator(cpu=True))
    assert "1 of 1 prompts" in caplog.text


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("flux", {"guidance_embeds": False}),
        ("flux2_klein", {"is_distilled": True}),
        ("qwen_image_21", {"sample_sigmas": [1.0, 0.8, 0.5, 0.2]}),
    ],
)
def test_a_distilled_model_samples_without_guidance(tmp_path, name, settings):
    family, size = BY_NAME[name], Size(32, 32)
    folder = save_small_pipeline(family, tmp_path / "distilled", **settings)
    adapter = load(folder)
    call = noise_for(adapter, size), PROMPTS, NEGATIVE, size, 1.0
    assert_close(generate_ode(adapter, *call), family.generate(family.stock(folder), *call))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("wan_i2v", {"boundary_ratio": 0.9}),
        ("wan22", {"kind": WanImageToVideoPipeline}),
    ],
    ids=["A14B", "5B under its other name"],
)
def test_videos_of_wan_22_begin_with_the_source_image(tmp_path, name, settings):
    family, size = BY_NAME[name], Size(32, 32, 5)
    two = "boundary_ratio" in settings
    family = replace(family, experts=two, options={}, image_pipeline=None)
    folder = save_small_pipeline(family, tmp_path / "model", **settings)
    adapter = load(folder)
    call = noise_for(adapter, size, 1), PROMPTS[:1], NEGATIVE[:1], size, family.guidance_scale
    assert_close(generate_ode(adapter, *call), family.generate(family.stock(folder), *call))


def test_a_given_frame_does_not_affect_the_ratio(tmp_path):
    """Its velocity leads to the source image for any latents and weights."""
    size, adapter = Size(32, 32, 5), load(save_small_pipeline(BY_NAME["wan22"], tmp_path / "model"))
    adapter = at_size(adapter, size)
    given = adapter.encode(["a"], None, [make_images("a", 1)])
    noise = noise_for(adapter, size, 1)
    transformer = adapter.transformer.requires_grad_()
    velocity = adapter.velocity(transformer, noise, 500.0, given, 1.0)
    source = given.inputs["source"].transpose(1, 2).unflatten(2, noise.shape[3:])
    assert_close((noise - 0.5 * velocity)[:, :, 0], source)
    velocity[:, :, 0].sum().backward(retain_graph=True)
    assert not any(p.grad.any() for p in transformer.parameters())
    velocity.sum().backward()
    assert any(p.grad.any() for p in transformer.parameters())


def test_z_image_turbo_uses_the_eight_noise_levels_of_its_distillation(tmp_path):
    """Nine of its card, whose last is none."""
    schedule = load(save_small_pipeline(BY_NAME["z_image"], tmp_path / "model")).schedule(
        8, 1024, 1024
    )
    sigmas = [3 * x / (1 + 2 * x) for x in np.linspace(1, 0, 9)]
    assert schedule.sigmas == pytest.approx(sigmas)
    assert schedule.timesteps == pytest.approx([1000 * sigma for sigma in sigmas[:-1]])


EXPERTS = pytest.mark.parametrize("family", [BY_NAME["wan22_a14b"]], indirect=True, ids=str)


@EXPERTS
def test_each_transformer_is_trained_on_its_own_noise_levels(family, folder):
    adapter, size = load(folder), Size(32, 32, family.frames)
    policy = make_policy(adapter, rank=2, alpha=4)
    given, noise = adapter.encode(PROMPTS, None), noise_for(adapter, size)

    def velocity(*times: float) -> torch.Tensor:
        policy.transformer.zero_grad()
        found = adapter.velocity(policy.module, noise, torch.tensor(times), given, 1.0)
        found.square().sum().backward()
        return found.detach()

    def trained() -> set[str]:
        assert all(p.grad is not None for p in policy.parameters())  # DDP waits for each
        return {n.split(".")[0] for n, p in policy.trained_parameters().items() if p.grad.any()}

    early, late = velocity(875.0, 875.0), velocity(874.0, 874.0)
    assert trained() == {"transformer_2"}
    both = velocity(874.0, 875.0)
    assert trained() == {"transformer", "transformer_2"}
    assert_close(both, torch.stack([late[0], early[1]]))
    velocity(875.0, 875.0)
    assert trained() == {"transformer"}


@EXPERTS
def test_both_transformers_are_saved_loaded_and_exported(family, folder, trained, tmp_path):
    lora = trained.folder / "checkpoints/latest/lora"
    export(ExportSource.find(lora), str(folder), tmp_path / "exported")
    adapter, size = load(folder), Size(32, 32, family.frames)
    adapter.load_weights(lora)
    call = noise_for(adapter, size), PROMPTS, NEGATIVE, size, family.guidance_scale
    drawn = generate_ode(adapter, *call)
    assert_close(family.generate(family.stock(tmp_path / "exported"), *call), drawn)
    whole = load(tmp_path / "exported")
    make_policy(whole, use_lora=False).save(tmp_path)
    again = load(folder)
    again.load_weights(tmp_path / "transformer")
    weights, found = whole.transformer.state_dict(), again.transformer.state_dict()
    assert weights.keys() == found.keys()
    assert all(torch.equal(weights[name], found[name]) for name in weights)


@EXPERTS
def test_both_transformers_are_pulled_to_their_teachers(trained, run_once):
    """opd reads the LoRA of both, and trains both from 0."""
    lora = trained.folder / "checkpoints/latest/lora"
    plain = {"frames": 1, "sample.guidance_scale": 1.0, "sample.guidance_scale_2": None}
    opd = {"algorithm": "opd", "opd.start": "model", "opd.teachers": {"all": str(lora)}}
    session = run_once("distilled", **opd, **plain, eval_freq=0)
    teacher = session.policy.loras[str(lora)]
    saved = {
        f"{name}.{key}": tensor
        for name, place in (("transformer", ""), ("transformer_2", "transformer_2"))
        for key, tensor in read_lora(lora / place).for_model("transformer").items()
    }
    assert len(teacher.names) == len(saved)
    for name, weight in zip(teacher.names, teacher.copy, strict=True):
        assert torch.equal(weight, saved[name.replace(".default.", ".")])
    moved = {
        n.split(".")[0]
        for n, p in session.policy.trained_parameters().items()
        if "_B" in n and p.any()
    }
    assert moved == {"transformer", "transformer_2"}


@pytest.mark.parametrize(
    ("name", "spoil", "named"),
    [
        ("wan22_a14b", lambda lora: shutil.rmtree(lora / "transformer_2"), "transformer_2"),
        ("wan", lambda lora: None, "transformer_2"),
    ],
    ids=["one of two", "two for one"],
)
@pytest.mark.parametrize("teaches", [True, False], ids=["teacher", "lora_path"])
@EXPERTS
def test_lora_of_another_number_of_transformers_is_rejected_before(
    trained, tmp_path, rejection_message, name, spoil, named, teaches
):
    lora = tmp_path / "lora"
    shutil.copytree(trained.folder / "checkpoints/latest/lora", lora)
    spoil(lora)
    folder = save_small_pipeline(BY_NAME[name], tmp_path / "whole")
    if teaches:
        opd = {"algorithm": "opd", "opd.start": "model", "opd.teachers": {"all": str(lora)}}
        message = rejection_message(BY_NAME[name], folder, **opd)
        assert message.startswith("opd.teachers['all']=")
        assert named in message
        return
    assert named in rejection_message(BY_NAME[name], folder, **{"train.lora_path": str(lora)})
    with raises_user_error(named, field=str(lora)):
        export(ExportSource.find(lora), str(folder), tmp_path / "exported")
    with raises_user_error(named, field=str(lora)):
        load(folder).load_weights(lora)
    with raises_user_error(named, field=str(lora)):
        check_expert_folders(lora, expert_folders_of_model(str(folder)))


@EXPERTS
def test_zero3_and_fsdp1_do_not_shard_two_transformers(folder):
    with raises_user_error("ZeRO-3", "FSDP1", field="pretrained.model", value=str(folder)):
        check_model(str(folder), Size(32, 32, 5), {}, 4, alternates=False)


@EXPERTS
def test_only_the_transformer_in_use_is_resident_with_offload_idle(family, folder):
    size = Size(32, 32, family.frames)
    found = {}
    for offload in (False, True):
        adapter = load(folder, offload_idle=offload)
        policy = make_policy(adapter, rank=2, alpha=4)
        given, noise = adapter.encode(PROMPTS, None), noise_for(adapter, size)

        def velocity(*times: float, adapter=adapter, policy=policy, given=given, noise=noise):
            return adapter.velocity(policy.module, noise, torch.tensor(times), given, 1.0)

        def resident(experts=policy.transformer) -> list[int]:
            """Return the indices of the transformers whose weights are resident."""
            frozen = [
                [p for p in e.parameters() if not p.requires_grad] for e in experts.children()
            ]
            assert all(len({p.numel() > 0 for p in each}) == 1 for each in frozen)
            return [i for i, each in enumerate(frozen) if each[0].numel()]

        assert resident() == ([] if offload else [0, 1])
        with torch.no_grad():
            early, late = velocity(900.0, 875.0), velocity(874.0, 10.0)
        assert resident() == ([1] if offload else [0, 1])
        first = velocity(900.0, 900.0)
        (first + velocity(10.0, 10.0)).sum().backward()  # the backward pass needs both
        gradients = [p.grad for p in policy.parameters()]
        velocity(10.0, 10.0)  # never used
        with torch.no_grad():
            velocity(900.0, 900.0)
        assert resident() == ([0] if offload else [0, 1])
        found[offload] = [early, late, *gradients]
    assert all(map(torch.equal, found[False], found[True]))


@pytest.mark.parametrize("family", [BY_NAME["qwen_image_21"]], indirect=True, ids=str)
def test_text_prefixes_are_computed_once_for_all_steps(folder, monkeypatch):
    size, adapter, texts = Size(32, 32), load(folder), []
    call = noise_for(adapter, size), PROMPTS, NEGATIVE, size, 4.0
    prefix = adapter.encode_text_prefix
    monkeypatch.setattr(
        adapter, "encode_text_prefix", lambda *args: texts.append(args) or prefix(*args)
    )
    drawn = generate_ode(adapter, *call)
    assert len(texts) == len(PROMPTS) + len(NEGATIVE)
    monkeypatch.setattr(adapter, "precompute", lambda transformer, conditioning: conditioning)
    assert torch.equal(generate_ode(adapter, *call), drawn)
    assert len(texts) == (1 + STEPS) * 4


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.frames > 1], indirect=True, ids=str)
def test_a_video_of_one_frame_is_an_image(family, pipeline, adapter):
    size = Size(32, family.wide, 1)
    call = noise_for(adapter, size), PROMPTS, NEGATIVE, size, family.guidance_scale
    if adapter.source_is_video:
        call = *call, [make_images(prompt, 1) for prompt in PROMPTS]
    found = generate_ode(adapter, *call)
    assert found.shape == (2, 3, 32, family.wide)
    assert_close(found, family.generate(pipeline, *call))


def test_images_are_encoded_like_samples(family, adapter, monkeypatch):
    """The data anchor relies on it."""
    assert adapter.encodes_images == (family.frames == 1)
    size = Size(32, family.wide)
    monkeypatch.setattr(adapter, "source_size", size)
    [image] = make_images("data", 1)
    if adapter.encodes_images:
        latents = adapter.encode_image_latents(image)
        assert latents.shape == (1, *adapter.latent_shape(*size))
        assert adapter.decode(latents).shape == (1, 3, 32, family.wide)


def test_noisy_steps_preserve_the_scale_of_the_latents(family, adapter):
    """A schedule may start slightly below 1, where the noise would be far too large."""
    size = Size(32, 32, family.frames)
    adapter = at_size(adapter, size)
    dynamics = Dynamics(
        adapter.schedule(STEPS, *size), kind="flow", guidance_scale=family.unguided_scale
    )
    trajectory = Denoiser(adapter, adapter.transformer, dynamics).sample(
        noise_for(adapter, size),
        adapter.encode(PROMPTS, None, family.images(PROMPTS)),
        steps=range(STEPS - 1),
        generators=eval_generators(0, [0, 1]),
    )
    assert 0.5 < trajectory.latents.std() < 2


def test_the_trained_policy_is_the_one_that_sampled(trained):
    _, epoch = map(json.loads, (trained.folder / "metrics.jsonl").open())
    assert epoch["train/first_update_ratio_dev"] == 0
    assert epoch["train/ratio_mean"] != 1  # of the second update


def test_the_trained_lora_reproduces_the_images_in_the_stock_pipeline(family, folder, trained):
    pipeline, size = family.stock(folder), Size(32, family.wide, family.frames)
    lora = trained.folder / "checkpoints/latest/ema_lora"
    family.load_lora(pipeline, lora)
    prompts = trained.test_prompts
    generators = eval_generators(trained.config.seed, range(len(prompts)))
    drawn = family.generate(
        pipeline,
        initial_noise(generators, trained.adapter.latent_shape(*size), "cpu"),
        [p.prompt for p in prompts],
        [p.negative_prompt for p in prompts],
        size,
        family.guidance_scale,
    )
    middle = drawn[:, family.frames // 2] if family.frames > 1 else drawn
    expected = 255 * middle.movedim(1, -1).numpy()
    before, after = (evaluated(trained, epoch) for epoch in (0, 1))
    assert np.abs(after - expected).max() < 0.5 + 1e-2  # files have whole numbers
    assert np.abs(after - before).max() > 1


def evaluated(session: Session, epoch: int) -> np.ndarray:
    """Return images of the test prompts, or the middle frames of videos."""
    files = sorted((session.folder / f"samples/eval-{epoch:05d}").glob("[0-9]*.png"))
    assert len(files) == len(session.test_prompts)
    return np.stack([np.asarray(Image.open(file)) for file in files]).astype(float)


def test_video_samples_are_saved_as_videos(family, trained):
    rows = (trained.folder / "samples/eval-00001/samples.jsonl").read_text().splitlines()
    kind = ".gif" if family.frames > 1 else ".png"
    for row in map(json.loads, rows):
        with Image.open(trained.folder / "samples/eval-00001" / row["file"]) as sample:
            assert (Path(row["file"]).suffix, sample.size) == (kind, (family.wide, 32))
            assert getattr(sample, "n_frames", 1) == family.frames


def check_lora(policy: Policy, adapter: ModelAdapter, expected: set[str], folder: Path) -> None:
    """Check the layers, rank and alpha of each transformer, and its saved file."""
    adapter.save_lora(folder, policy.transformer, policy.transformer.state_dict())
    for subfolder, part, _ in iter_experts(policy.transformer):
        layers = {n: m for n, m in part.named_modules() if isinstance(m, LoraLayer)}
        assert layers.keys() == expected
        assert {(*m.r.values(), *m.lora_alpha.values()) for m in layers.values()} == {(2, 5)}
        saved = read_lora(folder / subfolder)
        assert saved.settings["target_modules"] == sorted(saved.settings["target_modules"])
        trained = get_peft_model_state_dict(part)
        assert all(torch.equal(saved.for_model("transformer")[n], w) for n, w in trained.items())


@pytest.mark.parametrize(
    ("family", "own"),
    [
        *((family, True) for family in FAMILIES),
        *((family, False) for family in FAMILIES if family.unused_layers or family.experts),
    ],
    indirect=["family"],
    ids=str,
)
def test_every_lora_layer_gets_a_gradient_except_unused_ones(family, folder, own, tmp_path):
    """With an own LoRA on all linear layers, or an external one on all default layers."""
    size = Size(32, 32, family.frames)
    adapter = at_size(load(folder), size)
    if own:
        policy = make_policy(adapter, rank=2, alpha=5, target_modules="all-linear")
        linears = {
            n
            for n, m in build_meta_transformer(str(folder)).named_modules()
            if isinstance(m, nn.Linear)
        }
        excluded = {n for n in linears if policy._is_unused(n)}
        check_lora(policy, adapter, linears - excluded, tmp_path)
    else:
        other = load(folder)
        other.transformer.add_adapter(LoraConfig(r=2, target_modules=other.lora_targets))
        other.save_lora(tmp_path, other.transformer, other.transformer.state_dict())
        policy = make_policy(adapter, lora_path=str(tmp_path))
    layers = [n for n, _ in policy.transformer.named_modules() if n.endswith("lora_A.default")]
    for target in adapter.lora_targets:
        assert any(layer.endswith(f"{target}.lora_A.default") for layer in layers), target
    generator = torch.Generator().manual_seed(0)
    for name, parameter in policy.trained_parameters().items():
        if "lora_B" in name:  # it starts at zero, where A has no gradient
            parameter.data.normal_(std=0.1, generator=generator)
    guided = adapter.is_guided(family.guidance_scale)
    negative = NEGATIVE if guided else None
    conditioning = adapter.encode(PROMPTS, negative, family.images(PROMPTS))
    noise = noise_for(adapter, size)
    times = torch.tensor([950.0, 500.0])  # two transformers share the batch

    def gradients() -> list[torch.Tensor]:
        """Every parameter has one: DDP waits for each."""
        velocity = adapter.velocity(
            policy.module, noise, times, conditioning, family.guidance_scale
        )
        return torch.autograd.grad((velocity * noise).sum(), policy.parameters())

    found = gradients()
    moving = {n for n, g in zip(policy.trained_parameters(), found, strict=True) if g.any()}
    idle = {n.split(".lora_")[0] for n in policy.trained_parameters().keys() - moving}
    assert idle == set(family.unused_layers)
    policy.transformer.enable_gradient_checkpointing()
    assert all(map(torch.equal, gradients(), found))


@pytest.mark.parametrize(
    "family", [BY_NAME["flux_kontext"], BY_NAME["wan22_a14b"]], indirect=True, ids=str
)
def test_settings_that_save_memory_or_time_do_not_change_the_result(run_once, trained, tmp_path):
    settings = {"offload_idle": True, "prompt_cache": str(tmp_path / "cache")}
    lean = run_once("lean", **settings, **{"train.gradient_checkpointing": True})
    assert lean.adapter.transformer.is_gradient_checkpointing
    folders = [s.folder / "checkpoints/latest/lora" for s in (trained, lean)]
    for file in folders[0].rglob("*.safetensors"):
        expected, found = (load_file(f / file.relative_to(folders[0])) for f in folders)
        assert expected.keys() == found.keys()
        for name in expected:
            assert torch.equal(expected[name], found[name]), name


def test_caching_and_offloading_do_not_change_the_images(
    family, folder, adapter, tmp_path, monkeypatch
):
    size = Size(32, 32, family.frames)
    call = noise_for(adapter, size), PROMPTS, NEGATIVE, size, family.guidance_scale
    expected = generate_ode(adapter, *call)
    settings = dict(prompt_cache=str(tmp_path), offload_idle=True, device="cpu:0")
    assert torch.equal(generate_ode(load(folder, **settings), *call), expected)
    again = load(folder, **settings)
    monkeypatch.setattr(
        again, "encode_single", lambda text, *_: pytest.fail(f"encoded {text!r} again")
    )
    assert torch.equal(generate_ode(again, *call), expected)


# CLIP and T5, Qwen2.5-VL, Qwen3, UMT5 and CLIP's vision
@pytest.mark.parametrize(
    "family",
    [BY_NAME[name] for name in ("flux_kontext", "qwen_image_edit", "z_image", "wan_i2v")],
    indirect=True,
    ids=str,
)
def test_only_encoders_are_quantized_and_have_their_own_cache(family, folder, tmp_path):
    def embeds(**settings) -> torch.Tensor:
        adapter = load(folder, **settings)
        low = {n for n, part in adapter.pipeline.components.items() if _has_low_bits(part)}
        asked = "encoder_precision" in settings
        assert low == ({*adapter.encoders} - {"vae"} if asked else set())
        images = [make_images(p, min(2, adapter.num_source_images[-1])) for p in PROMPTS]
        return adapter.encode(PROMPTS, None, images).inputs["embeds"]

    full = embeds(prompt_cache=str(tmp_path))
    low = embeds(prompt_cache=str(tmp_path), encoder_precision="nf4")
    assert 0 < (low - full).norm() < 0.5 * full.norm()
    assert torch.equal(embeds(encoder_precision="nf4", offload_idle=True, device="cpu:0"), low)


@pytest.mark.parametrize("family", [BY_NAME["flux_kontext"]], indirect=True, ids=str)
def test_the_vae_is_not_quantized_when_it_encodes(folder):
    plain = load(folder)
    plain.vae.attention = nn.Linear(64, 64)  # as full-size ones have
    low = type(plain)(plain.pipeline, encoder_precision="nf4")
    assert _has_low_bits(low.pipeline.text_encoder)
    assert not _has_low_bits(low.vae)


def _has_low_bits(part: object) -> bool:
    return isinstance(part, nn.Module) and any(
        isinstance(m, QuantizedLinear) for m in part.modules()
    )


@pytest.fixture
def rejection_message(tmp_path):
    """Return the message that rejects a run with a copy of the model without weights."""

    def rejection_message(family: Family, folder: Path, index: dict | None = None, **fields) -> str:
        hollow = tmp_path / "hollow"
        shutil.copytree(folder, hollow, ignore=shutil.ignore_patterns("*.safetensors"))
        whole = json.loads((hollow / "model_index.json").read_text())
        (hollow / "model_index.json").write_text(json.dumps({**whole, **(index or {})}))
        dataset = save_prompts(tmp_path / "dataset", family.num_sources)
        fields = {**run_fields(family, hollow, dataset), **fields}
        with raises_user_error() as caught:
            build_session(short_config(tmp_path / "logs", "run", **fields))
        assert not (tmp_path / "logs").exists()
        return str(caught.value)

    return rejection_message


def test_weights_are_read_after_all_other_checks(family, folder, rejection_message):
    assert "cannot be loaded" in rejection_message(family, folder)


@pytest.mark.parametrize("family", [BY_NAME["wan_v2v"]], indirect=True, ids=str)
@pytest.mark.parametrize("frames", [1, 9])
def test_source_videos_of_another_length_are_rejected_before(
    family, folder, rejection_message, frames
):
    """The length must be that of the generated video; damaged frames are rejected as well."""
    message = rejection_message(family, folder, frames=frames)
    assert "has 5 images" in message
    assert f"the {frames} frames of a source video" in message


def test_unsupported_frames_are_rejected_before(family, folder, rejection_message):
    message = rejection_message(family, folder, frames=6)
    assert message.startswith("frames=6 ")
    assert bool(re.search("multiple of (4|8)", message)) == (family.frames > 1)


@pytest.mark.parametrize("side", ["height", "width"])
def test_unsupported_sizes_are_rejected_before(family, folder, rejection_message, side):
    message = rejection_message(family, folder, **{side: 36})
    assert re.match(rf"{side}=36 .*\b(8|16|32)\b", message)


@pytest.mark.parametrize(
    ("name", "settings", "index", "fields", "shown"),
    [
        (
            *("sd3", {}, {"_class_name": "StableDiffusionXLPipeline"}, {}),
            ["StableDiffusionXLPipeline", "StableDiffusion3Pipeline", "custom_models"],
        ),
        (
            *("flux", {"guidance_embeds": False}, {}, {}),
            ["sample.guidance_scale=3.5", "schnell", "--config.sample.guidance_scale=1"],
        ),
        *(
            (
                *("flux", {"guidance_embeds": False}, {}),
                {"algorithm": "nft", "nft.times": 2, "sample.guidance_scale": 1.0, field: 2.0},
                [f"{field}=2.0", "schnell", f"--config.{field}=1"],
            )
            for field in ("sample.eval_guidance_scale", "nft.train_guidance", "nft.kl_guidance")
        ),
        (
            *("flux2_klein", {"is_distilled": True}, {}, {}),
            ["sample.guidance_scale=4.0", "klein", "--config.sample.guidance_scale=1"],
        ),
        (
            *("qwen_image", {}, {}, {"sample.eval_num_steps": 1}),
            ["1 ", "sample.num_steps", "sample.eval_num_steps", "2"],
        ),
        (
            *("wan", {}, {"boundary_ratio": 0.875}, {}),
            ["boundary_ratio=0.875", "transformer_2=None"],
        ),
        (
            *("wan", {}, {}, {"sample.guidance_scale_2": 3.0}),
            ["sample.guidance_scale_2=3.0", "one transformer"],
        ),
        (
            *("wan22_a14b", {}, {}, {"sample.guidance_scale": 1.0}),
            ["sample.guidance_scale_2=3.0", "(sample.guidance_scale)"],
        ),
        *(
            (
                *("qwen_image_edit", {}, {"processor": kind}, {}),
                ["pretrained.model=", "processor", ".".join(kind)],
            )
            for kind in (["transformers", "Qwen3VLProcessor"], ["mine", "Qwen2VLProcessor"])
        ),
    ],
    ids=[
        *("other class", "schnell", "its evaluation", "trained", "KL", "distilled", "one step"),
        *("no second", "scale of no second", "unguided", "other processor", "custom processor"),
    ],
)
def test_an_incompatible_model_is_rejected_before(
    tmp_path, rejection_message, name, settings, index, fields, shown
):
    folder = save_small_pipeline(BY_NAME[name], tmp_path / "whole", **settings)
    message = rejection_message(BY_NAME[name], folder, index, **fields)
    for each in shown:
        assert each in message


def cut_off(folder: Path) -> None:
    file = sorted(folder.glob("*.png"))[0]
    file.write_bytes(file.read_bytes()[:-40])


def enlarge(folder: Path) -> None:
    Image.new("1", (10_000, 10_000)).save(sorted(folder.glob("*.png"))[0])


def remove(folder: Path) -> None:
    sorted(folder.glob("*.png"))[0].unlink()


def add_masks(folder: Path) -> None:
    """Add masks of the size of the images, except for one."""
    for file in folder.glob("*.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        rows = [{**row, "mask": row["images"][0]} for row in rows]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    Image.new("1", (7, 9)).save(folder / "mask.png")
    file.write_text(file.read_text().replace(rows[2]["mask"] + '"}', 'mask.png"}'))


@pytest.mark.parametrize(
    ("name", "sources", "spoil", "fields", "shown"),
    [
        ("sd3", 1, None, {}, "train_metadata.jsonl:1.* 1 .*hollow.*--config.image_column=none"),
        ("flux_kontext", 2, None, {}, r"jsonl:1.* 2 .*hollow.* 1\b"),
        ("flux_kontext", 1, cut_off, {}, r"jsonl:\d: .*png cannot be decoded"),
        ("flux_kontext", 1, remove, {}, r"jsonl:\d.*\.png"),
        ("flux_kontext", 1, enlarge, {}, "png .*10000 x 10000 .*67108864"),
        ("flux_kontext", 1, add_masks, {}, r"jsonl:3.*mask.* 7 x 9 .*\d+ x \d+"),
        (
            *("flux_kontext", 1, None, {"image_column": "photo"}),
            r"jsonl:1.*photo.*prompt, negative_prompt, images.*image_column",
        ),
        ("qwen_image_edit", 0, None, {}, r'jsonl:1.*hollow.*"?image'),
    ],
    ids=[
        *("none supported", "too many", "truncated", "missing", "too large", "wrong mask"),
        *("no such column", "none given"),
    ],
)
def test_incompatible_source_images_are_rejected_before(
    tmp_path, rejection_message, name, sources, spoil, fields, shown
):
    folder = save_small_pipeline(BY_NAME[name], tmp_path / "whole")
    dataset = save_prompts(tmp_path / "images", sources)
    if spoil:
        spoil(dataset)
    message = rejection_message(BY_NAME[name], folder, dataset=str(dataset), **fields)
    assert re.search(shown, message), message


def test_source_images_can_be_ignored(tmp_path, rejection_message):
    folder = save_small_pipeline(BY_NAME["sd3"], tmp_path / "whole")
    fields = {"dataset": str(save_prompts(tmp_path / "images", 1)), "image_column": "none"}
    assert "cannot be loaded" in rejection_message(BY_NAME["sd3"], folder, **fields)


def test_different_numbers_of_source_images_need_a_model_that_masks_them(
    tmp_path, rejection_message
):
    name = "qwen_image_edit_plus"
    folder = save_small_pipeline(BY_NAME[name], tmp_path / "whole")
    dataset = save_prompts(tmp_path / "images", 2)
    file = dataset / "test_metadata.jsonl"
    file.write_text(re.sub(r', "[^"]*-1.png"', "", file.read_text(), count=1))
    message = rejection_message(BY_NAME[name], folder, dataset=str(dataset))
    assert re.search(r"test_metadata.jsonl:1.* 1 .*train_metadata.jsonl:1.* 2", message)


def test_a_component_is_not_a_pipeline(family, folder, dataset, tmp_path):
    fields = run_fields(family, folder / "transformer", dataset)
    with raises_user_error("model_index.json", field="pretrained.model"):
        build_session(short_config(tmp_path, "run", **fields))
