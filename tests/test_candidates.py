"""What an evaluation compares: each on the model itself, and nothing of it left for the next."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model_state_dict
from policies import policy_of
from safetensors.torch import load_file, save_file

from flow_grpo.draw.evaluation import Candidate, Exchange, find_candidates
from flow_grpo.draw.models import ModelAdapter, load_adapter
from flow_grpo.errors import UserError
from flow_grpo.show.reading import short_names


def fresh(model: Path) -> ModelAdapter:
    return load_adapter(str(model), max_sequence_length=8)


def save(model: Path, folder: Path, seed: int, **settings) -> Path:
    """Weights of a policy that moved away from the model."""
    policy = policy_of(fresh(model), **settings)
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
    encoder = fresh(tiny_sd3).pipeline.text_encoder
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


def test_each_candidate_computes_what_it_does_alone(tiny_sd3, candidates):
    """In any order, the base among them."""
    order = ["lora", "base", "full", "larger", "encoder", "base", "lora", "other", "full", "base"]
    alone = {}
    for name, candidate in candidates.items():
        with Exchange(fresh(tiny_sd3), [candidate]).applied(candidate) as adapter:
            alone[name] = velocity(adapter)
    for i, one in enumerate(alone.values()):
        assert not any(torch.equal(one, other) for other in [*alone.values()][:i])
    chosen = [candidates[name] for name in order]
    exchange = Exchange(fresh(tiny_sd3), chosen)
    exchange.check(chosen)
    for name, candidate in zip(order, chosen, strict=True):
        with exchange.applied(candidate) as adapter:
            assert torch.equal(velocity(adapter), alone[name]), name


def test_the_model_is_itself_again_after_a_failure(tiny_sd3, candidates):
    adapter = fresh(tiny_sd3)
    before = velocity(adapter)
    exchange = Exchange(adapter, [*candidates.values()])
    for name in ("encoder", "full"):
        with pytest.raises(ZeroDivisionError), exchange.applied(candidates[name]):
            raise ZeroDivisionError
        assert torch.equal(velocity(adapter), before)


def test_one_that_does_not_fit_is_told_before_the_first_is_scored(tiny_sd3, candidates, tmp_path):
    weights = shutil.copytree(candidates["full"].weights, tmp_path / "transformer")
    [file] = weights.glob("*.safetensors")
    tensors = load_file(file)
    tensors["new"] = tensors.pop(min(tensors))
    save_file(tensors, file)
    chosen = [candidates["base"], Candidate("wrong", weights)]
    with pytest.raises(UserError, match="is of another model: it has new"):
        Exchange(fresh(tiny_sd3), chosen).check(chosen)


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
def test_names_are_what_tells_the_checkpoints_apart(paths, names):
    assert short_names([Path(path) for path in paths]) == names


def test_checkpoints_may_be_given_in_one_word_or_in_several(candidates, tmp_path):
    lora, full = (candidates[name].weights.parent for name in ("lora", "full"))
    for words in ([f"base,{lora}", str(full)], ["base", f"{lora}, {full}"]):
        found = find_candidates(words)
        assert [c.name for c in found] == ["base", "lora", "full"]
        assert [c.weights for c in found] == [None, lora / "lora", full / "transformer"]
    assert find_candidates([]) == [Candidate("base", None)]
    comma = shutil.copytree(lora, tmp_path / "a,b")
    assert find_candidates([str(comma)]) == [Candidate("a,b", comma / "lora")]
    base = shutil.copytree(lora, tmp_path / "base")
    assert [c.name for c in find_candidates(["base", str(base)])] == ["base", "checkpoint base"]


def test_the_base_has_the_lora_that_training_started_from(candidates, tmp_path):
    lora, full = candidates["lora"].weights, candidates["full"].weights
    assert find_candidates([], str(lora)) == [Candidate("base", lora)]
    found = find_candidates([f"base,{candidates['larger'].weights}"], str(lora))
    assert [c.weights for c in found] == [lora, candidates["larger"].weights]
    # a run whose first LoRA is gone can still be evaluated: its own is whole
    gone = str(tmp_path / "gone")
    assert find_candidates([str(full)], gone) == find_candidates([str(full)])
    for path in (gone, str(tmp_path), str(full)):
        with pytest.raises(UserError, match=re.escape(path)):
            find_candidates(["base", str(full)], path)


def test_the_same_checkpoint_twice_is_refused(candidates, tmp_path):
    lora = candidates["lora"].weights.parent
    link = tmp_path / "best"
    link.symlink_to(lora)
    with pytest.raises(UserError, match=rf"lora, as {lora} does; leave one out"):
        find_candidates(["base", str(lora), str(link)])
    with pytest.raises(UserError, match="names base twice; leave one out"):
        find_candidates(["base,base"])
    with pytest.raises(UserError, match="no checkpoint at nothing"):
        find_candidates(["base,nothing"])
