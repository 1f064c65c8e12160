"""Small Stable Diffusion 3 pipelines of the real classes, built offline.

`python -m flow_grpo.models.tiny_sd3 DIR` writes one with random weights: enough to drive the
trainer end to end where no weights can be downloaded.
"""

import argparse
import string
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import (
    AddedToken,
    ByT5Tokenizer,
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
)

START, END = "<|startoftext|>", "<|endoftext|>"


def clip_tokenizer(words: list[str] | None = None, max_length: int = 32) -> CLIPTokenizer:
    """A CLIP tokenizer that spells: one token per character, except for `words`.

    `words` are matched whole and case-sensitively before the tokenizer lower-cases, so that
    "red" is one token while the capitals of "RED" are spelled out.
    """
    characters = string.ascii_lowercase + string.digits + string.punctuation
    tokens = [*characters, *(c + "</w>" for c in characters), START, END]
    tokenizer = CLIPTokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[],
        unk_token=END,
        model_max_length=max_length,
    )
    tokenizer.add_tokens([AddedToken(w, single_word=True, normalized=False) for w in words or []])
    return tokenizer


def clip_text_encoder(
    tokenizer: CLIPTokenizer, width: int, layers: int
) -> CLIPTextModelWithProjection:
    config = CLIPTextConfig(
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
    return CLIPTextModelWithProjection(config)


def build_tiny_sd3(
    *,
    width: int = 32,
    layers: int = 2,
    text_width: int = 32,
    text_layers: int = 2,
    joint_width: int | None = None,  # of T5; None: that of both CLIPs together
    vae_channels: tuple[int, ...] = (8, 16, 16),
    latent_channels: int = 4,
    words: list[str] | None = None,
    max_length: int = 32,
    qk_norm: str | None = "rms_norm",  # as in SD3.5; SD3 has none
    seed: int = 0,
) -> StableDiffusion3Pipeline:
    """An SD3 pipeline with random weights; images are a multiple of 8 pixels, 256 at most."""
    rng = torch.random.get_rng_state()
    torch.manual_seed(seed)
    tokenizer = clip_tokenizer(words, max_length)
    joint_width = joint_width or 2 * text_width
    t5 = T5Config(
        vocab_size=384,  # ByT5: 256 bytes and its special tokens
        d_model=joint_width,
        d_kv=16,
        d_ff=2 * joint_width,
        num_layers=2,
        num_heads=2,
    )
    pipeline = StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(
            sample_size=32,
            patch_size=2,
            in_channels=latent_channels,
            out_channels=latent_channels,
            num_layers=layers,
            attention_head_dim=16 if width < 64 else 32,
            num_attention_heads=width // (16 if width < 64 else 32),
            joint_attention_dim=joint_width,
            caption_projection_dim=width,
            pooled_projection_dim=2 * text_width,
            pos_embed_max_size=32,
            qk_norm=qk_norm,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=AutoencoderKL(
            in_channels=3,
            out_channels=3,
            down_block_types=("DownEncoderBlock2D",) * len(vae_channels),
            up_block_types=("UpDecoderBlock2D",) * len(vae_channels),
            block_out_channels=vae_channels,
            layers_per_block=1,
            latent_channels=latent_channels,
            norm_num_groups=4,
            scaling_factor=1.0,
            shift_factor=0.0,
            use_quant_conv=False,
            use_post_quant_conv=False,
            mid_block_add_attention=False,
        ),
        text_encoder=clip_text_encoder(tokenizer, text_width, text_layers),
        tokenizer=tokenizer,
        text_encoder_2=clip_text_encoder(tokenizer, text_width, text_layers),
        tokenizer_2=tokenizer,
        text_encoder_3=T5EncoderModel(t5),
        tokenizer_3=ByT5Tokenizer(),
    )
    torch.random.set_rng_state(rng)
    return pipeline


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where to write the pipeline")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.folder.exists():
        parser.error(f"{args.folder} already exists; name a new folder")
    build_tiny_sd3(seed=args.seed).save_pretrained(args.folder)
    print(f"wrote a random SD3 pipeline to {args.folder}")


if __name__ == "__main__":
    main()
