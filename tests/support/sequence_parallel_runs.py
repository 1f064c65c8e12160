"""Single passes, and runs of scripts/train_vlm.py, with sequence parallelism.

    torchrun --nproc_per_node 4 tests/support/sequence_parallel_runs.py '[{"logdir": ...}]' FILE

writes to FILE how far the passes of each family, in one group of all processes, differ from those
of one process, and then executes the runs one after the other. A run with the key "fsdp2" is
sharded, and so are all after it.
"""

import json
import sys
import tempfile
from pathlib import Path

import small_vlm
import torch
import vlm_runs
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from fsdp_on_cpu import shard_on_cpu
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from untrained.small.components import seeded

from flow_grpo.perf.lora import lora_layers
from flow_grpo.perf.quantization import QuantizedLinear, quantize_linears
from flow_grpo.training.distributed import Ranks, get_ranks, set_context_parallel
from flow_grpo.vlm.network import PolicyModel
from flow_grpo.vlm.packing import PackedBatch, Response, pack_responses
from flow_grpo.vlm.policy import VlmPolicy
from flow_grpo.vlm.prompts import EncodedPrompt
from flow_grpo.vlm.sequence_parallel import FIELD, SequenceShards

NF4 = "qwen2_5_vl with NF4"  # and LoRA
FAMILIES = ("qwen2_5_vl", "qwen3_vl_moe", "internvl", "glm4v", "llama", NF4)
ROWS, LENGTHS = [0, 0, 1, 1, 2], [9, 1, 20, 4, 7]  # question and tokens of each response


def build(family: str) -> nn.Module:
    if family != "llama":
        model = small_vlm.build(family).double()
        model.set_experts_implementation("eager")  # the fused one has no float64
        return model
    with seeded(0):
        return LlamaForCausalLM(LlamaConfig(**small_vlm.TEXT)).double().eval()


def build_network(family: str) -> PolicyModel:
    if family != NF4:
        return PolicyModel(build(family), with_value=True)
    model = small_vlm.build("qwen2_5_vl", wide=True).double()
    quantize_linears([model.model], "nf4", torch.device("cpu"))
    network = VlmPolicy(model, processors=[], rank=4, with_value=True).network
    assert any(isinstance(each.base_layer, QuantizedLinear) for each in lora_layers(network))
    for name, parameter in network.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02, generator=torch.Generator().manual_seed(0))
    return network


def make_batch(model: nn.Module, family: str) -> PackedBatch:
    """Pack responses to questions with none, one and two images, except for the text model."""
    torch.manual_seed(0)
    if family == "llama":
        prompts = [EncodedPrompt(torch.arange(8, 13), torch.arange(5)[None], 5)] * 3
    else:
        encoder = small_vlm.encoder(model)
        with tempfile.TemporaryDirectory() as folder:
            prompts = [encoder.encode(each) for each in small_vlm.questions(Path(folder))]
    responses = [
        Response(row, prompts[row], torch.randint(8, 60, (length,)))
        for row, length in zip(ROWS, LENGTHS, strict=True)
    ]
    return pack_responses(responses, small_vlm.PAD)


def log_probs_and_gradients(network: PolicyModel, batch: PackedBatch) -> dict[str, Tensor]:
    """Return the outputs of a forward pass and the gradients of all weights."""
    network.zero_grad()
    scores = network(batch)
    weights = torch.linspace(-1, 1, batch.mask.numel()).reshape(batch.mask.shape)
    sum((each * weights).sum() for each in scores.values()).backward()
    gradients = {n: p.grad for n, p in network.named_parameters() if p.grad is not None}
    return {**{name: each.detach() for name, each in scores.items()}, **gradients}


def measure_errors(family: str, ranks: Ranks) -> dict[str, float]:
    """Return the largest error of each output and gradient, relative to its largest element."""
    network = build_network(family)
    nn.init.ones_(network.value.weight)
    batch = make_batch(network.model, family)
    alone = log_probs_and_gradients(network, batch)
    network.split_columns(SequenceShards(ranks))
    together = log_probs_and_gradients(network, batch)
    assert alone.keys() == together.keys()
    for name, gradient in together.items():
        if name not in ("log_probs", "values"):
            together[name] = ranks.sum_over_context(gradient)
    if family == "llama":
        network.flex_attention = True
        with torch.no_grad():  # on a CPU, flex attention has no gradient
            together["flex"], alone["flex"] = network(batch)["log_probs"], alone["log_probs"]
    return {
        name: float((together[name] - own).abs().max() / own.abs().max().clamp(min=1e-9))
        for name, own in alone.items()
    }


if __name__ == "__main__":
    accelerator = Accelerator(cpu=True)
    set_context_parallel(accelerator, accelerator.num_processes, FIELD)
    with vlm_runs.in_float64():
        errors = {name: measure_errors(name, get_ranks(accelerator)) for name in FAMILIES}
    if accelerator.is_main_process:
        Path(sys.argv[2]).write_text(json.dumps(errors))
    for fields in json.loads(sys.argv[1]):
        AcceleratorState._reset_state()
        if fields.pop("fsdp2", False):
            shard_on_cpu()
        vlm_runs.run(**fields)
