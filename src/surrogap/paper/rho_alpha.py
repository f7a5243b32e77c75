"""The paper's figure on the influence of rho and alpha, with networks that a recipe trains.

The paper has ViT-B/32 on ImageNet. There, at a fixed rho, a larger alpha makes the dominant
eigenvalue smaller and the test accuracy higher, and `2h / rho^2` goes as the eigenvalue does, down
with alpha and with rho. Here a recipe says what is trained, and `surrogap.paper.trends` what
came out.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from surrogap.checks import integer, number, one_of
from surrogap.errors import InvalidValueError
from surrogap.experiments.comparison import MEASUREMENTS, moments, spread
from surrogap.experiments.planned import PlannedRun
from surrogap.experiments.plotting import curves_with_bands, new_figure
from surrogap.experiments.recipes import RECIPES
from surrogap.experiments.text_table import Table
from surrogap.training.config import Config
from surrogap.training.records import read_records

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Attributes of a result, each with what it is called and a factor.
SHOWN = {
    "test_accuracy": ("test accuracy %", 100.0),
    "sharpness": ("2h/rho^2", 1.0),
    "worst_sharpness": ("worst 2h/rho^2", 1.0),
    "eigenvalue": ("dominant eigenvalue", 1.0),
}
_PANELS = ("test_accuracy", "sharpness", "eigenvalue")


@final
@dataclass(frozen=True)
class Grid:
    """The runs of the figure.

    Attributes:
        recipe: What is trained, but for the objective, which is GSAM.
        rhos: The radii. Each is constant over a run.
        alphas: The weights of the gap. Alpha 0 is SAM.
        num_seeds: How many runs of each radius and alpha, with seeds from 0.
        num_steps: The length of a run; None for the recipe's own.
        folder: Where the runs' folders shall be.

    Raises:
        ValueError: There is no such recipe, or a value is out of bounds or there twice.

    >>> grid = Grid("fashion-mnist-gsam", (0.2, 0.1), (0.0,), num_seeds=1, folder=Path("out"))
    >>> [str(run.config.folder) for run in grid.runs()]
    ['out/rho-0.1-alpha-0.0-seed-0', 'out/rho-0.2-alpha-0.0-seed-0']
    """

    recipe: str
    rhos: Sequence[float]
    alphas: Sequence[float]
    num_seeds: int
    folder: Path
    num_steps: int | None = None

    def __post_init__(self) -> None:
        one_of("recipe", self.recipe, RECIPES, remedy="surrogap recipes lists them.")
        integer("seeds", self.num_seeds, at_least=1, remedy="Pass a number of runs, as 3.")
        for rho in self.rhos:
            number("rhos", rho, above=0.0, remedy="Pass positive radii, such as 0.05 0.1.")
        for alpha in self.alphas:
            number("alphas", alpha, remedy="Pass 0 for SAM, or positive ones, such as 0.1 0.2.")
        for name, values in (("rhos", self.rhos), ("alphas", self.alphas)):
            if len(set(values)) < max(len(values), 1):
                listed = " ".join(f"{value:g}" for value in values) or "none"
                raise InvalidValueError(
                    f"{name} must be different ones, at least one, got {listed}. Pass each once."
                )

    def config(self) -> Config:
        """The configuration that all runs share."""
        # By way of vanilla, which keeps nothing of the recipe's objective but the loss.
        config = RECIPES[self.recipe]().override(objective="vanilla")
        config = config.override(objective="gsam", out=str(self.folder), seed=0)
        return config if self.num_steps is None else config.override(steps=self.num_steps)

    def runs(self) -> list[PlannedRun]:
        """All of them, seed by seed."""
        places = product(range(self.num_seeds), sorted(self.rhos), sorted(self.alphas))
        return [self._run(*place) for place in places]

    def _run(self, seed: int, rho: float, alpha: float) -> PlannedRun:
        out = self.folder / f"rho-{float(rho)}-alpha-{float(alpha)}-seed-{seed}"
        config = self.config().override(rho=rho, alpha=alpha, seed=seed, out=str(out))
        return PlannedRun(f"rho {rho:g}, alpha {alpha:g}", config)


@final
@dataclass(frozen=True)
class Result:
    """The results of a run: its test scores, and the measurements at its last weights.

    Attributes:
        rho: The radius that it was trained with, and that its gap is measured at.
        alpha: The weight of the gap.
        seed: Its seed.
        test_accuracy: At the end, as a fraction.
        test_loss: Likewise, the mean cross-entropy.
        num_images: On how many training images the rest was measured.
        loss: `f`.
        grad_norm: `||g||`.
        gap: `h`, of one step of ascent.
        sharpness: `2h / rho^2` of that.
        worst_gap: The largest `h` found in the ball.
        worst_sharpness: `2h / rho^2` of that.
        eigenvalue: The dominant one of the Hessian.
        residual: How far from it an eigenvalue may be.
    """

    rho: float
    alpha: float
    seed: int
    test_accuracy: float
    test_loss: float
    num_images: int
    loss: float
    grad_norm: float
    gap: float
    sharpness: float
    worst_gap: float
    worst_sharpness: float
    eigenvalue: float
    residual: float


def read_result(planned: PlannedRun) -> Result:
    """Read the results of a finished run from its folder."""
    config = planned.config
    last = [record for record in read_records(config.folder) if record["kind"] == "epoch"][-1]
    found: dict[str, Any] = json.loads((config.folder / MEASUREMENTS).read_text())
    found |= {"alpha": config.flat()["alpha"], "seed": config.execution.seed}
    found |= {name: last[name] for name in ("test_accuracy", "test_loss")}
    return Result(**{field.name: found[field.name] for field in fields(Result)})


def _cells(results: Sequence[Result]) -> dict[tuple[float, float], list[Result]]:
    """The runs of each rho and alpha."""
    cells: dict[tuple[float, float], list[Result]] = {}
    for run in results:
        cells.setdefault((run.rho, run.alpha), []).append(run)
    return cells


def table(results: Sequence[Result], title: str) -> Table:
    """A row for each rho and alpha: mean and deviation over seeds."""
    rows = []
    for (rho, alpha), runs in _cells(results).items():
        values = (
            spread([factor * getattr(run, name) for run in runs], decimals=2)
            for name, (_, factor) in SHOWN.items()
        )
        rows.append((f"{rho:g}", f"{alpha:g}", *values))
    return Table(("rho", "alpha", *(label for label, _ in SHOWN.values())), rows, title)


def numbers(grid: Grid, results: Sequence[Result]) -> dict[str, Any]:
    """All of it, for JSON."""
    summary = [
        {"rho": rho, "alpha": alpha}
        | {name: moments([getattr(run, name) for run in runs]) for name in SHOWN}
        for (rho, alpha), runs in _cells(results).items()
    ]
    return {
        "recipe": grid.recipe,
        "rhos": sorted(grid.rhos),
        "alphas": sorted(grid.alphas),
        "num_seeds": grid.num_seeds,
        "configuration": grid.config().to_dict(),
        "summary": summary,
        "runs": [asdict(run) for run in results],
    }


def figure(results: Sequence[Result], title: str) -> "Figure":
    """The paper's three panels: a curve for each alpha against rho, and a band over its seeds."""
    drawn, axes = new_figure(1, len(_PANELS), title)
    rhos = sorted({run.rho for run in results})
    are_positive = all(min(run.sharpness, run.eigenvalue) > 0 for run in results)
    for axis, name in zip(axes, _PANELS, strict=True):
        label, factor = SHOWN[name]
        for alpha in sorted({run.alpha for run in results}):
            seeds = _by_seed([run for run in results if run.alpha == alpha])
            curves = [[(run.rho, factor * getattr(run, name)) for run in runs] for runs in seeds]
            curves_with_bands(axis, f"alpha {alpha:g}", curves)
            axis.lines[-1].set_marker(".")  # a single rho makes no line
        axis.set(xlabel="rho", ylabel=label, xscale="log")
        if name != "test_accuracy" and are_positive:
            axis.set_yscale("log")
        axis.set_xticks(rhos, [f"{rho:g}" for rho in rhos])
        axis.set_xticks([], minor=True)
    axes[0].legend()
    return drawn


def _by_seed(results: Sequence[Result]) -> list[list[Result]]:
    seeds = sorted({run.seed for run in results})
    return [[run for run in results if run.seed == seed] for seed in seeds]
