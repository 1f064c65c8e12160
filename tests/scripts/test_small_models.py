"""Small random pipelines of the real classes, loaded and sampled by stock diffusers."""

import json
import sys
from pathlib import Path

import make_small
import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from untrained import small

from flow_grpo.diffusion.models.processors import load_pipeline
from flow_grpo.rewards.scorers.jpeg import jpeg_compressibility

PROMPTS = ["a cat", "a red sign on a long wooden wall"]
# classes of the pipeline and its components
PARTS = {
    "flux": ["FluxPipeline", "CLIPTextModel", "T5EncoderModel", "CLIPTokenizer", "T5Tokenizer"],
    "flux2": ["Flux2Pipeline", "Mistral3ForConditionalGeneration", "TokenizersBackend"],
    "flux2_klein": ["Flux2KleinPipeline", "Qwen3ForCausalLM", "Qwen2Tokenizer"],
    "flux_kontext": ["FluxKontextPipeline", "CLIPTextModel", "T5EncoderModel", "T5Tokenizer"],
    "hunyuan_video15": ["HunyuanVideo15Pipeline", "Qwen2_5_VLTextModel", "ByT5Tokenizer"],
    "hunyuan_video15_i2v": ["HunyuanVideo15ImageToVideoPipeline", "SiglipVisionModel"],
    "ltx2": ["LTX2Pipeline", "Gemma3ForConditionalGeneration", "LTX2VocoderWithBWE"],
    "qwen_image": ["QwenImagePipeline", "Qwen2_5_VLForConditionalGeneration", "Qwen2Tokenizer"],
    "qwen_image_21": ["QwenImage21Pipeline", "Qwen3VLForConditionalGeneration", "TextProcessor"],
    "sd3": ["StableDiffusion3Pipeline", "CLIPTextModelWithProjection", "T5EncoderModel"],
    "wan": ["WanPipeline", "UMT5EncoderModel", "T5Tokenizer", "UniPCMultistepScheduler"],
    "wan22": ["WanPipeline", "UMT5EncoderModel", "T5Tokenizer", "UniPCMultistepScheduler"],
    "wan22_a14b": ["WanPipeline", "UMT5EncoderModel", "T5Tokenizer", "WanTransformer3DModel"],
    "wan_v2v": ["WanVideoToVideoPipeline", "UMT5EncoderModel", "T5Tokenizer"],
    "z_image": ["ZImagePipeline", "Qwen3Model", "Qwen2Tokenizer"],
}
CALLS = {  # arguments of a call with guidance
    "flux": dict(guidance_scale=3.5, max_sequence_length=48),
    "flux2": dict(guidance_scale=4.0, max_sequence_length=48),
    "flux2_klein": dict(guidance_scale=4.0, max_sequence_length=48),
    "flux_kontext": dict(guidance_scale=2.5, max_sequence_length=48, max_area=32 * 64),
    "qwen_image": dict(true_cfg_scale=4.0, negative_prompt=[" ", " "]),
    "qwen_image_21": dict(true_cfg_scale=4.0, negative_prompt=[" ", " "]),
    "sd3": dict(guidance_scale=4.5, max_sequence_length=48),
    "wan": dict(guidance_scale=5.0, max_sequence_length=48, num_frames=5),
    "wan22": dict(guidance_scale=5.0, max_sequence_length=48, num_frames=5),
    "wan22_a14b": dict(guidance_scale=4.0, max_sequence_length=48, num_frames=5),
    "z_image": dict(guidance_scale=4.0, max_sequence_length=64),
}


@pytest.fixture(scope="module", params=CALLS)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("small") / family
    small.build(family).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pipeline(folder) -> DiffusionPipeline:
    pipeline = load_pipeline(DiffusionPipeline, str(folder))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture
def draw(family, pipeline):
    """Return a function that samples images; videos have their frames in dimension 1."""

    def draw(prompts: list[str], seeds: list[int], **options) -> np.ndarray:
        settings = dict(height=32, width=64, num_inference_steps=2, output_type="np")
        generator = [torch.Generator().manual_seed(seed) for seed in seeds]
        call = {**settings, **CALLS[family], **options}
        drawn = np.asarray(pipeline(prompt=list(prompts), generator=generator, **call)[0])
        return drawn[..., :3] if call["output_type"] == "np" else drawn  # some have alpha

    return draw


def weights(pipeline: DiffusionPipeline) -> dict[str, torch.Tensor]:
    parts = {n: p for n, p in pipeline.components.items() if isinstance(p, torch.nn.Module)}
    return {f"{n}.{name}": w for n, p in parts.items() for name, w in p.state_dict().items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def test_pipelines_are_small_and_have_the_real_classes(family, folder, pipeline):
    kinds = {type(part).__name__ for part in (pipeline, *pipeline.components.values())}
    assert set(PARTS[family]) <= kinds
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) < 2e6


def test_samples_depend_on_prompt_and_noise(draw):
    images = draw(PROMPTS, [0, 0])
    assert images.shape[-3:] == (32, 64, 3)
    assert np.isfinite(images).all()
    assert images.std(axis=(-3, -2)).min() > 0.02
    assert ((images == 0) | (images == 1)).mean() < 0.2
    assert np.abs(images[0] - images[1]).mean() > 1e-3
    assert np.abs(draw(PROMPTS, [0, 1]) - images)[1].mean() > 1e-2


def test_guided_samples_are_bounded_and_differ_in_reward(draw):
    square = dict(width=32, num_inference_steps=8)
    samples = np.concatenate([draw(PROMPTS, seeds, **square) for seeds in ([0, 1], [2, 3])])
    pixels = (255 * samples.reshape(-1, 32, 32, 3)).round().astype(np.uint8)
    images = [Image.fromarray(array) for array in pixels]
    rewards = jpeg_compressibility(images, [""] * len(images), [{}] * len(images))
    assert np.ptp(rewards) > 0.01 / 500  # ten bytes
    latents = draw(PROMPTS, [0, 1], **square, output_type="latent")
    assert 0.5 < latents.std() < 2


def test_weights_depend_only_on_the_seed(family, pipeline):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    again = small.build(family, seed=0)
    assert torch.equal(torch.get_rng_state(), before)
    assert equal(weights(again), weights(pipeline))
    assert not any(getattr(part, "training", False) for part in again.components.values())
    assert not equal(weights(small.build(family, seed=1)), weights(pipeline))


def test_sizes_are_configurable(family, pipeline):
    larger = small.build(family, layers=3, text_width=64)
    prompt = dict(prompt=["a cat"], device="cpu")
    if family == "sd3":
        prompt.update(prompt_2=None, prompt_3=None)
    with torch.no_grad():
        embeds, narrower = (p.encode_prompt(**prompt)[0] for p in (larger, pipeline))
    assert embeds[0].shape[-1] == 2 * narrower[0].shape[-1]
    more = larger.transformer.state_dict().keys() - pipeline.transformer.state_dict().keys()
    assert any(".2." in name for name in more)  # the third layer


@pytest.mark.parametrize(
    ("name", "count"), [("qwen_image", 34), ("qwen_image_edit", 64), ("qwen_image_edit_plus", 64)]
)
def test_qwen_image_drops_exactly_its_template(name, count, tmp_path):
    pipeline = small.build(name)
    before, _ = pipeline.prompt_template_encode.replace("<|vision_start|>", "{}", 1).split("{}", 1)
    tokens = pipeline.tokenizer(before).input_ids
    assert len(tokens) == pipeline.prompt_template_encode_start_idx == count
    pipeline.save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index.get("processor", ["transformers", "Qwen2VLProcessor"])[1] == "Qwen2VLProcessor"


def test_flux_schnell_has_no_guidance_embedding():
    names = (
        weights(small.build("flux")).keys()
        - weights(small.build("flux", guidance_embeds=False)).keys()
    )
    assert names
    assert all("guidance_embedder" in name for name in names)


def test_families_are_buildable():
    assert set(small.FAMILIES) >= set(CALLS)
    assert "components" not in small.FAMILIES


def test_the_script_saves_a_pipeline_and_reports_errors_in_one_line(tmp_path, monkeypatch, capsys):
    def run(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["make_small.py", *map(str, arguments)])
        make_small.main()
        return capsys.readouterr().out

    def error_lines(*arguments: object) -> list[str]:
        with pytest.raises(SystemExit) as end:
            run(*arguments)
        assert end.value.code == 2
        return capsys.readouterr().err.splitlines()

    folder = tmp_path / "model"
    assert run("flux", folder, "--seed", 3) == f"wrote a small random FluxPipeline to {folder}\n"
    written = DiffusionPipeline.from_pretrained(folder)
    assert equal(weights(written), weights(small.build("flux", seed=3)))
    capsys.readouterr()  # discard the loading progress

    [line] = error_lines("flux", folder)
    assert line.startswith(f"error: {folder} already exists")
    (tmp_path / "file").touch()
    inside = tmp_path / "file" / "model"
    [line] = error_lines("wan", inside)
    assert line.startswith("error: ")
    assert f"{inside}: Not a directory" in line
    assert "invalid choice: 'flax' (choose from" in error_lines("flax", tmp_path / "new")[-1]
    assert not (tmp_path / "new").exists()
