"""`surrogap reproduce`: draw the paper's toy figures, and check its theory in numbers.

surrogap reproduce
surrogap reproduce fig-trajectory --out figures
surrogap reproduce theory
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from surrogap.cli.options import options
from surrogap.cli.results import Results, bar
from surrogap.experiments.reproductions import REPRODUCTIONS, Settings
from surrogap.experiments.tables import Table
from surrogap.training.arguments import at_least, one_of


@dataclass(frozen=True)
class Reproduce:
    """Draw the paper's toy figures, and check its theory in numbers.

    It trains no network and takes no images: functions of a few weights, in float64. What is made
    up, and where a statement fails, is written beside it.
    """

    name: Positional[str | None] = None
    """What to reproduce: fig-gap, fig-trajectory or theory. By default they are listed."""

    out: Path | None = None
    """The folder to write to. By default runs/reproduce-NAME."""

    steps: int | None = None
    """The length of the runs of theory, by default 2000, and of fig-trajectory, by default 600."""

    seeds: int = 3
    """How many runs each theorem's averages are over."""

    frames: int = 60
    """How many pictures the animation of fig-trajectory has."""


def main(arguments: Sequence[str]) -> int:
    """Lists what can be reproduced or does one of them, and returns the exit status.

    Raises:
        ValueError: The arguments do not fit, or there is no such name.
    """
    chosen = options(Reproduce, "reproduce", arguments)
    if chosen.name is None:
        Table(("name", "what"), [(n, r.title) for n, r in REPRODUCTIONS.items()]).print()
        return 0
    name = one_of("name", chosen.name, REPRODUCTIONS, remedy="surrogap reproduce lists them.")
    if chosen.steps is not None:
        at_least("steps", chosen.steps, 16, remedy="Pass a number such as 600.")
    at_least("seeds", chosen.seeds, 1, remedy="Pass a number of runs, as 3.")
    at_least("frames", chosen.frames, 1, remedy="Pass a number of pictures, as 60.")
    folder = Path("runs") / f"reproduce-{name}" if chosen.out is None else chosen.out
    reproduction = REPRODUCTIONS[name]
    results = Results(folder, "reproduce", name, reproduction.files)
    settings = Settings(chosen.steps, chosen.seeds, chosen.frames)
    with bar(name) as tell:
        found = reproduction.compute(settings, tell)
        results.write(found.numbers, found.writers)
    found.table.print()
    print(results.told)
    return 0
