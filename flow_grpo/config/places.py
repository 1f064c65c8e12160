"""Files that come with the library: scripts, configs, prompts and the small model.

They are in the checkout, or, where the package was installed from a wheel, in its folder `share`.
"""

import os
from dataclasses import replace
from pathlib import Path

from ml_collections import ConfigDict

from flow_grpo.config.fields import SharedFields

_PACKAGE = Path(__file__).parents[1]
ROOT = _PACKAGE / "share" if (_PACKAGE / "share").is_dir() else _PACKAGE.parent


def find(path: str) -> str:
    """A relative path as it is where there is such a file, or none of ours either; else ours."""
    if path and not os.path.exists(path) and os.path.exists(ROOT / path):  # one too long is not
        return str(ROOT / path)
    return path


def find_files(config: ConfigDict) -> None:
    """Let `dataset/ocr` and `assets/tiny-sd3` of a config work from any folder."""
    config.dataset, config.pretrained.model = find(config.dataset), find(config.pretrained.model)


def with_files(settings: SharedFields) -> SharedFields:
    """Let `dataset/ocr` and `assets/tiny-sd3` of frozen settings work from any folder."""
    model = replace(settings.pretrained, model=find(settings.pretrained.model))
    return replace(settings, dataset=find(settings.dataset), pretrained=model)


def find_config(argument: str) -> str:
    """Let path/to/config.py or path/to/config.py:preset be ours, where there is no such file."""
    path, colon, preset = argument.partition(":")
    return find(path) + colon + preset
