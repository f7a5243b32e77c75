"""All sharpness measures of a model: numbers, tables and figures."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, final

from surrogap.analysis import Density, Eigenpairs, Hessian, Plan, Sharpness, Surface
from surrogap.analysis import density as density_of
from surrogap.analysis import sharpness as sharpness_of
from surrogap.analysis.figures import gap_curves, spectrum
from surrogap.analysis.gap import DERIVED
from surrogap.analysis.hessian import GRADIENTS_PER_PRODUCT
from surrogap.analysis.sharpness import GAP_COLUMNS
from surrogap.experiments.result_files import Writer
from surrogap.experiments.text_table import Table

GAPS, SPECTRUM = "sharpness.png", "spectrum.png"


@final
@dataclass(frozen=True)
class SharpnessReport:
    """The results of a report.

    Attributes:
        sharpness: Eigenvalues, trace and surrogate gaps.
        density: The density of the eigenvalues; None if it was not measured.
        seconds: The duration of the measurement.
    """

    sharpness: Sharpness
    density: Density | None
    seconds: float

    def values(self) -> dict[str, Any]:
        """Return all values, for JSON."""
        gaps, density = self.sharpness.gaps, self.density
        return {
            "seconds": self.seconds,
            "loss": gaps.gaps[0].loss,
            "grad_norm": gaps.grad_norm,
            "dominant": self.sharpness.dominant,
            "largest": _pairs(self.sharpness.largest),
            "smallest": _pairs(self.sharpness.smallest),
            "trace": asdict(self.sharpness.trace),
            "gaps": [asdict(g) | {name: getattr(g, name) for name in DERIVED} for g in gaps.gaps],
            "density": density
            and {
                "nodes": density.nodes.tolist(),
                "weights": density.weights.tolist(),
                "num_products": density.num_products,
            },
        }

    def tables(self, title: str) -> list[Table]:
        """Return a table of single values, and one of the gaps and the dominant eigenvalue."""
        dominant = f"{self.sharpness.dominant:.4g}"
        rows = [(*row, dominant) for row in self.sharpness.gap_rows()]
        return [
            Table(("measure", "value"), self.sharpness.rows(), title),
            Table((*GAP_COLUMNS, "dominant eigenvalue"), rows, "surrogate gap"),
        ]

    def figures(self, title: str) -> dict[str, Writer]:
        """Return functions that write the figures, by file name."""
        found = self.sharpness
        gaps = gap_curves({title: found.gaps}, eigenvalues={title: found.dominant}, title=title)
        figures: dict[str, Writer] = {GAPS: gaps.savefig}
        if self.density is not None:
            figures[SPECTRUM] = spectrum(self.density, title=title).savefig
        return figures


def density_cost(num_vectors: int, num_steps: int) -> float:
    """Return the cost of the density, in gradients."""
    return float(GRADIENTS_PER_PRODUCT * num_vectors * num_steps)


def report_sharpness(
    surface: Surface,
    plan: Plan,
    *,
    num_density_vectors: int,
    num_density_steps: int,
    progress: Callable[[float, float], object],
) -> SharpnessReport:
    """Measure the sharpness of a model.

    The density of the eigenvalues takes `num_density_steps` Hessian-vector products for each of
    `num_density_vectors` random vectors; 0 steps for no density. `progress` is called with the cost
    so far and the total, in gradients.
    """
    start = time.perf_counter()
    last_cost = density_cost(num_density_vectors, num_density_steps)
    cost = plan.cost + last_cost
    found = sharpness_of(surface, plan, progress=lambda done, _: progress(done, cost))
    density = None
    if num_density_steps:
        density = density_of(
            Hessian(surface),
            num_vectors=num_density_vectors,
            num_steps=num_density_steps,
            seed=plan.seed,
            progress=lambda done, total: progress(plan.cost + last_cost * done / total, cost),
        )
    return SharpnessReport(found, density, time.perf_counter() - start)


def _pairs(pairs: Eigenpairs) -> dict[str, Any]:
    return {
        "values": pairs.values.tolist(),
        "residuals": pairs.residuals.tolist(),
        "num_products": pairs.num_products,
        "has_converged": pairs.has_converged,
    }
