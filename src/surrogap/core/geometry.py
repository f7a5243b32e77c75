"""The geometry of the ascent step: the perturbed parameters, and the ball that contains `delta`.

Both balls share one formula, `delta = rho * T^2 v / (||T v|| + eps)` with a diagonal `T`, for an
ascent step along `v`. The kind of a parameter defines its part of `T`.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Literal, TypeAlias, final

from torch import nn

from surrogap.errors import InvalidTypeError, InvalidValueError

if TYPE_CHECKING:
    from surrogap.core.weights import Weights

# A function of a parameter's name and the parameter, "norms", or None for all parameters.
Perturb: TypeAlias = Callable[[str, nn.Parameter], bool] | Literal["norms"] | None

# BatchNorm, SyncBatchNorm and InstanceNorm are subclasses of `_NormBase`.
_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
# After the `|`, timm's layers: EvoNorm2dS0 and variants, FilterResponseNormTlu2d, InplaceAbn.
_NORM_NAME = re.compile(
    r"[Nn]orm(Act|Gated)?([123]d)?(Fp32)?$|^(EvoNorm2d|FilterResponseNorm|InplaceAbn)"
)


class Kind(IntEnum):
    """The value of `T` on a parameter."""

    FIXED = 0  # T = 0: the parameter is not perturbed
    PLAIN = 1  # T = 1
    SCALED = 2  # T = |w| + eta


@final
@dataclass(frozen=True)
class Geometry:
    """The ball that contains the ascent step, defined by a diagonal matrix `T`.

    The ascent step along `v` is `delta = rho * T^2 v / (||T v|| + eps)`.

    Args:
        eta: None for SAM's Euclidean ball, `T = 1`. A number for ASAM's adaptive ball:
            `T = |w| + eta` on every parameter except biases, where `T = 1`.
    """

    eta: float | None = None

    def kind(self, name: str) -> Kind:
        """Return the kind of a perturbed parameter.

        Args:
            name: The name of the parameter. The names of biases end in "bias".
        """
        return Kind.PLAIN if self.eta is None or name.endswith("bias") else Kind.SCALED


def check_perturb(perturb: object) -> None:
    """Check the argument `perturb`."""
    if perturb is None or callable(perturb) or perturb == "norms":
        return
    error = InvalidValueError if isinstance(perturb, str) else InvalidTypeError
    raise error(
        'perturb must be "norms" or a function of a parameter\'s name and the parameter, got '
        f'{perturb!r}. Pass "norms", or a function such as lambda name, p: "norm" in name.'
    )


def norm_parameters(modules: Sequence[nn.Module]) -> Iterator[nn.Parameter]:
    """Yield the affine parameters of normalisation layers.

    These are torch's and timm's layers, and any module whose class name ends in "Norm" and whose
    own parameters are vectors, also of shape `(1, C, 1, 1)`, such as `LlamaRMSNorm`.
    """
    for module in modules:
        own = [p for p in module._parameters.values() if p is not None]
        if isinstance(module, _NORMS) or (
            _NORM_NAME.search(type(module).__name__)
            and all(p.numel() == max(p.shape, default=1) for p in own)
        ):
            yield from own


def kinds_of(perturb: Perturb, geometry: Geometry, weights: "Weights") -> list[Kind]:
    """Return the kind of each trainable parameter, and check that `perturb` selects some."""
    if perturb is None and geometry.eta is None:
        return [Kind.PLAIN] * len(weights.parameters)
    names = weights.names
    all_kinds = [geometry.kind(name) for name in names]
    if perturb is None:
        return all_kinds
    if perturb == "norms":
        climbs = weights.are_norms
    else:
        climbs = [perturb(*pair) for pair in zip(names, weights.parameters, strict=True)]
    if any(climbs):
        return [
            kind if climb else Kind.FIXED for kind, climb in zip(all_kinds, climbs, strict=True)
        ]
    if perturb == "norms":
        raise InvalidValueError(
            'perturb="norms" must find a trainable parameter of a normalisation layer, got none '
            f"among {len(names)}. If they are frozen, as with LoRA, unfreeze them, or leave "
            "perturb out to perturb all trainable parameters."
        )
    raise InvalidValueError(
        "perturb must select a trainable parameter, got False for all of them. The first name is "
        f"{names[0]!r}; leave perturb out to perturb all."
    )
