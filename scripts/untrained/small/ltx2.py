"""A small LTX-2.3 (or LTX-2) pipeline of video and audio with random weights."""

import string
from collections.abc import Iterable

import torch
from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
)
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder, LTX2VocoderWithBWE
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, GemmaTokenizer

from untrained.small.components import in_eval_mode, seeded

SCALE = 0.5  # of the statistics of latents, which are not 0 and 1, so that a missing one shows


def gemma_tokenizer(words: Iterable[str] = ()) -> GemmaTokenizer:
    """Build a Gemma tokenizer with a token per printable character, and per word after a space."""
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁", *string.printable[:94]]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    prefixes = [("▁" + word[:end], word[end]) for word in words for end in range(len(word))]
    merges = list(dict.fromkeys(prefixes))
    pieces += ["".join(pair) for pair in merges]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    return GemmaTokenizer(
        vocab=vocabulary, merges=merges, model_max_length=1024, add_bos_token=True
    )


def gemma_config(tokenizer: GemmaTokenizer, width: int, layers: int) -> Gemma3Config:
    """Return the config of a small Gemma 3; its vision tower is never used."""
    text = dict(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=64,
        max_position_embeddings=1024,
        query_pre_attn_scalar=16,
    )
    vision = dict(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        image_size=28,
        patch_size=14,
    )
    last = len(tokenizer) - 1
    return Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=last,
        boi_token_index=last - 1,
        eoi_token_index=last - 2,
    )


def video_vae(width: int, channels: int, is_new: bool) -> AutoencoderKLLTX2Video:
    """Build a video VAE that compresses 32 x 32 pixels and 8 frames."""
    decoder = dict(
        decoder_block_out_channels=(width, 2 * width, 4 * width),
        decoder_layers_per_block=(1, 1, 1, 1),
    )
    if is_new:
        decoder = dict(
            decoder_block_out_channels=(width, 2 * width, 2 * width, 4 * width),
            decoder_layers_per_block=(1, 1, 1, 1, 1),
            decoder_spatio_temporal_scaling=(True,) * 4,
            decoder_inject_noise=(False,) * 5,
            upsample_type=("spatiotemporal", "spatiotemporal", "temporal", "spatial"),
            upsample_residual=(False,) * 4,
            upsample_factor=(2, 2, 1, 2),
        )
    return AutoencoderKLLTX2Video(
        latent_channels=channels,
        block_out_channels=(width,) * 4,
        layers_per_block=(1,) * 5,
        decoder_causal=False,
        decoder_spatial_padding_mode="zeros" if is_new else "reflect",
        spatial_compression_ratio=32,
        temporal_compression_ratio=8,
        **decoder,
    )


def vocoder(is_new: bool) -> LTX2Vocoder | LTX2VocoderWithBWE:
    """Build a vocoder, which generates 24 kHz (LTX-2) or 48 kHz (LTX-2.3) stereo."""
    sizes = dict(
        in_channels=64, hidden_channels=64, resnet_kernel_sizes=[3], resnet_dilations=[[1, 3, 5]]
    )
    if not is_new:
        return LTX2Vocoder(**sizes)
    built = LTX2VocoderWithBWE(
        **sizes,
        upsample_kernel_sizes=[11, 4, 4, 4, 4, 4],
        upsample_factors=[5, 2, 2, 2, 2, 2],
        bwe_in_channels=64,
        bwe_hidden_channels=32,
        bwe_resnet_kernel_sizes=[3],
        bwe_resnet_dilations=[[1, 3, 5]],
        num_mel_channels=32,
    )
    for name in ("stft_fn.forward_basis", "stft_fn.inverse_basis", "mel_basis"):
        basis = built.mel_stft.get_buffer(name)  # no initialization fills these buffers
        basis.copy_(torch.rand_like(basis) / basis.shape[-1] ** 0.5)
    return built


def build(
    *,
    version: str = "2.3",
    heads: int = 2,
    head_width: int = 16,
    layers: int = 2,
    text_width: int = 32,
    text_layers: int = 2,
    vae_width: int = 8,
    latent_channels: int = 16,  # as many as the audio's channels times mel bins
    registers: int = 8,  # learned tokens in place of padding; max_sequence_length is a multiple
    transformer: dict | None = None,  # further transformer settings
    seed: int = 0,
    kind: type[DiffusionPipeline] = LTX2Pipeline,
) -> DiffusionPipeline:
    """Build the pipeline; sides are multiples of 32, the number of frames is 8 n + 1."""
    is_new = version != "2.0"
    tokenizer = gemma_tokenizer()
    width, audio_width = heads * head_width, heads * head_width // 2
    connector = dict(
        caption_channels=text_width,
        text_proj_in_factor=text_layers + 1,
        rope_type="split",
        video_gated_attn=is_new,
        audio_gated_attn=is_new,
    )
    for name, own_width in (("video", width), ("audio", audio_width)):
        connector |= {
            f"{name}_connector_num_attention_heads": heads,
            f"{name}_connector_attention_head_dim": (own_width if is_new else text_width) // heads,
            f"{name}_connector_num_layers": 1,
            f"{name}_connector_num_learnable_registers": registers,
        }
    if is_new:
        connector |= dict(
            per_modality_projections=True,
            video_hidden_dim=width,
            audio_hidden_dim=audio_width,
            proj_bias=True,
        )
    sizes = {
        "in_channels": latent_channels,
        "out_channels": latent_channels,
        "num_attention_heads": heads,
        "attention_head_dim": head_width,
        "cross_attention_dim": width,
        "audio_in_channels": latent_channels,
        "audio_out_channels": latent_channels,
        "audio_num_attention_heads": heads,
        "audio_attention_head_dim": head_width // 2,
        "audio_cross_attention_dim": audio_width,
        "num_layers": layers,
        "caption_channels": text_width,
        "rope_type": "split",
        "gated_attn": is_new,
        "cross_attn_mod": is_new,
        "audio_gated_attn": is_new,
        "audio_cross_attn_mod": is_new,
        "use_prompt_embeddings": not is_new,
        "perturbed_attn": is_new,
        **(transformer or {}),
    }
    with seeded(seed), torch.no_grad():
        vae = video_vae(vae_width, latent_channels, is_new)
        audio_vae = AutoencoderKLLTX2Audio(
            base_channels=latent_channels,  # latent_channels * mel_bins / 4
            ch_mult=(1, 1, 1),
            num_res_blocks=1,
            resolution=32,
            latent_channels=latent_channels // 8,
            mel_bins=32,
            norm_type="pixel",
        )
        for each in (vae, audio_vae):
            each.latents_mean.copy_(torch.randn_like(each.latents_mean) * SCALE)
            each.latents_std.copy_(torch.rand_like(each.latents_std) + SCALE)
        pipeline = kind(
            scheduler=FlowMatchEulerDiscreteScheduler(
                use_dynamic_shifting=True,
                base_shift=0.95,
                max_shift=2.05,
                base_image_seq_len=1024,
                max_image_seq_len=4096,
                shift_terminal=0.1,
            ),
            vae=vae,
            audio_vae=audio_vae,
            text_encoder=Gemma3ForConditionalGeneration(
                gemma_config(tokenizer, text_width, text_layers)
            ),
            tokenizer=tokenizer,
            connectors=LTX2TextConnectors(**connector),
            transformer=LTX2VideoTransformer3DModel(**sizes),
            vocoder=vocoder(is_new),
        )
    return in_eval_mode(pipeline)
