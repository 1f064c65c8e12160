"""LoRAs under the names of ComfyUI and kohya: exact round trips, and the scale of every layer."""

import math
import re

import pytest
import torch
from diffusers import FluxPipeline, QwenImagePipeline, WanPipeline, ZImagePipeline
from diffusers.loaders import lora_conversion_utils
from diffusers.loaders import single_file_utils as checkpoints
from families import FAMILIES
from peft import LoraConfig, get_peft_model_state_dict
from torch import Tensor, nn
from untrained import small
from user_errors import raises_user_error

from flow_grpo.diffusion.models import ADAPTERS
from flow_grpo.diffusion.models.kohya import from_kohya, is_kohya, to_kohya
from flow_grpo.diffusion.models.kohya_keys import FAMILY_KEYS
from flow_grpo.perf.lora import lora_layers
from flow_grpo.training.lora_files import (
    IncompatibleWeights,
    check_lora_values,
    check_plain_lora,
)

SD3, FLUX, FLUX2 = "StableDiffusion3Pipeline", "FluxPipeline", "Flux2Pipeline"
QUERY = "transformer_blocks.0.attn.to_q"
A, B = "lora_A.weight", "lora_B.weight"
WITHOUT_NAMES = {
    *("LTX2Pipeline", "LTX2ImageToVideoPipeline"),
    *("HunyuanVideo15Pipeline", "HunyuanVideo15ImageToVideoPipeline"),
}
CONVERTED = [
    f for f in FAMILIES if f.name not in ("ltx2", "hunyuan_video15", "hunyuan_video15_i2v")
]
READERS = {  # of our files
    "flux": FluxPipeline,
    "qwen_image": QwenImagePipeline,
    "z_image": ZImagePipeline,
    "wan": WanPipeline,
}
CHECKPOINT_CONVERTERS = {  # from the layers of the original checkpoint to those of diffusers
    "Flux2KleinPipeline": checkpoints.convert_flux2_transformer_checkpoint_to_diffusers,
    "WanImageToVideoPipeline": checkpoints.convert_wan_transformer_to_diffusers,
    "WanVideoToVideoPipeline": checkpoints.convert_wan_transformer_to_diffusers,
    FLUX2: checkpoints.convert_flux2_transformer_checkpoint_to_diffusers,
    "QwenImage21Pipeline": checkpoints.convert_qwen_image21_transformer_checkpoint_to_diffusers,
    "ZImagePipeline": checkpoints.convert_z_image_transformer_checkpoint_to_diffusers,
    "WanPipeline": checkpoints.convert_wan_transformer_to_diffusers,
    SD3: checkpoints.convert_sd3_transformer_checkpoint_to_diffusers,
}

# Layers of diffusers whose names ComfyUI maps to rows of its own (comfy/utils.py:388, 573, 679) or
# has itself (comfy/ldm/qwen_image/model.py:66, 199, 352), by the list of blocks that they are in.
ATTENTION = (
    "attn.to_q attn.to_k attn.to_v attn.to_out.0 "
    "attn.add_q_proj attn.add_k_proj attn.add_v_proj attn.to_add_out "
)
FEED_FORWARD = "ff.net.0.proj ff.net.2 ff_context.net.0.proj ff_context.net.2 "
NORMS = "norm1.linear norm1_context.linear "
EMBEDDERS = (
    "time_text_embed.timestep_embedder.linear_1 time_text_embed.timestep_embedder.linear_2 "
    "time_text_embed.text_embedder.linear_1 time_text_embed.text_embedder.linear_2 "
)
ENDS = "context_embedder norm_out.linear proj_out "
Z_IMAGE_BLOCK = (
    "attention.to_q attention.to_k attention.to_v attention.to_out.0 "
    "feed_forward.w1 feed_forward.w2 feed_forward.w3 "
)
FLUX_MAP = {
    "transformer_blocks": ATTENTION + FEED_FORWARD + NORMS,
    "single_transformer_blocks": "attn.to_q attn.to_k attn.to_v proj_mlp proj_out norm.linear",
    "": EMBEDDERS
    + ENDS
    + "x_embedder time_text_embed.guidance_embedder.linear_1 "
    + "time_text_embed.guidance_embedder.linear_2",
}
COMFYUI_MAPS = {  # by prefix and transformer class
    ("transformer.", "SD3Transformer2DModel"): {
        "transformer_blocks": ATTENTION + FEED_FORWARD + NORMS,
        "": EMBEDDERS + ENDS,
    },
    ("transformer.", "FluxTransformer2DModel"): FLUX_MAP,
    ("transformer.", "Flux2Transformer2DModel"): FLUX_MAP,  # it has FLUX.1's class
    ("diffusion_model.", "QwenImageTransformer2DModel"): {
        "transformer_blocks": ATTENTION
        + "img_mlp.net.0.proj img_mlp.net.2 txt_mlp.net.0.proj txt_mlp.net.2 img_mod.1 txt_mod.1",
        "": EMBEDDERS + "img_in txt_in norm_out.linear proj_out",
    },
    ("diffusion_model.", "ZImageTransformer2DModel"): {
        "layers": Z_IMAGE_BLOCK + "adaLN_modulation.0",
        "noise_refiner": Z_IMAGE_BLOCK + "adaLN_modulation.0",
        "context_refiner": Z_IMAGE_BLOCK,
        "": "all_x_embedder.2-1 all_final_layer.2-1.linear all_final_layer.2-1.adaLN_modulation.1 "
        "t_embedder.mlp.0 t_embedder.mlp.2 cap_embedder.1",
    },
}


def comfyui_names(transformer: nn.Module) -> set[str]:
    """Return the names of diffusers that ComfyUI accepts for a transformer of this class."""
    names = set()
    for (prefix, kind), lists in COMFYUI_MAPS.items():
        for blocks, layers in lists.items() if kind == type(transformer).__name__ else ():
            count = len(getattr(transformer, blocks)) if blocks else 1
            starts = [f"{prefix}{blocks}.{i}." if blocks else prefix for i in range(count)]
            names.update(start + layer for start in starts for layer in layers.split())
    return names


class Model:
    """A small transformer of a family, and a LoRA on each of its linear layers."""

    def __init__(self, name: str) -> None:
        pipeline = small.build(name)
        self.family, self.transformer = type(pipeline).__name__, pipeline.transformer
        self.shapes = {
            name: module.weight.shape
            for name, module in self.transformer.named_modules()
            if isinstance(module, nn.Linear)
        }
        self.layers = list(self.shapes)
        generator = torch.Generator().manual_seed(0)
        self.lora = {
            f"{layer}.{name}": torch.randn(size, generator=generator)
            for layer, (rows, width) in self.shapes.items()
            for name, size in ((A, (4, width)), (B, (rows, 4)))
        }
        self.settings = {"r": 4, "lora_alpha": 8}


@pytest.fixture(scope="module", params=CONVERTED, ids=str)
def model(request) -> Model:
    return Model(request.param.name)


def deltas(lora: dict[str, Tensor], scales: dict[str, float]) -> dict[str, Tensor]:
    """Return what a LoRA adds to the weight of each layer, in float64."""
    return {
        layer: scale * (lora[f"{layer}.{B}"].double() @ lora[f"{layer}.{A}"].double())
        for layer, scale in scales.items()
    }


def file_deltas(file: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what ComfyUI adds for each name in a file: alpha / rank times up @ down."""
    names = [key.removesuffix(f".{A}") for key in file if key.endswith(f".{A}")]
    return deltas(file, {n: file[f"{n}.alpha"].item() / len(file[f"{n}.{A}"]) for n in names})


class Checkpoint(dict):
    """State dict with zeros for the missing layers, which a converter expects."""

    def pop(self, key: str) -> Tensor:
        return super().pop(key, torch.zeros(6))


def original_layers(model: Model) -> dict[str, list[torch.Size]]:
    """Return the shapes of the layers in each matrix of the original checkpoint."""
    found = {}
    for original, layers in FAMILY_KEYS[model.family].layers.items():
        for number in "01":
            names = [layer.replace("{}", number) for layer in layers]
            if all(name in model.shapes for name in names):
                found[original.replace("{}", number)] = [model.shapes[name] for name in names]
    return found


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5, check_dtype=False)


def test_every_other_family_has_names():
    assert set(FAMILY_KEYS) == set(ADAPTERS) - WITHOUT_NAMES


def test_round_trip_returns_the_same_tensors_and_scales(model):
    file = to_kohya(model.lora, model.settings, model.family)
    assert is_kohya(file)
    assert not is_kohya(model.lora)
    found, settings = from_kohya(file, model.family)
    assert_equal(found, model.lora)
    check_plain_lora("LoRA", settings)
    check_lora_values("LoRA", settings, found)
    model.transformer.add_adapter(LoraConfig(**settings))
    assert get_peft_model_state_dict(model.transformer).keys() == found.keys()
    assert {layer.scaling["default"] for layer in lora_layers(model.transformer)} == {2.0}
    model.transformer.delete_adapters("default")


def test_round_trip_in_bfloat16(model):
    lora = {name: tensor.bfloat16() for name, tensor in model.lora.items()}
    found, _ = from_kohya(to_kohya(lora, None, model.family), model.family)
    assert_equal(found, lora)


def test_comfyui_applies_every_layer(model):
    """A name in the file is one that ComfyUI maps, or that diffusers converts from checkpoints."""
    file = to_kohya(model.lora, model.settings, model.family)
    mapped = comfyui_names(model.transformer)
    found, original = {}, {}
    for name, delta in file_deltas(file).items():
        start, _, layer = name.partition(".")
        if name in mapped:
            found[layer] = delta
        else:
            assert start == "diffusion_model"
            original[f"{layer}.weight"] = delta
    if original:
        converted = CHECKPOINT_CONVERTERS[model.family](original)
        found |= {name.removesuffix(".weight"): delta for name, delta in converted.items()}
    assert_close(found, deltas(model.lora, dict.fromkeys(model.layers, 2.0)))


def test_files_with_original_names(model):
    """Fused and renamed layers are those of diffusers' converter of checkpoints."""
    if model.family not in CHECKPOINT_CONVERTERS:
        return  # FLUX.1 below; Qwen-Image has the names of diffusers
    generator = torch.Generator().manual_seed(1)
    file, checkpoint = {}, Checkpoint()
    for name, shapes in original_layers(model).items():
        down = torch.randn(6, shapes[0][1], generator=generator)
        up = torch.randn(sum(rows for rows, _ in shapes), 6, generator=generator)
        key = "lora_unet_" + name.replace(".", "_")
        file |= {f"{key}.lora_down.weight": down, f"{key}.lora_up.weight": up}
        file[f"{key}.alpha"] = torch.tensor(3.0)
        checkpoint[f"{name}.weight"] = up.double() @ down.double() / 2
    assert is_kohya(file)
    lora, settings = from_kohya(file, model.family)
    assert (settings["r"], settings["lora_alpha"]) == (6, 3)
    converted = CHECKPOINT_CONVERTERS[model.family](checkpoint)
    expected = {
        f"{layer}.weight": each
        for layer, each in deltas(lora, dict.fromkeys(model.layers, 0.5)).items()
    }
    assert_close({name: converted[name] for name in expected}, expected)


def test_flux_files_of_kohya_as_diffusers_reads_them():
    """diffusers knows the sizes of the released model only."""
    width = 3072
    names = {
        "double_blocks_0_img_attn_qkv": (3 * width, width),
        "double_blocks_3_txt_attn_qkv": (192, 64),
        "double_blocks_0_txt_mlp_2": (32, 64),
        "double_blocks_18_img_mod_lin": (192, 32),
        "single_blocks_0_linear1": (7 * width, width),
        "single_blocks_37_linear2": (32, 64),
        "single_blocks_1_modulation_lin": (96, 32),
    }
    generator = torch.Generator().manual_seed(2)
    file = {}
    for name, (rows, columns) in names.items():
        file[f"lora_unet_{name}.lora_down.weight"] = torch.randn(4, columns, generator=generator)
        file[f"lora_unet_{name}.lora_up.weight"] = torch.randn(rows, 4, generator=generator)
        file[f"lora_unet_{name}.alpha"] = torch.tensor(2.0)
    lora, settings = from_kohya(file, FLUX)
    assert (settings["r"], settings["lora_alpha"]) == (4, 2)
    theirs = lora_conversion_utils._convert_kohya_flux_lora_to_diffusers(file)
    theirs = {name.removeprefix("transformer."): tensor for name, tensor in theirs.items()}
    assert theirs.keys() == lora.keys()
    for name in lora:
        if name.endswith(A):
            probe = torch.ones(lora[name].shape[1])
            up = name.replace(A, B)
            ours = 0.5 * (lora[up] @ (lora[name] @ probe))
            torch.testing.assert_close(ours, theirs[up] @ (theirs[name] @ probe))


@pytest.mark.parametrize("name", READERS)
def test_diffusers_reads_our_files(name):
    """For other families it ignores or rejects `.alpha`: publish in its own format for it."""
    model, pipeline = Model(name), READERS[name]
    layers = [each for each in model.layers if re.search(r"(blocks|layers|refiner)\.", each)]
    lora = {f"{layer}.{name}": model.lora[f"{layer}.{name}"] for layer in layers for name in (A, B)}
    file = to_kohya(lora, model.settings, model.family)
    file = {name: tensor.clone() for name, tensor in file.items()}  # Wan's reader scales in place
    scales = dict.fromkeys(layers, 1.0)
    if pipeline is FluxPipeline:
        read, alphas = pipeline.lora_state_dict(file, return_alphas=True)
        for layer in layers:
            scales[layer] = alphas[f"transformer.{layer}.alpha"].item() / 4
    else:
        read = pipeline.lora_state_dict(file)
    read = {name.removeprefix("transformer."): tensor for name, tensor in read.items()}
    assert read.keys() == lora.keys()
    assert_close(deltas(read, scales), deltas(lora, dict.fromkeys(layers, 2.0)))


def test_scale_of_peft_with_patterns_and_rslora():
    model = Model("sd3")
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["attn.to_q", "attn.to_k", "proj_out"],
        rank_pattern={"0.attn.to_q": 2},
        alpha_pattern={"attn.to_k": 5, "^proj_out": 3},
        use_rslora=True,
        init_lora_weights=False,
    )
    model.transformer.add_adapter(config)
    lora = get_peft_model_state_dict(model.transformer)
    file = to_kohya(lora, config.to_dict(), SD3)
    expected = {
        f"transformer.{name}": module.get_delta_weight("default").double()
        for name, module in model.transformer.named_modules()
        if hasattr(module, "get_delta_weight")
    }
    assert_close(file_deltas(file), expected)
    found, settings = from_kohya(file, SD3)
    assert_equal(found, lora)
    model.transformer.delete_adapters("default")
    model.transformer.add_adapter(LoraConfig(**settings))
    for name, module in model.transformer.named_modules():
        if hasattr(module, "get_delta_weight"):
            alpha, rank = file[f"transformer.{name}.alpha"].item(), len(lora[f"{name}.{A}"])
            assert module.r["default"] == rank
            assert module.scaling["default"] == alpha / rank


def test_block_diagonal_files_are_split_exactly():
    """As musubi-tuner and sd-scripts write q, k and v; each layer keeps its own rank and alpha."""
    names = [f"layers.1.attention.to_{letter}" for letter in "qkv"]
    lora = {f"{name}.{A}": torch.randn(4, 8) for name in names}
    lora |= {f"{name}.{B}": torch.randn(8, 4) for name in names}
    key = "lora_unet_layers_1_attention_qkv"
    file = {
        f"{key}.lora_down.weight": torch.cat([lora[f"{name}.{A}"] for name in names]),
        f"{key}.lora_up.weight": torch.block_diag(*(lora[f"{name}.{B}"] for name in names)),
        f"{key}.alpha": torch.tensor(24.0),
    }
    found, settings = from_kohya(file, "ZImagePipeline")
    assert_equal(found, lora)
    assert (settings["r"], settings["lora_alpha"]) == (4, 8)


def test_fused_layers_without_some_of_their_loras():
    """ComfyUI has the gate and the projection of Qwen-Image 2.1 in one matrix."""
    name = "transformer_blocks.0.img_mlp.proj"
    lora = {f"{name}.{A}": torch.randn(2, 4), f"{name}.{B}": torch.randn(6, 2)}
    family = "QwenImage21Pipeline"
    file = to_kohya(lora, {"r": 2, "lora_alpha": 2}, family)
    assert file[f"diffusion_model.transformer_blocks.0.img_mlp.gate_up.{B}"].shape == (12, 4)
    found, settings = from_kohya(file, family)
    assert_equal(found, lora)
    assert (settings["r"], settings["lora_alpha"]) == (2, 2)


def plain(prefix: str = f"transformer.{QUERY}") -> dict[str, Tensor]:
    return {
        f"{prefix}.lora_down.weight": torch.randn(2, 4),
        f"{prefix}.lora_up.weight": torch.randn(4, 2),
        f"{prefix}.alpha": torch.tensor(1.0),
    }


@pytest.mark.parametrize(
    "prefix",
    [
        f"transformer.{QUERY}",
        f"base_model.model.{QUERY}",
        QUERY,
        "lora_transformer_transformer_blocks_0_attn_to_q",
        "lycoris_transformer_blocks_0_attn_to_q",
    ],
)
def test_names_of_other_programs(prefix):
    file = plain(prefix)
    found, settings = from_kohya(file, FLUX)
    assert found.keys() == {f"{QUERY}.{A}", f"{QUERY}.{B}"}
    assert (settings["r"], settings["lora_alpha"]) == (2, 1)
    assert is_kohya(file)
    del file[f"{prefix}.alpha"]  # ComfyUI: alpha is the rank
    assert from_kohya(file, FLUX)[1]["lora_alpha"] == 2


def test_dora_is_read_but_not_written():
    key = "lora_unet_joint_blocks_0_x_block_attn_qkv"
    file = {
        f"{key}.lora_down.weight": torch.randn(2, 4),
        f"{key}.lora_up.weight": torch.randn(12, 2),
        f"{key}.dora_scale": torch.arange(12.0)[:, None],
    }
    lora, settings = from_kohya(file, SD3)
    assert settings["use_dora"]
    magnitude = lora["transformer_blocks.0.attn.to_k.lora_magnitude_vector"]
    assert magnitude.tolist() == [4.0, 5.0, 6.0, 7.0]
    with raises_user_error("DoRA", field="a.safetensors"):
        to_kohya(lora, settings, SD3, "a.safetensors")
    with raises_user_error(".dora_scale", field="LoRA"):
        from_kohya(file | plain("transformer.transformer_blocks.1.attn.to_q"), SD3)


BAD_FILES = {
    "unknown layer": plain("transformer.transformer_blocks.0.attn.to_x"),
    "layer of another model": plain("lora_unet_double_blocks_0_img_attn_proj"),
    "text encoder": plain("lora_te1_text_model_encoder_layers_0_self_attn_q_proj"),
    "LoKr": plain() | {f"transformer.{QUERY}.lokr_w1": torch.ones(2)},
    "bias": plain() | {f"transformer.{QUERY}.diff_b": torch.ones(2)},
    "left-over alpha": plain()
    | {"transformer.transformer_blocks.1.attn.to_q.alpha": torch.ones(1)},
    "one matrix": {f"transformer.{QUERY}.lora_down.weight": torch.ones(2, 4)},
    "two names": plain() | plain("lora_transformer_transformer_blocks_0_attn_to_q"),
    "two endings": plain() | {f"transformer.{QUERY}.{A}": torch.ones(2, 4)},
    "shapes": plain() | {f"transformer.{QUERY}.lora_up.weight": torch.ones(4, 3)},
    "convolution": plain() | {f"transformer.{QUERY}.lora_up.weight": torch.ones(4, 2, 1, 1)},
    "alpha": plain() | {f"transformer.{QUERY}.alpha": torch.tensor(math.nan)},
    "fused rows": plain("lora_unet_joint_blocks_0_x_block_attn_qkv"),
    "empty": {},
}


@pytest.mark.parametrize("file", BAD_FILES.values(), ids=BAD_FILES)
def test_bad_files_are_rejected(file):
    with raises_user_error("lora.safetensors", field="lora.safetensors") as caught:
        from_kohya(file, SD3, "lora.safetensors")
    wrong_model = any(word in key for key in file for word in ("to_x", "double", "joint"))
    assert isinstance(caught.value, IncompatibleWeights) == wrong_model


def test_loras_without_a_name_in_comfyui_are_rejected():
    lora = {f"{QUERY}.{A}": torch.ones(2, 4), f"{QUERY}.{B}": torch.ones(4, 2)}
    with raises_user_error("FluxControlPipeline", field="LoRA"):
        to_kohya(lora, None, "FluxControlPipeline")
    with raises_user_error("pos_embed.proj", field="LoRA"):
        to_kohya({f"pos_embed.proj.{k[len(QUERY) + 1 :]}": v for k, v in lora.items()}, None, SD3)
    with raises_user_error("lora_B.bias", field="LoRA"):
        to_kohya(lora | {f"{QUERY}.lora_B.bias": torch.ones(4)}, None, SD3)
    gate, up = (f"transformer_blocks.0.img_mlp.{name}" for name in ("gate_layer", "proj"))
    lora = {f"{gate}.{A}": torch.ones(2, 4), f"{gate}.{B}": torch.ones(4, 2)}
    lora |= {f"{up}.{A}": torch.ones(1, 4), f"{up}.{B}": torch.ones(4, 1)}
    with raises_user_error("gate_up", field="LoRA"):
        to_kohya(lora, {"r": 2, "lora_alpha": 2}, "QwenImage21Pipeline")
