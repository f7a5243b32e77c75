"""The plan of a study: which runs a ledger still lacks, in which order, and how long they take.

Work is done stage by stage, the most telling first. In a stage, all methods are tuned, then the
runs that are scored on test images follow seed by seed, so that a study that is cut off has as many
complete seeds as possible. A method's final runs are known once its tuning is finished.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from surrogap.paper.ledger import Ledger, Line
from surrogap.paper.study import METHODS, Cell, Changes, Scale, StudyRun, study_run, trials

# Seconds beside the training steps: building, capturing, scoring test images, sharpness.
OVERHEAD = 8.0


def chosen(scale: Scale, setup: str, method: str, ledger: Ledger) -> Changes | None:
    """The settings with the best validation accuracy; None while the tuning is unfinished.

    A trial whose training failed counts as the worst. Of equal trials, the first is chosen.
    """
    runs = trials(scale, setup, method)
    if not all(run.key in ledger for run in runs):
        return None
    return max(runs, key=lambda run: val_accuracy(ledger[run.key]) or -1.0).settings


def val_accuracy(line: Line) -> float | None:
    """The validation accuracy after the last epoch; None for a run that failed."""
    return float(line["val"]["accuracy"]) if line["kind"] == "run" else None


def num_seeds(scale: Scale, cell: Cell) -> int:
    """The number of seeds of a cell."""
    if cell.changes:
        return scale.num_ablation_seeds
    if cell.setup == "A" and cell.method in scale.many:
        return scale.num_seeds_main
    return scale.num_seeds[cell.setup]


def final_runs(scale: Scale, cell: Cell, ledger: Ledger) -> list[StudyRun] | None:
    """The runs of a cell that are scored on test images; None while its tuning is unfinished."""
    settings = chosen(scale, cell.setup, cell.method, ledger) if cell.is_tuned else {}
    if settings is None:
        return None
    return [
        study_run(scale, cell, settings, seed=seed, purpose="final")
        for seed in range(num_seeds(scale, cell))
    ]


@final
@dataclass(frozen=True)
class Stage:
    """Runs that are done before those of the next stage.

    Attributes:
        cells: The methods and settings that are trained.
        max_seeds: The largest number of seeds of a cell in this stage; None for all.
    """

    cells: Sequence[Cell]
    max_seeds: int | None = None


def stages_of(cells: Sequence[Cell]) -> list[Stage]:
    """A stage for each set-up, in the order in which they come.

    >>> [len(stage.cells) for stage in stages_of([Cell("A", "sam"), Cell("B", "sam")])]
    [1, 1]
    """
    setups = dict.fromkeys(cell.setup for cell in cells)
    return [Stage([cell for cell in cells if cell.setup == setup]) for setup in setups]


@final
@dataclass(frozen=True)
class Todo:
    """A run that the ledger lacks.

    Attributes:
        run: The run; where `is_ready` is False, one with the settings of the first trial.
        is_ready: Whether its settings are known.
        seconds: The time that it is expected to take.
    """

    run: StudyRun
    is_ready: bool
    seconds: float


def todo(scale: Scale, stages: Sequence[Stage], ledger: Ledger, *, jobs: int = 1) -> list[Todo]:
    """The runs that some stages need and the ledger lacks, in the order of work.

    Args:
        scale: The study.
        stages: The runs that are asked for; set-ups that the scale does not have are left out.
        ledger: The finished runs.
        jobs: The number of runs at once, which changes how long each takes.
    """
    found: dict[str, Todo] = {}
    for stage in stages:
        for run, is_ready in _wanted(scale, stage, ledger):
            if run.key not in ledger and run.key not in found:
                seconds = expected_seconds(scale, run, ledger, jobs)
                found[run.key] = Todo(run, is_ready, seconds)
    return list(found.values())


def _wanted(scale: Scale, stage: Stage, ledger: Ledger) -> Iterator[tuple[StudyRun, bool]]:
    cells = [cell for cell in stage.cells if cell.setup in scale.setups]
    tuned = dict.fromkeys((cell.setup, cell.method) for cell in cells if cell.is_tuned)
    for setup, method in tuned:
        for trial in trials(scale, setup, method):
            yield trial, True
    numbers = [num_seeds(scale, cell) for cell in cells]
    if stage.max_seeds is not None:
        numbers = [min(number, stage.max_seeds) for number in numbers]
    runs = [final_runs(scale, cell, ledger) for cell in cells]
    for seed in range(max(numbers, default=0)):
        for cell, number, known in zip(cells, numbers, runs, strict=True):
            if seed < number:
                yield (_unknown(scale, cell, seed), False) if known is None else (known[seed], True)


def _unknown(scale: Scale, cell: Cell, seed: int) -> StudyRun:
    settings = trials(scale, cell.setup, cell.method)[0].settings
    return study_run(scale, cell, settings, seed=seed, purpose="final")


def expected_seconds(scale: Scale, run: StudyRun, ledger: Ledger, jobs: int) -> float:
    """The time that a run is expected to take.

    The median of the same method's runs in the same set-up, with as many at once, where the ledger
    has some; else what other methods took for a pass over the images; else the set-up's guess.

    Args:
        scale: The study.
        run: The run.
        ledger: The finished runs.
        jobs: The number of runs at once.
    """
    lines = [line for line in ledger.of_kind("run") if line["setup"] == run.setup]
    same = [
        float(line["seconds"])
        for line in lines
        if (line["method"], line["purpose"], line["jobs"]) == (run.method, run.purpose, jobs)
        and line["num_epochs"] == run.changes["epochs"]
    ]
    if same:
        return statistics.median(same)
    similar = [line for line in lines if line["jobs"] == jobs] or lines
    rates = [
        max(line["seconds"] - OVERHEAD, 1.0)
        / (METHODS[line["method"]].passes * line["num_epochs"] * _crowding(line["jobs"]))
        for line in similar
    ]
    rate = statistics.median(rates) if rates else scale.setups[run.setup].seconds
    passes = METHODS[run.method].passes if run.source is None else 1.0
    before = 0.0 if run.source is None else expected_seconds(scale, run.source, ledger, jobs)
    return before + OVERHEAD + _crowding(jobs) * rate * passes * float(run.changes["epochs"])


def _crowding(jobs: int) -> float:
    """The time of a run among others, relative to one alone: a guess, until the ledger knows."""
    return 1.0 + (jobs - 1) / 2
