"""Directories of images with a caption in a text file next to each: cat.png and cat.txt."""

import os
from pathlib import Path

from flow_grpo.data.columns import IMAGE, IMAGE_SUFFIXES, SUFFIXES
from flow_grpo.data.prompts import Prompt
from flow_grpo.errors import UserError
from flow_grpo.untrusted_files import read_text


def load_captioned_images(folder: Path, field: str) -> list[Prompt]:
    """Return the images of a directory with their captions; empty if it has no image.

    Args:
        folder: Directory, whose subdirectories are not searched.
        field: Setting that names it.
    """
    files = sorted(each for each in folder.iterdir() if each.suffix.lower() in SUFFIXES[IMAGE])
    if unsupported := [each.name for each in files if each.suffix.lower() not in IMAGE_SUFFIXES]:
        raise UserError(
            f"contains {unsupported[0]}, whose format is not supported",
            field=field,
            value=str(folder),
            hint=f"convert it to one of {', '.join(IMAGE_SUFFIXES)}, or move it elsewhere",
        )
    return [_load_captioned_image(file) for file in files]


def _load_captioned_image(file: Path) -> Prompt:
    """Return an image with the caption in the .txt file next to it, which must not be empty."""
    caption = file.with_suffix(".txt")
    if not os.path.isfile(caption):
        raise UserError(
            "has no caption", field=file, hint=f"write one to {caption.name} next to it"
        )
    text = read_text(caption).strip()
    if not text:
        raise UserError("is empty", field=caption, hint=f"describe {file.name} in it")
    return Prompt(text, images=(file,), where=str(caption))
