"""Trace and spectral density of a Hessian, from a few products."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from surrogap.analysis.lanczos import Basis, Lanczos, Operator
from surrogap.analysis.surface import Progress
from surrogap.checks import integer


@dataclass(frozen=True)
class Trace:
    """An estimate of the trace, the sum of all eigenvalues.

    Attributes:
        value: The estimate.
        standard_error: The standard error of the sampled term; the other term is exact.
        num_products: The number of matrix-vector products.
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

    A third of the products finds a subspace `Q` that captures most of the operator. Another third
    computes the trace within it, `tr(Q^T H Q)`, exactly. The last third samples the remainder. For
    an operator of rank `num_products / 3` or less the result is exact.

    Args:
        operator: The Hessian.
        num_products: The number of products, at least 6. Memory holds `num_products / 3` vectors,
            but at most one for each weight.
        seed: The seed of the random vectors.
        progress: Called with the number of products so far and the total.

    Raises:
        TypeError: `num_products` is not an integer.
        ValueError: `num_products` is below 6.

    >>> from torch import nn
    >>> from surrogap.analysis import Hessian, Surface
    >>> curvatures = torch.tensor([1.0, -4.0, 3.5])
    >>> surface = Surface(nn.Linear(3, 1), [curvatures], lambda w, c: (c * w.weight**2).sum() / 2)
    >>> round(trace(Hessian(surface), num_products=12).value, 4)
    0.5
    """
    integer("num_products", num_products, at_least=6, remedy="Pass a count, such as 30.")
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
        # For a small operator the remainder may be rounding error only.
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
    """The distribution of the eigenvalues, as a quadrature with a few nodes and weights.

    Attributes:
        nodes: The nodes, a row for each random vector.
        weights: The estimated fraction of eigenvalues at each node; each row adds up to 1.
        num_products: The number of matrix-vector products.
    """

    nodes: Tensor
    weights: Tensor
    num_products: int

    def moment(self, power: int) -> float:
        """The mean of `eigenvalue^power`, which estimates `tr(H^power) / (number of weights)`.

        Args:
            power: The power, such as 1 for the mean eigenvalue.
        """
        return float((self.weights * self.nodes**power).sum(1).mean())

    def at(self, values: Tensor, width: float) -> Tensor:
        """The density, smoothed by a Gaussian.

        Args:
            values: The eigenvalues at which to evaluate it, as a 1D tensor.
            width: The standard deviation of the Gaussian.
        """
        distances = (values[:, None] - self.nodes.flatten()) / width
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

    From a random vector `v` of norm 1 the Lanczos process gives nodes and weights such that
    `sum(weight * node^k) = v^T H^k v` for all `k` below twice the number of steps. The expectation
    of that over random vectors is `tr(H^k) / size`.

    Args:
        operator: The Hessian.
        num_vectors: The number of random vectors; more vectors reduce the noise.
        num_steps: The number of products for each random vector; more products raise the
            resolution. Memory holds `num_steps` vectors.
        seed: The seed of the random vectors.
        progress: Called with the number of products so far and the total.

    Raises:
        TypeError: An argument is not an integer.
        ValueError: An argument is below 1.

    >>> from torch import nn
    >>> from surrogap.analysis import Hessian, Surface
    >>> surface = Surface(nn.Linear(3, 1, bias=False), [torch.ones(3)],
    ...     lambda w, c: (c * w.weight**2).sum())
    >>> round(density(Hessian(surface), num_vectors=1, num_steps=3).moment(2), 4)
    4.0
    """
    integer("num_vectors", num_vectors, at_least=1, remedy="Pass a count, such as 4.")
    integer("num_steps", num_steps, at_least=1, remedy="Pass a count, such as 40.")
    num_steps = min(num_steps, operator.space.size)
    nodes, weights = [], []
    for index in range(num_vectors):
        lanczos = Lanczos(operator, operator.space.random(seed, "density", index))
        for step in range(num_steps):
            lanczos.advance()
            if progress is not None:
                progress(index * num_steps + step + 1, num_vectors * num_steps)
        ritz = lanczos.ritz()
        nodes.append(ritz.values)
        weights.append(ritz.coefficients[0] ** 2)
    return Density(torch.stack(nodes), torch.stack(weights), num_vectors * num_steps)
