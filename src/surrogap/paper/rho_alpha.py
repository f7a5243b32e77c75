"""The paper's figure on the influence of rho and alpha, with models that a recipe trains.

The paper has ViT-B/32 on ImageNet. There, at a fixed rho, a larger alpha makes the dominant
eigenvalue smaller and the test accuracy higher, and `2h / rho^2` follows the eigenvalue: both fall
with alpha and with rho.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, final

from surrogap.analysis.surface import Progress
from surrogap.checks import number, one_of
from surrogap.errors import InvalidValueError
from surrogap.experiments.comparison import (
    NUM_ASCENT_STEPS,
    averaged,
    moments,
    read_results,
    spread,
)
from surrogap.experiments.planned import PlannedRun
from surrogap.experiments.plotting import banded, curves_with_bands, new_figure
from surrogap.experiments.recipes import RECIPES
from surrogap.experiments.text_table import Table
from surrogap.paper.reproductions import Reproduced, ReproductionSettings
from surrogap.training.config import Config

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# A finished run: rho, alpha and seed, the last test scores, and the measurements, by name.
GridRun = dict[str, Any]

# The columns of the table: a quantity's title and its factor.
QUANTITIES = {
    "test_accuracy": ("test accuracy %", 100.0),
    "sharpness": ("2h/rho^2", 1.0),
    "worst_sharpness": ("worst 2h/rho^2", 1.0),
    "eigenvalue": ("dominant eigenvalue", 1.0),
}
_PANELS = ("test_accuracy", "sharpness", "eigenvalue")

# The trends of the paper's figure, as alpha grows and as rho grows.
PAPER = {
    "alpha": {"eigenvalue": "falls", "sharpness": "falls", "test_accuracy": "rises"},
    "rho": {"eigenvalue": "falls", "sharpness": "falls"},
}


def read_run(planned: PlannedRun) -> GridRun:
    """Read a finished run, after `surrogap.experiments.measurements.measure_sharpness`."""
    config = planned.config
    epochs, measured = read_results(config.folder)
    return {
        "rho": measured["rho"],
        "alpha": config.flat()["alpha"],
        "seed": config.execution.seed,
        **measured,
        **{name: epochs[-1][name] for name in ("test_accuracy", "test_loss")},
    }


def shared_config(settings: ReproductionSettings) -> Config:
    """The configuration that all runs share: the recipe's, with GSAM as the objective."""
    # Through vanilla, which drops all settings of the recipe's objective except the loss.
    config = RECIPES[settings.recipe].config.override(objective="vanilla")
    config = config.override(objective="gsam", out=str(settings.folder), seed=0)
    return config if settings.num_steps is None else config.override(steps=settings.num_steps)


def grid(settings: ReproductionSettings) -> list[PlannedRun]:
    """The runs of the figure, seed by seed, each with a constant radius. Alpha 0 is SAM.

    Raises:
        ValueError: The recipe is unknown, or a value is out of bounds or repeated.

    >>> runs = grid(ReproductionSettings(rhos=(0.2, 0.1), alphas=(0.0,), num_seeds=1))
    >>> [str(run.config.folder) for run in runs]
    ['runs/rho-0.1-alpha-0.0-seed-0', 'runs/rho-0.2-alpha-0.0-seed-0']
    """
    _check(settings)
    seeds, rhos, alphas = range(settings.num_seeds), sorted(settings.rhos), sorted(settings.alphas)
    runs, shared = [], shared_config(settings)
    for seed, rho, alpha in product(seeds, rhos, alphas):
        out = settings.folder / f"rho-{float(rho)}-alpha-{float(alpha)}-seed-{seed}"
        config = shared.override(rho=rho, alpha=alpha, seed=seed, out=str(out))
        runs.append(PlannedRun(f"rho {rho:g}, alpha {alpha:g}", config))
    return runs


def _check(settings: ReproductionSettings) -> None:
    one_of("recipe", settings.recipe, RECIPES, remedy="surrogap recipes lists them.")
    for rho in settings.rhos:
        number("rhos", rho, above=0.0, remedy="Pass positive radii, such as 0.05 0.1.")
    for alpha in settings.alphas:
        number("alphas", alpha, remedy="Pass 0 for SAM, or positive values, such as 0.1 0.2.")
    for name, values in (("rhos", settings.rhos), ("alphas", settings.alphas)):
        if len(set(values)) < max(len(values), 1):
            listed = " ".join(f"{value:g}" for value in values) or "none"
            raise InvalidValueError(
                f"{name} must be distinct, and at least one, got {listed}. Pass each value once."
            )


def reproduce_rho_alpha(settings: ReproductionSettings, progress: Progress) -> Reproduced:
    """Return the table, the figure and the trends of the finished runs."""
    planned = grid(settings)
    runs, title = list(map(read_run, planned)), f"{planned[0].subject}, constant rho"
    summary = [
        {"rho": rho, "alpha": alpha}
        | {name: moments([run[name] for run in cell]) for name in QUANTITIES}
        for (rho, alpha), cell in _cells(runs).items()
    ]
    words = trends_in_words(runs)
    numbers = {
        "recipe": settings.recipe,
        "rhos": sorted(settings.rhos),
        "alphas": sorted(settings.alphas),
        "num_seeds": settings.num_seeds,
        "configuration": shared_config(settings).to_dict(),
        "summary": summary,
        "runs": runs,
        "trends": trends_as_numbers(runs),
        "words": words,
    }
    drawn = grid_figure(runs, title)
    return Reproduced(grid_table(runs, title), numbers, {"fig-rho-alpha.png": drawn.savefig}, words)


def _cells(runs: Sequence[GridRun]) -> dict[tuple[float, float], list[GridRun]]:
    """The runs of each rho and alpha."""
    cells: dict[tuple[float, float], list[GridRun]] = {}
    for run in runs:
        cells.setdefault((run["rho"], run["alpha"]), []).append(run)
    return cells


def grid_table(runs: Sequence[GridRun], title: str) -> Table:
    """A row for each rho and alpha: mean and standard deviation over seeds."""
    rows = []
    for (rho, alpha), cell in _cells(runs).items():
        values = (
            spread([factor * run[name] for run in cell], decimals=2)
            for name, (_, factor) in QUANTITIES.items()
        )
        rows.append((f"{rho:g}", f"{alpha:g}", *values))
    return Table(("rho", "alpha", *(label for label, _ in QUANTITIES.values())), rows, title)


def grid_figure(runs: Sequence[GridRun], title: str) -> "Figure":
    """The paper's three panels: a curve for each alpha against rho, with a band over its seeds."""
    from matplotlib.ticker import LogLocator, NullFormatter

    rhos, alphas, seeds = (sorted({run[name] for run in runs}) for name in ("rho", "alpha", "seed"))
    drawn, (*axes, corner) = new_figure(2, 2, f"{title} ({banded(len(seeds))})")
    are_positive = all(min(run[name] for name in _PANELS[1:]) > 0 for run in runs)
    for axis, name in zip(axes, _PANELS, strict=True):
        label, factor = QUANTITIES[name]
        for alpha in alphas:
            curves = [
                [
                    (run["rho"], run[name])
                    for run in runs
                    if (run["alpha"], run["seed"]) == (alpha, seed)
                ]
                for seed in seeds
            ]
            curves_with_bands(axis, f"alpha {alpha:g}", curves, factor)
            axis.lines[-1].set_marker(".")  # a line through a single rho would be invisible
        axis.set(xlabel="rho", ylabel=label, xscale="log")
        if name != "test_accuracy" and are_positive:
            axis.set_yscale("log")
            # The values span less than a decade, where the default has few labels, as powers.
            axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 4.0, 6.0)))
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter(NullFormatter())
        axis.set_xticks(rhos, [f"{rho:g}" for rho in rhos])
        axis.set_xticks([], minor=True)
    axes[1].set_ylabel("2h/rho^2, one ascent step")
    corner.axis("off")
    corner.legend(*axes[0].get_legend_handles_labels(), loc="center", fontsize="large")
    return drawn


@final
@dataclass(frozen=True)
class Trend:
    """The change of a quantity from one end of the grid to the other, seed by seed.

    Attributes:
        name: The quantity.
        first: Its mean over seeds at the smallest rho or alpha.
        last: Its mean at the largest.
        num_falling: The number of seeds in which it falls.
        num_rising: The number of seeds in which it rises.
        num_seeds: The number of all seeds.

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
        """Falls or rises if it does so in every seed; otherwise undecided."""
        if self.num_falling == self.num_seeds:
            return "falls"
        return "rises" if self.num_rising == self.num_seeds else "undecided"

    def __str__(self) -> str:
        label, factor = QUANTITIES[self.name]
        ends = f"{label} {factor * self.first:.2f} to {factor * self.last:.2f}"
        if self.direction != "undecided":
            return f"{ends}, {self.direction}"
        counts = f"falls in {self.num_falling} and rises in {self.num_rising}"
        return f"{ends}, undecided ({counts} of {self.num_seeds} seeds)"


def trends(runs: Sequence[GridRun], along: str) -> dict[float, dict[str, Trend]]:
    """The trends along rho for each alpha, or along alpha for each rho.

    Returns:
        The trends by value of the other setting and by quantity; empty if `along` has a single
        value.
    """
    fixed = {"rho": "alpha", "alpha": "rho"}[along]
    ends = [end(run[along] for run in runs) for end in (min, max)]
    if ends[0] == ends[1]:
        return {}
    found: dict[float, dict[str, Trend]] = {}
    for value in sorted({run[fixed] for run in runs}):
        # Runs at both ends have the same seeds in the same order.
        first, last = (
            [run for run in runs if (run[fixed], run[along]) == (value, end)] for end in ends
        )
        pairs = list(zip(first, last, strict=True))
        found[value] = {
            name: Trend(
                name,
                first=statistics.fmean(run[name] for run in first),
                last=statistics.fmean(run[name] for run in last),
                num_falling=sum(b[name] < a[name] for a, b in pairs),
                num_rising=sum(b[name] > a[name] for a, b in pairs),
                num_seeds=len(pairs),
            )
            for name in PAPER[along]
        }
    return found


def trends_as_numbers(runs: Sequence[GridRun]) -> dict[str, list[dict[str, Any]]]:
    """All trends, for JSON: along rho and along alpha."""
    return {
        f"along_{along}": [
            {"at": value, **asdict(trend), "direction": trend.direction}
            for value, row in trends(runs, along).items()
            for trend in row.values()
        ]
        for along in PAPER
    }


def trends_in_words(runs: Sequence[GridRun]) -> list[str]:
    """A legend of the table, and which of the paper's trends it shows."""
    num_seeds = len({run["seed"] for run in runs})
    legend = (
        f"{averaged(num_seeds)}, after the last step; rho is constant, and alpha 0 is SAM. h and "
        f"the eigenvalue are measured on {runs[0]['num_images']:,} training images at the last "
        "weights; h at the run's own rho, after one step of ascent; worst: the largest h that "
        f"{NUM_ASCENT_STEPS} more steps find in the ball, from there or from the eigenvector. "
        "Below, a quantity falls or rises if it does so in every seed, from the smallest value to "
        "the largest. If rho or alpha had no effect, all seeds would agree with the paper by "
        f"chance in one of {2**num_seeds} cases."
    )
    return [legend, *_in_words(runs, "alpha"), *_in_words(runs, "rho")]


def _in_words(runs: Sequence[GridRun], along: str) -> Iterator[str]:
    """A sentence for each value of the other setting, and one on the agreement with the paper."""
    fixed, values = ("rho", "radii") if along == "alpha" else ("alpha", "alphas")
    found = trends(runs, along)
    if not found:
        yield f"With one {along}, there is no trend along {along}."
        return
    low, high = (end(run[along] for run in runs) for end in (min, max))
    for value, row in found.items():
        changes = "; ".join(map(str, row.values()))
        yield f"From {along} {low:g} to {high:g}, at {fixed} {value:g}: {changes}."

    def num_agreeing(directions: Mapping[str, str]) -> int:
        return sum(
            all(row[name].direction == direction for name, direction in directions.items())
            for row in found.values()
        )

    counts = [
        f"{QUANTITIES[name][0].removesuffix(' %')} {direction} at {num_agreeing({name: direction})}"
        for name, direction in PAPER[along].items()
    ]
    yield (
        f"So along {along}, of {len(found)} {values}: {', '.join(counts)}; all of it, as "
        f"in the paper, at {num_agreeing(PAPER[along])}."
    )
