"""Publish a run: weights, figures and a model card in a new directory, ready for the hub."""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flow_grpo.config.saved_config import read_saved_fields, read_start_folders, resolve_start_paths
from flow_grpo.config.trainer_spec import TrainerSpec
from flow_grpo.errors import UserError
from flow_grpo.report import health
from flow_grpo.report.card import (
    HubMetadata,
    Section,
    code,
    code_block,
    render_card,
    results_table,
)
from flow_grpo.report.comparison import draw_curves
from flow_grpo.report.console import markdown_table
from flow_grpo.report.redaction import redact, redact_text
from flow_grpo.report.run_reader import RunData, read_run
from flow_grpo.training.base_card import BaseModel, describe_base_model
from flow_grpo.training.checkpoint import Progress
from flow_grpo.training.export import ExportSource, reject_existing, write_folder_atomically
from flow_grpo.training.starts import read_starts
from flow_grpo.untrusted_files import flatten_fields

CARD_FILE, CONFIG_FILE, METRICS_FILE = "README.md", "training_config.json", "metrics.jsonl"
CURVE_FILE, SAMPLES_FILE = "curve.png", "before_after.png"
# settings of the machine or of the console that do not change what is learned
UNPUBLISHED = ("run_name", "logdir", "resume", "resume_changed", "log_with", "project_name")
UNPUBLISHED += ("distributed_timeout", "log_images", "num_checkpoint_limit", "state_freq", "device")


@dataclass(frozen=True)
class PublishOptions:
    """What the user chose."""

    out: Path
    base_model: str = ""  # hub id of the base model, if the run used a directory
    license: str = ""  # of the published weights; default: that of the base model's card
    repo: str = ""  # hub id to publish to, for the commands in the card
    merged: bool = False  # also publish the merged model
    dtype: torch.dtype = torch.float32  # of the merged weights
    samples: int | None = None  # prompts in the comparison; default: the trainer's

    @property
    def repo_name(self) -> str:
        return self.repo or f"USER/{self.out.name}"


@dataclass(frozen=True)
class PublishedRun:
    """What is known of a run and of the checkpoint that is published."""

    source: ExportSource
    data: RunData
    config: dict[str, Any]  # as saved
    folders: list[Path]  # working directories of the run
    base: BaseModel
    model_path: str  # of the base model, on this machine
    revision: str
    epoch: int  # of the checkpoint
    starts: list[dict[str, Any]]

    @property
    def base_path(self) -> str:
        """What to load the base model from, in examples."""
        return redact_text(self.base.hub_id or f"path/to/{self.base.name}")

    @property
    def num_epochs(self) -> int:
        return int(self.config.get("num_epochs", 0))

    @property
    def finished(self) -> bool:
        """Whether the weights are those of the last planned epoch."""
        return self.epoch >= self.num_epochs

    @property
    def rewards(self) -> list[str]:
        """Names of the training and evaluation rewards."""
        chosen = [self.config.get(field) for field in ("reward_fn", "eval_reward_fn")]
        return list(
            dict.fromkeys(name for each in chosen if isinstance(each, dict) for name in each)
        )

    def setting(self, name: str, default: Any = None) -> Any:
        """Return a saved setting by its dotted name."""
        value: Any = self.config
        for key in name.split("."):
            if not isinstance(value, Mapping) or key not in value:
                return default
            value = value[key]
        return value


@dataclass(frozen=True)
class Publication:
    """What a trainer adds: the files that it wrote and the texts of its card."""

    files: dict[str, str]  # file or directory: what it is
    usage: str  # Markdown: how to load the weights
    method: str
    summary: str  # what the published weights are: "a LoRA of", "fine-tuned weights of"
    library: str
    task: str | None
    tags: Sequence[str]
    settings: Sequence[str]  # names of settings that are always listed
    examples: str = ""  # Markdown: samples before and after
    limitations: Sequence[str] = ()


def find_run(source: ExportSource, options: PublishOptions) -> PublishedRun:
    """Read the run that a checkpoint belongs to.

    Raises:
        UserError: If the weights are not in a run directory, it has no metrics, or `options.out`
            exists.
    """
    reject_existing(options.out)
    if source.run is None:
        raise UserError(
            "does not belong to a run, whose metrics and samples the model card needs",
            field=source.weights,
            hint="pass a run directory, such as logs/RUN",
        )
    run = source.run
    folders = read_start_folders(run)
    config = read_saved_fields(run)
    model, revision = source.trained_model()
    resolved = resolve_start_paths({"model": model}, folders)["model"]
    base = describe_base_model(
        resolved, revision, hub_id=options.base_model, license=options.license
    )
    try:
        epoch = Progress.read(source.weights.parent).epoch
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError("has no readable training progress", field=source.weights.parent) from error
    starts = read_starts(run)
    return PublishedRun(
        source, read_run(run), config, folders, base, resolved, revision, epoch, starts
    )


def publish(
    run: PublishedRun,
    options: PublishOptions,
    spec: TrainerSpec,
    write_weights: Callable[[PublishedRun, PublishOptions, Path], Publication],
    sections: Sequence[Section] = (),
) -> None:
    """Write the directory `options.out` atomically.

    Args:
        run: The run, from `find_run`.
        options: What the user chose.
        spec: Trainer of the run.
        write_weights: Writes weights and samples to a directory.
        sections: Further sections of the card, such as benchmarks.
    """

    def fill(folder: Path) -> None:
        """Write weights, figures, config, metrics and card."""
        publication = write_weights(run, options, folder)
        files = dict(publication.files)
        curves = draw_curves(run.data.rows, run.rewards, run.epoch)
        if curves is not None:
            curves.save(folder / CURVE_FILE)
        config = {name: value for name, value in run.config.items() if name not in UNPUBLISHED}
        text = json.dumps(redact(config, run.folders), indent=2, ensure_ascii=False)
        (folder / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")
        rows = [row for row in run.data.rows if row["epoch"] <= run.epoch]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / METRICS_FILE).write_text(lines, encoding="utf-8")
        files |= {CONFIG_FILE: "all settings of the run", METRICS_FILE: "metrics of each epoch"}
        card = _compose(run, options, spec, publication, files, sections, curves is not None)
        (folder / CARD_FILE).write_text(card, encoding="utf-8")

    write_folder_atomically(options.out, fill)


def upload_command(options: PublishOptions) -> str:
    return f"hf upload {shlex.quote(options.repo_name)} {shlex.quote(str(options.out))} ."


def _compose(
    run: PublishedRun,
    options: PublishOptions,
    spec: TrainerSpec,
    publication: Publication,
    files: dict[str, str],
    sections: Sequence[Section],
    has_curves: bool,
) -> str:
    """Return the text of the card."""
    dataset = str(run.setting("dataset", ""))
    metadata = HubMetadata(
        base_model=run.base.hub_id,
        relation="adapter" if run.source.is_lora and not options.merged else "finetune",
        license=run.base.license,
        library=publication.library,
        task=publication.task,
        tags=["flow_grpo", "reinforcement-learning", *publication.tags],
        datasets=[dataset] if _is_hub_dataset(dataset, run) else [],
    )
    name = redact_text(run.base.name, run.folders)
    link = f"[{name}](https://huggingface.co/{name})" if run.base.hub_id else f"`{name}`"
    names = [code(reward) for reward in run.setting("reward_fn", {})]
    rewards = ("reward " if len(names) == 1 else "rewards ") + ", ".join(names)
    summary = (
        f"{publication.summary} {link}, trained with online reinforcement learning on the "
        f"{rewards} with flow_grpo."
    )
    if not run.finished:
        summary += (
            f"\n\n**Unfinished run**: these are the weights after epoch {run.epoch} of "
            f"{run.num_epochs} (update {run.source.step})."
        )
    table = [["file", "content"], *([code(path), what] for path, what in files.items())]
    ordered: list[Section] = [
        ("Use", publication.usage),
        ("Results", _results(run, has_curves)),
        ("Before and after", publication.examples),
        *sections,
        ("Training", _training(run, spec, publication)),
        ("Limitations", _limitations(run, publication, sections)),
        ("Files", markdown_table(table)),
        ("Licence", _licence(run)),
    ]
    return render_card(options.out.name, metadata, summary, ordered)


def _is_hub_dataset(dataset: str, run: PublishedRun) -> bool:
    """Return whether `dataset` is a single hub id, not a local path or a mixture."""
    resolved = str(resolve_start_paths({"dataset": dataset}, run.folders)["dataset"])
    is_id = dataset.count("/") == 1 and not any(mark in dataset for mark in ":, ")
    return (
        is_id
        and not dataset.startswith(("/", ".", "~", "dataset/"))
        and not Path(resolved).exists()
    )


def _results(run: PublishedRun, has_curves: bool) -> str:
    """Return the rewards before and after, and the curve."""
    parts = []
    if table := results_table(run.data.rows, run.rewards, run.epoch):
        parts += ["Mean reward of the run's own evaluation on its test prompts:", table]
    else:
        parts.append("The run was not evaluated up to this checkpoint.")
    if has_curves:
        parts.append(f"![reward by epoch]({CURVE_FILE})")
        parts.append("The dashed line marks the epoch of the published weights.")
    return "\n\n".join(parts)


def _training(run: PublishedRun, spec: TrainerSpec, publication: Publication) -> str:
    """Return method, command, versions and settings."""
    facts = [
        ["method", publication.method],
        ["epochs, updates", f"{run.epoch} of {run.num_epochs}, {run.source.step}"],
        ["weights", "exponential moving average (EMA)" if run.source.is_ema else "without EMA"],
    ]
    start = run.starts[-1] if run.starts else {}
    if start:
        facts.append(
            ["hardware", f"{start.get('processes')} x {redact_text(str(start.get('device')))}"]
        )
        versions = start.get("versions")
        if isinstance(versions, dict):
            shown = ", ".join(f"{name} {version}" for name, version in versions.items())
            facts.append(["versions", redact_text(shown)])
    commands = list(dict.fromkeys(str(each.get("command") or "") for each in run.starts))
    commands = [redact_text(command, run.folders) for command in commands if command]
    if commands:
        heading = (
            "Command:" if len(commands) == 1 else "Commands, in order (first start, then resumes):"
        )
        shown = f"{heading}\n\n{code_block(chr(10).join(commands), 'bash')}"
    else:
        shown = f"The command was not recorded; see `{CONFIG_FILE}` for all settings."
    return "\n\n".join(
        [
            markdown_table([["", ""], *facts]),
            shown,
            "Main settings, and settings that differ from the defaults:",
            _settings_table(run, spec, publication.settings),
        ]
    )


def _settings_table(run: PublishedRun, spec: TrainerSpec, always: Sequence[str]) -> str:
    """Return the settings in `always` and those that differ from the defaults."""
    config = {name: value for name, value in run.config.items() if name not in UNPUBLISHED}
    saved = dict(flatten_fields(redact(config, run.folders)))
    raw = dict(flatten_fields(config))
    defaults = dict(flatten_fields(spec.get_config().to_dict()))
    aliases = spec.field_aliases()
    changed = [
        name
        for name, value in raw.items()
        if name not in aliases
        and value not in ("", None, {})
        and _differs(value, defaults.get(name))
    ]
    unused = {"resolution"} if raw.get("height") else set()  # height and width replace it
    names = [
        name
        for name in dict.fromkeys([*always, *changed])
        if saved.get(name) is not None and name not in unused
    ]
    return markdown_table([["setting", "value"], *([code(n), code(saved[n])] for n in names)])


def _differs(value: Any, default: Any) -> bool:
    plain = list(default) if isinstance(default, tuple) else default
    return value != plain


def _limitations(run: PublishedRun, publication: Publication, sections: Sequence[Section]) -> str:
    """Return what a user should know, as a list."""
    points = []
    if not run.finished:
        points.append(f"Training stopped after epoch {run.epoch} of {run.num_epochs}.")
    points.append(
        "The rewards under Results are the training objective. A higher reward does not imply "
        "better quality: compare the samples."
    )
    rows = [row for row in run.data.rows if row["epoch"] <= run.epoch]
    findings, _, _ = health.summarize(rows)
    points += [
        f'Health check "{each.check}" failed from epoch {each.epoch} on: {each.text}.'
        for each in findings
    ]
    held_out = [row["data/held_out"] for row in rows if row.get("data/held_out") is not None]
    if held_out and held_out[-1] < 1:
        points.append("Some test prompts are also training prompts.")
    if not sections:
        points.append("These weights have not been benchmarked.")
    points.append(
        f"Trained with a single seed (`seed={run.setting('seed')}`); the variance is unknown."
    )
    if not run.source.is_ema and run.setting("train.ema"):
        points.append("The run evaluated the EMA weights; the published weights are without EMA.")
    points += publication.limitations
    return "\n".join(f"- {point}" for point in points)


def _licence(run: PublishedRun) -> str:
    """Return what is known of the licence; nothing is guessed."""
    licence = run.base.license
    if not licence:
        return (
            f"The licence of the base model ({redact_text(run.base.name)}) applies. It could not "
            "be determined when this card was written."
        )
    name = licence.get("license_name") or licence.get("license", "")
    link = licence.get("license_link", "")
    shown = f"[{name}]({link})" if link.startswith("https://") else code(name)
    return f"{shown}. The conditions of the base model's licence apply to these weights too."
