"""Short names for folders that are shown side by side."""

from pathlib import Path

WEIGHTS = tuple(  # folders of a checkpoint
    f"{prefix}{name}" for prefix in ("", "ema_") for name in ("lora", "transformer", "model")
)


def short_names(paths: list[Path]) -> list[str]:
    """What tells the paths apart: without the folders that all of them begin or end with."""
    whole = [path.parts[1:] if path.is_absolute() else path.parts for path in paths]
    shorter = [_without_usual(each) for each in whole]
    parts = [list(each) for each in (shorter if len({*shorter}) == len(whole) else whole)]
    if len(parts) == 1:
        parts = [parts[0][-1:]]
    for end in (-1, 0):
        while parts and min(map(len, parts)) > 1 and len({each[end] for each in parts}) == 1:
            for each in parts:
                each.pop(end)
    return ["/".join(each) for each in parts]


def _without_usual(parts: tuple[str, ...]) -> tuple[str, ...]:
    """The folders of a run have the same names in each."""
    kept = [part for part in parts if part != "checkpoints"]
    return tuple(kept[:-1] if len(kept) > 1 and kept[-1] in WEIGHTS else kept)
