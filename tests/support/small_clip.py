"""A small randomly initialized CLIP, and the reference embeddings that transformers computes."""

import json
import math
import string
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer, CLIPConfig, CLIPModel

from flow_grpo.errors import UserError

SIZE, LENGTH, DIM = 32, 12, 16
MEAN = np.array([0.48145466, 0.4578275, 0.40821073])
STD = np.array([0.26862954, 0.26130258, 0.27577711])
SCALE = 60.0


def random_image(width, height, mode="RGB", seed=0):
    coarse = np.random.default_rng(seed).integers(0, 255, (3, 3, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height)).convert(mode)


IMAGES = [
    random_image(32, 32),
    random_image(70, 40, seed=1),
    random_image(20, 50, "L", seed=2),
    random_image(64, 64, "RGBA", seed=3),
    Image.new("RGB", (33, 47), "orange"),
]
PROMPTS = ["a cat", "two dogs", "a cat", "words beyond the limit of the model", ""]
METADATA = [{}] * len(IMAGES)


def write_processor(folder):
    characters = [*string.ascii_lowercase, *(c + "</w>" for c in string.ascii_lowercase)]
    tokens = [*characters, "<|startoftext|>", "<|endoftext|>"]
    folder.mkdir(exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({t: i for i, t in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "CLIPTokenizer"}')
    sizes = {"size": {"shortest_edge": SIZE}, "crop_size": {"height": SIZE, "width": SIZE}}
    preprocessor = {"image_processor_type": "CLIPImageProcessor", **sizes}
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return len(tokens)


def randomize_weights(module):
    """Add noise to the weights: at their initial scale all images have similar embeddings."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn_like(parameter)


# The fixture has another name than its function, because tests import one and request the other.
@pytest.fixture(scope="module", name="folder")
def clip_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip")
    vocabulary = write_processor(folder)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_act": "gelu"}
    text = {"vocab_size": vocabulary, "max_position_embeddings": LENGTH}
    ends = {"bos_token_id": vocabulary - 2, "eos_token_id": vocabulary - 1}
    config = CLIPConfig(
        text_config={"hidden_size": 24, "intermediate_size": 48, **sizes, **text, **ends},
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "image_size": SIZE,
            "patch_size": 8,
            **sizes,
        },
        projection_dim=DIM,
    )
    torch.manual_seed(0)
    model = CLIPModel(config)
    randomize_weights(model)
    model.logit_scale.data.fill_(math.log(SCALE))
    model.save_pretrained(folder)
    return folder


def reference_preprocess(image, size=SIZE):
    """Resize the shorter side to `size` (bicubic), crop the centre, and normalize as CLIP does."""
    image = image.convert("RGB")
    short = min(image.size)
    image = image.resize([int(size * side / short) for side in image.size], Image.BICUBIC)
    left, top = (image.width - size) // 2, (image.height - size) // 2
    image = image.crop((left, top, left + size, top + size))
    array = (np.asarray(image) / 255 - MEAN) / STD
    return torch.tensor(array, dtype=torch.float32).permute(2, 0, 1)[None]


@pytest.fixture(scope="module", name="plain")
def reference_embeddings(folder):
    """Embeddings of each image and prompt by itself, without batches or padding."""
    model = CLIPModel.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    images, texts = [], []
    with torch.no_grad():
        for image, prompt in zip(IMAGES, PROMPTS, strict=True):
            tokens = tokenizer([prompt], truncation=True, max_length=LENGTH, return_tensors="pt")
            output = model(pixel_values=reference_preprocess(image), **tokens)
            images.append(output.image_embeds[0])
            texts.append(output.text_embeds[0])
    images, texts = torch.stack(images), torch.stack(texts)
    cosine = (images * texts).sum(-1) / (images.norm(dim=-1) * texts.norm(dim=-1))
    assert cosine.std() > 0.05  # otherwise a scorer that ignores an input could pass
    return SimpleNamespace(images=images, cosine=cosine.tolist())


def close(values, tolerance=1e-5):
    return pytest.approx(values, abs=tolerance)


def scores_of(scorer, images=IMAGES, prompts=PROMPTS):
    result = scorer(images, prompts, [{}] * len(images))
    return result[0] if isinstance(result, tuple) else result


def error_message(build, *args, **kwargs):
    with pytest.raises(UserError) as caught:
        build(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)
