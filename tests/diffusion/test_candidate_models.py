"""Candidates of all formats are evaluated alike; unusable ones are rejected before sampling."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from families import FAMILIES, save_small_pipeline
from peft import LoraConfig, get_peft_model
from policies import make_policy
from safetensors.torch import load_file, save_file
from sessions import short_config
from user_errors import raises_user_error

from flow_grpo.diffusion.checkpoint_evaluation import evaluate_checkpoints
from flow_grpo.diffusion.models import load_adapter
from flow_grpo.diffusion.models.kohya import to_kohya
from flow_grpo.diffusion.models.lora_files import read_lora
from flow_grpo.diffusion.models.sd3 import SD3Adapter
from flow_grpo.training.lora_files import IncompatibleWeights


@pytest.fixture(scope="module")
def formats(tiny_sd3, tmp_path_factory) -> dict[str, Path]:
    """The same LoRA in each format, and the same transformer as a directory and in a pipeline."""
    root = tmp_path_factory.mktemp("formats")
    lora = LoraConfig(r=4, lora_alpha=12, target_modules=SD3Adapter.lora_targets)
    wrapped = get_peft_model(load_adapter(str(tiny_sd3)).transformer, lora)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    wrapped.save_pretrained(root / "peft")
    policy = make_policy(load_adapter(str(tiny_sd3)), lora_path=str(root / "peft"))
    policy.save(root / "run")
    diffusers = root / "run/lora"
    file = shutil.copy(next(diffusers.glob("*.safetensors")), root / "my_lora.safetensors")
    pipeline = shutil.copytree(tiny_sd3, root / "pipeline")
    [weights] = (pipeline / "transformer").glob("*.safetensors")
    tensors = {name: 1.1 * tensor for name, tensor in load_file(weights).items()}
    save_file(tensors, weights, {"format": "pt"})
    transformer = shutil.copytree(pipeline / "transformer", root / "full")
    tensors = load_file(root / "peft/adapter_model.safetensors")
    tensors = {name.removeprefix("base_model.model."): each for name, each in tensors.items()}
    comfy = to_kohya(tensors, {"r": 4, "lora_alpha": 12}, "StableDiffusion3Pipeline")
    save_file(comfy, root / "comfy.safetensors")
    kohya = {}
    for name, tensor in tensors.items():
        layer, _, matrix = name.removesuffix(".weight").rpartition(".lora_")
        prefix = f"lora_transformer_{layer.replace('.', '_')}"
        kohya[f"{prefix}.lora_{'down' if matrix == 'A' else 'up'}.weight"] = tensor
        kohya[f"{prefix}.alpha"] = torch.tensor(12.0)
    save_file(kohya, root / "kohya.safetensors")
    return {
        "peft": root / "peft",
        "diffusers": diffusers,
        "file": Path(file),
        "comfy": root / "comfy.safetensors",
        "kohya": root / "kohya.safetensors",
        "pipeline": pipeline,
        "transformer": transformer,
    }


@pytest.fixture
def evaluated(tiny_sd3, tmp_path) -> Callable[..., dict[str, np.ndarray]]:
    """Return the images of each candidate, (prompts, H, W, 3), by its name."""

    def run(*candidates: Path | str) -> dict[str, np.ndarray]:
        config = short_config(tmp_path, "unused")
        config.pretrained.model, config.max_sequence_length = str(tiny_sd3), 8
        fields = {"height": 32, "width": 32, "sample.eval_num_steps": 2, "eval_prompts": 2}
        config.update_from_flattened_dict(fields)
        found = evaluate_checkpoints(config, [str(each) for each in candidates], tmp_path / "out")
        return {each.name: np.stack([*map(np.asarray, each.result.images)]) for each in found}

    return run


def test_a_lora_has_the_same_images_in_each_format(formats, evaluated):
    names = ["peft", "diffusers", "file", "comfy", "kohya"]
    base, *found = evaluated("base", *(formats[name] for name in names)).values()
    assert len(found) == len(names)
    for name, images in zip(names, found, strict=True):
        assert np.array_equal(images, found[0]), name
    assert not np.array_equal(base, found[0])


def test_a_pipeline_has_the_same_images_as_its_transformer(formats, evaluated):
    """The base model is restored between and after them."""
    order = [formats[name] for name in ("pipeline", "peft", "transformer")]
    found = evaluated(*order, "base", formats["file"])
    pipeline, peft, transformer, base, file = found.values()
    assert np.array_equal(pipeline, transformer)
    assert np.array_equal(peft, file)
    assert not np.array_equal(base, pipeline)
    assert not np.array_equal(base, peft)


def change_tensors(change: Callable[[dict], dict]) -> Callable[[Path], None]:
    """Return a function that changes the tensors of a LoRA or transformer directory."""

    def apply(folder: Path) -> None:
        [file] = folder.glob("*.safetensors")
        save_file(change(load_file(file)), file, {"format": "pt"})

    return apply


def set_infinite(weights: dict) -> dict:
    weights[min(weights)].view(-1)[0] = float("inf")
    return weights


def cut_off(folder: Path) -> None:
    [file] = folder.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-9])


def make_pickle(folder: Path) -> None:
    [file] = folder.glob("*.safetensors")
    file.rename(folder / "adapter_model.bin")


def set_field(name: str, field: str, value: object) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        config = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(config | {field: value}))

    return apply


BROKEN = {
    "corrupt-lora": ("peft", cut_off, "adapter_model.safetensors"),
    "pickle": ("peft", make_pickle, "adapter_model.bin"),
    "loha": ("peft", set_field("adapter_config.json", "peft_type", "LOHA"), "'LOHA'"),
    "infinite-lora": ("diffusers", change_tensors(set_infinite), "infinite"),
    "other-model": (
        "diffusers",
        change_tensors(lambda w: {k.replace("blocks.1.", "blocks.9."): v for k, v in w.items()}),
        "blocks.9.",
    ),
    "missing-tensor": (
        "transformer",
        change_tensors(lambda w: {k: v for k, v in w.items() if k != "proj_out.bias"}),
        "proj_out.bias",
    ),
    "mismatched-tensor": (
        "transformer",
        change_tensors(lambda w: w | {"proj_out.bias": torch.zeros(3)}),
        "(3,)",
    ),
    "unexpected-tensor": ("transformer", change_tensors(lambda w: w | {"x": torch.ones(1)}), "x"),
    "other-class": (
        "transformer",
        set_field("config.json", "_class_name", "FluxTransformer2DModel"),
        "FluxTransformer2DModel",
    ),
    "corrupt-transformer": ("transformer", cut_off, "safetensors"),
}


@pytest.mark.parametrize(("kind", "damage", "shown"), BROKEN.values(), ids=BROKEN)
def test_unusable_weights_are_rejected_before_sampling(
    formats, evaluated, tmp_path, kind, damage, shown
):
    weights = shutil.copytree(formats[kind], tmp_path / "weights")
    damage(weights)
    with raises_user_error(shown):
        evaluated("base", weights)
    assert not (tmp_path / "out").exists()


def test_a_file_of_full_weights_is_no_lora(formats, evaluated):
    [file] = formats["transformer"].glob("*.safetensors")
    with raises_user_error(field="--checkpoint", value=str(file)):
        evaluated("base", file)


def test_damaged_pipelines_are_rejected_before_sampling(formats, evaluated, tmp_path):
    pipeline = shutil.copytree(formats["pipeline"], tmp_path / "weights")
    change_tensors(set_infinite)(pipeline / "transformer")
    with raises_user_error("infinite"):
        evaluated("base", pipeline)
    cut_off(pipeline / "vae")
    with raises_user_error("vae"):
        evaluated("base", pipeline)
    assert not (tmp_path / "out").exists()


def test_candidates_of_several_families_are_rejected(evaluated, tmp_path):
    family = next(each for each in FAMILIES if each.name == "flux")
    other = save_small_pipeline(family, tmp_path / "flux")
    with raises_user_error("StableDiffusion3Pipeline", field="--checkpoint", value=str(other)):
        evaluated("base", other)
    with raises_user_error("FluxTransformer2DModel", kind=IncompatibleWeights):
        evaluated(other / "transformer")


@pytest.mark.parametrize("name", ["comfy", "kohya"])
def test_unusable_kohya_files_are_rejected_before_sampling(formats, evaluated, tmp_path, name):
    tensors = load_file(formats[name])
    layer = min(tensors).removesuffix(".alpha")
    foreign = {key.replace("blocks", "layers"): each for key, each in tensors.items()}
    changes = {
        f"{layer}.alpha": tensors | {f"{layer}.alpha": torch.ones(2)},
        layer: {key: each for key, each in tensors.items() if ".lora_" not in key},
        "layers": foreign,
        "hada_w1_a": tensors | {f"{layer}.hada_w1_a": torch.ones(1)},
        "infinite": set_infinite({key: each.clone() for key, each in tensors.items()}),
    }
    for number, (shown, changed) in enumerate(changes.items()):
        file = tmp_path / f"{number}.safetensors"
        save_file(changed, file)
        with raises_user_error(shown):
            evaluated("base", file)
    assert not (tmp_path / "out").exists()


def test_a_file_without_alpha_is_rejected(formats, tmp_path):
    """PEFT stores alpha in adapter_config.json only."""
    file = shutil.copy(formats["peft"] / "adapter_model.safetensors", tmp_path / "a.safetensors")
    with raises_user_error("adapter_config.json", field=str(file)):
        read_lora(file)
