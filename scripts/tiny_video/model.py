"""The small LTX-2 pipeline with random weights."""

from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    FlowMatchEulerDiscreteScheduler,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
)
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder
from transformers import Gemma3ForConditionalGeneration
from untrained.small.components import in_eval_mode, seeded
from untrained.small.ltx2 import gemma_config, gemma_tokenizer

from tiny_video.prompts import WORDS
from tiny_video.videos import HOP, MEL_BINS, SAMPLE_RATE, SIZE

TEXT_LENGTH = 16  # tokens; the longest prompt has twelve
CHANNELS = 16  # of the latents of both modalities
COMPRESSION = 8  # in space and time


def video_vae(width: int) -> AutoencoderKLLTX2Video:
    return AutoencoderKLLTX2Video(
        latent_channels=CHANNELS,
        block_out_channels=(width,) * 3,
        down_block_types=("LTX2VideoDownBlock3D",) * 3,
        layers_per_block=(1,) * 4,
        spatio_temporal_scaling=(True,) * 3,
        downsample_type=("spatiotemporal", "temporal", "temporal"),
        decoder_block_out_channels=(width,) * 3,
        decoder_layers_per_block=(1,) * 4,
        decoder_spatio_temporal_scaling=(True,) * 3,
        upsample_type=("temporal", "temporal", "spatiotemporal"),
        upsample_residual=(True,) * 3,
        upsample_factor=(1,) * 3,
        decoder_causal=False,
        decoder_spatial_padding_mode="zeros",
        spatial_compression_ratio=COMPRESSION,
        temporal_compression_ratio=COMPRESSION,
    )


def audio_vae() -> AutoencoderKLLTX2Audio:
    return AutoencoderKLLTX2Audio(
        base_channels=CHANNELS,  # also the number of latent statistics
        ch_mult=(1, 1, 1),
        num_res_blocks=1,
        resolution=MEL_BINS,
        latent_channels=CHANNELS * 4 // MEL_BINS,
        mel_bins=MEL_BINS,
        norm_type="pixel",
        sample_rate=SAMPLE_RATE,
        mel_hop_length=HOP,
    )


def vocoder() -> LTX2Vocoder:
    """Build a vocoder of 8 kHz stereo: 5 x 4 x 4 samples per mel frame."""
    return LTX2Vocoder(
        in_channels=2 * MEL_BINS,
        hidden_channels=64,
        upsample_kernel_sizes=[11, 8, 8],
        upsample_factors=[5, 4, 4],
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1, 3]],
        output_sampling_rate=SAMPLE_RATE,
    )


def transformer(heads: int, head_width: int, layers: int, text_width: int):
    width, audio_width = heads * head_width, heads * head_width // 2
    return LTX2VideoTransformer3DModel(
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_attention_heads=heads,
        attention_head_dim=head_width,
        cross_attention_dim=width,
        audio_in_channels=CHANNELS,
        audio_out_channels=CHANNELS,
        audio_num_attention_heads=heads,
        audio_attention_head_dim=head_width // 2,
        audio_cross_attention_dim=audio_width,
        num_layers=layers,
        caption_channels=text_width,
        vae_scale_factors=(COMPRESSION,) * 3,
        base_height=2 * SIZE,  # of the position embedding
        base_width=2 * SIZE,
        pos_embed_max_pos=2,  # seconds
        audio_pos_embed_max_pos=2,
        audio_sampling_rate=SAMPLE_RATE,
        audio_hop_length=HOP,
        rope_type="split",
    )


def build_pipeline(
    *, heads: int, head_width: int, layers: int, vae_width: int, text_width: int = 64, seed: int
) -> LTX2Pipeline:
    """Build the pipeline; its text encoder stays random, the connectors learn to read it."""
    tokenizer = gemma_tokenizer(WORDS)
    connector = {"caption_channels": text_width, "text_proj_in_factor": 2, "rope_type": "split"}
    for name in ("video", "audio"):
        connector |= {
            f"{name}_connector_num_attention_heads": 2,
            f"{name}_connector_attention_head_dim": text_width // 2,
            f"{name}_connector_num_layers": 1,
            f"{name}_connector_num_learnable_registers": TEXT_LENGTH,
        }
    with seeded(seed):
        pipeline = LTX2Pipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(
                use_dynamic_shifting=True, base_shift=0.5, max_shift=0.5
            ),
            vae=video_vae(vae_width),
            audio_vae=audio_vae(),
            text_encoder=Gemma3ForConditionalGeneration(gemma_config(tokenizer, text_width, 1)),
            tokenizer=tokenizer,
            connectors=LTX2TextConnectors(**connector, connector_rope_base_seq_len=TEXT_LENGTH),
            transformer=transformer(heads, head_width, layers, text_width),
            vocoder=vocoder(),
        )
    return in_eval_mode(pipeline)
