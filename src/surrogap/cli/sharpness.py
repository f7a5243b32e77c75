"""`surrogap sharpness`: measure how sharp a run is, or any network.

surrogap sharpness runs/a
surrogap sharpness runs/a --images 5000 --rhos 0.05 0.1 --density-steps 0
surrogap sharpness --model resnet50 --weights model.safetensors --data data/folder
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from surrogap.cli.options import options
from surrogap.cli.results import Results, Writer, bar, tell_cost
from surrogap.cli.subject import RunArgument, Subject
from surrogap.core.arguments import number
from surrogap.experiments.tables import Table
from surrogap.training.arguments import OptionalPath, at_least

if TYPE_CHECKING:
    from surrogap.analysis import Density, Eigenpairs, Plan, Surface
    from surrogap.analysis import Sharpness as Found

GAPS, SPECTRUM = "sharpness.png", "spectrum.png"


@dataclass(frozen=True)
class Sharpness:
    """Measure how sharp a run is, or any network.

    The largest and the smallest eigenvalues of the Hessian, its trace and the density of its
    eigenvalues; and the surrogate gap at some radii, with 2h/rho^2 beside the dominant eigenvalue.
    The images are as they are, without augmentation, and the network is in evaluation mode. The
    numbers go to sharpness.json, the gaps to sharpness.png and the density to spectrum.png.
    """

    run: RunArgument = None
    """The run's folder. In place of one, pass --model and --data."""

    eigenvalues: int = 5
    """How many of the largest eigenvalues to find."""

    rhos: tuple[float, ...] = (0.01, 0.02, 0.05, 0.1, 0.2)
    """The radii of the surrogate gap."""

    ascent_steps: int = 10
    """How many gradients to spend on the worst place in the ball, at each radius; 0 for none."""

    trace_products: int = 30
    """How many products with the Hessian the trace takes; at least 6."""

    density_steps: int = 30
    """How many products the density takes for each of its random vectors; 0 leaves it out."""

    density_vectors: int = 2
    """How many random vectors the density is a mean over."""

    tolerance: float = 0.01
    """How small an eigenvalue's residual must be, as a part of the eigenvalue."""

    max_products: int = 50
    """After how many products the search at an end of the spectrum stops in any case. As many
    vectors as large as the network are held in memory."""

    out: OptionalPath = None
    """The folder to write to. By default the run's."""

    subject: Subject = field(default_factory=Subject)


def main(arguments: Sequence[str]) -> int:
    """Measures a run or a network, and returns the exit status.

    Raises:
        ValueError: There is no such run or network, it does not fit its images, or a number is out
            of bounds.
    """
    chosen = options(Sharpness, "sharpness", arguments)
    _check(chosen)
    subject = replace(chosen.subject, run=chosen.run)
    loaded = subject.load()
    folder = subject.folder("sharpness") if chosen.out is None else chosen.out
    figures = [GAPS] + [SPECTRUM] * bool(chosen.density_steps)
    results = Results(folder, "sharpness", "sharpness", figures)
    plan = _plan(chosen)
    tell_cost(plan.cost + _density_cost(chosen), f"over {loaded.num_images:,} images")
    start = time.perf_counter()
    found, density = _measured(chosen, plan, loaded.surface)
    seconds = time.perf_counter() - start
    for table in tables(found, subject.title):
        table.print()
        print()
    print(
        "At a minimum, the worst 2h/rho^2 is the dominant eigenvalue. Here the slope adds up to "
        f"{2 * found.gaps.grad_norm:.2g} / rho to it."
    )
    numbers = {"subject": subject.title, **loaded.described(), "plan": asdict(plan)}
    numbers |= {"seconds": seconds, **result(found, density)}
    results.write(numbers, _figures(found, density, subject.title))
    print(results.told)
    return 0


def _check(chosen: Sharpness) -> None:
    """Checks what would otherwise be found wrong only when its turn comes."""
    at_least("eigenvalues", chosen.eigenvalues, 1, remedy="Pass how many to find, as 5.")
    at_least("max_products", chosen.max_products, chosen.eigenvalues, remedy="Pass as many as 50.")
    number("tolerance", chosen.tolerance, above=0.0, remedy="Pass a part such as 0.01.")
    at_least("trace_products", chosen.trace_products, 6, remedy="Pass a number such as 30.")
    at_least("ascent_steps", chosen.ascent_steps, 0, remedy="Pass 0 for none.")
    at_least("density_steps", chosen.density_steps, 0, remedy="Pass 0 to leave it out.")
    at_least("density_vectors", chosen.density_vectors, 1, remedy="Pass a number such as 2.")
    at_least("the number of rhos", len(chosen.rhos), 1, remedy="Pass such as --rhos 0.05 0.1.")
    for rho in chosen.rhos:
        number("rhos", rho, above=0.0, remedy="Pass positive radii, such as 0.05 0.1.")


def _plan(chosen: Sharpness) -> "Plan":
    from surrogap.analysis import Plan

    return Plan(
        num_eigenvalues=chosen.eigenvalues,
        rhos=chosen.rhos,
        num_ascent_steps=chosen.ascent_steps,
        num_trace_products=chosen.trace_products,
        tolerance=chosen.tolerance,
        max_products=chosen.max_products,
        seed=chosen.subject.seed,
    )


def _density_cost(chosen: Sharpness) -> float:
    from surrogap.analysis.hessian import GRADIENTS_PER_PRODUCT

    return float(GRADIENTS_PER_PRODUCT * chosen.density_vectors * chosen.density_steps)


def _measured(
    chosen: Sharpness, plan: "Plan", surface: "Surface"
) -> "tuple[Found, Density | None]":
    from surrogap.analysis import Hessian, density, sharpness

    cost = _density_cost(chosen)
    whole = plan.cost + cost
    with bar("sharpness") as tell:
        found = sharpness(surface, plan, progress=lambda done, _: tell(done, whole))
        if not chosen.density_steps:
            return found, None
        places = density(
            Hessian(surface),
            num_vectors=chosen.density_vectors,
            num_steps=chosen.density_steps,
            seed=chosen.subject.seed,
            progress=lambda done, most: tell(plan.cost + cost * done / most, whole),
        )
    return found, places


def tables(found: "Found", title: str) -> list[Table]:
    """What was measured: one number each, and the gaps beside the dominant eigenvalue."""
    from surrogap.analysis.sharpness import GAP_COLUMNS

    dominant = f"{found.dominant:.4g}"
    rows = [(*row, dominant) for row in found.gap_rows()]
    return [
        Table(("measure", "value"), found.rows(), title),
        Table((*GAP_COLUMNS, "dominant eigenvalue"), rows, "surrogate gap"),
    ]


def result(found: "Found", density: "Density | None") -> dict[str, Any]:
    """What was measured, for JSON."""
    gaps = found.gaps
    derived = ("gap", "sharpness", "worst_gap", "worst_sharpness")
    return {
        "loss": gaps.gaps[0].loss,
        "grad_norm": gaps.grad_norm,
        "dominant": found.dominant,
        "largest": _pairs(found.largest),
        "smallest": _pairs(found.smallest),
        "trace": asdict(found.trace),
        "gaps": [asdict(g) | {name: getattr(g, name) for name in derived} for g in gaps.gaps],
        "density": density
        and {
            "nodes": density.nodes.tolist(),
            "weights": density.weights.tolist(),
            "num_products": density.num_products,
        },
    }


def _pairs(pairs: "Eigenpairs") -> dict[str, Any]:
    return {
        "values": pairs.values.tolist(),
        "residuals": pairs.residuals.tolist(),
        "num_products": pairs.num_products,
        "has_converged": pairs.has_converged,
    }


def _figures(found: "Found", density: "Density | None", title: str) -> dict[str, Writer]:
    from surrogap.analysis.figures import gap_curves, spectrum

    gaps = gap_curves({title: found.gaps}, eigenvalues={title: found.dominant}, title=title)
    figures: dict[str, Writer] = {GAPS: gaps.savefig}
    if density is not None:
        figures[SPECTRUM] = spectrum(density, title=title).savefig
    return figures
