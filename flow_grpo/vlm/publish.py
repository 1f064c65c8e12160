"""Collect the weights, samples and texts of a published VLM or language model run."""

import json
import shutil
import sys
from pathlib import Path

from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from PIL import Image
from safetensors.torch import save_file
from transformers.utils import cached_file

from flow_grpo.errors import UserError
from flow_grpo.images import read_image
from flow_grpo.report.card import code_block, response_examples
from flow_grpo.report.comparison import MAX_EDGE, SamplePairs, pair_samples
from flow_grpo.report.redaction import redact, redact_text
from flow_grpo.training.publish import (
    CARD_FILE,
    Publication,
    PublishedRun,
    PublishOptions,
)
from flow_grpo.untrusted_files import is_inside, read_json
from flow_grpo.vlm.export import export
from flow_grpo.vlm.lora import read_adapter
from flow_grpo.vlm.losses import LOSSES
from flow_grpo.weight_checks import check_files_finite

ADAPTER_FOLDER = "adapter"  # next to a merged model
MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
QUESTIONS = 4  # in the card, by default
SETTINGS = (  # listed in each card
    "dataset",
    "question_format",
    "train.loss",
    "train.advantage",
    "train.learning_rate",
    "train.beta",
    "sample.group_size",
    "sample.questions_per_epoch",
    "sample.max_new_tokens",
    "mixed_precision",
    "seed",
)


def write_weights(run: PublishedRun, options: PublishOptions, folder: Path) -> Publication:
    """Write the weights and the samples of a run to `folder`, and describe them."""
    files: dict[str, str] = {}
    is_lora, adapter = run.source.is_lora, ""
    if options.merged and not is_lora:
        raise UserError(
            "has no effect: the checkpoint is a complete model, not a LoRA",
            field="--merged",
            hint="omit --merged and --dtype",
        )
    if options.merged and is_lora:
        files |= _write_merged(run, options, folder)
        adapter = f"{ADAPTER_FOLDER}/"  # transformers would load an adapter beside the model
    if is_lora:
        write_adapter(run, folder / adapter)
        files[f"{adapter}{SAFETENSORS_WEIGHTS_NAME}"] = "LoRA for PEFT"
        files[f"{adapter}{CONFIG_NAME}"] = "its config"
    else:
        files |= _copy_model(run.source.weights, folder)
    count = options.samples or QUESTIONS
    pairs = pair_samples(run.data, run.epoch, count)
    examples = ""
    if pairs is not None:
        images = _write_question_images(run, pairs, folder)
        intro = (
            f"The first {len(pairs.before)} test questions of the evaluation (not cherry-picked)."
        )
        examples = f"{intro}\n\n{response_examples(pairs, images, count)}"
        files |= {"images/": "images of the questions above"} if images else {}
    task = run.base.task or _task(run)
    merged = options.merged and is_lora
    return Publication(
        files=files,
        usage=describe_usage(run, options, task),
        method=describe_method(run),
        summary="A LoRA, with the merged model, of"
        if merged
        else "A LoRA of"
        if is_lora
        else "Fine-tuned",
        library="peft" if is_lora and not merged else "transformers",
        task=task,
        tags=["lora"] if is_lora else [],
        settings=[*SETTINGS, *(f"reward_fn.{name}" for name in run.setting("reward_fn", {}))]
        + (["train.lora_rank", "train.lora_alpha"] if is_lora else []),
        examples=examples,
        limitations=[
            "Trained with the prompt template `question_format` above; other templates were not "
            "evaluated."
        ],
    )


def write_adapter(run: PublishedRun, folder: Path) -> None:
    """Write a LoRA in PEFT's format after checking its values, without machine paths."""
    settings, tensors = read_adapter(run.source.weights)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})
    settings = redact(settings) | {"base_model_name_or_path": redact_text(run.base.name)}
    (folder / CONFIG_NAME).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _copy_model(weights: Path, folder: Path) -> dict[str, str]:
    """Copy a full model and its processors, without private data and with checked weights.

    Returns:
        A description of each file, by name.
    """
    check_files_finite(weights)
    files = {}
    for path in sorted(each for pattern in MODEL_FILES for each in weights.glob(pattern)):
        if path.suffix == ".json" and path.stat().st_size < 2**20:  # not the vocabulary
            text = json.dumps(redact(read_json(path)), indent=2, ensure_ascii=False)
            (folder / path.name).write_text(text + "\n", encoding="utf-8")
        else:
            shutil.copyfile(path, folder / path.name)
        files[path.name] = "model" if path.suffix == ".safetensors" else "config and processors"
    return files


def _write_merged(run: PublishedRun, options: PublishOptions, folder: Path) -> dict[str, str]:
    """Write the merged model into `folder` itself, as the hub needs it at the root."""
    merged = folder / ".merged"
    export(run.source, run.model_path, merged, options.dtype, run.revision)
    (merged / CARD_FILE).unlink(missing_ok=True)
    files = _copy_model(merged, folder)
    shutil.rmtree(merged)
    return {name: f"merged {what}" for name, what in files.items()}


def _write_question_images(run: PublishedRun, pairs: SamplePairs, folder: Path) -> dict[int, str]:
    """Write small copies of the questions' images; return their names by question."""
    written = {}
    for index, record in enumerate(pairs.after):
        if record.image is None or not is_inside(run.data.folder, record.image):
            continue
        try:
            image = read_image(record.image)
        except (UserError, OSError):
            continue
        image.thumbnail((MAX_EDGE, MAX_EDGE), Image.Resampling.LANCZOS)
        (folder / "images").mkdir(exist_ok=True)
        written[index] = f"images/question-{index + 1}.png"
        image.save(folder / written[index])
    return written


def describe_method(run: PublishedRun) -> str:
    """Return the loss, with the first line of its documentation, and the advantage."""
    name = str(run.setting("train.loss", ""))
    if name in LOSSES.paths:
        module = sys.modules[LOSSES.find(name, "train.loss").__module__]
        loss = f"`{name}`: {(module.__doc__ or '').strip().partition(chr(10))[0].rstrip('.')}"
    else:  # a custom one, whose code is not imported for a card
        loss = f"`{name}` (a custom loss)"
    return f"loss {loss}; advantage `{run.setting('train.advantage', '')}`"


def describe_usage(run: PublishedRun, options: PublishOptions, task: str | None) -> str:
    """Return how to load the published weights, as Markdown."""
    text_only = task == "text-generation"
    kind = "AutoModelForCausalLM" if text_only else "AutoModelForImageTextToText"
    processor = "AutoTokenizer" if text_only else "AutoProcessor"
    base, repo = run.base_path, options.repo_name
    lora = run.source.is_lora and not options.merged
    lines = [f"from transformers import {kind}, {processor}"]
    lines += ["from peft import PeftModel"] if lora else []
    loaded = base if lora else repo
    lines += ["", f'processor = {processor}.from_pretrained("{loaded}")']
    lines.append(f'model = {kind}.from_pretrained("{loaded}", dtype="auto", device_map="auto")')
    lines += [f'model = PeftModel.from_pretrained(model, "{repo}")'] if lora else []
    return code_block("\n".join(lines), "python")


def _task(run: PublishedRun) -> str | None:
    """Return the task by the config of the base model; None if it is unavailable."""
    try:
        path = cached_file(run.model_path, "config.json", revision=run.revision)
        config = read_json(Path(path)) if path else {}
    except (OSError, UserError):
        return None
    return "image-text-to-text" if "vision_config" in config else "text-generation"
