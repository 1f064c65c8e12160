"""GLM-4.1V and GLM-4.6V, whose language model has one linear layer for gate and up projection."""

from typing import Any

from torch import nn

from flow_grpo.vlm.models.qwen_vl import QwenVL

VISION_TOKEN_FIELDS = tuple(
    f"{kind}_{part}token_id" for kind in ("image", "video") for part in ("", "start_", "end_")
)


class Glm4V(QwenVL):
    """GLM-4.1V and GLM-4.6V, dense, for images; patches, grids and position ids are Qwen-VL's.

    Videos are not supported: GLM's processor samples their frames by rules of its own.
    """

    names = {  # noqa: RUF012
        "glm4v": "GLM-4.1V",
        "glm46v": "GLM-4.6V",
    }
    layers = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_up_proj|down_proj)"
    vision_lora_layers = r".*visual.*\.(qkv|(gate_|up_|down_)?proj|downsample)"
    vllm = False  # its image processor has not been compared with ours

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.video_token = None
        self.banned_token_ids = [getattr(model.config, name) for name in VISION_TOKEN_FIELDS]

    @classmethod
    def load_vision_processor(
        cls, source: str, revision: str, *, min_pixels: int, max_pixels: int
    ) -> Any:
        """Load the image processor; its limits count an image once per frame of a patch."""
        processor = super().load_vision_processor(source, revision, min_pixels=0, max_pixels=0)
        size = dict(processor.size)
        for name, pixels in (("shortest_edge", min_pixels), ("longest_edge", max_pixels)):
            if pixels:
                size[name] = pixels * processor.temporal_patch_size
        size["shortest_edge"] = min(size["shortest_edge"], size["longest_edge"])
        processor.size = type(processor.size)(**size)
        return processor
