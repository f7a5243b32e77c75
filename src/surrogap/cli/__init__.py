"""The command line: `surrogap COMMAND`.

A command is a module here of its name (find_rho for find-rho), with a function
`main(arguments) -> int` that returns the exit status, and a line in `COMMANDS`. Its options are a
dataclass, read by `surrogap.cli.options`. Modules of commands import torch and all that needs it
inside of functions, for `--help` must not wait for it.

Exit status: 0; 1 if a run failed; 2 for a mistake in what was asked for, told in one sentence;
128 + n after signal n.
"""

import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from surrogap import __version__
from surrogap.errors import UserError
from surrogap.training.failure import RunFailedError

COMMANDS = {
    "train": "Train a network, or continue to.",
    "compare": "Train several objectives with one budget, and show them side by side.",
    "evaluate": "Score a run on clean and shifted test sets.",
    "show": "Show a run, its summary and its curves.",
    "sharpness": "Measure how sharp a run is, or any network.",
    "landscape": "Draw the loss around a run, or between two.",
    "find-rho": "Suggest a range for rho, for a recipe or a run.",
    "reproduce": "Reproduce the paper's tables and figures, and check its theory.",
    "export": "Write a run's weights for timm.",
    "recipes": "List the recipes, or show one.",
    "models": "List the models.",
}

_OF_PATHS = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: Those after the program's name; by default the process's own.

    Returns:
        The exit status.

    >>> main(["train", "--print-config", "--lr", "0.3"])  # doctest: +ELLIPSIS
    {
      "model": {
    ...
        "lr": 0.3,
    ...
    0
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return 0 if words else 2
    if words[0] == "--version":
        print(f"surrogap {__version__}")
        return 0
    try:
        return _run(words[0], words[1:])
    except BrokenPipeError:  # who reads the output has seen enough, as `head` does
        # What is still to be written at the end has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:  # training has its own way with signals, and saves first
        print("surrogap: SIGINT stopped it before its end.", file=sys.stderr)
        return 128 + signal.SIGINT
    except RunFailedError as failure:
        print(f"surrogap: {failure}", file=sys.stderr)
        return 1
    except UserError as error:
        print(f"surrogap: {error}", file=sys.stderr)
        return 2
    except _OF_PATHS as error:
        if error.filename is None:
            raise
        print(f"surrogap: Cannot use {error.filename}: {error.strerror}.", file=sys.stderr)
        return 2


def _run(name: str, arguments: list[str]) -> int:
    # Imported here, where an interrupt is caught: it takes a tenth of a second.
    from surrogap.checks import one_of

    one_of("command", name, COMMANDS, remedy="Run surrogap --help.")
    module = import_module(f"surrogap.cli.{name.replace('-', '_')}")
    status: int = module.main(arguments)
    return status


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {line}" for name, line in COMMANDS.items()]
    return "\n".join(
        [
            "usage: surrogap COMMAND [OPTIONS]",
            "",
            "Sharpness-aware training: train, evaluate and compare.",
            "",
            "commands:",
            *lines,
            "",
            "surrogap COMMAND --help tells what a command takes.",
        ]
    )
