"""The tuning of methods: their trials, and the settings that the trials choose."""

import statistics
from collections.abc import Sequence
from functools import partial

from surrogap.paper.ledger import Ledger, LedgerLine
from surrogap.paper.methods import METHODS, Changes
from surrogap.paper.study import TUNING_SEED, Cell, Scale, StudyRun, study_run


def trials(scale: Scale, setup: str, method: str, ledger: Ledger | None = None) -> list[StudyRun]:
    """The runs that a method is tuned with; for transfer, in the set-up of the source.

    A method that is tuned over the radius alone gets one more trial if the best radius is the
    largest or the smallest of those tried: at twice or half of it, once. Plain training gets the
    further trials of its set-up, if that has some. A method with a second setting tries it with the
    settings that are best for the simpler method so far, which are final once that method is tuned.
    Where methods have learning rates of their own, these are tried with all radii but the smallest.

    Without a ledger, no run counts as finished.

    >>> from surrogap.paper.scales import GPU
    >>> [run.settings["rho"] for run in trials(GPU, "A", "sam")]
    [0.05, 0.1, 0.2, 0.4]
    """
    setup = scale.setups[setup].source or setup
    cell, shared = Cell(setup, method), shared_settings(scale, setup, method, ledger)
    make = partial(study_run, scale, cell, shared=shared, seed=TUNING_SEED, purpose="tuning")
    tried = _first_settings(scale, setup, method, ledger)
    runs = [make(settings) for settings in tried]
    if ledger is None or not all(run.key in ledger for run in runs):
        return runs
    if METHODS[method].is_plain:
        more = scale.setups[setup].more_trials
    else:
        more = _beyond_edge(tried, _best_first(runs, ledger)[0].settings)
    return runs + [make(settings) for settings in more]


def _first_settings(
    scale: Scale, setup: str, method: str, ledger: Ledger | None
) -> Sequence[Changes]:
    """The settings that a method is tried with first."""
    kind, around = METHODS[method], scale.setups[setup]
    num_trials = around.num_trials(scale.num_trials)
    tried = kind.trials or around.trials
    if kind.simpler is not None:
        simpler = _best_first(trials(scale, setup, kind.simpler, ledger), ledger)
        best_few = simpler[: max(num_trials // len(kind.second[1]), 1)]
        settings = sorted((run.settings for run in best_few), key=lambda one: list(one.values()))
        tried = kind.with_second(settings)
    elif around.own and not kind.is_plain:
        tried = [{**shared, **own} for shared in around.own for own in tried[1:]]
    return tried[:num_trials]


def _beyond_edge(tried: Sequence[Changes], best: Changes) -> list[Changes]:
    """The radius beyond the best one, if radii alone were tried and the best is at an edge.

    Of two radii, the best is always at an edge.

    >>> _beyond_edge([{"rho": 0.1}, {"rho": 0.2}, {"rho": 0.4}], best={"rho": 0.4})
    [{'rho': 0.8}]
    """
    has_radii = all(settings.keys() == {"rho"} for settings in tried)
    if not has_radii or len(tried) < 3 or best not in (tried[0], tried[-1]):
        return []
    return [{"rho": best["rho"] * (2.0 if best == tried[-1] else 0.5)}]


def finished_trials(scale: Scale, setup: str, method: str, ledger: Ledger) -> list[StudyRun]:
    """The trials of a method that the ledger has."""
    return [run for run in trials(scale, setup, method, ledger) if run.key in ledger]


def repeats(scale: Scale, setup: str, method: str, ledger: Ledger) -> list[StudyRun]:
    """The best trials of a method with further seeds, in a set-up that repeats some.

    They are known once all trials are finished.
    """
    setup = scale.setups[setup].source or setup
    num_best, num_seeds = scale.setups[setup].repeats
    runs = trials(scale, setup, method, ledger)
    if not all(run.key in ledger for run in runs):
        return []
    cell, shared = Cell(setup, method), shared_settings(scale, setup, method, ledger)
    make = partial(study_run, scale, cell, shared=shared, purpose="tuning")
    return [
        make(run.settings, seed=TUNING_SEED + number)
        for number in range(1, num_seeds + 1)
        for run in _best_first(runs, ledger)[:num_best]
    ]


def shared_settings(scale: Scale, setup: str, method: str, ledger: Ledger | None) -> Changes:
    """The settings that a method shares with plain training; empty until that is tuned.

    A run without them uses those of the set-up.
    """
    if ledger is None or METHODS[method].is_plain:
        return {}
    return chosen(scale, setup, "vanilla", ledger) or {}


def tuned_first(method: str) -> list[str]:
    """The methods that must be tuned before a method.

    >>> tuned_first("gsam")
    ['vanilla', 'sam']
    """
    before = METHODS[method].simpler or ("" if METHODS[method].is_plain else "vanilla")
    return [*tuned_first(before), before] if before else []


def _best_first(runs: Sequence[StudyRun], ledger: Ledger | None) -> list[StudyRun]:
    """Sort runs by validation accuracy, best first; failed and unfinished runs come last."""

    def accuracy(run: StudyRun) -> float:
        if ledger is None or run.key not in ledger:
            return -1.0
        return val_accuracy(ledger[run.key]) or -1.0

    return sorted(runs, key=accuracy, reverse=True)


def is_tuned(
    scale: Scale, setup: str, method: str, ledger: Ledger, *, beyond_edge: bool = True
) -> bool:
    """True once all trials of a method, and of those that come before it, are finished.

    Without `beyond_edge`, the trials beyond the edge need not be finished.
    """
    num_runs = None if beyond_edge else scale.setups[setup].num_trials(scale.num_trials)
    return all(
        run.key in ledger
        for one in (*tuned_first(method), method)
        for run in (
            *trials(scale, setup, one, ledger)[:num_runs],
            *repeats(scale, setup, one, ledger),
        )
    )


def chosen(scale: Scale, setup: str, method: str, ledger: Ledger) -> Changes | None:
    """The settings with the best validation accuracy; None while the tuning is unfinished.

    If some trials are repeated, the mean over seeds counts, and only these are considered. A trial
    whose training failed counts as the worst. Of equal trials, the first is chosen. The choice may
    change with a trial beyond the edge, so new final runs wait for it.
    """
    if not is_tuned(scale, setup, method, ledger, beyond_edge=False):
        return None
    runs, again = trials(scale, setup, method, ledger), repeats(scale, setup, method, ledger)
    repeated = [run for run in runs if any(run.settings == other.settings for other in again)]
    if not repeated:
        return _best_first(runs, ledger)[0].settings
    return max(
        (run.settings for run in repeated),
        key=lambda settings: statistics.fmean(accuracies([*runs, *again], settings, ledger)),
    )


def accuracies(runs: Sequence[StudyRun], settings: Changes, ledger: Ledger) -> list[float]:
    """The validation accuracies of the finished runs with some settings; 0 for failed ones."""
    lines = [ledger[run.key] for run in runs if run.settings == settings and run.key in ledger]
    return [val_accuracy(line) or 0.0 for line in lines]


def val_accuracy(line: LedgerLine) -> float | None:
    """The validation accuracy after the last epoch; None for a run that failed."""
    return float(line["val"]["accuracy"]) if line["kind"] == "run" else None
