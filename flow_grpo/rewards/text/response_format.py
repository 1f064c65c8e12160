"""The format of a response: its reasoning, and the final answer in tags or a box."""

import re

_OPEN, _CLOSE = "<answer>", "</answer>"
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")


def extract_final_answer(text: str) -> str | None:
    r"""Return the content of the last <answer> tags or \boxed (also within the tags), or None."""
    tagged = _extract_tagged(text)
    boxed = _extract_boxed(text if tagged is None else tagged)
    found = tagged if boxed is None else boxed
    return None if found is None else found.strip()


def extract_prompt(response: str) -> str:
    """Return the prompt in a response: its final answer, or all text after its reasoning."""
    final = extract_final_answer(response)
    return response.rpartition("</think>")[2].strip() if final is None else final


def _extract_tagged(text: str) -> str | None:
    end = text.rfind(_CLOSE)
    start = text.rfind(_OPEN, 0, end) if end >= 0 else -1
    return text[start + len(_OPEN) : end] if start >= 0 else None


def _extract_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed, or None if there is none or it is not closed."""
    starts = [match.end() for match in _BOX.finditer(text)]
    if not starts:
        return None
    depth = 1
    for end in range(starts[-1], len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[starts[-1] : end]
    return None  # truncated


def has_answer_format(text: str, boxed: bool = False) -> bool:
    r"""Return whether a response is <think>...</think><answer>...</answer> and nothing else.

    With `boxed`, whether it is <think>...</think> followed by text with a \boxed answer.
    """
    text = text.strip()
    tags = ("<think>", "</think>") if boxed else ("<think>", "</think>", _OPEN, _CLOSE)
    if not text.startswith("<think>") or any(text.count(tag) != 1 for tag in tags):
        return False
    _, _, conclusion = text.partition("</think>")
    if boxed:
        return bool(_extract_boxed(conclusion))
    conclusion = conclusion.strip()
    inner = conclusion[len(_OPEN) : -len(_CLOSE)]
    return conclusion.startswith(_OPEN) and conclusion.endswith(_CLOSE) and bool(inner.strip())
