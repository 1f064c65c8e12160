"""Which weights of a run there are to look at."""

from pathlib import Path

from flow_grpo.errors import UserError
from flow_grpo.run.checkpoint import BEST, LATEST, PREFIX, list_checkpoints, weights_in

KINDS = {"ema_lora": "EMA", "lora": "LoRA", "ema_transformer": "EMA", "transformer": "weights"}


def list_weights(run: Path) -> dict[str, Path]:
    """Folders by the names to show; the newest first, and the moving average before the weights."""
    root, found = run / "checkpoints", {}
    best = (root / BEST).resolve()
    for checkpoint in reversed(list_checkpoints(root)):
        step = checkpoint.name.removeprefix(PREFIX)
        mark = " (best)" if checkpoint.resolve() == best else ""
        for folder, kind in KINDS.items():
            if any((checkpoint / folder).glob("*.safetensors")):
                found[f"step {step}, {kind}{mark}"] = checkpoint / folder
    if not found:
        raise UserError(f"{run} has no checkpoints yet; train.py saves one every save_freq epochs")
    return found


def find_checkpoints(run: Path, words: list[str]) -> list[Path]:
    """ "latest", "best", a step or a path each; those that are one and the same stand once."""
    found = {weights_in(_find(run, word)).resolve(): None for word in words}
    return list(found)


def _find(run: Path, word: str) -> Path:
    root = run / "checkpoints"
    steps = [each.name.removeprefix(PREFIX) for each in list_checkpoints(root)]
    if not steps:
        list_weights(run)  # tells it
    if word == LATEST:
        return run  # the newest that is whole
    place = root / f"{PREFIX}{word}" if word in steps else root / BEST if word == BEST else None
    place = place or Path(word)
    if not place.exists():
        there = [LATEST, *([BEST] if (root / BEST).exists() else []), *steps]
        raise UserError(f"{run} has no checkpoint {word!r}; it has {', '.join(there)}")
    return place
