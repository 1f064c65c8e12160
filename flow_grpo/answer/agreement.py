"""Whether a model that nobody here has seen before gives the same as its own forward pass, with a
prompt that several answers share: else what is trained is not what was loaded."""

import torch
from torch import Tensor

from flow_grpo.answer.batches import Answer, packed
from flow_grpo.answer.models.text import OWN, TextModel
from flow_grpo.answer.network import AnswerModel
from flow_grpo.answer.prompts import EncodedPrompt
from flow_grpo.errors import UserError

NEAR, NEAR_IN_HALF = 1e-3, 0.25  # log-probabilities


@torch.no_grad()
def check_agreement(network: AnswerModel) -> None:
    """Refuse a language model whose logits are not its head's alone, whose positions are of another
    kind, or whose tokens see what they should not."""
    if not isinstance(network.family, TextModel):
        return
    device, words = network.model.device, network.model.config.vocab_size
    tokens = (torch.arange(1, 13) * 7919) % words
    prompt = EncodedPrompt(tokens[:6], torch.arange(6)[None], 6)
    answers = [tokens[6:9], tokens[9:]]
    batch = packed([Answer(0, prompt, answer) for answer in answers], pad=0).to(device)
    ours = network.eval()(batch)["log_probs"]
    theirs = torch.stack([_stock(network, prompt.ids, answer) for answer in answers])
    apart = float((ours - theirs).abs().max())
    if not apart <= (NEAR if network.compute_dtype is None else NEAR_IN_HALF):
        raise UserError(
            f"pretrained.model is a {type(network.model).__name__}, whose log-probabilities are "
            f"off by {apart:.2g} when several answers share a prompt; {OWN}"
        )


def _stock(network: AnswerModel, prompt: Tensor, answer: Tensor) -> Tensor:
    """(T,), by the forward pass of transformers."""
    ids = torch.cat([prompt, answer])[None].to(network.model.device)
    with network.cast(ids.device):
        logits = network.model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    scores = (logits.float() / network.temperature).log_softmax(-1)
    return scores.gather(-1, ids[0, len(prompt) :, None])[:, 0]
