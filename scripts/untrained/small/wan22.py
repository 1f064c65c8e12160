"""A small Wan 2.2 5B text-to-video pipeline with random weights."""

from diffusers import WanPipeline

from untrained.small import wan

CHANNELS = 48
VAE = dict(
    z_dim=CHANNELS,
    latents_mean=[0.01 * (i % 7 - 3) for i in range(CHANNELS)],
    latents_std=[0.5 + 0.05 * (i % 11) for i in range(CHANNELS)],
    is_residual=True,
    in_channels=12,  # packed 2 x 2
    out_channels=12,
    patch_size=2,
    scale_factor_spatial=16,
)


def build(**settings) -> WanPipeline:
    """Build the pipeline; sides are multiples of 32, the number of frames is 4 n + 1."""
    own = dict(vae=VAE, latent_channels=CHANNELS, expand_timesteps=True, flow_shift=5.0)
    return wan.build(**own, **settings)
