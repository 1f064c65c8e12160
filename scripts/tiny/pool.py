"""A pool of tokenized prompts on the device, from which training batches are sampled."""

import random
from dataclasses import dataclass
from string import ascii_uppercase

import torch
from torch import Tensor
from transformers import CLIPTokenizer

from tiny.images import Degradation, Painter, encode_scene, encode_word
from tiny.prompts import scenes_by_kind, sign_prompt
from tiny.words import split_words

WORD_SHARE = 0.1  # of the signs; the others are random strings, which teach spelling
DROP_SHARE = 0.1  # of the prompts are empty, for classifier-free guidance


@dataclass(frozen=True)
class Batch:
    images: Tensor  # (B, 3, 32, 96) in [0, 1]
    clip_ids: Tensor  # (B, 16)
    t5_ids: Tensor  # (B, t5_length)


def sign_words(size: int, seed: int) -> list[str]:
    """Draw `size` texts for signs, without the held-out words.

    A fraction `WORD_SHARE` are training words; the others are three to six random capitals.
    """
    rng = random.Random(seed)
    train, test = split_words()
    held_out = set(test)
    words: list[str] = []
    while len(words) < size:
        if rng.random() < WORD_SHARE:
            words.append(rng.choice(train))
            continue
        word = "".join(rng.choices(ascii_uppercase, k=rng.randint(3, 6)))
        if word not in held_out:
            words.append(word)
    return words


def byt5_ids(prompt: str, length: int) -> list[int]:
    """Tokenize as ByT5Tokenizer with truncation and padding, which is slow on many prompts."""
    ids = [*(byte + 3 for byte in prompt.encode()[: length - 1]), 1]
    return ids + [0] * (length - len(ids))


class PromptPool:
    """`num_words` signs and every scene, as token ids and as inputs of a `Painter`."""

    def __init__(
        self,
        tokenizer: CLIPTokenizer,
        *,
        t5_lengths: tuple[int, ...],
        num_words: int,
        degradation: Degradation,
        device: torch.device,
        seed: int,
    ) -> None:
        words = sign_words(num_words, seed)
        kinds = scenes_by_kind()
        scenes = [scene for kind in kinds for scene in kind]
        self.prompts = [*map(sign_prompt, words), *map(str, scenes), ""]
        clip = tokenizer(
            self.prompts,
            padding="max_length",
            max_length=tokenizer.model_max_length,
            truncation=True,
        )
        # int16 keeps the table of long T5 ids small.
        self.clip_ids = torch.tensor(clip.input_ids, dtype=torch.int16).to(device)
        self.t5_ids = {
            length: torch.tensor(
                [byt5_ids(prompt, length) for prompt in self.prompts], dtype=torch.int16
            ).to(device)
            for length in t5_lengths
        }
        self.letters = torch.tensor([encode_word(word) for word in words]).to(device)
        self.scenes = torch.tensor([encode_scene(scene) for scene in scenes]).to(device)
        sizes = torch.tensor([len(kind) for kind in kinds])
        self.kind_sizes = sizes.to(device)
        self.kind_starts = (sizes.cumsum(0) - sizes).to(device)
        self.painter = Painter(device)
        self.degradation = degradation
        self.device = device

    def images(
        self, size: int, scene_share: float, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Draw signs followed by scenes; return the images and their rows in the prompt table."""
        num_scenes = round(size * scene_share)
        num_signs = size - num_scenes
        rows = (self._uniform(num_signs, generator) * len(self.letters)).long()
        signs = self.painter.signs(self.letters[rows], self.degradation, generator)

        # Equal fractions of the three kinds of scenes, which differ in number.
        kind = (self._uniform(num_scenes, generator) * len(self.kind_sizes)).long()
        within = (self._uniform(num_scenes, generator) * self.kind_sizes[kind]).long()
        scene_rows = self.kind_starts[kind] + within
        scenes = self.painter.scenes(self.scenes[scene_rows], self.degradation, generator)
        images = torch.cat([signs.images, scenes.images])
        return images, torch.cat([rows, scene_rows + len(self.letters)])

    def batch(
        self, size: int, scene_share: float, t5_length: int, generator: torch.Generator
    ) -> Batch:
        """Draw images with their tokens; a share `DROP_SHARE` gets the empty prompt."""
        images, rows = self.images(size, scene_share, generator)
        empty = len(self.prompts) - 1
        rows = rows.masked_fill(self._uniform(size, generator) < DROP_SHARE, empty)
        return Batch(images, self.clip_ids[rows].long(), self.t5_ids[t5_length][rows].long())

    def _uniform(self, size: int, generator: torch.Generator) -> Tensor:
        return torch.rand(size, generator=generator, device=self.device)
