"""Weights of open_clip's CLIP models under the names that transformers' CLIPModel has for them."""

import re

from flow_grpo.rewards.loading import Weights

# open_clip keeps the image tower under "visual." and the text tower at the top.
RENAMED = {
    "logit_scale": "logit_scale",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.ln_pre.weight": "vision_model.pre_layrnorm.weight",  # transformers' spelling
    "visual.ln_pre.bias": "vision_model.pre_layrnorm.bias",
    "visual.ln_post.weight": "vision_model.post_layernorm.weight",
    "visual.ln_post.bias": "vision_model.post_layernorm.bias",
}
# Here x @ matrix, there a linear layer, which keeps its matrix transposed.
TRANSPOSED = {
    "text_projection": "text_projection.weight",
    "visual.proj": "visual_projection.weight",
}
LAYER = re.compile(r"(visual\.)?transformer\.resblocks\.(\d+)\.(.+?)[._](weight|bias)")
PARTS = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}


def from_open_clip(weights: Weights) -> Weights:
    converted = {new: weights[old] for old, new in RENAMED.items()}
    converted |= {new: weights[old].T.contiguous() for old, new in TRANSPOSED.items()}
    for name, value in weights.items():
        match = LAYER.fullmatch(name)
        if not match:
            continue
        visual, number, part, kind = match.groups()
        tower = "vision_model" if visual else "text_model"
        layer = f"{tower}.encoder.layers.{number}"
        if part == "attn.in_proj":  # queries, keys and values in one matrix
            for letter, piece in zip("qkv", value.chunk(3), strict=True):
                converted[f"{layer}.self_attn.{letter}_proj.{kind}"] = piece.contiguous()
        else:
            converted[f"{layer}.{PARTS[part]}.{kind}"] = value
    return converted
