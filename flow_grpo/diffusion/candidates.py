"""Load the candidates of an evaluation, one at a time.

LoRA and the weights of a transformer are loaded into the base model, which is restored afterwards.
A complete pipeline takes its place, because two models rarely fit on a GPU.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from accelerate import Accelerator
from torch import Tensor, nn

from flow_grpo.diffusion.builders import (
    build_adapter,
    build_dynamics,
    check_model_settings,
    resolve_model_family,
    resolve_model_path,
)
from flow_grpo.diffusion.fields import DiffusionConfig
from flow_grpo.diffusion.models import ModelAdapter, find_adapter
from flow_grpo.diffusion.models.experts import check_expert_folders, expert_folders_of_model
from flow_grpo.diffusion.models.lora_files import TRANSFORMER, read_lora
from flow_grpo.diffusion.models.model_files import check_pipeline_files, check_transformer_files
from flow_grpo.diffusion.rollout import Denoiser
from flow_grpo.errors import UserError
from flow_grpo.hub_access import DEFAULT_REVISION
from flow_grpo.training.candidates import BASE, Candidate, parse_candidates
from flow_grpo.training.lora_files import resolve_lora_path
from flow_grpo.training.plan import check_lora_path

CHECKPOINT_OPTION = "--checkpoint"


def base_candidate(lora_path: str) -> Candidate:
    """Return the policy before training: the model, with the LoRA of `train.lora_path` if set.

    Raises:
        UserError: If the path is missing or is not a LoRA; before the model is loaded.
    """
    if not lora_path:
        return Candidate(BASE, None)
    check_lora_path(lora_path)
    check_lora(lora_path, "train.lora_path")
    return Candidate(BASE, resolve_lora_path(lora_path))


def check_lora(path: str | Path, field: str, family: str = "") -> None:
    """Read a LoRA as `read_lora` does, and reject a file of other weights."""
    if not any("lora" in name.lower() for name in read_lora(path, field, family=family).tensors):
        raise UserError(
            "contains no LoRA weights",
            field=field,
            value=str(path),
            hint="pass the directory of a full model with --checkpoint",
        )


def parse_diffusion_candidates(arguments: list[str], lora_path: str = "") -> list[Candidate]:
    """Parse the values of --checkpoint, where "base" has the LoRA of `train.lora_path`."""
    return parse_candidates(arguments, base=lambda: base_candidate(lora_path))


class WeightSwapper:
    """Loads the weights of candidates into one model and restores the model afterwards."""

    def __init__(self, adapter: ModelAdapter, candidates: Sequence[Candidate]) -> None:
        self.adapter = adapter
        self.is_single = len(candidates) == 1  # then nothing has to be restored
        self._base_state: dict[str, Tensor] = {}  # the base weights, once overwritten

    @contextmanager
    def applied(self, candidate: Candidate) -> Iterator[ModelAdapter]:
        """Yield the adapter with the candidate's weights.

        On exit the base weights are restored bit for bit, except after the full weights of a
        single candidate.
        """
        if candidate.weights is None:
            yield self.adapter
            return
        adapter = copy.copy(self.adapter)  # LoRA on text encoders changes the embeddings
        is_lora = candidate.kind == "lora"
        if not (is_lora or self.is_single or self._base_state):
            state = adapter.transformer.state_dict()
            self._base_state = {name: tensor.to("cpu", copy=True) for name, tensor in state.items()}
        try:
            adapter.load_weights(candidate.weights)
            yield adapter
        finally:
            if is_lora:
                self.adapter.unload_lora()
            elif not self.is_single:
                self.adapter.transformer.load_state_dict(self._base_state)

    def check_loadable(self, candidates: Sequence[Candidate]) -> None:
        """Load each candidate once, so that a mismatch is reported before the first is scored."""
        for candidate in candidates:
            with self.applied(candidate):
                pass


class CandidateModels:
    """Loads the model of each candidate of an evaluation, at most one model at a time.

    Args:
        config: Config of the base model and of the evaluation.
        accelerator: Accelerator of the processes.
        candidates: All candidates that may be loaded. Their files are checked here.
    """

    def __init__(
        self, config: DiffusionConfig, accelerator: Accelerator, candidates: Sequence[Candidate]
    ) -> None:
        self.config, self.accelerator = config, accelerator
        self._swapped = [each for each in candidates if each.kind != "pipeline"]
        self._swapper: WeightSwapper | None = None
        self._module: nn.Module | None = None  # the transformer as prepared for the processes
        self._loaded: Path | None = None  # the pipeline in memory; None: the base model
        self._check_files([each for each in candidates if each.kind == "pipeline"])
        if self._swapped and len(candidates) > 1:
            self._use(None)
            self._swapper.check_loadable(self._swapped)

    @property
    def adapter(self) -> ModelAdapter:
        """The model in memory."""
        return self._swapper.adapter

    @contextmanager
    def loaded(self, candidate: Candidate) -> Iterator[tuple[ModelAdapter, nn.Module]]:
        """Yield the adapter with the candidate's weights, and its prepared transformer."""
        if candidate.kind == "pipeline":
            self._use(candidate.weights)
            yield self._swapper.adapter, self._module
            return
        self._use(None)
        with self._swapper.applied(candidate) as adapter:
            yield adapter, self._module

    @contextmanager
    def denoiser(
        self, candidate: Candidate, num_steps: int = 0, guidance_scale: float | None = None
    ) -> Iterator[Denoiser]:
        """Yield the candidate's model with its sampling dynamics.

        Args:
            candidate: One of the candidates.
            num_steps: Sampling steps; 0: those of an evaluation.
            guidance_scale: Guidance scale; None: that of an evaluation.
        """
        steps = num_steps or self.config.sample.eval_num_steps
        with self.loaded(candidate) as (adapter, module):
            dynamics = build_dynamics(self.config, adapter, steps, guidance_scale=guidance_scale)
            yield Denoiser(adapter, module, dynamics)

    def _use(self, pipeline: Path | None) -> None:
        """Load a pipeline, or the base model, in place of the model in memory."""
        if self._swapper is not None and pipeline == self._loaded:
            return
        self._swapper = self._module = None
        self.accelerator.free_memory()
        adapter = build_adapter(_config_of(self.config, pipeline), self.accelerator)
        self._swapper = WeightSwapper(adapter, self._swapped if pipeline is None else ())
        self._module = self.accelerator.prepare_model(adapter.transformer, evaluation_mode=True)
        self._loaded = pipeline

    def _check_files(self, pipelines: Sequence[Candidate]) -> None:
        """Check files and settings before a model is loaded."""
        model = resolve_model_path(self.config.pretrained)
        folders = expert_folders_of_model(model)
        family = resolve_model_family(self.config.pretrained)
        name = family.pipeline_class.__name__ if family else ""
        for candidate in self._swapped:
            if candidate.weights:
                check_expert_folders(candidate.weights, folders)
            for folder in folders if candidate.kind == "lora" else ():
                check_lora(candidate.weights / folder, CHECKPOINT_OPTION, name)
            for folder in folders if candidate.kind == "model" else ():
                check_transformer_files(candidate.weights / folder, model, folder or TRANSFORMER)
        for candidate in pipelines:
            own = find_adapter(str(candidate.weights))
            family = family or own
            if own is not family:
                raise UserError(
                    f"is a {own.pipeline_class.__name__}, but the model to compare with is a "
                    f"{family.pipeline_class.__name__}",
                    field=CHECKPOINT_OPTION,
                    value=str(candidate.weights),
                    hint="compare models of one family",
                )
            check_model_settings(_config_of(self.config, candidate.weights), self.accelerator)
            check_pipeline_files(str(candidate.weights))


def config_for(config: DiffusionConfig, candidates: Sequence[Candidate]) -> DiffusionConfig:
    """Return the config of the evaluation: that of the first pipeline if none needs the base."""
    if any(each.kind != "pipeline" for each in candidates):
        return config
    return _config_of(config, candidates[0].weights)


def _config_of(config: DiffusionConfig, pipeline: Path | None) -> DiffusionConfig:
    """Return the config for a pipeline in place of the base model."""
    if pipeline is None:
        return config
    pretrained = replace(config.pretrained, model=str(pipeline), revision=DEFAULT_REVISION)
    return replace(config, pretrained=pretrained, train=replace(config.train, lora_path=""))
