"""Which layers get LoRA: `train.lora_target_modules`, checked against the model's layers.

Names are those of PEFT's `target_modules`: a layer matches a name if its full name is it, or ends
with it after a dot. PEFT raises if a name matches a layer that it does not support, and ignores a
name that matches nothing; here a name selects the linear layers it matches, at least one.
"""

import re
from collections.abc import Callable, Collection, Iterable

from torch import nn

from flow_grpo.errors import UserError, did_you_mean, join_hints

FIELD = "train.lora_target_modules"
ALL_LINEAR = "all-linear"  # PEFT's name for all linear layers
MAX_LISTED = 24
LIST = re.compile(r"\[(.*?),?\s*\]|\((.*?),?\s*\)", re.DOTALL)  # in the notation of Python
LAYER_NAME = re.compile(r"[\w-]+(\.[\w-]+)*")
# returns why a layer cannot be trained, "" if it can
Exclusion = Callable[[str, nn.Module], str]


def parse_target_modules(text: str) -> list[str]:
    """Return the sorted names in a list such as "to_q, to_v" or "['to_q', 'to_v']"."""
    listed = LIST.fullmatch(text.strip())
    inner = (listed[1] or listed[2] or "") if listed else text
    names = {name.strip().strip("'\"") for name in inner.split(",")} if inner.strip() else set()
    return sorted(names)


def select_target_modules(
    model: nn.Module, text: str, exclude: Exclusion = lambda name, layer: ""
) -> list[str] | str:
    """Return PEFT's `target_modules` for the linear layers that `text` selects.

    Args:
        model: The model, which may be on the meta device.
        text: Value of `train.lora_target_modules`, not empty.
        exclude: Layers that cannot be trained: "all-linear" and names that also match others skip
            them.

    Returns:
        The sorted names of `text` if they match exactly these layers, or else the layers' own
        names, as a regular expression if one of them is the end of another layer's name.

    Raises:
        UserError: If a name matches no linear layer that can be trained.
    """
    names = parse_target_modules(text)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    trainable = {n for n, m in layers.items() if not exclude(n, m)}
    if names == [ALL_LINEAR]:
        chosen = trainable
    elif not names or ALL_LINEAR in names or not all(map(LAYER_NAME.fullmatch, names)):
        rule = f'must be layer names separated by commas, or "{ALL_LINEAR}" alone'
        raise UserError(rule, field=FIELD, value=text)
    else:
        for name in names:
            _check_name(model, name, layers, exclude)
        chosen = match_suffixes(names, trainable)
    everything = [name for name, _ in model.named_modules()]
    for candidate in (names, sorted(chosen)):
        if match_suffixes(candidate, everything) == chosen:
            return candidate
    return "|".join(map(re.escape, sorted(chosen)))


def match_suffixes(names: Iterable[str], layers: Iterable[str]) -> set[str]:
    """Return the layers that PEFT selects by these names."""
    ends = tuple(f".{name}" for name in names)
    return {layer for layer in layers if f".{layer}".endswith(ends)}


def _check_name(
    model: nn.Module, name: str, layers: dict[str, nn.Module], exclude: Exclusion
) -> None:
    """Raise a UserError if a name matches no linear layer that can be trained."""
    matched = match_suffixes([name], layers)
    reasons = [exclude(layer, layers[layer]) for layer in sorted(matched)]
    if matched and not all(reasons):
        return
    kinds = {n: type(m).__name__ for n, m in model.named_modules()}
    others = sorted({kinds[n] for n in match_suffixes([name], kinds)})
    if matched:
        problem = f"matches only layers that cannot be trained: {reasons[0]}"
    elif others:
        problem = f"matches {', '.join(others)}, but LoRA supports only linear layers"
    else:
        problem = f"matches no layer of this {type(model).__name__}"
    known = short_names(n for n, m in layers.items() if not exclude(n, m))
    listed = ", ".join(known[:MAX_LISTED]) + (", ..." if len(known) > MAX_LISTED else "")
    parts = [n for n in known if n.startswith(f"{name}.")]  # of a container such as `to_out`
    near = f"did you mean {parts[0]}?" if parts else did_you_mean(name, known)
    hint = join_hints(near, f"linear layers are {listed}, or {ALL_LINEAR} for all")
    raise UserError(problem, field=FIELD, value=name, hint=hint)


def short_names(layers: Iterable[str]) -> Collection[str]:
    """Return the last part of each layer's name, with those before it if it is a number."""
    found = set()
    for layer in layers:
        parts = layer.split(".")
        start = next((i for i in reversed(range(len(parts))) if not parts[i].isdigit()), 0)
        found.add(".".join(parts[start:]))
    return sorted(found)
