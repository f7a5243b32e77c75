"""Eigenvalues of a Hessian; the dominant one is the paper's measure of sharpness."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from surrogap.analysis.lanczos import Lanczos, Operator, Ritz
from surrogap.analysis.space import Space
from surrogap.analysis.surface import Progress
from surrogap.checks import integer, number, one_of
from surrogap.errors import InvalidValueError

Which = Literal["largest", "smallest", "dominant"]

# Residuals are compared with at least this fraction of the dominant eigenvalue: due to rounding,
# the residuals of tiny eigenvalues do not get small relative to the eigenvalue.
_FLOOR = 0.01
# Relative noise on a given start vector. The iteration would never leave an exact eigenvector.
_NOISE = 0.01


@dataclass(frozen=True)
class Eigenpairs:
    """Some eigenvalues of a symmetric operator, with their accuracy.

    Attributes:
        values: The eigenvalues, in the requested order.
        vectors: Their eigenvectors, of norm 1, one in each row.
        residuals: `||H v - value * v||` for each: an eigenvalue lies within this distance of the
            value. If it is small, the error is smaller still, about
            `residual^2 / (distance to the next eigenvalue)`.
        num_products: The number of matrix-vector products.
        has_converged: Whether the residuals are within the tolerance.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    num_products: int
    has_converged: bool


def dominant_eigenvalue(
    operator: Operator,
    *,
    start: Tensor | None = None,
    tolerance: float = 1e-2,
    max_products: int = 100,
    seed: int = 0,
    progress: Progress | None = None,
) -> Eigenpairs:
    """The eigenvalue of largest absolute value, by power iteration, as the paper measures it.

    Keeps two vectors in memory. `eigenvalues` needs fewer products, but keeps a vector for each
    product. If the largest positive and negative eigenvalues are about equal in absolute value,
    only `eigenvalues` converges.

    Args:
        operator: The Hessian.
        start: A start vector, such as the eigenvector of an earlier training step. Some noise is
            added to it, so that the iteration can move to another eigenvector.
        tolerance: The largest residual, relative to the eigenvalue.
        max_products: The largest number of products.
        seed: The seed of the start vector, or of its noise.
        progress: Called with the number of products so far, and `max_products`.

    Raises:
        TypeError: `tolerance` is not a number, or `max_products` not an integer.
        ValueError: One of them is out of bounds, or `start` has the wrong shape.

    >>> from torch import nn
    >>> from surrogap.analysis import Hessian, Surface
    >>> curvatures = torch.tensor([1.0, -4.0, 3.0])
    >>> surface = Surface(nn.Linear(3, 1), [curvatures], lambda w, c: (c * w.weight**2).sum() / 2)
    >>> result = dominant_eigenvalue(Hessian(surface), tolerance=1e-3)
    >>> round(float(result.values[0]), 4)
    -4.0
    """
    _check(tolerance, max_products)
    space = operator.space
    v = _start(space, start, seed)
    for num_products in range(1, max_products + 1):
        w = operator @ v
        value = space.dot(v, w)
        residual = space.norm(w - value * v)
        if progress is not None:
            progress(num_products, max_products)
        has_converged = bool(residual <= tolerance * value.abs())
        if has_converged or num_products == max_products:
            break
        v = w / space.norm(w)
    return Eigenpairs(value[None], v[None], residual[None], num_products, has_converged)


def eigenvalues(
    operator: Operator,
    num: int = 1,
    which: Which = "largest",
    *,
    start: Tensor | None = None,
    tolerance: float = 1e-2,
    max_products: int = 100,
    seed: int = 0,
    progress: Progress | None = None,
) -> Eigenpairs:
    """Some eigenvalues at an end of the spectrum, by the Lanczos process.

    A multiple eigenvalue may be found only once: the process sees one vector of each eigenspace.

    Args:
        operator: The Hessian.
        num: The number of eigenvalues.
        which: "largest" first, "smallest" first (the most negative), or "dominant", those of
            largest absolute value first.
        start: A start vector, such as an eigenvector found before; some noise is added to it.
        tolerance: The largest residual, relative to the eigenvalue (or to a hundredth of the
            dominant one, if that is larger).
        max_products: The largest number of products. Memory holds one vector for each product, and
            `num` more.
        seed: The seed of the start vector, or of its noise.
        progress: Called with the number of products so far, and `max_products`.

    Raises:
        TypeError: An argument is not a number, or a count is not an integer.
        ValueError: An argument is out of bounds, `which` is unknown, or `start` has a wrong shape.

    >>> from torch import nn
    >>> from surrogap.analysis import Hessian, Surface
    >>> curvatures = torch.tensor([1.0, -4.0, 3.0])
    >>> surface = Surface(nn.Linear(3, 1), [curvatures], lambda w, c: (c * w.weight**2).sum() / 2)
    >>> eigenvalues(Hessian(surface), 2, tolerance=1e-6).values.round(decimals=4)
    tensor([3., 1.])
    """
    _check(tolerance, max_products)
    space = operator.space
    integer("num", num, at_least=1, remedy="Pass the number of eigenvalues.")
    one_of("which", which, get_args(Which), remedy="Leave it out for the largest.")
    if not num <= min(max_products, space.size):
        raise InvalidValueError(
            f"num must be at most max_products and the number of weights, got num={num}, "
            f"max_products={max_products} and {space.size} weights. Ask for fewer."
        )
    lanczos = Lanczos(operator, _start(space, start, seed), seed=seed)
    while True:
        lanczos.advance()
        if progress is not None:
            progress(lanczos.num_products, max_products)
        if lanczos.num_products < num:
            continue
        ritz = lanczos.ritz()
        wanted = _order(ritz.values, which)[:num]
        has_converged = lanczos.is_complete or _are_small(ritz, wanted, tolerance)
        if has_converged or lanczos.num_products >= max_products:
            break
    vectors = [lanczos.basis.combination(ritz.coefficients[:, index]) for index in wanted.tolist()]
    # The process may report residuals below the rounding error of a product.
    least = torch.finfo(space.dtype).eps * ritz.values.abs().max()
    values = ritz.values[wanted].to(vectors[0])
    residuals = ritz.residuals[wanted].clamp(min=least).to(vectors[0])
    return Eigenpairs(values, torch.stack(vectors), residuals, lanczos.num_products, has_converged)


def _order(values: Tensor, which: Which) -> Tensor:
    keys = {"largest": -values, "smallest": values, "dominant": -values.abs()}
    return keys[which].argsort()


def _are_small(ritz: Ritz, wanted: Tensor, tolerance: float) -> bool:
    sizes = ritz.values.abs()
    bounds = tolerance * torch.maximum(sizes, _FLOOR * sizes.max())
    return bool((ritz.residuals <= bounds)[wanted].all())


def _start(space: Space, start: Tensor | None, seed: int) -> Tensor:
    """A random direction, or a given one with some noise."""
    direction = space.random(seed)
    direction /= space.norm(direction)
    if start is None:
        return direction
    space.pieces(start)  # raises for a wrong shape
    start = start.to(direction)
    mixed = start / space.norm(start) + _NOISE * direction
    return mixed / space.norm(mixed)


def _check(tolerance: float, max_products: int) -> None:
    number("tolerance", tolerance, above=0.0, remedy="Pass a relative error, such as 0.01.")
    integer("max_products", max_products, at_least=1, remedy="Pass a count, such as 100.")
