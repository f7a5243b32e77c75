"""The arithmetic of a two-pass step: climb, put back, combine.

Two implementations of one interface: `Flat` here, with torch's operators, for every device and
dtype; and `fused.Fused`, where a step's many small operators would cost more time to launch than
to run.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from surrogap.core.ascent import Ascent, Kind
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

# A setting of a step: a number, or a scalar on the device where a recorded step finds it.
Number: TypeAlias = float | Tensor

# What a step holds beside weights and gradients: copies of the weights and of `g`; or of the
# weights alone, and `g` is found again from where it led, but for rounding: to 6e-8 ||w|| / rho of
# its length in SAM's ball, so not for the smallest radii, nor if the closure writes to the weights.
Memory: TypeAlias = Literal["exact", "low"]


class Coefficients(NamedTuple):
    """What an objective is: the direction `d = a * g + b * g_p`.

    `a = a_0 + a_1 * <g, g_p> / <g, g>` and `b = b_0 + b_1 * <g, g_p> / <g_p, g_p>`. The ratios are
    those of the projections of one gradient onto the other; on a gradient of zero they are 0.
    """

    a_0: Number
    b_0: Number
    a_1: Number = 0.0
    b_1: Number = 0.0


class Arithmetic(ABC):
    """The arithmetic of one step.

    Args:
        parameters: The weights, moved in place.
        kinds: What each of them does in the climb.
        ascent: The geometry of the climb.
        shardings: How each of them is spread over processes; `parameters` are this one's pieces.
        memory: What to hold between the passes. An arithmetic may hold more.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        kinds: Sequence[Kind],
        ascent: Ascent,
        shardings: Sequence[Sharding],
        memory: Memory = "exact",
    ) -> None:
        self._parameters = parameters
        self._kinds = kinds
        self._ascent = ascent
        self._shardings = shardings
        self._memory = memory

    def adopts(
        self,
        parameters: Sequence[Tensor],
        kinds: Sequence[Kind],
        shardings: Sequence[Sharding],
        memory: Memory,
    ) -> bool:
        """Whether it can serve another step, of these parameters, which it takes over then."""
        return False

    def recording(self, num_steps: int) -> AbstractContextManager[None]:
        """So many steps in the body are recorded into a CUDA graph, for which it stays alive."""
        return nullcontext()

    @abstractmethod
    def climb(self, g: Gradients, rho: Number, scale: Tensor | None) -> None:
        """Moves the weights to `w + delta`, having made an exact copy of them.

        Args:
            g: The gradient at `w`, times `scale`; None stands for zeros. It is kept for later.
            rho: The radius. Where `g` is zero or not finite, `delta` is zero.
            scale: By what the loss was multiplied, or None; `eps` is multiplied by it too, so that
                `delta` does not depend on it.
        """

    @abstractmethod
    def restore(self) -> None:
        """Puts the copy back, if there is one. It may be called again if it was interrupted."""

    @abstractmethod
    def combination(
        self, g_p: Gradients, coefficients: Coefficients
    ) -> tuple[Gradients, Callable[[], Tensor]]:
        """Puts the copy back, and gives the direction `d`, perhaps in the memory of `g_p`.

        Returns:
            It, None where neither pass has a gradient; and a function that gives `<g, g>`,
            `<g, g_p>` and `<g_p, g_p>` as one tensor.
        """


class Flat(Arithmetic):
    """With torch's operators, on one flat tensor for each device, dtype, kind and sharding."""

    _w: Vector | None = None

    def climb(self, g: Gradients, rho: Number, scale: Tensor | None) -> None:
        """See `Arithmetic`."""
        layout = Layout(self._parameters, list(zip(self._kinds, self._shardings, strict=True)))
        self._group_kinds = [self._kinds[members[0]] for members in layout.members]
        self._group_shardings = [self._shardings[members[0]] for members in layout.members]
        self._is_reached = [piece is not None for piece in g]
        self._g = layout.read(g)
        del g  # the copy takes its place in memory
        w = layout.read(self._parameters)
        self._gg, squared_norm = totals(self._squares(w), self._group_shardings)
        self._w = w
        self._point(w, squared_norm.sqrt(), rho, scale).write_to_(self._parameters)

    @torch.no_grad()
    def restore(self) -> None:
        """See `Arithmetic`."""
        if self._w is not None:
            self._w.write_to_(self._parameters)
            self._w = None

    def _point(self, w: Vector, norm: Tensor, rho: Number, scale: Tensor | None) -> Vector:
        """`w + delta`, where `norm` is `||T g||`."""
        eps = self._ascent.eps if scale is None else self._ascent.eps * scale.to(norm.device)
        # Where the norm is zero or not finite there is no direction to climb in.
        climbs = (norm > 0) & norm.isfinite()
        step = torch.where(climbs, _beside(norm, rho) / (norm + eps), 0.0)
        point = [torch.empty_like(flat) for flat in w.flats]
        for kind, *flats in zip(self._group_kinds, w.flats, self._g.flats, point, strict=True):
            step_here, climbs_here = scalar_for(flats[0], step), climbs.to(flats[0].device)
            for w_chunk, g_chunk, out in chunks(*flats):
                if kind == Kind.STILL:
                    out.copy_(w_chunk)
                    continue
                start, along = widened(w_chunk), widened(g_chunk)
                if kind == Kind.SCALED:
                    along = self._scaling(start).square_().mul_(along)
                moved = out if out.dtype == start.dtype else torch.empty_like(start)
                torch.addcmul(start, along, step_here, out=moved)
                # A step of 0 along an infinite gradient would be NaN.
                torch.where(climbs_here, moved, start, out=moved)
                if moved is not out:
                    out.copy_(moved)
        return Vector(w.layout, point)

    def _squares(self, w: Vector) -> tuple[list[Tensor], list[Tensor]]:
        """`||g||^2` and `||T g||^2`, a part for each group."""
        gg = dot(self._g, self._g)
        tt = []
        for kind, w_flat, g_flat, squared_norm in zip(
            self._group_kinds, w.flats, self._g.flats, gg, strict=True
        ):
            if kind == Kind.SCALED:
                scaled = (
                    self._scaling(widened(a)).mul_(widened(b)) for a, b in chunks(w_flat, g_flat)
                )
                tt.append(flat_dot((x, x) for x in scaled))
            else:
                tt.append(squared_norm if kind == Kind.PLAIN else torch.zeros_like(squared_norm))
        return gg, tt

    def _scaling(self, w: Tensor) -> Tensor:
        assert self._ascent.eta is not None  # no parameter is SCALED without it
        return w.abs().add_(self._ascent.eta)

    def combination(
        self, g_p: Gradients, coefficients: Coefficients
    ) -> tuple[Gradients, Callable[[], Tensor]]:
        """See `Arithmetic`."""
        self.restore()
        is_reached = [a or b is not None for a, b in zip(self._is_reached, g_p, strict=True)]
        vector = self._g.layout.read(g_p)
        gg = self._gg
        gp, pp = totals([dot(self._g, vector), dot(vector, vector)], self._group_shardings)
        products = torch.stack([gg, gp, pp])
        a_0, b_0, a_1, b_1 = (_beside(gg, number) for number in coefficients)
        a = a_0 + _share(a_1, gp, gg)
        b = b_0 + _share(b_1, gp, pp)
        views = combine_(a, self._g, b, vector).views()
        del self._g
        pairs = zip(views, is_reached, strict=True)
        return [view if reached else None for view, reached in pairs], lambda: products


def choose(
    parameters: Sequence[Tensor],
    kinds: Sequence[Kind],
    ascent: Ascent,
    shardings: Sequence[Sharding],
    memory: Memory = "exact",
    *,
    last: Arithmetic | None = None,
) -> Arithmetic:
    """The fastest arithmetic for these parameters: the `last` one, if it still fits."""
    if last is not None and last.adopts(parameters, kinds, shardings, memory):
        return last
    if parameters[0].device.type == "cuda" and find_spec("triton"):
        from surrogap.core.fused import Fused  # Triton takes a second to load

        if Fused.takes(parameters):
            return Fused(parameters, kinds, ascent, shardings, memory)
    return Flat(parameters, kinds, ascent, shardings, memory)


def _beside(tensor: Tensor, number: Number) -> Number:
    """`number`, such that arithmetic with `tensor` keeps that one's dtype."""
    return number.to(tensor) if isinstance(number, Tensor) else number


def _share(factor: Number, numerator: Tensor, squared_norm: Tensor) -> Tensor:
    """`factor * numerator / squared_norm`; 0 on a squared norm of 0, or if the factor is 0.

    A norm beyond float32 must not make NaN of a direction that has no use for the ratio.
    """
    is_zero = (squared_norm == 0) | (factor == 0)
    return factor * torch.where(is_zero, 0.0, numerator / squared_norm)
