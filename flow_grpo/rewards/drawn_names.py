"""Names of rewards that score drawn responses: drawn:NAME."""

from collections.abc import Collection, Iterable

from flow_grpo.errors import UserError, did_you_mean
from flow_grpo.rewards.registry import IMAGE_REWARDS

PREFIX = "drawn:"


def image_reward_of(name: str) -> str | None:
    """Return NAME of a reward `drawn:NAME`; None for any other reward."""
    return name.removeprefix(PREFIX) if name.startswith(PREFIX) else None


def drawn_names(names: Iterable[str]) -> dict[str, str]:
    """Return the rewards drawn:NAME among `names`, mapped to their image rewards."""
    return {name: inner for name in names if (inner := image_reward_of(name)) is not None}


def check_drawn_names(names: Iterable[str], custom: Collection[str]) -> None:
    """Reject rewards drawn:NAME where NAME is neither an image reward nor a custom reward."""
    known = [*IMAGE_REWARDS, *custom]
    for name, inner in drawn_names(names).items():
        if inner not in known:
            nearest = did_you_mean(inner, known).replace("did you mean ", f"did you mean {PREFIX}")
            raise UserError(
                f"needs an image reward after {PREFIX!r}, but {inner!r} is not one",
                field=f"reward {name!r}",
                hint=nearest or f"use one of {', '.join(sorted(known))}",
            )
