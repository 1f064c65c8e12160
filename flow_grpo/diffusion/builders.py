"""Build the model of a diffusion config and the parameters that it is sampled with.

Also the options to suggest when it runs out of memory.
"""

import logging
from collections.abc import Sequence
from dataclasses import asdict, replace

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from flow_grpo.data.hub import download_revision
from flow_grpo.diffusion.config_checks import check_guidance_gradient
from flow_grpo.diffusion.context_parallel import check_context_parallel
from flow_grpo.diffusion.fields import (
    DiffusionConfig,
    DiffusionModelConfig,
    DiffusionSampleConfig,
)
from flow_grpo.diffusion.models import (
    GUIDANCE_2_FIELD,
    ModelAdapter,
    Size,
    build_meta_transformer,
    check_model,
    check_size,
    find_adapter,
    load_adapter,
)
from flow_grpo.diffusion.models.experts import check_expert_folders, expert_folders_of_model
from flow_grpo.diffusion.plan import BatchPlan
from flow_grpo.diffusion.rollout import Dynamics
from flow_grpo.errors import UserError
from flow_grpo.perf.compile_utils import missing_compile_dependency
from flow_grpo.perf.quantization import UNQUANTIZED
from flow_grpo.sde import Solver
from flow_grpo.training.builder import DTYPES
from flow_grpo.training.distributed import compile_obstacle, get_context_size, is_fsdp2, is_sharded
from flow_grpo.training.lora_targets import select_target_modules
from flow_grpo.untrusted_files import flatten_fields

logger = logging.getLogger("flow_grpo")


def resolve_model_family(pretrained: DiffusionModelConfig) -> type[ModelAdapter] | None:
    """Return the model's family, or None if it cannot be determined yet."""
    try:
        return find_adapter(download_revision(pretrained.model, pretrained.revision))
    except UserError:  # reported when the model is loaded
        return None


def resolve_model_path(pretrained: DiffusionModelConfig) -> str:
    """Return the folder or hub id of the model; its name if the revision cannot be downloaded."""
    try:
        return download_revision(pretrained.model, pretrained.revision)
    except UserError:  # reported when the model is loaded
        return pretrained.model


def can_compile(
    config: DiffusionConfig, accelerator: Accelerator, blocks: Sequence[nn.Module]
) -> bool:
    """Return whether to compile the model; log a warning if something prevents it.

    Args:
        config: Settings of the run.
        accelerator: The accelerator that prepared the model.
        blocks: The transformer blocks, after sharding.
    """
    if not config.compile or accelerator.device.type != "cuda":
        return False
    missing = missing_compile_dependency()
    reason = f"{missing} is missing" if missing else compile_obstacle(accelerator, blocks)
    if reason:
        logger.warning("compile=True is ignored: %s; the run will be slower", reason)
    return not reason


def can_use_cuda_graphs(config: DiffusionConfig, accelerator: Accelerator) -> bool:
    """Return whether the transformer can be captured in CUDA graphs.

    Excluded are activation checkpointing, which recomputes in the backward pass; full fine-tuning,
    as a graph would hold all gradients a second time; and sharding, which gathers weights layer by
    layer. DDP was tested with one GPU, see docs/performance.md.
    """
    wanted = config.cuda_graphs and accelerator.device.type == "cuda"
    wanted = wanted and get_context_size(accelerator) == 1  # attention communicates
    unsharded = accelerator.distributed_type in (DistributedType.NO, DistributedType.MULTI_GPU)
    return wanted and unsharded and config.use_lora and not config.train.gradient_checkpointing


def check_model_settings(config: DiffusionConfig, accelerator: Accelerator) -> str:
    """Check the settings against the model's config files.

    Returns:
        The directory or hub id of the model, downloaded if a revision is set.
    """
    model = download_revision(config.pretrained.model, config.pretrained.revision)
    sample = config.sample
    explored = sample.explore_steps if config.train.keep_best_worst else sample.num_steps
    fewest_steps = min(sample.num_steps, sample.eval_num_steps, explored)
    names = ["sample.guidance_scale", "sample.eval_guidance_scale", GUIDANCE_2_FIELD]
    for name in ("train_guidance", "kl_guidance", "teacher_guidance"):
        names.append(f"{config.algorithm}.{name}")
    guidance = {n: v for n, v in flatten_fields(asdict(config)) if n in names and v is not None}
    alternates = not is_sharded(accelerator) or is_fsdp2(accelerator)
    check_model(model, image_size(config), guidance, fewest_steps, alternates=alternates)
    check_sizes(config, model)
    check_guidance_gradient(config, find_adapter(model))
    if config.train.lora_path:  # loading the model may take minutes
        check_expert_folders(config.train.lora_path, expert_folders_of_model(model))
    if config.train.lora_target_modules:
        select_target_modules(build_meta_transformer(model), config.train.lora_target_modules)
    return model


def build_adapter(config: DiffusionConfig, accelerator: Accelerator) -> ModelAdapter:
    """Check the settings against the model's config files, then load it."""
    model = check_model_settings(config, accelerator)
    adapter = load_adapter(
        model,
        device=accelerator.device,
        dtype=DTYPES[config.mixed_precision],
        max_sequence_length=config.max_sequence_length,
        prompt_cache=config.prompt_cache,
        offload_idle=config.offload_idle,
        source_size=image_size(config),
        base_precision=config.pretrained.base_precision,
        keep_full=config.sample.eval_precision == UNQUANTIZED,
        encoder_precision=config.pretrained.encoder_precision,
    )
    adapter.guidance_scale_2 = config.sample.guidance_scale_2
    return adapter


def build_dynamics(
    config: DiffusionConfig,
    adapter: ModelAdapter,
    num_steps: int,
    *,
    guidance_scale: float | None = None,
    solver: Solver = "euler",
    size: Size | None = None,
) -> Dynamics:
    """Build the sampling dynamics; the defaults are those of an evaluation."""
    if guidance_scale is None:
        guidance_scale = get_eval_guidance_scale(config.sample)
    return Dynamics(
        adapter.schedule(num_steps, *(size or eval_image_size(config))),
        kind=config.sample.sde_type,
        noise_level=config.sample.noise_level,
        guidance_scale=guidance_scale,
        guidance_gradient=config.train.guidance_gradient,
        solver=solver,
    )


def get_eval_guidance_scale(sample: DiffusionSampleConfig) -> float:
    """Return the guidance scale of evaluations, by default that of the rollout."""
    scale = sample.eval_guidance_scale
    return sample.guidance_scale if scale is None else scale


def image_size(config: DiffusionConfig) -> Size:
    """Return the size of the samples; `resolution` replaces a missing height or width."""
    height, width = config.height or config.resolution, config.width or config.resolution
    return Size(height, width, config.frames)


def eval_image_size(config: DiffusionConfig) -> Size:
    """Return the size of the samples of an evaluation, by default that of training."""
    height, width, frames = image_size(config)
    return Size(
        config.eval_height or config.eval_resolution or height,
        config.eval_width or config.eval_resolution or width,
        frames,
    )


def check_sizes(config: DiffusionConfig, model: str) -> None:
    """Reject sizes of samples that a model does not support, in training and in evaluation."""
    parts = check_size(model, image_size(config))
    try:
        check_size(model, eval_image_size(config))
    except UserError as error:
        name = f"eval_{error.field}"
        name = name if getattr(config, name, 0) else "eval_resolution"
        raise UserError(error.rule, field=name, value=error.value, hint=error.hint) from error
    check_context_parallel(
        config.sample.context_parallel,
        find_adapter(model),
        parts,
        (image_size(config), eval_image_size(config)),
        config.max_sequence_length,
    )


def with_eval_size(config: DiffusionConfig) -> DiffusionConfig:
    """Return a config whose samples all have the size of an evaluation."""
    height, width, _ = eval_image_size(config)
    own = {"eval_resolution": 0, "eval_height": 0, "eval_width": 0}
    return replace(config, height=height, width=width, **own)


def memory_saving_options(config: DiffusionConfig) -> list[str]:
    """Return the overrides that save memory and are not set yet."""
    enabled = {
        "train.gradient_checkpointing": config.train.gradient_checkpointing,
        "offload_idle": config.offload_idle,
    }
    return [f"--config.{name}=True" for name, is_on in enabled.items() if not is_on]


def training_memory_options(config: DiffusionConfig, plan: BatchPlan) -> list[str]:
    """Return overrides that reduce the memory of training, to suggest after OOM."""
    options = []
    if smaller := plan.with_smaller_batches():
        options.append(f"{plan.overrides_for(smaller)} (the same epoch, smaller batches)")
    options += memory_saving_options(config)
    # compiled code needs as much memory for sampling as for training
    if config.compile and plan.sample_batch_size > plan.train_batch_size:
        options.append("--config.compile=False")
    return options


def evaluation_memory_options(config: DiffusionConfig) -> list[str]:
    """Return overrides that reduce the memory of an evaluation."""
    size = config.sample.test_batch_size
    batches = [f"--config.sample.test_batch_size={size // 2}"] if size > 1 else []
    return batches + memory_saving_options(config)
