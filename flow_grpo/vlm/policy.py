"""The trained policy (LoRA or all weights of a VLM) and its reference."""

import copy
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from peft import LoraConfig
from torch import Tensor, nn
from torch.optim import Optimizer

from flow_grpo.errors import UserError
from flow_grpo.perf.lora import lora_layers
from flow_grpo.training.distributed import (
    borrow_weights,
    copy_without_weights,
    is_sharded,
    register_external_weight,
)
from flow_grpo.training.policy import BasePolicy, upcast_parameters
from flow_grpo.training.snapshot import Reference
from flow_grpo.vlm.attention import PACKED_ATTENTION
from flow_grpo.vlm.critic import split_saved_param_groups
from flow_grpo.vlm.expert_layout import published_layout
from flow_grpo.vlm.lora import attach_lora, check_lora_is_used, select_lora_layers
from flow_grpo.vlm.models import get_family
from flow_grpo.vlm.network import PolicyModel
from flow_grpo.vlm.packing import PackedBatch
from flow_grpo.vlm.separate_critic import SeparateCritic, build_critic
from flow_grpo.vlm.sequence_parallel import FIELD, SequenceShards


class VlmPolicy(BasePolicy):
    """The trained policy of a VLM run, and its reference.

    `module` is trained and may be wrapped and sharded. `full_model` is for computations without
    gradients: inside `gathered_weights` it has all weights, so ranks may call it different numbers
    of times. Unless weights are sharded, it is the network itself. The reference is `full_model`
    with the initial LoRA, or a frozen copy of the model if all weights are trained.

    Args:
        model: The transformers model, from `load_model`.
        processors: Tokenizer and image processor (or None), saved next to full weights.
        use_lora: Whether to train LoRA; otherwise all weights are trained.
        rank: Rank of a new LoRA.
        alpha: Alpha of a new LoRA.
        target_modules: Layers of a new LoRA (`train.lora_target_modules`).
        lora_path: LoRA to start from instead of a new one.
        freeze_vision: Whether the vision tower stays frozen.
        with_reference: Whether to keep a reference policy, for the KL penalty.
        with_value: Whether to add a value head.
        critic_model: Model of a critic with its own weights, instead of a value head.
        temperature: Sampling temperature.
        gradient_checkpointing: Whether to recompute activations in the backward pass.
        compute_dtype: Autocast dtype; None computes in the dtype of the weights.
        flex_attention: Whether to train with flex attention.
        compiled: Whether to compile the decoder layers.
        weight_dtype: Dtype of trained weights, unless those of `model` are more precise.
        seed: Seed of a new LoRA's weights.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        processors: list[Any],
        use_lora: bool = True,
        rank: int = 32,
        alpha: int = 64,
        target_modules: str = "",
        lora_path: str = "",
        freeze_vision: bool = True,
        with_reference: bool = False,
        with_value: bool = False,
        critic_model: nn.Module | None = None,
        temperature: float = 1.0,
        gradient_checkpointing: bool = False,
        compute_dtype: torch.dtype | None = None,
        flex_attention: bool = False,
        compiled: bool = False,
        weight_dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        self._processors = [part for part in processors if part is not None]
        family = get_family(model)
        targets = family.lora_targets(with_tower=not freeze_vision)
        if target_modules:
            targets = select_lora_layers(family, target_modules, freeze_vision)
        lora = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets)
        super().__init__(model, lora if use_lora else None, lora_path, seed)
        settings = {
            "temperature": temperature,
            "compute_dtype": compute_dtype,
            "flex_attention": flex_attention,
            "compiled": compiled,
        }
        frozen, self._frozen_reference = None, None
        if not use_lora:
            frozen = copy.deepcopy(model).requires_grad_(False) if with_reference else None
            family.set_tower_trainable(trainable=not freeze_vision)
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        upcast_parameters(trained.values(), weight_dtype)
        if frozen is not None:
            # the same arithmetic as the policy's float32 weights: autocast casts only `cast` back
            cast, weights = linear_only_weights(frozen), dict(frozen.named_parameters())
            others = (weights[name] for name in trained if name not in cast)
            upcast_parameters(others, weight_dtype)
            self._frozen_reference = PolicyModel(frozen, **settings)
        self.network = PolicyModel(model, with_value=with_value, **settings)
        models = [model]
        if critic_model is not None:
            models.append(critic_model)
            self.network.value = build_critic(critic_model, settings, freeze_vision=freeze_vision)
        if processors:
            self._ban_tokens(family.marker_ids(processors[0]))
        self.network.to(model.device)
        self._activation_checkpointing = gradient_checkpointing
        for each in models if gradient_checkpointing else ():
            old_name = each.gradient_checkpointing_enable  # until transformers 5.23
            enable = getattr(each, "activation_checkpointing_enable", old_name)
            enable({"use_reentrant": False})
        self.module = self.full_model = self.network
        # copied before weights are sharded, because each rank uses it independently
        self._initial_lora = (
            Reference(self.sampled_parameters()) if use_lora and with_reference else None
        )

    def _ban_tokens(self, tokens: list[int]) -> None:
        """Never sample these tokens, besides those of the family."""
        for network in (self.network, self._frozen_reference):
            if network is not None:
                network.banned_token_ids = sorted({*network.banned_token_ids, *tokens})

    def split_columns(self, shards: SequenceShards) -> None:
        """Divide columns among the processes of a group in training; call before `prepare`.

        Raises:
            UserError: If the model's attention does not use torch's SDPA, or if its layers mix
                columns by other means than attention.
        """
        decoder, family = self.model.get_decoder(), self.network.family
        implementation = decoder.config._attn_implementation
        is_full = family.shares_prompt and family.flex_attention  # with one mask for all layers
        if implementation not in ("sdpa", PACKED_ATTENTION) or not is_full:
            raise UserError(
                f"is not supported for {type(self.model).__name__}: its layers exchange tokens in "
                "other ways than by full attention",
                field=FIELD,
                value=shards.size,
            )
        for network in (self.network, self._frozen_reference):
            if network is not None:
                network.split_columns(shards)

    def describe(self) -> str:
        """Return one line about what is trained; call it before `prepare` shards the weights."""
        what = f"LoRA on {len(lora_layers(self.model))} layers" if self.use_lora else "all weights"
        tower = self.network.family.tower
        if tower is not None:
            trains_tower = any(p.requires_grad for p in tower.parameters())
            what += f", {'including' if trains_tower else 'without'} the vision tower"
        if self.network.value is not None:
            what += f", plus a {'separate critic' if self.has_separate_critic else 'value head'}"
        return f"{what}: {sum(p.numel() for p in self.parameters()):,} parameters"

    def _load_lora(self, path: str) -> None:
        attach_lora(self.model, path)
        check_lora_is_used(get_family(self.model), path)

    @property
    def has_separate_critic(self) -> bool:
        return isinstance(self.network.value, SeparateCritic)

    def sampled_parameters(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters without those of a separate critic."""
        trained = self.trained_parameters()
        if not self.has_separate_critic:
            return trained
        return {name: p for name, p in trained.items() if not name.startswith("value.")}

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the policy's parameters and, in a second group, those of the critic."""
        if self.network.value is None:
            return super().parameter_groups()
        return [{"params": own} for own in self._policy_and_critic()]

    def clipped_together(self) -> list[list[nn.Parameter]]:
        """Return the parameters of the policy and of a separate critic as groups."""
        return list(self._policy_and_critic()) if self.has_separate_critic else [self.parameters()]

    def _policy_and_critic(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the trained parameters of the policy and of the critic."""
        critic = [p for p in self.network.value.parameters() if p.requires_grad]
        return self.parameters()[: -len(critic)], critic  # the critic is the last module

    def drop_policy_gradients(self) -> None:
        """Keep only the gradients of the critic: the optimizer skips parameters without one.

        DeepSpeed keeps its own gradients, which are 0 here.
        """
        for parameter in self._policy_and_critic()[0]:
            parameter.grad = None

    def prepare(self, accelerator: Accelerator, optimizer: Optimizer) -> Optimizer:
        """Wrap the network for distributed training and return the wrapped optimizer.

        If weights are sharded, `full_model` becomes a copy into which they are gathered.
        """
        if self.network.value is not None:
            optimizer.register_load_state_dict_pre_hook(split_saved_param_groups)
        if is_sharded(accelerator):
            self.full_model = build_sampling_copy(self.network)
            for part in self.network.modules():
                if isinstance(part, PolicyModel):  # a separate critic also contains one
                    part.runs_in_lockstep = True
        if accelerator.distributed_type == DistributedType.FSDP:
            blocks = list(self.model._no_split_modules)
            accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = blocks
        optimizer = super().prepare(accelerator, optimizer)
        register_external_weight(self.network, self.model.lm_head.weight)
        if self._initial_lora is not None:
            weights = dict(self.full_model.named_parameters())
            self._initial_lora.parameters = [weights[name] for name in self._initial_lora.names]
            self.add_snapshot(self._initial_lora, accelerator)
        return optimizer

    def gathered_weights(self) -> AbstractContextManager:
        """Return a context in which `full_model` has all current weights; collective."""
        if self.full_model is self.network:
            return nullcontext()
        return borrow_weights(self.full_model, self.network)

    def forward_tokens(
        self, batch: PackedBatch, *, critic_only: bool = False, given: bool = False
    ) -> dict[str, Tensor]:
        """Compute log-probabilities, and values with a value head, with gradients.

        Args:
            batch: R packed responses.
            critic_only: Whether the gradient of the values stops at the value head.
            given: Whether the responses are not samples of the policy; see `PolicyModel.forward`.

        Returns:
            `log_probs` and `values`, (R, T) each.
        """
        self.network.eval()
        if self._activation_checkpointing:
            enable_activation_checkpointing(self.network)
        return self.module(batch, critic_only=critic_only, given=given)

    @torch.no_grad()
    def forward_tokens_no_grad(
        self, batch: PackedBatch, *, given: bool = False
    ) -> dict[str, Tensor]:
        """Return the result of `forward_tokens`, without gradients; call in `gathered_weights`."""
        self.full_model.eval()
        return self.full_model(batch, given=given)

    @torch.no_grad()
    def reference_log_probs(self, batch: PackedBatch, *, given: bool = False) -> Tensor:
        """Return the log-probabilities (R, T) under the reference policy."""
        if self._frozen_reference is not None:
            return self._frozen_reference(batch, given=given)["log_probs"]
        with self._initial_lora.applied():
            return self.full_model(batch, given=given, with_values=False)["log_probs"]

    def _write_lora(self, folder: Path, weights: dict[str, Tensor]) -> None:
        self.model.save_pretrained(folder, state_dict=weights)

    def _write_model(self, folder: Path, prefix: str, weights: dict[str, Tensor]) -> None:
        """Write the model with `weights` and its processors to `<prefix>model/`."""
        with published_layout(self.model, weights):
            self.model.save_pretrained(folder / f"{prefix}model", state_dict=weights)
        for part in self._processors:
            part.save_pretrained(folder / f"{prefix}model")


def enable_activation_checkpointing(network: nn.Module) -> None:
    """Enable activation checkpointing, which transformers supports in training mode only.

    Submodules of the checkpointed layers stay in evaluation mode: with dropout, of LoRA or of the
    model, the trained policy would differ from the behaviour policy.
    """
    for module in network.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True


def build_sampling_copy(network: PolicyModel) -> PolicyModel:
    """Return a copy without weights for sampling, into which sharded weights are gathered.

    In half precision, matrices that autocast would cast for every token are stored in that
    precision, which halves their memory. Exceptions are weights tied to the token embedding, and
    LoRA, which is merged in float32 first.
    """
    sampling_copy = copy_without_weights(network)
    if network.compute_dtype is not None:
        models = [m.model for m in sampling_copy.modules() if isinstance(m, PolicyModel)]
        for model in models:  # including that of a separate critic
            named = dict(model.named_parameters())
            for name in linear_only_weights(model):
                named[name].data = named[name].data.to(network.compute_dtype)
    return sampling_copy


def linear_only_weights(model: nn.Module) -> set[str]:
    """Return the names of weights that only linear layers use, excluding LoRA."""
    others = {
        weight
        for name, layer in model.named_modules()
        if type(layer) is not nn.Linear or ".lora_" in name
        for weight in layer.parameters(recurse=False)
    }
    return {name for name, weight in model.named_parameters() if weight not in others}
