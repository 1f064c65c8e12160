"""Names of each family's layers in diffusers, in the original checkpoints and in ComfyUI's LoRAs.

A LoRA in the format of kohya names layers as the original checkpoint does, where q, k and v are
often one matrix. ComfyUI accepts these names, and for some families also those of diffusers, which
it maps to rows of the matrix. Read in the authors' code:

| family | names in LoRA files | where |
|---|---|---|
| all | `diffusion_model.` or `lora_unet_` + original | comfyanonymous/ComfyUI comfy/lora.py:179 |
| SD3 | + `transformer.` + diffusers | comfy/lora.py:210, comfy/utils.py:388 |
| SD3 | `lora_unet_` + original | kohya-ss/sd-scripts networks/lora_sd3.py:233 |
| FLUX.1 | + `transformer.` + diffusers | comfy/lora.py:255, comfy/utils.py:573 |
| FLUX.1 | `lora_unet_` + original | kohya-ss/sd-scripts networks/convert_flux_lora.py:7 |
| FLUX.2 | as FLUX.1, where it has the same layers | comfy/model_base.py:921 |
| FLUX.2 | `lora_unet_` + original | kohya-ss/musubi-tuner networks/lora_flux_2.py:42 |
| Qwen-Image | original names are those of diffusers | comfy/lora.py:306, lora_qwen_image.py:42 |
| Qwen-Image 2.1 | names of diffusers, gate and up fused | diffusers single_file_utils.py:4404 |
| Z-Image | + `diffusion_model.` + diffusers | comfy/lora.py:316, comfy/utils.py:679 |
| Z-Image | `lora_unet_` + diffusers | kohya-ss/musubi-tuner networks/lora_zimage.py:42 |
| Wan | original names only | comfy/ldm/wan/model.py:52, 193, 478; lora_wan.py:42 |

The scale of a layer is `.alpha` / rank, or 1 without `.alpha` (comfy/weight_adapter/lora.py:174).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

# Layers by their names in the original checkpoint, "{}" being the number of a block. A tuple lists
# layers of diffusers that are consecutive rows of one matrix.
Layers = dict[str, tuple[str, ...]]
# Modulation whose two halves, scale and shift, are swapped between diffusers and the original; in
# the blocks of SD3 only that of the last one, which has no other rows (comfy/utils.py:355, 421).
SCALE_SHIFT_LAYERS = ("norm_out.linear", "transformer_blocks.{}.norm1_context.linear")


@dataclass(frozen=True)
class LoraKeys:
    """Names of the layers of one transformer class.

    Args:
        layers: Layers of diffusers by name in the original checkpoint.
        prefix: Prefix with which ComfyUI accepts the names of diffusers; "" if it does not.
        original: Whether to write original names where possible, because ComfyUI does not map all
            names of diffusers.
    """

    layers: Layers
    prefix: str = ""
    original: bool = False

    def key(self, layer: str) -> tuple[str, int, int] | None:
        """Return under which name ComfyUI accepts the LoRA on a layer of diffusers.

        Returns:
            The name, the position of the layer in the matrix of that name and the number of layers
            in the matrix; or None if there is no name.
        """
        template, number = _find_template(layer, self._original_names, ".")
        if template is None:
            return None
        name = self._original_names[template]
        parts = self.layers[name]
        maps_diffusers = bool(self.prefix) and (
            not self.original or len(parts) > 1 or _is_swapped(name, template)
        )
        if maps_diffusers:
            return f"{self.prefix}{layer}", 0, 1
        key = f"diffusion_model.{name}".replace("{}", number)
        return key, parts.index(template), len(parts)

    def find(self, name: str) -> tuple[list[str], bool] | None:
        """Return the layers of diffusers that have this name in a LoRA file without its prefix.

        Args:
            name: Name in diffusers or in the original checkpoint, possibly with "_" for ".".

        Returns:
            The layers that are rows of one matrix, and whether its scale and shift are swapped; or
            None if no layer has this name.
        """
        template, number = _find_template(name.replace(".", "_"), self._spellings, "_")
        if template is None:
            return None
        layers, swap = self._spellings[template]
        return [layer.replace("{}", number) for layer in layers], swap

    @cached_property
    def _original_names(self) -> dict[str, str]:
        return {layer: name for name, layers in self.layers.items() for layer in layers}

    @cached_property
    def _spellings(self) -> dict[str, tuple[tuple[str, ...], bool]]:
        """Layers by both of their names with "_" for "."; a name in both means the same layer."""
        found = {n: (layers, _is_swapped(n, layers[0])) for n, layers in self.layers.items()}
        found |= {layer: ((layer,), False) for layer in self._original_names}
        return {name.replace(".", "_"): each for name, each in found.items()}


def _is_swapped(name: str, layer: str) -> bool:
    return layer in SCALE_SHIFT_LAYERS and name != layer


def _find_template(
    name: str, templates: Mapping[str, object], separator: str
) -> tuple[str | None, str]:
    """Return the template of a name, and the number of its block."""
    if name in templates:
        return name, ""
    end = re.escape(separator)
    if match := re.search(rf"{end}(0|[1-9][0-9]*){end}", name):
        template = f"{name[: match.start(1)]}{{}}{name[match.end(1) :]}"
        if template in templates:
            return template, match[1]
    return None, ""


def _block(name: str, layer: str, inside: Mapping[str, str]) -> Layers:
    """Return the layers of a block; several that form one matrix are separated by spaces."""
    return {
        f"{name}.{{}}.{original}": tuple(f"{layer}.{{}}.{each}" for each in layers.split())
        for original, layers in inside.items()
    }


def _single(layers: Mapping[str, str]) -> Layers:
    return {name: (layer,) for name, layer in layers.items()}


_TIME_TEXT = {
    f"{name}.{original}": f"time_text_embed.{embedder}.linear_{i}"
    for name, embedder, layers in (
        ("time_in", "timestep_embedder", ("in_layer", "out_layer")),
        ("vector_in", "text_embedder", ("in_layer", "out_layer")),
        ("guidance_in", "guidance_embedder", ("in_layer", "out_layer")),
    )
    for i, original in enumerate(layers, 1)
}
_FLUX_ATTENTION = {
    "img_attn.qkv": "attn.to_q attn.to_k attn.to_v",
    "img_attn.proj": "attn.to_out.0",
    "txt_attn.qkv": "attn.add_q_proj attn.add_k_proj attn.add_v_proj",
    "txt_attn.proj": "attn.to_add_out",
}
_FLUX_ENDS = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "final_layer.linear": "proj_out",
    "final_layer.adaLN_modulation.1": "norm_out.linear",
}

SD3 = LoraKeys(
    _block(
        "joint_blocks",
        "transformer_blocks",
        {
            "x_block.attn.qkv": "attn.to_q attn.to_k attn.to_v",
            "x_block.attn.proj": "attn.to_out.0",
            "x_block.attn2.qkv": "attn2.to_q attn2.to_k attn2.to_v",
            "x_block.attn2.proj": "attn2.to_out.0",
            "x_block.mlp.fc1": "ff.net.0.proj",
            "x_block.mlp.fc2": "ff.net.2",
            "x_block.adaLN_modulation.1": "norm1.linear",
            "context_block.attn.qkv": "attn.add_q_proj attn.add_k_proj attn.add_v_proj",
            "context_block.attn.proj": "attn.to_add_out",
            "context_block.mlp.fc1": "ff_context.net.0.proj",
            "context_block.mlp.fc2": "ff_context.net.2",
            "context_block.adaLN_modulation.1": "norm1_context.linear",
        },
    )
    | _single(
        {
            "context_embedder": "context_embedder",
            "t_embedder.mlp.0": "time_text_embed.timestep_embedder.linear_1",
            "t_embedder.mlp.2": "time_text_embed.timestep_embedder.linear_2",
            "y_embedder.mlp.0": "time_text_embed.text_embedder.linear_1",
            "y_embedder.mlp.2": "time_text_embed.text_embedder.linear_2",
            "final_layer.linear": "proj_out",
            "final_layer.adaLN_modulation.1": "norm_out.linear",
        }
    ),
    "transformer.",
)
FLUX = LoraKeys(
    _block(
        "double_blocks",
        "transformer_blocks",
        _FLUX_ATTENTION
        | {
            "img_mlp.0": "ff.net.0.proj",
            "img_mlp.2": "ff.net.2",
            "txt_mlp.0": "ff_context.net.0.proj",
            "txt_mlp.2": "ff_context.net.2",
            "img_mod.lin": "norm1.linear",
            "txt_mod.lin": "norm1_context.linear",
        },
    )
    | _block(
        "single_blocks",
        "single_transformer_blocks",
        {
            "linear1": "attn.to_q attn.to_k attn.to_v proj_mlp",
            "linear2": "proj_out",
            "modulation.lin": "norm.linear",
        },
    )
    | _single(_TIME_TEXT | _FLUX_ENDS),
    "transformer.",
)
FLUX2 = LoraKeys(
    _block(
        "double_blocks",
        "transformer_blocks",
        _FLUX_ATTENTION
        | {
            "img_mlp.0": "ff.linear_in",
            "img_mlp.2": "ff.linear_out",
            "txt_mlp.0": "ff_context.linear_in",
            "txt_mlp.2": "ff_context.linear_out",
        },
    )
    | _block(
        "single_blocks",
        "single_transformer_blocks",
        {"linear1": "attn.to_qkv_mlp_proj", "linear2": "attn.to_out"},
    )
    | _single(
        _FLUX_ENDS
        | {
            "time_in.in_layer": "time_guidance_embed.timestep_embedder.linear_1",
            "time_in.out_layer": "time_guidance_embed.timestep_embedder.linear_2",
            "guidance_in.in_layer": "time_guidance_embed.guidance_embedder.linear_1",
            "guidance_in.out_layer": "time_guidance_embed.guidance_embedder.linear_2",
            "double_stream_modulation_img.lin": "double_stream_modulation_img.linear",
            "double_stream_modulation_txt.lin": "double_stream_modulation_txt.linear",
            "single_stream_modulation.lin": "single_stream_modulation.linear",
        }
    ),
    "transformer.",
    original=True,
)


def _unchanged(*layers: str) -> Layers:
    """Return layers that have the same name in the original checkpoint."""
    return {layer: (layer,) for layer in layers}


_QWEN_TIME = [f"time_text_embed.timestep_embedder.linear_{i}" for i in (1, 2)]
_QWEN_BLOCK = "transformer_blocks.{}"
QWEN_IMAGE = LoraKeys(
    _unchanged(
        *(
            f"{_QWEN_BLOCK}.attn.{projection}"
            for projection in (
                *("to_q", "to_k", "to_v", "to_out.0"),
                *("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
            )
        ),
        *(
            f"{_QWEN_BLOCK}.{side}_{layer}"
            for side in ("img", "txt")
            for layer in ("mlp.net.0.proj", "mlp.net.2", "mod.1")
        ),
        *_QWEN_TIME,
        *("img_in", "txt_in", "norm_out.linear", "proj_out"),
    ),
    "diffusion_model.",
)
QWEN_IMAGE_21 = LoraKeys(
    _unchanged(
        *(f"{_QWEN_BLOCK}.attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
        f"{_QWEN_BLOCK}.img_mlp.out",
        *_QWEN_TIME,
        *("img_in", "txt_in.in_layer", "txt_in.out_layer", "modulation.1"),
        *("norm_out.linear", "proj_out"),
    )
    | _block(
        "transformer_blocks",
        "transformer_blocks",
        {"img_mlp.gate_up": "img_mlp.gate_layer img_mlp.proj"},
    ),
)
_Z_IMAGE_BLOCK = {
    "attention.qkv": "attention.to_q attention.to_k attention.to_v",
    "attention.out": "attention.to_out.0",
    **{name: name for name in ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3")},
    "adaLN_modulation.0": "adaLN_modulation.0",
}
Z_IMAGE = LoraKeys(
    _block("layers", "layers", _Z_IMAGE_BLOCK)
    | _block("noise_refiner", "noise_refiner", _Z_IMAGE_BLOCK)
    | _block("context_refiner", "context_refiner", _Z_IMAGE_BLOCK)
    | _unchanged("t_embedder.mlp.0", "t_embedder.mlp.2", "cap_embedder.1")
    | _single(
        {
            "x_embedder": "all_x_embedder.2-1",
            "final_layer.linear": "all_final_layer.2-1.linear",
            "final_layer.adaLN_modulation.1": "all_final_layer.2-1.adaLN_modulation.1",
        }
    ),
    "diffusion_model.",
)
WAN = LoraKeys(
    _block(
        "blocks",
        "blocks",
        {
            f"{original}.{letter}": f"{attention}.{projection}"
            for original, attention in (("self_attn", "attn1"), ("cross_attn", "attn2"))
            for letter, projection in zip("qkvo", ("to_q", "to_k", "to_v", "to_out.0"), strict=True)
        }
        | {
            "cross_attn.k_img": "attn2.add_k_proj",
            "cross_attn.v_img": "attn2.add_v_proj",
            "ffn.0": "ffn.net.0.proj",
            "ffn.2": "ffn.net.2",
        },
    )
    | _single(
        {
            "text_embedding.0": "condition_embedder.text_embedder.linear_1",
            "text_embedding.2": "condition_embedder.text_embedder.linear_2",
            "time_embedding.0": "condition_embedder.time_embedder.linear_1",
            "time_embedding.2": "condition_embedder.time_embedder.linear_2",
            "time_projection.1": "condition_embedder.time_proj",
            "img_emb.proj.1": "condition_embedder.image_embedder.ff.net.0.proj",
            "img_emb.proj.3": "condition_embedder.image_embedder.ff.net.2",
            "head.head": "proj_out",
        }
    )
)

FAMILY_KEYS = {  # by pipeline class
    "StableDiffusion3Pipeline": SD3,
    "FluxPipeline": FLUX,
    "FluxKontextPipeline": FLUX,
    "Flux2Pipeline": FLUX2,
    "Flux2KleinPipeline": FLUX2,
    "QwenImagePipeline": QWEN_IMAGE,
    "QwenImage21Pipeline": QWEN_IMAGE_21,
    "QwenImageEditPipeline": QWEN_IMAGE,
    "QwenImageEditPlusPipeline": QWEN_IMAGE,
    "ZImagePipeline": Z_IMAGE,
    "WanPipeline": WAN,
    "WanImageToVideoPipeline": WAN,
    "WanVideoToVideoPipeline": WAN,
}
