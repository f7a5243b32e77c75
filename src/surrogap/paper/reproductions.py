"""Figures of the paper and its theory, by name: what `surrogap reproduce` draws and checks.

This module loads no torch; what is named here does, when it is asked for.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from surrogap.experiments.planned import PlannedRun
from surrogap.experiments.text_table import Table

if TYPE_CHECKING:
    from surrogap.paper.rho_alpha import Grid

Progress = Callable[[int, int], object]


@final
@dataclass(frozen=True)
class Settings:
    """The settings of all reproductions; each uses its own.

    Attributes:
        num_steps: Of each run; None for the usual.
        num_seeds: How many runs are averaged: of each theorem, or of each rho and alpha.
        num_frames: How many pictures an animation has.
        recipe: What is trained.
        rhos: Radii to train with.
        alphas: Weights of the gap to train with.
        folder: Where the folders of what is trained shall be.
    """

    num_steps: int | None = None
    num_seeds: int = 3
    num_frames: int = 60
    recipe: str = "fashion-mnist-gsam"
    rhos: tuple[float, ...] = (0.05, 0.1, 0.2, 0.4)
    alphas: tuple[float, ...] = (0.0, 0.1, 0.2, 0.4)
    folder: Path = Path("runs")


@final
@dataclass(frozen=True)
class Reproduced:
    """The results of a reproduction.

    Attributes:
        table: For people.
        numbers: For JSON.
        writers: By the name of a file, what writes it to a path.
        words: What to say below the table.
    """

    table: Table
    numbers: Mapping[str, Any]
    writers: Mapping[str, Callable[[Path], object]]
    words: Sequence[str] = ()


@final
@dataclass(frozen=True)
class Reproduction:
    """A table, figure or statement of the paper that can be computed.

    Attributes:
        title: What it is.
        files: What it draws.
        compute: From settings and a progress to what came out.
        runs: What must be trained and measured before, each run in its folder; None for nothing.
    """

    title: str
    files: Sequence[str]
    compute: Callable[[Settings, Progress], Reproduced]
    runs: Callable[[Settings], Sequence[PlannedRun]] | None = None


def _gap(settings: Settings, progress: Progress) -> Reproduced:
    from surrogap.paper.toys import GapToy, gap_figure

    toy = GapToy()
    columns = [f(toy.minima).tolist() for f in (toy.loss, toy.perturbed_loss, toy.gap)]
    names = ("loss", "perturbed_loss", "gap")
    minima = [
        asdict(valley) | dict(zip(names, values, strict=True))
        for valley, *values in zip(toy.valleys, *columns, strict=True)
    ]
    rows = [
        (f"w_{i + 1} = {m['center']:g}", *(f"{m[name]:.4g}" for name in ("sharpness", *names)))
        for i, m in enumerate(minima)
    ]
    title = f"three parabolas, made up; rho = {toy.rho:g}"
    table = Table(("minimum", "eigenvalue", "f", "f_p", "h"), rows, title)
    return Reproduced(
        table, {"rho": toy.rho, "minima": minima}, {"fig-gap.png": gap_figure(toy).savefig}
    )


def _trajectory(settings: Settings, progress: Progress) -> Reproduced:
    from surrogap.paper.toys import Descent, save_animation, trajectories, trajectory_figure

    descent = Descent() if settings.num_steps is None else Descent(num_steps=settings.num_steps)
    result = trajectories(descent=descent)
    ends = result.ends()
    numbers: dict[str, dict[str, Any]] = {
        method: {
            "end": path[-1].tolist(),
            "place": ends[method][0],
            "eigenvalue": ends[method][1],
            "reached_flat": result.reached_flat[method],
        }
        for method, path in result.paths.items()
    }
    rows = [
        (method, n["place"], f"{n['eigenvalue']:.3g}", f"{n['reached_flat']:.1%}")
        for method, n in numbers.items()
    ]
    columns = ("method", "ends in", "eigenvalue there", f"flat from {result.num_starts} starts")
    title = "a surface and a start chosen so that the three end apart; other starts in the last"
    animate = partial(save_animation, result, num_frames=settings.num_frames, progress=progress)
    return Reproduced(
        Table(columns, rows, f"{title} column"),
        {"descent": asdict(descent), "num_starts": result.num_starts, "methods": numbers},
        {
            "fig-trajectory.png": trajectory_figure(result).savefig,
            "fig-trajectory.gif": animate,
        },
    )


def _grid(settings: Settings) -> "Grid":
    from surrogap.paper.rho_alpha import Grid

    return Grid(
        recipe=settings.recipe,
        rhos=settings.rhos,
        alphas=settings.alphas,
        num_seeds=settings.num_seeds,
        num_steps=settings.num_steps,
        folder=settings.folder,
    )


def _rho_alpha(settings: Settings, progress: Progress) -> Reproduced:
    from surrogap.paper import rho_alpha, trends

    grid = _grid(settings)
    results = [rho_alpha.read_result(run) for run in grid.runs()]
    words, config = trends.words(results), grid.config()
    title = f"{config.model.name} on {config.data.name}, constant rho"
    numbers = rho_alpha.numbers(grid, results)
    return Reproduced(
        rho_alpha.table(results, title),
        numbers | {"trends": trends.numbers(results), "words": words},
        {"fig-rho-alpha.png": rho_alpha.figure(results, title).savefig},
        words,
    )


def _theory(settings: Settings, progress: Progress) -> Reproduced:
    from surrogap.paper import theory
    from surrogap.paper.statements import statements

    run = theory.Run(num_seeds=settings.num_seeds)
    if settings.num_steps is not None:
        run = replace(run, num_steps=settings.num_steps)
    quadratic = replace(run, lr_0=0.2)

    def part(index: int) -> Progress:
        """The progress of one of three theorems' runs, as that of all."""
        before, total = index * run.num_seeds, 3 * run.num_seeds
        return lambda done, _: progress(before + done, total)

    found: dict[str, Any] = {
        "lemma_3_1": theory.lemma_3_1(),
        "lemma_3_2": theory.lemma_3_2(),
        "lemma_3_3": theory.lemma_3_3(),
        "theorem_5_1": theory.theorem_5_1(run, progress=part(0)),
        "theorem_5_3": [
            theory.theorem_5_3(run=quadratic, progress=part(1)),
            theory.theorem_5_3((2.0, 2.0, 2.0), quadratic, progress=part(2)),
        ],
    }
    figure = theory.convergence_figure(found["theorem_5_1"])
    return Reproduced(statements(**found), _numbers(found), {"theory.png": figure.savefig})


def _numbers(found: Any) -> Any:
    """Results, lists and dictionaries of them, as what JSON can hold."""
    if isinstance(found, Mapping):
        return {name: _numbers(part) for name, part in found.items()}
    return [_numbers(part) for part in found] if isinstance(found, list) else asdict(found)


REPRODUCTIONS = {
    "fig-gap": Reproduction(
        "The first figure: three minima, f, f_p and h.", ("fig-gap.png",), _gap
    ),
    "fig-trajectory": Reproduction(
        "SGD, SAM and GSAM on a surface with sharp minima and a flat region.",
        ("fig-trajectory.png", "fig-trajectory.gif"),
        _trajectory,
    ),
    "fig-rho-alpha": Reproduction(
        "Influence of rho and alpha: test accuracy, 2h/rho^2 and eigenvalue. Trains networks.",
        ("fig-rho-alpha.png",),
        _rho_alpha,
        runs=lambda settings: _grid(settings).runs(),
    ),
    "theory": Reproduction(
        "Lemmas 3.1 to 3.3, theorems 5.1 and 5.3, and corollary 5.2.1, in numbers.",
        ("theory.png",),
        _theory,
    ),
}
