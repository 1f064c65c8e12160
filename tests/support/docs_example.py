"""The code of the example algorithm in docs/methods/custom.md."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "methods" / "custom.md"


def example() -> str:
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    return code
