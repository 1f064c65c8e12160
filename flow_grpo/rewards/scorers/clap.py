"""CLAP: cosine similarity of the sound of a video and the prompt (Wu et al., arXiv 2211.06687).

The model takes mono at its own rate, 48 kHz. Other sound is resampled in the frequency domain. Its
feature extractor would crop long sound at random, so it receives the first 10 seconds; shorter
sound is repeated, as in training.
"""

from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import ClapFeatureExtractor, ClapModel

from flow_grpo.audio import Audio
from flow_grpo.errors import UserError
from flow_grpo.rewards.frozen_model import FrozenModel
from flow_grpo.rewards.loading import explain_load_errors, load_network, load_tokenizer
from flow_grpo.rewards.protocol import AUDIO, MetadataRows, Scorer

KIND = "a CLAP model"


@dataclass(kw_only=True, eq=False)
class Clap(FrozenModel, Scorer):
    """Cosine similarity of the CLAP embeddings of sound and prompt, from -1 to 1."""

    reads_audio = True
    frames = "first"  # frames are not used
    model: str = "laion/larger_clap_general"

    def load(self) -> nn.Module:
        """Load CLAP, its tokenizer and its feature extractor."""
        network = load_network(ClapModel, self.model, dtype=self.torch_dtype, kind=KIND)
        if network.config.audio_config.enable_fusion:
            raise UserError(
                "fuses random crops of long sound",
                field="model",
                value=self.model,
                hint="use a CLAP model without fusion, such as laion/larger_clap_general",
            )
        text = network.config.text_config
        self.tokenizer = load_tokenizer(self.model, option="model", tokens=text.vocab_size)
        # RoBERTa numbers positions from the padding token on
        self.max_length = text.max_position_embeddings - text.pad_token_id - 1
        with explain_load_errors("model", self.model, "a CLAP feature extractor"):
            self.extractor = ClapFeatureExtractor.from_pretrained(self.model)
        return network

    def __call__(
        self, images: list[Image.Image], prompts: list[str], metadata: MetadataRows
    ) -> list[float]:
        """Return the similarities, (N,)."""
        self.network.to(self.device)
        sounds = [row[AUDIO] for row in metadata]
        scores = []
        with torch.inference_mode():
            for part in self.batch_slices(len(sounds)):
                products = self.embed_sounds(sounds[part]) * self.embed_texts(prompts[part])
                scores += products.sum(dim=-1).tolist()
        return scores

    def embed_sounds(self, sounds: list[Audio]) -> Tensor:
        """Return normalized embeddings, (N, D)."""
        rate = self.extractor.sampling_rate
        mono = [sound.resampled(rate).waveform.mean(0) for sound in sounds]
        features = self.extractor(
            [wave[: self.extractor.nb_max_samples] for wave in mono],
            sampling_rate=rate,
            truncation="rand_trunc",
            padding="repeatpad",
            return_tensors="pt",
        )["input_features"].to(self.device, self.torch_dtype)
        pooled = self.network.audio_model(features).pooler_output
        return F.normalize(self.network.audio_projection(pooled).float(), dim=-1)

    def embed_texts(self, prompts: list[str]) -> Tensor:
        """Return normalized embeddings, (N, D)."""
        options = {"padding": True, "truncation": True, "return_tensors": "pt"}
        tokens = self.tokenizer(prompts, max_length=self.max_length, **options).to(self.device)
        pooled = self.network.text_model(
            input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]
        ).pooler_output
        return F.normalize(self.network.text_projection(pooled).float(), dim=-1)
