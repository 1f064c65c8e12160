"""Compute tokens and memory of a process for long videos, for `flow-grpo plan`, without torch.

With LoRA in bf16 and activation checkpointing, a trained step of T tokens (both halves of guidance
included) needs

    2 P + (16 + 4 [EMA]) R + 2 T (L D + a D + b M) bytes

for P frozen and R trained parameters: in float32, the latter have gradients, two moments of Adam
and possibly a moving average. L blocks keep their input of width D for the backward pass, and one
of them at a time is recomputed, with an MLP of width M. Context parallelism divides T.

a and b are fitted to the measured peaks of Wan 2.1 (docs/benchmarks/models_h200.jsonl and
models_memory_h200.jsonl), which the formula reproduces to 5 %. Compiled models need less for
longer videos. Encoders, VAE and rewards are not included: with `offload_idle`, encoders and VAE
are not on the GPU during training.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flow_grpo.config.fields import UNQUANTIZED
from flow_grpo.diffusion.fields import DiffusionConfig
from flow_grpo.errors import UserError
from flow_grpo.training.measurements import PARAMETERS, shape_of

WIDTHS, MLP_WIDTHS = 33.4, 6.0  # a and b
GIB = 2**30
SEARCHED = 100  # latent frames, for a number of frames that works


@dataclass(frozen=True)
class VideoModel:
    """Architecture of a video model."""

    layers: int
    width: int
    mlp: int
    heads: int
    side: int = 16  # pixels per side of the square that a token covers
    frames: int = 4  # frames per token, after the first frame
    audio_rate: float = 0.0  # audio tokens per second of a video, at `fps` frames per second
    fps: float = 24.0


MODELS = {  # by their name in the benchmarks
    "wan2.1-1.3b": VideoModel(30, 1536, 8960, 12),
    "wan2.1-14b": VideoModel(40, 5120, 13824, 40),
    "ltx-2.3": VideoModel(48, 4096, 16384, 32, side=32, frames=8, audio_rate=25.0),
}


def check_context_divides(context: int, lengths: Mapping[str, int]) -> None:
    """Raise a UserError unless `sample.context_parallel` divides each length, given by name."""
    for name, length in lengths.items():
        if length % context:
            raise UserError(
                f"does not divide the {name}", field="sample.context_parallel", value=context
            )


def check_audio_divides(
    context: int, frames: int, step: int, count: Callable[[int], tuple[int, int]]
) -> None:
    """Raise a UserError unless `sample.context_parallel` divides the audio tokens of a video.

    Args:
        context: Value of `sample.context_parallel`.
        frames: Number of frames.
        step: Frames of a latent frame; `frames` is 1 more than a multiple of it.
        count: Function from a number of frames to the tokens of the video and of its sound.
    """
    tokens = count(frames)[1]
    if tokens % context == 0:
        return
    others = [n for n in range(1, frames + SEARCHED * step, step) if count(n)[1]]
    works = [n for n in others if all(each % context == 0 for each in count(n))]
    near = [*[n for n in works if n < frames][-1:], *[n for n in works if n > frames][:1]]
    raise UserError(
        f"does not divide the {tokens} audio tokens of {frames} frames",
        field="sample.context_parallel",
        value=context,
        hint=f"it divides those of {' and '.join(map(str, near))} frames" if near else "",
    )


def count_audio_tokens(frames: int, fps: float, per_second: float) -> int:
    """Return the tokens of the sound of a video."""
    return round(frames / fps * per_second)


def video_model(config: DiffusionConfig) -> VideoModel | None:
    """Return the architecture of the config's model, if it is known."""
    return MODELS.get(shape_of(config.pretrained.model))


def count_video_tokens(model: VideoModel, height: int, width: int, frames: int) -> int:
    """Return the tokens of a video, without those of its sound."""
    return ((frames - 1) // model.frames + 1) * (height // model.side) * (width // model.side)


def describe_video_memory(config: DiffusionConfig, model: VideoModel) -> dict[str, str]:
    """Return the rows of a plan: tokens, and the computed memory of a process.

    Raises:
        UserError: If `sample.context_parallel` does not divide the heads or the tokens.
    """
    context = config.sample.context_parallel
    height, width = config.height or config.resolution, config.width or config.resolution
    tokens = count_video_tokens(model, height, width, config.frames)
    lengths = {f"{model.heads} attention heads": model.heads, f"{tokens} tokens": tokens}
    check_context_divides(context, lengths)
    check_audio_divides(
        context,
        config.frames,
        model.frames,
        lambda frames: (
            count_video_tokens(model, height, width, frames),
            count_audio_tokens(frames, model.fps, model.audio_rate),
        ),
    )
    rows = {"tokens per GPU": f"{tokens // context:,} of {tokens:,} of a sample"}
    if config.use_lora and config.mixed_precision != "no" and config.train.gradient_checkpointing:
        parts = video_memory(config, model, tokens // context)
        text = " + ".join(f"{gib:.1f} of {name}" for name, gib in parts.items())
        rows["memory per GPU"] = (
            f"{sum(parts.values()):.1f} GiB = {text}; computed, without encoders, VAE and rewards"
        )
    return rows


def video_memory(config: DiffusionConfig, model: VideoModel, tokens: int) -> dict[str, float]:
    """Return the memory of a trained step in GiB, by what takes it.

    Args:
        config: The settings: LoRA in half precision, with activation checkpointing.
        model: Architecture of the model.
        tokens: Tokens of a sample on this process.
    """
    known, train = PARAMETERS[shape_of(config.pretrained.model)], config.train
    frozen_bytes = {UNQUANTIZED: 2.0, "fp8": 1.0}.get(config.pretrained.base_precision, 0.5)
    trained = known.lora_per_rank * train.lora_rank
    both = config.sample.guidance_scale > 1 and train.guidance_gradient == "both"
    batch = train.batch_size * (2 if both else 1)
    per_token = (model.layers + WIDTHS) * model.width + MLP_WIDTHS * model.mlp
    return {
        "weights": frozen_bytes * known.all / GIB,
        "LoRA and its optimizer": (16 + 4 * train.ema) * trained / GIB,
        "activations": 2 * batch * tokens * per_token / GIB,
    }
