"""Tokenizers, text encoders and VAEs that the small pipelines share."""

import string
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    DiffusionPipeline,
)
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AddedToken, CLIPTextConfig, CLIPTokenizer, Qwen2Tokenizer, T5Tokenizer

CHARACTERS = string.ascii_lowercase + string.digits + string.punctuation
CHAT = (  # Qwen's chat template
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the weights created inside without changing the caller's random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def in_eval_mode(pipeline: DiffusionPipeline) -> DiffusionPipeline:
    """Set all components to eval mode, as `from_pretrained` does (T5 has dropout)."""
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval()
    return pipeline


def clip_tokenizer(words: list[str] | None = None, max_length: int = 32) -> CLIPTokenizer:
    """Build a CLIP tokenizer with one token per character and per word in `words`.

    `words` are matched whole and case-sensitively before the tokenizer lower-cases, so that
    "red" is one token while the capitals of "RED" are spelled out.
    """
    tokens = [*CHARACTERS, *(c + "</w>" for c in CHARACTERS), "<|startoftext|>", "<|endoftext|>"]
    tokenizer = CLIPTokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[],
        unk_token="<|endoftext|>",
        model_max_length=max_length,
    )
    tokenizer.add_tokens([AddedToken(w, single_word=True, normalized=False) for w in words or []])
    return tokenizer


def clip_config(tokenizer: CLIPTokenizer, width: int, layers: int) -> CLIPTextConfig:
    """Return the config of a small CLIP text encoder for this tokenizer."""
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=4 * width,
        projection_dim=width,
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // 32),
        max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def t5_tokenizer(words: Iterable[str] = ()) -> T5Tokenizer:
    """Build a T5 tokenizer with one token per character and per word in `words`."""
    whole = ("▁" + word for word in words)
    pieces = ["<pad>", "</s>", "<unk>", "▁", *CHARACTERS, *string.ascii_uppercase, *whole]
    return T5Tokenizer(
        vocab=[(piece, -2.0 if i > 2 else 0.0) for i, piece in enumerate(pieces)],
        extra_ids=0,
        model_max_length=512,
    )


def qwen_sizes(tokenizer: Qwen2Tokenizer, width: int, layers: int) -> dict[str, int]:
    """Return config fields of a Qwen text encoder.

    Attention and MLP are narrow whatever the hidden size, because some pipelines need 27 layers.
    """
    return dict(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )


def t5_sizes(width: int, layers: int) -> dict[str, int]:
    """Return config fields of a small T5 encoder."""
    return dict(d_model=width, d_kv=16, d_ff=2 * width, num_layers=layers, num_heads=2)


def kl_vae(
    channels: tuple[int, ...],
    latent_channels: int,
    kind: type[AutoencoderKL | AutoencoderKLFlux2] = AutoencoderKL,
    **factors: float,
) -> AutoencoderKL | AutoencoderKLFlux2:
    """Build a KL VAE; each entry of `channels` after the first halves the resolution."""
    return kind(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * len(channels),
        up_block_types=("UpDecoderBlock2D",) * len(channels),
        block_out_channels=channels,
        layers_per_block=1,
        latent_channels=latent_channels,
        norm_num_groups=4,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
        **factors,
    )


def rope_axes(head_width: int, time_share: int) -> tuple[int, int, int]:
    """Split RoPE channels into time (about 1 / `time_share` of them), height and width."""
    side = 2 * ((head_width - head_width // time_share) // 4)
    return head_width - 2 * side, side, side


def qwen_tokenizer(
    words: Iterable[str], chat_template: str | None = None, special: Iterable[str] = ()
) -> Qwen2Tokenizer:
    """Build a Qwen tokenizer with one token per byte, per word and per `special` string.

    Words that follow a space must start with it, as the tokenizer splits texts that way.
    """
    byte_level = ByteLevel(add_prefix_space=False, use_regex=False)
    tokens = sorted(ByteLevel.alphabet())
    merges = []
    for word in words:
        characters = byte_level.pre_tokenize_str(word)[0][0]
        for i in range(1, len(characters)):
            if characters[: i + 1] not in tokens:
                tokens.append(characters[: i + 1])
                merges.append((characters[:i], characters[i]))
    return Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=merges,
        extra_special_tokens=["<|im_start|>", "<|im_end|>", *special],
        chat_template=chat_template,
    )


def video_vae(
    kind: type[AutoencoderKLQwenImage | AutoencoderKLWan], width: int, **settings
) -> torch.nn.Module:
    """Build a video VAE, by default with 16 latent channels and a downsampling factor of 8.

    The decoder's weights are scaled and its biases zeroed: with the default initialization, images
    fade to the biases' colour, as the first frame meets one of three taps of a causal convolution.
    """
    sizes = dict(base_dim=width, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    vae = kind(**{**sizes, **settings})
    with torch.no_grad():
        for name, parameter in vae.decoder.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() > 3:  # a convolution; the last determines how much is clipped
                parameter.mul_(0.75 if name.startswith("conv_out") else 2)
    return vae
