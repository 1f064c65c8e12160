"""What the trainer asks of a family of models that answer. A new one is a new file in this folder.

The defaults are those of a causal language model of transformers that reads text alone: no vision
tower, no picture tokens, positions of one axis.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AutoModelForCausalLM, DynamicCache

from flow_grpo.data.videos import Clip

# A picture or a video as its model takes it: tensors by the names of the forward's arguments, whose
# first dimensions are joined for several.
Seen = dict[str, Tensor]
FAMILIES: dict[str, type["Family"]] = {}  # by the `model_type` of a config


def joined(pictures: Sequence[Seen]) -> Seen:
    """Several pictures as the model takes them together."""
    names = pictures[0] if pictures else ()
    return {name: torch.cat([own[name] for own in pictures]) for name in names}


class Family:
    """What is known of `model` beyond what all models of transformers have."""

    names: ClassVar[dict[str, str]] = {}  # what people call it, by the `model_type` of its config
    loader: ClassVar[Any] = AutoModelForCausalLM
    image_loader: ClassVar[Any] = None  # of the image processor, where there is one
    axes: ClassVar[int] = 1  # of positions
    # linear layers that LoRA is put on, as regular expressions
    layers: ClassVar[str] = r".*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
    tower_layers: ClassVar[str] = ""
    # Whether the answers of a group can be trained in one row, behind a prompt that is there once:
    # not where a token's state depends on all tokens before it, whatever attention may see.
    shares_prompt: ClassVar[bool] = True
    vllm: ClassVar[bool] = True  # whether vLLM can sample for it
    # lists of tensors in vLLM's model that are to be 0 and are anything after it slept
    vllm_scratch: ClassVar[str] = ""

    tower: nn.Module | None = None  # that sees pictures
    # The placeholder of a picture, which the chat template writes once for each, and a prompt
    # repeats as often as the picture has tokens.
    image_token: int | None = None
    video_token: int | None = None  # the same of a video, for a model that is shown some
    banned: Sequence[int] = ()  # tokens that no answer may contain

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        FAMILIES.update(dict.fromkeys(cls.names, cls))

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @classmethod
    def load_images(cls, source: str, revision: str, *, min_pixels: int, max_pixels: int) -> Any:
        """The image processor; pictures are resized to so many pixels, where a number is given."""
        pixels = {"min_pixels": min_pixels, "max_pixels": max_pixels}
        options = {name: number for name, number in pixels.items() if number}
        # with PIL, whether or not torchvision is there: tokens are the same everywhere
        return cls.image_loader.from_pretrained(
            source, revision=revision, backend="pil", trust_remote_code=False, **options
        )

    def lora_targets(self, with_tower: bool) -> str:
        """A pattern of the layers to put LoRA on, for peft."""
        both = with_tower and self.tower_layers
        return f"({self.layers}|{self.tower_layers})" if both else self.layers

    def positions(self, ids: Tensor, pictures: Sequence[Seen]) -> Tensor:
        """Position ids (axes, P) of a prompt's tokens (P,). An answer goes on from the largest of
        them, on all axes alike."""
        return torch.arange(len(ids))[None]

    def mask(self, attention: Tensor | BlockMask, there: Tensor) -> Any:
        """The attention mask of the forward pass: of what each token sees (B, 1, S, S), to be
        handed on as it is, and of which tokens are no padding (B, S)."""
        return attention

    def cache(self) -> DynamicCache:
        """An empty one, to read prompts with."""
        return DynamicCache()

    def written(self, chat: str, clips: Sequence[Clip]) -> str:
        """A chat as the model's own processor completes what the template wrote. It may have
        several placeholders for one video then."""
        return chat

    def count_tokens(self, processor: Any, height: int, width: int) -> int:
        """How many tokens a picture of this size has; a ValueError where it cannot be seen."""
        return 0

    # A model without a tower is asked for none of these.

    def see(self, processor: Any, pictures: Sequence[Image.Image]) -> list[Seen]:
        """What the model's own processor makes of each picture: arguments of the forward pass."""
        raise NotImplementedError

    def watch(self, processor: Any, frames: Sequence[Image.Image], clip: Clip, pixels: int) -> Seen:
        """What `see` would make of a video, of frames with so many pixels at most."""
        raise NotImplementedError

    def count_frames(self, processor: Any, clip: Clip, pixels: int) -> list[int]:
        """The same as `tokens_of_video`, from the sizes alone."""
        raise NotImplementedError

    def tokens_of(self, picture: Seen) -> int:
        """How many tokens of a prompt one picture takes."""
        raise NotImplementedError

    def tokens_of_video(self, video: Seen) -> list[int]:
        """How many tokens each placeholder of a video takes."""
        raise NotImplementedError

    def size_of(self, processor: Any, picture: Seen) -> tuple[int, int]:
        """Width and height that it was resized to, in pixels."""
        raise NotImplementedError

    def blank(self) -> Seen:
        """A small picture of nothing, for a tower that has to run and has nothing to see."""
        raise NotImplementedError

    @contextmanager
    def looking(self, pictures: Seen, shown: Tensor | None) -> Iterator[Seen]:
        """Context that yields the picture arguments of the forward pass. The tower sees each
        distinct picture once, however often it is shown: `shown` (places,) says which one stands
        where."""
        yield {}
