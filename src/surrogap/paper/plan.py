"""The plan of a study: the work that a ledger still lacks, its order, and its expected time.

Work is done in stages, the most important first. In a stage, all methods are tuned, then the runs
that are scored on test images follow seed by seed, so that an unfinished study has as many complete
seeds as possible. A method's trials are known once plain training is tuned, since they use its
learning rate and weight decay; with a second setting, once the simpler method is tuned as well. The
final runs are known once the trials are finished. Measurements need the device for themselves, and
come before all runs.
"""

import hashlib
import json
import math
import statistics
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal, final

from surrogap.paper.ledger import Ledger, LedgerLine
from surrogap.paper.methods import METHODS, ONLY_RADIUS, Changes
from surrogap.paper.study import Cell, Scale, StudyRun, study_run
from surrogap.paper.tuning import (
    chosen,
    is_tuned,
    repeats,
    shared_settings,
    trials,
    tuned_first,
)

# Seconds besides the training steps: building, capturing, scoring test images, sharpness.
OVERHEAD = 8.0
# Seconds to measure one method: a guess, until the ledger has one.
MEASUREMENT = 15.0

TIMED_SETUP = "A"


def num_seeds(scale: Scale, cell: Cell) -> int:
    """The number of seeds of a cell."""
    if cell.changes:
        return scale.num_ablation_seeds
    if cell.setup == "A" and cell.method in scale.more_seeds:
        return scale.more_seeds[cell.method]
    return scale.num_seeds[cell.setup]


def final_runs(scale: Scale, cell: Cell, ledger: Ledger) -> list[StudyRun] | None:
    """The runs of a cell that are scored on test images; None while its tuning is unfinished."""
    settings = chosen(scale, cell.setup, cell.method, ledger)
    return None if settings is None else _with_seeds(scale, cell, settings, ledger)


def _with_seeds(scale: Scale, cell: Cell, settings: Changes, ledger: Ledger) -> list[StudyRun]:
    shared = shared_settings(scale, cell.setup, cell.method, ledger)
    return [
        study_run(scale, cell, settings, shared, seed=seed, purpose="final")
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
        run: The run; if `is_ready` is False, one with settings that may change.
        is_ready: Whether its settings are known.
        seconds: The expected time.
    """

    run: StudyRun
    is_ready: bool
    seconds: float


def todo(scale: Scale, stages: Sequence[Stage], ledger: Ledger, *, jobs: int = 1) -> list[Todo]:
    """The runs that some stages need and the ledger lacks, in the order of work.

    Set-ups and methods that the scale does not have are left out. The expected times depend on
    `jobs`, the number of runs at once.
    """
    found: dict[str, Todo] = {}
    for run, is_ready in (one for stage in stages for one in _wanted(scale, stage, ledger)):
        if run.key not in ledger and run.key not in found:
            seconds = expected_seconds(scale, run, ledger, jobs)
            if run.source is not None and run.source.key in found:
                seconds -= found[run.source.key].seconds  # its weights will be there
            found[run.key] = Todo(run, is_ready, seconds)
    return list(found.values())


def _wanted(scale: Scale, stage: Stage, ledger: Ledger) -> Iterator[tuple[StudyRun, bool]]:
    cells = list(filter(scale.has, stage.cells))
    columns = []
    tuned: dict[tuple[str, str], list[tuple[StudyRun, bool]]] = {}
    for cell in cells:
        is_ready = True
        for method in (*tuned_first(cell.method), cell.method):
            tried = trials(scale, cell.setup, method, ledger)
            again = repeats(scale, cell.setup, method, ledger)
            tuned[cell.setup, method] = [(run, is_ready) for run in (*tried, *again)]
            is_ready = is_tuned(scale, cell.setup, method, ledger)
        known = final_runs(scale, cell, ledger)
        # Unknown settings are the last trial's: the first trial may be a run of another method.
        runs = _with_seeds(scale, cell, tried[-1].settings, ledger) if known is None else known
        columns.append([(run, is_ready) for run in runs[: stage.max_seeds]])
    for column in tuned.values():
        yield from column
    for of_seed in zip_longest(*columns):
        yield from filter(None, of_seed)


def expected_seconds(scale: Scale, run: StudyRun, ledger: Ledger, jobs: int) -> float:
    """The expected time of a run.

    The median of the same method's runs in the same set-up with equally many jobs, if the ledger
    has some; else from the time of other methods for a pass over the images; else from the set-up's
    guess.
    """
    lines = ledger.of_kind("run", setup=run.setup)
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
    """A guess at the time of a run with `jobs` at once, relative to a run alone."""
    return 1.0 + (jobs - 1) / 2


@final
@dataclass(frozen=True)
class Measurement:
    """Work in a set-up that is not a run, done while nothing else uses the device.

    Attributes:
        kind: "timing" for the time of a step, or "find-rho" for the radii that find-rho suggests.
        setup: The set-up's letter.
        methods: The methods that are measured.
        seconds: The expected time.
    """

    kind: Literal["timing", "find-rho"]
    setup: str
    methods: Sequence[str]
    seconds: float

    @property
    def title(self) -> str:
        """Set-up and number of methods, in a line."""
        return f"{self.setup}, {len(self.methods)} methods"

    def is_ready(self, scale: Scale, ledger: Ledger) -> bool:
        """True for timing, and for find-rho once the radius of one of its methods is tuned."""
        return self.kind == "timing" or any(
            chosen(scale, self.setup, method, ledger) is not None for method in self.methods
        )

    def key(self, scale: Scale, ledger: Ledger) -> str:
        """The key of its line in the ledger.

        That of find-rho depends on all settings that change the result, so it changes when plain
        training is tuned to other settings than those of the set-up. A timing's key is always new:
        each has a line of its own, and the newest counts.
        """
        if self.kind == "timing":
            return uuid.uuid4().hex[:16]
        runs = [trials(scale, self.setup, method, ledger)[0].key for method in self.methods]
        text = json.dumps(["find-rho", scale.find_rho, runs])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def step_timing(scale: Scale, ledger: Ledger, methods: Sequence[str] | None = None) -> Measurement:
    """The timing of some methods; None for all."""
    methods = list(METHODS) if methods is None else methods
    seconds = len(methods) * _seconds_each("timing", "seconds_per_step", scale, ledger)
    return Measurement("timing", TIMED_SETUP, methods, seconds)


def radius_suggestions(scale: Scale, ledger: Ledger) -> list[Measurement]:
    """find-rho in each set-up."""
    seconds = _seconds_each("find-rho", "suggestions", scale, ledger)
    found = []
    for letter, setup in scale.setups.items():
        methods = [method for method in ONLY_RADIUS if method in setup.methods]
        if setup.source is None and methods and not setup.own:
            found.append(Measurement("find-rho", letter, methods, len(methods) * seconds))
    return found


def suggested_ranges(scale: Scale, ledger: Ledger) -> dict[tuple[str, str], tuple[float, float]]:
    """The range of radii that find-rho suggests, by set-up and method, from the ledger."""
    found = {}
    for one in radius_suggestions(scale, ledger):
        key = one.key(scale, ledger)
        for method in one.methods if key in ledger else ():
            found[one.setup, method] = _range(ledger[key]["suggestions"][method])
    return found


def _range(suggestion: LedgerLine) -> tuple[float, float]:
    from surrogap.analysis.find_rho import Radius, Sweep

    names, recorded = ("rho", "loss", "perturbed_loss", "cosine"), suggestion["radii"]
    # JSON has no infinite numbers: a loss that overflowed is None.
    values = ([math.nan if one[name] is None else one[name] for name in names] for one in recorded)
    radii = [Radius(*numbers) for numbers in values]
    sweep = Sweep(tuple(radii), suggestion["num_batches"])
    # Without a lower end, all radii of the sweep are too small.
    return radii[-1].rho if sweep.low is None else sweep.low, sweep.high


def _seconds_each(kind: str, results: str, scale: Scale, ledger: Ledger) -> float:
    """The longest time to measure one method in the ledger, or else a guess."""
    lines = ledger.of_kind(kind, scale=scale.name)
    return max((line["seconds"] / len(line[results]) for line in lines), default=MEASUREMENT)


def missing_measurements(scale: Scale, kinds: Sequence[str], ledger: Ledger) -> list[Measurement]:
    """The measurements of some kinds that the ledger lacks."""
    found = []
    steps = dict.fromkeys(method.step for method in METHODS.values())
    untimed = [s for s in steps if ledger.newest_timing(scale.name, TIMED_SETUP, s) is None]
    if "timing" in kinds and untimed:
        found.append(step_timing(scale, ledger, untimed))
    if "find-rho" in kinds:
        suggested = radius_suggestions(scale, ledger)
        found += [one for one in suggested if one.key(scale, ledger) not in ledger]
    return found


def relative_cost(timing: LedgerLine, method: str) -> float:
    """The cost of training with a method relative to plain training for the set-up's epochs.

    `timing` is a line of the ledger with the time of the method's step.

    >>> timing = {"seconds_per_step": {"vanilla": 2.0, "sam": 4.0}}
    >>> relative_cost(timing, "sam"), relative_cost(timing, "vanilla-2x")
    (2.0, 2.0)
    >>> round(relative_cost(timing, "sam-late"), 3)
    1.333
    """
    times, kind = timing["seconds_per_step"], METHODS[method]
    plain, own = times["vanilla"], times[kind.step]
    mean = kind.start * plain + (1 - kind.start) * own
    return float(kind.epochs * mean / plain)
