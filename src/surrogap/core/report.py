"""What one call of `backward` saw."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

# What a report measures; the attributes beside aux.
MEASURES = ("loss", "perturbed_loss", "gap", "grad_norm", "perturbed_grad_norm", "cosine", "rho")


@dataclass(frozen=True, repr=False)
class Report:
    """What one call of `backward` saw, as scalar tensors on the loss's device.

    Making it costs no synchronisation, and what is derived is computed when it is asked for;
    reading a value (`float(report.loss)`) synchronises. A quantity that the objective does not
    measure is NaN: Vanilla and EntropySGD have no single second pass, so of the seven they fill
    `loss` and `grad_norm`. Norms are of the unscaled gradient where `scaler=` was given.

    Attributes:
        loss: `f(w)`; of a list of closures, their sum.
        perturbed_loss: `f_p = f(w + delta)`.
        aux: What the closure returned beside the loss in the first pass, or None; of a list of
            closures, the list of theirs.
    """

    loss: Tensor
    perturbed_loss: Tensor
    aux: Any
    # The radius; <g, g>, <g, g_p> and <g_p, g_p>; by what the loss was multiplied, if it was.
    _radius: float | Tensor
    _products: Callable[[], Tensor]
    _scale: Tensor | None

    @cached_property
    def gap(self) -> Tensor:
        """The surrogate gap `h = f_p - f`."""
        return self.perturbed_loss - self.loss

    @cached_property
    def grad_norm(self) -> Tensor:
        """`||g||` over all trainable parameters."""
        return self._unscaled(self._three[0].sqrt())

    @cached_property
    def perturbed_grad_norm(self) -> Tensor:
        """`||g_p||` over all trainable parameters."""
        return self._unscaled(self._three[2].sqrt())

    @cached_property
    def cosine(self) -> Tensor:
        """Of the angle between `g` and `g_p`; NaN where one of them is zero."""
        gg, gp, pp = self._three.unbind()
        return (gp / (gg.sqrt() * pp.sqrt())).clamp(-1.0, 1.0)

    @cached_property
    def rho(self) -> Tensor:
        """The radius used."""
        if isinstance(self._radius, Tensor):  # of a recorded step
            return self._radius.to(self.loss)
        return torch.full_like(self.loss, self._radius)

    @cached_property
    def _three(self) -> Tensor:
        return self._products().to(self.loss)

    def _unscaled(self, norm: Tensor) -> Tensor:
        return norm if self._scale is None else norm / self._scale.to(norm)

    def __repr__(self) -> str:
        values = (f"{name}={float(getattr(self, name)):.6g}" for name in MEASURES)
        return f"Report({', '.join(values)})"
