"""The cost of training with a method relative to plain training, from the ledger's timings."""

from surrogap.paper.ledger import Ledger, Line
from surrogap.paper.study import METHODS


def newest_timing(ledger: Ledger, scale: str, setup: str) -> Line | None:
    """The last line that measured the steps of a set-up; None without one.

    Args:
        ledger: The study's.
        scale: The name of its scale.
        setup: The set-up's letter.
    """
    found = [
        line
        for line in ledger.of_kind("timing")
        if (line["scale"], line["setup"]) == (scale, setup)
    ]
    return max(found, key=lambda line: str(line["date"]), default=None)


def relative_cost(line: Line, method: str) -> float | None:
    """The cost of training with a method relative to plain training for the set-up's epochs.

    Args:
        line: A line of kind "timing".
        method: The method's name.

    Returns:
        None where the method was not timed.

    >>> line = {"seconds_per_step": {"vanilla": 2.0, "sam": 4.0, "sam-late": 4.0}}
    >>> relative_cost(line, "sam"), relative_cost(line, "vanilla-2x")
    (2.0, 2.0)
    >>> round(relative_cost(line, "sam-late"), 3)
    1.333
    """
    times, kind = line["seconds_per_step"], METHODS[method]
    plain = times["vanilla"]
    own = plain if kind.changes == METHODS["vanilla"].changes else times.get(method)
    if own is None:
        return None
    mean = kind.start * plain + (1 - kind.start) * own
    return float(kind.epochs * mean / plain)
