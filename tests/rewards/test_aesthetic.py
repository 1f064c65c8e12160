"""The aesthetic reward on a small CLIP, with small heads under published and other names."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from small_clip import (
    DIM,
    IMAGES,
    clip_folder,  # noqa: F401 (a fixture)
    close,
    reference_embeddings,  # noqa: F401 (a fixture)
    scores_of,
)
from torch import nn
from user_errors import raises_user_error

from flow_grpo.rewards.scorers.clip import Aesthetic

HEAD_WIDTHS = [DIM, 12, 8, 6, 4, 1]
# Published names, in which dropout layers are counted, and names whose order is not alphabetic.
HEAD_NUMBERS = {"head.pth": [0, 2, 4, 6, 7], "head.safetensors": [0, 3, 6, 9, 12]}


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    target = tmp_path_factory.mktemp("heads")
    torch.manual_seed(2)
    layers = [(torch.randn(o, i), torch.randn(o)) for i, o in pairwise(HEAD_WIDTHS)]
    for name, numbers in HEAD_NUMBERS.items():
        state = {}
        # Reversed, because the order in the file should not matter.
        for number, (weight, bias) in reversed(list(zip(numbers, layers, strict=True))):
            state |= {f"layers.{number}.weight": weight, f"layers.{number}.bias": bias}
        (torch.save if name.endswith("pth") else save_file)(state, target / name)
    single = nn.Linear(DIM, 1)
    torch.save(single.state_dict(), target / "single.pth")
    torch.save(nn.Linear(DIM + 1, 1).state_dict(), target / "wide.pth")
    torch.save(nn.Linear(DIM, 2).state_dict(), target / "two.pth")
    torch.save({}, target / "empty.pth")
    return SimpleNamespace(folder=target, layers=layers, single=single)


@pytest.mark.parametrize("name", HEAD_NUMBERS)
def test_aesthetic_is_the_head_on_the_normalised_embedding(folder, plain, heads, name):
    value = plain.images / plain.images.norm(dim=-1, keepdim=True)
    for weight, bias in heads.layers:
        value = value @ weight.T + bias
    scorer = Aesthetic(model=str(folder), head=str(heads.folder / name), batch_size=2)
    assert scores_of(scorer) == close(value[:, 0].tolist(), 1e-3)
    assert value.std() > 0.5


def test_aesthetic_accepts_a_single_layer_and_ignores_the_prompt(folder, plain, heads):
    scorer = Aesthetic(model=str(folder), head=str(heads.folder / "single.pth"))
    expected = heads.single(plain.images)[:, 0].tolist()
    assert scores_of(scorer) == close(expected)
    assert scores_of(scorer, prompts=["other"] * len(IMAGES)) == close(expected)


def test_the_aesthetic_head_stays_in_float32(folder, plain, heads):
    scorer = Aesthetic(model=str(folder), head=str(heads.folder / "single.pth"), dtype="bfloat16")
    assert {p.dtype for p in scorer.network.clip.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in scorer.network.head.parameters()} == {torch.float32}
    assert scores_of(scorer) == close(heads.single(plain.images)[:, 0].tolist(), 0.05)


@pytest.mark.parametrize(
    ("name", "reason"), [("wide.pth", "17"), ("two.pth", "output"), ("empty.pth", "output")]
)
def test_a_head_of_the_wrong_shape_is_rejected(folder, heads, name, reason):
    head = str(heads.folder / name)
    with raises_user_error("aesthetic head", reason, field="head", value=head):
        Aesthetic(model=str(folder), head=head)
