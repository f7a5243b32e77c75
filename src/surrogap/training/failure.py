"""What ends a run that was asked for rightly."""


class RunFailedError(RuntimeError):
    """A run cannot go on: its loss is not finite, or its disk is full.

    What its folder held before is as it was, the last checkpoint above all.
    """
