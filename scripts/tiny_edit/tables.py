"""All training edits on the device: scenes as latents, encoded once, and texts as tokens."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from diffusers import AutoencoderKL, FluxKontextPipeline
from tiny.images import Painter
from torch import Tensor

from flow_grpo.diffusion.models.inputs import pack_latents
from tiny_edit.data import GROUNDS, encode_scenes, paint
from tiny_edit.edits import Edit, Scene, recoloured

TEXT_LENGTH = 12  # T5 tokens; the longest instruction has nine
ENCODED_AT_ONCE = 2048


@dataclass(frozen=True)
class Batch:
    source: Tensor  # (B, tokens, 32), packed latents
    target: Tensor  # (B, tokens, 32)
    text: Tensor  # (B,) rows of the token tables


class EditTables:
    """Training edits.

    A fraction `wrong` of the targets does not follow the instruction: half of these are the
    unchanged source, in the other half a shape has another colour.
    """

    def __init__(self, pipeline: FluxKontextPipeline, edits: list[Edit], wrong: float) -> None:
        self.device = pipeline.transformer.device
        self.wrong = wrong
        edits = sorted(edits, key=lambda edit: edit.kind)
        scenes = {each: None for edit in edits for each in (edit.source, *recoloured(edit.target))}
        scenes |= {edit.target: None for edit in edits}
        number = {scene: index for index, scene in enumerate(scenes)}
        texts = sorted({edit.text for edit in edits})
        self.clip_ids, self.t5_ids = (ids.to(self.device) for ids in tokenize(pipeline, texts))
        self.source = self._numbers(number[edit.source] for edit in edits)
        self.target = self._numbers(number[edit.target] for edit in edits)
        self.text = self._numbers(texts.index(edit.text) for edit in edits)
        others = [[number[s] for s in recoloured(scene) if s in number] for scene in scenes]
        self.num_recoloured = self._numbers(map(len, others))
        longest = max(map(len, others))
        self.recoloured = self._numbers(row + [0] * (longest - len(row)) for row in others)
        self.sizes = self._numbers(Counter(edit.kind for edit in edits).values())
        self.starts = self.sizes.cumsum(0) - self.sizes
        self.latents = encode_all(pipeline.vae, list(scenes))  # (grounds, scenes, tokens, 32)

    def batch(self, size: int, generator: torch.Generator) -> Batch:
        """Sample edits, with equal fractions of the kinds, which differ in number."""
        draw = torch.rand(5, size, generator=generator, device=self.device)
        kind = (draw[0] * len(self.sizes)).long()
        row = self.starts[kind] + (draw[1] * self.sizes[kind]).long()
        source, target = self.source[row], self.target[row]
        recoloured = self.recoloured[target, (draw[2] * self.num_recoloured[target]).long()]
        target = torch.where(draw[3] < self.wrong, recoloured, target)
        target = torch.where(draw[3] < self.wrong / 2, source, target)
        grey = (draw[4] * len(self.latents)).long()
        return Batch(self.latents[grey, source], self.latents[grey, target], self.text[row])

    def _numbers(self, values: Iterable) -> Tensor:
        return torch.tensor(list(values), device=self.device)


def tokenize(pipeline: FluxKontextPipeline, texts: list[str]) -> tuple[Tensor, Tensor]:
    """Return CLIP and T5 tokens as in the pipeline's `encode_prompt`."""
    lengths = {
        pipeline.tokenizer: pipeline.tokenizer_max_length,
        pipeline.tokenizer_2: TEXT_LENGTH,
    }
    first, second = (
        tokenizer(
            texts, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
        ).input_ids
        for tokenizer, length in lengths.items()
    )
    return first, second


@torch.no_grad()
def encode_all(vae: AutoencoderKL, scenes: list[Scene]) -> Tensor:
    """Return the packed latents of all scenes on each background grey level."""
    painter = Painter(vae.device)
    shapes, colours = (numbers.to(vae.device) for numbers in encode_scenes(scenes))
    rows = []
    for ground in GROUNDS:
        for start in range(0, len(scenes), ENCODED_AT_ONCE):
            part = slice(start, start + ENCODED_AT_ONCE)
            level = torch.full_like(shapes[part, 0], ground, dtype=torch.float32)
            images = 2 * paint(painter, shapes[part], colours[part], level) - 1
            rows.append(vae.encode(images).latent_dist.mode())
    latents = (torch.cat(rows) - vae.config.shift_factor) * vae.config.scaling_factor
    return pack_latents(latents).unflatten(0, (len(GROUNDS), len(scenes)))
