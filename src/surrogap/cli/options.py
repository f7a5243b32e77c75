"""The options of a command: a dataclass, read from the command line with tyro."""

import contextlib
import io
import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any, TypeVar

import tyro

from surrogap.errors import InvalidValueError, UserError

Options = TypeVar("Options")

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_BORDERS = " │|"
_RULES = "─╭╮╰╯-+ "


def options(
    kind: type[Options], command: str, arguments: Sequence[str], default: Options | None = None
) -> Options:
    """Read the options of a command. Each field is a flag, also in nested dataclasses.

    Args:
        kind: A dataclass with a docstring under each field, which becomes its help.
        command: The name of the command.
        arguments: The arguments after the name of the command.
        default: The values of fields that the arguments do not set.

    Raises:
        ValueError: The arguments are not valid.
        SystemExit: The arguments ask for help, which has been printed.
    """
    program = f"surrogap {command}"
    settings: dict[str, Any] = {} if default is None else {"default": default}
    settings |= {"prog": program, "config": (tyro.conf.OmitArgPrefixes,)}
    message = io.StringIO()
    try:
        with contextlib.redirect_stderr(message):
            chosen: Options = tyro.cli(kind, args=list(arguments), **settings)
            return chosen
    except SystemExit as end:
        if not end.code:
            raise
        raise InvalidValueError(
            _own_message(end) or _sentence(message.getvalue(), program)
        ) from None


def _own_message(end: SystemExit) -> str | None:
    """Return the message of the `UserError` that ended the construction of the options, if any."""
    error: BaseException | None = end
    while error is not None and not isinstance(error, UserError):
        error = error.__context__
    return None if error is None else str(error)


def _sentence(message: str, program: str) -> str:
    """Return tyro's message, which it prints in a box, as one sentence."""
    _, *lines = (line.strip(_BORDERS) for line in _COLOUR.sub("", message).splitlines())
    # The first paragraph below the title. Rules separate the paragraphs.
    groups = groupby(lines, key=lambda line: not line.strip(_RULES))
    text = next((" ".join(group) for is_rule, group in groups if not is_rule), "").rstrip(".")
    close = re.search(r"Perhaps you meant:\W*(--[\w-]+)", " ".join(lines))
    guess = f" The closest is {close[1]}." if close else ""
    return f"options must be those of {program}, got: {text}.{guess} See {program} --help."
