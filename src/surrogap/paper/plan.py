"""The plan of a study: the runs that a ledger still lacks, their order, and their expected time.

Work is done in stages, the most important first. In a stage, all methods are tuned, then the runs
that are scored on test images follow seed by seed, so that an unfinished study has as many complete
seeds as possible. A method's final runs are known once its tuning is finished.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from surrogap.paper.ledger import Ledger, LedgerLine
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


def val_accuracy(line: LedgerLine) -> float | None:
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
    settings = chosen(scale, cell.setup, cell.method, ledger)
    return None if settings is None else _with_seeds(scale, cell, settings)


def _with_seeds(scale: Scale, cell: Cell, settings: Changes) -> list[StudyRun]:
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


@final
@dataclass(frozen=True)
class Todo:
    """A run that the ledger lacks.

    Attributes:
        run: The run; if `is_ready` is False, one with the settings of the first trial.
        is_ready: Whether its settings are known.
        seconds: The expected time.
    """

    run: StudyRun
    is_ready: bool
    seconds: float


def todo(scale: Scale, stages: Sequence[Stage], ledger: Ledger, *, jobs: int = 1) -> list[Todo]:
    """The runs that some stages need and the ledger lacks, in the order of work.

    Args:
        scale: The study.
        stages: The runs that are wanted; set-ups that the scale does not have are left out.
        ledger: The finished runs.
        jobs: The number of runs at once, on which the time of each depends.
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
    columns = []
    tuned: dict[tuple[str, str], list[StudyRun]] = {}
    for cell in cells:
        tried = tuned.setdefault((cell.setup, cell.method), trials(scale, cell.setup, cell.method))
        known = final_runs(scale, cell, ledger)
        runs = _with_seeds(scale, cell, tried[0].settings) if known is None else known
        columns.append([(run, known is not None) for run in runs[: stage.max_seeds]])
    for tried in tuned.values():
        yield from ((run, True) for run in tried)
    for seed in range(max(map(len, columns), default=0)):
        yield from (column[seed] for column in columns if seed < len(column))


def expected_seconds(scale: Scale, run: StudyRun, ledger: Ledger, jobs: int) -> float:
    """The expected time of a run.

    The median of the same method's runs in the same set-up with as many jobs, if the ledger has
    some; else the time of other methods for a pass over the images; else the set-up's guess.

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
        / (METHODS[line["method"]].passes * line["num_epochs"] * _slowdown(line["jobs"]))
        for line in similar
    ]
    rate = statistics.median(rates) if rates else scale.setups[run.setup].seconds
    passes = METHODS[run.method].passes if run.source is None else 1.0
    before = 0.0 if run.source is None else expected_seconds(scale, run.source, ledger, jobs)
    return before + OVERHEAD + _slowdown(jobs) * rate * passes * float(run.changes["epochs"])


def _slowdown(jobs: int) -> float:
    """The time of a run among others, relative to one alone: a guess, until the ledger has some."""
    return 1.0 + (jobs - 1) / 2


def relative_cost(timing: LedgerLine, method: str) -> float | None:
    """The cost of training with a method relative to plain training for the set-up's epochs.

    Args:
        timing: A line of kind "timing".
        method: The method's name.

    Returns:
        None if the method was not timed.

    >>> timing = {"seconds_per_step": {"vanilla": 2.0, "sam": 4.0, "sam-late": 4.0}}
    >>> relative_cost(timing, "sam"), relative_cost(timing, "vanilla-2x")
    (2.0, 2.0)
    >>> round(relative_cost(timing, "sam-late"), 3)
    1.333
    """
    times, kind = timing["seconds_per_step"], METHODS[method]
    plain = times["vanilla"]
    own = plain if kind.is_plain else times.get(method)
    if own is None:
        return None
    mean = kind.start * plain + (1 - kind.start) * own
    return float(kind.epochs * mean / plain)
