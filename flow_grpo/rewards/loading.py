"""Loaders of networks, tokenizers, image processors and weight files, from disk or the hub.

Every failure becomes a `UserError` that names the option.
"""

import pickle
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from flow_grpo.errors import UserError, first_line
from flow_grpo.hub_access import check_hub_access, hub_error_message
from flow_grpo.untrusted_files import read_json
from flow_grpo.weight_checks import (
    check_finite,
    check_implementations,
    check_loading_report,
    check_regular_files,
    quiet_transformers,
)

Weights = dict[str, torch.Tensor]

# Exceptions that transformers, torch, safetensors and the hub raise for an invalid source.
LOAD_ERRORS = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ImportError,
    RuntimeError,
    ArithmeticError,
    SafetensorError,
    StrictDataclassError,
    EOFError,
    pickle.UnpicklingError,
)


# Torch's errors name its reader of zip files if a file is damaged, and globals that it rejects.
TORCH_READER = "PytorchStreamReader"
REJECTED_GLOBAL = re.compile(r"(?:GLOBAL|function) ([\w.]+)")


def _pickle_error(error: pickle.UnpicklingError, option: str, source: str) -> UserError:
    """Return the error for a pickle with objects other than tensors, or a damaged one.

    Torch's own message is not used, because it advises executing the code.
    """
    named = REJECTED_GLOBAL.search(str(error))
    what = f" ({named[1]})" if named else ""
    return UserError(
        f"is a damaged pickle, or contains Python objects other than tensors{what}, whose code is "
        "not executed",
        field=option,
        value=source,
        hint="use the authors' .safetensors files, or a state dict of tensors only",
    )


@contextmanager
def explain_load_errors(
    option: str, source: str, kind: str, known: Iterable[str] = ()
) -> Iterator[None]:
    """Context manager that turns exceptions from loading into a `UserError`.

    Args:
        option: Name of the option at fault.
        source: Its value: a local path or a hub id.
        kind: What is loaded, with its article: "a tokenizer".
        known: Hub ids to suggest for a misspelled one.
    """
    check_hub_access(option, source, known=known)
    check_regular_files(option, source)
    try:
        yield
    except LOAD_ERRORS as error:
        cause = error.__cause__ if isinstance(error, StrictDataclassError) else error
        reason = first_line(cause or error)
        if isinstance(error, KeyError):
            reason = f"{reason} is missing"
        if "trust_remote_code" in str(error):
            raise UserError(
                "contains Python code, which is not executed",
                field=option,
                value=source,
                hint=f"use {kind} that transformers can load without remote code",
            ) from error
        if isinstance(error, pickle.UnpicklingError):
            raise _pickle_error(error, option, source) from error
        if TORCH_READER in str(error):
            reason = "the file is incomplete or damaged"
        if Path(source).exists():
            raise UserError(
                f"cannot be loaded as {kind} ({reason})",
                field=option,
                value=source,
                hint="use the files that the model's authors published, or a copy written with "
                "save_pretrained",
            ) from error
        if message := hub_error_message(error, option, source, known=known):
            raise UserError(message) from error
        raise UserError(
            f"is neither a local path nor {kind} on the hub ({reason})",
            field=option,
            value=source,
            hint=f"without a network, pass the path of a copy as {option}",
        ) from error


@contextmanager
def explain_template_errors(option: str, source: str) -> Iterator[None]:
    """Context manager that turns any exception of a chat template into a `UserError`.

    Args:
        option: Name of the option that names the model.
        source: Its value.
    """
    try:
        yield
    except Exception as error:  # a template is a program and can raise anything
        raise UserError(
            f"has a chat template that fails ({type(error).__name__}: {first_line(error)})",
            field=option,
            value=source,
            hint="use the files that the model's authors published",
        ) from error


def load_network(
    network_class: type,
    source: str,
    *,
    dtype: torch.dtype,
    kind: str,
    weights: Weights | None = None,
    **options: Any,
) -> nn.Module:
    """Load a transformers model and check its weights.

    Args:
        network_class: Class with `from_pretrained`.
        source: Local path or hub id, the value of the option `model`.
        dtype: Data type of the weights.
        kind: What is loaded, with its article, for messages.
        weights: State dict from a file of another format, in place of the weights of `source`;
            `options` must then have `config`.
        **options: Passed to `from_pretrained`.
    """
    if weights is None:
        options["config"] = load_config(network_class.config_class, source, kind)
    else:
        options["state_dict"] = weights
    with explain_load_errors("model", source, kind), quiet_transformers():
        network, report = network_class.from_pretrained(
            source if weights is None else None,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are in the report
            trust_remote_code=False,
            **options,
        )
    # published files contain tensors of modules that a reward does not use
    check_loading_report("model", source, report, kind, allow_unexpected=True)
    check_finite(f"model={source!r}", network.state_dict().items())
    return network


def load_config(
    config_classes: type | tuple[type, ...], source: str, kind: str, *, option: str = "model"
) -> Any:
    """Load the config of a model; reject another type of model and kernels from the hub."""
    from transformers import AutoConfig

    with explain_load_errors(option, source, kind):
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        raw, _ = config.get_config_dict(source)
    if not isinstance(config, config_classes):
        raise UserError(
            f"is a {config.model_type} model, but must be {kind}", field=option, value=source
        )
    check_implementations(option, source, raw)
    return config


def load_tokenizer(source: str, *, option: str, tokens: int, extra: tuple[str, ...] = ()) -> Any:
    """Load a tokenizer, add the `extra` special tokens, and check its size.

    Args:
        source: Local path or hub id, the value of `option`.
        option: Name of the option.
        tokens: Number of tokens of the model; another number is rejected.
        extra: Special tokens to add.
    """
    from transformers import AutoTokenizer

    with explain_load_errors(option, source, "a tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    tokenizer.add_tokens(list(extra), special_tokens=True)
    if len(tokenizer) != tokens:  # transformers 5 returns an empty one for a folder without files
        raise UserError(
            f"has a tokenizer of {len(tokenizer)} tokens, but the model has {tokens}",
            field=option,
            value=source,
            hint=f"set {option} to the model that the tokenizer belongs to",
        )
    return tokenizer


def load_chat_template(source: str, revision: str = "main", *, option: str) -> str:
    """Return the chat template of models published before tokenizers contained it."""
    from transformers.utils import cached_file

    try:
        path = cached_file(source, "chat_template.json", revision=revision)
        return read_json(Path(path))["chat_template"]
    except (UserError, OSError, KeyError, TypeError) as error:
        raise UserError(
            "has no chat template",
            field=option,
            value=source,
            hint="use a chat or instruction-tuned model",
        ) from error


def image_processor_class() -> type:
    """Return CLIP's PIL image processor: torchvision, if installed, would resize differently."""
    import transformers

    pil = getattr(transformers, "CLIPImageProcessorPil", None)  # transformers 5
    return pil or transformers.CLIPImageProcessor


def load_image_processor(source: str, *, option: str) -> Any:
    """Load CLIP's image processor from `source`, the value of `option`."""
    with explain_load_errors(option, source, "an image processor"):
        return image_processor_class().from_pretrained(source)


def find_file(source: str, names: tuple[str, ...], *, option: str, kind: str) -> Path:
    """Return the path of a weight file, which is downloaded if it is on the hub.

    Args:
        source: A file, or a folder or hub repository that contains one.
        names: File names to look for, in this order.
        option: Name of the option with the value `source`.
        kind: What is loaded, with its article, for messages.

    Raises:
        UserError: If there is no such file.
    """
    path = Path(source)
    if path.is_file():
        return path
    if path.is_dir():
        for name in names:
            if (path / name).is_file():
                return path / name
        raise UserError(
            f"does not contain {' or '.join(names)}",
            field=option,
            value=source,
            hint="pass the path of the file",
        )
    with explain_load_errors(option, source, kind):
        for name in names[:-1]:
            with suppress(EntryNotFoundError):
                return Path(hf_hub_download(source, name))
        return Path(hf_hub_download(source, names[-1]))


def load_weights_file(path: Path) -> Weights:
    """Load a state dict from .safetensors or `torch.save`, without executing pickled code.

    A state dict may be nested under "state_dict" or "model".
    """
    if path.suffix == ".safetensors":
        return load_file(path)
    content = torch.load(path, map_location="cpu", weights_only=True)
    for name in ("state_dict", "model"):
        if isinstance(content.get(name), dict):
            return content[name]
    return content


def build_linear_head(
    weights: Weights, width: int, outputs: int = 1, activation: type[nn.Module] | None = None
) -> nn.Sequential:
    """Build a stack of linear layers in float32, from `width` features to `outputs` values.

    The heads of the aesthetic predictor and of ImageReward have no activations between the layers.
    Dropout is left out, because it is applied in training only.
    """
    head = nn.Sequential()
    for name in sorted((key for key in weights if key.endswith("weight")), key=_layer_number):
        if head and activation:
            head.append(activation())
        rows, inputs = weights[name].shape
        if inputs != width:
            raise ValueError(f"{name} has {inputs} inputs instead of {width}")
        layer = nn.Linear(inputs, rows)
        bias = weights[name.removesuffix("weight") + "bias"]
        layer.load_state_dict({"weight": weights[name], "bias": bias})
        head.append(layer)
        width = rows
    if not head or width != outputs:
        raise ValueError(f"the last layer of its head must have {outputs} output(s)")
    return head


def _layer_number(name: str) -> list[int]:
    return [int(part) for part in name.split(".") if part.isdigit()]
