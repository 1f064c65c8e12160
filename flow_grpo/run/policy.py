"""The weights that are trained, LoRA or all of a network, and how a run saves and loads them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from flow_grpo.errors import UserError
from flow_grpo.run.distributed import whole_state
from flow_grpo.speed.lora import lora_layers

ADAPTER = "default"  # what libraries call a LoRA that nobody named
TRAINED, LORA_SHAPE = "trained.safetensors", "lora.json"


class BasePolicy:
    """LoRA on `model`, or all of it. `network` is the model, or what computes with it, and `module`
    is the network as `prepare` wrapped it: call that one with gradients, so that distribution sees
    every forward."""

    model: nn.Module
    network: nn.Module
    module: nn.Module

    def __init__(
        self, model: nn.Module, lora: LoraConfig | None, lora_path: str = "", seed: int = 0
    ) -> None:
        """With `lora` None all weights are trained; with a path those there are trained on."""
        self.model, self.use_lora = model, lora is not None
        if lora is None and lora_path:
            raise UserError(f"train.lora_path={lora_path} needs use_lora=True")
        if lora is not None:
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                if lora_path:
                    self._load_lora(lora_path)
                else:
                    model.add_adapter(lora, adapter_name=ADAPTER)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(lora is None or "lora_" in name)

    def _load_lora(self, path: str) -> None:
        raise NotImplementedError

    def parameters(self) -> list[nn.Parameter]:
        return list(self.trained().values())

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's parameter groups, in the order of `parameters`."""
        return [{"params": self.parameters()}]

    def trained(self) -> dict[str, nn.Parameter]:
        return {n: p for n, p in self.network.named_parameters() if p.requires_grad}

    def prepare(self, accelerator: Accelerator, optimizer: Optimizer) -> Optimizer:
        self.module, optimizer = accelerator.prepare(self.network, optimizer)
        accelerator.register_save_state_pre_hook(self._save_trained)
        accelerator.register_load_state_pre_hook(self._load_trained)
        return optimizer

    def moved(self) -> None:
        """Called after each update of the weights."""

    def save(self, folder: Path, prefix: str = "") -> None:
        """For others to load: `<prefix>lora/`, or a folder for the whole model.

        Call it on all processes; one of them writes.
        """
        # with the buffers, where it is the whole model
        named = self.model.state_dict(keep_vars=True)
        if self.use_lora:  # all of it, also what a loaded one has where nothing is trained
            named = {name: weight for name, weight in named.items() if "lora_" in name}
        weights = whole_state(named)
        if PartialState().is_main_process and self.use_lora:
            self._write_lora(folder / f"{prefix}lora", weights)
        elif PartialState().is_main_process:
            self._write_model(folder, prefix, weights)

    def _write_lora(self, folder: Path, weights: dict[str, Tensor]) -> None:
        raise NotImplementedError

    def _write_model(self, folder: Path, prefix: str, weights: dict[str, Tensor]) -> None:
        raise NotImplementedError

    def _save_trained(self, models: list, weights: list[dict], folder: str) -> None:
        """Write these alone: every run can load the frozen part of the model again."""
        if PartialState().is_main_process:
            shape = json.dumps(self._lora_shape())
            (Path(folder) / LORA_SHAPE).write_text(shape + "\n", encoding="utf-8")
        if weights:  # none where DeepSpeed or FSDP have written their own
            weights.clear()
            if PartialState().is_main_process:
                save_file(whole_state(self.trained()), Path(folder) / TRAINED)

    def _load_trained(self, models: list, folder: str) -> None:
        path = Path(folder) / LORA_SHAPE
        shape = json.loads(path.read_text("utf-8")) if path.exists() else self._lora_shape()
        if shape != self._lora_shape():
            raise ValueError(f"LoRA has rank and alpha {shape} there and {self._lora_shape()} here")
        if models:
            models.clear()
            saved = load_file(Path(folder) / TRAINED)
            trained = self.trained()
            if odd := saved.keys() ^ trained.keys():
                where = "the checkpoint" if min(odd) in saved else "this model"
                raise ValueError(f"only {where} has weights named {min(odd)}")
            for name, parameter in trained.items():
                if saved[name].shape != parameter.shape:  # copy_ would repeat a LoRA of rank 1
                    raise ValueError(
                        f"{name} has the shape {list(saved[name].shape)} there and "
                        f"{list(parameter.shape)} here"
                    )
                parameter.data.copy_(saved[name])

    def _lora_shape(self) -> list[list[float]]:
        """Rank and alpha, all there are: weights do not tell alpha, by which they are scaled."""
        shapes = {
            (layer.r[name], layer.lora_alpha[name])
            for layer in lora_layers(self.network)
            for name in layer.active_adapters
        }
        return [list(shape) for shape in sorted(shapes)]


def widen(parameters: Iterable[nn.Parameter], least: torch.dtype = torch.float32) -> None:
    """Hold these weights in `least` or better: in half precision they cannot hold small steps."""
    for parameter in parameters:
        parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, least))
