"""Types of the command line's optional flags. This module does not import torch."""

from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg


def optional(metavar: str) -> Any:
    """Return the annotation of a flag whose default is None.

    Its help shows `metavar` instead of `{None}|INT`, and omits "(default: None)": the help text
    describes the default.
    """
    return arg(metavar=metavar, help_behavior_hint=_default)


def _default(value: str) -> str:
    return "" if value == "None" else f"(default: {value})"


OptionalInt = Annotated[int | None, optional("INT")]
OptionalFloat = Annotated[float | None, optional("FLOAT")]
OptionalStr = Annotated[str | None, optional("STR")]
OptionalPath = Annotated[Path | None, optional("PATH")]
