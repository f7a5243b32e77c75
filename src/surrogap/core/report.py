"""The measurements of one call to `loss` or `backward`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

# The attributes of a report other than aux.
MEASURES = ("loss", "perturbed_loss", "gap", "grad_norm", "perturbed_grad_norm", "cosine", "rho")


@dataclass(frozen=True, repr=False)
class Report:
    """The measurements of one call to `loss` or `backward`, as scalars on the loss's device.

    Creating a report does not synchronise; converting a value, as in `float(report.loss)`, does.
    Derived values are computed when they are read. A value that the step does not measure is NaN:

    * Vanilla, EntropySGD and the plain steps of `Intermittent` measure only `loss` and `grad_norm`.
    * If f(w) is not computed on the whole batch (MomentumSAM, `climb=`), `loss` and `gap` are NaN.
    * If `g` is computed only on some samples (`climb=`) or for some weights (SAM with `perturb=`),
      `grad_norm` and `cosine` are NaN.

    If `scaler=` was passed, norms are those of the unscaled gradients.

    Attributes:
        loss: `f(w)`; for a list of closures, the sum of their losses.
        perturbed_loss: `f_p = f(w + delta)`.
        aux: The aux that the closure returned in its first pass, or None; for a list of closures, a
            list. Tensors in it are detached, also inside tuples, lists and dicts. Never the aux of
            `climb=`.
    """

    loss: Tensor
    perturbed_loss: Tensor
    aux: Any
    # The radius; <g, g>, <g, g_p> and <g_p, g_p>; the scale of the loss, if there was one.
    _radius: float | Tensor
    _products: Callable[[], Tensor]
    _scale: Tensor | None = None
    # True if f(w) was not computed. `loss.isnan()` does not show it: f(w) itself may be NaN.
    _lacks_loss: bool = False

    @property
    def value(self) -> Tensor:
        """The loss on the whole batch. `perturbed_loss` if f(w) was not computed, else `loss`."""
        return self.perturbed_loss if self._lacks_loss else self.loss

    @classmethod
    def _plain(
        cls,
        loss: Tensor,
        aux: Any,
        squared_norm: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> Self:
        """Return the report of a step without an ascent, from `||g||^2` of the scaled `g`."""
        nan = torch.full_like(loss, torch.nan)
        gg = nan if squared_norm is None else squared_norm.to(loss)
        return cls(loss, nan, aux, torch.nan, lambda: torch.stack([gg, nan, nan]), scale)

    @classmethod
    def mean(cls, reports: Sequence[Self], *, divisor: float = 1.0) -> Self:
        """Return the mean of the reports of one step's micro-batches.

        Losses, radii and inner products are averaged, so norms are root mean squares over the
        micro-batches. `aux` is a list. A single report is returned unchanged.

        Args:
            reports: One report for each call to `backward`; at least one.
            divisor: The number by which each loss was divided, so that the losses add up to a mean.
        """
        if len(reports) == 1:
            return reports[0]
        rows = torch.stack([report._row() for report in reports]).mean(0)
        loss, perturbed_loss, rho, *products = rows.unbind()
        return cls(
            divisor * loss,
            divisor * perturbed_loss,
            [report.aux for report in reports],
            rho,
            lambda: divisor**2 * torch.stack(products),
            _lacks_loss=reports[0]._lacks_loss,
        )

    def _row(self) -> Tensor:
        """Return losses, radius and inner products as one tensor."""
        return torch.stack([self.loss, self.perturbed_loss, self.rho, *self._three.unbind()])

    @cached_property
    def gap(self) -> Tensor:
        """The surrogate gap `h = f_p - f`."""
        return self.perturbed_loss - self.loss

    @cached_property
    def grad_norm(self) -> Tensor:
        """`||g||` over all trainable parameters."""
        return self._three[0].sqrt()

    @cached_property
    def perturbed_grad_norm(self) -> Tensor:
        """`||g_p||` over all trainable parameters."""
        return self._three[2].sqrt()

    @cached_property
    def cosine(self) -> Tensor:
        """The cosine of the angle between `g` and `g_p`; NaN if one of them is zero."""
        gg, gp, pp = self._three.unbind()
        return (gp / (gg.sqrt() * pp.sqrt())).clamp(-1.0, 1.0)

    @cached_property
    def rho(self) -> Tensor:
        """The radius of the step."""
        if isinstance(self._radius, Tensor):  # in a captured step
            return self._radius.to(self.loss)
        return torch.full_like(self.loss, self._radius)

    @cached_property
    def _three(self) -> Tensor:
        """The unscaled inner products."""
        products = self._products().to(self.loss)
        return products if self._scale is None else products / self._scale.to(products) ** 2

    def __repr__(self) -> str:
        values = (f"{name}={float(getattr(self, name)):.6g}" for name in MEASURES)
        return f"Report({', '.join(values)})"
