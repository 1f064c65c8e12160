"""GenEval 2 (Kamath et al. 2025, arXiv 2512.16853): Soft-TIFA scores of an image.

A prompt has questions about its atoms, such as "How many cows are in the image?" with the answer
"three". The soft score of a question is the probability that Qwen3-VL begins its reply with the
answer: the sum of the probabilities of the first tokens of the variants of the answer
(facebookresearch/GenEval2:evaluation.py:131-147). The score of a prompt is the arithmetic or the
geometric mean over its questions (lines 187-190); the benchmark reports 100 times the mean over
prompts.
"""

import math
from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from flow_grpo.chat_templates import render_chat_template
from flow_grpo.errors import UserError
from flow_grpo.rewards.failure import Failed, NotApplicable
from flow_grpo.rewards.frozen_model import FrozenModel
from flow_grpo.rewards.loading import explain_load_errors, explain_template_errors, load_network
from flow_grpo.rewards.option_checks import check_choice
from flow_grpo.rewards.protocol import MetadataRows, Scorer, ScorerOutput

QUESTIONS, SKILLS = "vqa_list", "skills"  # keys of GenEval 2's data
SKILL_NAMES = ("object", "attribute", "count", "position", "verb")
MEANS = ("geometric", "arithmetic")
IMAGE_TOKEN = "<|image_pad|>"
KIND = "a Qwen3-VL"

# evaluation.py:30-52 and 136-143
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
YES = ("Yes", "yes", " yes", " Yes")
INSTRUCTION = "{} Answer in one word."


@dataclass(kw_only=True, eq=False)
class GenEval2(FrozenModel, Scorer):
    """Mean probability of the right answers to the questions in `vqa_list` of the metadata.

    Logs "am" and "gm", the two means, and the mean of each skill that `skills` names.

    Attributes:
        mean: The mean that is the reward, "geometric" (Soft-TIFA GM) or "arithmetic" (AM).
        batch_size: Questions per forward pass.
    """

    model: str = "Qwen/Qwen3-VL-8B-Instruct"
    dtype: str = "bfloat16"
    mean: str = "geometric"

    def __post_init__(self) -> None:
        """Check `mean` and load the model."""
        check_choice("mean", self.mean, MEANS)
        super().__post_init__()

    def load(self) -> nn.Module:
        """Load the model, its tokenizer and its image processor."""
        from transformers import (
            AutoImageProcessor,
            AutoTokenizer,
            Qwen3VLForConditionalGeneration,
        )

        network = load_network(
            Qwen3VLForConditionalGeneration, self.model, dtype=self.torch_dtype, kind=KIND
        )
        with explain_load_errors("model", self.model, "an image processor"):
            self.image_processor = AutoImageProcessor.from_pretrained(
                self.model, trust_remote_code=False
            )
        with explain_load_errors("model", self.model, "a tokenizer"):
            self.tokenizer = AutoTokenizer.from_pretrained(self.model, trust_remote_code=False)
        self._check_template(network)
        return network

    def quantized_part(self) -> nn.Module:
        """Return the language model: the vision tower is small."""
        return self.network.model.language_model

    def skip_reason(self, prompt: str, metadata: dict) -> str | None:
        return None if metadata.get(QUESTIONS) else f"its metadata have no {QUESTIONS}"

    def invalid_row(self, prompt: str, metadata: dict) -> str | None:
        """Return why `vqa_list` or `skills` are invalid."""
        questions, skills = metadata.get(QUESTIONS) or [], metadata.get(SKILLS)
        if not isinstance(questions, list) or not all(map(_is_question, questions)):
            return f"its {QUESTIONS} must be a list of [question, answer]"
        for token in self.tokenizer.get_added_vocab():  # would be read as an image or a turn
            if any(token in question for question, _ in questions):
                return f"its {QUESTIONS} contain the special token {token}"
        if questions and skills is not None:
            if not isinstance(skills, list) or len(skills) != len(questions):
                return f"its {SKILLS} must be a list with one skill per question"
            if unknown := [skill for skill in skills if skill not in SKILL_NAMES]:
                return f"its {SKILLS} contain {unknown[0]!r}, not one of {', '.join(SKILL_NAMES)}"
        return None

    @torch.inference_mode()
    def __call__(
        self, images: list[Image.Image], prompts: list[str], metadata: MetadataRows
    ) -> ScorerOutput:
        """Score N images; see `Scorer.__call__`."""
        self.network.to(self.device)
        asked, results = [], []
        for number, (image, prompt, row) in enumerate(zip(images, prompts, metadata, strict=True)):
            if reason := self.invalid_row(prompt, row):
                results.append(Failed(reason))
            elif self.skip_reason(prompt, row):
                results.append(NotApplicable())
            else:
                results.append(None)
                asked += [(number, image, *question) for question in row[QUESTIONS]]
        answered = defaultdict(list)
        for part in self.batch_slices(len(asked)):
            numbers, shown, questions, answers = zip(*asked[part], strict=True)
            probabilities = self._first_token_probabilities(shown, questions)
            for number, *pair, row in zip(numbers, questions, answers, probabilities, strict=True):
                tokens = [self._first_token(variant) for variant in answer_variants(*pair)]
                answered[number].append(row[tokens].sum().item())
        return self._collect(results, answered, metadata)

    def _collect(
        self,
        results: list[Failed | NotApplicable | None],
        answered: dict[int, list[float]],
        metadata: MetadataRows,
    ) -> ScorerOutput:
        """Return the scores and extra values, given the soft scores of the questions by image."""
        extras = {name: [math.nan] * len(results) for name in ("am", "gm", *SKILL_NAMES)}
        scores: list[Any] = list(results)
        for number, soft in answered.items():
            if not all(map(math.isfinite, soft)):
                scores[number] = Failed(f"the network returned {soft}")
                continue
            means = {"am": fmean(soft), "gm": geometric_mean(soft)}
            scores[number] = means["gm" if self.mean == "geometric" else "am"]
            skills = metadata[number].get(SKILLS) or []
            for skill in {*skills}:
                means[skill] = fmean(s for s, k in zip(soft, skills, strict=True) if k == skill)
            for name, value in means.items():
                extras[name][number] = value
        return scores, extras

    def _first_token_probabilities(
        self, images: tuple[Image.Image, ...], questions: tuple[str, ...]
    ) -> Tensor:
        """Return the probabilities of the first token of each reply, (N, vocabulary), float32.

        Rows are padded on the right: attention is causal, so padding does not affect them.
        """
        pixels, grids = self._preprocess(images)
        merged = self.network.config.vision_config.spatial_merge_size**2
        counts = (grids.prod(-1) // merged).tolist()
        texts = [
            self._render(INSTRUCTION.format(question)).replace(IMAGE_TOKEN, IMAGE_TOKEN * count)
            for question, count in zip(questions, counts, strict=True)
        ]
        rows = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        lengths = torch.tensor([len(row) for row in rows])
        ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = torch.tensor(row)
        ids = ids.to(self.device)
        hidden = self.network.model(
            input_ids=ids,
            attention_mask=(torch.arange(ids.shape[1]) < lengths[:, None]).long().to(self.device),
            mm_token_type_ids=(ids == self.network.config.image_token_id).int(),
            pixel_values=pixels.to(self.device, self.torch_dtype),
            image_grid_thw=grids.to(self.device),
            use_cache=False,
        ).last_hidden_state
        last = hidden[torch.arange(len(rows)), lengths - 1]  # (N, width)
        return self.network.lm_head(last).float().softmax(-1)

    def _preprocess(self, images: tuple[Image.Image, ...]) -> tuple[Tensor, Tensor]:
        """Return the patches of all images, (patches, values), and their grids, (N, 3).

        An image that has several questions in the batch is prepared once for it.
        """
        distinct = {id(image): image.convert("RGB") for image in images}
        inputs = self.image_processor(images=[*distinct.values()], return_tensors="pt")
        grids = inputs["image_grid_thw"]
        patches = inputs["pixel_values"].split(grids.prod(-1).tolist())
        numbers = {key: number for number, key in enumerate(distinct)}
        order = [numbers[id(image)] for image in images]
        return torch.cat([patches[number] for number in order]), grids[order]

    def _render(self, text: str) -> str:
        """Return the chat with an image and a text, up to the start of the reply."""
        content = [{"type": "image"}, {"type": "text", "text": text}]
        return render_chat_template(self.tokenizer, [{"role": "user", "content": content}])

    def _first_token(self, text: str) -> int:
        """Return the first token, as evaluation.py:92: of " 10" it is that of a space."""
        return self.tokenizer.encode(text)[0]

    def _check_template(self, network: nn.Module) -> None:
        """Reject a chat template without an image, and an image token of another model."""
        token = self.tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
        rendered = ""
        if self.tokenizer.chat_template:
            with explain_template_errors("model", self.model):
                rendered = self._render("")
        if rendered.count(IMAGE_TOKEN) != 1 or token != network.config.image_token_id:
            raise UserError(
                "has no chat template for images",
                field="model",
                value=self.model,
                hint="use the files of Qwen3-VL-8B-Instruct",
            )


def answer_variants(question: str, answer: str) -> tuple[str, ...]:
    """Return the variants of an answer whose first tokens count; two may share one."""
    if not question.startswith("How many"):
        return YES
    number = str(NUMBERS.index(answer) + 1) if answer in NUMBERS else "other"
    words = (answer, answer.capitalize())
    return (*words, *(f" {word}" for word in words), number, f" {number}")


def geometric_mean(values: list[float]) -> float:
    """Return the geometric mean; 0 if a value is 0."""
    if min(values) <= 0:
        return 0.0
    return math.exp(fmean(map(math.log, values)))


def _is_question(item: Any) -> bool:
    return (
        isinstance(item, list | tuple) and len(item) == 2 and all(isinstance(x, str) for x in item)
    )
