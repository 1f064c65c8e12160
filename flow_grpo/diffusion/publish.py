"""Collect the weights, samples and texts of a published diffusion run."""

import json
import logging
import shutil
import sys
from inspect import signature
from pathlib import Path
from typing import Any

from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY, LORA_WEIGHT_NAME_SAFE
from safetensors.torch import save_file

from flow_grpo.diffusion.algorithms import ALGORITHMS
from flow_grpo.diffusion.comfyui import write_comfyui
from flow_grpo.diffusion.export import TRAINED_COMPONENT, export
from flow_grpo.diffusion.models import find_adapter
from flow_grpo.diffusion.models.base import ModelAdapter
from flow_grpo.diffusion.models.experts import SECOND_TRANSFORMER
from flow_grpo.diffusion.models.lora_files import LoraFile, lora_mixin, read_lora
from flow_grpo.errors import UserError, first_line
from flow_grpo.report.card import code_block
from flow_grpo.report.comparison import SamplePairs, draw_samples, pair_samples
from flow_grpo.report.redaction import redact
from flow_grpo.training.publish import (
    CARD_FILE,
    SAMPLES_FILE,
    Publication,
    PublishedRun,
    PublishOptions,
)
from flow_grpo.untrusted_files import is_inside, read_json
from flow_grpo.weight_checks import check_files_finite

logger = logging.getLogger("flow_grpo")
VIDEO_SUFFIXES = (".gif", ".mp4", ".webp")
MAX_VIDEOS = 4
PROMPTS = 8  # in the comparison, by default
COMFYUI = "comfyui"  # directory of the file for it, which diffusers does not load
SETTINGS = (  # listed in each card
    "dataset",
    "algorithm",
    "train.learning_rate",
    "sample.num_steps",
    "sample.guidance_scale",
    "sample.num_image_per_prompt",
    "sample.eval_num_steps",
    "resolution",
    "height",
    "width",
    "mixed_precision",
    "seed",
)


def write_weights(run: PublishedRun, options: PublishOptions, folder: Path) -> Publication:
    """Write the weights and the samples of a run to `folder`, and describe them."""
    adapter = _find_adapter(run)
    experts = (
        ["", SECOND_TRANSFORMER] if (run.source.weights / SECOND_TRANSFORMER).is_dir() else [""]
    )
    files: dict[str, str] = {}
    limitations: list[str] = []
    if options.merged:
        files |= _write_merged(run, options, folder)
    if run.source.is_lora:
        for expert in experts:
            file = read_lora(run.source.weights / expert, "RUN")
            path = Path(expert, LORA_WEIGHT_NAME_SAFE)
            write_lora(file, folder / path)
            files[str(path)] = "LoRA for diffusers" + (f", {expert}" if expert else "")
            name = _comfyui_file(options, expert, len(experts))
            if problem := _try_comfyui(file, adapter, folder / name):
                limitations.append(f"The LoRA could not be converted for ComfyUI: {problem}.")
            else:
                files[name] = "the same LoRA for ComfyUI, with `.alpha` tensors"
    elif not options.merged:
        for expert in experts:
            name = expert or TRAINED_COMPONENT
            _copy_transformer(run.source.weights / expert, folder / name)
            files[f"{name}/"] = "trained weights for diffusers"
    pairs = pair_samples(run.data, run.epoch, options.samples or PROMPTS)
    examples = ""
    if pairs is not None:
        examples, samples = _write_samples(run, pairs, folder)
        files |= samples
    source = "transformer" if not run.source.is_lora else "lora"
    summary = {"lora": "A LoRA of", "transformer": "Fine-tuned weights of"}[source]
    return Publication(
        files=files,
        usage=describe_usage(run, options, adapter, experts, list(files)),
        method=describe_method(str(run.setting("algorithm", ""))),
        summary="A LoRA, with the merged model, of"
        if options.merged and source == "lora"
        else summary,
        library="diffusers",
        task=_task(run, adapter),
        tags=["lora", "diffusers"] if source == "lora" else ["diffusers"],
        settings=[*SETTINGS, *(f"reward_fn.{name}" for name in run.setting("reward_fn", {}))]
        + (["train.lora_rank", "train.lora_alpha"] if source == "lora" else []),
        examples=examples,
        limitations=limitations,
    )


def _comfyui_file(options: PublishOptions, expert: str, count: int) -> str:
    """Return the name of the file for ComfyUI, which shows the files of all models in one list."""
    noise = ("_low_noise" if expert else "_high_noise") if count > 1 else ""
    return f"{COMFYUI}/{options.out.name}{noise}.safetensors"


def _try_comfyui(file: LoraFile, adapter: type[ModelAdapter] | None, out: Path) -> str:
    """Write a LoRA for ComfyUI; return why that is not possible, or ""."""
    if adapter is None:
        return "the family of the base model is not known"
    try:
        write_comfyui(file, adapter.pipeline_class.__name__, out)
    except UserError as error:
        logger.warning("no file for ComfyUI: %s", first_line(error))
        return error.rule
    return ""


def write_lora(file: LoraFile, out: Path) -> None:
    """Write a LoRA in diffusers' format; private metadata is removed."""
    metadata = {"format": "pt"}
    if file.metadata is not None:
        metadata[LORA_ADAPTER_METADATA_KEY] = json.dumps(redact(file.metadata), indent=2)
    out.parent.mkdir(parents=True, exist_ok=True)
    save_file(file.tensors, out, metadata=metadata)


def _copy_transformer(weights: Path, out: Path) -> None:
    """Copy full weights and their config after checking the values."""
    check_files_finite(weights)
    out.mkdir()
    for path in sorted(weights.glob("*.safetensors*")):
        shutil.copyfile(path, out / path.name)
    config = redact(read_json(weights / "config.json"))
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_merged(run: PublishedRun, options: PublishOptions, folder: Path) -> dict[str, str]:
    """Write the merged pipeline into `folder` itself, as the hub needs it at the root."""
    merged = folder / ".merged"
    export(run.source, run.model_path, merged, options.dtype, run.revision)
    (merged / CARD_FILE).unlink()
    files = {}
    for path in sorted(merged.iterdir()):
        path.rename(folder / path.name)
        files[path.name + ("/" if (folder / path.name).is_dir() else "")] = "merged pipeline"
    merged.rmdir()
    return files


def _write_samples(
    run: PublishedRun, pairs: SamplePairs, folder: Path
) -> tuple[str, dict[str, str]]:
    """Write the figure and, for videos, some files; return their Markdown and a list of them."""
    figure = draw_samples(run.data, pairs)
    if figure is None:
        return "", {}
    figure.save(folder / SAMPLES_FILE)
    count = len(pairs.before)
    parts = [
        f"The first {count} test prompts of the run's evaluation (not cherry-picked), with the "
        f"same noise in each row: {' and '.join(pairs.headings)}.",
        f"![samples before and after training]({SAMPLES_FILE})",
    ]
    files = {}
    videos = [
        (index, record.image)
        for index, record in enumerate(pairs.after)
        if record.image is not None
        and record.image.suffix.lower() in VIDEO_SUFFIXES
        and is_inside(run.data.folder, record.image)
        and record.image.is_file()
    ]
    for index, path in videos[:MAX_VIDEOS]:
        name = f"videos/{index:04d}{path.suffix.lower()}"
        (folder / "videos").mkdir(exist_ok=True)
        shutil.copyfile(path, folder / name)
        files["videos/"] = "samples of the published weights"
        if path.suffix.lower() == ".mp4":
            parts.append(f'<video controls loop muted src="{name}"></video>')
        else:
            parts.append(f"![video {index + 1}]({name})")
    return "\n\n".join(parts), files


def describe_method(name: str) -> str:
    """Return the name of an algorithm with the first line of its documentation."""
    if name not in ALGORITHMS.paths:  # a custom one, whose code is not imported for a card
        return f"`{name}` (a custom algorithm)"
    module = sys.modules[ALGORITHMS.find(name, "algorithm").__module__]
    summary = (module.__doc__ or "").strip().partition("\n")[0].rstrip(".")
    return f"`{name}`: {summary}"


def describe_usage(
    run: PublishedRun,
    options: PublishOptions,
    adapter: type[ModelAdapter] | None,
    experts: list[str],
    files: list[str],
) -> str:
    """Return how to generate with the published weights, as Markdown."""
    base, repo = run.base_path, options.repo_name
    lines = ["import torch", "from diffusers import DiffusionPipeline", ""]
    if not run.source.is_lora and not options.merged:
        lines[1] = "from diffusers import AutoModel, DiffusionPipeline"
        lines.append(
            f'transformer = AutoModel.from_pretrained("{repo}", subfolder="{TRAINED_COMPONENT}")'
        )
        lines.append(
            f'pipeline = DiffusionPipeline.from_pretrained("{base}", transformer=transformer)'
        )
    elif options.merged:
        lines.append(f'pipeline = DiffusionPipeline.from_pretrained("{repo}")')
    else:
        lines.append(f'pipeline = DiffusionPipeline.from_pretrained("{base}")')
        supports_lora = (
            adapter is None or lora_mixin(adapter.pipeline_class) is adapter.pipeline_class
        )
        lines.append(
            f'pipeline.load_lora_weights("{repo}")'
            if supports_lora
            else f'pipeline.transformer.load_lora_adapter("{repo}", use_safetensors=True)'
        )
        if len(experts) > 1:
            lines.append(
                f'pipeline.load_lora_weights("{repo}", subfolder="{SECOND_TRANSFORMER}", '
                "load_into_transformer_2=True)"
            )
    scale = run.setting("sample.guidance_scale")
    if scale is not None and _has_guider(adapter):
        lines.append(f"pipeline.guider = pipeline.guider.new(guidance_scale={scale})")
    lines.append('pipeline.to("cuda" if torch.cuda.is_available() else "cpu")')
    arguments = _call_arguments(run, adapter)
    result = "frames" if int(run.setting("frames", 1)) > 1 else "images"
    inputs = "..., " if adapter is not None and adapter.num_source_images[-1] else ""
    lines.append(f'{result} = pipeline({inputs}prompt="...", {arguments}).{result}')
    shown = code_block("\n".join(lines), "python")
    comfyui = " and ".join(f"`{name}`" for name in files if name.startswith(f"{COMFYUI}/"))
    if comfyui:
        shown += (
            f"\n\n**ComfyUI**: copy {comfyui} to `ComfyUI/models/loras` and load it at strength 1; "
            "the scale alpha / rank is in the file."
        )
    return shown


def _call_arguments(run: PublishedRun, adapter: type[ModelAdapter] | None) -> str:
    """Return the arguments of a pipeline call with the settings of the run's evaluation."""
    size = int(run.setting("resolution", 0) or 0)
    values: dict[str, Any] = {
        "height": run.setting("height") or size,
        "width": run.setting("width") or size,
        "num_frames": run.setting("frames", 1),
        "num_inference_steps": run.setting("sample.eval_num_steps"),
    }
    if values["num_frames"] == 1:
        del values["num_frames"]
    scale = run.setting("sample.guidance_scale")
    if scale is not None and not _has_guider(adapter):
        values[_guidance_argument(adapter, float(scale))] = scale
    return ", ".join(f"{name}={value}" for name, value in values.items() if value)


def _has_guider(adapter: type[ModelAdapter] | None) -> bool:
    """Return whether a component of the pipeline has the guidance scale, and not its calls."""
    return adapter is not None and "guider" in signature(adapter.pipeline_class).parameters


def _guidance_argument(adapter: type[ModelAdapter] | None, scale: float) -> str:
    """Return the pipeline's argument for guidance by two passes, or for an embedded scale."""
    if adapter is None:
        return "guidance_scale"
    known = signature(adapter.pipeline_class.__call__).parameters
    return (
        "true_cfg_scale"
        if "true_cfg_scale" in known and adapter.is_guided(scale)
        else "guidance_scale"
    )


def _find_adapter(run: PublishedRun) -> type[ModelAdapter] | None:
    """Return the family of the base model; None if its files are unavailable."""
    try:
        return find_adapter(run.model_path)
    except UserError as error:
        logger.warning("the family of the base model is unknown: %s", first_line(error))
        return None


def _task(run: PublishedRun, adapter: type[ModelAdapter] | None) -> str | None:
    """Return the task of the base model's card, or that of its family."""
    if run.base.task or adapter is None:
        return run.base.task
    edits = bool(adapter.num_source_images[-1])
    if int(run.setting("frames", 1)) > 1:
        return "image-to-video" if edits else "text-to-video"
    return "image-to-image" if edits else "text-to-image"
