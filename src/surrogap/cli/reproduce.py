"""`surrogap reproduce`: draw some of the paper's figures, and check its theory in numbers.

surrogap reproduce
surrogap reproduce fig-trajectory --out figures
surrogap reproduce fig-rho-alpha --rhos 0.1 0.3 --alphas 0 0.2
surrogap reproduce theory
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from surrogap.cli.options import options
from surrogap.cli.results import Results, bar
from surrogap.experiments.methods import Planned
from surrogap.experiments.tables import Table
from surrogap.paper.reproductions import REPRODUCTIONS, Settings
from surrogap.training.arguments import at_least, one_of


@dataclass(frozen=True)
class Reproduce:
    """Draw some of the paper's figures, and check its theory in numbers.

    Most take functions of a few weights, in float64, and no network: what is made up, and where a
    statement fails, is written beside it. fig-rho-alpha alone trains networks: 48 by
    default, in 15 minutes of a processor core. Runs that are finished are not trained again, and
    one that was interrupted goes on where it was.
    """

    name: Positional[str | None] = None
    """What to reproduce: fig-gap, fig-trajectory, fig-rho-alpha or theory. By default they are
    listed."""

    out: Path | None = None
    """The folder to write to. By default runs/reproduce-NAME."""

    steps: int | None = None
    """The length of the runs of theory, by default 2000, of fig-trajectory, by default 600, and of
    fig-rho-alpha, by default the recipe's."""

    seeds: int = Settings.num_seeds
    """How many runs the averages are over: of each theorem, or of each rho and alpha."""

    frames: int = Settings.num_frames
    """How many pictures the animation of fig-trajectory has."""

    recipe: str = Settings.recipe
    """fig-rho-alpha: the recipe that says what is trained, but for the objective, which is gsam."""

    rhos: tuple[float, ...] = Settings.rhos
    """fig-rho-alpha: the radii, each constant over a run."""

    alphas: tuple[float, ...] = Settings.alphas
    """fig-rho-alpha: the weights of the gap; 0 is SAM."""


def main(arguments: Sequence[str]) -> int:
    """Lists what can be reproduced or does one of them, and returns the exit status.

    Raises:
        ValueError: The arguments do not fit, there is no such name, or the folder holds other runs.
        RunFailedError: A run failed.
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
    folder = Path("runs") / f"reproduce-{name}" if chosen.out is None else chosen.out.expanduser()
    reproduction, settings = REPRODUCTIONS[name], _settings(chosen, folder)
    runs = () if reproduction.runs is None else reproduction.runs(settings)
    results = Results(folder, "reproduce", name, reproduction.files)
    status = _train(runs, folder)
    if status:
        return status
    with bar(name) as tell:
        found = reproduction.compute(settings, tell)
        results.write(found.numbers, found.writers)
    found.table.print()
    for line in found.words:
        print(textwrap.fill(line, width=100, break_on_hyphens=False))
    print(results.told)
    return 0


def _settings(chosen: Reproduce, folder: Path) -> Settings:
    return Settings(
        num_steps=chosen.steps,
        num_seeds=chosen.seeds,
        num_frames=chosen.frames,
        recipe=chosen.recipe,
        rhos=chosen.rhos,
        alphas=chosen.alphas,
        folder=folder,
    )


def _train(runs: Sequence[Planned], folder: Path) -> int:
    """Trains what there is to train, and returns the exit status."""
    if not runs:
        return 0
    from surrogap.cli.runs import train_all
    from surrogap.experiments.measured import sharpness_of
    from surrogap.experiments.probes import radius_of

    return train_all(runs, folder, "reproduce", radius=radius_of, measured=sharpness_of)
