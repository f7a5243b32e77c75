"""The arithmetic of a step: climb, restore, combine.

The interface `Arithmetic` has two implementations: `Flat`, in this file, uses torch's operators and
supports every device and dtype. `fused.arithmetic.Fused` uses Triton kernels, for GPUs, where
launching many small operators takes longer than running them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, final, get_args

import torch
from torch import Tensor

from surrogap.core.combine import Coefficients, Number
from surrogap.core.geometry import Kind
from surrogap.core.shards import Sharding, totals
from surrogap.core.vectors import (
    Gradients,
    Layout,
    Vector,
    chunks,
    combine_,
    dot,
    flat_dot,
    scalar_for,
    widened,
)
from surrogap.errors import InvalidValueError

# The copies that a step holds in addition to weights and gradients; `Objective` documents them.
# "low" suits neither very small radii nor closures that write to the weights.
Memory: TypeAlias = Literal["exact", "low"]


def check_memory(memory: Memory, parameters: Sequence[Tensor]) -> None:
    """Check the argument `memory`."""
    if memory not in get_args(Memory):
        raise InvalidValueError(
            f'memory must be "exact" or "low", got {memory!r}. Leave it out for "exact".'
        )
    if memory == "low" and any(parameter.itemsize < 4 for parameter in parameters):
        # Half precision rounds away most of the ascent step, and so of `g`.
        raise InvalidValueError(
            'memory must be "exact" for parameters in half precision, got "low". Keep them in '
            "float32 and use autocast, or leave memory out."
        )


@final
@dataclass(frozen=True)
class Task:
    """The parameters of a step, and its settings.

    Attributes:
        parameters: The weights, moved in place; this process's shards if they are sharded.
        kinds: The kind of each parameter.
        shardings: The processes over which each parameter is sharded.
        eta: ASAM's eta; 0 if no parameter is scaled.
        eps: Added to the norm. A gradient of zero gives `delta = 0` in any case.
        memory: The copies to hold. An implementation may hold more.
    """

    parameters: Sequence[Tensor] = field(compare=False)
    kinds: Sequence[Kind]
    shardings: Sequence[Sharding]
    eta: float = 0.0
    eps: float = 1e-12
    memory: Memory = "exact"


class Arithmetic(ABC):
    """The arithmetic of one step, and of later steps whose tasks it adopts."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def adopts(self, task: Task) -> bool:
        """Adopt the task of another step if it is compatible, and return whether it is."""
        return False

    def capturing(self, num_steps: int) -> AbstractContextManager[None]:
        """Context for capturing `num_steps` steps in a CUDA graph, which `self` must outlive."""
        return nullcontext()

    @abstractmethod
    def climb(
        self, v: Gradients, rho: Number, scale: Tensor | None, g: Gradients | None = None
    ) -> None:
        """Copy the weights, and move them to `w + delta`.

        Args:
            v: The vector to climb along, times `scale`; None stands for zeros.
            rho: The radius. If `v` is zero or not finite, `delta` is zero.
            scale: The scale of the loss, or None. `eps` is multiplied by it too, so that `delta`
                does not depend on it.
            g: The gradient to keep for `combination`, if it is not `v`.
        """

    @abstractmethod
    def squared_norm(self) -> Tensor:
        """Return `||T v||^2` of the last climb."""

    @abstractmethod
    def restore(self) -> None:
        """Restore the weights from the copy, if any. Can be called again after an interrupt."""

    @abstractmethod
    def combination(
        self, g_p: Gradients, coefficients: Coefficients
    ) -> tuple[Gradients, Callable[[], Tensor]]:
        """Restore the weights, and return the direction `d`, which may reuse the memory of `g_p`.

        Returns:
            The direction, with None for parameters that neither pass has reached; and a function
            that returns `<g, g>`, `<g, g_p>` and `<g_p, g_p>` as one tensor.
        """


class Flat(Arithmetic):
    """Arithmetic with torch operators, on a flat tensor per device, dtype, kind and sharding."""

    _w: Vector | None = None

    def climb(
        self, v: Gradients, rho: Number, scale: Tensor | None, g: Gradients | None = None
    ) -> None:
        """See `Arithmetic`."""
        task = self._task
        layout = Layout(task.parameters, list(zip(task.kinds, task.shardings, strict=True)))
        self._kinds = [task.kinds[members[0]] for members in layout.members]
        self._shardings = [task.shardings[members[0]] for members in layout.members]
        self._is_reached = [piece is not None for piece in (v if g is None else g)]
        along = layout.read(v)
        self._g = along if g is None else layout.read(g)
        del v, g  # frees the gradients, which have been copied
        w = layout.read(task.parameters)
        gg = dot(self._g, self._g)
        vv = gg if along is self._g else dot(along, along)
        self._gg, self._vv = totals([gg, self._squares(w, along, vv)], self._shardings)
        self._w = w
        self._point(w, along, self._vv.sqrt(), rho, scale).write_to_(task.parameters)

    def squared_norm(self) -> Tensor:
        """See `Arithmetic`."""
        return self._vv

    def restore(self) -> None:
        """See `Arithmetic`."""
        if self._w is not None:
            self._w.write_to_(self._task.parameters)
            self._w = None

    def _point(
        self, w: Vector, v: Vector, norm: Tensor, rho: Number, scale: Tensor | None
    ) -> Vector:
        """Return `w + delta`, where `norm` is `||T v||`."""
        eps = self._task.eps if scale is None else self._task.eps * scale.to(norm.device)
        # If the norm is zero or not finite, there is no direction to climb in.
        climbs = (norm > 0) & norm.isfinite()
        step = torch.where(climbs, _beside(norm, rho) / (norm + eps), 0.0)
        point = [torch.empty_like(flat) for flat in w.flats]
        for kind, *flats in zip(self._kinds, w.flats, v.flats, point, strict=True):
            step_here, climbs_here = scalar_for(flats[0], step), climbs.to(flats[0].device)
            for w_chunk, v_chunk, out in chunks(*flats):
                if kind == Kind.FIXED:
                    out.copy_(w_chunk)
                    continue
                start, along = widened(w_chunk), widened(v_chunk)
                if kind == Kind.SCALED:
                    along = self._scaling(start).square_().mul_(along)
                moved = out if out.dtype == start.dtype else torch.empty_like(start)
                torch.addcmul(start, along, step_here, out=moved)
                # A step of 0 along an infinite vector would be NaN.
                torch.where(climbs_here, moved, start, out=moved)
                if moved is not out:
                    out.copy_(moved)
        return Vector(w.layout, point)

    def _squares(self, w: Vector, v: Vector, vv: Sequence[Tensor]) -> list[Tensor]:
        """Return `||T v||^2`, a term for each group, from `||v||^2`."""
        terms = []
        for kind, w_flat, v_flat, term in zip(self._kinds, w.flats, v.flats, vv, strict=True):
            if kind == Kind.SCALED:
                scaled = (
                    self._scaling(widened(a)).mul_(widened(b)) for a, b in chunks(w_flat, v_flat)
                )
                terms.append(flat_dot((x, x) for x in scaled))
            else:
                terms.append(term if kind == Kind.PLAIN else torch.zeros_like(term))
        return terms

    def _scaling(self, w: Tensor) -> Tensor:
        return w.abs().add_(self._task.eta)

    def combination(
        self, g_p: Gradients, coefficients: Coefficients
    ) -> tuple[Gradients, Callable[[], Tensor]]:
        """See `Arithmetic`."""
        self.restore()
        is_reached = [a or b is not None for a, b in zip(self._is_reached, g_p, strict=True)]
        vector = self._g.layout.read(g_p)
        gg = self._gg
        gp, pp = totals([dot(self._g, vector), dot(vector, vector)], self._shardings)
        products = torch.stack([gg, gp, pp])
        a_0, b_0, a_1, b_1 = (_beside(gg, number) for number in coefficients)
        a = a_0 + _share(a_1, gp, gg)
        b = b_0 + _share(b_1, gp, pp)
        views = combine_(a, self._g, b, vector).views()
        del self._g
        pairs = zip(views, is_reached, strict=True)
        return [view if reached else None for view, reached in pairs], lambda: products


def _beside(tensor: Tensor, number: Number) -> Number:
    """Return `number`; if it is a tensor, on the device and in the dtype of `tensor`."""
    return number.to(tensor) if isinstance(number, Tensor) else number


def _share(factor: Number, numerator: Tensor, squared_norm: Tensor) -> Tensor:
    """Return `factor * numerator / squared_norm`, or 0 if `factor` or `squared_norm` is 0.

    So a norm that overflows float32 does not make the direction NaN if the factor is 0.
    """
    is_zero = (squared_norm == 0) | (factor == 0)
    return factor * torch.where(is_zero, 0.0, numerator / squared_norm)
