"""Interface of model families; a new family is a file in this package and an entry in `FAMILIES`.

The defaults are those of a text-only causal language model of transformers: no vision tower, no
image tokens, one-dimensional position ids.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedTokenizerBase

from flow_grpo.data.videos import FrameSelection

if TYPE_CHECKING:
    from flow_grpo.vlm.packing import ModelInputs

# Tensors of an image or a video by argument name of the forward pass; several images are
# concatenated along the first dimension.
VisionInputs = dict[str, Tensor]
# Number of tokens of each slice of an image, row by row; a single slice in most families.
ImageLayout = list[list[int]]


def concat_vision_inputs(images: Sequence[VisionInputs]) -> VisionInputs:
    """Concatenate the tensors of several images."""
    names = images[0] if images else ()
    return {name: torch.cat([image[name] for image in images]) for name in names}


class Family:
    """What is specific to a model family and not part of transformers' common interface.

    Args:
        model: The transformers model.
    """

    names: ClassVar[dict[str, str]] = {}  # display name by the `model_type` of the config
    loader: ClassVar[Any] = AutoModelForCausalLM
    vision_processor_class: ClassVar[Any] = None  # auto class of the image processor
    axes: ClassVar[int] = 1  # dimensions of the position ids
    # linear layers that get LoRA, as regular expressions
    layers: ClassVar[str] = r".*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
    vision_lora_layers: ClassVar[str] = ""
    # Whether the responses of a group can share a row with one prompt. This is impossible if a
    # token's state depends on all tokens before it, regardless of the attention mask.
    shares_prompt: ClassVar[bool] = True
    vllm: ClassVar[bool] = True  # whether vLLM can sample for it
    flex_attention: ClassVar[bool] = True  # whether `attention_mask` accepts a block mask
    # attribute of vLLM's model with tensors that have to be zeroed after a sleep
    vllm_scratch_buffers: ClassVar[str] = ""

    tower: nn.Module | None = None  # the vision tower
    # part of the tower that the forward pass skips; never trained, because DDP waits for gradients
    unused: nn.Module | None = None
    # Placeholder of an image. The chat template writes it once per image; in the prompt it is
    # repeated once per image token (see `image_ids`).
    image_token: int | None = None
    video_token: int | None = None  # the same for videos; None if they are not supported
    banned_token_ids: Sequence[int] = ()  # tokens that are never sampled

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @classmethod
    def load_vision_processor(
        cls, source: str, revision: str, *, min_pixels: int, max_pixels: int
    ) -> Any:
        """Load the image processor with limits on the pixels of an image; 0 means no limit."""
        pixels = {"min_pixels": min_pixels, "max_pixels": max_pixels}
        options = {name: number for name, number in pixels.items() if number}
        # PIL even if torchvision is installed, so that inputs are the same everywhere
        return cls.vision_processor_class.from_pretrained(
            source, revision=revision, backend="pil", trust_remote_code=False, **options
        )

    def lora_targets(self, with_tower: bool) -> str:
        """Return PEFT's `target_modules`, optionally including the vision tower."""
        if with_tower and self.vision_lora_layers:
            return f"({self.layers}|{self.vision_lora_layers})"
        return self.layers

    def set_tower_trainable(self, *, trainable: bool) -> None:
        """Train or freeze the vision tower, without its unused part."""
        if self.tower is not None:
            self.tower.requires_grad_(trainable)
        if self.unused is not None:
            self.unused.requires_grad_(False)

    def marker_ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Return the tokens of `image_ids` that the config does not name; they are never sampled.

        Raises:
            UserError: If the tokenizer does not have them.
        """
        return []

    def compute_positions(self, ids: Tensor, images: Sequence[VisionInputs]) -> Tensor:
        """Return the position ids (axes, P) of a prompt's tokens (P,).

        A response continues after the largest of them, with equal values on all axes.
        """
        return torch.arange(len(ids))[None]

    def attention_mask(self, attention: Tensor | BlockMask, inputs: "ModelInputs") -> Any:
        """Return the `attention_mask` argument of the forward pass.

        Args:
            attention: Visible pairs of tokens, (B, 1, S, S) bool, or a block mask.
            inputs: The other inputs of the forward pass.
        """
        return attention

    def decoding_mask(self, mask: Tensor, column: Tensor) -> Any:
        """Return the `attention_mask` argument of a decoding step of one new token per row.

        Args:
            mask: Additive mask, (rows, 1, 1, columns).
            column: Column of the new token, (rows,).
        """
        return mask

    def new_cache(self) -> DynamicCache:
        """Return an empty cache for prefill."""
        return DynamicCache()

    def complete_chat(self, chat: str, clips: Sequence[FrameSelection]) -> str:
        """Return a rendered chat template with the text that the model's processor adds to it.

        Some processors replace the placeholder of a video by several ones with timestamps.
        """
        return chat

    def count_image_tokens(self, processor: Any, height: int, width: int) -> int:
        """Return the number of tokens of an image of this size.

        Raises:
            ValueError: If the processor does not support the size.
        """
        return 0

    def predict_layout(self, processor: Any, height: int, width: int) -> ImageLayout:
        """Return what `image_layout` will return, computed only from the size of the image.

        Raises:
            ValueError: If the processor does not support the size.
        """
        return [[self.count_image_tokens(processor, height, width)]]

    def image_ids(
        self, processor: Any, layout: ImageLayout, number: int, encode: Callable[[str], list[int]]
    ) -> list[int]:
        """Return the prompt tokens of an image, which replace its placeholder.

        Args:
            processor: The image processor.
            layout: Number of tokens of each slice.
            number: Number of images that precede it in the prompt.
            encode: Returns the token ids of a text.
        """
        return [self.image_token] * sum(map(sum, layout))

    # The following methods are only called for models with a vision tower.

    def preprocess_images(
        self, processor: Any, images: Sequence[Image.Image]
    ) -> list[VisionInputs]:
        """Preprocess images with the model's processor; return one dict per image."""
        raise NotImplementedError

    def preprocess_video(
        self, processor: Any, frames: Sequence[Image.Image], clip: FrameSelection, pixels: int
    ) -> VisionInputs:
        """Preprocess the selected frames of a video, with at most `pixels` pixels per frame."""
        raise NotImplementedError

    def count_video_tokens(self, processor: Any, clip: FrameSelection, pixels: int) -> list[int]:
        """Return what `num_video_tokens` will return, computed from the frame sizes only."""
        raise NotImplementedError

    def num_image_tokens(self, image: VisionInputs) -> int:
        """Return the number of image tokens of a preprocessed image."""
        raise NotImplementedError

    def image_layout(self, image: VisionInputs) -> ImageLayout:
        """Return the number of tokens of each slice of a preprocessed image."""
        return [[self.num_image_tokens(image)]]

    def num_video_tokens(self, video: VisionInputs) -> list[int]:
        """Return the number of tokens of each placeholder of a preprocessed video."""
        raise NotImplementedError

    def resized_size(self, processor: Any, image: VisionInputs) -> tuple[int, int]:
        """Return width and height in pixels that a preprocessed image was resized to."""
        raise NotImplementedError

    def blank_image(self) -> VisionInputs:
        """Return the inputs of a blank image.

        Batches without images need one where the vision tower is trained or sharded, because all
        ranks have to run it.
        """
        raise NotImplementedError

    @contextmanager
    def vision_arguments(
        self, images: VisionInputs, image_indices: Tensor | None
    ) -> Iterator[VisionInputs]:
        """Yield the image arguments of the forward pass.

        The tower processes each distinct image once, however often it occurs.

        Args:
            images: The concatenated distinct images.
            image_indices: Index of the distinct image of each occurrence, (occurrences,); None
                without images.
        """
        yield {}
