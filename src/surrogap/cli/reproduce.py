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
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional

from surrogap.checks import integer, one_of
from surrogap.cli.options import options
from surrogap.cli.results import Results, bar
from surrogap.cli.studies import TITLES, StudyOptions, reproduce_study, show
from surrogap.experiments.methods import Planned
from surrogap.experiments.tables import Table
from surrogap.paper.reproductions import REPRODUCTIONS, Settings
from surrogap.training.flags import OptionalFloat, OptionalInt, OptionalPath, OptionalStr, optional


@dataclass(frozen=True)
class Reproduce:
    """Reproduce the paper's tables and figures, and check its theory in numbers.

    Tables and the figures about training are drawn from the ledger of one study, in which every run
    is trained once; a run that was interrupted starts again. fig-gap, fig-trajectory and theory
    take functions of a few weights, in float64, and train nothing. fig-rho-alpha trains 48 small
    networks by default, in 15 minutes of a CPU core.
    """

    name: Annotated[Positional[str | None], optional("NAME")] = None
    """The name of a table or figure, or all for the whole study. By default names are listed."""

    scale: Literal["laptop", "gpu", "paper"] = "laptop"
    """The size of the study: on the embedded set, for a CPU; on CIFAR, for one GPU; or the paper's,
    whose commands for ImageNet are listed, and under torchrun trained."""

    data_root: str = "data"
    """The folder that holds the named sets, such as cifar10.npz."""

    ledger: OptionalPath = None
    """The file with the study's finished runs. By default results/study.jsonl, for the laptop's
    scale runs/study-laptop/study.jsonl."""

    jobs: int = 1
    """The number of runs to train at once, each in a process of its own."""

    time_limit: OptionalFloat = None
    """Start no run that is not expected to end within so many seconds."""

    dry_run: bool = False
    """List the runs that are left, with the time they are expected to take, and train nothing."""

    train: bool = True
    """Train the runs that the ledger lacks. Otherwise those that it has are drawn."""

    draw: bool = True
    """Draw the table or figure once the runs are finished or time is up."""

    page: OptionalPath = None
    """Write a page with all tables and figures of the study here, in Markdown."""

    compile: Annotated[bool | None, optional("{True,False}")] = None
    """Compile the models with torch.compile. By default as the set-up has it."""

    weights: Path = Path("runs") / "study-weights"
    """The folder for the weights that table-transfer fine-tunes."""

    commit: OptionalStr = None
    """The commit of this code, for the ledger. By default git is asked."""

    out: OptionalPath = None
    """The folder to write to. By default runs/reproduce-NAME."""

    steps: OptionalInt = None
    """The length of the runs of theory, by default 2000, of fig-trajectory, by default 600, and of
    fig-rho-alpha, by default the recipe's."""

    seeds: int = Settings.num_seeds
    """The number of runs of each theorem, or of each rho and alpha."""

    frames: int = Settings.num_frames
    """The number of pictures in the animation of fig-trajectory."""

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
    titles = {name: found.title for name, found in REPRODUCTIONS.items()} | TITLES
    if chosen.name is None:
        Table(("name", "what"), list(titles.items())).print()
        return 0
    name = one_of("name", chosen.name, titles, remedy="surrogap reproduce lists them.")
    if name not in REPRODUCTIONS:
        return reproduce_study(name, _study_options(chosen))
    if chosen.steps is not None:
        integer("steps", chosen.steps, at_least=16, remedy="Pass a number such as 600.")
    integer("seeds", chosen.seeds, at_least=1, remedy="Pass a number of runs, as 3.")
    integer("frames", chosen.frames, at_least=1, remedy="Pass a number of pictures, as 60.")
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
    show(found, results)
    return 0


def _study_options(chosen: Reproduce) -> StudyOptions:
    return StudyOptions(**{f.name: getattr(chosen, f.name) for f in fields(StudyOptions)})


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
