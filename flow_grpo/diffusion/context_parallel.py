"""Context parallelism: the processes of a group compute each sample together (Ulysses attention).

A video of 81 frames at 720p has 75,600 tokens, whose activations may not fit on one GPU. Each of N
processes therefore computes the layers for 1/N of the tokens. For attention, which needs all
tokens, an all-to-all exchange gives each process all tokens of 1/N of the heads (Jacobs et al.,
DeepSpeed Ulysses, https://arxiv.org/abs/2309.14509). diffusers implements this with hooks that
split the inputs of a transformer and gather its output (`enable_parallelism`).

The output is the same on all processes of a group, and so is what follows: loss, noise, log
probability. In the backward pass each process keeps the part of the output's gradient that belongs
to its tokens. A gradient, of weights or of the input, is therefore the SUM over the group, and
`flow_grpo.training.finite.backward` accounts for reductions that average over all processes.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from flow_grpo.data.prompts import Prompt
from flow_grpo.diffusion.models import ADAPTERS, ModelAdapter, Size
from flow_grpo.diffusion.models.experts import iter_experts
from flow_grpo.diffusion.models.inputs import latent_shape
from flow_grpo.diffusion.video_memory import check_audio_divides, check_context_divides
from flow_grpo.errors import UserError
from flow_grpo.perf.library_patches import enable_ulysses
from flow_grpo.training.distributed import Ranks

FIELD = "sample.context_parallel"


def count_tokens(
    family: type[ModelAdapter], transformer: Mapping[str, Any], vae: Mapping[str, Any], size: Size
) -> int:
    """Return the transformer tokens of a sample, without prompt and sound, from its configs."""
    grid = family.grid(transformer, vae)
    _, *frames, height, width = latent_shape(grid, size)
    return (frames[0] if frames else 1) * (height // grid.patch) * (width // grid.patch)


def check_context_parallel(
    number: int,
    family: type[ModelAdapter],
    configs: Mapping[str, Any],
    sizes: Iterable[Size],
    max_sequence_length: int,
) -> None:
    """Reject a number of processes that cannot split a model, from its config files only.

    Args:
        number: Value of `sample.context_parallel`.
        family: Family of the model.
        configs: Configs of its transformer and VAE.
        sizes: Sizes of all samples.
        max_sequence_length: Tokens that prompts are padded to.
    """
    if number == 1:
        return
    if not family.context_parallel:
        known = [name for name, each in ADAPTERS.items() if each.context_parallel]
        raise UserError(
            f"is not supported for {family.pipeline_class.__name__}",
            field=FIELD,
            value=number,
            hint=f"supported: {', '.join(known)}",
        )
    transformer, vae = configs["transformer"], configs["vae"]
    heads = transformer["num_attention_heads"]
    lengths = {f"{heads} attention heads": heads}
    if heads := transformer.get("audio_num_attention_heads"):
        lengths[f"{heads} audio attention heads"] = heads
    for size in sizes:
        tokens = count_tokens(family, transformer, vae, size)
        shape = f"{size.width} x {size.height}" + (f" x {size.frames}" * (size.frames > 1))
        lengths[f"{tokens} tokens of a sample of {shape}"] = tokens
    if prompt := family.prompt_tokens(max_sequence_length):
        lengths[f"{prompt} tokens that a prompt is padded to"] = prompt
    check_context_divides(number, lengths)
    for size in sizes:
        check_audio_divides(
            number,
            size.frames,
            family.grid(transformer, vae).frame_scale,
            lambda frames, size=size: (
                count_tokens(family, transformer, vae, size._replace(frames=frames)),
                family.audio_tokens(transformer, frames),
            ),
        )


def check_context_sources(
    number: int, family: type[ModelAdapter], prompts: Iterable[Prompt]
) -> None:
    """Reject source images whose tokens are appended to those of the samples."""
    if number > 1 and not family.context_parallel_sources and any(p.images for p in prompts):
        raise UserError(
            f"does not support source images of {family.pipeline_class.__name__}",
            field=FIELD,
            value=number,
            hint="set image_column='none' to ignore them",
        )


def enable_context_parallel(adapter: ModelAdapter, ranks: Ranks) -> None:
    """Split the tokens of a model's transformers over the context group.

    Call it when LoRA is attached, because the hooks belong to the layers that run, and before a
    distributed engine wraps the model.
    """
    if ranks.mesh is None:
        return
    adapter.ranks = ranks
    for _, transformer, _ in iter_experts(adapter.transformer):
        try:
            enable_ulysses(
                transformer,
                ranks.mesh,
                ranks.context_size,
                adapter.context_plan,
                adapter.whole_keys,
            )
        except ValueError as error:  # DIFFUSERS_ATTN_BACKEND
            raise UserError(str(error), field=FIELD, value=ranks.context_size) from error
