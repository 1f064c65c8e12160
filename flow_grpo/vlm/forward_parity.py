"""Check that packed log-probabilities equal those of the model's own forward pass.

Any causal language model of transformers is accepted, so the assumptions of the packed forward pass
(shared prompts, position ids, `lm_head`) are verified on the loaded model.
"""

import torch
from torch import Tensor

from flow_grpo.errors import UserError
from flow_grpo.vlm.models.text import CUSTOM_FAMILY_HINT, TextModel
from flow_grpo.vlm.network import PolicyModel
from flow_grpo.vlm.packing import Response, pack_responses
from flow_grpo.vlm.prompts import EncodedPrompt

TOLERANCE, HALF_PRECISION_TOLERANCE = 1e-3, 0.25  # of log-probabilities


@torch.no_grad()
def check_forward_parity(network: PolicyModel) -> None:
    """Reject a text-only model whose packed log-probabilities differ from its own.

    Causes are logits that are more than `lm_head` of the hidden states, other position ids, or
    attention that ignores the mask.
    """
    if not isinstance(network.family, TextModel):
        return
    device, vocabulary = network.model.device, network.model.config.vocab_size
    tokens = (torch.arange(1, 13) * 7919) % vocabulary
    prompt = EncodedPrompt(tokens[:6], torch.arange(6)[None], 6)
    responses = [tokens[6:9], tokens[9:]]
    batch = pack_responses([Response(0, prompt, each) for each in responses], pad=0).to(device)
    ours = network.eval()(batch)["log_probs"]
    theirs = torch.stack([_stock_log_probs(network, prompt.ids, each) for each in responses])
    difference = float((ours - theirs).abs().max())
    tolerance = TOLERANCE if network.compute_dtype is None else HALF_PRECISION_TOLERANCE
    if not difference <= tolerance:  # also True for NaN
        raise UserError(
            f"is a {type(network.model).__name__}, whose log-probabilities differ by "
            f"{difference:.2g} from those of transformers when several responses share a prompt",
            field="pretrained.model",
            hint=CUSTOM_FAMILY_HINT,
        )


def _stock_log_probs(network: PolicyModel, prompt: Tensor, response: Tensor) -> Tensor:
    """Return log-probabilities (T,) by the forward pass of transformers."""
    ids = torch.cat([prompt, response])[None].to(network.model.device)
    with network.autocast(ids.device):
        logits = network.model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    scores = (logits.float() / network.temperature).log_softmax(-1)
    return scores.gather(-1, ids[0, len(prompt) :, None])[:, 0]
