"""Custom classes that still define a member under its old name are rejected."""

import pytest
from user_errors import raises_user_error

from flow_grpo.config.custom import check_class
from flow_grpo.config.renamed_members import RENAMED_MEMBERS
from flow_grpo.diffusion.algorithms import ALGORITHMS, Algorithm
from flow_grpo.diffusion.algorithms.grpo import Grpo
from flow_grpo.diffusion.models import ADAPTERS, ModelAdapter
from flow_grpo.vlm.losses import LOSS_NAMES, find_loss
from flow_grpo.vlm.losses.base import VlmLoss
from flow_grpo.vlm.models import FAMILIES, Family

BUILT_IN = {
    Algorithm: [*ALGORITHMS.values()],
    ModelAdapter: [*ADAPTERS.values()],
    Family: [*FAMILIES.values()],
    VlmLoss: [find_loss(name) for name in LOSS_NAMES],
}


class OldName(Grpo):
    keeps_old = True


class Inherited(OldName):
    pass


class NewName(Grpo):
    keeps_old_policy = True


@pytest.mark.parametrize("cls", [OldName, Inherited])
def test_a_class_with_an_old_name_is_rejected_with_the_new_one(cls):
    field = "custom_algorithms.mine"
    with raises_user_error("'keeps_old'", "'keeps_old_policy'", field=field):
        check_class(field, cls, Algorithm)


def test_a_class_with_the_new_name_is_accepted():
    check_class("custom_algorithms.mine", NewName, Algorithm)


def test_members_of_built_in_subclasses_are_checked_too():
    class OldWan(ADAPTERS["WanPipeline"]):
        def clip_tokens(self, image, frames):
            pass

    with raises_user_error("'clip_tokens'", "'video_tokens'", field="custom_models.mine"):
        check_class("custom_models.mine", OldWan, ModelAdapter)


CLASSES = {cls.__name__: cls for base in BUILT_IN for cls in (base, *BUILT_IN[base])}


@pytest.mark.parametrize("name", RENAMED_MEMBERS)
def test_new_names_exist_and_old_ones_do_not(name):
    subclasses = [cls for cls in CLASSES.values() if issubclass(cls, CLASSES[name])]
    members = {member for cls in subclasses for member in dir(cls)}
    assert {*RENAMED_MEMBERS[name].values()} <= members
    assert not RENAMED_MEMBERS[name].keys() & members
