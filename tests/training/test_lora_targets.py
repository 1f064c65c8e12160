"""`train.lora_target_modules`: which layers a name selects, and names that select none."""

import pytest
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import nn
from user_errors import raises_user_error

from flow_grpo.training.lora_targets import FIELD, parse_target_modules, select_target_modules


def build() -> nn.Module:
    """Return a model whose last layer's name ends the names of layers in blocks."""
    block = nn.ModuleDict({"to_q": nn.Linear(2, 2), "proj_out": nn.Linear(2, 2)})
    block["to_out"] = nn.ModuleList([nn.Linear(2, 2), nn.Dropout()])
    block["conv"] = nn.Conv1d(2, 2, 1)
    other = nn.ModuleDict({"to_q": nn.Linear(2, 2), "to_out": nn.Linear(2, 2)})
    return nn.ModuleDict({"blocks": nn.ModuleList([block, other]), "proj_out": nn.Linear(2, 2)})


QUERIES, OUTPUTS = {"blocks.0.to_q", "blocks.1.to_q"}, {"blocks.0.proj_out", "proj_out"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("to_q", QUERIES),
        ("1.to_q, to_out.0", {"blocks.1.to_q", "blocks.0.to_out.0"}),
        ("['proj_out', 'to_q']", QUERIES | OUTPUTS),
        ("to_out", {"blocks.1.to_out"}),  # PEFT raises for the list of the same name
        ("all-linear", QUERIES | OUTPUTS | {"blocks.0.to_out.0", "blocks.1.to_out"}),
    ],
)
def test_peft_attaches_lora_to_exactly_the_named_layers(text, expected):
    assert attached(select_target_modules(build(), text)) == expected


def test_excluded_layers_get_no_lora_even_if_their_names_end_alike():
    def exclude(name: str, layer: nn.Module) -> str:
        return "why" if name.startswith("blocks.0") else ""

    selected = select_target_modules(build(), "all-linear", exclude)
    assert attached(selected) == {"blocks.1.to_q", "blocks.1.to_out", "proj_out"}
    with raises_user_error("why", field=FIELD, value="to_out.0"):
        select_target_modules(build(), "to_q,to_out.0", exclude)


def attached(targets: list[str] | str) -> set[str]:
    model = inject_adapter_in_model(LoraConfig(r=1, target_modules=targets), build())
    return {name for name, module in model.named_modules() if isinstance(module, LoraLayer)}


@pytest.mark.parametrize(
    ("text", "value", "shown"),
    [
        ("to_q,to_k", "to_k", ("did you mean to_q?", "proj_out, to_out, to_out.0, to_q")),
        ("conv", "conv", ("Conv1d", "to_out.0")),
        ("blocks", "blocks", ("ModuleList", "to_out.0")),
        ("o_q", "o_q", ()),
        ("to_.*", "to_.*", ()),
        ("to_q,,(", "to_q,,(", ()),
        ("to_q,", "to_q,", ()),
        ("to_q,proj out", "to_q,proj out", ()),
        ("to_q,all-linear", "to_q,all-linear", ()),
        ("[]", "[]", ()),
    ],
)
def test_a_name_without_a_linear_layer_is_rejected(text, value, shown):
    with raises_user_error(*shown, field=FIELD, value=value):
        select_target_modules(build(), text)


def test_order_and_notation_do_not_matter():
    assert parse_target_modules("b, a,b") == parse_target_modules("['a', \"b\"]") == ["a", "b"]
    assert parse_target_modules("('a',)") == ["a"]
    assert parse_target_modules(" ") == []
