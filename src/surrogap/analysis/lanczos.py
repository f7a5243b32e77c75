"""The Lanczos process: what products with a few vectors tell of a whole spectrum.

From a start vector it builds an orthonormal basis `q_1, q_2, ...` of the space that `v, H v, H^2 v,
...` span. In it `H` is a tridiagonal matrix `T`, whose extreme eigenvalues soon are those of `H`.
Rounding would make the basis lose its orthogonality, and eigenvalues appear twice, so each new
vector is made orthogonal to all earlier ones, twice.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from surrogap.analysis.space import Space

# Vectors of a basis that lie in one matrix: enough for fast products, few enough to waste little.
_BLOCK = 8


class Operator(Protocol):
    """A symmetric linear map, such as a Hessian."""

    @property
    def space(self) -> Space:
        """What it maps to itself."""

    def __matmul__(self, v: Tensor, /) -> Tensor:
        """Its product with a vector."""


class Basis:
    """Orthonormal vectors."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self._blocks: list[Tensor] = []
        self.size = 0

    def append(self, vector: Tensor) -> None:
        """Takes in a vector of norm 1, orthogonal to all others."""
        if self.size % _BLOCK == 0:
            rows = min(_BLOCK, self.space.size - self.size)
            self._blocks.append(vector.new_zeros(rows, len(vector)))
        self._blocks[-1][self.size % _BLOCK] = vector
        self.size += 1

    def project_out_(self, vector: Tensor) -> Tensor:
        """Leaves of `vector` what is orthogonal to the basis, and returns it."""
        for _ in range(2):  # once leaves as much as was rounded away
            for block in self._blocks:
                vector -= self.space.products(block, vector) @ block
        return vector

    def combination(self, coefficients: Tensor) -> Tensor:
        """The sum of the basis vectors, each times its coefficient."""
        result = self.space.zeros()
        padded = coefficients.new_zeros(len(self._blocks) * _BLOCK)
        padded[: self.size] = coefficients
        for block, some in zip(self._blocks, torch.split(padded, _BLOCK), strict=True):
            result += some[: len(block)].to(block) @ block
        return result


class Ritz(NamedTuple):
    """What the process knows of the spectrum, in float64 on the CPU, eigenvalues rising."""

    values: Tensor
    # The columns are the eigenvectors in the basis.
    coefficients: Tensor
    # How far each is from being an eigenpair: ||H v - value * v||.
    residuals: Tensor


class Lanczos:
    """The process from one start vector.

    Args:
        operator: Whose spectrum to see.
        start: Where to start; not zero.
        seed: For the random vector that goes on where the basis has spanned all that `start` sees.

    Attributes:
        basis: The vectors so far.
        num_products: How many products were taken.

    >>> from torch import nn
    >>> from surrogap.analysis import Hessian, Surface
    >>> curvatures = torch.tensor([1.0, 2.0, 3.0])
    >>> surface = Surface(nn.Linear(3, 1), [curvatures], lambda w, c: (c * w.weight**2).sum() / 2)
    >>> lanczos = Lanczos(Hessian(surface), surface.space.random(0))
    >>> for _ in range(4):
    ...     lanczos.advance()
    >>> lanczos.ritz().values.round(decimals=5)
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
        """How many products were taken."""
        return self.basis.size

    @property
    def is_complete(self) -> bool:
        """Whether the basis spans the whole space, and all eigenvalues are known."""
        return self.basis.size == self._space.size

    def advance(self) -> None:
        """Takes a product, and adds a vector to the basis."""
        q = self._next
        w = self._operator @ q
        size = self._space.norm(w)
        self._diagonal.append(self._space.dot(q, w))
        self.basis.append(q)
        self.basis.project_out_(w)
        rest = self._space.norm(w)
        # What is left may be nothing but rounding.
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
        """The eigenvalues that `T` has, and how good they are as those of the operator."""
        diagonal = torch.stack(self._diagonal).double().cpu()
        off_diagonal = torch.stack(self._off_diagonal).double().cpu()
        beside = off_diagonal[:-1]
        matrix = torch.diag(diagonal) + torch.diag(beside, 1) + torch.diag(beside, -1)
        values, coefficients = torch.linalg.eigh(matrix)
        return Ritz(values, coefficients, off_diagonal[-1] * coefficients[-1].abs())
