"""Where to look: the point `w + delta` at which the second pass runs.

Both geometries are one formula, `delta = rho * T^2 g / (||T g|| + eps)` with a diagonal `T`. A
parameter's kind says what its part of `T` is, and the layout keeps parameters of different kinds
apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

from surrogap.core.vectors import Vector, chunks, flat_dot, scalar_for, total, widened


class Kind(Enum):
    """What `T` is on a parameter."""

    STILL = auto()  # 0: it does not climb
    PLAIN = auto()  # 1
    SCALED = auto()  # |w| + eta


@dataclass(frozen=True)
class Ascent:
    """The climb from `w` along `g` to distance `rho`.

    Args:
        eta: None for SAM's Euclidean ball: `T = 1`. A number for ASAM's: `T = |w| + eta` on
            tensors of two or more dimensions, and 1 on biases and the weights of norms.
        eps: Added to the norm. A gradient of zero climbs nowhere in any case.
    """

    eta: float | None = None
    eps: float = 1e-12

    def kind(self, parameter: Tensor) -> Kind:
        """What `T` is on a parameter that climbs."""
        return Kind.SCALED if self.eta is not None and parameter.ndim >= 2 else Kind.PLAIN

    def point(
        self,
        w: Vector,
        g: Vector,
        squared_norms: Sequence[Tensor],
        rho: Tensor,
        scale: Tensor | None,
    ) -> Vector:
        """`w + delta`.

        Args:
            w: The weights.
            g: Their gradient, times `scale`.
            squared_norms: `dot(g, g)`, which the caller has anyway.
            rho: The radius.
            scale: By what the loss was multiplied, or None; `eps` is multiplied by it too, so
                that `delta` does not depend on it.
        """
        norm = self._norm(w, g, squared_norms, rho.device)
        eps = self.eps if scale is None else self.eps * scale
        # Where the norm is zero or not finite there is no direction to climb in.
        climbs = (norm > 0) & norm.isfinite()
        step = torch.where(climbs, rho / (norm + eps), 0.0)
        point = [torch.empty_like(flat) for flat in w.flats]
        for kind, *flats in zip(w.layout.kinds, w.flats, g.flats, point, strict=True):
            step_here, climbs_here = scalar_for(flats[0], step), climbs.to(flats[0].device)
            for w_chunk, g_chunk, out in chunks(*flats):
                if kind is Kind.STILL:
                    out.copy_(w_chunk)
                    continue
                start, along = widened(w_chunk), widened(g_chunk)
                if kind is Kind.SCALED:
                    along = self._scaling(start).square_().mul_(along)
                moved = torch.addcmul(start, along, step_here)
                # A step of 0 along an infinite gradient would be NaN.
                out.copy_(torch.where(climbs_here, moved, start))
        return Vector(w.layout, point)

    def _norm(
        self, w: Vector, g: Vector, squared_norms: Sequence[Tensor], device: torch.device
    ) -> Tensor:
        """`||T g||` over all parameters that climb."""
        parts = []
        for kind, w_flat, g_flat, squared_norm in zip(
            w.layout.kinds, w.flats, g.flats, squared_norms, strict=True
        ):
            if kind is Kind.PLAIN:
                parts.append(squared_norm)
            elif kind is Kind.SCALED:
                scaled = (
                    self._scaling(widened(a)).mul_(widened(b)) for a, b in chunks(w_flat, g_flat)
                )
                parts.append(flat_dot((x, x) for x in scaled))
        return total(parts, device).sqrt()

    def _scaling(self, w: Tensor) -> Tensor:
        assert self.eta is not None  # no parameter is SCALED without it
        return w.abs().add_(self.eta)
