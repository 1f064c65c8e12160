"""Files that come with the library: scripts, configs, prompts and the small model.

They are in the checkout, or, where the package was installed from a wheel, in its folder `share`.
"""

import logging
import os
import re
from collections.abc import Callable
from dataclasses import replace
from glob import glob
from pathlib import Path

from ml_collections import ConfigDict

from flow_grpo.config.fields import SharedFields
from flow_grpo.errors import UserError

logger = logging.getLogger("flow_grpo")
CLONE = (
    "it is in Flow-GRPO's repository: git clone https://github.com/yifan123/flow_grpo "
    "../Flow-GRPO, and give --config.dataset=../Flow-GRPO/dataset/pickscore_sfw"
)
OWN = "give rows with an image each: --config.dataset=path/to/data (docs/editing.md)"
NOT_HERE = {  # what presets train on that does not ship: how to get it
    "dataset/geneval": "make it: python {} coco dataset/geneval --size 50000",
    "dataset/counting_edit": OWN,
    "dataset/pickscore": CLONE,
    "dataset/sharegpt4o_image_mini": OWN,
    "dataset/text_math": "give questions of your own: --config.dataset=path/to/data (docs/vlm.md)",
}
_PACKAGE = Path(__file__).parents[1]
ROOT = _PACKAGE / "share" if (_PACKAGE / "share").is_dir() else _PACKAGE.parent


def find(path: str) -> str:
    """A path as it is where there is such a file, or none of ours either; else ours. Flow-GRPO's
    configs join theirs to the folder they are started in, which counts as relative."""
    name = named(path)
    if path and not os.path.exists(path) and os.path.exists(ROOT / name):  # one too long is not
        return str(ROOT / name)
    return path


def named(path: str) -> str:
    """A path in the current folder, or in that of our files, as it would be written from there."""
    for folder in (os.getcwd(), ROOT) if os.path.isabs(path) else ():
        if Path(path).is_relative_to(folder):
            return os.path.relpath(path, folder)
    return path


def each_set(dataset: str, change: Callable[[str], str] = find) -> str:
    """A data set, or several with shares, each of their paths changed."""
    return re.sub(r"[^,:\s][^,:]*", lambda path: change(path[0]), dataset)


def find_files(config: ConfigDict) -> None:
    """Let `dataset/ocr` and `assets/tiny-sd3` of a config work from any folder."""
    config.dataset = each_set(config.dataset)
    config.pretrained.model = find(config.pretrained.model)


def with_files(settings: SharedFields) -> SharedFields:
    """Let `dataset/ocr` and `assets/tiny-sd3` of frozen settings work from any folder."""
    model = replace(settings.pretrained, model=find(settings.pretrained.model))
    dataset = each_set(settings.dataset)
    if dataset != settings.dataset and os.path.isabs(settings.dataset):
        logger.info(
            "%s is not there; taken is what ships with flow_grpo, %s, which is not Flow-GRPO's",
            *(settings.dataset, dataset),
        )
    return replace(settings, dataset=dataset, pretrained=model)


def find_config(argument: str, presets: str = "") -> str:
    """Let path/to/config.py or path/to/config.py:preset be ours, where there is no such file.

    A bare name, such as tiny_ocr, is a preset of the config file `presets`.
    """
    if presets and re.fullmatch(r"[\w-]+", argument) and not os.path.exists(argument):
        argument = f"{presets}:{argument}"
    path, colon, preset = argument.partition(":")
    return find(path) + colon + preset


def check_made(dataset: str) -> None:
    """Refuse a data set of a preset that is not there yet, before the hub is asked for it."""
    name = named(dataset).rstrip("/")
    if name in NOT_HERE and not (os.path.isdir(dataset) and glob(f"{dataset}/t*.*")):
        script = find(f"{name}/make_prompts.py")
        raise UserError(
            f"dataset={name!r} does not ship with flow_grpo; {NOT_HERE[name].format(script)}"
        )
