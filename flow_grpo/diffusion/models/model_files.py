"""Checks of the files of a pipeline before they are loaded."""

import re
from pathlib import Path

import diffusers
import transformers
from accelerate import init_empty_weights
from diffusers import AutoModel, DiffusionPipeline
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open

from flow_grpo.diffusion.models.processors import TOKENIZERS, encoder_class, transformers_class
from flow_grpo.errors import UserError, first_line
from flow_grpo.training.lora_files import IncompatibleWeights
from flow_grpo.untrusted_files import read_json
from flow_grpo.weight_checks import (
    check_files_finite,
    check_implementations,
    check_not_nan,
    check_stored_weights,
)

LIBRARIES = {"diffusers": diffusers, "transformers": transformers}
# Components that diffusers keeps next to a pipeline: module of the pipeline and class.
PIPELINE_PARTS = {
    ("ltx2", "LTX2TextConnectors"),
    ("ltx2", "LTX2Vocoder"),
    ("ltx2", "LTX2VocoderWithBWE"),
}
COMPOSITE_CLASSES = (DiffusionPipeline, transformers.ProcessorMixin)
# What diffusers, transformers and safetensors raise for missing or damaged files of a model.
PIPELINE_LOAD_ERRORS = (
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
)


def may_run_code(library: str, name: str) -> bool:
    """Return whether a component has an unknown library or a class that selects other classes."""
    if library == "None" or (library, name) in PIPELINE_PARTS:
        return False
    kind = getattr(LIBRARIES.get(library), name, object)
    is_composite = isinstance(kind, type) and issubclass(kind, COMPOSITE_CLASSES)
    return library not in LIBRARIES or is_composite or bool(re.match("Auto[A-Z]", name))


def check_model_files(model: str) -> None:
    """Reject a pipeline directory with missing, damaged or unsafe files.

    Weights are not read, only the headers of their files. Of a hub id only the configs are checked.
    """
    components = DiffusionPipeline.load_config(model).items()
    folder = Path(model)
    if folder.is_dir():
        for name, value in components:
            _check_required_files(folder, name, transformers_class(value))
    for name, value in components:
        if encoder_class(value) is not None:  # its config may select kernels from the hub
            config, _ = transformers.PretrainedConfig.get_config_dict(model, subfolder=name)
            check_implementations("pretrained.model", f"{model}/{name}", config)
    for part in sorted(folder.glob("*/")):
        check_stored_weights(part)
        for path in sorted(part.glob("*config.json")):
            check_not_nan("pretrained.model", part, read_json(path))


def check_pipeline_files(model: str) -> None:
    """Check the files of a pipeline directory without loading it, including all weights.

    Raises:
        UserError: If a file is missing, damaged or unsafe, a value is not finite, or a transformer
            lacks tensors or has others than its config describes.
    """
    try:
        check_model_files(model)
        for part in sorted(Path(model).glob("*/")):
            check_files_finite(part)
        for name, value in DiffusionPipeline.load_config(model).items():
            if name.startswith("transformer") and isinstance(value, list) and value[1]:
                check_transformer_files(Path(model, name), model, name)
    except PIPELINE_LOAD_ERRORS as error:
        raise load_error(model, error) from error


def check_transformer_files(folder: Path, model: str, name: str) -> None:
    """Compare the names and shapes of saved tensors with those of a transformer.

    Only headers are read.

    Args:
        folder: Directory of the weights.
        model: Pipeline directory or hub id with the config of the transformer.
        name: Its component name.
    """
    config = AutoModel.load_config(model, subfolder=name)
    own, kind = read_json(folder / "config.json").get("_class_name"), config["_class_name"]
    if own != kind:
        raise IncompatibleWeights(
            f"has _class_name={own!r} in its config.json, but the {name} of this model is a {kind}",
            field=folder,
        )
    with init_empty_weights():
        expected = dict(getattr(diffusers, kind).from_config(config).named_parameters())
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                names = file.keys()
                shapes = {each: tuple(file.get_slice(each).get_shape()) for each in names}
        except SafetensorError as error:
            raise UserError(f"cannot be read: {first_line(error)}", field=path) from error
        for each, shape in shapes.items():
            needed = expected.pop(each, None)
            if needed is not None and shape != tuple(needed.shape):
                raise IncompatibleWeights(
                    f"does not fit this model: {each} has shape {shape}, but needs "
                    f"{tuple(needed.shape)}",
                    field=folder,
                )
    if expected:
        raise IncompatibleWeights(
            f"does not fit this model: missing tensor {min(expected)}", field=folder
        )


def _check_required_files(folder: Path, name: str, kind: type | None) -> None:
    """Reject missing files that transformers replaces by an empty vocabulary or default sizes."""
    if kind is None:
        return
    alternatives = _required_files(TOKENIZERS.get(kind.__name__, kind))
    missing = [[f for f in files if not (folder / name / f).is_file()] for files in alternatives]
    if missing and all(missing):
        files = " or ".join(map(", ".join, missing))
        raise load_error(str(folder), f"{name} has no {files}")


def _required_files(kind: type) -> list[list[str]]:
    """Return the alternative sets of files, besides weights, that a model or tokenizer needs.

    Other components, such as image processors, are not checked: the list is empty.
    """
    if issubclass(kind, transformers.PreTrainedModel):
        return [["config.json"]]
    if not issubclass(kind, transformers.PreTrainedTokenizerBase):
        return []
    vocabulary = dict(kind.vocab_files_names)
    single_file = vocabulary.pop("tokenizer_file", None)
    choices = [list(vocabulary.values()), [single_file] if single_file else []]
    alternatives = [["tokenizer_config.json", *files] for files in choices if files]
    return alternatives or [["tokenizer_config.json"]]


def load_error(model: str, cause: Exception | str) -> UserError:
    """Return the error for a model that cannot be loaded; it names a damaged file if any."""
    if isinstance(cause, StrictDataclassError):
        cause = cause.__cause__ or cause
    if isinstance(cause, Exception):
        cause = _find_damaged_file(Path(model)) or first_line(cause)
    return UserError(f"cannot be loaded: {cause}", field="pretrained.model", value=model)


def _find_damaged_file(folder: Path) -> str:
    """Return which file cannot be read, since the libraries may not name it; "" if none."""
    for path in sorted(folder.glob("*/*")):
        try:
            if path.suffix == ".safetensors":
                with safe_open(path, "pt"):
                    pass
            elif path.suffix == ".json":
                read_json(path)
        except (UserError, OSError, SafetensorError) as error:
            return f"{path} is damaged ({first_line(error)})"
    return ""
