"""What an answer says in the end, found in time that grows with its length alone."""

import re

MAX_TEXT = 100_000  # characters of an answer that is looked at, and of what it says in the end
MAX_FINAL = 2_000
_OPEN, _CLOSE = "<answer>", "</answer>"
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")


def final_answer(text: str) -> str | None:
    """In the last answer tags, or in the last box, or in the box in the tags; None without."""
    tagged = _tagged(text)
    boxed = _boxed(text if tagged is None else tagged)
    found = tagged if boxed is None else boxed
    return None if found is None else found.strip()


def _tagged(text: str) -> str | None:
    end = text.rfind(_CLOSE)
    start = text.rfind(_OPEN, 0, end) if end >= 0 else -1
    return text[start + len(_OPEN) : end] if start >= 0 else None


def _boxed(text: str) -> str | None:
    starts = [match.end() for match in _BOX.finditer(text)]
    if not starts:
        return None
    depth = 1
    for place in range(starts[-1], len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[starts[-1] : place]
    return None  # cut off


def is_well_formed(text: str, boxed: bool = False) -> bool:
    """<think>...</think><answer>...</answer> and nothing else; or, `boxed`, a box after the
    thinking."""
    text = text.strip()
    if not text.startswith("<think>") or any(text.count(tag) != 1 for tag in _tags(boxed)):
        return False
    _, _, said = text.partition("</think>")
    if boxed:
        return bool(_boxed(said))
    said = said.strip()
    inner = said[len(_OPEN) : -len(_CLOSE)]
    return said.startswith(_OPEN) and said.endswith(_CLOSE) and bool(inner.strip())


def _tags(boxed: bool) -> tuple[str, ...]:
    return ("<think>", "</think>") if boxed else ("<think>", "</think>", _OPEN, _CLOSE)


def check_texts(reward: str, answers: list) -> None:
    if any(not isinstance(answer, str) for answer in answers):
        raise TypeError(f"{reward!r} scores answers (scripts/train_vlm.py), not pictures")
