"""Values as JSON documents hold them."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def plain(value: Any) -> Any:
    """A value that JSON can hold: paths as text, and null for numbers that are not finite.

    >>> plain({"gap": math.nan, "rhos": (0.1, 0.2)})
    {'gap': None, 'rhos': [0.1, 0.2]}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value) if isinstance(value, Path) else value
