"""The commands of `surrogap`, and the exit status of the program.

A command is a module of this package, such as find_rho for find-rho, with a function
`main(arguments) -> int` that returns the exit status, and an entry in `COMMANDS`. Its options are a
dataclass that `surrogap.cli.options` reads. Modules of commands import torch inside functions, so
that `--help` is fast.

Exit status: 0; 1 if a run failed; 2 for an error that the user can correct, which is printed as one
sentence; 128 + n after signal n.
"""

import os
import signal
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from surrogap import __version__
from surrogap.checks import one_of
from surrogap.errors import MissingPackageError, UserError
from surrogap.training.failure import RunFailedError

COMMANDS = {
    "train": "Train a model, or continue a run.",
    "compare": "Train several objectives with the same budget, and compare them.",
    "evaluate": "Evaluate a run on clean and shifted test sets.",
    "show": "Show a run or a comparison.",
    "sharpness": "Measure the sharpness of a run, or of any model.",
    "landscape": "Draw the loss around a run, or between two runs.",
    "find-rho": "Suggest a range of radii rho, for a recipe or a run.",
    "reproduce": "Reproduce the paper's tables and figures, and check its theory.",
    "export": "Export the weights of a run for timm.",
    "recipes": "List the recipes, or show one.",
    "models": "List the models.",
}

_PATH_ERRORS = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError)


def run(arguments: Sequence[str]) -> int:
    """Run a command, print its error if it has one, and return the exit status."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"surrogap {__version__}")
        return 0
    warnings.formatwarning = _format_warning
    try:
        one_of("command", arguments[0], COMMANDS, remedy="See surrogap --help.")
        status: int = _module(arguments[0]).main(list(arguments[1:]))
        return status
    except BrokenPipeError:  # the reader of the output ended, such as `head`
        # Discards the output that Python would write at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except RunFailedError as failure:
        print(f"surrogap: {failure}", file=sys.stderr)
        return 1
    except UserError as error:
        print(f"surrogap: {error}", file=sys.stderr)
        return 2
    except _PATH_ERRORS as error:
        if error.filename is None:
            raise
        print(f"surrogap: Cannot use {error.filename}: {error.strerror}.", file=sys.stderr)
        return 2


def _format_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """Format a warning without the line of code that it came from, which is not the user's."""
    return f"{category.__name__}: {message}\n"


def _module(command: str) -> Any:
    try:
        return import_module(f"surrogap.cli.{command.replace('-', '_')}")
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"the extra train must be installed for surrogap {command}, got {error}. "
            "Run pip install 'surrogap[train]'."
        ) from error


def _help() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())
    return (
        "usage: surrogap COMMAND [OPTIONS]\n\n"
        "Sharpness-aware training: train, evaluate and compare.\n\n"
        f"commands:\n{commands}\n\n"
        "surrogap COMMAND --help shows the options of a command."
    )
