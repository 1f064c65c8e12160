"""A small model folder with its own code, in the format of DeQA-Score."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

MODELING = '''
import numpy as np
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel


class BrightnessConfig(PretrainedConfig):
    model_type = "brightness"


class BrightnessForCausalLM(PreTrainedModel):
    """Model that scores from 1 (black) to 5 (white), in half precision like DeQA-Score."""

    config_class = BrightnessConfig

    def __init__(self, config):
        super().__init__(config)
        self.levels = nn.Linear(1, 1)
        self.post_init()

    def score(self, images):
        assert all(image.mode == "RGB" for image in images)
        bright = torch.tensor([[np.asarray(image).mean() / 255] for image in images])
        return self.levels(bright.half().to(self.device))[:, 0]
'''


def write_small_deqa(folder: Path, modeling: str = MODELING) -> str:
    """Write the folder of a model that scores the brightness of an image from 1 to 5."""
    (folder / "modeling_brightness.py").write_text(modeling)
    code = "modeling_brightness.Brightness"
    auto_map = {"AutoConfig": f"{code}Config", "AutoModelForCausalLM": f"{code}ForCausalLM"}
    config = {"model_type": "brightness", "auto_map": auto_map}
    (folder / "config.json").write_text(json.dumps(config))
    weights = {"levels.weight": torch.full((1, 1), 4.0), "levels.bias": torch.ones(1)}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return str(folder)
