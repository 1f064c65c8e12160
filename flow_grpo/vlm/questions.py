"""Questions, from files."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Question:
    text: str
    images: tuple[str | Path | bytes, ...] = ()
    answer: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    where: str = ""
