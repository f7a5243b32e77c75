"""Eigenvalues of a Hessian: the paper's measure of sharpness, and more of the spectrum."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from surrogap.analysis.lanczos import Lanczos, Operator, Ritz
from surrogap.analysis.space import Space
from surrogap.analysis.surface import Progress
from surrogap.checks import number
from surrogap.errors import InvalidValueError

Which = Literal["largest", "smallest", "dominant"]

# Residuals are compared with at least this part of the dominant eigenvalue, since rounding keeps
# those of tiny ones from falling below a part of themselves.
_FLOOR = 0.01
# Of a given start vector: without it, an eigenvector that was dominant would stay so for ever.
_NOISE = 0.01


@dataclass(frozen=True)
class Eigenpairs:
    """Some eigenvalues of a symmetric operator, and what they are worth.

    Attributes:
        values: The eigenvalues, in the order that was asked for.
        vectors: Their eigenvectors, of norm 1, one in each row.
        residuals: `||H v - value * v||` for each: within that distance of the value there is an
            eigenvalue. Once it is small, the value is closer still, by about
            `residual^2 / (distance to the next eigenvalue)`.
        num_products: How many products with vectors it took.
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

    It holds two vectors. `eigenvalues` takes fewer products, and a vector of memory for each; and
    where eigenvalues of both signs are about as large, it converges and this does not.

    Args:
        operator: The Hessian.
        start: Where to start, such as the eigenvector that an earlier step of training found. Some
            noise is added to it, so that another one may take over.
        tolerance: How small the residual must be, as a part of the eigenvalue.
        max_products: When to stop in any case.
        seed: For the start vector, or its noise.
        progress: Called with the number of products taken, and `max_products`.

    Raises:
        TypeError: `tolerance` or `max_products` is no number.
        ValueError: They are not positive, or `start` has the wrong shape.

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

    An eigenvalue that occurs several times may be found once only: the process sees one vector of
    each eigenspace.

    Args:
        operator: The Hessian.
        num: How many.
        which: Which, and in which order: "largest" first, "smallest" first (the most negative), or
            the "dominant", those of largest absolute value.
        start: Where to start, such as an eigenvector found before; some noise is added to it.
        tolerance: How small each residual must be, as a part of its eigenvalue (or of a hundredth
            of the dominant one, if it is smaller than that).
        max_products: When to stop in any case. As many vectors are held at most, and `num` more.
        seed: For the start vector, or its noise.
        progress: Called with the number of products taken, and `max_products`.

    Raises:
        TypeError: A number is none.
        ValueError: A number is out of bounds, `which` is unknown, or `start` has the wrong shape.

    >>> from torch import nn
    >>> from surrogap.analysis import Hessian, Surface
    >>> curvatures = torch.tensor([1.0, -4.0, 3.0])
    >>> surface = Surface(nn.Linear(3, 1), [curvatures], lambda w, c: (c * w.weight**2).sum() / 2)
    >>> eigenvalues(Hessian(surface), 2, tolerance=1e-6).values.round(decimals=4)
    tensor([3., 1.])
    """
    _check(tolerance, max_products)
    space = operator.space
    number("num", num, at_least=1, remedy="Pass how many eigenvalues to find.")
    if which not in get_args(Which):
        raise InvalidValueError(
            f"which must be 'largest', 'smallest' or 'dominant', got {which!r}. "
            "Leave it out for the largest."
        )
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
    # The process may tell of residuals below what a product is rounded to.
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
    """A random direction, or a given one that is shaken a little."""
    direction = space.random(seed)
    direction /= space.norm(direction)
    if start is None:
        return direction
    space.pieces(start)  # refuses a wrong shape
    start = start.to(direction)
    mixed = start / space.norm(start) + _NOISE * direction
    return mixed / space.norm(mixed)


def _check(tolerance: float, max_products: int) -> None:
    number("tolerance", tolerance, above=0.0, remedy="Pass a part of the eigenvalue, such as 0.01.")
    number("max_products", max_products, at_least=1, remedy="Pass a count, such as 100.")
