"""Errors in custom algorithms, families and losses are reported before anything is loaded; the
built-in ones pass the same checks."""

import sys
from dataclasses import dataclass, replace

import pytest
import torch
from user_errors import raises_user_error

from flow_grpo.config.custom import check_class
from flow_grpo.data.prompts import Prompt
from flow_grpo.diffusion.algorithms import ALGORITHMS, Algorithm
from flow_grpo.diffusion.fields import DIFFUSION_SPEC, get_config
from flow_grpo.diffusion.models import ADAPTERS, ModelAdapter, Schedule, Size, load_adapter
from flow_grpo.diffusion.session import build_algorithm, build_session
from flow_grpo.diffusion.smoke_test import TINY_MODEL, smoke_test_algorithm, smoke_test_family
from flow_grpo.errors import UserError
from flow_grpo.vlm.fields import VLM_SPEC
from flow_grpo.vlm.losses import LOSS_NAMES, build_loss, find_loss
from flow_grpo.vlm.losses.base import VlmLoss, smoke_test_loss
from flow_grpo.vlm.models import FAMILIES, Family

TRAIN = replace(VLM_SPEC.freeze(VLM_SPEC.get_config()).train, clip_low=0.2, clip_high=0.2)
METHOD = """
import numpy as np
from flow_grpo.diffusion.algorithms.grpo import Grpo
from flow_grpo.diffusion.models.base import ModelAdapter
from flow_grpo.diffusion.models.sd3 import SD3Adapter

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
    """Write a file with a custom algorithm; the registry is restored afterwards."""
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
    DIFFUSION_SPEC.load_custom_classes({"custom_algorithms": methods})
    config = get_config()
    config.update(algorithm="mine", custom_algorithms=methods)
    config.sample.update(num_image_per_prompt=2, num_steps=3)
    config.mine.beta = 0.0  # a KL would have a gradient
    config.pretrained.model = "no/such/model"  # not read by the smoke test
    build_session(config)


@pytest.mark.parametrize(
    ("method", "shown"),
    [
        (
            "def surrogate(self, taken): return taken.ratio, {}",
            "AttributeError: 'PolicyStep' object has no attribute 'ratio' (own.py, line 10)",
        ),
        (
            "def surrogate(self, taken): return super().surrogate(taken)[0].mean(), {}",
            "shape ()",
        ),
        (
            "def surrogate(self, taken): return taken.credit, {}",
            "no gradient",
        ),
        (
            "def credit(self, scored): return super().credit(scored).tolist()",
            "credit",
        ),
        (
            "def check(self): self.limit()",
            "AttributeError: 'Own' object has no attribute 'limit' (own.py, line 10)",
        ),
        (
            "def credit(self): return 0",
            "Own.credit",
        ),
    ],
)
def test_an_error_in_an_algorithm_is_reported_before_anything_loads(write, method, shown):
    with raises_user_error("custom_algorithms.mine", shown):
        start({"mine": f"{write(method)}:Own"})


def test_a_failed_import_names_its_line(write):
    with pytest.raises(UserError) as error:
        DIFFUSION_SPEC.load_custom_classes(
            {"custom_algorithms": {"mine": f"{write('rate = 1 / 0')}:Own"}}
        )
    assert str(error.value).endswith("(ZeroDivisionError: division by zero (own.py, line 10))")


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (
            "Bare",
            "encode_single, forward, grid",
        ),
        ("Short", "forward(self, transformer, latents, timestep, inp"),
    ],
)
def test_an_incomplete_family_is_reported(write, name, shown):
    with raises_user_error(name, shown, field="custom_models.P"):
        DIFFUSION_SPEC.load_custom_classes({"custom_models": {"P": f"{write(RIGHT)}:{name}"}})


@dataclass(frozen=True)
class Wrong(VlmLoss):
    how: str = "mistyped"

    def per_token(self, log_probs, *others):
        if self.how == "mistyped":
            return log_probs.los
        found = build_loss("clip", TRAIN).per_token(log_probs, *others)
        return replace(found, loss=log_probs.mean())


def test_an_error_in_a_loss_is_reported():
    for kind in LOSS_NAMES:
        smoke_test_loss(build_loss(kind, TRAIN), kind)
    with raises_user_error("'los'", "(test_custom_plugin_errors.py, line", field="own_loss"):
        smoke_test_loss(Wrong(), "own_loss")
    with raises_user_error("own_loss", "per_token", "()"):
        smoke_test_loss(Wrong("mean"), "own_loss")


def test_built_in_classes_implement_their_interfaces():
    parts = {
        Algorithm: ALGORITHMS.values(),
        ModelAdapter: ADAPTERS.values(),
        Family: FAMILIES.values(),
        VlmLoss: map(find_loss, LOSS_NAMES),
    }
    for base, own in parts.items():
        for each in own:
            check_class(each.__name__, each, base)


@pytest.mark.parametrize("name", ["dgpo", "leap"])
def test_the_smoke_test_leaves_the_random_state_unchanged(name):
    config = get_config()
    config.algorithm, config.sample.num_image_per_prompt = name, 2
    state = torch.get_rng_state()
    smoke_test_algorithm(build_algorithm(config), name, {"ocr": 1.0})
    assert torch.equal(torch.get_rng_state(), state)


def test_the_smoke_test_has_the_rewards_of_the_run(write):
    code = "def credit(self, scored): return scored.rewards['ocr'] + scored.rewards['mine']"
    DIFFUSION_SPEC.load_custom_classes({"custom_algorithms": {"mine": f"{write(code)}:Own"}})
    config = get_config()
    config.algorithm, config.sample.num_image_per_prompt = "mine", 2
    algorithm = build_algorithm(config)
    smoke_test_algorithm(algorithm, "mine", {"ocr": 1.0, "mine": 0.5})
    with raises_user_error("KeyError: 'mine'"):
        smoke_test_algorithm(algorithm, "mine", {"ocr": 1.0})


@pytest.mark.parametrize(
    ("method", "wrong", "shown"),
    [
        ("forward", lambda self, *_: scale, "NameError: name 'scale' is not defined"),  # noqa: F821
        (
            "schedule",
            lambda self, *_: Schedule((1.0, 0.0), ()),
            "ValueError: ",
        ),
    ],
)
def test_an_error_in_a_family_is_reported_at_its_first_step(method, wrong, shown):
    adapter = load_adapter(str(TINY_MODEL), max_sequence_length=4)
    size, sample = Size(16, 16), get_config().sample
    smoke_test_family(adapter, Prompt("a"), size, sample, "custom_models.P")
    adapter.__class__ = type("Own", (type(adapter),), {method: wrong})
    with raises_user_error(shown, field="custom_models.P"):
        smoke_test_family(adapter, Prompt("a"), size, sample, "custom_models.P")
