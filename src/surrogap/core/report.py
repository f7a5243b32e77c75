"""What one call of `backward` saw."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Report:
    """What one call of `backward` saw, as scalar tensors on the loss's device.

    Making it costs no synchronisation; reading it (`float(report.loss)`) does. A quantity that the
    objective does not compute is NaN: Vanilla and EntropySGD have no single second pass, so of the
    seven they fill `loss` and `grad_norm`. Norms are of the unscaled gradient where `scaler=` was
    given.

    Attributes:
        loss: `f(w)`; of a list of closures, their sum.
        perturbed_loss: `f_p = f(w + delta)`.
        gap: The surrogate gap `h = f_p - f`.
        grad_norm: `||g||` over all trainable parameters.
        perturbed_grad_norm: `||g_p||` over all trainable parameters.
        cosine: Of the angle between `g` and `g_p`; NaN where one of them is zero.
        rho: The radius used.
        aux: What the closure returned beside the loss in the first pass, or None; of a list of
            closures, the list of theirs.
    """

    loss: Tensor
    perturbed_loss: Tensor
    gap: Tensor
    grad_norm: Tensor
    perturbed_grad_norm: Tensor
    cosine: Tensor
    rho: Tensor
    aux: Any
