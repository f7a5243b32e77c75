"""The command line: `surrogap COMMAND`. See `surrogap.cli.commands`."""

import sys


def main(arguments: list[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: The arguments after the name of the program. By default those of the process.

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
    try:
        # Imports take time, during which an interrupt must not print a traceback.
        from surrogap.cli.commands import run

        return run(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:  # training handles signals itself, and saves a checkpoint
        print("surrogap: stopped by SIGINT.", file=sys.stderr)
        return 130
