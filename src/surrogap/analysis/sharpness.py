"""All sharpness measures of a model, in one call and one table."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from surrogap.analysis.eigen import Eigenpairs, eigenvalues
from surrogap.analysis.gap import Gap, Gaps, cost_of_gaps, surrogate_gaps
from surrogap.analysis.hessian import GRADIENTS_PER_PRODUCT, Hessian
from surrogap.analysis.spectrum import Trace, trace
from surrogap.analysis.surface import Progress, Surface

GAP_COLUMNS = ("rho", "h", "2h/rho^2", "worst h", "worst 2h/rho^2")


@dataclass(frozen=True)
class Plan:
    """The settings of the measurement.

    Attributes:
        num_eigenvalues: The number of largest eigenvalues. The smallest is always computed.
        rhos: The radii of the surrogate gap.
        num_ascent_steps: The number of gradients for the worst case at each radius; 0 for no
            search.
        num_trace_products: The number of products for the trace.
        tolerance: The largest residual, relative to the eigenvalue.
        max_products: The largest number of products at each end of the spectrum.
        seed: The seed of all random vectors.

    >>> Plan(rhos=(0.05,), num_ascent_steps=0, max_products=20, num_trace_products=9).cost
    99.3...
    """

    num_eigenvalues: int = 5
    rhos: tuple[float, ...] = (0.01, 0.02, 0.05, 0.1, 0.2)
    num_ascent_steps: int = 10
    num_trace_products: int = 30
    tolerance: float = 1e-2
    max_products: int = 50
    seed: int = 0

    @property
    def costs(self) -> tuple[float, ...]:
        """Upper bounds on the costs of the largest and smallest eigenvalues, trace and gaps."""
        gaps = cost_of_gaps(len(self.rhos), num_ascent_steps=self.num_ascent_steps, has_start=True)
        products = (self.max_products, self.max_products, self.num_trace_products)
        return (*(GRADIENTS_PER_PRODUCT * number for number in products), gaps)

    @property
    def cost(self) -> float:
        """Upper bound on the total cost, in gradients over the set."""
        return sum(self.costs)


@dataclass(frozen=True)
class Sharpness:
    """The sharpness of the loss at a model's weights.

    Attributes:
        num_weights: The number of trainable weights.
        largest: The largest eigenvalues of the Hessian.
        smallest: The smallest eigenvalue, which is not negative at a minimum.
        trace: The sum of all eigenvalues.
        gaps: The surrogate gaps at some radii.
    """

    num_weights: int
    largest: Eigenpairs
    smallest: Eigenpairs
    trace: Trace
    gaps: Gaps

    @property
    def dominant(self) -> float:
        """The eigenvalue of largest absolute value, the paper's measure of sharpness."""
        ends = (float(self.largest.values[0]), float(self.smallest.values[0]))
        return max(ends, key=abs)

    def rows(self) -> list[tuple[str, str]]:
        """The rows of a table of names and values, without the gaps."""
        loss = self.gaps.gaps[0].loss
        return [
            ("weights", f"{self.num_weights:,}"),
            ("loss", f"{loss:.4g}"),
            ("gradient norm", f"{self.gaps.grad_norm:.4g}"),
            ("dominant eigenvalue", f"{self.dominant:.4g}"),
            ("largest eigenvalues", _listed(self.largest)),
            ("smallest eigenvalue", _listed(self.smallest)),
            ("trace", f"{self.trace.value:.4g} ± {self.trace.standard_error:.2g}"),
        ]

    def gap_rows(self) -> list[tuple[str, ...]]:
        """The rows of a table of the gaps: rho, h, 2h/rho^2, and both for the worst case."""
        return [_row(gap) for gap in self.gaps.gaps]


def sharpness(
    surface: Surface,
    plan: Plan | None = None,
    *,
    progress: Callable[[float, float], object] | None = None,
) -> Sharpness:
    """Measure eigenvalues, trace and gaps of a surface.

    Args:
        surface: The loss.
        plan: The settings; None for the defaults.
        progress: Called with the cost so far and `plan.cost`, in gradients over the set. It skips
            ahead when a search ends early.

    >>> import torch
    >>> from torch import nn
    >>> model = nn.Linear(2, 1, bias=False)
    >>> surface = Surface(model, [torch.tensor([3.0, 5.0])], lambda w, c: (c * w.weight**2).sum())
    >>> round(sharpness(surface, Plan(num_eigenvalues=1)).dominant, 3)
    10.0
    """
    plan = plan or Plan()
    hessian, seed = Hessian(surface), plan.seed
    search = partial(
        eigenvalues, hessian, tolerance=plan.tolerance, max_products=plan.max_products, seed=seed
    )

    def progress_of(index: int) -> Progress | None:
        """Return a callback for one of the four measurements that reports the total progress."""
        if progress is None:
            return None
        before, whole = sum(plan.costs[:index]), plan.costs[index]
        return lambda done, most: progress(before + whole * done / most, plan.cost)

    largest = search(plan.num_eigenvalues, "largest", progress=progress_of(0))
    smallest = search(1, "smallest", progress=progress_of(1))
    total = trace(hessian, num_products=plan.num_trace_products, seed=seed, progress=progress_of(2))
    gaps = surrogate_gaps(
        surface,
        plan.rhos,
        num_ascent_steps=plan.num_ascent_steps,
        start=largest.vectors[0],
        seed=seed,
        progress=progress_of(3),
    )
    return Sharpness(surface.space.size, largest, smallest, total, gaps)


def _listed(pairs: Eigenpairs) -> str:
    values = ", ".join(f"{float(value):.4g}" for value in pairs.values)
    error = f"residual up to {float(pairs.residuals.max()):.2g}"
    return (
        f"{values} ({error}{'' if pairs.has_converged else ', not converged: allow more products'})"
    )


def _row(gap: Gap) -> tuple[str, ...]:
    numbers = (gap.gap, gap.sharpness, gap.worst_gap, gap.worst_sharpness)
    return (f"{gap.rho:g}", *(f"{number:.4g}" for number in numbers))
