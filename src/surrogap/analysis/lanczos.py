"""The Lanczos process: approximate eigenvalues from a few matrix-vector products.

From a start vector `v` it builds an orthonormal basis `q_1, q_2, ...` of the space spanned by
`v, H v, H^2 v, ...` In this basis `H` is a tridiagonal matrix `T`, whose extreme eigenvalues soon
approximate those of `H`. Rounding would destroy the orthogonality of the basis and duplicate
eigenvalues, so each new vector is orthogonalized against all earlier ones, twice.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from surrogap.analysis.space import Space
from surrogap.errors import UnsupportedError

# The number of basis vectors per matrix: enough for fast products, and few unused rows.
_BLOCK = 8


class NotFiniteError(UnsupportedError):
    """Raised when a product has infinite or NaN entries."""


class Operator(Protocol):
    """A symmetric linear map, such as a Hessian."""

    @property
    def space(self) -> Space:
        """The space on which it acts."""

    def __matmul__(self, v: Tensor, /) -> Tensor:
        """Its product with a vector."""


class Basis:
    """Orthonormal vectors."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self._blocks: list[Tensor] = []
        self.size = 0

    def append(self, vector: Tensor) -> None:
        """Add a vector of norm 1 that is orthogonal to all others."""
        if self.size % _BLOCK == 0:
            rows = min(_BLOCK, self.space.size - self.size)
            self._blocks.append(vector.new_zeros(rows, len(vector)))
        self._blocks[-1][self.size % _BLOCK] = vector
        self.size += 1

    def project_out_(self, vector: Tensor) -> Tensor:
        """Subtract from `vector` its projection onto the basis, and return it."""
        for _ in range(2):  # rounding leaves a remainder the first time
            for block in self._blocks:
                vector -= self.space.products(block, vector) @ block
        return vector

    def combination(self, coefficients: Tensor) -> Tensor:
        """The linear combination of the basis vectors with these coefficients."""
        result = self.space.zeros()
        padded = coefficients.new_zeros(len(self._blocks) * _BLOCK)
        padded[: self.size] = coefficients
        for block, some in zip(self._blocks, torch.split(padded, _BLOCK), strict=True):
            result += some[: len(block)].to(block) @ block
        return result


class Ritz(NamedTuple):
    """Approximate eigenpairs, in float64 on the CPU, with the eigenvalues in increasing order."""

    values: Tensor
    # The columns are the coefficients of the eigenvectors in the basis.
    coefficients: Tensor
    # ||H v - value * v|| for each.
    residuals: Tensor


class Lanczos:
    """The Lanczos process from one start vector.

    Args:
        operator: The operator.
        start: The start vector, which must not be zero.
        seed: The seed of the random vector with which it continues once the basis spans an
            invariant subspace.

    Attributes:
        basis: The vectors so far.
        num_products: The number of products so far.

    >>> from torch import nn
    >>> from surrogap.analysis import Hessian, Surface
    >>> curvatures = torch.tensor([1.0, 2.0, 3.0])
    >>> surface = Surface(nn.Linear(3, 1), [curvatures], lambda w, c: (c * w.weight**2).sum() / 2)
    >>> lanczos = Lanczos(Hessian(surface), surface.space.random(0))
    >>> for _ in range(4):
    ...     lanczos.advance()
    >>> lanczos.ritz().values.abs().round(decimals=5)
    tensor([0., 1., 2., 3.], dtype=torch.float64)
    """

    def __init__(self, operator: Operator, start: Tensor, *, seed: int = 0) -> None:
        self._operator = operator
        self._space = operator.space
        self._seed = seed
        self.basis = Basis(operator.space)
        self._next = start / self._space.norm(start)
        self._diagonal: list[Tensor] = []
        self._off_diagonal: list[Tensor] = []

    @property
    def num_products(self) -> int:
        """The number of products so far."""
        return self.basis.size

    @property
    def is_complete(self) -> bool:
        """True if the basis spans the whole space, so that all eigenvalues are known."""
        return self.basis.size == self._space.size

    def advance(self) -> None:
        """Compute a product, and add a vector to the basis."""
        q = self._next
        w = self._operator @ q
        size = self._space.norm(w)
        self._diagonal.append(self._space.dot(q, w))
        self.basis.append(q)
        self.basis.project_out_(w)
        rest = self._space.norm(w)
        # The remainder may be rounding error only.
        if rest <= 100 * torch.finfo(w.dtype).eps * size:
            self._off_diagonal.append(torch.zeros_like(rest))
            if not self.is_complete:
                new = self._space.random(self._seed, "lanczos", self.basis.size)
                w = self.basis.project_out_(new)
                self._next = w / self._space.norm(w)
        else:
            self._off_diagonal.append(rest)
            self._next = w / rest

    def ritz(self) -> Ritz:
        """The eigenvalues of `T`, and their residuals as eigenvalues of the operator.

        Raises:
            NotFiniteError: A product has infinite or NaN entries.
        """
        diagonal = torch.stack(self._diagonal).double().cpu()
        if not diagonal.isfinite().all():
            raise NotFiniteError(
                "Hessian must be finite, got a product with infinite or NaN entries. "
                "Check the weights, and the loss at the weights."
            )
        off_diagonal = torch.stack(self._off_diagonal).double().cpu()
        beside = off_diagonal[:-1]
        matrix = torch.diag(diagonal) + torch.diag(beside, 1) + torch.diag(beside, -1)
        values, coefficients = torch.linalg.eigh(matrix)
        return Ritz(values, coefficients, off_diagonal[-1] * coefficients[-1].abs())
