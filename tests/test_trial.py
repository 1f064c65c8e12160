"""Mistakes in methods and families of the user's own are told in a line before a run loads
anything; ours pass the same trial."""

import sys
from dataclasses import dataclass, replace

import pytest
import torch

from flow_grpo.answer.fields import ANSWER
from flow_grpo.answer.losses import KINDS, build_loss, find_loss
from flow_grpo.answer.losses.base import AnswerLoss, try_loss
from flow_grpo.answer.models import FAMILIES, Family
from flow_grpo.config.custom import check_class
from flow_grpo.data.prompts import Prompt
from flow_grpo.draw.algorithms import ALGORITHMS, Algorithm
from flow_grpo.draw.fields import DRAW, get_config
from flow_grpo.draw.models import ADAPTERS, ModelAdapter, Schedule, Size, load_adapter
from flow_grpo.draw.session import build_algorithm, build_session
from flow_grpo.draw.trial import MODEL, try_family, try_method
from flow_grpo.errors import UserError

TRAIN = replace(ANSWER.freeze(ANSWER.get_config()).train, clip_low=0.2, clip_high=0.2)
METHOD = """
import numpy as np
from flow_grpo.draw.algorithms.grpo import Grpo
from flow_grpo.draw.models.base import ModelAdapter
from flow_grpo.draw.models.sd3 import SD3Adapter

class Own(Grpo):
    name = "mine"

    {method}

class Bare(ModelAdapter):
    pass

class Short(SD3Adapter):
    def forward(self, transformer, latents):
        return latents
"""
RIGHT = "def surrogate(self, taken): return super().surrogate(taken)"


@pytest.fixture
def write(tmp_path, monkeypatch):
    """A file with a method, in a folder of its own; the registry is as it was afterwards."""
    before = dict(ALGORITHMS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def write(method: str) -> str:
        file = tmp_path / "own.py"
        file.write_text(METHOD.format(method=method), encoding="utf-8")
        return str(file)

    yield write
    ALGORITHMS.clear()
    ALGORITHMS.update(before)


def start(methods: dict[str, str]) -> None:
    DRAW.load_custom({"custom_algorithms": methods})
    config = get_config()
    config.update(algorithm="mine", custom_algorithms=methods)
    config.sample.update(num_image_per_prompt=2, num_steps=3)
    config.mine.beta = 0.0  # a KL would have a gradient
    config.pretrained.model = "no/such/model"  # which nothing looks for yet
    build_session(config)


@pytest.mark.parametrize(
    ("method", "told"),
    [
        (
            "def surrogate(self, taken): return taken.ratio, {}",
            " fails when it is tried: AttributeError: 'Taken' object has no attribute 'ratio' "
            "(own.py, line 10)",
        ),
        (
            "def surrogate(self, taken): return super().surrogate(taken)[0].mean(), {}",
            ": the loss must have one number per sample, 4 here, and has the shape ()",
        ),
        (
            "def surrogate(self, taken): return taken.credit, {}",
            ": the loss has no gradient; take it from the velocity or the step",
        ),
        (
            "def credit(self, scored): return super().credit(scored).tolist()",
            ": credit must give a NumPy array of one number per sample",
        ),
        (
            "def check(self): self.limit()",
            " fails when it is tried: AttributeError: 'Own' object has no attribute 'limit' "
            "(own.py, line 10)",
        ),
        (
            "def credit(self): return 0",
            ": Own.credit is called as credit(self, scored); take these arguments",
        ),
    ],
)
def test_a_mistake_in_a_method_is_told_before_anything_loads(write, method, told):
    with pytest.raises(UserError) as error:
        start({"mine": f"{write(method)}:Own"})
    assert str(error.value) == f"custom_algorithms.mine{told}"


def test_a_file_that_cannot_be_imported_names_its_line(write):
    with pytest.raises(UserError) as error:
        DRAW.load_custom({"custom_algorithms": {"mine": f"{write('rate = 1 / 0')}:Own"}})
    assert str(error.value).endswith("(ZeroDivisionError: division by zero (own.py, line 10))")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Bare", "Bare lacks encode_one, forward, grid, which flow_grpo.draw.models.base.Mod"),
        ("Short", "Short.forward is called as forward(self, transformer, latents, timestep, inp"),
    ],
)
def test_what_a_family_lacks_is_told(write, name, told):
    with pytest.raises(UserError) as error:
        DRAW.load_custom({"custom_models": {"P": f"{write(RIGHT)}:{name}"}})
    assert str(error.value).startswith(f"custom_models.P: {told}")


@dataclass(frozen=True)
class Wrong(AnswerLoss):
    how: str = "mistyped"

    def per_token(self, log_probs, *others):
        if self.how == "mistyped":
            return log_probs.los
        found = build_loss("clip", TRAIN).per_token(log_probs, *others)
        return replace(found, loss=log_probs.mean())


def test_a_mistake_in_a_loss_of_answers_is_told():
    for kind in KINDS:
        try_loss(build_loss(kind, TRAIN), kind)
    with pytest.raises(UserError, match=r"^x fails .* attribute 'los' \(test_trial.py, li"):
        try_loss(Wrong(), "x")
    with pytest.raises(UserError, match=r"^x: per_token must give a PolicyLoss .*; it has \(\)"):
        try_loss(Wrong("mean"), "x")


def test_our_own_take_the_arguments_that_they_are_called_with():
    parts = {
        Algorithm: ALGORITHMS.values(),
        ModelAdapter: ADAPTERS.values(),
        Family: FAMILIES.values(),
        AnswerLoss: map(find_loss, KINDS),
    }
    for base, own in parts.items():
        for each in own:
            check_class(each.__name__, each, base)


@pytest.mark.parametrize("name", ["dgpo", "leap"])
def test_methods_of_each_kind_pass_the_trial(name):
    """And draw no number that the run would have drawn."""
    config = get_config()
    config.algorithm, config.sample.num_image_per_prompt = name, 2
    state = torch.get_rng_state()
    try_method(build_algorithm(config), name, {"ocr": 1.0})
    assert torch.equal(torch.get_rng_state(), state)


def test_a_method_finds_the_rewards_of_the_run_in_its_trial(write):
    code = "def credit(self, scored): return scored.rewards['ocr'] + scored.rewards['mine']"
    DRAW.load_custom({"custom_algorithms": {"mine": f"{write(code)}:Own"}})
    config = get_config()
    config.algorithm, config.sample.num_image_per_prompt = "mine", 2
    algorithm = build_algorithm(config)
    try_method(algorithm, "mine", {"ocr": 1.0, "mine": 0.5})
    with pytest.raises(UserError, match="KeyError: 'mine'"):
        try_method(algorithm, "mine", {"ocr": 1.0})


@pytest.mark.parametrize(
    ("method", "wrong", "told"),
    [
        ("forward", lambda self, *_: scale, "NameError: name 'scale' is not defined"),  # noqa: F821
        (
            "schedule",
            lambda self, *_: Schedule((1.0, 0.0), ()),
            "ValueError: a Schedule needs time steps and one more sigma than these",
        ),
    ],
)
def test_a_mistake_in_a_family_is_told_by_its_first_step(method, wrong, told):
    adapter = load_adapter(str(MODEL), max_sequence_length=4)
    size, sample = Size(16, 16), get_config().sample
    try_family(adapter, Prompt("a"), size, sample, "custom_models.P")
    adapter.__class__ = type("Own", (type(adapter),), {method: wrong})
    with pytest.raises(UserError) as error:
        try_family(adapter, Prompt("a"), size, sample, "custom_models.P")
    assert str(error.value).startswith(f"custom_models.P fails when it is tried: {told}")
