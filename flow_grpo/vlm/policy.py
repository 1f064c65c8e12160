"""What is trained: LoRA on a vision-language model, or all of it; and the reference."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from peft import LoraConfig
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import AutoModelForImageTextToText

from flow_grpo.errors import UserError
from flow_grpo.rewards.loading import explained
from flow_grpo.speed.lora import lora_layers, without_lora
from flow_grpo.training.shards import whole_state
from flow_grpo.training.trained import Trained
from flow_grpo.vlm.batches import PackedBatch
from flow_grpo.vlm.network import AnswerModel

ADAPTER = "default"
TOWER = "visual"
# every linear layer, wherever the model keeps its layers
LANGUAGE = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
VISION = r".*visual.*\.(qkv|(gate_|up_|down_)?proj|(linear_)?fc[12]|mlp\.[02])"
FLOAT = torch.float32


class AnswerPolicy(Trained):
    """`module` is the wrapped network after `prepare`: training calls that one, so that
    distribution sees every forward with gradients. The reference is the network with LoRA off, or a
    frozen copy."""

    def __init__(
        self,
        model: nn.Module,
        *,
        parts: list[Any],
        use_lora: bool = True,
        rank: int = 32,
        alpha: int = 64,
        lora_path: str = "",
        freeze_vision: bool = True,
        with_reference: bool = False,
        with_value: bool = False,
        temperature: float = 1.0,
        gradient_checkpointing: bool = False,
        compute_dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        self.use_lora = use_lora
        self._parts = parts  # tokenizer and image processor, saved with whole models
        model.requires_grad_(False)
        settings = {"temperature": temperature, "compute_dtype": compute_dtype}
        self._frozen = None
        if use_lora:
            targets = LANGUAGE if freeze_vision else f"({LANGUAGE}|{VISION})"
            _add_lora(model, rank, alpha, targets, lora_path, seed)
        else:
            if lora_path:
                raise UserError(f"train.lora_path={lora_path} needs use_lora=True")
            if with_reference:
                self._frozen = AnswerModel(copy.deepcopy(model), **settings)
            model.requires_grad_(True)
            model.model.visual.requires_grad_(not freeze_vision)
        for parameter in model.parameters():
            if parameter.requires_grad:  # a half-precision weight cannot hold small steps
                parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, FLOAT))
        self.network = AnswerModel(model, with_value=with_value, **settings)
        self.network.to(model.device)
        self._recompute = gradient_checkpointing
        if gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.module: nn.Module = self.network

    @property
    def model(self) -> nn.Module:
        return self.network.model

    def prepare(self, accelerator: Accelerator, optimizer: Optimizer) -> Optimizer:
        self.module, optimizer = accelerator.prepare(self.network, optimizer)
        self.register(accelerator)
        return optimizer

    def scores(self, batch: PackedBatch) -> dict[str, Tensor]:
        """Log-probabilities, and values where there is a head for them, with gradients."""
        # these models have no dropout; they recompute activations in this mode only
        self.network.train(self._recompute)
        return self.module(batch)

    @torch.no_grad()
    def fixed_scores(self, batch: PackedBatch) -> dict[str, Tensor]:
        """The same without gradients, of the weights as they are."""
        self.network.eval()
        return self.network(batch)

    @torch.no_grad()
    def reference(self, batch: PackedBatch) -> Tensor:
        """Log-probabilities of the model that training began with."""
        with self._reference() as network:
            return network(batch)["log_probs"]

    @contextmanager
    def _reference(self) -> Iterator[AnswerModel]:
        if self._frozen is not None:
            yield self._frozen
        else:
            with without_lora(lora_layers(self.model)):
                yield self.network

    def moved(self) -> None:
        """After an update of the weights: nothing here depends on them."""

    def save(self, folder: Path, prefix: str = "") -> None:
        """`<prefix>lora/` as PEFT writes it, or `<prefix>model/` as transformers does.

        Call it on all processes; one of them writes.
        """
        # with the buffers, where it is the whole model
        own = self.model.state_dict(keep_vars=True)
        named = {n: w for n, w in own.items() if "lora_" in n} if self.use_lora else own
        weights = whole_state(named)
        if not PartialState().is_main_process:
            return
        if self.use_lora:
            self.model.save_pretrained(folder / f"{prefix}lora", state_dict=weights)
            return
        place = folder / f"{prefix}model"
        self.model.save_pretrained(place, state_dict=weights)
        for part in self._parts:
            part.save_pretrained(place)


def load_model(
    source: str, device: torch.device, dtype: torch.dtype, revision: str = "main"
) -> nn.Module:
    with explained("pretrained.model", source, "a vision-language model"):
        model = AutoModelForImageTextToText.from_pretrained(source, dtype=dtype, revision=revision)
    if not hasattr(getattr(model, "model", None), TOWER):
        raise UserError(
            f"pretrained.model={source!r} is a {type(model).__name__}, and must be a Qwen2-VL, a "
            "Qwen2.5-VL or a Qwen3-VL"
        )
    return model.to(device).eval()


def _add_lora(
    model: nn.Module, rank: int, alpha: int, targets: str, lora_path: str, seed: int
) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if lora_path:
            with explained("train.lora_path", lora_path, "a LoRA of this model"):
                model.load_adapter(lora_path, adapter_name=ADAPTER, is_trainable=True)
        else:
            settings = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets)
            model.add_adapter(settings, adapter_name=ADAPTER)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
