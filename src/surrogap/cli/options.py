"""A command's options: a dataclass, read from the command line by tyro."""

import argparse
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
    """The options of a command, one flag for each field, fields of groups included.

    Args:
        kind: A dataclass with a docstring under each field, which becomes its help.
        command: The command's name.
        arguments: What follows the command's name on the command line.
        default: The values of fields that the arguments do not set.

    Raises:
        ValueError: The arguments do not fit.
        SystemExit: They ask for help, which has been printed then.
    """
    program = f"surrogap {command}"
    settings: dict[str, Any] = {} if default is None else {"default": default}
    settings |= {"prog": program, "config": (tyro.conf.OmitArgPrefixes,)}
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            chosen: Options = tyro.cli(kind, args=list(arguments), **settings)
            return chosen
    except SystemExit as end:
        if not end.code:
            raise
        raise InvalidValueError(
            _own_message(end) or _sentence(complaint.getvalue(), program)
        ) from None


def peek(arguments: Sequence[str], *names: str) -> tuple[str | None, ...]:
    """Read some flags before `options` does, because the defaults of others follow from them.

    A flag that is missing, or has no value, is None: `options` will say what is wrong with it.

    >>> peek(["--recipe=vit-s32-gsam", "--seed", "3", "--out"], "recipe", "out", "objective")
    ('vit-s32-gsam', None, None)
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in names:
        parser.add_argument(f"--{name}", nargs="?")
    found = parser.parse_known_args(list(arguments))[0]
    return tuple(getattr(found, name) for name in names)


def _own_message(end: SystemExit) -> str | None:
    """Return the message of a check of ours that ended tyro's construction of the options."""
    error: BaseException | None = end
    while error is not None and not isinstance(error, UserError):
        error = error.__context__
    return None if error is None else str(error)


def _sentence(complaint: str, program: str) -> str:
    """What tyro says in a box, as one sentence of ours."""
    _, *lines = (line.strip(_BORDERS) for line in _COLOUR.sub("", complaint).splitlines())
    # The first of the parts below the title, which rules divide.
    parts = groupby(lines, key=lambda line: not line.strip(_RULES))
    text = next((" ".join(part) for is_rule, part in parts if not is_rule), "").rstrip(".")
    close = re.search(r"Perhaps you meant:\W*(--[\w-]+)", " ".join(lines))
    guess = f" The closest is {close[1]}." if close else ""
    return f"options must be those of {program}, got: {text}.{guess} Run {program} --help."
