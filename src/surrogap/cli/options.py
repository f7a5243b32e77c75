"""The options of a command: a dataclass, read from the command line with tyro."""

import contextlib
import io
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, TypeVar

import docstring_parser
import tyro

from surrogap.errors import InvalidValueError, UserError
from surrogap.training.config import Config
from surrogap.training.flags import optional

Options = TypeVar("Options")

# A configuration among the options of a command. Its groups have no prefix in the help.
ConfigOptions = Annotated[Config, tyro.conf.arg(name="")]
RunFolder = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
OptionalRunFolder = Annotated[tyro.conf.Positional[Path | None], optional("[RUN]")]
RecipeName = Annotated[str | None, optional("NAME")]

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
    message, text = io.StringIO(), _Output()
    try:
        with contextlib.redirect_stderr(message), contextlib.redirect_stdout(text), _joined_lines():
            chosen: Options = tyro.cli(kind, args=list(arguments), **settings)
            return chosen
    except SystemExit as end:
        if not end.code:
            _print_wrapped(text.getvalue())
            raise
        raise InvalidValueError(
            _own_message(end) or _sentence(message.getvalue(), program)
        ) from None


class _Output(io.StringIO):
    """A buffer that looks like stdout to tyro, which chooses colours and borders for it."""

    def __init__(self) -> None:
        super().__init__()
        self._stdout = sys.stdout

    def isatty(self) -> bool:
        return self._stdout.isatty()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stdout.encoding


def _print_wrapped(text: str) -> None:
    """Print tyro's help, and wrap its description, which tyro does not."""
    width = shutil.get_terminal_size().columns
    for line in text.splitlines():
        is_text = line[:1].isalpha()
        print(textwrap.fill(line, width, break_on_hyphens=False) if is_text else line)


@contextlib.contextmanager
def _joined_lines() -> Iterator[None]:
    """Context in which the help of a field has no line breaks.

    tyro joins lines that start with a letter, but docstrings of fields are indented.
    """
    parse = docstring_parser.parse_from_object

    def parse_and_join(*args: Any, **kwargs: Any) -> docstring_parser.Docstring:
        parsed = parse(*args, **kwargs)
        for field in parsed.params:
            field.description = " ".join((field.description or "").split())
        return parsed

    docstring_parser.parse_from_object = parse_and_join
    try:
        yield
    finally:
        docstring_parser.parse_from_object = parse


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
    return f"options of {program} must be valid, got: {text}.{guess} See {program} --help."
