"""Presets against docs/published.toml: what authors ran, and what differs on purpose; and all
presets against tests/config/recorded_presets.json, which running this file as a script
writes anew."""

import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from ml_collections import ConfigDict

from flow_grpo.config.config_dicts import FREE_FORM_FIELDS
from flow_grpo.diffusion import fields as draw_fields
from flow_grpo.diffusion import presets
from flow_grpo.diffusion.algorithms import ALGORITHMS
from flow_grpo.diffusion.algorithms.forward_process import ForwardProcessAlgorithm
from flow_grpo.diffusion.builders import get_eval_guidance_scale
from flow_grpo.diffusion.models.flux import FluxAdapter
from flow_grpo.diffusion.models.hunyuan_video15 import HunyuanVideo15Adapter
from flow_grpo.diffusion.models.ltx2 import LTX2Adapter
from flow_grpo.diffusion.models.qwen_image import QwenImageAdapter
from flow_grpo.diffusion.models.sd3 import SD3Adapter
from flow_grpo.diffusion.models.wan import WanAdapter
from flow_grpo.diffusion.models.z_image import ZImageAdapter
from flow_grpo.diffusion.presets import BENCHMARKS, TINY
from flow_grpo.diffusion.session import build_algorithm
from flow_grpo.vlm import presets as vlm_presets

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS))
from make_papers import load, page, resolved  # noqa: E402

DATA = load()
DRAW = sorted(presets.PRESETS.keys() - TINY.keys() - BENCHMARKS.keys())
VLM_PRESETS = list(vlm_presets.FULL)
FAMILIES = {
    "stable-diffusion-3.5": SD3Adapter,
    "FLUX.1": FluxAdapter,
    "Qwen-Image": QwenImageAdapter,
    "Z-Image": ZImageAdapter,
    "HunyuanVideo-1.5": HunyuanVideo15Adapter,
    "LTX-2": LTX2Adapter,
    "Wan2.1": WanAdapter,
    "Wan2.2": WanAdapter,
}
BOTH = [
    *("pretrained.model", "dataset", "reward_fn", "mixed_precision", "use_lora"),
    *(f"train.adam_{name}" for name in ("beta1", "beta2", "weight_decay")),
    *("train.learning_rate", "train.max_grad_norm", "train.num_inner_epochs"),
    *("train.advantage", "train.ema"),
]
OF_DRAWING = [
    *("groups", "sample.num_image_per_prompt", "updates", "trained", "algorithm"),
    *("sample.num_steps", "sample.eval_num_steps", "sample.guidance_scale", "eval_guidance"),
    *("sample.global_std", "sample.same_latent", "max_sequence_length", "allow_tf32"),
    *("train.lora_rank", "train.lora_alpha", "lora_targets", "train.adam_epsilon"),
]
OF_NOISY_STEPS = ["sample.sde_type", "sample.noise_level"]
OF_ANSWERING = [
    *("sample.questions_per_epoch", "sample.group_size", "sample.max_new_tokens"),
    *("sample.temperature", "max_prompt_length", "train.updates_per_epoch", "train.freeze_vision"),
    *("train.clip_low", "train.clip_high", "train.dual_clip", "train.loss", "train.aggregation"),
    *("train.beta", "train.kl", "train.kl_in", "train.advantage_scale", "train.importance_cap"),
]


def config_of(name: str, gpus: int = 1) -> ConfigDict:
    if name in VLM_PRESETS:
        return vlm_presets.get_config(name)
    return presets.get_config(f"{name}_{gpus}gpu")


def value_of(config: ConfigDict, field: str, gpus: int = 1) -> Any:
    sample, train = config.sample, config.train
    if field == "groups":
        samples = sample.train_batch_size * sample.num_batches_per_epoch * gpus
        return samples / sample.num_image_per_prompt
    if field == "updates":
        batches = sample.train_batch_size * sample.num_batches_per_epoch / train.batch_size
        return batches / train.gradient_accumulation_steps
    if field == "trained":
        return build_algorithm(config).losses_per_sample
    if field == "eval_guidance":
        return get_eval_guidance_scale(config.sample)
    if field in ("lora_targets", "negative_prompt"):
        [family] = [a for name, a in FAMILIES.items() if name in config.pretrained.model]
        return sorted(family.lora_targets) if field == "lora_targets" else family.negative_prompt
    value = config
    for part in field.split("."):
        value = value[part]
    if isinstance(value, ConfigDict):
        return value.to_dict()
    if field == "dataset":  # resolved to the repository if it ships
        return "/".join(Path(value).parts[-2:])
    return list(value) if isinstance(value, tuple) else value


def normalize(value: Any) -> Any:
    if value == "not set":
        return None
    return sorted(value) if isinstance(value, list) and isinstance(value[0], str) else value


def required(name: str, config: ConfigDict) -> list[str]:
    """Return the settings that an entry of this preset must state."""
    if name in VLM_PRESETS:
        return [*BOTH, *OF_ANSWERING]
    method, ema = ALGORITHMS[config.algorithm], config.train.ema
    model = config.pretrained.model
    average = ["train.ema_decay", "train.ema_update_interval"] if ema else []
    size = ["height", "width", "frames"] if config.height else ["resolution"]
    if issubclass(method, ForwardProcessAlgorithm):
        ours = ("kl_target", "noise_per")
        names = [
            f.name
            for f in fields(method.Settings)
            if f.name not in ours and "alias_of" not in f.metadata
        ]
        own = ["sample.solver"]
    else:
        names, own = ["beta", "clip_range", "adv_clip_max"], list(OF_NOISY_STEPS)
        own += ["sample.sde_window_range"] if config.sample.sde_window_size else []
    own += [f"{config.algorithm}.{each}" for each in names]
    # those of FLUX.2 depend on its number of blocks
    fixed = [each for each in OF_DRAWING if each != "lora_targets" or "FLUX.2" not in model]
    return [*BOTH, *fixed, *average, *size, *own]


def test_every_preset_of_a_full_size_model_is_in_the_table():
    assert DATA["presets"].keys() == {*DRAW, *VLM_PRESETS}


@pytest.mark.parametrize("name", DATA["presets"])
def test_a_preset_has_the_published_values(name):
    config = config_of(name)
    values, differs = resolved(DATA, DATA["presets"][name])
    expected = values | {f: d["ours"] for f, d in differs.items() if "ours" in d}
    found = {field: value_of(config, field) for field in expected}
    assert found == {field: normalize(value) for field, value in expected.items()}


@pytest.mark.parametrize("name", DATA["presets"])
def test_every_required_setting_is_stated(name):
    values, differs = resolved(DATA, DATA["presets"][name])
    stated = values.keys() | {f for f, d in differs.items() if "ours" in d}
    assert set(required(name, config_of(name))) - stated == set()


@pytest.mark.parametrize("name", DRAW)
def test_an_epoch_is_the_same_on_eight_gpus(name):
    one, eight = config_of(name), config_of(name, 8)
    for field in ("groups", "updates", "sample.num_image_per_prompt"):
        assert value_of(one, field) == value_of(eight, field, 8)


@pytest.mark.parametrize("kind", ["shared", "presets"])
def test_every_entry_has_a_source_or_is_marked_unpublished(kind):
    for name, entry in DATA[kind].items():
        assert entry.keys() <= {"repo", "commit", "unpublished", "like", "at", "differs"}, name
        if "unpublished" in entry:
            assert "repo" not in entry
            assert set(entry.get("at", {})) <= {"ours"}
        else:
            assert entry["repo"] in DATA["repos"], name
            assert entry["at"], name
        for field, differs in entry.get("differs", {}).items():
            assert differs["why"].endswith("."), (name, field)
            assert differs["published"] != differs.get("ours"), (name, field)


def test_the_page_is_generated_from_the_table():
    """If not: python docs/make_papers.py"""
    assert (DOCS / "papers.md").read_text("utf-8") == page(DATA)


RECORDED = Path(__file__).with_name("recorded_presets.json")
DEFAULTS = {"draw": draw_fields.get_config, "answer": vlm_presets.get_config}


def flat(config: ConfigDict, base: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the settings that differ from `base`; free-form dicts count as one value."""
    found = {}
    for name, value in json.loads(config.to_json_best_effort()).items():
        section = isinstance(value, dict) and name not in FREE_FORM_FIELDS
        found |= {f"{name}.{k}": v for k, v in value.items()} if section else {name: value}
    return {k: v for k, v in found.items() if base is None or v != base[k]}


def dump(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the defaults and what each preset changes on a CPU, with a GPU and on eight GPUs."""
    monkeypatch.chdir(DOCS.parent)  # the paths of its data sets and models are relative
    found = {}
    for trainer, module in (("draw", presets), ("answer", vlm_presets)):
        found[trainer] = default = flat(DEFAULTS[trainer]())
        for name in module.PRESETS:
            monkeypatch.setattr(presets, "_has_gpu", lambda: False)
            own = flat(config := module.get_config(name))
            found[name] = flat(config, default)
            if module is presets:
                found[f"{name}_8gpu"] = flat(module.get_config(f"{name}_8gpu"), own)
            monkeypatch.setattr(presets, "_has_gpu", lambda: True)
            found[f"{name}, GPU"] = flat(module.get_config(name), own)
    return {name: json.dumps(fields, sort_keys=True) for name, fields in found.items() if fields}


def test_presets_match_the_recorded_values(monkeypatch):
    """Compared as text, in which 1 differs from 1.0."""
    recorded = json.loads(RECORDED.read_text("utf-8"))
    assert dump(monkeypatch) == {n: json.dumps(v, sort_keys=True) for n, v in recorded.items()}


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        lines = [f"{json.dumps(name)}: {fields}" for name, fields in dump(patch).items()]
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
