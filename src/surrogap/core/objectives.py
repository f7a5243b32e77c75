"""The objectives: Vanilla, SAM, GSAM, ASAM, GapPenalty and MomentumSAM, each composed of parts.

`Objective` documents the arguments that the two-pass objectives share: `perturb`, `scope`, `memory`
and `eps`.
"""

from typing import Literal, TypedDict, Unpack, final

from torch import nn
from torch.optim import Optimizer

from surrogap.checks import number
from surrogap.core.along import Gradient, Momentum
from surrogap.core.arithmetic import Memory
from surrogap.core.catalog import DEFAULT_ALPHA, DEFAULT_RHO
from surrogap.core.combine import Penalty, PerturbedGradient, SurrogateGap
from surrogap.core.geometry import Geometry, Perturb
from surrogap.core.objective import Objective, part_setting
from surrogap.core.replicas import Scope
from surrogap.core.rho import Schedule


class Shared(TypedDict, total=False):
    """The keyword arguments that two-pass objectives share; `Objective` documents them."""

    perturb: Perturb
    scope: Scope
    memory: Memory
    eps: float


@final
class Vanilla(Objective):
    """The plain gradient, `d = g`: one pass, as a baseline.

    Args:
        model: The model to train.

    >>> import torch
    >>> model = nn.Linear(3, 1)
    >>> report = Vanilla(model).backward(lambda: model(torch.ones(2, 3)).square().mean())
    >>> bool(report.gap.isnan())
    True
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)


@final
class SAM(Objective):
    """Sharpness-aware minimization (Foret et al. 2021): minimise the perturbed loss, `d = g_p`.

    With `perturb="norms"` it perturbs normalisation layers only (SAM-ON, Mueller et al. 2023). The
    first pass is then cheaper, and `rho` should be larger: 0.5 to 2.

    Args:
        model: The model to train.
        rho: The radius: a number or a schedule from `surrogap.rho`.
        shared: `perturb`, `scope`, `memory` and `eps`; see `Objective`, which also lists errors.

    >>> import torch
    >>> model = nn.Linear(3, 1)
    >>> report = SAM(model, rho=0.1).backward(lambda: model(torch.ones(2, 3)).square().mean())
    >>> bool(report.perturbed_loss > report.loss)
    True
    """

    def __init__(
        self, model: nn.Module, *, rho: float | Schedule = DEFAULT_RHO, **shared: Unpack[Shared]
    ) -> None:
        super().__init__(model, rho=rho, along=Gradient(), combine=PerturbedGradient(), **shared)


@final
class GSAM(Objective):
    """GSAM (Zhuang et al. 2022): minimise the perturbed loss and the surrogate gap `h = f_p - f`.

    `minimize="perturbed"`, min(f_p, h): `d = g_p - alpha * g_perp`, where `g_perp` is the component
    of `g` orthogonal to `g_p`. To first order, ascending along `g_perp` lowers the gap without
    changing `f_p` (section 4.2).

    `minimize="plain"`, min(f, h): `d = g + alpha * g_p_perp`, where `g_p_perp` is the component of
    `g_p` orthogonal to `g` (the paper's ablation "min(f_p, h) vs. min(f, h)").

    Args:
        model: The model to train.
        rho: The radius: a number or a schedule from `surrogap.rho`.
        alpha: The weight of the gap. 0 gives SAM, or the plain gradient for "plain".
        minimize: The two losses to minimise, "perturbed" or "plain"; see above.
        shared: `perturb`, `scope`, `memory` and `eps`; see `Objective`, which also lists errors.

    >>> import torch
    >>> model = nn.Linear(3, 1)
    >>> objective = GSAM(model, rho=0.1, alpha=0.1)
    >>> objective
    GSAM(rho=0.1, alpha=0.1)
    >>> report = objective.backward(lambda: model(torch.ones(2, 3)).square().mean())
    >>> bool(report.gap > 0)
    True
    """

    alpha = part_setting("combine", "alpha")
    minimize = part_setting("combine", "minimize")

    def __init__(
        self,
        model: nn.Module,
        *,
        rho: float | Schedule = DEFAULT_RHO,
        alpha: float = DEFAULT_ALPHA,
        minimize: Literal["perturbed", "plain"] = "perturbed",
        **shared: Unpack[Shared],
    ) -> None:
        combine = SurrogateGap(alpha, minimize)
        super().__init__(model, rho=rho, along=Gradient(), combine=combine, **shared)


@final
class ASAM(Objective):
    """SAM in a ball that adapts to the weights (Kwon et al. 2021); with `alpha`, "ASAM + ascent".

    `delta = rho * T^2 g / (||T g|| + eps)`, where `T = |w| + eta` on every parameter except biases,
    which have `T = 1`. Its `rho` is not on SAM's scale. The authors' code scales only
    parameters whose names contain "weight", so position embeddings and class tokens have `T = 1`
    there.

    Args:
        model: The model to train.
        rho: The radius: a number or a schedule from `surrogap.rho`.
        eta: Added to the absolute values of the weights.
        alpha: The weight of the gap, as in GSAM: `d = g_p - alpha * g_perp`. 0 gives ASAM itself.
        shared: `perturb`, `scope`, `memory` and `eps`; see `Objective`, which also lists errors.

    >>> import torch
    >>> model = nn.Linear(3, 1)
    >>> report = ASAM(model, rho=0.5).backward(lambda: model(torch.ones(2, 3)).square().mean())
    >>> bool(report.gap > 0)
    True
    """

    alpha = part_setting("combine", "alpha")

    def __init__(
        self,
        model: nn.Module,
        *,
        rho: float | Schedule = 0.5,
        eta: float = 0.01,
        alpha: float = 0.0,
        **shared: Unpack[Shared],
    ) -> None:
        geometry = Geometry(number("eta", eta, remedy="Pass a non-negative number, such as 0.01."))
        combine = SurrogateGap(alpha)
        super().__init__(
            model, rho=rho, along=Gradient(), geometry=geometry, combine=combine, **shared
        )


@final
class GapPenalty(Objective):
    """The paper's baseline `f_p + lam * h`: `d = g_p + lam * (g_p - g)` (section 4.1).

    Unlike GSAM, lowering `h` this way may raise `f_p`.

    Args:
        model: The model to train.
        rho: The radius: a number or a schedule from `surrogap.rho`.
        lam: The weight of the gap. 0 gives SAM.
        shared: `perturb`, `scope`, `memory` and `eps`; see `Objective`, which also lists errors.

    >>> import torch
    >>> model = nn.Linear(3, 1)
    >>> objective = GapPenalty(model, rho=0.1, lam=0.1)
    >>> report = objective.backward(lambda: model(torch.ones(2, 3)).square().mean())
    >>> bool(report.gap > 0)
    True
    """

    lam = part_setting("combine", "lam")

    def __init__(
        self,
        model: nn.Module,
        *,
        rho: float | Schedule = DEFAULT_RHO,
        lam: float = 0.1,
        **shared: Unpack[Shared],
    ) -> None:
        super().__init__(model, rho=rho, along=Gradient(), combine=Penalty(lam), **shared)


@final
class MomentumSAM(Objective):
    """Momentum-SAM (Becker et al. 2024): SAM at the cost of one pass, perturbed along the momentum.

    The direction is the gradient at `w - rho * v / (||v|| + eps)`, where `v` is the momentum: SGD's
    `momentum_buffer`, or `exp_avg` of the Adam family. So the ascent step looks ahead along the
    optimizer's next update. The norm is over all parameter groups. A parameter without momentum is
    not perturbed; if none has momentum, as before the first step, the direction is the plain
    gradient. f(w) is not computed, so `report.loss` and `report.gap` are NaN, and BatchNorm's
    statistics are those of the perturbed weights. Between steps the weights are `w`, as for the
    other objectives.

    Args:
        model: The model to train.
        optimizer: The optimizer that trains the model. Its momentum is read, not changed. If
            several optimizers train the model, as often with Muon, pass an object whose
            `param_groups` and `state` contain those of all of them.
        rho: The radius: a number or a schedule from `surrogap.rho`.
        perturb: The parameters to perturb; see `Objective`.
        eps: Added to the norm before dividing by it.

    Raises:
        TypeError: `optimizer` is not a torch optimizer, or is a `ZeroRedundancyOptimizer`, which
            shards the momentum over processes.
        ValueError: `optimizer` has no momentum, or has `maximize=True`. From `backward`: it keeps
            its momentum under another name, or trains another model. See also `Objective`.

    >>> import torch
    >>> model = nn.Linear(3, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> objective = MomentumSAM(model, optimizer, rho=0.5)
    >>> report = objective.backward(lambda: model(torch.ones(2, 3)).square().mean())
    >>> bool(report.loss.isnan()), bool(report.perturbed_loss.isnan())
    (True, False)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        rho: float | Schedule = 1.0,
        perturb: Perturb = None,
        eps: float = 1e-12,
    ) -> None:
        along = Momentum(optimizer)
        super().__init__(model, rho=rho, along=along, perturb=perturb, eps=eps)
