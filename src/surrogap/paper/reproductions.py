"""The paper's figures and statements that need no study, by name, for `surrogap reproduce`.

This module does not import torch; the modules that it names do, when they are called.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, final

from surrogap.experiments.planned import PlannedRun
from surrogap.experiments.text_table import Table

if TYPE_CHECKING:
    from surrogap.analysis.surface import Progress


@final
@dataclass(frozen=True)
class ReproductionSettings:
    """The settings of all reproductions; each uses its own.

    Attributes:
        num_steps: The length of each run; None for the default of the reproduction.
        num_seeds: The number of runs for each theorem, or for each rho and alpha.
        num_frames: The number of frames of the animation.
        recipe: The recipe to train.
        rhos: The radii to train with.
        alphas: The values of alpha to train with.
        folder: The folder for the runs' folders.
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
        table: The table to print.
        numbers: The values for JSON.
        writers: Functions that write a file to a path, by the file's name.
        words: Paragraphs to print below the table.
    """

    table: Table
    numbers: Mapping[str, Any]
    writers: Mapping[str, Callable[[Path], object]]
    words: Sequence[str] = ()


@final
@dataclass(frozen=True)
class Reproduction:
    """A figure or a group of statements of the paper.

    Attributes:
        title: A description in one sentence.
        files: The files that it draws.
        compute: Computes the results, and reports its progress.
        runs: Lists the runs that must be trained and measured first; None for none.
    """

    title: str
    files: Sequence[str]
    compute: Callable[[ReproductionSettings, "Progress"], Reproduced]
    runs: Callable[[ReproductionSettings], Sequence[PlannedRun]] | None = None


def _lazily(name: str) -> Callable[..., Any]:
    """Return a function of a module of this package, which is imported when it is called."""
    return lambda *arguments: resolve_name(f"surrogap.paper.{name}")(*arguments)


REPRODUCTIONS = {
    "fig-gap": Reproduction(
        "The first figure: three minima, f, f_p and h.",
        ("fig-gap.png",),
        _lazily("toys:reproduce_gap"),
    ),
    "fig-trajectory": Reproduction(
        "SGD, SAM and GSAM on a surface with sharp minima and a flat region.",
        ("fig-trajectory.png", "fig-trajectory.gif"),
        _lazily("toys:reproduce_trajectory"),
    ),
    "fig-rho-alpha": Reproduction(
        "Influence of rho and alpha: test accuracy, 2h/rho^2 and eigenvalue. Trains models.",
        ("fig-rho-alpha.png",),
        _lazily("rho_alpha:reproduce_rho_alpha"),
        _lazily("rho_alpha:grid"),
    ),
    "theory": Reproduction(
        "Lemmas 3.1 to 3.3, theorems 5.1 and 5.3, and corollary 5.2.1, in numbers.",
        ("theory.png",),
        _lazily("theory:reproduce_theory"),
    ),
}
