"""The trained weights (LoRA or all of a network), and how they are saved and restored."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from flow_grpo.errors import UserError
from flow_grpo.perf.lora import lora_layers
from flow_grpo.training.distributed import free_weights_after_forward, gather_state_dict
from flow_grpo.training.lora_files import check_same_tensors
from flow_grpo.training.snapshot import Snapshot
from flow_grpo.training.state_copies import StateCopies, Write

ADAPTER_NAME = "default"  # PEFT's name for an unnamed adapter
TRAINED_FILE, LORA_SHAPE_FILE = "trained.safetensors", "lora.json"


class BasePolicy:
    """The trained weights of a model.

    Attributes:
        model: The model whose LoRA or weights are trained.
        network: The model, or a module that contains it.
        module: `network` as wrapped by `prepare`. Call it for forward passes with gradients, so
            that the distributed backend can synchronize them.
    """

    model: nn.Module
    network: nn.Module
    module: nn.Module

    def __init__(
        self, model: nn.Module, lora: LoraConfig | None, lora_path: str = "", seed: int = 0
    ) -> None:
        """Set up LoRA, or train all weights if `lora` is None.

        Args:
            model: The model to train.
            lora: Config of a new LoRA.
            lora_path: LoRA to start from instead of a new one.
            seed: Seed of a new LoRA's weights.
        """
        self.model, self.use_lora = model, lora is not None
        self.snapshots: list[Snapshot] = []  # copies of the weights that checkpoints contain
        if lora is None and lora_path:
            raise UserError("needs use_lora=True", field="train.lora_path", value=lora_path)
        if lora is not None:
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                if lora_path:
                    self._load_lora(lora_path)
                else:
                    model.add_adapter(lora, adapter_name=ADAPTER_NAME)
            _sort_target_modules(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(lora is None or "lora_" in name)

    def _load_lora(self, path: str) -> None:
        raise NotImplementedError

    def parameters(self) -> list[nn.Parameter]:
        """Return the trained parameters."""
        return list(self.trained_parameters().values())

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's parameter groups, in the order of `parameters`."""
        return [{"params": self.parameters()}]

    def clipped_together(self) -> list[list[nn.Parameter]]:
        """Return groups of trained parameters; the gradients of each group are clipped together."""
        return [self.parameters()]

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by name."""
        return {n: p for n, p in self.network.named_parameters() if p.requires_grad}

    def sampled_parameters(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters used in sampling, by name; EMA averages them."""
        return self.trained_parameters()

    def prepare(self, accelerator: Accelerator, optimizer: Optimizer) -> Optimizer:
        """Wrap the network for distributed training and return the wrapped optimizer."""
        self.module, optimizer = accelerator.prepare(self.network, optimizer)
        free_weights_after_forward(self.module)
        accelerator.register_load_state_pre_hook(self._load_trained)
        return optimizer

    def add_snapshot(self, snapshot: Snapshot, accelerator: Accelerator) -> None:
        """Save a copy of the weights in checkpoints and load it with the accelerator's state."""
        accelerator.register_load_state_pre_hook(lambda models, folder: snapshot.load(Path(folder)))
        self.snapshots.append(snapshot)

    def on_weights_updated(self) -> None:
        """Called after each update of the weights."""

    def save(self, folder: Path, prefix: str = "") -> None:
        """Write weights that stock libraries load: `<prefix>lora/`, or a model directory.

        Call it on all processes; the main process writes.
        """
        main = PartialState().is_main_process
        write = self.copy_exported(folder, StateCopies(keep=main), prefix)
        if main:
            write()

    def copy_exported(
        self,
        folder: Path,
        copies: StateCopies,
        prefix: str = "",
        replaced: Mapping[nn.Parameter, Tensor] = MappingProxyType({}),
    ) -> Write:
        """Copy what `save` writes to `folder` and return a function that writes it.

        Call it on all processes, and the function on the main process. A whole model is written at
        once, because the libraries that write it may change its attributes.

        Args:
            folder: Directory to write to.
            copies: Copies of the state that are already there.
            prefix: Prefix of the names of directories.
            replaced: Other values of trained weights, such as their moving average.
        """
        named = {name: replaced.get(w, w) for name, w in self.exported_weights().items()}
        if self.use_lora:
            weights = copies.gather(named)
            return lambda: self._write_lora(folder / f"{prefix}lora", weights)
        weights = gather_state_dict(named)
        if PartialState().is_main_process:
            self._write_model(folder, prefix, weights)
        return lambda: None

    def exported_weights(self) -> dict[str, Tensor]:
        """Return the weights that `save` writes, by name, sharded as they are."""
        # with buffers, which the weights of a whole model include
        named = self.model.state_dict(keep_vars=True)
        if self.use_lora:  # including weights of a loaded LoRA that are not trained
            named = {name: weight for name, weight in named.items() if "lora_" in name}
        return named

    def _write_lora(self, folder: Path, weights: dict[str, Tensor]) -> None:
        raise NotImplementedError

    def _write_model(self, folder: Path, prefix: str, weights: dict[str, Tensor]) -> None:
        raise NotImplementedError

    def copy_trained(self, folder: Path, copies: StateCopies, *, with_weights: bool) -> Write:
        """Copy the trained weights and return a function that writes them to `folder`.

        The frozen ones are loaded from the model again. Call it on all processes.

        Args:
            folder: Directory to write to.
            copies: Copies of the state that are already there.
            with_weights: False if DeepSpeed or FSDP write their own files of the weights.
        """
        shape = json.dumps(self._lora_shape())
        weights = copies.gather(self.trained_parameters()) if with_weights else None

        def write() -> None:
            (folder / LORA_SHAPE_FILE).write_text(shape + "\n", encoding="utf-8")
            if weights is not None:
                save_file(weights, folder / TRAINED_FILE)

        return write

    def _load_trained(self, models: list, folder: str) -> None:
        """Hook of `accelerator.load_state`: restore the trained weights in place.

        It empties `models`, so that accelerate loads nothing itself.

        Raises:
            ValueError: If the saved LoRA has another rank or alpha, or other tensors.
        """
        path = Path(folder) / LORA_SHAPE_FILE
        shape = json.loads(path.read_text("utf-8")) if path.exists() else self._lora_shape()
        if shape != self._lora_shape():
            raise ValueError(
                f"LoRA has rank and alpha {shape} in the checkpoint but {self._lora_shape()} here"
            )
        if models:
            models.clear()
            saved, trained = load_file(Path(folder) / TRAINED_FILE), self.trained_parameters()
            check_same_tensors(saved, trained)  # copy_ would broadcast a rank of 1
            for name, parameter in trained.items():
                parameter.data.copy_(saved[name])

    def _lora_shape(self) -> list[list[float]]:
        """Return all pairs of rank and alpha; the weights do not contain alpha."""
        shapes = {
            (layer.r[name], layer.lora_alpha[name])
            for layer in lora_layers(self.network)
            for name in layer.active_adapters
        }
        return [list(shape) for shape in sorted(shapes)]


def _sort_target_modules(model: nn.Module) -> None:
    """Sort the target modules, which PEFT stores as a set: saved files would differ in order."""
    for part in model.modules():
        for config in getattr(part, "peft_config", {}).values():
            if isinstance(config.target_modules, set):
                config.target_modules = sorted(config.target_modules)


def upcast_parameters(
    parameters: Iterable[nn.Parameter], least: torch.dtype = torch.float32
) -> None:
    """Store weights in `least` or better: half precision cannot represent small updates."""
    for parameter in parameters:
        parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, least))
