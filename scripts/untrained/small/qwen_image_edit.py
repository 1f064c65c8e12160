"""A small Qwen-Image-Edit pipeline with random weights."""

from functools import partial

from diffusers import QwenImageEditPipeline

from untrained.small import qwen_image

# The pipeline drops the first 64 tokens of a prompt: its template, if each word is one token. Words
# that follow a space come first, or their letters would be merged before the space.
WORDS = str.split(
    " (|),| the| key| features| of| input| image| shape| size| texture| objects| background| then|"
    " explain| how| user| text| instruction| should| alter| or| modify| Generate| a| new| that|"
    " meets| requirements| while| maintaining| consistency| with| original| where| appropriate|"
    "'s|system|user|assistant|Describe|color",
    "|",
)
build = partial(qwen_image.build, kind=QwenImageEditPipeline, words=WORDS)
