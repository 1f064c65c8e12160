"""Compare the names of the weights sent to vLLM with the names that its models load.

vllm_weight_names.toml has the latter, with the lines of vLLM's source.
"""

import re
import tomllib
from pathlib import Path

import pytest
import small_vlm
from peft import LoraConfig
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from flow_grpo.vlm.models import get_family
from flow_grpo.vlm.vllm_engine import iter_merged_weights, published_weights

TABLE = tomllib.loads(Path(__file__).with_name("vllm_weight_names.toml").read_text("utf-8"))
FAMILIES = TABLE["families"]
TEXT_CONFIGS = {
    "qwen2": Qwen2Config(**small_vlm.TEXT),
    "qwen3": Qwen3Config(**small_vlm.TEXT, tie_word_embeddings=True),
    "llama": LlamaConfig(**small_vlm.TEXT),
    "phi3": Phi3Config(**small_vlm.TEXT),
    "gemma3_text": Gemma3TextConfig(**small_vlm.GEMMA3_TEXT),
}


def build(family: str) -> nn.Module:
    """Build a small model with LoRA, whose adapter names must not be sent."""
    if family in TEXT_CONFIGS:
        model = AutoModelForCausalLM.from_config(TEXT_CONFIGS[family])
    else:
        model = small_vlm.build(family)
    model.add_adapter(LoraConfig(target_modules=get_family(model).lora_targets(with_tower=True)))
    return model


def component(name: str) -> dict:
    """Return the shards and modules of a component, including inherited ones."""
    own = TABLE["components"][name]
    base = component(own["like"]) if "like" in own else {"stacked": [], "modules": ()}
    modules = own.get("modules", "").split() or base["modules"]
    return {
        "stacked": own.get("stacked", base["stacked"]),
        "modules": {*modules, *own.get("also", "").split()},
    }


def to_vllm(name: str, family: dict) -> tuple[str, str]:
    """Return the name of a weight in vLLM's model, without numbers, and its shard."""
    for old, new in family["prefixes"]:
        if name.startswith(old):
            name = name.replace(old, new, 1)
    if "renamed" in family and name.startswith(family["renamed"][0]):
        name = name.replace(*family["renamed"], 1)
    shard = ""
    for prefix, part in family["parts"].items():
        for old, new, number in component(part)["stacked"] if name.startswith(prefix) else ():
            if old in name:
                name, shard = name.replace(old, new, 1), number
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "N", name), shard


@pytest.mark.parametrize("name", FAMILIES)
def test_vllm_loads_every_weight_and_gets_all_of_its_own(name):
    family, model = FAMILIES[name], build(name)
    found: dict[str, set[str]] = {}
    for weight, _ in published_weights(model, iter_merged_weights(model)):
        target, shard = to_vllm(weight, family)
        found.setdefault(re.sub(r"\.(weight|bias)$", "", target), set()).add(shard)
    parts = {prefix: component(part) for prefix, part in family["parts"].items()}
    expected = {f"{prefix}{module}" for prefix, part in parts.items() for module in part["modules"]}
    if not model.config.tie_word_embeddings:
        prefix = (
            "language_model." if any("lm_head." in old for old, _ in family["prefixes"]) else ""
        )
        expected.add(f"{prefix}lm_head")
    assert found.keys() == expected - {*family.get("absent", "").split()}
    # a packed module gets either all of its shards or an already packed matrix
    for prefix, part in parts.items():
        for module in part["modules"]:
            packed = f"{prefix}{module}"
            stacked = ((new, shard) for _, new, shard in part["stacked"])
            shards = {s for new, s in stacked if f"{packed}.".endswith(f"{new.strip('.')}.")}
            if packed in found and shards:
                assert found[packed] in (shards, {""}), packed


def test_families_that_vllm_may_sample_for_need_no_other_names():
    renamed = {name for name, family in FAMILIES.items() if "renamed" in family}
    newer = {"minicpmv4_7"}  # than this version of vLLM
    assert {*small_vlm.FAMILIES} - newer <= {*FAMILIES}
    assert not any(get_family(build(name)).vllm for name in newer)
    for name in renamed:
        assert not get_family(build(name)).vllm
