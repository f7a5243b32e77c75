"""The paper's trends along rho and alpha, as far as a grid of runs shows them, in words."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

from surrogap.experiments.comparison import NUM_ASCENT_STEPS
from surrogap.paper.rho_alpha import SHOWN, Result

# Where the paper has its figure go, as alpha grows and as rho does.
PAPER = {
    "alpha": {"eigenvalue": "falls", "sharpness": "falls", "test_accuracy": "rises"},
    "rho": {"eigenvalue": "falls", "sharpness": "falls"},
}


@final
@dataclass(frozen=True)
class Trend:
    """The change of a quantity from one end of the grid to the other, seed by seed.

    Attributes:
        name: What it is: an attribute of a result.
        first: Its mean over seeds at the smallest rho or alpha.
        last: Its mean at the largest.
        num_falling: In how many seeds it falls.
        num_rising: In how many it rises.
        num_seeds: Of how many.

    >>> Trend("eigenvalue", first=3.0, last=2.0, num_falling=2, num_rising=1, num_seeds=3).direction
    'undecided'
    """

    name: str
    first: float
    last: float
    num_falling: int
    num_rising: int
    num_seeds: int

    @property
    def direction(self) -> str:
        """Falls or rises, if it does so in every seed; or undecided."""
        if self.num_falling == self.num_seeds:
            return "falls"
        return "rises" if self.num_rising == self.num_seeds else "undecided"

    def __str__(self) -> str:
        label, factor = SHOWN[self.name]
        ends = f"{label} {factor * self.first:.2f} to {factor * self.last:.2f}"
        if self.direction != "undecided":
            return f"{ends}, {self.direction}"
        counts = f"falls in {self.num_falling} and rises in {self.num_rising}"
        return f"{ends}, undecided ({counts} of {self.num_seeds} seeds)"


def trends(results: Sequence[Result], along: str) -> dict[float, dict[str, Trend]]:
    """For each alpha how all goes along rho, or for each rho along alpha.

    Args:
        results: Of the whole grid.
        along: "rho" or "alpha".

    Returns:
        By the value of the other, and by name; empty if there is nothing to go along.
    """
    fixed = {"rho": "alpha", "alpha": "rho"}[along]
    ends = [end(getattr(result, along) for result in results) for end in (min, max)]
    if ends[0] == ends[1]:
        return {}
    found: dict[float, dict[str, Trend]] = {}
    for value in sorted({getattr(result, fixed) for result in results}):
        row = [result for result in results if getattr(result, fixed) == value]
        first, last = ([run for run in row if getattr(run, along) == end] for end in ends)
        found[value] = {name: _trend(name, first, last) for name in PAPER[along]}
    return found


def _trend(name: str, first: Sequence[Result], last: Sequence[Result]) -> Trend:
    """Of runs at both ends, which have the same seeds in the same order."""
    firsts, lasts = ([getattr(run, name) for run in runs] for runs in (first, last))
    pairs = list(zip(firsts, lasts, strict=True))
    return Trend(
        name,
        first=statistics.fmean(firsts),
        last=statistics.fmean(lasts),
        num_falling=sum(b < a for a, b in pairs),
        num_rising=sum(b > a for a, b in pairs),
        num_seeds=len(pairs),
    )


def words(results: Sequence[Result]) -> list[str]:
    """Yield what the table is, and which of the paper's trends it shows."""
    return [_legend(results), *_told(results, "alpha"), *_told(results, "rho")]


def _legend(results: Sequence[Result]) -> str:
    num_seeds = len({run.seed for run in results})
    spread_over = f"Mean ± deviation over {num_seeds} seeds" if num_seeds > 1 else "One seed"
    return (
        f"{spread_over}, after the last step; rho is constant, and alpha 0 is SAM. h and the "
        f"eigenvalue: over {results[0].num_images:,} training images at the last weights; h: at "
        "the run's own rho, after one step of ascent; worst: the largest h that "
        f"{NUM_ASCENT_STEPS} more find in the ball, from there or from the eigenvector. Below, "
        "something falls or rises if it does so in every seed from the smallest value to the "
        "largest. Where nothing changes, chance has all seeds agree with the paper once in "
        f"{2**num_seeds} times."
    )


def _told(results: Sequence[Result], along: str) -> Iterator[str]:
    """A line for each value of the other, and how often it is as in the paper."""
    fixed, values = ("rho", "radii") if along == "alpha" else ("alpha", "alphas")
    found = trends(results, along)
    if not found:
        yield f"With one {along}, there is no trend along {along} to see."
        return
    low, high = (end(getattr(run, along) for run in results) for end in (min, max))
    for value, row in found.items():
        changes = "; ".join(map(str, row.values()))
        yield f"From {along} {low:g} to {high:g}, at {fixed} {value:g}: {changes}."
    counts = [
        f"{SHOWN[name][0].removesuffix(' %')} {way} at {_count(found, {name: way})}"
        for name, way in PAPER[along].items()
    ]
    yield (
        f"So along {along}, of {len(found)} {values}: {', '.join(counts)}; all of it, as "
        f"in the paper, at {_count(found, PAPER[along])}."
    )


def _count(found: Mapping[float, Mapping[str, Trend]], ways: Mapping[str, str]) -> int:
    """For how many values everything goes these ways."""
    return sum(
        all(row[name].direction == way for name, way in ways.items()) for row in found.values()
    )


def numbers(results: Sequence[Result]) -> dict[str, list[dict[str, Any]]]:
    """All trends, for JSON: along rho and along alpha."""
    return {
        f"along_{along}": [
            {"at": value, **asdict(trend), "direction": trend.direction}
            for value, row in trends(results, along).items()
            for trend in row.values()
        ]
        for along in PAPER
    }
