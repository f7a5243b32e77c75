"""`surrogap reproduce`: the paper's tables and figures, and its theory in numbers.

surrogap reproduce
surrogap reproduce table-1 --scale gpu --data-root data --dry-run
surrogap reproduce table-1 --scale gpu --data-root data --jobs 4 --time-limit 500
surrogap reproduce fig-trajectory --out figures
surrogap reproduce fig-rho-alpha --rhos 0.1 0.3 --alphas 0 0.2
surrogap reproduce theory
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Annotated

from tyro.conf import Positional, arg

from surrogap.checks import integer, one_of
from surrogap.cli.defaults import given_fields
from surrogap.cli.options import options
from surrogap.cli.studies import TITLES, StudyOptions, reproduce_study, show
from surrogap.cli.terminal import print_stopped, progress_bar
from surrogap.errors import InvalidValueError
from surrogap.experiments.result_files import ResultFiles
from surrogap.experiments.text_table import Table
from surrogap.paper.reproductions import REPRODUCTIONS, ReproductionSettings
from surrogap.training.flags import OptionalInt, optional


@dataclass(frozen=True)
class Reproduce(StudyOptions):
    """Reproduce the paper's tables and figures, and check its theory in numbers.

    Tables, and figures about training, are drawn from the ledger of a study, which trains each run
    once. A run that is interrupted starts again. fig-gap, fig-trajectory and theory use functions
    of a few weights in float64, and train nothing. fig-rho-alpha trains 48 small models by default,
    which takes 15 minutes on a CPU core.
    """

    name: Annotated[Positional[str | None], optional("[NAME]")] = None
    """The table or figure to reproduce, or all for the whole study. By default, list the names."""

    steps: OptionalInt = None
    """The number of steps per run. By default 2000 for theory, 600 for fig-trajectory, and that of
    the recipe for fig-rho-alpha."""

    seeds: int = ReproductionSettings.num_seeds
    """The number of runs per theorem, or per rho and alpha."""

    frames: int = ReproductionSettings.num_frames
    """The number of frames of the animation of fig-trajectory."""

    recipe: Annotated[str, arg(metavar="NAME")] = ReproductionSettings.recipe
    """fig-rho-alpha: recipe to train, with the objective gsam."""

    rhos: tuple[float, ...] = ReproductionSettings.rhos
    """fig-rho-alpha: radii, each constant over a run."""

    alphas: tuple[float, ...] = ReproductionSettings.alphas
    """fig-rho-alpha: values of alpha; 0 is SAM."""


def main(arguments: Sequence[str]) -> int:
    """List or reproduce tables and figures, and return the exit status.

    Raises:
        RunFailedError: A run failed.
        ValueError: The arguments are not valid, or the folder holds other runs.
    """
    chosen = options(Reproduce, "reproduce", arguments)
    titles = {name: found.title for name, found in REPRODUCTIONS.items()} | TITLES
    if chosen.name is None:
        Table(("name", "content"), list(titles.items())).print()
        return 0
    name = one_of("name", chosen.name, titles, remedy="surrogap reproduce lists them.")
    _check_effect(arguments, name)
    if name not in REPRODUCTIONS:
        return reproduce_study(name, chosen)
    if chosen.steps is not None:
        integer("steps", chosen.steps, at_least=16, remedy="Pass a number such as 600.")
    integer("seeds", chosen.seeds, at_least=1, remedy="Pass a number of runs, such as 3.")
    integer("frames", chosen.frames, at_least=1, remedy="Pass a number of frames, such as 60.")
    return _reproduce(name, _settings(chosen, name))


def _check_effect(arguments: Sequence[str], name: str) -> None:
    """Reject flags that this table or figure does not use, even if they pass the default."""
    of_study = {field.name for field in fields(StudyOptions)}
    for field in given_fields(arguments, [field.name for field in fields(Reproduce)]):
        if field != "out" and (field in of_study) == (name in REPRODUCTIONS):
            flag = field.replace("_", "-")
            flag = f"--no-{flag}" if f"--no-{flag}" in arguments else f"--{flag}"
            raise InvalidValueError(f"{flag} has no effect on {name}. Leave it out.")


def _settings(chosen: Reproduce, name: str) -> ReproductionSettings:
    return ReproductionSettings(
        num_steps=chosen.steps,
        num_seeds=chosen.seeds,
        num_frames=chosen.frames,
        recipe=chosen.recipe,
        rhos=chosen.rhos,
        alphas=chosen.alphas,
        folder=chosen.folder(name),
    )


def _reproduce(name: str, settings: ReproductionSettings) -> int:
    reproduction = REPRODUCTIONS[name]
    runs = () if reproduction.runs is None else reproduction.runs(settings)
    files = ResultFiles(settings.folder, "reproduce", name, reproduction.files)
    if runs:
        from surrogap.experiments.measurements import measure_sharpness
        from surrogap.experiments.run_queue import train_missing

        radius = attrgetter("objective.gap_rho")
        stopped_by = train_missing(runs, settings.folder, radius=radius, measure=measure_sharpness)
        if stopped_by is not None:
            return print_stopped("reproduce", stopped_by)
    with progress_bar(name) as progress:
        found = reproduction.compute(settings, progress)
        files.write(found.numbers, found.writers)
    show(found, files)
    return 0
