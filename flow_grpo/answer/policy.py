"""What is trained: LoRA on a vision-language model, or all of it; and the reference."""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType
from peft import LoraConfig
from torch import Tensor, nn
from torch.optim import Optimizer

from flow_grpo.answer.batches import PackedBatch
from flow_grpo.answer.models import family_of
from flow_grpo.answer.network import AnswerModel
from flow_grpo.errors import UserError
from flow_grpo.rewards.loading import explained
from flow_grpo.run.shards import filled, hold_with, hollow_copy, is_sharded, whole_state
from flow_grpo.run.snapshot import Reference
from flow_grpo.run.trained import Trained

ADAPTER = "default"
FLOAT = torch.float32


class AnswerPolicy(Trained):
    """`module` is the wrapped network after `prepare`: training calls that one, so that
    distribution sees every forward with gradients. What needs no gradients calls `whole`, while
    `gathered`: each process as often as it likes. That is the network itself, unless its weights
    are sharded. The reference is `whole` with LoRA as training began, or a frozen copy."""

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
        # tokenizer and image processor, saved with whole models
        self._parts = [part for part in parts if part is not None]
        family = family_of(model)
        model.requires_grad_(False)
        settings = {"temperature": temperature, "compute_dtype": compute_dtype}
        frozen = self._frozen = None
        if use_lora:
            targets = family.lora_targets(with_tower=not freeze_vision)
            _add_lora(model, rank, alpha, targets, lora_path, seed)
        else:
            if lora_path:
                raise UserError(f"train.lora_path={lora_path} needs use_lora=True")
            if with_reference:
                frozen = copy.deepcopy(model)
            model.requires_grad_(True)
            if family.tower is not None:
                family.tower.requires_grad_(not freeze_vision)
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        widen(model, trained)  # a half-precision weight cannot hold small steps
        if frozen is not None:
            # the same arithmetic: autocast would cast these matrices to what they are
            widen(frozen, [name for name in trained if name not in only_multiplied(frozen)])
            self._frozen = AnswerModel(frozen, **settings)
        self.network = AnswerModel(model, with_value=with_value, **settings)
        self.network.to(model.device)
        self._recompute = gradient_checkpointing
        if gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.module: nn.Module = self.network
        self.whole = self.network
        # before weights are sharded: each process calls the reference as often as it likes
        self._start = Reference(self.trained()) if use_lora and with_reference else None

    @property
    def model(self) -> nn.Module:
        return self.network.model

    def prepare(self, accelerator: Accelerator, optimizer: Optimizer) -> Optimizer:
        if is_sharded(accelerator):
            self.whole = sampler(self.network)
            self.network.in_step = True
        if accelerator.distributed_type == DistributedType.FSDP:
            blocks = list(self.model._no_split_modules)
            accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = blocks
        self.module, optimizer = accelerator.prepare(self.network, optimizer)
        hold_with(self.network, self.model.lm_head.weight)
        self.register(accelerator)
        if self._start is not None:
            own = dict(self.whole.named_parameters())
            self._start.parameters = [own[name] for name in self._start.names]
            self._start.prepare(accelerator)
        return optimizer

    def gathered(self) -> AbstractContextManager:
        """While it is entered, `whole` has the weights as they are. Call it on all processes."""
        return nullcontext() if self.whole is self.network else filled(self.whole, self.network)

    def scores(self, batch: PackedBatch) -> dict[str, Tensor]:
        """Log-probabilities, and values where there is a head for them, with gradients."""
        # these models have no dropout; they recompute activations in this mode only
        self.network.train(self._recompute)
        return self.module(batch)

    @torch.no_grad()
    def fixed_scores(self, batch: PackedBatch) -> dict[str, Tensor]:
        """The same without gradients, of the weights as they are."""
        self.whole.eval()
        return self.whole(batch)

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
            with self._start.applied():
                yield self.whole

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


def sampler(network: AnswerModel) -> AnswerModel:
    """A hollow copy of it, to sample with. In half precision, matrices that autocast would cast for
    every token are cast once, which halves the memory: all but those that embed tokens as well, and
    LoRA, which is to be merged."""
    whole = hollow_copy(network)
    if network.compute_dtype is not None:
        named = dict(whole.model.named_parameters())
        for name in only_multiplied(whole.model):
            named[name].data = named[name].data.to(network.compute_dtype)
    return whole


def only_multiplied(model: nn.Module) -> set[str]:
    """Weights of linear layers that nothing else uses, but for LoRA's."""
    others = {
        weight
        for name, layer in model.named_modules()
        if type(layer) is not nn.Linear or ".lora_" in name
        for weight in layer.parameters(recurse=False)
    }
    return {name for name, weight in model.named_parameters() if weight not in others}


def widen(model: nn.Module, names: list[str]) -> None:
    """Hold these weights in float32 or better."""
    named = dict(model.named_parameters())
    for name in names:
        named[name].data = named[name].data.to(torch.promote_types(named[name].dtype, FLOAT))


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
