"""The weights that are trained, LoRA or all of a network, and how a run saves and loads them."""

import json
from pathlib import Path

from accelerate import Accelerator, PartialState
from safetensors.torch import load_file, save_file
from torch import nn

from flow_grpo.run.shards import whole_state
from flow_grpo.speed.lora import lora_layers

TRAINED, LORA_SHAPE = "trained.safetensors", "lora.json"


class Trained:
    """Whatever in `network` has a gradient."""

    network: nn.Module

    def parameters(self) -> list[nn.Parameter]:
        return [p for p in self.network.parameters() if p.requires_grad]

    def register(self, accelerator: Accelerator) -> None:
        accelerator.register_save_state_pre_hook(self._save_trained)
        accelerator.register_load_state_pre_hook(self._load_trained)

    def _save_trained(self, models: list, weights: list[dict], folder: str) -> None:
        """In place of the whole model, whose frozen part every run can load again."""
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

    def trained(self) -> dict[str, nn.Parameter]:
        return {n: p for n, p in self.network.named_parameters() if p.requires_grad}
