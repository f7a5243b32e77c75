"""Conversion of values to what JSON can hold."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def json_value(value: Any) -> Any:
    """Return a value for JSON: paths become strings, and numbers that are not finite become None.

    >>> json_value({"gap": math.nan, "rhos": (0.1, 0.2)})
    {'gap': None, 'rhos': [0.1, 0.2]}
    """
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value) if isinstance(value, Path) else value
