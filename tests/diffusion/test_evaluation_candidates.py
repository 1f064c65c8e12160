"""Candidates of an evaluation: each is applied to the base model and leaves no trace."""

import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from peft import LoraConfig, get_peft_model_state_dict
from policies import make_policy
from safetensors.torch import load_file, save_file
from user_errors import raises_user_error

from flow_grpo.diffusion.candidates import WeightSwapper, parse_diffusion_candidates
from flow_grpo.diffusion.models import ModelAdapter, load_adapter
from flow_grpo.report.run_reader import short_names
from flow_grpo.training.candidates import Candidate


def load_model(model: Path) -> ModelAdapter:
    return load_adapter(str(model), max_sequence_length=8)


def save(model: Path, folder: Path, seed: int, **settings) -> Path:
    """Save the weights of a policy that differs from the model."""
    policy = make_policy(load_model(model), **settings)
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    policy.save(folder)
    [weights] = folder.iterdir()
    return weights


@pytest.fixture(scope="module")
def candidates(tiny_sd3, tmp_path_factory) -> dict[str, Candidate]:
    folder = tmp_path_factory.mktemp("run")
    weights = {
        "lora": save(tiny_sd3, folder / "lora", 1, rank=2),
        "larger": save(tiny_sd3, folder / "larger", 2, rank=4, alpha=3),
        "full": save(tiny_sd3, folder / "full", 3, use_lora=False),
        "other": save(tiny_sd3, folder / "other", 4, use_lora=False),
    }
    encoder = load_model(tiny_sd3).pipeline.text_encoder
    encoder.add_adapter(LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    layers = get_peft_model_state_dict(encoder)
    weights["encoder"] = shutil.copytree(weights["lora"], folder / "encoder/lora")
    [file] = weights["encoder"].iterdir()
    both = {**load_file(file), **{f"text_encoder.{k}": v.clone() for k, v in layers.items()}}
    save_file(both, file)
    found = {name: Candidate(name, path) for name, path in weights.items()}
    return {"base": Candidate("base", None), **found}


def velocity(adapter: ModelAdapter) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(2, *adapter.latent_shape(32, 32), generator=generator)
    with torch.no_grad():
        texts = adapter.encode(["a", "b"], ["", ""])
        return adapter.velocity(adapter.transformer, noise, 500.0, texts, 2.0)


def test_each_candidate_gives_the_same_result_as_on_its_own(tiny_sd3, candidates):
    """In any order, including the base."""
    order = ["lora", "base", "full", "larger", "encoder", "base", "lora", "other", "full", "base"]
    alone = {}
    for name, candidate in candidates.items():
        with WeightSwapper(load_model(tiny_sd3), [candidate]).applied(candidate) as adapter:
            alone[name] = velocity(adapter)
    for i, one in enumerate(alone.values()):
        assert not any(torch.equal(one, other) for other in [*alone.values()][:i])
    chosen = [candidates[name] for name in order]
    swapper = WeightSwapper(load_model(tiny_sd3), chosen)
    swapper.check_loadable(chosen)
    for name, candidate in zip(order, chosen, strict=True):
        with swapper.applied(candidate) as adapter:
            assert torch.equal(velocity(adapter), alone[name]), name


def test_the_base_is_restored_after_an_exception(tiny_sd3, candidates):
    adapter = load_model(tiny_sd3)
    before = velocity(adapter)
    swapper = WeightSwapper(adapter, [*candidates.values()])
    for name in ("encoder", "full"):
        with pytest.raises(ZeroDivisionError), swapper.applied(candidates[name]):
            raise ZeroDivisionError
        assert torch.equal(velocity(adapter), before)


def test_mismatched_weights_are_reported_before_scoring(tiny_sd3, candidates, tmp_path):
    weights = shutil.copytree(candidates["full"].weights, tmp_path / "transformer")
    [file] = weights.glob("*.safetensors")
    tensors = load_file(file)
    tensors["new"] = tensors.pop(min(tensors))
    save_file(tensors, file)
    chosen = [candidates["base"], Candidate("wrong", weights)]
    with raises_user_error(weights, "new"):
        WeightSwapper(load_model(tiny_sd3), chosen).check_loadable(chosen)


RUN = "/home/me/logs/a/checkpoints/checkpoint"


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        ([], []),
        ([f"{RUN}-8/ema_lora"], ["checkpoint-8"]),
        (["/home/me/my_lora"], ["my_lora"]),
        ([f"{RUN}-8/ema_lora", f"{RUN}-16/ema_lora"], ["checkpoint-8", "checkpoint-16"]),
        ([f"{RUN}-8/lora", f"{RUN}-8/ema_lora"], ["lora", "ema_lora"]),
        ([f"{RUN}-8/lora", f"{RUN}-16/transformer"], ["checkpoint-8", "checkpoint-16"]),
        (
            [f"{RUN}-8/ema_lora", f"{RUN}-8/ema_lora".replace("/a/", "/b/")],
            ["a", "b"],
        ),
        (
            [f"{RUN}-8/ema_lora", f"{RUN}-16/ema_lora".replace("/a/", "/b/")],
            ["a/checkpoint-8", "b/checkpoint-16"],
        ),
        (["/x/lora", "/x/lora/lora"], ["x", "x/lora"]),
        (["/x/samples/base", "/x/samples/a/step-8"], ["base", "a/step-8"]),
    ],
)
def test_short_names_distinguish_the_checkpoints(paths, names):
    assert short_names([Path(path) for path in paths]) == names


def test_checkpoints_are_separated_by_commas_or_arguments(candidates, tmp_path):
    lora, full = (candidates[name].weights.parent for name in ("lora", "full"))
    for arguments in ([f"base,{lora}", str(full)], ["base", f"{lora}, {full}"]):
        found = parse_diffusion_candidates(arguments)
        assert [c.name for c in found] == ["base", "lora", "full"]
        assert [c.weights for c in found] == [None, lora / "lora", full / "transformer"]
    assert parse_diffusion_candidates([]) == [Candidate("base", None)]
    comma = shutil.copytree(lora, tmp_path / "a,b")
    assert parse_diffusion_candidates([str(comma)]) == [Candidate("a,b", comma / "lora")]
    base = shutil.copytree(lora, tmp_path / "base")
    assert [c.name for c in parse_diffusion_candidates(["base", str(base)])] == [
        "base",
        "checkpoint base",
    ]


def test_the_base_includes_the_initial_lora_of_training(candidates, tmp_path):
    lora, full = candidates["lora"].weights, candidates["full"].weights
    assert parse_diffusion_candidates([], str(lora)) == [Candidate("base", lora)]
    found = parse_diffusion_candidates([f"base,{candidates['larger'].weights}"], str(lora))
    assert [c.weights for c in found] == [lora, candidates["larger"].weights]
    # a run whose initial LoRA was deleted can still be evaluated: checkpoints contain it
    gone = str(tmp_path / "gone")
    assert parse_diffusion_candidates([str(full)], gone) == parse_diffusion_candidates([str(full)])
    for path in (gone, str(tmp_path), str(full)):
        with raises_user_error(path):
            parse_diffusion_candidates(["base", str(full)], path)


def test_duplicate_and_missing_checkpoints_are_rejected(candidates, tmp_path):
    lora = candidates["lora"].weights.parent
    link = tmp_path / "best"
    link.symlink_to(lora)
    with raises_user_error(lora, field="--checkpoint", value=str(link)):
        parse_diffusion_candidates(["base", str(lora), str(link)])
    with raises_user_error(field="--checkpoint", value="base"):
        parse_diffusion_candidates(["base,base"])
    with raises_user_error("nothing"):
        parse_diffusion_candidates(["base,nothing"])


def cached_on_hub(monkeypatch, cache: Path, name: str, files: Path) -> None:
    """Put a repository into an empty hub cache, without network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repo = cache / f"models--{name.replace('/', '--')}"
    shutil.copytree(files, repo / "snapshots/0123")
    (repo / "refs").mkdir()
    (repo / "refs/main").write_text("0123")


def test_a_cached_hub_id_is_a_candidate(tiny_sd3, candidates, tmp_path, monkeypatch):
    lora = candidates["lora"].weights
    cached_on_hub(monkeypatch, tmp_path, "owner/my-lora", lora)
    cached_on_hub(monkeypatch, tmp_path, "owner/my-model", tiny_sd3)
    [file] = lora.glob("*.safetensors")
    names = ["owner/my-lora", "owner/my-model"]
    found = parse_diffusion_candidates([",".join(names), str(file)])
    assert [(c.name, c.kind) for c in found[:2]] == [
        ("owner/my-lora", "lora"),
        ("owner/my-model", "pipeline"),
    ]
    assert load_file(found[0].weights / file.name).keys() == load_file(file).keys()
    [one] = parse_diffusion_candidates([f"owner/my-lora/{file.name}"])
    assert (one.name, one.kind) == ("pytorch_lora_weights", "lora")
    [base] = parse_diffusion_candidates([], "owner/my-lora")
    assert base == Candidate("base", found[0].weights)
    with raises_user_error(field="train.lora_path", value="owner/my-model"):
        parse_diffusion_candidates([], "owner/my-model")
    with raises_user_error(field="--checkpoint", value="owner/other"):
        parse_diffusion_candidates(["owner/other"])
