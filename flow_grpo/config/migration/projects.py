"""The trainers whose settings are known here, and the hint for one of them on our command line."""

from collections import Counter
from collections.abc import Collection
from typing import Any

from flow_grpo.config.error_reporting import quote_for_shell
from flow_grpo.config.migration.counterparts import (
    DIFFUSION,
    GPUS,
    LAUNCH,
    NODES,
    SHARDED,
    VLM,
    ZERO_STAGE,
    Counterpart,
    Project,
    parse_value,
    translate_value,
)
from flow_grpo.config.migration.easyr1 import EASYR1
from flow_grpo.config.migration.flow_grpo import FLOW_GRPO
from flow_grpo.config.migration.lmm_r1 import LMM_R1
from flow_grpo.config.migration.lmm_r1_sft import LMM_R1_SFT
from flow_grpo.config.migration.mm_grpo import MM_GRPO
from flow_grpo.config.migration.trl import TRL
from flow_grpo.config.migration.trl_offline import TRL_DPO, TRL_KTO, TRL_SFT
from flow_grpo.config.migration.verl import VERL

PROJECTS = (
    *(FLOW_GRPO, MM_GRPO, VERL, EASYR1, LMM_R1, TRL),
    *(TRL_SFT, TRL_DPO, TRL_KTO, LMM_R1_SFT),  # on given responses
)
DIFFUSION_MARK = "algorithm"  # a setting that only diffusion training has
LAUNCH_HINTS = {
    ZERO_STAGE: "choose the stage at the start: bash scripts/single_node/train_deepspeed.sh "
    "CONFIG STAGE",
    GPUS: "the launcher sets the number of processes: --num_processes of accelerate launch",
    NODES: "the launcher sets the number of nodes: bash scripts/multi_node/main.sh --nodes",
    SHARDED: "choose it at the start: bash scripts/single_node/train_fsdp2.sh CONFIG",
}


def foreign_hint(name: str, known: Collection[str], text: str | None = None) -> str:
    """Return what to write instead of a setting of another trainer, or "" if none has it.

    A full name is looked up first, such as `actor_rollout_ref.rollout.n`; then its last part, so
    that `train.lr` is found as well.

    Args:
        name: The unknown setting.
        known: Settings of our trainer.
        text: Its value on the command line; the hint is then an option with its translation.
    """
    found = _find(name, known)
    if not found:
        return ""
    counts = Counter(each.setting for _, each in found if each.setting).most_common()
    ours = [each for each, number in counts if number == counts[0][1]]
    project, first = next(((p, c) for p, c in found if c.setting in ours), found[0])
    if not ours:
        return f"a setting of {project.name} without counterpart: {first.note}"
    if ours[0] in LAUNCH:
        return LAUNCH_HINTS[ours[0]]
    if text is not None and len(ours) == 1:
        new = {} if first.derived else translate_value(first, parse_value(text))
        new = new or {ours[0]: "..."}
        options = " ".join(map(format_option, new.items()))
        return f"the counterpart of this option of {project.name} is {options}"
    return f"it is called {' or '.join(ours[:2])} here"


def format_option(setting: tuple[str, Any]) -> str:
    """Return the option that sets a setting, quoted for a shell."""
    name, value = setting
    return quote_for_shell(f"--config.{name}={value}")


def _find(name: str, known: Collection[str]) -> list[tuple[Project, Counterpart]]:
    """Return the counterparts of a name that exist in `known` or have a reason to be absent."""
    if not known:
        return []
    trainer = DIFFUSION if DIFFUSION_MARK in known else VLM
    projects = sorted(PROJECTS, key=lambda each: each.trainer != trainer)
    possible = (*known, *LAUNCH, "")
    exact = [(project, project.find(name, guess="." in name)) for project in projects]
    found = [(project, each) for project, each in exact if each and each.setting in possible]
    if own := [each for each in found if each[0].trainer == trainer]:
        return own
    last = name.rpartition(".")[2]
    if found or any(each.rpartition(".")[2] == last for each in known):
        return found
    return [
        (project, each)
        for project in projects
        for key, each in project.keys.items()
        if key.rpartition(".")[2] == last and each.setting in known
    ]
