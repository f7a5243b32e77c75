"""The cells of a table from the ledger: means over seeds, and paired comparisons."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, final

from surrogap.experiments.text_table import Table
from surrogap.paper.intervals import CONFIDENCE, MIN_SEEDS, Interval, interval, paired_difference
from surrogap.paper.ledger import Ledger, LedgerLine
from surrogap.paper.methods import METHODS
from surrogap.paper.plan import final_runs, relative_cost
from surrogap.paper.study import Cell, Scale, settings_text


@final
@dataclass(frozen=True)
class Score:
    """A value that is measured of a finished run.

    Attributes:
        title: Its name in tables, with its unit.
        path: The names that lead to it in a line of the ledger.
        factor: The factor for its unit.
        decimals: The number of decimals in tables.
        is_skewed: Shown as median and range over seeds: a symmetric interval would reach below 0.
    """

    title: str
    path: tuple[str, ...]
    factor: float = 100.0
    decimals: int = 2
    is_skewed: bool = False

    def read(self, line: LedgerLine) -> float | None:
        """Read the value from a line of the ledger; None if it was not measured."""
        value: Any = line
        for name in self.path:
            value = value.get(name) if isinstance(value, Mapping) else None
        return None if value is None else self.factor * float(value)

    def text(self, values: Sequence[float]) -> str:
        """The mean with its interval, or the median with the range.

        >>> SCORES["eigenvalue"].text([3.0, 1.0, 9.5])
        '3.0 (1.0 to 9.5)'
        """
        if not values:
            return "-"
        if not self.is_skewed or len(values) == 1:
            return interval(values).text(self.decimals)
        numbers = (statistics.median(values), min(values), max(values))
        return "{} ({} to {})".format(*(f"{number:.{self.decimals}f}" for number in numbers))


SCORES = {
    "val": Score("validation %", ("val", "accuracy")),
    "test": Score("test %", ("scores", "test", "accuracy")),
    "best": Score("test %, best epoch", ("best", "test_accuracy")),
    "corrupted": Score("corrupted %", ("scores", "corrupted", "accuracy")),
    "votes": Score("human labels %", ("scores", "votes", "accuracy")),
    "calibration": Score("calibration error %", ("scores", "test", "calibration_error")),
    "train": Score("training %", ("train", "accuracy")),
    "eigenvalue": Score("top eigenvalue", ("sharpness", "eigenvalue"), 1.0, 1, is_skewed=True),
}


@final
@dataclass(frozen=True)
class Summary:
    """The finished runs of a cell.

    Attributes:
        cell: The method and its settings.
        lines: The lines of the ledger, by seed.
        settings: The settings that were chosen for it.
        cost: The measured cost of training relative to plain training; None if it was not timed.
    """

    cell: Cell
    lines: Mapping[int, LedgerLine]
    settings: str
    cost: float | None = None

    def values(self, score: str) -> dict[int, float]:
        """A score by seed, for the runs where it was measured."""
        found = {seed: SCORES[score].read(line) for seed, line in self.lines.items()}
        return {seed: value for seed, value in found.items() if value is not None}

    def interval(self, score: str) -> Interval | None:
        """The mean of a score over seeds; None if it was not measured."""
        values = self.values(score)
        return interval(list(values.values())) if values else None


def summaries(scale: Scale, cells: Sequence[Cell], ledger: Ledger) -> list[Summary]:
    """The cells that a scale has, each with its finished runs."""
    found = []
    for cell in filter(scale.has, cells):
        runs = final_runs(scale, cell, ledger) or []
        lines = {run.seed: ledger[run.key] for run in runs if run.key in ledger}
        lines = {seed: line for seed, line in lines.items() if line["kind"] == "run"}
        step = METHODS[cell.method].step
        timing = ledger.newest_timing(scale.name, cell.setup, step)
        cost = None if timing is None else relative_cost(timing, cell.method)
        settings = settings_text(runs[0].settings) if lines else ""
        found.append(Summary(cell, lines, settings, cost))
    return found


SIMILAR, TOO_FEW = "no difference shown", "too few seeds"

# The paper's findings for pairs of methods; for a method with itself, rho_t against a constant rho.
# Keys start with a set-up where the finding depends on the images.
_IN_PAPER = {
    ("sam", "vanilla"): "better",
    ("sam", "vanilla-2x"): "better",
    ("gsam", "vanilla"): "better",
    ("gsam", "vanilla-2x"): "better",
    ("gsam", "sam"): "better",
    ("gsam", "gap-penalty"): "better",
    ("asam", "vanilla"): "better",
    ("asam-ascent", "vanilla"): "better",
    ("asam-ascent", "asam"): "better",
    ("gsam", "gsam-plain"): SIMILAR,
    ("vanilla-2x", "vanilla"): SIMILAR,
    ("sam", "sam"): SIMILAR,
    ("gsam", "gsam"): "better",
    ("F", "gsam", "sam"): "worse",
}
# The paper has neither noisy labels nor fine-tuning to the same images.
_NOT_IN_PAPER = ("E", "N", "G")


@final
@dataclass(frozen=True)
class Comparison:
    """A difference of test accuracy in points, paired by seed.

    Attributes:
        first: The cell that is compared.
        second: The cell whose accuracy is subtracted.
        difference: The mean difference over the seeds that both have.
    """

    first: Summary
    second: Summary
    difference: Interval

    @property
    def verdict(self) -> str:
        """Better or worse if there are enough seeds for an interval, and it excludes zero."""
        if self.difference.half_width is None:
            return TOO_FEW
        if not self.difference.excludes_zero:
            return SIMILAR
        return "better" if self.difference.mean > 0 else "worse"

    @property
    def in_paper(self) -> str | None:
        """The paper's finding for the two methods on ImageNet, if it has one."""
        pair = (self.first.cell.method, self.second.cell.method)
        # The paper compares a method with itself for rho_t only.
        is_other_setting = pair[0] == pair[1] and "rho_min" not in self.first.cell.changes
        if self.first.cell.setup in _NOT_IN_PAPER or is_other_setting:
            return None
        return _IN_PAPER.get((self.first.cell.setup, *pair)) or _IN_PAPER.get(pair)

    @property
    def title(self) -> str:
        """The two cells."""
        return f"{self.first.cell.title} minus {self.second.cell.title}"

    @property
    def sentence(self) -> str:
        """The comparison in words."""
        paper = "" if self.in_paper is None else f" In the paper: {self.in_paper}."
        return (
            f"{self.first.cell.setup}: {self.title}: {self.difference.text(sign='+')} points over "
            f"{self.difference.num_seeds} seeds, {self.verdict}.{paper}"
        )


def comparisons(found: Sequence[Summary], pairs: Sequence[tuple[str, str]]) -> list[Comparison]:
    """Compare the test accuracy of pairs of cells, given by their titles, in every set-up."""
    by_title = {(one.cell.setup, one.cell.title): one for one in found}
    made = []
    for setup, titles in product(dict.fromkeys(one.cell.setup for one in found), pairs):
        first, second = (by_title.get((setup, title)) for title in titles)
        if first is None or second is None:
            continue
        difference = paired_difference(first.values("test"), second.values("test"))
        if difference is not None:
            made.append(Comparison(first, second, difference))
    return made


def tally(made: Sequence[Comparison]) -> str:
    """Sentences on how many comparisons there are, exclude zero, and agree with the paper."""
    enough = [one for one in made if one.verdict != TOO_FEW]
    words = [f"{len(enough)} of {len(made)} comparisons have at least {MIN_SEEDS} seeds."]
    if enough:
        words.append(
            f"Intervals that exclude zero: {sum(one.verdict != SIMILAR for one in enough)}. "
            f"If no two methods differed, about {len(enough) * (1 - CONFIDENCE):.1f} would do so "
            "by chance."
        )
    stated = [one for one in enough if one.in_paper is not None]
    if stated:
        same = sum(one.verdict == one.in_paper for one in stated)
        words.append(f"The paper makes {len(stated)} of these comparisons; {same} verdicts agree.")
    return " ".join(words)


def in_words(made: Sequence[Comparison]) -> list[str]:
    """The comparisons in words, and how many would exclude zero by chance alone."""
    if not made:
        return []
    return [
        *(one.sentence for one in made),
        f"Differences are of test accuracy after the last epoch, paired by seed, with "
        f"{100 * CONFIDENCE:.0f} % intervals (Student's t). {tally(made)}",
    ]


def cell_table(scale: Scale, found: Sequence[Summary], scores: Sequence[str]) -> Table:
    """A row for each cell with finished runs: settings, cost, seeds and scores.

    The cost is a column if it was measured.
    """
    rows_of = [one for one in found if one.lines]
    measured = [name for name in scores if any(one.values(name) for one in rows_of)]
    timed = any(one.cost is not None for one in rows_of)
    columns = (
        *("set-up", "method", "settings", *(["cost"] if timed else []), "seeds"),
        *(SCORES[name].title for name in measured),
    )
    rows = [
        (
            *(one.cell.setup, one.cell.title, one.settings),
            *(["-" if one.cost is None else f"{one.cost:.2f}"] if timed else []),
            str(len(one.lines)),
            *(SCORES[name].text(list(one.values(name).values())) for name in measured),
        )
        for one in rows_of
    ]
    setups = dict.fromkeys(one.cell.setup for one in found)
    title = "; ".join(f"{setup}: {scale.setups[setup].title}" for setup in setups)
    return Table(columns, rows, title)


_LEGEND = {
    "cost": 'Cost: time of training relative to vanilla ("-": not measured).',
    "top eigenvalue": "Top eigenvalue: of the Hessian on some training images, with the largest "
    "magnitude; median (lowest to highest seed).",
}


def cell_legend(shown: Table) -> str:
    """Explain the columns of a table that are not self-explanatory; empty for an empty table."""
    if not shown.rows:
        return ""
    interval = f"±: half the width of the {100 * CONFIDENCE:.0f} % interval of the mean over seeds."
    words = [interval] if any("±" in cell for row in shown.rows for cell in row) else []
    return " ".join([*words, *(_LEGEND[name] for name in shown.columns if name in _LEGEND)])


def missing(found: Sequence[Summary]) -> str:
    """A sentence about the cells without finished runs; empty if there are none."""
    empty = [one.cell for one in found if not one.lines]
    if not empty:
        return ""
    setups = []
    for setup in sorted({cell.setup for cell in empty}):
        titles = [cell.title for cell in empty if cell.setup == setup]
        is_whole = len(titles) == sum(one.cell.setup == setup for one in found)
        setups.append(f"{setup}: {'all' if is_whole else '; '.join(titles)}.")
    number = f"{len(empty)} of {len(found)} planned rows are missing"
    return f"{number}, because their runs have not finished. {' '.join(setups)}"


def cell_numbers(
    found: Sequence[Summary], made: Sequence[Comparison], scores: Sequence[str]
) -> dict[str, Any]:
    """The cells and the comparisons, for JSON."""
    return {
        "cells": [
            {
                "setup": one.cell.setup,
                "method": one.cell.method,
                "title": one.cell.title,
                "settings": one.settings,
                "cost": one.cost,
                "seeds": sorted(one.lines),
                "scores": {name: (i := one.interval(name)) and asdict(i) for name in scores},
            }
            for one in found
        ],
        "num_comparisons": len(made),
        "comparisons": [
            {
                "setup": one.first.cell.setup,
                "first": one.first.cell.title,
                "second": one.second.cell.title,
                "difference": asdict(one.difference),
                "verdict": one.verdict,
                "in_paper": one.in_paper,
            }
            for one in made
        ],
    }
