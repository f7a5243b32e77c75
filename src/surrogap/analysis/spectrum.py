"""The whole spectrum of a Hessian, from few products: its trace, and its density."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from surrogap.analysis.lanczos import Basis, Lanczos, Operator
from surrogap.analysis.surface import Progress
from surrogap.checks import number


@dataclass(frozen=True)
class Trace:
    """An estimate of the trace, the sum of all eigenvalues.

    Attributes:
        value: The estimate.
        standard_error: Of the part that was sampled; the rest of it is exact.
        num_products: How many products with vectors it took.
    """

    value: float
    standard_error: float
    num_products: int


def trace(
    operator: Operator,
    *,
    num_products: int = 30,
    seed: int = 0,
    progress: Progress | None = None,
) -> Trace:
    """The trace, by Hutch++ (Meyer et al. 2021).

    A third of the products finds a subspace with most of the operator, `Q`; another takes the trace
    within it, `tr(Q^T H Q)`, exactly; the last samples what is outside. For an operator of rank
    `num_products / 3` or less the result is exact.

    Args:
        operator: The Hessian.
        num_products: How many products to take; at least 6. A third of it, and at most the number
            of weights, are held as vectors.
        seed: For the random vectors.
        progress: Called with the number of products taken, and all.

    Raises:
        TypeError: `num_products` is no number.
        ValueError: It is below 6.

    >>> from torch import nn
    >>> from surrogap.analysis import Hessian, Surface
    >>> curvatures = torch.tensor([1.0, -4.0, 3.5])
    >>> surface = Surface(nn.Linear(3, 1), [curvatures], lambda w, c: (c * w.weight**2).sum() / 2)
    >>> round(trace(Hessian(surface), num_products=12).value, 4)
    0.5
    """
    number("num_products", num_products, at_least=6, remedy="Pass a count, such as 30.")
    space, third = operator.space, num_products // 3
    num_taken = 0

    def product(v: Tensor) -> Tensor:
        nonlocal num_taken
        result = operator @ v
        num_taken += 1
        if progress is not None:
            progress(num_taken, 3 * third)
        return result

    basis, exact = Basis(space), 0.0
    for index in range(third):
        sketch = product(space.random(seed, "trace", index))
        length = space.norm(sketch)
        basis.project_out_(sketch)
        rest = space.norm(sketch)
        # Of a small operator there may be nothing left but rounding.
        if basis.size < space.size and rest > 100 * torch.finfo(sketch.dtype).eps * length:
            q = sketch / rest
            exact += float(space.dot(q, product(q)))
            basis.append(q)
    samples = []
    for index in range(third, 2 * third):
        g = basis.project_out_(space.random(seed, "trace", index))
        samples.append(float(space.dot(g, product(g))) if basis.size < space.size else 0.0)
    values = torch.tensor(samples, dtype=torch.float64)
    error = float(values.std()) / math.sqrt(third)
    return Trace(exact + float(values.mean()), error, num_taken)


@dataclass(frozen=True)
class Density:
    """How the eigenvalues are distributed, as weights on a few places.

    Attributes:
        places: Where, for each random vector a row.
        weights: What part of the eigenvalues is there, as this vector sees it; each row adds up
            to 1.
        num_products: How many products with vectors it took.
    """

    places: Tensor
    weights: Tensor
    num_products: int

    def moment(self, power: int) -> float:
        """The mean of `eigenvalue^power`; times the number of weights, it estimates a trace."""
        return float((self.weights * self.places**power).sum(1).mean())

    def at(self, values: Tensor, width: float) -> Tensor:
        """The density at `values`, each place spread by a Gaussian of this standard deviation."""
        distances = (values[:, None] - self.places.flatten()) / width
        gaussians = torch.exp(-(distances**2) / 2) / (width * math.sqrt(2 * math.pi))
        return gaussians @ self.weights.flatten() / len(self.weights)


def density(
    operator: Operator,
    *,
    num_vectors: int = 4,
    num_steps: int = 40,
    seed: int = 0,
    progress: Progress | None = None,
) -> Density:
    """The density of the eigenvalues, by stochastic Lanczos quadrature (Ubaru et al. 2017).

    From each of some random vectors `v` of norm 1 the Lanczos process gives places and weights such
    that `sum(weight * place^k) = v^T H^k v` for all `k` below twice the number of steps. The mean
    over vectors of that is `tr(H^k) / size`.

    Args:
        operator: The Hessian.
        num_vectors: How many random vectors; more make it less noisy.
        num_steps: How many products with each; more make it finer. As many vectors are held.
        seed: For the random vectors.
        progress: Called with the number of products taken, and all.

    Raises:
        TypeError: A number is none.
        ValueError: It is below 1.

    >>> from torch import nn
    >>> from surrogap.analysis import Hessian, Surface
    >>> surface = Surface(nn.Linear(3, 1, bias=False), [torch.ones(3)],
    ...     lambda w, c: (c * w.weight**2).sum())
    >>> round(density(Hessian(surface), num_vectors=1, num_steps=3).moment(2), 4)
    4.0
    """
    number("num_vectors", num_vectors, at_least=1, remedy="Pass a count, such as 4.")
    number("num_steps", num_steps, at_least=1, remedy="Pass a count, such as 40.")
    num_steps = min(num_steps, operator.space.size)
    places, weights = [], []
    for index in range(num_vectors):
        lanczos = Lanczos(operator, operator.space.random(seed, "density", index))
        for step in range(num_steps):
            lanczos.advance()
            if progress is not None:
                progress(index * num_steps + step + 1, num_vectors * num_steps)
        ritz = lanczos.ritz()
        places.append(ritz.values)
        weights.append(ritz.coefficients[0] ** 2)
    return Density(torch.stack(places), torch.stack(weights), num_vectors * num_steps)
