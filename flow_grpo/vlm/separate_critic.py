"""A critic with its own weights (`train.critic="separate"`), as in EasyR1 and verl.

Both start it from a pretrained model with a scalar head (verl/workers/fsdp_workers.py:204 of
EasyR1) and minimise 0.5 max((V - R)^2, (clip(V, V_old +- c) - R)^2), averaged over the tokens of an
update (verl/trainer/core_algos.py:548-552 and verl/workers/critic/dp_critic.py:234), with its own
optimizer, learning rate and gradient clipping. During its warm-up, only the critic is trained
(verl/trainer/ray_trainer.py:659).

Here the critic is part of the policy's module, so that checkpoints, DDP, FSDP2 and ZeRO-3 treat
both alike. Adam's step does not depend on the scale of the loss, and the gradients of the two are
clipped separately, so one optimizer with two parameter groups takes the same steps as two
optimizers. The scalar head is initialized to zero instead of randomly.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from flow_grpo.errors import UserError
from flow_grpo.modelscope_hub import local_model
from flow_grpo.rewards.loading import explain_load_errors
from flow_grpo.training.policy import upcast_parameters
from flow_grpo.vlm.models import find_family
from flow_grpo.vlm.network import PolicyModel, build_value_head
from flow_grpo.vlm.packing import PackedBatch

# vision settings that the outputs of the image processor depend on
IMAGE_FIELDS = ("patch_size", "spatial_merge_size", "temporal_patch_size", "image_size")


class SeparateCritic(nn.Module):
    """A model without an LM head that predicts the value of each token.

    Args:
        network: Model that reads the same packed rows as the policy.
    """

    def __init__(self, network: PolicyModel) -> None:
        super().__init__()
        self.network = network
        config = network.model.config
        precise = torch.promote_types(network.model.dtype, torch.float32)
        self.head = build_value_head(config.get_text_config().hidden_size, precise)
        self.head.to(network.model.device)
        network.model.lm_head = nn.Identity()  # unused; DDP waits for gradients of all weights

    def forward(self, batch: PackedBatch) -> Tensor:
        """Return the value of every token of a batch, (tokens,).

        Models of one family pad their embeddings to different sizes, so the policy may sample an
        id that the critic does not have; such ids do not occur in text.
        """
        last = self.network.model.get_input_embeddings().num_embeddings - 1
        ids = batch.inputs.input_ids.clamp(max=last)
        hidden = self.network.hidden_states(replace(batch.inputs, input_ids=ids))
        chosen = hidden[batch.row[:, None], batch.column][batch.mask]  # (tokens, width)
        return self.head(chosen.to(self.head.weight.dtype))[:, 0]


def check_critic_model(policy: str, critic: str, revision: str = "main") -> None:
    """Raise a UserError unless a critic's model can read the inputs of the policy.

    Args:
        policy: Directory or hub id of the policy's model.
        critic: Directory or hub id of the critic's model.
        revision: Revision of the policy's model on the hub.
    """
    policy, critic = local_model(policy, revision), local_model(critic, field="train.critic_model")
    find_family(policy, revision)
    find_family(critic, field="train.critic_model")
    ours = AutoConfig.from_pretrained(policy, revision=revision, trust_remote_code=False)
    theirs = AutoConfig.from_pretrained(critic, trust_remote_code=False)

    def inputs(config: AutoConfig) -> dict[str, object]:
        vision = getattr(config, "vision_config", None)
        names = ("model_type", "image_token_id")
        return {name: getattr(config, name, None) for name in names} | {
            f"vision_config.{name}": getattr(vision, name, None) for name in IMAGE_FIELDS
        }

    wanted = inputs(ours)
    for name, found in inputs(theirs).items():
        if found != wanted[name]:
            raise UserError(
                f"has {name}={found!r}, but pretrained.model={policy!r} has {wanted[name]!r}",
                field="train.critic_model",
                value=critic,
                hint="use a model of the same family",
            )
    _check_vocabulary(policy, critic, revision)


def _check_vocabulary(policy: str, critic: str, revision: str) -> None:
    """Raise a UserError unless the tokens of the policy have the same ids in the critic.

    The critic may have further special tokens, such as for padding, but not further tokens of
    text, which it would expect there.
    """
    ours = _load_tokenizer(policy, revision, "pretrained.model").get_vocab()
    tokenizer = _load_tokenizer(critic, "main", "train.critic_model")
    theirs = tokenizer.get_vocab()
    special = {str(each) for each in tokenizer.added_tokens_decoder.values() if each.special}
    known = theirs | ours
    for token in sorted(known, key=known.get):
        found, wanted = theirs.get(token), ours.get(token)
        if found != wanted and not (wanted is None and token in special):
            raise UserError(
                f"has another vocabulary than pretrained.model={policy!r}: the id of {token!r} is "
                f"{found} instead of {wanted}",
                field="train.critic_model",
                value=critic,
                hint="use a model with the same tokenizer",
            )


def _load_tokenizer(source: str, revision: str, field: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model; errors name `field`."""
    with explain_load_errors(field, source, "a model with a tokenizer"):
        return AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False)


def build_critic(
    model: nn.Module, settings: dict[str, Any], *, freeze_vision: bool
) -> SeparateCritic:
    """Build a critic whose weights are all trained, except those of a frozen vision tower.

    Args:
        model: The critic's transformers model.
        settings: Further arguments of `PolicyModel`, the same as for the policy.
        freeze_vision: Whether the vision tower stays frozen.
    """
    critic = SeparateCritic(PolicyModel(model, **settings))
    critic.requires_grad_(True)
    critic.network.family.set_tower_trainable(trainable=not freeze_vision)
    upcast_parameters(p for p in critic.parameters() if p.requires_grad)
    return critic
