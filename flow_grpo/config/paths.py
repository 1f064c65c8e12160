"""Files that ship with the library: scripts, configs, prompts and small models.

They are in the checkout, or in the package's directory `share` if installed from a wheel.
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
CLONE_HINT = (
    "it is in Flow-GRPO's repository: git clone https://github.com/yifan123/flow_grpo "
    "../Flow-GRPO, and pass --config.dataset=../Flow-GRPO/dataset/pickscore_sfw"
)
OWN_DATA_HINT = "use rows with an image each: --config.dataset=path/to/data (docs/editing.md)"
UNBUNDLED_DATASETS = {  # used by presets but not part of the repository; how to get each
    "dataset/geneval": "create it: python {} coco dataset/geneval --size 50000",
    "dataset/counting_edit": OWN_DATA_HINT,
    "dataset/pickscore": CLONE_HINT,
    "dataset/sharegpt4o_image_mini": OWN_DATA_HINT,
    "dataset/sign_pairs": "pass your own data, --config.preferences=PATH (docs/preferences.md), or "
    "create it: python scripts/make_sign_pairs.py --out dataset/sign_pairs",
    "dataset/text_math": "use your own questions: --config.dataset=path/to/data (docs/vlm/data.md)",
}
_PACKAGE = Path(__file__).parents[1]
ROOT = _PACKAGE / "share" if (_PACKAGE / "share").is_dir() else _PACKAGE.parent


def resolve_path(path: str) -> str:
    """Return the path of the library's file if `path` does not exist and the library has it.

    Paths in the current directory count as relative: Flow-GRPO's configs make them absolute.
    """
    name = relative_name(path)
    if path and not os.path.exists(path) and os.path.exists(ROOT / name):
        return str(ROOT / name)
    return path


def relative_name(path: str) -> str:
    """Return a path relative to the current directory or to ROOT, if it is inside one of them."""
    for folder in (os.getcwd(), ROOT) if os.path.isabs(path) else ():
        if Path(path).is_relative_to(folder):
            return os.path.relpath(path, folder)
    return path


def map_dataset_paths(dataset: str, change: Callable[[str], str] = resolve_path) -> str:
    """Apply `change` to each path in a dataset or mixture ("path/a:0.7,path/b:0.3")."""
    return re.sub(r"[^,:\s][^,:]*", lambda path: change(path[0]), dataset)


def resolve_config_paths(config: ConfigDict) -> None:
    """Resolve paths of bundled files in a config, such as `dataset/ocr`, from any directory."""
    config.dataset = map_dataset_paths(config.dataset)
    config.eval_dataset = map_dataset_paths(config.eval_dataset)
    config.pretrained.model = resolve_path(config.pretrained.model)


def resolve_settings_paths(settings: SharedFields) -> SharedFields:
    """Resolve paths of bundled files in frozen settings, such as `dataset/ocr`."""
    model = replace(settings.pretrained, model=resolve_path(settings.pretrained.model))
    dataset = map_dataset_paths(settings.dataset)
    if dataset != settings.dataset and os.path.isabs(settings.dataset):
        logger.info(
            "%s does not exist; using %s, which ships with flow_grpo and differs from Flow-GRPO's",
            settings.dataset,
            dataset,
        )
    eval_dataset = map_dataset_paths(settings.eval_dataset)
    return replace(settings, dataset=dataset, eval_dataset=eval_dataset, pretrained=model)


def resolve_config_file(argument: str, presets: str = "") -> str:
    """Resolve path/to/config.py[:preset] to the library's file if there is no such file.

    A bare name, such as tiny_ocr, is a preset of the config file `presets`.
    """
    if presets and re.fullmatch(r"[\w-]+", argument) and not os.path.exists(argument):
        argument = f"{presets}:{argument}"
    path, colon, preset = argument.partition(":")
    return resolve_path(path) + colon + preset


def check_dataset_available(dataset: str, field: str = "dataset") -> None:
    """Reject a missing dataset of a preset, before it is looked up on the hub.

    Args:
        dataset: A path or hub name.
        field: The setting that names it.
    """
    name = relative_name(dataset).rstrip("/")
    if name in UNBUNDLED_DATASETS and not (os.path.isdir(dataset) and glob(f"{dataset}/t*.*")):
        script = resolve_path(f"{name}/make_prompts.py")
        raise UserError(
            "does not ship with flow_grpo",
            field=field,
            value=name,
            hint=UNBUNDLED_DATASETS[name].format(script),
        )
