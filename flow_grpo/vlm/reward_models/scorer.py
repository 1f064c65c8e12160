"""Score responses to questions with images by a sequence classifier."""

from collections.abc import Sequence

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoTokenizer, PretrainedConfig

from flow_grpo.context_length import context_length
from flow_grpo.data.questions import Question
from flow_grpo.errors import UserError
from flow_grpo.rewards.loading import explain_load_errors, load_network
from flow_grpo.rewards.text.reward_model import KIND
from flow_grpo.vlm.models import FAMILIES
from flow_grpo.vlm.models.base import VisionInputs
from flow_grpo.vlm.network import PolicyModel
from flow_grpo.vlm.packing import pack_responses
from flow_grpo.vlm.prompts import EncodedPrompt, PromptEncoder
from flow_grpo.vlm.reward_models.classifier import classifier_class
from flow_grpo.vlm.reward_models.pairs import UNSEEN_TOKEN, as_responses


def find_vision_classifier(config: PretrainedConfig) -> "type[VisionClassifier] | None":
    """Return the class for a model's config, or None if its family is not supported."""
    family = FAMILIES.get(config.model_type)
    supported = family is not None and family.vision_processor_class is not None
    return VisionClassifier if supported else None


class VisionClassifier:
    """A sequence classifier of a vision-language model; see `Classifier` of the reward.

    It runs the forward pass that trained it, because processors of transformers need torchvision.

    Args:
        config: Its config.
        source: Model directory or hub id.
        dtype: Dtype of the weights.
    """

    takes_images = True

    def __init__(self, config: PretrainedConfig, source: str, dtype: torch.dtype) -> None:
        if not any(name.endswith("SequenceClassification") for name in config.architectures or ()):
            raise UserError(f"must be {KIND}, not {config.model_type}", field="model", value=source)
        model = load_network(classifier_class(config), source, dtype=dtype, kind=KIND)
        family = FAMILIES[config.model_type]
        with explain_load_errors("model", source, KIND):
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
            processor = family.load_vision_processor(source, "main", min_pixels=0, max_pixels=0)
        if not tokenizer.chat_template:
            raise UserError("has no chat template", field="model", value=source)
        self.config, self.network = model.config, PolicyModel(model.eval())
        self._encoder = PromptEncoder(tokenizer, processor, model)
        positions, _ = context_length(config.get_text_config())
        self.limit = min(positions, tokenizer.model_max_length)
        # of the last question: all responses of a group have the same image objects
        self._images: list[Image.Image] = []
        self._vision_inputs: list[VisionInputs] = []

    def encode(self, question: str, response: str, images: list[Image.Image]) -> EncodedPrompt:
        """Return the conversation of a question with its images and a response."""
        inputs = self._preprocess(images)
        row = Question(question, where="the question")
        [conversation] = self._encoder.encode_conversations(row, [response], inputs)
        return conversation

    def logits(self, batch: Sequence[EncodedPrompt], device: str) -> Tensor:
        """Return the logits of conversations at their last tokens, (N, labels)."""
        responses = [r for i, each in enumerate(batch) for r in as_responses(i, [each])]
        packed = pack_responses(responses, UNSEEN_TOKEN).to(torch.device(device))
        hidden = self.network.hidden_states(packed.inputs)
        last = hidden[packed.row, packed.column[:, 0]]  # (N, width)
        return self.network.model.score(last)

    def _preprocess(self, images: list[Image.Image]) -> list[VisionInputs]:
        """Return the inputs of the vision encoder for images."""
        same = len(images) == len(self._images)
        if not (same and all(a is b for a, b in zip(images, self._images, strict=True))):
            rgb = [image.convert("RGB") for image in images]
            encoder = self._encoder
            self._images = images
            self._vision_inputs = (
                encoder.family.preprocess_images(encoder.image_processor, rgb) if rgb else []
            )
        return self._vision_inputs
