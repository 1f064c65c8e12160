"""What is trained: LoRA on a vision-language model, or all of it; and the reference."""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from peft import LoraConfig
from torch import Tensor, nn
from torch.optim import Optimizer

from flow_grpo.answer.batches import PackedBatch
from flow_grpo.answer.critic import split_saved_groups
from flow_grpo.answer.expert_layout import published_layout
from flow_grpo.answer.lora import attach_lora
from flow_grpo.answer.models import family_of
from flow_grpo.answer.network import AnswerModel
from flow_grpo.run.distributed import filled, hold_with, hollow_copy, is_sharded
from flow_grpo.run.policy import BasePolicy, widen
from flow_grpo.run.snapshot import Reference
from flow_grpo.speed.lora import lora_layers


class AnswerPolicy(BasePolicy):
    """What needs no gradients calls `whole`, while `gathered`: each process as often as it likes.
    That is the network itself, unless its weights are sharded. The reference is `whole` with LoRA
    as training began, or a frozen copy."""

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
        flex_attention: bool = False,
        seed: int = 0,
    ) -> None:
        # tokenizer and image processor, saved with whole models
        self._parts = [part for part in parts if part is not None]
        family = family_of(model)
        targets = family.lora_targets(with_tower=not freeze_vision)
        lora = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets)
        super().__init__(model, lora if use_lora else None, lora_path, seed)
        settings = {"temperature": temperature, "compute_dtype": compute_dtype}
        settings["flex_attention"] = flex_attention
        frozen, self._frozen = None, None
        if not use_lora:
            frozen = copy.deepcopy(model).requires_grad_(False) if with_reference else None
            if family.tower is not None:
                family.tower.requires_grad_(not freeze_vision)
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        widen(trained.values())
        if frozen is not None:
            # the same arithmetic: autocast would cast these matrices to what they are
            cast, own = only_multiplied(frozen), dict(frozen.named_parameters())
            widen(own[name] for name in trained if name not in cast)
            self._frozen = AnswerModel(frozen, **settings)
        self.network = AnswerModel(model, with_value=with_value, **settings)
        self.network.to(model.device)
        self._recompute = gradient_checkpointing
        if gradient_checkpointing:
            before = model.gradient_checkpointing_enable  # its name until transformers 5.23
            enable = getattr(model, "activation_checkpointing_enable", before)
            enable({"use_reentrant": False})
        self.module = self.whole = self.network
        # before weights are sharded: each process calls the reference as often as it likes
        self._start = Reference(self.trained()) if use_lora and with_reference else None

    def describe(self) -> str:
        """What is trained, in a line. Call it before `prepare`, which may shard the weights."""
        what = f"LoRA on {len(lora_layers(self.model))} layers" if self.use_lora else "all weights"
        tower = family_of(self.model).tower
        if tower is not None:
            seeing = any(p.requires_grad for p in tower.parameters())
            what += f", {'also' if seeing else 'not'} in the vision tower"
        if self.network.value is not None:
            what += ", and a value head"
        return f"{what}: {sum(p.numel() for p in self.parameters()):,} parameters"

    def _load_lora(self, path: str) -> None:
        attach_lora(self.model, path)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the policy's weights and, in a separate group, those of the value head."""
        if self.network.value is None:
            return super().parameter_groups()
        critic = list(self.network.value.parameters())
        policy = self.parameters()[: -len(critic)]  # the value head is the last module
        return [{"params": policy}, {"params": critic}]

    def drop_policy_gradients(self) -> None:
        """Keep only the gradients of the value head: the optimizer skips weights without one.
        DeepSpeed holds its own gradients, which are 0 here."""
        for parameter in self.parameters()[: -len(list(self.network.value.parameters()))]:
            parameter.grad = None

    def prepare(self, accelerator: Accelerator, optimizer: Optimizer) -> Optimizer:
        if self.network.value is not None:
            optimizer.register_load_state_dict_pre_hook(split_saved_groups)
        if is_sharded(accelerator):
            self.whole = sampler(self.network)
            self.network.in_step = True
        if accelerator.distributed_type == DistributedType.FSDP:
            blocks = list(self.model._no_split_modules)
            accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = blocks
        optimizer = super().prepare(accelerator, optimizer)
        hold_with(self.network, self.model.lm_head.weight)
        if self._start is not None:
            own = dict(self.whole.named_parameters())
            self._start.parameters = [own[name] for name in self._start.names]
            self._start.prepare(accelerator)
        return optimizer

    def gathered(self) -> AbstractContextManager:
        """While it is entered, `whole` has the weights as they are. Call it on all processes."""
        return nullcontext() if self.whole is self.network else filled(self.whole, self.network)

    def scores(self, batch: PackedBatch, *, critic_only: bool = False) -> dict[str, Tensor]:
        """Log-probabilities, and values where there is a head for them, with gradients; with
        `critic_only`, those of values reach the head alone."""
        self.network.eval()
        if self._recompute:
            enable_recomputation(self.network)
        return self.module(batch, critic_only=critic_only)

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

    def _write_lora(self, folder: Path, weights: dict[str, Tensor]) -> None:
        self.model.save_pretrained(folder, state_dict=weights)

    def _write_model(self, folder: Path, prefix: str, weights: dict[str, Tensor]) -> None:
        with published_layout(self.model, weights):
            self.model.save_pretrained(folder / f"{prefix}model", state_dict=weights)
        for part in self._parts:
            part.save_pretrained(folder / f"{prefix}model")


def enable_recomputation(network: nn.Module) -> None:
    """Enable activation checkpointing, which transformers supports in training mode only.

    Submodules of the checkpointed layers stay in evaluation mode: with dropout, of LoRA or of the
    model, the trained policy would differ from the behaviour policy.
    """
    for module in network.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True


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
