"""`surrogap sharpness`: measure the sharpness of a run, or of any model.

surrogap sharpness runs/a
surrogap sharpness runs/a --images 5000 --rhos 0.05 0.1 --density-steps 0
surrogap sharpness --model resnet50 --weights model.safetensors --data data/folder
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated

from tyro.conf import arg

from surrogap.checks import integer, number
from surrogap.cli.model_options import ModelOptions
from surrogap.cli.options import OptionalRunFolder, options
from surrogap.cli.terminal import print_cost, progress_bar
from surrogap.experiments.result_files import ResultFiles
from surrogap.training.flags import OptionalPath


@dataclass(frozen=True)
class MeasureSharpness:
    """Measure the sharpness of a run, or of any model.

    Measures the largest and the smallest eigenvalues of the Hessian, its trace and the density of
    its eigenvalues, and the surrogate gap h at several radii, with 2h/rho^2 next to the dominant
    eigenvalue. Images are not augmented, and the model is in evaluation mode. Writes the numbers to
    sharpness.json, the gaps to sharpness.png and the density to spectrum.png.
    """

    run: OptionalRunFolder = None
    """The folder of the run. Without a run, pass --model and --data."""

    eigenvalues: int = 5
    """The number of largest eigenvalues to compute."""

    rhos: tuple[float, ...] = (0.01, 0.02, 0.05, 0.1, 0.2)
    """The radii of the surrogate gap."""

    ascent_steps: int = 10
    """The number of gradient steps towards the largest loss in each ball; 0 for no search."""

    trace_products: int = 30
    """The number of Hessian-vector products for the trace; at least 6."""

    density_steps: int = 30
    """The number of Hessian-vector products per random vector for the density; 0 for no density."""

    density_vectors: int = 2
    """The number of random vectors that the density is averaged over."""

    tolerance: float = 0.01
    """The largest residual of an eigenvalue, relative to the eigenvalue."""

    max_products: int = 50
    """The largest number of Hessian-vector products per end of the spectrum. One vector of the size
    of the model is kept in memory for each."""

    out: OptionalPath = None
    """The folder for the results. By default the folder of the run."""

    model_options: Annotated[ModelOptions, arg(name="model")] = field(default_factory=ModelOptions)


def main(arguments: Sequence[str]) -> int:
    """Measure a run or a model, and return the exit status.

    Raises:
        ValueError: The run or the model does not exist or does not fit its images, or a number is
            out of range.
    """
    chosen = options(MeasureSharpness, "sharpness", arguments)
    _check(chosen)
    model_options = replace(chosen.model_options, run=chosen.run)
    loaded = model_options.load()
    from surrogap.analysis import Plan
    from surrogap.experiments import sharpness_report

    plan = Plan(
        num_eigenvalues=chosen.eigenvalues,
        rhos=chosen.rhos,
        num_ascent_steps=chosen.ascent_steps,
        num_trace_products=chosen.trace_products,
        tolerance=chosen.tolerance,
        max_products=chosen.max_products,
        seed=model_options.seed,
    )
    figures = [sharpness_report.GAPS] + [sharpness_report.SPECTRUM] * bool(chosen.density_steps)
    folder, title = chosen.out or model_options.folder("sharpness"), model_options.title
    files = ResultFiles(folder, "sharpness", "sharpness", figures)
    cost = sharpness_report.density_cost(chosen.density_vectors, chosen.density_steps)
    print_cost(plan.cost + cost, f"over {loaded.num_images:,} images")
    with progress_bar("sharpness") as progress:
        report = sharpness_report.report_sharpness(
            loaded.surface,
            plan,
            num_density_vectors=chosen.density_vectors,
            num_density_steps=chosen.density_steps,
            progress=progress,
        )
    for table in report.tables(title):
        table.print()
        print()
    print(
        "At a minimum, the worst 2h/rho^2 is the dominant eigenvalue. Here the gradient adds up to "
        f"{2 * report.sharpness.gaps.grad_norm:.2g} / rho to it."
    )
    values = {"subject": title, **loaded.description(), "plan": asdict(plan)}
    files.write(values | report.values(), report.figures(title))
    print(files.summary)
    return 0


def _check(chosen: MeasureSharpness) -> None:
    """Check all numbers before the first measurement."""
    integer("eigenvalues", chosen.eigenvalues, at_least=1, remedy="Pass a number such as 5.")
    integer(
        "max_products", chosen.max_products, at_least=chosen.eigenvalues, remedy="Pass 50, say."
    )
    number("tolerance", chosen.tolerance, above=0.0, remedy="Pass a fraction such as 0.01.")
    integer("trace_products", chosen.trace_products, at_least=6, remedy="Pass a number such as 30.")
    integer("ascent_steps", chosen.ascent_steps, at_least=0, remedy="Pass 0 for no search.")
    integer("density_steps", chosen.density_steps, at_least=0, remedy="Pass 0 for no density.")
    integer(
        "density_vectors", chosen.density_vectors, at_least=1, remedy="Pass a number such as 2."
    )
    integer("the number of rhos", len(chosen.rhos), at_least=1, remedy="Pass --rhos 0.05 0.1, say.")
    for rho in chosen.rhos:
        number("rhos", rho, above=0.0, remedy="Pass positive radii, such as 0.05 0.1.")
