"""A small Qwen-Image-Edit-Plus pipeline (2509, 2511) with random weights."""

from functools import partial

from diffusers import QwenImageEditPlusPipeline

from untrained.small import qwen_image_edit

build = partial(qwen_image_edit.build, kind=QwenImageEditPlusPipeline)
